"""The inputs of a Recipe's slots, the requirements of a recipe, and the checks of its slots.

A slot calls its function with some arrays by position and with the entries of the slot's context
that the function names. The signatures of a recipe thus define its requirements, and a function
with a parameter that its slot does not provide raises an error when the recipe is created.
"""

import inspect
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm import corrections
from jaxrl_llm.core import Transform, accepted, checks, functions_of, parts_of, traits_of
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import (
    GRADED_BY_RUN,
    collector_parts,
)
from jaxrl_llm.diffusion import Likelihood
from jaxrl_llm.recipes.batch import Batch
from jaxrl_llm.recipes.inputs import EXTRAS, shaped_extras
from jaxrl_llm.recipes.records import name_of

# What `prepare` offers to its slots, and `loss` to the surrogate and the regularizers, by keyword;
# the batch's extras and what the recipe computes come on top.
PREPARE_CONTEXT = (
    "rewards",
    "where",
    "mask",
    "tokens",
    "prompt_tokens",
    "prompt_mask",
    "old_logp",
    "behavior_logp",
    "ref_logp",
    "reward_components",
)
PREPARE_ONLY = ("key", "last_kl", "response_mask")
LOSS_CONTEXT = (
    "logp",
    "old_logp",
    "behavior_logp",
    "ref_logp",
    "entropy",
    "mask",
    "where",
    "rewards",
    "advantages",
)
# Entries that depend on the policy: its numbers before this update, or the KL of the previous one.
_OF_POLICY = frozenset({"old_logp", "behavior_logp", "ref_logp", "old_entropy", "last_kl"})
# What `learn` of a Transform is offered, after the update.
LEARN_CONTEXT = (*PREPARE_CONTEXT, "advantages")
# Inputs that cost a pass of a model, or that only some samplers return. Where a batch is prepared,
# old_logp is one of them; in the loss, the policy being trained replaces it.
_COSTLY = frozenset({"ref_logp", "behavior_logp", "entropy", "reward_components"})
_COSTLY_TO_PREPARE = _COSTLY | {"old_logp"}

# Where the numbers of the slot `computed` come from, in the order in which a step computes them.
SOURCES = (
    "responses",
    "old_policy",
    "reference",
    "teacher",
    "last_visit",
    "controller",
    "optimizer",
    "batch",
    "update",
    "policy",
)
# Those that are statistics over the vocabulary, computed before the batch is prepared; and all that
# the train step computes by then.
STATISTICS = ("old_policy", "reference", "teacher")
BEFORE_PREPARE = (*STATISTICS, "last_visit")
# And those that a batch may bring instead.
COMPUTED_BEFORE = ("responses", *BEFORE_PREPARE, "optimizer")
# What a statistic of the policy names to read all of the teacher's logits.
TEACHER_LOGITS = "teacher_logits"
# What the train step multiplies the optimizer's update by; no function reads it.
UPDATE_SCALE = "update_scale"
# What the loop makes the prompts of a teacher of; no function reads it.
TEACHER_TEXTS = "teacher_texts"
# And what it makes the reference answers of, whose log-probabilities the train step computes.
ANSWER_TEXTS = "answer_texts"


class Computed(NamedTuple):
    """A number that a method needs beyond the batch, under the name by which functions read it.

    Attributes:
      name: The name in the context of every function that is called later.
      function: The function that computes it; see ``source``.
      source: One of

        - ``"responses"``: ``function(texts, **context)`` on the host, before the batch goes to the
          device: of P lists of G responses as text, an array with leading axis P. It may also name
          ``rewards`` and ``where`` ``[P, G]``, ``prompts`` (P texts), ``metadata`` (P mappings),
          ``messages`` (P lists of G: what a collector sent in place of the prompt, or None) and the
          details of the reward, P lists of G each, such as ``feedback``. The name
          ``"teacher_texts"`` is for P lists of G messages for the teacher, None for a response
          without one: the loop turns them into ``has_teacher`` and the teacher's prompts. The name
          ``"answer_texts"`` is for P pairs of texts, the text before a reference answer and the
          answer: the train step turns them into ``answer_logp``. A method ``check(metadata)`` of
          the function is called with that of every prompt before the run, and raises ValueError for
          one that the function cannot read. With ``tasks``, names of tasks, and
          ``task_of(metadata)``, the place of a prompt's task among them, the run has metrics of
          each task, and requires a prompt of each.
        - ``"controller"``: a Transform ``rewards [P, G] -> scalar``, a coefficient with a state; or
          a coefficient per token, ``[P, G, T]``.
        - ``"optimizer"``: a rule on the optimizer step of each single token, for the selection:
          ``function(state, hidden [N, D], logits [N, V], targets [N], *, advantages, mask,
          learning_rate) -> (values [N, ...], sums)`` of the policy at the start of the step, in
          chunks of tokens. Their sums are added to ``zeros(V, D)``; ``init(V, D)`` is the first
          state, which ``learn(state, sums)`` updates once per batch; ``reads_rate`` is whether it
          reads the learning rate of the update.
        - ``"batch"``: ``function(advantages, **context)``, an array with leading axis P or a
          scalar, computed on the full batch after the advantages. The name ``"update_scale"``,
          here or from ``"update"``, is a scalar by which the train step multiplies the optimizer's
          update; with 0 the step is not made.
        - ``"update"``: ``function(logp, old_logp, mask)``, an array with leading axis P or a
          scalar, of the policy before each optimizer step and all its rows, without a gradient.
          Before the first step of a batch the two policies are equal.
        - ``"policy"``: a vocabulary statistic ``function(logits [N, V], targets [N]) -> [N, ...]``
          of the policy being trained, with the extras that it names, row by row; computed in chunks
          of tokens and differentiated.
        - ``"old_policy"``: the same of the policy at the start of the step, without a gradient.
        - ``"reference"``: the same of the reference model.
        - ``"teacher"``: the same of the teacher: of another model; or of the policy (or
          ``Recipe.reference``) after the extras ``teacher_prompt_tokens`` instead of the prompt.
          A statistic of the policy that names ``teacher_logits`` gets the teacher's logits.
        - ``"last_visit"``: a memory of responses, see ``advantages.last_visit``, with ``init()``,
          ``recall(state, **fields)`` and ``update(logp, state, recalled)``, an array ``[P]``, where
          ``logp`` are the log-probabilities of the recalled responses to the batch's prompts under
          the policy at the start of the step.
    """

    name: str
    function: Any
    source: str


# What a denoiser makes of each draw of a likelihood, as the surrogate reads it.
((DRAW_LOGP, _),) = Likelihood.statistics
# Names that mean something else already.
_RESERVED = frozenset({*PREPARE_CONTEXT, *PREPARE_ONLY, *LOSS_CONTEXT, "selected_tokens"})
# Numbers of the reference that a denoising model has besides ref_logp.
_OF_REFERENCE = frozenset({"ref_draw_logp", "ref_step_mean", "ref_velocity"})


# What a slot hands over


class Reader(NamedTuple):
    """A function in a slot, and the names of its positional arguments.

    ``offered`` is the slot whose entries it may read by name, for a function of a part: "prepared"
    for all that is known when the batch is prepared, or "weights".
    """

    slot: str
    function: Callable
    positional: tuple[str, ...]
    offered: str = ""


# Positional arguments by source; statistics of the vocabulary take (logits, targets).
_PLACES = {"batch": ("advantages",), "update": ("logp", "old_logp", "mask")}

# What the plain functions get, in this order and by position.
POSITIONAL = {
    "surrogate": ("logp", "old_logp", "advantages", "mask"),
    "weights": ("mask",),
    "correction": ("old_logp", "behavior_logp", "mask"),
    "selection": ("advantages", "mask"),
}


def context(batch: Batch, names: tuple[str, ...]) -> dict[str, Any]:
    """Fields and extras of a batch by name, for functions that take arguments by name."""
    fields = {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    return {**batch.extras, **fields}


def transform_readers(slot: str, transform: Transform | None) -> list[Reader]:
    """The functions inside a transform; for an opaque transform, its update."""
    if transform is None:
        return []
    if (parts := parts_of(transform)) is not None:
        return [reader for part in parts for reader in transform_readers(slot, part)]
    if functions := functions_of(transform):
        return [Reader(slot, functions[0], ("rewards",))]
    return [Reader(slot, transform.update, ("rewards", "state"))]


def learners(recipe) -> list[Reader]:
    """The ``learn`` functions of Transforms, including parts of a chain."""
    transforms = [recipe.advantage, recipe.curation, *recipe.computed_from("controller").values()]
    parts = [part for t in transforms if t is not None for part in parts_of(t) or (t,)]
    return [Reader("learn", part.learn, ("state",)) for part in parts if part.learn is not None]


def label_of(entry: Computed) -> str:
    """What an error calls an entry."""
    return f"computed {entry.name!r} ({entry.source})"


def readers(recipe) -> tuple[list[Reader], list[Reader]]:
    """The functions that run in or for ``prepare``, and those of the loss and after it."""
    plain = {
        slot: Reader(slot, function, positional)
        for slot, positional in POSITIONAL.items()
        if (function := getattr(recipe, slot)) is not None
    }
    prepare = [r for slot, r in plain.items() if slot != "surrogate"]
    for slot in ("advantage", "curation"):
        prepare += transform_readers(slot, getattr(recipe, slot))
    for entry in recipe.computed:
        if entry.source == "controller":
            prepare += transform_readers(label_of(entry), entry.function)
        elif entry.source == "last_visit":
            prepare.append(Reader(label_of(entry), entry.function.recall, ("state",)))
        elif entry.source not in ("responses", "optimizer"):  # these read no array of the batch
            positional = _PLACES.get(entry.source, ("logits", "targets"))
            prepare.append(Reader(label_of(entry), entry.function, positional))
    prepare += [reader for part in recipe.parts for reader in part.readers()]
    loss = [plain["surrogate"]] + [Reader("regularizer", f, ()) for f in recipe.regularizers]
    return prepare, loss + learners(recipe)


def unfilled(reader: Reader) -> list[inspect.Parameter]:
    """The parameters that a slot does not fill by position."""
    parameters = list(accepted(reader.function).values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    filled = [p for p in parameters if p.kind in kinds][: len(reader.positional)]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p for p in parameters if p not in filled and p.kind not in variable]


def named_by(*readers: Reader) -> set[str]:
    """The entries that functions read by name."""
    return {p.name for reader in readers for p in unfilled(reader)}


# What a recipe requires


class RequiredFields(NamedTuple):
    """Inputs that ``prepare`` requires, and those that ``prepare`` and the loss require."""

    to_prepare: frozenset[str]
    in_all: frozenset[str]


def required_fields(recipe) -> RequiredFields:
    """The inputs that a recipe requires.

    Of the standard inputs, those that a function names; of the extras, those without a default.
    """
    prepare, loss = readers(recipe)
    before_loss = set(recipe.computed_from("controller", "batch", "update"))
    in_loss = before_loss | set(recipe.computed_from("policy"))
    in_loss |= {name for part in recipe.parts for name in part.computed_by_prepare()}
    before = set(recipe.computed_from(*COMPUTED_BEFORE))
    known = _entries(recipe) | before

    def names(functions: list[Reader], standard: frozenset[str], provided: set[str]):
        parameters = [p for reader in functions for p in unfilled(reader)]
        required = {p.name for p in parameters if p.default is p.empty}
        return (standard & {p.name for p in parameters}) | ((known & required) - provided)

    first = frozenset(names(prepare, _COSTLY_TO_PREPARE, before_loss))
    if recipe.correction is not None:
        first |= {"old_logp", "behavior_logp"}
    every = first | frozenset(names(loss, _COSTLY & {*LOSS_CONTEXT}, in_loss))
    for part in recipe.parts:
        first |= part.required(recipe, every)
    return RequiredFields(first, first | every)


def _entries(recipe) -> set[str]:
    """The names of all extras of a batch: known ones, inputs of its own, and those of its parts."""
    of_parts = {name for part in recipe.parts for name in part.reserved}
    return {*EXTRAS, *recipe.inputs, *of_parts}


def policy_controllers(recipe) -> frozenset[str]:
    """The names of the controllers that read what the policy says of a batch, or its update."""
    of_policy = _OF_POLICY | recipe.computed_from("old_policy").keys()
    return frozenset(
        entry.name
        for entry in recipe.computed
        if entry.source == "controller"
        for reader in transform_readers(label_of(entry), entry.function)
        if of_policy & {parameter.name for parameter in unfilled(reader)}
    )


def compares_old(recipe) -> bool:
    """Whether several optimizer steps on a batch are compared with the policy before the first.

    They are, at least for metrics, unless the surrogate reuses samples without a ratio and no other
    function reads ``old_logp``, as a regularizer with ``**context`` may.
    """
    surrogate = traits_of(recipe.surrogate)
    if surrogate.has_ratio or not surrogate.reuses_samples:
        return True
    prepare, loss = readers(recipe)
    others = [reader for reader in (*prepare, *loss) if reader.slot != "surrogate"]
    if any("old_logp" in (*r.positional, *(p.name for p in unfilled(r))) for r in others):
        return True
    every = [p for term in recipe.regularizers for p in accepted(term).values()]
    return any(p.kind is p.VAR_KEYWORD for p in every)


def moot_if_equal(recipe, name: str) -> bool:
    """Whether an input has no effect in groups of equal rewards, as only the advantage reads it."""
    every = [reader for phase in readers(recipe) for reader in phase]
    slots = {r.slot for r in every if name in {p.name for p in unfilled(r)}}
    return slots == {"advantage"} and traits_of(recipe.advantage.update).zero_if_equal


def uses_reference(recipe) -> bool:
    """Whether a function reads log-probabilities or statistics of the reference."""
    names = required_fields(recipe).in_all & {"ref_logp", *_OF_REFERENCE}
    return bool(names or recipe.computed_from("reference"))


def reads_teacher_logits(recipe) -> bool:
    """Whether a statistic of the policy names the logits of the teacher."""
    statistics = recipe.computed_from("policy").values()
    return any(TEACHER_LOGITS in accepted(function) for function in statistics)


def prepare_names(recipe, name: str) -> bool:
    """Whether a function that runs before the loss names this entry of its context."""
    return any(p.name == name for r in readers(recipe)[0] for p in unfilled(r))


def corrects_behavior(recipe) -> bool:
    """Whether something weighs tokens by the policy that sampled them.

    What only drops tokens by it or scales the update by it leaves the others as they are.
    """
    composed = _composed(recipe.correction)
    if recipe.correction is not None and (composed is None or composed.get("weights") is not None):
        return True
    prepare, loss = readers(recipe)
    scales = recipe.computed_from("batch").get(UPDATE_SCALE)
    weighing = (
        reader
        for reader in (*prepare, *loss)
        if reader.slot not in ("selection", "curation") and reader.function is not scales
    )
    return any(p.name == "behavior_logp" for reader in weighing for p in unfilled(reader))


def reward_range(advantage: Transform) -> tuple[float, float]:
    """The rewards that an advantage is defined for (see ``core.traits(reward_range=...)``).

    Only the first part of a chain gets the rewards unchanged; it may map them to the range of the
    next part.
    """
    parts = parts_of(advantage)
    if parts is not None:
        return reward_range(parts[0]) if parts else (-math.inf, math.inf)
    return traits_of(advantage.update).reward_range


def statistic_shapes(recipe, batch, source: str = "policy") -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the vocabulary statistics from one source, for a batch of arrays or of shapes."""
    p, g, t = batch.tokens.shape
    extras = dict(batch.extras)

    def rows(function):
        names = [q.name for q in unfilled(Reader("", function, ("logits", "targets")))]
        arrays = {n: extras[n] for n in names if n in extras}
        shapes = {n: jax.ShapeDtypeStruct((2, *x.shape[3:]), x.dtype) for n, x in arrays.items()}
        return shapes | ({TEACHER_LOGITS: logits} if TEACHER_LOGITS in names else {})

    logits = jax.ShapeDtypeStruct((2, 7), "float32")
    targets = jax.ShapeDtypeStruct((2,), "int32")
    shapes = {}
    for name, function in recipe.computed_from(source).items():
        row = jax.eval_shape(function, logits, targets, **rows(function))
        shapes[name] = jax.ShapeDtypeStruct((p, g, t, *row.shape[1:]), row.dtype)
    return shapes


# Checks


def check_output(recipe: str, what: str, value, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless a slot's result has one of the shapes; nothing is broadcast."""
    if jnp.shape(value) not in shapes:
        raise ValueError(
            f"Recipe {recipe!r}: {what} must have shape {' or '.join(map(str, shapes))}; "
            f"got {jnp.shape(value)}."
        )


def check_recipe(recipe) -> None:
    """Raises TypeError or ValueError unless the slots are valid and compatible."""
    _check_kinds(recipe)
    # One name for two things would leave one of them without effect.
    taken = dict.fromkeys(_RESERVED, "the batch or the step")
    for part in recipe.parts:
        taken |= dict.fromkeys(part.reserved, part.title)
    # A batch may hold what would otherwise be computed before it is prepared.
    replaceable = set(recipe.computed_from(*COMPUTED_BEFORE))
    entries = [(f"computed ({entry.source})", entry.name) for entry in recipe.computed]
    for slot, name in [*entries, *(("inputs", name) for name in recipe.inputs)]:
        before = taken.get(name)
        if before is not None and (slot != "inputs" or name not in replaceable):
            raise ValueError(
                f"Recipe {recipe.name!r}: {slot} has the name {name!r}, which already comes from "
                f"{before}; choose another name."
            )
        taken[name] = slot
    _check_functions(recipe)
    _check_meaning(recipe)


def _check_kinds(recipe) -> None:
    """Raises TypeError unless each slot holds the kind of thing it should."""
    name = f"Recipe {recipe.name!r}"
    if not isinstance(recipe.name, str) or not recipe.name:
        raise TypeError(f"Recipe: name must be a string that is not empty; got {recipe.name!r}.")
    for slot in ("advantage", "curation"):
        value = getattr(recipe, slot)
        if not (isinstance(value, Transform) or (slot == "curation" and value is None)):
            raise TypeError(
                f"{name}: {slot} must be a Transform; got {value!r}. "
                "Lift a function with jaxrl_llm.stateless(function, **options)."
            )
    for slot in ("surrogate", "weights", "correction", "selection"):
        value = getattr(recipe, slot)
        optional = slot not in ("surrogate", "weights")
        if not (callable(value) or (optional and value is None)):
            raise TypeError(f"{name}: {slot} must be a function; got {value!r}.")
    if not isinstance(recipe.regularizers, tuple) or not all(map(callable, recipe.regularizers)):
        raise TypeError(
            f"{name}: regularizers must be a tuple of functions, such as (term,); "
            f"got {recipe.regularizers!r}."
        )
    check_collector(name, recipe.collector)
    if not isinstance(recipe.inputs, tuple) or not all(isinstance(x, str) for x in recipe.inputs):
        raise TypeError(f"{name}: inputs must be a tuple of names; got {recipe.inputs!r}.")
    for field in ("epochs", "minibatches"):
        value = getattr(recipe, field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: {field} must be an integer; got {value!r}.")
        checks.check_positive(name, **{field: value})
    computed = recipe.computed
    if not isinstance(computed, tuple) or not all(isinstance(x, Computed) for x in computed):
        raise TypeError(
            f"{name}: computed must be a tuple of Computed(name, function, source); "
            f"got {computed!r}."
        )
    for entry in computed:
        _check_entry(name, entry)


def _check_entry(name: str, entry: Computed) -> None:
    """Raises TypeError unless an entry of ``computed`` holds what its source needs."""
    if not isinstance(entry.name, str):
        raise TypeError(f"{name}: the name of {entry!r} must be a string.")
    checks.check_option(f"{name}: computed {entry.name!r}", "source", entry.source, SOURCES)
    what, function = f"{name}: {label_of(entry)}", entry.function
    if entry.source == "controller":
        if not isinstance(function, Transform):
            raise TypeError(
                f"{what} must be a Transform; got {function!r}. "
                "Lift a function with jaxrl_llm.stateless(function, **options)."
            )
    elif entry.source == "last_visit":
        if not all(callable(getattr(function, x, None)) for x in ("init", "recall", "update")):
            raise TypeError(
                f"{what} must have the functions init, recall and update, as "
                f"advantages.last_visit has; got {function!r}."
            )
    elif not callable(function):
        raise TypeError(f"{what} must be a function; got {function!r}.")


def check_collector(name: str, collector: Any) -> None:
    """Raises TypeError for an argument that is neither None nor a collector.

    Raises ValueError if one of its inner collectors would have to follow the training.
    """
    functions = ("init", "propose", "observe")
    if not (collector is None or all(callable(getattr(collector, f, None)) for f in functions)):
        raise TypeError(
            f"{name}: collector must have the functions init, propose and observe, as "
            f"curation.refill has; got {collector!r}."
        )
    for part in collector_parts(collector):
        if part is not collector and getattr(part, "follows", None) is not None:
            raise ValueError(
                f"{name}: {part!r} follows what training learns, so it cannot be a part of another "
                f"collector; got {collector!r}."
            )


def check_arguments(recipe: str, reader: Reader, offered: Collection[str] = frozenset()) -> None:
    """Raises ValueError if a function requires what its slot does not have, or takes too little."""
    what = f"Recipe {recipe!r}: {reader.slot} {name_of(reader.function)}"
    parameters = list(accepted(reader.function).values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in parameters if p.kind in kinds]
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(places) < len(reader.positional) and not open_ended:
        raise ValueError(
            f"{what} takes {len(places)} arrays by position; its slot passes "
            f"{len(reader.positional)}: {', '.join(reader.positional)}."
        )
    if reader.positional == ("rewards",) and places and places[0].name == "mask":
        raise ValueError(
            f"{what} names its first array mask, but its slot passes rewards first. What decides "
            "about tokens belongs into the slot selection, whose functions take advantages and "
            "mask; another function takes the mask behind its first array, by this name."
        )
    for parameter in unfilled(reader):
        if parameter.default is inspect.Parameter.empty and parameter.name not in offered:
            names = set(offered)
            known = [*reader.positional, *sorted(names - set(EXTRAS) - set(reader.positional))]
            hint = "Options are fixed with jaxrl_llm.bind"
            if set(EXTRAS) & names:
                which = "" if set(EXTRAS) <= names else " that have a value a token"
                known.append(f"and the extras of recipes.inputs.EXTRAS{which}")
                hint += "; another array that the batch holds in extras is named in "
                hint += "Recipe(inputs=...)"
            raise ValueError(
                f"{what} needs {parameter.name!r}, which its slot does not have; it has "
                f"{', '.join(known)}. {hint}."
            )


def _offers(recipe) -> dict[str, set[str]]:
    """The names that each slot offers to its functions by keyword."""
    before = set(recipe.computed_from(*COMPUTED_BEFORE))
    extras = _entries(recipe) | before
    known = {*PREPARE_CONTEXT, *PREPARE_ONLY} | extras
    offers = {"correction": set()}
    by_source = {s: [e for e in recipe.computed if e.source == s] for s in SOURCES}
    for entry in by_source["controller"]:  # each sees those before it
        offers[label_of(entry)] = set(known)
        known.add(entry.name)
    offers |= {slot: set(known) for slot in ("curation", "advantage", "selection")}
    for entry in by_source["batch"]:
        offers[label_of(entry)] = set(known)
        known.add(entry.name)
    offers |= {"prepared": known, "weights": known - {*PREPARE_ONLY}}
    offers |= {label_of(entry): set() for entry in by_source["update"]}
    fields = {"tokens", "mask", "where", "prompt_ids"}
    offers |= {label_of(entry): fields for entry in by_source["last_visit"]}
    # Row by row, so only what has a value a token.
    of_tokens = {name for name, x in EXTRAS.items() if x.axes.startswith("PGT")}
    of_tokens |= set(recipe.inputs)
    old_policy, batch = (set(recipe.computed_from(source)) for source in ("old_policy", "batch"))
    rows = {
        "old_policy": of_tokens,
        "reference": of_tokens | old_policy,
        "teacher": of_tokens | old_policy,
        "policy": of_tokens | before | batch | {TEACHER_LOGITS},
    }
    offers |= {label_of(entry): rows[source] for source in rows for entry in by_source[source]}
    loss = (
        extras
        | set(LOSS_CONTEXT)
        | set(recipe.computed_from("controller", "batch", "update", "policy"))
    )
    loss |= {name for part in recipe.parts for name in part.statistics()}
    learn = (known | loss) - {*PREPARE_ONLY, "entropy"}
    return offers | {"surrogate": loss, "regularizer": loss, "learn": learn}


def _check_functions(recipe) -> None:
    """Raises ValueError unless each function can be called as its slot calls it.

    Also if something is computed under a name that none reads. A user's function that takes
    ``**context`` may read anything; controllers do not count, since they all take it.
    """
    offers, called = _offers(recipe), [r for phase in readers(recipe) for r in phase]
    for reader in called:
        check_arguments(recipe.name, reader, offers[reader.offered or reader.slot])
    controllers = {label_of(entry) for entry in recipe.computed if entry.source == "controller"}
    others = [accepted(r.function).values() for r in called if r.slot not in controllers]
    if any(p.kind is p.VAR_KEYWORD for parameters in others for p in parameters):
        return
    read = {p.name for r in called for p in unfilled(r)}
    read |= {UPDATE_SCALE} & set(recipe.computed_from("batch", "update"))
    if recipe.has_teacher:
        read.add(TEACHER_TEXTS)
    if "answer_logp" in read:
        read.add(ANSWER_TEXTS)
    for entry in recipe.computed:
        if entry.name not in read:
            raise ValueError(
                f"Recipe {recipe.name!r}: no function reads {label_of(entry)}; name it in one, or "
                f"connect it with jaxrl_llm.connect(function, parameter={entry.name!r})."
            )


def _check_meaning(recipe) -> None:
    """Raises ValueError if two slots together would mean what neither does.

    Such as a function of tokens behind a surrogate of sequences.
    """
    for part in recipe.parts:
        part.check(recipe)
    if recipe.correction is not None:
        _check_correction(recipe)
    ungraded = needs_of(recipe.collector).lacks_components
    if ungraded and "reward_components" in recipe.required_fields:
        raise ValueError(
            f"Recipe {recipe.name!r} reads reward_components, but the run's reward does not grade "
            f"all responses of {recipe.collector!r}. {GRADED_BY_RUN}"
        )
    if recipe.head:
        _check_head(recipe)
    if not any("values" in part.reserved for part in recipe.parts):
        functions = [r.function for r in readers(recipe)[0]]
        if any("values" in accepted(f) for f in functions) and "values" not in recipe.inputs:
            raise ValueError(
                f"Recipe {recipe.name!r}: the advantage reads values, and there is no critic; "
                "give Recipe(critic=Critic(...)), or inputs=('values',) if the batch holds them."
            )
    if traits_of(recipe.surrogate).level == "sequence":
        _check_levels(recipe)


def _check_correction(recipe) -> None:
    """Raises ValueError if a correction corrects nothing, or is the second one."""
    what = f"Recipe {recipe.name!r}: surrogate {name_of(recipe.surrogate)}"
    correction = f"correction {name_of(recipe.correction)}"
    reader = Reader("surrogate", recipe.surrogate, POSITIONAL["surrogate"])
    if "behavior_logp" in {p.name for p in unfilled(reader)}:
        raise ValueError(
            f"{what} already weighs by behavior_logp, so {correction} would count the same "
            "mismatch twice; leave one of them out."
        )
    if not traits_of(recipe.surrogate).takes_correction:
        raise ValueError(
            f"{what} is not a mean over samples, so {correction} has nothing to correct; leave it "
            "out."
        )
    composed = _composed(recipe.correction)
    if composed is not None and composed.get("weights") is None and not composed.get("reject"):
        raise ValueError(
            f"Recipe {recipe.name!r}: {correction} has no effect without weights or a rule in "
            "reject."
        )


def _composed(correction: Callable | None) -> dict[str, Any] | None:
    """The options of weights and rules together; None for any other correction."""
    known = (corrections.rollout_correction, corrections.sequence_rollout_correction)
    if getattr(correction, "function", correction) not in known:
        return None
    return dict(getattr(correction, "options", ()))


def _check_levels(recipe) -> None:
    """Raises ValueError if a function of tokens is combined with a surrogate of sequences."""
    name, surrogate = f"Recipe {recipe.name!r}", name_of(recipe.surrogate)
    what = f"{name}: surrogate {surrogate} is one value per sequence"
    if traits_of(recipe.weights).level != "sequence":
        raise ValueError(
            f"{what}, repeated over its tokens, and weights {name_of(recipe.weights)} would count "
            "it once per token, so long sequences more; use aggregate.sequence_mean, or mark a "
            "weighting of sequences with core.traits(level='sequence')."
        )
    if recipe.correction is not None and traits_of(recipe.correction).level != "sequence":
        raise ValueError(
            f"{what}, and correction {name_of(recipe.correction)} weighs its tokens one by one; "
            "mark a correction with one weight a sequence with core.traits(level='sequence')."
        )
    if traits_of(recipe.surrogate).takes_token_advantages:
        return
    for reader in transform_readers("advantage", recipe.advantage):
        if traits_of(reader.function).token_values:
            raise ValueError(
                f"{what}, and advantage {name_of(reader.function)} gives each token a separate "
                "value, which it would have to average away; take a token-level surrogate."
            )


def _check_head(recipe) -> None:
    """Raises ValueError if what trains a head samples, or reads what only a policy has."""
    what = f"Recipe {recipe.name!r}: surrogate {name_of(recipe.surrogate)} trains a reward model"
    if not needs_of(recipe.collector).offline:
        raise ValueError(
            f"{what}, which writes no responses: the collector must take them from the data, as "
            f"curation.offline_pairs() does; got {recipe.collector!r}."
        )
    of_policy = (*BEFORE_PREPARE, "optimizer", "policy", "update")
    for slot, value in (
        *((part.title, part) for part in recipe.parts),
        ("regularizers", recipe.regularizers),
        ("a reference", recipe.uses_reference),
        ("numbers computed from a policy", set(recipe.computed_from(*of_policy))),
    ):
        if value:
            raise ValueError(f"{what}, which has no log-probabilities; it cannot have {slot}.")


def validate(recipe):
    """Checks the recipe by a dry run on shapes, which raises for bad options, and returns it.

    Presets call it last. Nothing is computed and no device is used.
    """

    def run(batch, logp):
        key = jax.random.key(0) if recipe.draws else None
        prepared, _ = recipe.prepare(batch, recipe.init(), key=key)
        statistics = {
            name: jnp.zeros(x.shape, x.dtype)
            for name, x in statistic_shapes(recipe, prepared).items()
        }
        if recipe.likelihood is not None:
            for name, axes in recipe.likelihood.statistics:
                statistics[name] = jnp.zeros((*logp.shape, *[2] * axes), jnp.float32)
        return recipe.loss(logp, prepared, entropy=logp, statistics=statistics)

    def shaped(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    logp = shaped(2, 2, 3)
    batch = Batch(
        tokens=shaped(2, 2, 3, dtype="int32"),
        mask=shaped(2, 2, 3, dtype="bool"),
        rewards=shaped(2, 2),
        where=shaped(2, 2, dtype="bool"),
        prompt_tokens=shaped(2, 1, dtype="int32"),
        prompt_mask=shaped(2, 1, dtype="bool"),
        old_logp=logp,
        behavior_logp=logp,
        ref_logp=logp,
        extras=shaped_extras(recipe, 2, 2, 3),
    )
    before = set(recipe.computed_from(*COMPUTED_BEFORE)) - {TEACHER_TEXTS, ANSWER_TEXTS}
    unknown = recipe.inputs or before - set(EXTRAS)
    if unknown or "reward_components" in recipe.required_fields:
        return recipe  # the shapes of these are known only with a batch
    for source in STATISTICS:
        statistic_shapes(recipe, batch, source)
    for part in recipe.parts:
        part.dry_run()
    jax.eval_shape(run, batch, logp)
    return recipe
