"""What the slots of a Recipe take, and what a recipe therefore needs."""

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import (
    Transform,
    accepted,
    functions_of,
    parts_of,
    traits_of,
)
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.recipes.batch import Batch
from jaxrl_llm.recipes.inputs import EXTRAS

# What `prepare` offers to its slots, and `loss` to the surrogate and the regularizers, by keyword;
# the batch's extras, and what the recipe itself computes, come on top.
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
    "columns",
)
PREPARE_ONLY = ("key", "last_kl")
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
# Inputs that cost a pass of a model, or that only some samplers give. old_logp is one of them where
# a batch is prepared; in the loss, the policy being trained stands in for it.
_EXTRA = frozenset({"ref_logp", "behavior_logp", "entropy", "columns"})
_EXTRA_TO_PREPARE = _EXTRA | {"old_logp"}
STATUSES = ("experimental", "reproduced")


def context(batch: Batch, names: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a batch by name, for functions that take what they name."""
    found = {name: getattr(batch, name) for name in names if hasattr(batch, name)}
    return {**batch.extras, **found}


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
        return f"({', '.join(map(shown, value))}{',' if len(value) == 1 else ''})"
    return stable_repr(value)


def shown_fields(record) -> str:
    """The fields of a record that differ from their defaults, as arguments."""
    parts = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            parts.append(f"{field.name}={shown(value)}")
    return ", ".join(parts)


def replaced(record: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a record with some fields changed, checked anew.

    Raises:
      TypeError: If a name is not a field, with the nearest one.
    """
    fields = [field.name for field in dataclasses.fields(record)]
    for name in changes:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{type(record).__name__}.replace: there is no field {name!r}.{hint} "
                f"Fields: {', '.join(fields)}."
            )
    return dataclasses.replace(record, **changes)


class Reader(NamedTuple):
    """A function in a slot, and what the slot hands it by position."""

    slot: str
    function: Callable
    given: tuple[str, ...]


# What the plain functions are given, in this order and by position.
POSITIONAL = {
    "surrogate": ("logp", "old_logp", "advantages", "mask"),
    "weights": ("mask",),
    "correction": ("old_logp", "behavior_logp", "mask"),
    "selection": ("advantages", "mask"),
}


def of_transform(slot: str, transform: Transform | None) -> list[Reader]:
    """The functions inside a transform; of one of another make, its update."""
    if transform is None:
        return []
    if (parts := parts_of(transform)) is not None:
        return [reader for part in parts for reader in of_transform(slot, part)]
    if functions := functions_of(transform):
        return [Reader(slot, functions[0], ("rewards",))]
    return [Reader(slot, transform.update, ("rewards", "state"))]


def readers(recipe) -> tuple[list[Reader], list[Reader]]:
    """The functions that ``prepare`` calls, and those of the loss."""
    plain = {
        slot: Reader(slot, function, given)
        for slot, given in POSITIONAL.items()
        if (function := getattr(recipe, slot)) is not None
    }
    prepare = [r for slot, r in plain.items() if slot != "surrogate"]
    for slot in ("advantage", "curation"):
        prepare += of_transform(slot, getattr(recipe, slot))
    for name, transform in recipe.controllers:
        prepare += of_transform(f"controller {name!r}", transform)
    prepare += [Reader(f"derived {n!r}", f, ("advantages",)) for n, f in recipe.derived]
    if recipe.critic is not None:
        prepare.append(Reader("critic's returns", recipe.critic.returns, ("rewards",)))
    vocabulary = ("logits", "targets")
    for slot in ("statistics", "scored", "taught"):
        prepare += [Reader(f"{slot} {n!r}", f, vocabulary) for n, f in getattr(recipe, slot)]
    loss = [plain["surrogate"]] + [Reader("regularizer", f, ()) for f in recipe.regularizers]
    return prepare, loss


def left(reader: Reader) -> list[inspect.Parameter]:
    """The parameters that a slot does not fill by position."""
    parameters = list(accepted(reader.function).values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    filled = [p for p in parameters if p.kind in kinds][: len(reader.given)]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p for p in parameters if p not in filled and p.kind not in variable]


def needed(recipe) -> tuple[frozenset[str], frozenset[str]]:
    """What ``prepare``, and what ``prepare`` and the loss cannot do without.

    Of the standard inputs, what is named counts; of the extras, what is named without a default.
    """
    prepare, loss = readers(recipe)
    own = {name for name, _ in (*recipe.controllers, *recipe.derived)}
    in_loss = own | {name for name, _ in recipe.statistics}
    if recipe.critic is not None:
        in_loss |= {"returns"}
    known = set(EXTRAS) | set(recipe.inputs) | own_extras(recipe)

    def names(found: list[Reader], standard: frozenset[str], provided: set[str]):
        unfilled = [p for reader in found for p in left(reader)]
        required = {p.name for p in unfilled if p.default is p.empty}
        return (standard & {p.name for p in unfilled}) | ((known & required) - provided)

    first = frozenset(names(prepare, _EXTRA_TO_PREPARE, own))
    if recipe.correction is not None:
        first |= {"old_logp", "behavior_logp"}
    if recipe.critic is not None:
        first |= {"values", "old_values"}
    return first, first | frozenset(names(loss, _EXTRA & {*LOSS_CONTEXT}, in_loss))


def own_extras(recipe) -> set[str]:
    """Names of what the train step computes for the recipe before it is prepared."""
    return {name for name, _ in (*recipe.scored, *recipe.taught)}


def draws(recipe) -> bool:
    """Whether something in ``prepare`` names ``key``."""
    return any(p.name == "key" for r in readers(recipe)[0] for p in left(r))


def reward_range(advantage: Transform) -> tuple[float, float]:
    """The rewards that an advantage is defined for (see ``core.traits(reward_range=...)``).

    Of a chain only the first part gets the rewards as they are. What it makes of them for the
    others is its own affair: it may be there to bring them into range.
    """
    parts = parts_of(advantage)
    if parts is not None:
        return reward_range(parts[0]) if parts else (-math.inf, math.inf)
    return traits_of(advantage.update).reward_range


def check_output(recipe: str, what: str, value, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless what a slot returned has one of the shapes: nothing is broadcast."""
    if jnp.shape(value) not in shapes:
        raise ValueError(
            f"Recipe {recipe!r}: {what} must have shape {' or '.join(map(str, shapes))}; "
            f"got {jnp.shape(value)}."
        )


def statistic_shapes(recipe, batch, slot: str = "statistics") -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the recipe's vocabulary statistics, for a batch of arrays or of shapes.

    ``slot`` may also be "scored" or "taught".
    """
    p, g, t = batch.tokens.shape
    extras = dict(batch.extras)

    def rows(function):
        names = [q.name for q in left(Reader("", function, ("logits", "targets")))]
        found = {n: extras[n] for n in names if n in extras}
        return {n: jax.ShapeDtypeStruct((2, *x.shape[3:]), x.dtype) for n, x in found.items()}

    logits, targets = (
        jax.ShapeDtypeStruct(s, d) for s, d in (((2, 7), "float32"), ((2,), "int32"))
    )
    shapes = {}
    for name, function in getattr(recipe, slot):
        one = jax.eval_shape(function, logits, targets, **rows(function))
        shapes[name] = jax.ShapeDtypeStruct((p, g, t, *one.shape[1:]), one.dtype)
    return shapes
