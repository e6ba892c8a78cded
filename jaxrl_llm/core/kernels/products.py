"""Matrix products in forms that compile to fast code, forward and backward.

Processors with bfloat16 instructions multiply bfloat16 twice as fast as float32. On CPUs XLA uses
these instructions only if the result is float32 and the left operand has contiguous rows. For all
other products it first converts both operands to float32, weights included.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.barriers import once


@jax.custom_vjp
def project(x: Array, kernel: Array) -> Array:
    """``x W`` with ``[..., in]`` and ``[in, out]``; the gradient of the kernel is ``x^T dy``.

    The gradient that jax derives by itself computes ``(dy^T x)^T``. XLA then transposes ``dy``
    inside neighboring elementwise functions, which made a train step on CPUs a fifth slower.
    """
    return _product(x, kernel, ((x.ndim - 1,), (0,)), x.dtype)


def _backward(saved, dy):
    x, kernel = saved
    # Not by kernel.T: devices that each hold a part of the kernel would gather it once more.
    d_x = _product(dy, kernel, ((dy.ndim - 1,), (1,)), x.dtype)
    if dict(jax.sharding.get_abstract_mesh().shape).get("context", 1) > 1:
        # Rows of which two axes are split over devices: merging these would gather one of them.
        axes = tuple(range(x.ndim - 1))
        return d_x, _product(x, dy, (axes, axes), kernel.dtype)
    rows, d_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return d_x, sum_over_rows(rows, d_rows, dtype=kernel.dtype)


project.defvjp(lambda x, kernel: (project(x, kernel), (x, kernel)), _backward)


def row_products(x: Array, kernel: Array, *, transposed: bool = False) -> Array:
    """``x W`` of ``[..., in]`` and ``[in, out]``, or ``x W^T`` of ``[out, in]``, in x's dtype.

    Its gradient is that of jax; :func:`project` has a faster one.
    """
    return _product(x, kernel, ((x.ndim - 1,), (int(transposed),)), x.dtype)


def sum_over_rows(a: Array, b: Array, *, dtype: jnp.dtype) -> Array:
    """``a^T b`` of ``[N, i]`` and ``[N, j]`` in ``dtype``, summed in float32 at least.

    This is the gradient of a matrix ``[i, j]``.
    """
    if _in_bfloat16(a, b):
        # XLA would merge a transposition outside a conditional into the product, in float32.
        return _product(once(jnp.transpose, a, after=a), b, ((1,), (0,)), dtype)
    return _product(a, b, ((0,), (0,)), dtype)


def sum_of_products(a: Array, b: Array) -> Array:
    """``sum(a b)`` over the last axis of two arrays ``[..., size]``.

    On CPUs axes of size 1 are dropped for the sum: with them, XLA's kernel takes six times as long.
    """
    if jax.default_backend() != "cpu":
        return jnp.sum(a * b, axis=-1)
    lead = a.shape[:-1]
    a, b = (jnp.squeeze(x, [i for i, size in enumerate(lead) if size == 1]) for x in (a, b))
    return jnp.sum(a * b, axis=-1).reshape(lead)


def _product(a: Array, b: Array, contracting: tuple, dtype: jnp.dtype) -> Array:
    """``jax.lax.dot_general`` without batch axes."""
    dimensions = (contracting, ((), ()))
    if not _in_bfloat16(a, b):
        return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)
    # Without the barrier, XLA moves a transposition before elementwise functions into a product
    # that it has already left in bfloat16, and then cannot run the product.
    a = jax.lax.optimization_barrier(a)
    wide = jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
    return wide.astype(dtype)


def _in_bfloat16(a: Array, b: Array) -> bool:
    """Whether this is a product in bfloat16 on a CPU."""
    return jax.default_backend() == "cpu" and a.dtype == b.dtype == jnp.bfloat16
