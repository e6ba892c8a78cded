"""Soft caps, which bound attention scores and logits, and their derivative."""

import functools

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array


def soft_cap(x: Array, cap: float | None) -> Array:
    """``cap tanh(x / cap)``, between ``-cap`` and ``cap``; ``x`` itself without a cap.

    The backward pass stores only the result.

    Example:
      >>> import jax.numpy as jnp
      >>> [round(float(y), 3) for y in soft_cap(jnp.array([1.0, 100.0]), 30.0)]
      [1.0, 29.924]

    References:
      Bello et al. (arXiv:1611.09940), the clipped logits; Gemma 2 (arXiv:2408.00118).
    """
    return x if cap is None else _capped(x, cap)


def soft_cap_slope(y: Array, cap: float) -> Array:
    """The derivative of :func:`soft_cap` where its result is ``y``: ``1 - (y / cap)^2``."""
    share = y / cap
    return (1.0 - share) * (1.0 + share)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _capped(x: Array, cap: float) -> Array:
    return cap * jnp.tanh(x / cap)


def _forward(x, cap):
    y = _capped(x, cap)
    return y, y


def _backward(cap, y, dy):
    return (dy * soft_cap_slope(y, cap),)


_capped.defvjp(_forward, _backward)
