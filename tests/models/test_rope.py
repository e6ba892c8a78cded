"""The rotary embedding and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
from rows import for_each

from jaxrl_llm.models.rope import Rope, RopeScaling, YarnScaling, rotary_tables, rotate


def _complex(x, positions, size, theta):
    """Dimensions i and i + size / 2 as a complex number, times exp(i angle), float64."""
    half = size // 2
    turn = np.exp(1j * positions[:, None] * theta ** (-np.arange(half) / half))[:, None]
    pair = (x[..., :half] + 1j * x[..., half:size]) * turn
    return np.concatenate([pair.real, pair.imag, x[..., size:]], axis=-1)


def test_llama3_stretches_what_turns_less_than_four_times():
    """From four turns over the original context to one, ever more of a frequency is divided."""
    scaling = RopeScaling(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=1000
    )
    frequency = 2 * np.pi * np.array([8.0, 4.0, 2.5, 1.0, 0.5]) / 1000
    kept = scaling.stretch(jnp.asarray(frequency), 1e4) / frequency
    np.testing.assert_allclose(kept, [1, 1, 0.625, 0.25, 0.25], rtol=1e-5)


@for_each("size", [8, 4])
def test_a_rotation_and_its_gradient(size):
    """All dimensions of a head, and the first four of eight."""
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(2, 5, 3, 8)).astype(np.float32) for _ in range(2))
    positions = np.array([0, 1, 2, 7, 40])
    tables = rotary_tables(jnp.asarray(positions), size, Rope(100.0))
    turned, pull = jax.vjp(lambda x: rotate(x, *tables), jnp.asarray(x))
    np.testing.assert_allclose(turned, _complex(x, positions, size, 100.0), atol=2e-5)
    # The inverse of a rotation is its transpose.
    np.testing.assert_allclose(pull(dy)[0], _complex(dy, -positions, size, 100.0), atol=2e-5)
    np.testing.assert_allclose(pull(turned)[0], x, atol=1e-5)


def test_the_gradient_of_a_scaled_rotation():
    """YaRN's tables have a factor, which a rotation back keeps; in half precision too."""
    x, dy = (jax.random.normal(jax.random.key(i), (5, 3, 8)) for i in range(2))
    scaling = YarnScaling(factor=4.0, original_max_length=16, attention_factor=1.3)
    tables = rotary_tables(jnp.arange(5), 8, Rope(100.0, scaling))
    turned, pull = jax.vjp(lambda x: rotate(x, *tables), x)
    np.testing.assert_allclose(jnp.sum(turned * dy), jnp.sum(x * pull(dy)[0]), rtol=1e-5)
    np.testing.assert_allclose(pull(turned)[0], 1.3**2 * x, rtol=1e-4, atol=1e-5)
    half = jax.vjp(lambda x: rotate(x, *tables), x.astype(jnp.bfloat16))[1](dy.astype(jnp.bfloat16))
    assert half[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(half[0].astype(jnp.float32), pull(dy)[0], atol=0.03)
