"""Statistics and ranks of a group: over the last axis, of the entries that take part.

Groups are an axis, not ids, so on a batch that is sharded over prompts they need no communication.
Deviations are computed in two passes: the difference of two large sums loses the small spreads that
rewards have.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.core import checks, masking
from jaxrl_llm.core.axes import Array


def check_group(
    function: str,
    x: Array,
    where: Array | None,
    *,
    name: str = "rewards",
    where_name: str = "where",
) -> None:
    """Raises unless ``x`` is floating ``[..., G]`` and ``where`` bool of the same shape.

    ``name`` and ``where_name`` are the function's arguments, which an error names.
    """
    checks.check_min_rank(function, 1, **{name: x})
    checks.check_float(function, **{name: x})
    checks.check_bool(function, **{where_name: where})
    checks.check_same_shape(function, **{name: x, where_name: where})


def group_count(x: Array, where: Array | None = None) -> Array:
    """Number of entries of each group that take part: ``[..., 1]`` float32."""
    valid = jnp.ones(jnp.shape(x), bool) if where is None else where
    return jnp.sum(valid, axis=-1, keepdims=True, dtype=jnp.float32)


def group_mean(x: Array, where: Array | None = None) -> Array:
    """Mean of each group: ``[..., 1]``; 0 for an empty one."""
    return masking.masked_mean(x, where, axis=-1, keepdims=True)


def group_std(x: Array, where: Array | None = None, *, ddof: int = 1) -> Array:
    """Standard deviation of each group: ``[..., 1]``; 0 where no more than ``ddof`` take part."""
    return masking.masked_std(x, where, axis=-1, keepdims=True, ddof=ddof)


def group_median(
    x: Array, where: Array | None = None, kind: Literal["lower", "midpoint"] = "lower"
) -> Array:
    """Median of each group: ``[..., 1]``; 0 for an empty one, NaN where an unmasked entry is.

    An even group has two middle values: "lower" takes the smaller, so that the median is always an
    entry of the group, and "midpoint" their mean.
    """
    checks.check_option("group_median", "kind", kind, ("lower", "midpoint"))
    valid = jnp.ones(jnp.shape(x), bool) if where is None else where
    x = masking.zero_masked(x, where)
    if x.shape[-1] == 0:
        return jnp.zeros((*x.shape[:-1], 1), jnp.float32)
    ordered = jnp.sort(jnp.where(valid, x, jnp.inf), axis=-1)
    count = jnp.sum(valid, axis=-1, keepdims=True)

    def entry(i: Array) -> Array:
        return jnp.take_along_axis(ordered, jnp.maximum(i, 0), axis=-1)

    median = entry((count - 1) // 2)
    if kind == "midpoint":
        # Halves first: the sum of two large entries would overflow.
        median = 0.5 * median + 0.5 * entry(count // 2)
    median = jnp.where(count > 0, median, 0.0)
    return jnp.where(jnp.any(jnp.isnan(x), axis=-1, keepdims=True), jnp.nan, median)


def group_is_constant(x: Array, where: Array | None = None) -> Array:
    """:func:`jaxrl_llm.core.masking.is_constant` of each group: ``[..., 1]``."""
    return masking.is_constant(x, where, axis=-1, keepdims=True)


def beyond_rounding(most: Array, least: Array) -> Array:
    """Whether the greatest and the least of computed values differ by more than rounding.

    Means of equal values over other entries, or in another order, differ in their last digits, and
    a division by such a spread would turn these digits into values near 1. Values that differ by
    at most 1e-6 of the greatest (or of 1) count as equal. Of rewards that are compared as they are,
    :func:`group_is_constant` is the exact test.
    """
    return most - least > 1e-6 * jnp.maximum(1.0, jnp.abs(most))


def order_and_ranks(x: Array) -> tuple[Array, Array]:
    """The entry at each place of the ascending order, and the rank of each entry.

    Of ``[..., N]`` two int arrays ``[..., N]``, both from 0: places to entries, and its inverse. Of
    equal entries the earlier one comes first; a NaN comes last.
    """
    order = jnp.argsort(x, axis=-1, stable=True)
    return order, jnp.argsort(order, axis=-1)
