"""Scatters that compile to fast code."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array


def scattered(put: Callable[..., Array], x: Array, new: Array, *index: Array) -> Array:
    """``put(x, new, *index)``, where ``put`` only moves numbers of ``new`` into ``x``.

    Both have one dtype. XLA for CPUs scatters bfloat16 in float32, for which it converts all of
    ``x`` and then back. Here it gets the bits as integers, which are a copy of ``x`` each way where
    a loop also reads ``x`` as numbers. ``put`` closes over no arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> x, new = jnp.zeros(3, jnp.bfloat16), jnp.ones(1, jnp.bfloat16)
      >>> scattered(lambda x, new, i: x.at[i].set(new), x, new, jnp.array([1]))
      Array([0, 1, 0], dtype=bfloat16)
    """
    if jax.default_backend() != "cpu" or x.dtype != jnp.bfloat16:
        return put(x, new, *index)
    return _as_bits(put, x, new.astype(x.dtype), *index)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _as_bits(put: Callable[..., Array], x: Array, new: Array, *index: Array) -> Array:
    return put(x.view(jnp.uint16), new.view(jnp.uint16), *index).view(x.dtype)


@_as_bits.defjvp
def _tangent(put, values, tangents):
    x, new, *index = values
    _, tangent = jax.jvp(lambda x, new: put(x, new, *index), (x, new), tuple(tangents[:2]))
    return _as_bits(put, *values), tangent
