"""Irregular groups along the last axis: entries with one label belong together.

Labels are int32 ``[..., N]``, from 0 to N - 1; an entry with any other label belongs to no group.
Leading axes are free, and entries of different rows are never in one group.
"""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array

_REDUCE = {"sum": jax.ops.segment_sum, "max": jax.ops.segment_max, "min": jax.ops.segment_min}


def over_label(x: Array, labels: Array, reduce: Literal["sum", "max", "min"] = "sum") -> Array:
    """For each entry of ``x [..., N]`` the reduction over those of its label; 0 without one.

    Example:
      >>> import jax.numpy as jnp
      >>> over_label(jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([0, 1, 0, -1])).tolist()
      [5.0, 2.0, 5.0, 0.0]
    """
    shape, size = jnp.shape(labels), jnp.shape(labels)[-1]
    rows = (math.prod(shape[:-1]), size)
    known = (labels >= 0) & (labels < size)
    place = jnp.where(known, labels, size)

    def of_row(x: Array, place: Array) -> Array:
        return _REDUCE[reduce](x, place, num_segments=size + 1)[place]

    x = jnp.where(known, x, jnp.zeros((), jnp.result_type(x)))
    reduced = jax.vmap(of_row)(jnp.reshape(x, rows), jnp.reshape(place, rows))
    return jnp.where(known, jnp.reshape(reduced, shape), jnp.zeros((), reduced.dtype))


def dense_labels(ids: Sequence[Array], where: Array) -> Array:
    """Labels from 0 for the distinct tuples of ids of each row; -1 where masked.

    Exact: ids are compared by a sort, and nothing is hashed. Labels follow the order of the ids.

    Args:
      ids: Integers ``[..., N]`` each, at least one array.
      where: bool ``[..., N]``.

    Returns:
      int32 ``[..., N]``.

    Example:
      >>> import jax.numpy as jnp
      >>> states, actions = jnp.array([7, 3, 7, 7]), jnp.array([0, 0, 0, 5])
      >>> where = jnp.array([True, True, True, True])
      >>> dense_labels((states, actions), where).tolist()
      [1, 0, 1, 2]
    """
    places = jnp.broadcast_to(jnp.arange(where.shape[-1], dtype=jnp.int32), where.shape)
    # What is masked comes last; it may hold any id.
    keys = tuple(jnp.where(where, jnp.asarray(x, jnp.int32), 0) for x in ids)
    operands = ((~where).astype(jnp.int32), *keys, places)
    ordered = jax.lax.sort(operands, dimension=where.ndim - 1, num_keys=1 + len(keys))
    new = jnp.zeros(where.shape, bool)
    for key in ordered[1:-1]:
        new |= key != jnp.concatenate([key[..., :1], key[..., :-1]], axis=-1)
    number = jnp.cumsum(new, axis=-1, dtype=jnp.int32)
    labels = jnp.take_along_axis(number, jnp.argsort(ordered[-1], axis=-1), axis=-1)
    return jnp.where(where, labels, -1)
