"""What the slots of a Recipe take, and the checks made when one is filled."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.core import Transform, accepted
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
# Inputs that cost a pass of a model, or that only some samplers give.
_EXTRA = frozenset({"ref_logp", "behavior_logp", "entropy"})
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
        function = lifted(value)
        return "Transform(...)" if function is None else f"stateless({shown(function)})"
    if isinstance(value, tuple):
        return f"({''.join(f'{shown(v)}, ' for v in value).rstrip(' ')})"
    return value.__name__ if inspect.isfunction(value) else repr(value)


def lifted(transform: Transform | None) -> Callable | None:
    """The function inside ``stateless``, whose signature can be looked at; None for others."""
    return None if transform is None else getattr(transform.update, "function", None)


def named(*functions: Callable | None) -> frozenset[str]:
    """Which of the inputs that cost something these functions name; None is skipped."""
    return _EXTRA & {name for f in functions if f is not None for name in accepted(f)}


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


def check_inputs(recipe: str, slot: str, function: Callable, offered, given: int = 0) -> None:
    """Raises ValueError if ``function`` requires an input that its slot is never given."""
    for name, parameter in list(accepted(function).items())[given:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.default is inspect.Parameter.empty and name not in offered:
            raise ValueError(
                f"Recipe {recipe!r}: {slot} {called(function)} needs {name!r}, which it is not "
                f"given; it is given {', '.join(offered)}. Options are fixed with jaxrl_llm.bind."
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
