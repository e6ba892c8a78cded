"""dr_grpo: the worked numbers and how it relates to rloo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import dr_grpo, grpo, rloo


def test_worked_numbers():
    assert dr_grpo(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_equals_the_float64_reference_with_dropped_rollouts():
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=(5, 6)).astype(np.float32)
    where = rng.random((5, 6)) < 0.7
    expected = np.zeros((5, 6))
    for row, keep, out in zip(rewards.astype(np.float64), where, expected, strict=True):
        if keep.sum() > 1:
            out[keep] = row[keep] - row[keep].mean()
    np.testing.assert_allclose(dr_grpo(jnp.asarray(rewards), where=where), expected, atol=1e-6)


@pytest.mark.parametrize("kept", [2, 3, 7])
def test_is_rloo_times_n_minus_one_over_n(kept):
    rewards = jax.random.normal(jax.random.key(kept), (3, 7))
    where = jnp.broadcast_to(jnp.arange(7) < kept, (3, 7))
    np.testing.assert_allclose(
        dr_grpo(rewards, where=where),
        rloo(rewards, where=where) * (kept - 1) / kept,
        rtol=1e-5,
        atol=1e-6,
    )


def test_scales_with_the_rewards_where_grpo_does_not():
    rewards = jnp.array([1.0, 0.0, 0.5, 0.0])
    np.testing.assert_allclose(dr_grpo(4 * rewards), 4 * dr_grpo(rewards), rtol=1e-6)
    np.testing.assert_allclose(grpo(4 * rewards), grpo(rewards), rtol=1e-5)


def test_raw_singleton_keeps_its_reward():
    rewards, where = jnp.array([[3.0, jnp.nan]]), jnp.array([[True, False]])
    assert dr_grpo(rewards, where=where, singleton="raw").tolist() == [[3.0, 0.0]]
    assert dr_grpo(rewards, where=where).tolist() == [[0.0, 0.0]]
