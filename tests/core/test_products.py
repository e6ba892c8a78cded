"""Products that XLA runs in bfloat16 on CPUs give what they give in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.core.kernels.products import project, sum_of_products, sum_over_rows


def _normal(shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(sum(shape)), shape).astype(dtype)


def _sum_of_squares(x, kernel):
    return jnp.sum(project(x, kernel).astype(jnp.float32) ** 2)


def _near(got, wanted):
    scale = jnp.max(jnp.abs(wanted))
    np.testing.assert_allclose(got.astype(jnp.float32) / scale, wanted / scale, atol=2e-2)


@for_each("lead", [(2, 3, 5), (1,)])
def test_bfloat16_is_float32_but_for_rounding(lead):
    x, kernel = _normal((*lead, 32)), _normal((32, 48))
    wide = x.astype(jnp.float32), kernel.astype(jnp.float32)
    product = jax.jit(project)(x, kernel)
    assert product.dtype == jnp.bfloat16
    _near(product, wide[0] @ wide[1])
    found = jax.jit(jax.grad(_sum_of_squares, (0, 1)))(x, kernel)
    wanted = jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), (0, 1))(*wide)
    for got, exact in zip(found, wanted, strict=True):
        assert got.dtype == jnp.bfloat16
        _near(got, exact)


@for_each("dtype", [jnp.float32, jnp.bfloat16])
def test_a_sum_over_rows(dtype):
    a, b = _normal((64, 32), dtype), _normal((64, 48), dtype)
    got = jax.jit(lambda a, b: sum_over_rows(a, b, dtype=jnp.float32))(a, b)
    assert got.dtype == jnp.float32
    _near(got, a.astype(jnp.float32).T @ b.astype(jnp.float32))


@for_each("lead", [(), (3,), (1, 3), (2, 1, 3), (1, 1)])
def test_a_sum_of_products(lead):
    a, b = _normal((*lead, 7), jnp.float32), _normal((*lead, 7), jnp.float32) + 1.0
    got = sum_of_products(a, b)
    assert got.shape == lead
    np.testing.assert_allclose(got, np.sum(np.float64(a) * np.float64(b), -1), rtol=1e-5)


@for_each("of", [_sum_of_squares, jax.grad(_sum_of_squares, (0, 1))])
def test_an_operand_that_comes_transposed_runs(of):
    """XLA leaves such a product in bfloat16 and has no code for it, unless it is kept from that."""
    x, kernel = _normal((32, 64)), _normal((32, 48))
    got = jax.jit(lambda x, kernel: of(jax.nn.silu(x.T), kernel))(x, kernel)
    wanted = jax.jit(of)(jax.nn.silu(x.T), kernel)
    jax.tree.map(lambda a, b: _near(a, b.astype(jnp.float32)), got, wanted)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="others multiply bfloat16 as it stands")
def test_no_operand_is_made_float32():
    """That is what makes bfloat16 slow; jax's own derivative does so for each of them."""
    x, kernel, dy = _normal((64, 32)), _normal((32, 48)), _normal((64, 48))

    def made(function):
        """Which arrays the program writes, fused ones aside."""
        program = jax.jit(lambda x, kernel, dy: jax.vjp(function, x, kernel)[1](dy))
        return program.lower(x, kernel, dy).compile().as_text().split("ENTRY")[1]

    widened = ("= f32[64,48]", "= f32[48,64]", "= f32[32,64]")
    assert any(shape in made(jnp.matmul) for shape in widened)
    assert not any(shape in made(project) for shape in widened)


def test_gradients_of_many_at_a_time():
    x, kernel = _normal((5, 64, 32)), _normal((5, 32, 48))
    found = jax.jit(jax.vmap(jax.grad(_sum_of_squares, (0, 1))))(x, kernel)
    shared = jax.jit(jax.vmap(jax.grad(_sum_of_squares, 1), (0, None)))(x, kernel[0])
    wanted = jax.grad(_sum_of_squares, (0, 1))(x[0], kernel[0])
    for got, one in zip((found[0][0], found[1][0], shared[0]), (*wanted, wanted[1]), strict=True):
        _near(got, one.astype(jnp.float32))
