"""Curves that more than one package of layer 1 uses."""

import math

import jax.numpy as jnp

from jaxrl_llm.core.axes import Array


def quarter_cosine(x: Array, *, end: float, scale: float) -> Array:
    """From ``scale`` at 0 down to exactly 0 at ``end``, and 0 beyond it.

        scale cos(pi x / (2 end))

    Of any shape from 0 on, in float32, where the cosine of half of pi is not 0; beyond ``end``,
    which is above 0, the cosine is negative.
    """
    x = jnp.asarray(x, jnp.float32)
    return jnp.where(x >= end, 0.0, scale * jnp.cos((math.pi / 2) * x / end))
