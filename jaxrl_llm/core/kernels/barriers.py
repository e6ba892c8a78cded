"""Barriers that keep a computation in place in programs for CPUs.

On CPUs XLA drops the barriers of ``jax.lax.optimization_barrier`` before it merges or duplicates
computations. XLA cannot analyze a conditional, so the barriers here are conditionals. Calls of a
function are kept by an attribute of the call.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

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


def keep_calls(function: Callable) -> Callable:
    """``jax.jit(function)``, whose calls and those of its derivatives XLA for CPUs does not inline.

    XLA then optimizes the function once for all its calls, if it copies a program's functions only
    after that (see ``core.runtime.compiler``), and reads a program from its cache sooner. What is
    inside the function is inlined as ever. What is traced on a mesh, which XLA partitions inlined,
    is what ``jax.jit`` makes.
    """

    @jax.jit
    @functools.wraps(function)  # its name stands in programs and profiles
    def body(*args):
        # None would not do: derivatives are traced with the attributes of the call around them.
        with set_xla_metadata(inlineable="true"):
            return function(*args)

    @functools.wraps(function)
    def call(*args):
        if not jax.sharding.get_abstract_mesh().empty:
            return body(*args)
        with set_xla_metadata(inlineable="false"):
            return body(*args)

    return call
