"""Layers that repeat, traced and compiled once: a scan over their stacked arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree


def period_of(kinds: Sequence[Any]) -> int:
    """The smallest p for which every layer is of the kind of the layer p before it.

    Example:
      >>> period_of(["window", "window", "all", "window", "window"])
      3
      >>> period_of(["window", "all", "all"])
      3
    """
    count = len(kinds)
    return next(p for p in range(1, count + 1) if list(kinds[p:]) == list(kinds[: count - p]))


def run_layers(
    layer: Callable[[int, Array, Any], tuple[Array, ArrayTree]],
    x: Array,
    arrays: Sequence[Any],
    *,
    period: int | None = None,
) -> tuple[Array, list[ArrayTree]]:
    """``x`` after all layers, and what each of them returns beside it.

    Args:
      layer: Takes the number of a layer, its input and its arrays.
      x: Input of the first layer.
      arrays: One tree of arrays a layer: weights, and what else it has of its own.
      period: None runs the layers one after the other. With a number, layers so far apart differ
        in their arrays alone. Then the first ones are traced for all, and those at the end that
        are too few for a period run after them.

    Raises:
      ValueError: If layers a period apart have arrays of other names or shapes.
    """
    outputs: list[ArrayTree] = []
    if period is not None:
        units = [tuple(arrays[i : i + period]) for i in range(0, len(arrays), period)]
        units = [unit for unit in units if len(unit) == period]

        def of_unit(x: Array, unit: tuple) -> tuple[Array, list[ArrayTree]]:
            found = []
            for i, of_layer in enumerate(unit):
                x, output = layer(i, x, of_layer)
                found.append(output)
            return x, found

        x, found = _scan(of_unit, x, units)
        for u in range(len(units)):
            outputs += [jax.tree.map(lambda y, u=u: y[u], output) for output in found]
    for i in range(len(outputs), len(arrays)):
        x, output = layer(i, x, arrays[i])
        outputs.append(output)
    return x, outputs


def _scan(function: Callable, x: Array, units: Sequence[ArrayTree]) -> tuple[Array, ArrayTree]:
    """``jax.lax.scan`` over units whose leaves are stacked, but for numbers that all have alike."""
    flat = [jax.tree.flatten(unit) for unit in units]
    (first, tree), columns = flat[0], list(zip(*(leaves for leaves, _ in flat), strict=False))
    shapes = [[jnp.shape(leaf) for leaf in leaves] for leaves, _ in flat]
    if any(other != tree for _, other in flat) or any(each != shapes[0] for each in shapes):
        raise ValueError(
            "Model.apply: with scan_layers, layers that repeat need deltas of the same submodules "
            "and shapes; use scan_layers=False."
        )
    # A stacked number would be an array, beside which bfloat16 becomes float32.
    alike = [
        isinstance(leaf, int | float) and all(other == leaf for other in column)
        for leaf, column in zip(first, columns, strict=True)
    ]
    stacked = [
        None if same else jnp.stack(column) for column, same in zip(columns, alike, strict=True)
    ]

    def body(x: Array, leaves: list) -> tuple[Array, ArrayTree]:
        leaves = [a if same else b for a, b, same in zip(first, leaves, alike, strict=True)]
        return function(x, jax.tree.unflatten(tree, leaves))

    return jax.lax.scan(body, x, stacked, length=len(units))
