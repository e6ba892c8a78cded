"""The few largest are those of ``jax.lax.top_k``, equals and infinities included."""

import jax
import jax.numpy as jnp
import numpy as np
from rows import for_each

from jaxrl_llm.core.kernels.largest import largest


@for_each("dtype", [jnp.float32, jnp.bfloat16])
@for_each(("size", "count"), [(1290, 10), (640, 4), (129, 1), (60, 20)])
@for_each("step", [1e-6, 0.5, 4.0])
def test_as_top_k(dtype, size, count, step):
    rng = np.random.default_rng(size)
    x = np.round(rng.normal(size=(4, 2, size)) / step) * step  # of 4 nearly all are equal
    x[1, 0, 3:] = -np.inf  # fewer finite ones than are wanted
    x[2, 1] = -np.inf
    x[3, 0, -5:] = 9.0
    x = jnp.asarray(x, dtype)
    found = jax.jit(largest, static_argnums=1)(x, count)
    for a, b in zip(found, jax.lax.top_k(x, count), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_no_rows():
    values, places = largest(jnp.zeros((0, 4096)), 4)
    assert values.shape == places.shape == (0, 4) and places.dtype == jnp.int32


def test_most_numbers_are_only_compared_with_their_block():
    x = jax.ShapeDtypeStruct((2, 4096), jnp.float32)
    ordered = [
        eqn.invars[0].aval.shape
        for eqn in jax.make_jaxpr(lambda x: largest(x, 8))(x).eqns
        if eqn.primitive.name == "top_k"
    ]
    assert ordered == [(2, 128), (2, 256)]
