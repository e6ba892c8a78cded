"""Scatters that compile to fast code."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array


def scattered(put: Callable[[Array, Array], Array], x: Array, new: Array) -> Array:
    """``put(x, new)``, where ``put`` only moves numbers of ``new`` into ``x``, of one dtype.

    XLA for CPUs scatters bfloat16 in float32, for which it converts all of ``x`` and then back.
    Here it gets the bits as integers.

    Example:
      >>> import jax.numpy as jnp
      >>> x, new = jnp.zeros(3, jnp.bfloat16), jnp.ones(1, jnp.bfloat16)
      >>> scattered(lambda x, new: x.at[1:2].set(new), x, new)
      Array([0, 1, 0], dtype=bfloat16)
    """
    if jax.default_backend() != "cpu" or x.dtype != jnp.bfloat16:
        return put(x, new)
    return put(x.view(jnp.uint16), new.astype(x.dtype).view(jnp.uint16)).view(x.dtype)
