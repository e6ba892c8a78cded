"""RMS norm with a backward pass that stores and reads less than the automatic one."""

import functools

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.products import sum_of_products


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis, in float32.

    ``x`` is ``[..., size]`` and ``scale`` float32, broadcastable to it. The residuals are the
    arguments and one number per row. With ``u = x / sqrt(...)`` and ``g = dy scale``

        dx = (g - u mean(g u)) / sqrt(...),   d scale = sum dy u
    """
    return _forward(x, scale, eps)[0]


def _forward(x, scale, eps):
    wide = x.astype(jnp.float32)
    over = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * over * scale, (x, scale, over)


def _backward(eps, saved, dy):
    x, scale, over = saved
    unit, d_unit = x.astype(jnp.float32) * over, dy * scale
    along = sum_of_products(d_unit, unit)[..., None] / x.shape[-1]
    dx = over * (d_unit - unit * along)
    _, sum_to_scale = jax.vjp(lambda s: jnp.broadcast_to(s, x.shape), scale)
    return dx.astype(x.dtype), *sum_to_scale(dy * unit)


rms_norm.defvjp(_forward, _backward)
