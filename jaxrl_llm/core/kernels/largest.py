"""The few largest of many numbers."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array

# Numbers of a block. The first pass compares blocks by their maxima.
_BLOCK = 32


def largest(x: Array, count: int) -> tuple[Array, Array]:
    """``jax.lax.top_k`` without a full sort: values and indices ``[..., count]``.

    The order is descending, with ties by index. The ``count`` blocks with the largest maxima
    contain all results, so only their entries are compared one by one. Compilers for accelerators
    sort full rows for ``jax.lax.top_k``.

    Args:
      x: Floats ``[..., V]``, no NaN.
      count: At most V.

    Example:
      >>> import jax.numpy as jnp
      >>> values, places = largest(jnp.array([0.0, 3.0, 1.0, 3.0]), 3)
      >>> values.tolist(), places.tolist()
      ([3.0, 3.0, 1.0], [1, 3, 2])
    """
    size = x.shape[-1]
    if size <= 4 * count * _BLOCK:  # too few numbers for a gain
        return jax.lax.top_k(x, count)
    rows = [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, [*rows, (0, -size % _BLOCK)], constant_values=-jnp.inf)
    x = x.reshape(*x.shape[:-1], x.shape[-1] // _BLOCK, _BLOCK)
    _, blocks = jax.lax.top_k(jnp.max(x, axis=-1), count)
    blocks = jnp.sort(blocks, axis=-1)  # so that ties go to the lower index
    inside = jnp.take_along_axis(x, blocks[..., None], axis=-2)
    places = blocks[..., None] * _BLOCK + jnp.arange(_BLOCK, dtype=blocks.dtype)
    flat = (*inside.shape[:-2], count * _BLOCK)
    values, chosen = jax.lax.top_k(inside.reshape(flat), count)
    return values, jnp.take_along_axis(places.reshape(flat), chosen, axis=-1)
