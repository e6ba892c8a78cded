"""Scatters of bfloat16 move bits, and have the gradients of what they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.kernels.scatter import scattered


def _put(x, new, index):
    return x.at[:, index].set(new, mode="drop")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_scatter_and_its_gradients(dtype):
    """NaN and -0 keep their bits; a place beyond the end is dropped."""
    x = jnp.array([[1.0, -0.0, jnp.nan, 3.0], [4.0, 5.0, 6.0, 7.0]], dtype)
    new, index = jnp.array([[8.0, -0.0], [jnp.inf, 9.0]], dtype), jnp.array([0, 4])
    run = jax.jit(lambda x, new: scattered(_put, x, new, index))
    got = run(x, new)
    assert got.dtype == dtype
    bits = jnp.uint16 if dtype == jnp.bfloat16 else jnp.uint32
    np.testing.assert_array_equal(got.view(bits), _put(x, new, index).view(bits))
    weights = jnp.arange(8.0, dtype=dtype).reshape(2, 4)
    found = jax.grad(lambda *a: jnp.nansum(weights * run(*a)), (0, 1))(jnp.ones_like(x), new)
    kept = weights.at[:, 0].set(0.0)
    for got, want in zip(found, (kept, jnp.array([[0.0, 0.0], [4.0, 0.0]])), strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), want)


def test_many_scatters_at_a_time_compile_to_no_conversion():
    """XLA's own scatter of bfloat16 converts the whole array to float32."""
    cache, new = jnp.zeros((4, 3, 256), jnp.bfloat16), jnp.ones((4, 3, 1), jnp.bfloat16)
    index = jnp.arange(4)[:, None]

    def text(put):
        program = jax.jit(jax.vmap(put)).lower(cache, new, index).compile()
        return program.as_text()

    assert "f32[4,3,256]" in text(_put)
    assert "f32[" not in text(lambda *arrays: scattered(_put, *arrays))
