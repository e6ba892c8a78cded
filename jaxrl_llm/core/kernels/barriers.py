"""Barriers that keep a computation in place in programs for CPUs.

On CPUs XLA drops the barriers of ``jax.lax.optimization_barrier`` before it merges or duplicates
computations. XLA cannot analyze a conditional, so the barriers here are conditionals.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree


def always(x: Array) -> Array:
    """Always True, in a form that the compiler cannot simplify."""
    first = x[(0,) * x.ndim].astype(jnp.float32)
    return (jax.lax.bitcast_convert_type(first, jnp.int32) & 1) < 2


def once(function: Callable, x: Array, *, after: Array) -> ArrayTree:
    """``function(x)``, computed only once for all its uses, and not before ``after``.

    On CPUs XLA would compute sines again inside each elementwise function that reads them, in every
    layer. XLA does not move the branch of a conditional.
    """
    if jax.default_backend() != "cpu":
        return function(x)
    shapes = jax.eval_shape(function, x)

    def never(x):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return jax.lax.cond(always(jax.lax.stop_gradient(after)), function, never, x)
