"""The inputs of a Recipe's slots, the requirements of a recipe, and the checks of its slots.

A slot calls its function with some arrays by position and with the entries of the slot's context
that the function names. The signatures of a recipe thus define its requirements, and a function
with a parameter that its slot does not provide raises an error when the recipe is created.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm import corrections
from jaxrl_llm.core import Transform, accepted, call_with, checks, functions_of, parts_of, traits_of
from jaxrl_llm.curation.collectors.protocol import (
    GRADED_BY_RUN,
    collector_parts,
    declares,
)
from jaxrl_llm.diffusion import FlowLikelihood, Likelihood
from jaxrl_llm.recipes.batch import Batch
from jaxrl_llm.recipes.critic import Critic
from jaxrl_llm.recipes.inputs import EXTRAS, shaped_extras
from jaxrl_llm.recipes.prm import ProcessRewardModel
from jaxrl_llm.recipes.records import name_of
from jaxrl_llm.recipes.subagent import Subagent
from jaxrl_llm.recipes.turn_updates import TurnUpdates
from jaxrl_llm.regularizers import AnchoredReference, EarlierPolicies

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
# What a policy says of a batch before the update, and of the update before.
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
_OF_CRITIC = frozenset({"values", "old_values", "returns", "critic_weights", "critic_places"})


# What a slot hands over


class Reader(NamedTuple):
    """A function in a slot, and the names of its positional arguments."""

    slot: str
    function: Callable
    positional: tuple[str, ...]


# What is computed from these sources gets by position; the others, of the vocabulary, logits.
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


def _label(entry: Computed) -> str:
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
            prepare += transform_readers(_label(entry), entry.function)
        elif entry.source == "last_visit":
            prepare.append(Reader(_label(entry), entry.function.recall, ("state",)))
        elif entry.source not in ("responses", "optimizer"):  # these read no array of the batch
            positional = _PLACES.get(entry.source, ("logits", "targets"))
            prepare.append(Reader(_label(entry), entry.function, positional))
    if recipe.critic is not None:
        prepare.append(Reader("critic's returns", recipe.critic.returns, ("rewards",)))
        prepare.append(Reader("critic's weights", recipe.critic.weights, ("mask",)))
    loss = [plain["surrogate"]] + [Reader("regularizer", f, ()) for f in recipe.regularizers]
    return prepare, loss + learners(recipe)


def unfilled(reader: Reader) -> list[inspect.Parameter]:
    """The parameters that a slot does not fill by position."""
    parameters = list(accepted(reader.function).values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    filled = [p for p in parameters if p.kind in kinds][: len(reader.positional)]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p for p in parameters if p not in filled and p.kind not in variable]


def _loss_of_prm(recipe) -> Reader:
    """The loss of a recipe's process reward model."""
    return Reader("loss of the prm", recipe.prm.loss, ("logp", "old_logp", "mask", "rewards"))


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
    if recipe.critic is not None:
        in_loss |= {"returns"}
    before = set(recipe.computed_from(*COMPUTED_BEFORE))
    known = set(EXTRAS) | set(recipe.inputs) | before

    def names(functions: list[Reader], standard: frozenset[str], provided: set[str]):
        parameters = [p for reader in functions for p in unfilled(reader)]
        required = {p.name for p in parameters if p.default is p.empty}
        return (standard & {p.name for p in parameters}) | ((known & required) - provided)

    first = frozenset(names(prepare, _COSTLY_TO_PREPARE, before_loss))
    if recipe.correction is not None:
        first |= {"old_logp", "behavior_logp"}
    if recipe.critic is not None:
        first |= {"values", "old_values"}
    if recipe.prm is not None:
        first |= {"prm_logp", "old_logp"}
        first |= {"ref_logp"} & {p.name for p in unfilled(_loss_of_prm(recipe))}
    if recipe.turn_updates is not None:
        first |= {"turn_ids", "turn_where"}
    if recipe.text_coef:
        first |= {"texts"}
    if recipe.likelihood is not None:
        first |= set(recipe.likelihood.fields)
    every = first | frozenset(names(loss, _COSTLY & {*LOSS_CONTEXT}, in_loss))
    if recipe.likelihood is not None and recipe.likelihood.passes > 1:
        compared = every & {"old_logp", "ref_logp"}
        compared |= {"old_logp"} if compares_old(recipe) else set()
        first |= (passes := {name.replace("logp", DRAW_LOGP) for name in compared})
        every |= passes
    return RequiredFields(first, every)


def policy_controllers(recipe) -> frozenset[str]:
    """The names of the controllers that read what the policy says of a batch, or its update."""
    of_policy = _OF_POLICY | recipe.computed_from("old_policy").keys()
    return frozenset(
        entry.name
        for entry in recipe.computed
        if entry.source == "controller"
        for reader in transform_readers(_label(entry), entry.function)
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


def of_likelihood(recipe, who: str) -> dict[str, str]:
    """The required extras that hold the results of a likelihood's scorer, by the scorer's names.

    ``who`` is the policy that is scored: "old", "ref" for the reference, or "anchor" for the one
    that a moving reference began with.
    """
    if recipe.likelihood is None:
        return {}
    names = {f"{who}_{name}": name for name, _ in recipe.likelihood.statistics}
    required = required_fields(recipe).in_all
    return {extra: name for extra, name in names.items() if extra in required}


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


def head_shapes(recipe, batch: Batch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes that a critic's functions may return: one value for all heads, or one per head."""
    return batch.mask.shape, (*batch.mask.shape, recipe.critic.heads)


def check_recipe(recipe) -> None:
    """Raises TypeError or ValueError unless the slots are valid and compatible."""
    _check_kinds(recipe)
    # One name for two things would leave one of them without effect.
    taken = dict.fromkeys(_RESERVED, "the batch or the step")
    if recipe.critic is not None:
        taken |= dict.fromkeys(_OF_CRITIC, "the critic")
    if recipe.prm is not None:
        taken |= {"prm_logp": "the process reward model"}
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


# Slots that hold one record: its type, and how an error calls it.
_RECORDS = {
    "turn_updates": (TurnUpdates, "a TurnUpdates"),
    "subagent": (Subagent, "a Subagent"),
    "critic": (Critic, "a Critic"),
    "earlier": (EarlierPolicies, "made by regularizers.earlier_policies"),
    "prm": (ProcessRewardModel, "a ProcessRewardModel"),
    "likelihood": (Likelihood | FlowLikelihood, "a diffusion.Likelihood or FlowLikelihood"),
}


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
    for slot in ("surrogate", "weights", "correction", "selection", "reference"):
        value = getattr(recipe, slot)
        optional = slot not in ("surrogate", "weights")
        if not (callable(value) or (optional and value is None)):
            raise TypeError(f"{name}: {slot} must be a function; got {value!r}.")
    if not isinstance(recipe.regularizers, tuple) or not all(map(callable, recipe.regularizers)):
        raise TypeError(
            f"{name}: regularizers must be a tuple of functions, such as (term,); "
            f"got {recipe.regularizers!r}."
        )
    for slot, (kind, what) in _RECORDS.items():
        value = getattr(recipe, slot)
        if not isinstance(value, kind | None):
            raise TypeError(f"{name}: {slot} must be {what}; got {value!r}.")
    if recipe.prm is not None and recipe.critic is not None:
        raise ValueError(f"{name}: a recipe cannot have both a critic and a process reward model.")
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
    what, function = f"{name}: {_label(entry)}", entry.function
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


def _check_arguments(recipe: str, reader: Reader, offered: set[str]) -> None:
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
            known = [*reader.positional, *sorted(offered - set(EXTRAS) - set(reader.positional))]
            hint = "Options are fixed with jaxrl_llm.bind"
            if set(EXTRAS) & offered:
                which = "" if set(EXTRAS) <= offered else " that have a value a token"
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
    extras = set(EXTRAS) | set(recipe.inputs) | before
    known = {*PREPARE_CONTEXT, *PREPARE_ONLY} | extras
    offers = {"correction": set()}
    by_source = {s: [e for e in recipe.computed if e.source == s] for s in SOURCES}
    for entry in by_source["controller"]:  # each sees those before it
        offers[_label(entry)] = set(known)
        known.add(entry.name)
    offers |= {slot: set(known) for slot in ("curation", "advantage", "selection")}
    for entry in by_source["batch"]:
        offers[_label(entry)] = set(known)
        known.add(entry.name)
    offers["critic's returns"] = known
    offers |= {slot: known - {*PREPARE_ONLY} for slot in ("weights", "critic's weights")}
    offers |= {_label(entry): set() for entry in by_source["update"]}
    fields = {"tokens", "mask", "where", "prompt_ids"}
    offers |= {_label(entry): fields for entry in by_source["last_visit"]}
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
    offers |= {_label(entry): rows[source] for source in rows for entry in by_source[source]}
    loss = (
        extras
        | set(LOSS_CONTEXT)
        | set(recipe.computed_from("controller", "batch", "update", "policy"))
    )
    if recipe.likelihood is not None:
        loss |= {name for name, _ in recipe.likelihood.statistics}
    learn = (known | loss) - {*PREPARE_ONLY, "entropy"}
    return offers | {"surrogate": loss, "regularizer": loss, "learn": learn}


def _check_functions(recipe) -> None:
    """Raises ValueError unless each function can be called as its slot calls it.

    Also if something is computed under a name that none reads. A user's function that takes
    ``**context`` may read anything; controllers do not count, since they all take it.
    """
    offers, called = _offers(recipe), [r for phase in readers(recipe) for r in phase]
    for reader in called:
        _check_arguments(recipe.name, reader, offers[reader.slot])
    if recipe.reference is not None:
        reference = Reader("reference", recipe.reference, ("reference", "params", "step"))
        _check_arguments(recipe.name, reference, {"key"})
    if (critic := recipe.critic) is not None:
        for slot, function, arguments in (
            ("loss", critic.loss, ("values", "old_values", "returns", "mask")),
            ("combine", critic.combine, ("values",)),
        ):
            _check_arguments(recipe.name, Reader(f"critic's {slot}", function, arguments), set())
    if recipe.prm is not None:
        loss = _loss_of_prm(recipe)
        numbers = {"where", "pairs", "rollouts", "ref_logp"}
        _check_arguments(recipe.name, loss, {*EXTRAS, *recipe.inputs, *numbers})
        named = {p.name for p in unfilled(loss)}
        if recipe.reference is not None and "ref_logp" in named:
            raise ValueError(
                f"Recipe {recipe.name!r}: the loss of the prm reads ref_logp, which a moving "
                "reference scores only after the prm's step; leave one of them out."
            )
    controllers = {_label(entry) for entry in recipe.computed if entry.source == "controller"}
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
                f"Recipe {recipe.name!r}: no function reads {_label(entry)}; name it in one, or "
                f"connect it with jaxrl_llm.given(function, parameter={entry.name!r})."
            )


def _check_likelihood(recipe) -> None:
    """Raises ValueError if a recipe with a likelihood reads what only a causal model has."""
    name = f"Recipe {recipe.name!r} has a likelihood of a denoising model, and"
    for slot in ("correction", "critic", "prm", "turn_updates", "subagent"):
        if getattr(recipe, slot) is not None:
            raise ValueError(
                f"{name} a {slot}, which reads tokens from left to right; leave one of them out."
            )
    if recipe.has_teacher:
        raise ValueError(
            f"{name} a teacher, which scores tokens from left to right; leave one of them out."
        )
    causal = {"behavior_logp", "hidden_sq", "hidden_rank", "kl_logp", "kl_ref_logp", "answer_logp"}
    causal |= {"grad_sq_norms"}
    if names := sorted(causal & recipe.required_fields):
        raise ValueError(f"{name} reads {names[0]}, which only a causal model has.")
    scored = sorted({"old_logp", "ref_logp"} & recipe.required_fields)
    if scored and recipe.likelihood.reads_advantages:
        raise ValueError(
            f"{name} reads {scored[0]}, which cannot be compared with the policy's bound, since "
            f"{recipe.likelihood.estimate!r} depends on the advantages; use another likelihood, "
            "such as diffusion.elbo_likelihood()."
        )
    for entry in recipe.computed:
        if entry.source in (*BEFORE_PREPARE, "optimizer", "policy"):
            raise ValueError(f"{name} {_label(entry)}, which reads next-token probabilities.")


def _check_meaning(recipe) -> None:
    """Raises ValueError if two slots together would mean what neither does.

    Such as a function of tokens behind a surrogate of sequences.
    """
    if recipe.likelihood is not None:
        _check_likelihood(recipe)
    if recipe.correction is not None:
        _check_correction(recipe)
    if recipe.turn_updates is not None and (measured := recipe.computed_from("update")):
        raise ValueError(
            f"Recipe {recipe.name!r}: computed {next(iter(measured))!r} (update) compares the "
            "policy with old_logp, which turn_updates scores before each step, so they are always "
            "equal; leave one of them out."
        )
    _check_texts(recipe)
    ungraded = declares(recipe.collector, "lacks_components")
    if ungraded and "reward_components" in recipe.required_fields:
        raise ValueError(
            f"Recipe {recipe.name!r} reads reward_components, but the run's reward does not grade "
            f"all responses of {recipe.collector!r}. {GRADED_BY_RUN}"
        )
    if recipe.head:
        _check_head(recipe)
    _check_models(recipe)
    if recipe.critic is not None and recipe.critic.warmup and recipe.subagent is not None:
        raise ValueError(
            f"Recipe {recipe.name!r}: the critic trains alone in the first {recipe.critic.warmup} "
            "steps, but a subagent trains in every step; leave out the critic's warmup or the "
            "subagent."
        )
    if recipe.critic is None:
        functions = [r.function for r in readers(recipe)[0]]
        if any("values" in accepted(f) for f in functions) and "values" not in recipe.inputs:
            raise ValueError(
                f"Recipe {recipe.name!r}: the advantage reads values, and there is no critic; "
                "give Recipe(critic=Critic(...)), or inputs=('values',) if the batch holds them."
            )
    if traits_of(recipe.surrogate).level == "sequence":
        _check_levels(recipe)


def _check_texts(recipe) -> None:
    """Raises ValueError if texts are combined with what reads a batch of responses only."""
    name = f"Recipe {recipe.name!r}"
    checks.check_non_negative(name, finite=True, text_coef=recipe.text_coef)
    if not recipe.text_coef:
        return
    for what, there in (
        ("a likelihood of a denoising model", recipe.likelihood is not None),
        ("a process reward model", recipe.prm is not None),
        ("turn_updates", recipe.turn_updates is not None),
        ("a subagent", recipe.subagent is not None),
        ("a surrogate that trains a reward model", recipe.head is not None),
        ("numbers computed from the last visit", bool(recipe.computed_from("last_visit"))),
    ):
        if there:
            raise ValueError(
                f"{name} has text_coef {recipe.text_coef:g} and {what}, which would read texts as "
                "responses; leave one of them out."
            )


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


def _check_models(recipe) -> None:
    """Raises ValueError if a reference, an earlier policy or a teacher is set without effect."""
    name = f"Recipe {recipe.name!r}"
    if recipe.reference is not None and not (recipe.uses_reference or recipe.has_teacher):
        raise ValueError(
            f"{name}: reference {name_of(recipe.reference)} moves a model that nothing uses: no "
            "function names ref_logp, and nothing is computed from the reference or the teacher."
        )
    of_anchor = sorted(of_likelihood(recipe, "anchor"))
    if of_anchor and not isinstance(recipe.reference, AnchoredReference):
        raise ValueError(
            f"{name} reads {of_anchor[0]}, of the policy that a moving reference began with; its "
            "reference must be made by regularizers.anchored."
        )
    if isinstance(recipe.reference, AnchoredReference) and not of_anchor:
        raise ValueError(
            f"{name}: reference {recipe.reference!r} stores a policy that nothing uses: no "
            "function reads an extra of the anchor, such as anchor_velocity."
        )
    if recipe.earlier is not None and "earlier_logp" not in recipe.required_fields:
        raise ValueError(
            f"{name}: earlier has policies that nothing uses: no function reads earlier_logp."
        )
    halves, moves = ("policy", "reference"), recipe.reference is not None
    checks.check_option(name, "sampled_by", recipe.sampled_by, (*halves, halves))
    needs = {"reference": "moves", halves: "is frozen and whose ref_logp a function reads"}
    fits = moves if recipe.sampled_by == "reference" else recipe.uses_reference and not moves
    if not fits and (kind := needs.get(recipe.sampled_by)):
        raise ValueError(f"{name}: sampled_by={recipe.sampled_by!r} needs a reference that {kind}.")
    modes = (None, "int8", "fp8")
    checks.check_option(name, "sampler_quantization", recipe.sampler_quantization, modes)
    checks.check_share(name, one=False, teacher_mixture=recipe.teacher_mixture)
    if recipe.teacher_mixture and not (recipe.learns_from_model and corrects_behavior(recipe)):
        raise ValueError(
            f"{name}: teacher_mixture samples from policy and teacher, so the recipe must read "
            "another model's numbers and weigh by behavior_logp."
        )


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
    if not declares(recipe.collector, "offline"):
        raise ValueError(
            f"{what}, which writes no responses: the collector must take them from the data, as "
            f"curation.offline_pairs() does; got {recipe.collector!r}."
        )
    of_policy = (*BEFORE_PREPARE, "optimizer", "policy", "update")
    for slot, value in (
        ("a critic or a process reward model", recipe.second_model),
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
    if recipe.reference is not None:
        weights = {"w": shaped(1)}
        init = getattr(recipe.reference, "init", None)
        start = weights if init is None else init(weights)
        step, key = shaped(dtype="int32"), jax.eval_shape(lambda: jax.random.key(0))
        jax.eval_shape(
            lambda *args: call_with(recipe.reference, *args[:3], context={"key": args[3]}),
            *(start, weights, step, key),
        )
    jax.eval_shape(run, batch, logp)
    return recipe
