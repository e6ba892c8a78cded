"""The norm of a layer: its formula, and the gradient that its own backward pass gives."""

import jax
import jax.numpy as jnp
import numpy as np
from rows import for_each

from jaxrl_llm.models.norms import rms_norm


def plain(x, scale, eps):
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def test_one_row_by_hand():
    x, scale = jnp.array([3.0, 4.0]), jnp.array([1.0, 2.0])
    # The mean square is 12.5, so the root of 12.5 + 3.5 is 4.
    np.testing.assert_allclose(rms_norm(x, scale, 3.5), [0.75, 2.0], rtol=1e-6)
    grads = jax.grad(lambda x, s: rms_norm(x, s, 3.5)[0], (0, 1))(x, scale)
    # d (x0 / r) = 1 / r - x0^2 / (2 r^3), and - x0 x1 / (2 r^3).
    np.testing.assert_allclose(grads[0], [0.25 - 9 / 128, -12 / 128], rtol=1e-6)
    np.testing.assert_allclose(grads[1], [0.75, 0.0], rtol=1e-6)


@for_each("dtype", ["float32", "bfloat16"])
@for_each("lead", [(), (2, 1, 1), (2, 3, 1)], ids=["one", "a prompt", "a rollout"])
def test_the_gradient_is_that_of_the_formula(lead, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 3, 4, 8), dtype)
    scale, pull = 1 + jax.random.normal(keys[1], (*lead, 8)), jax.random.normal(keys[2], x.shape)
    found, wanted = (
        jax.jit(jax.value_and_grad(lambda x, s, f=f: jnp.sum(pull * f(x, s, 1e-5)), (0, 1)))(
            x, scale
        )
        for f in (rms_norm, plain)
    )
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.float32(a), np.float32(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_a_row_of_zeros_has_a_gradient():
    grads = jax.grad(lambda x: jnp.sum(rms_norm(x, jnp.ones(4), 1e-5)))(jnp.zeros((1, 4)))
    np.testing.assert_allclose(grads, np.full((1, 4), 1e-5**-0.5), rtol=1e-6)
