"""The checks made when a slot of a Recipe is filled."""

import inspect

import jax

from jaxrl_llm.core import Transform, accepted, traits_of
from jaxrl_llm.recipes import slots
from jaxrl_llm.recipes.batch import Batch
from jaxrl_llm.recipes.critic import Critic
from jaxrl_llm.recipes.inputs import EXTRAS, shaped_extras
from jaxrl_llm.recipes.slots import called

# Slots that hold (name, function) pairs.
_NAMED = ("controllers", "derived", "statistics", "scored", "taught")
# Names that mean something else already.
_TAKEN = frozenset({*slots.PREPARE_CONTEXT, *slots.PREPARE_ONLY, *slots.LOSS_CONTEXT})
_OF_CRITIC = frozenset({"values", "old_values", "returns", "critic_weights"})


def check_kinds(recipe) -> None:
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
    if not (recipe.critic is None or isinstance(recipe.critic, Critic)):
        raise TypeError(f"{name}: critic must be a Critic; got {recipe.critic!r}.")
    if not isinstance(recipe.inputs, tuple) or not all(isinstance(x, str) for x in recipe.inputs):
        raise TypeError(f"{name}: inputs must be a tuple of names; got {recipe.inputs!r}.")
    for slot in _NAMED:
        _check_pairs(name, slot, getattr(recipe, slot))


def _check_pairs(name: str, slot: str, pairs) -> None:
    """Raises TypeError unless ``pairs`` is a tuple of (name, function or Transform)."""
    transforms = slot == "controllers"
    kind = "Transform" if transforms else "function"
    fine = isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs)
    if not fine or not all(
        isinstance(key, str) and (isinstance(x, Transform) if transforms else callable(x))
        for key, x in pairs
    ):
        raise TypeError(f"{name}: {slot} must be a tuple of (name, {kind}) pairs; got {pairs!r}.")


def _check_inputs(recipe: str, reader: slots.Reader, offered: set[str]) -> None:
    """Raises ValueError if a function requires what its slot does not give, or takes too little."""
    what = f"Recipe {recipe!r}: {reader.slot} {called(reader.function)}"
    parameters = list(accepted(reader.function).values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in parameters if p.kind in kinds]
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(places) < len(reader.given) and not open_ended:
        raise ValueError(
            f"{what} takes {len(places)} arrays by position; it is given {len(reader.given)}: "
            f"{', '.join(reader.given)}."
        )
    for parameter in slots.left(reader):
        if parameter.default is inspect.Parameter.empty and parameter.name not in offered:
            known = [*reader.given, *sorted(offered - set(EXTRAS) - set(reader.given))]
            hint = "Options are fixed with jaxrl_llm.bind"
            if set(EXTRAS) & offered:
                which = "" if set(EXTRAS) <= offered else " that have a value a token"
                known.append(f"and the extras of recipes.inputs.EXTRAS{which}")
                hint += "; an array of your own that the batch brings in extras is named in "
                hint += "Recipe(inputs=...)"
            raise ValueError(
                f"{what} needs {parameter.name!r}, which it is not given; it is given "
                f"{', '.join(known)}. {hint}."
            )


def check_names(recipe) -> None:
    """Raises ValueError if one name would stand for two things, one of them without effect."""
    taken = dict.fromkeys(_TAKEN, "the batch or the step")
    if recipe.critic is not None:
        taken |= dict.fromkeys(_OF_CRITIC, "the critic")
    pairs = [(slot, name) for slot in _NAMED for name, _ in getattr(recipe, slot)]
    # A batch may bring what would otherwise be scored or taught.
    pairs += [("inputs", name) for name in recipe.inputs]
    for slot, name in pairs:
        before = taken.get(name)
        if before is not None and (slot != "inputs" or before not in ("scored", "taught")):
            raise ValueError(
                f"Recipe {recipe.name!r}: {slot} has the name {name!r}, which already comes from "
                f"{before}; choose another name."
            )
        taken[name] = slot


def check_read(recipe) -> None:
    """Raises ValueError if something is computed under a name that no function reads.

    A function of one's own that takes ``**context`` may read anything; those of controllers do not
    count, since theirs take it to be called alike.
    """
    prepare, loss = slots.readers(recipe)
    found = [r for r in (*prepare, *loss) if not r.slot.startswith("controller")]
    parameters = [p for r in found for p in accepted(r.function).values()]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    read = {p.name for r in (*prepare, *loss) for p in slots.left(r)} | {"update_scale"}
    for slot in _NAMED:
        for name, _ in getattr(recipe, slot):
            if name not in read:
                raise ValueError(
                    f"Recipe {recipe.name!r}: {slot} computes {name!r}, which no function reads; "
                    "name it there, or connect it with jaxrl_llm.given(function, parameter="
                    f"{name!r})."
                )


def _offers(recipe) -> dict[str, set[str]]:
    """What each slot may name beside the arrays it gets by position, by the reader's slot."""
    own = slots.own_extras(recipe)
    extras = set(EXTRAS) | set(recipe.inputs) | own
    known = {*slots.PREPARE_CONTEXT, *slots.PREPARE_ONLY} | extras
    offers = {slot: set() for slot in ("weights", "correction")}
    for name, _ in recipe.controllers:  # each sees those before it
        offers[f"controller {name!r}"] = set(known)
        known.add(name)
    offers |= {slot: set(known) for slot in ("curation", "advantage", "selection")}
    for name, _ in recipe.derived:
        offers[f"derived {name!r}"] = set(known)
        known.add(name)
    offers["critic's returns"] = known
    # Row by row, so only what has a value a token.
    of_tokens = {name for name, x in EXTRAS.items() if x.axes.startswith("PGT")}
    of_tokens |= set(recipe.inputs)
    scored = {name for name, _ in recipe.scored}
    derived = {name for name, _ in recipe.derived}
    rows = {"scored": of_tokens, "taught": of_tokens | scored, "statistics": of_tokens | own}
    rows["statistics"] |= derived
    offers |= {f"{slot} {n!r}": rows[slot] for slot in rows for n, _ in getattr(recipe, slot)}
    loss = (
        extras
        | derived
        | {name for slot in (recipe.controllers, recipe.statistics) for name, _ in slot}
    )
    loss |= set(slots.LOSS_CONTEXT)
    return offers | {"surrogate": loss, "regularizer": loss}


def check_functions(recipe) -> None:
    """Raises ValueError unless each function can be called as its slot calls it."""
    offers = _offers(recipe)
    for reader in (r for part in slots.readers(recipe) for r in part):
        _check_inputs(recipe.name, reader, offers[reader.slot])
    plain = []
    if recipe.reference is not None:
        plain.append(("reference", recipe.reference, ("reference", "params", "step")))
    if (critic := recipe.critic) is not None:
        plain += [
            ("critic's loss", critic.loss, ("values", "old_values", "returns", "mask")),
            ("critic's combine", critic.combine, ("values",)),
            ("critic's weights", critic.weights, ("mask",)),
        ]
    for slot, function, given in plain:
        _check_inputs(recipe.name, slots.Reader(slot, function, given), set())


def check_meaning(recipe) -> None:
    """Raises ValueError if two slots together would say something that neither means."""
    given = slots.POSITIONAL["surrogate"]
    surrogate = {p.name for p in slots.left(slots.Reader("", recipe.surrogate, given))}
    if recipe.correction is not None and "behavior_logp" in surrogate:
        raise ValueError(
            f"Recipe {recipe.name!r}: surrogate {called(recipe.surrogate)} already weighs by "
            f"behavior_logp, so correction {called(recipe.correction)} would count the same "
            "mismatch twice; leave one of them out."
        )
    if recipe.correction is not None and not traits_of(recipe.surrogate).takes_correction:
        raise ValueError(
            f"Recipe {recipe.name!r}: surrogate {called(recipe.surrogate)} is no mean over what "
            f"was sampled, so correction {called(recipe.correction)} has nothing to correct; leave "
            "it out."
        )
    if recipe.reference is not None and "ref_logp" not in recipe.needs and not recipe.taught:
        raise ValueError(
            f"Recipe {recipe.name!r}: reference {called(recipe.reference)} moves a model that "
            "nothing uses: no function names ref_logp and nothing is taught."
        )
    if recipe.critic is None:
        functions = [r.function for r in slots.readers(recipe)[0]]
        if any("values" in accepted(f) for f in functions) and "values" not in recipe.inputs:
            raise ValueError(
                f"Recipe {recipe.name!r}: the advantage reads values, and there is no critic; "
                "give Recipe(critic=Critic(...)), or inputs=('values',) if the batch brings them."
            )


def check_levels(recipe) -> None:
    """Raises ValueError if a function of tokens would change what a sequence surrogate says."""
    if traits_of(recipe.surrogate).level != "sequence":
        return
    what = f"Recipe {recipe.name!r}: surrogate {called(recipe.surrogate)} is one value per sequence"
    if traits_of(recipe.weights).level != "sequence":
        raise ValueError(
            f"{what}, repeated over its tokens, and weights {called(recipe.weights)} would count "
            "it once per token, so long sequences more; use aggregate.sequence_mean, or mark a "
            "weighting that keeps the meaning with core.traits(level='sequence')."
        )
    if recipe.correction is not None and traits_of(recipe.correction).level != "sequence":
        raise ValueError(
            f"{what}, and correction {called(recipe.correction)} weighs its tokens one by one; "
            "mark a correction with one weight a sequence with core.traits(level='sequence')."
        )
    for reader in slots.of_transform("advantage", recipe.advantage):
        if not traits_of(reader.function).token_values:
            continue
        if not traits_of(recipe.surrogate).takes_token_advantages:
            raise ValueError(
                f"{what}, and advantage {called(reader.function)} gives each token a value of its "
                "own, which it would have to average away; take a token-level surrogate."
            )


def tried(recipe):
    """The recipe, after a dry run on shapes: an option out of its range is told when it is given.

    Presets end with it. Nothing is computed and no device is touched.
    """

    def run(batch, logp):
        key = jax.random.key(0) if recipe.draws else None
        ready, _ = recipe.prepare(batch, recipe.init(), key=key)
        statistics = {
            name: jax.numpy.zeros(x.shape, x.dtype)
            for name, x in slots.statistic_shapes(recipe, ready).items()
        }
        return recipe.loss(logp, ready, entropy=logp, statistics=statistics)

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
    own = recipe.inputs or slots.own_extras(recipe) - set(EXTRAS)
    if own or "columns" in recipe.needs:
        return recipe  # what the batch will bring is not known here
    for slot in ("scored", "taught"):
        slots.statistic_shapes(recipe, batch, slot)
    if recipe.reference is not None:
        weights = {"w": shaped(1)}
        jax.eval_shape(recipe.reference, weights, weights, shaped(dtype="int32"))
    jax.eval_shape(run, batch, logp)
    return recipe
