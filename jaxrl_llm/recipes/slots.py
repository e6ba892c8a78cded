"""What the slots of a Recipe take, and the checks made when one is filled."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Transform, accepted, functions_of, level_of, parts_of
from jaxrl_llm.recipes.batch import Batch

# What `prepare` offers to an advantage or a curation, and `loss` to a regularizer, by keyword.
PREPARE_CONTEXT = (
    "where",
    "mask",
    "tokens",
    "prompt_tokens",
    "prompt_mask",
    "old_logp",
    "behavior_logp",
    "ref_logp",
)
LOSS_CONTEXT = (
    "logp",
    "old_logp",
    "behavior_logp",
    "ref_logp",
    "entropy",
    "mask",
    "advantages",
)
# Inputs that cost a pass of a model, or that only some samplers give. old_logp is one of them where
# a batch is prepared; in the loss, the policy being trained stands in for it.
_EXTRA = frozenset({"ref_logp", "behavior_logp", "entropy"})
_EXTRA_TO_PREPARE = _EXTRA | {"old_logp"}
STATUSES = ("experimental", "reproduced")


def context(batch: Batch, names: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a batch by name, for functions that take what they name."""
    return {name: getattr(batch, name) for name in names if hasattr(batch, name)}


def called(function: Callable) -> str:
    """What to call a function in a message."""
    return getattr(function, "__name__", repr(function))


def shown(value) -> str:
    """A slot's value for people: functions by their names, options as they were given."""
    if isinstance(value, Transform):
        if (parts := parts_of(value)) is not None:
            return f"chain({', '.join(map(shown, parts))})"
        functions = functions_of(value)
        return f"stateless({shown(functions[0])})" if functions else "Transform(...)"
    if isinstance(value, tuple):
        return f"({''.join(f'{shown(v)}, ' for v in value).rstrip(' ')})"
    return value.__name__ if inspect.isfunction(value) else repr(value)


def named(*functions: Callable, to_prepare: bool = False) -> frozenset[str]:
    """Which of the inputs that cost something these functions name."""
    extra = _EXTRA_TO_PREPARE if to_prepare else _EXTRA
    return extra & {name for f in functions for name in accepted(f)}


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
    for slot in ("surrogate", "weights", "correction"):
        value = getattr(recipe, slot)
        if not (callable(value) or (slot == "correction" and value is None)):
            raise TypeError(f"{name}: {slot} must be a function; got {value!r}.")
    if not isinstance(recipe.regularizers, tuple) or not all(map(callable, recipe.regularizers)):
        raise TypeError(
            f"{name}: regularizers must be a tuple of functions, such as (term,); "
            f"got {recipe.regularizers!r}."
        )


# What the plain functions are given, in this order and by position.
POSITIONAL = {
    "surrogate": ("logp", "old_logp", "advantages", "mask"),
    "weights": ("mask",),
    "correction": ("old_logp", "behavior_logp", "mask"),
}


def check_inputs(
    recipe: str, slot: str, function: Callable, offered: tuple[str, ...], given: tuple[str, ...]
) -> None:
    """Raises ValueError if ``function`` requires what its slot does not give, or takes too little.

    Args:
      recipe: Name, for the message.
      slot: Name, for the message.
      function: What stands in the slot.
      offered: What it may take by keyword.
      given: What it gets by position, first.
    """
    what = f"Recipe {recipe!r}: {slot} {called(function)}"
    parameters = list(accepted(function).values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in parameters if p.kind in kinds]
    if len(places) < len(given) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ValueError(
            f"{what} takes {len(places)} arrays by position; it is given {len(given)}: "
            f"{', '.join(given)}."
        )
    for parameter in parameters:
        if parameter in places[: len(given)]:
            continue
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.default is inspect.Parameter.empty and parameter.name not in offered:
            raise ValueError(
                f"{what} needs {parameter.name!r}, which it is not given; it is given "
                f"{', '.join(given + offered)}. Options are fixed with jaxrl_llm.bind."
            )


def check_functions(recipe) -> None:
    """Raises ValueError unless each function can be called as its slot calls it."""
    for slot, given in POSITIONAL.items():
        if (function := getattr(recipe, slot)) is not None:
            check_inputs(recipe.name, slot, function, (), given)
    for term in recipe.regularizers:
        check_inputs(recipe.name, "regularizer", term, LOSS_CONTEXT, ())
    for slot in ("advantage", "curation"):
        for function in functions_of(getattr(recipe, slot)):
            check_inputs(recipe.name, slot, function, PREPARE_CONTEXT, ("rewards",))


def check_levels(recipe) -> None:
    """Raises ValueError if a function of tokens would change what a sequence surrogate says."""
    if level_of(recipe.surrogate) != "sequence":
        return
    what = f"Recipe {recipe.name!r}: surrogate {called(recipe.surrogate)} is one value per sequence"
    if level_of(recipe.weights) != "sequence":
        raise ValueError(
            f"{what}, repeated over its tokens, and weights {called(recipe.weights)} would count "
            "it once per token, so long sequences more; use aggregate.sequence_mean, or mark a "
            "weighting that keeps the meaning with core.sequence_level."
        )
    if recipe.correction is not None and level_of(recipe.correction) != "sequence":
        raise ValueError(
            f"{what}, and correction {called(recipe.correction)} weighs its tokens one by one; "
            "mark a correction that gives a sequence one weight with core.sequence_level."
        )


def check_output(recipe: str, what: str, value, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless what a slot returned has one of the shapes: nothing is broadcast."""
    if jnp.shape(value) not in shapes:
        raise ValueError(
            f"Recipe {recipe!r}: {what} must have shape {' or '.join(map(str, shapes))}; "
            f"got {jnp.shape(value)}."
        )


def tried(recipe):
    """The recipe, after a dry run on shapes: an option out of its range is told when it is given.

    Presets end with it. Nothing is computed and no device is touched.
    """

    def run(batch, logp):
        ready, _ = recipe.prepare(batch, recipe.init())
        return recipe.loss(logp, ready, entropy=logp)

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
    )
    jax.eval_shape(run, batch, logp)
    return recipe
