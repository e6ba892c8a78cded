"""grpo_split: the baseline of groups with guided rollouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_llm.advantages import dr_grpo, grpo_split

SHAPE = (3, 4)
eighths = hnp.arrays(np.float32, SHAPE, elements=st.integers(-40, 40).map(lambda i: i / 8))
bools = hnp.arrays(np.bool_, SHAPE)
quick = settings(max_examples=40, deadline=None, database=None, derandomize=True)
compiled = jax.jit(grpo_split)


def reference(rewards, steered, where):
    out = np.zeros(rewards.shape)
    for row in range(len(rewards)):
        own = rewards[row][where[row] & ~steered[row]].astype(np.float64)
        out[row] = np.where(where[row], rewards[row] - (own.mean() if len(own) else 0.0), 0.0)
    return out


def test_worked_numbers():
    # Nobody but the teachers is right: own rollouts get exactly 0, the teachers' 1.
    rewards = jnp.array([0.0, 0.0, 1.0, 1.0])
    out = grpo_split(rewards, steered=jnp.array([False, False, True, True]))
    np.testing.assert_array_equal(out, [0.0, 0.0, 1.0, 1.0])


@quick
@given(rewards=eighths, steered=bools, where=bools)
def test_against_float64(rewards, steered, where):
    junk = np.where(where, rewards, np.nan)
    out = np.asarray(compiled(junk, steered=steered, where=where))
    np.testing.assert_allclose(out, reference(rewards, steered, where), atol=1e-5)
    np.testing.assert_allclose(np.where(~steered, out, 0).sum(-1), 0.0, atol=2e-5)


@quick
@given(rewards=eighths, where=bools)
def test_without_a_guide_it_is_dr_grpo(rewards, where):
    none = np.zeros(SHAPE, bool)
    np.testing.assert_array_equal(
        compiled(rewards, steered=none, where=where), dr_grpo(rewards, where=where)
    )


@pytest.mark.parametrize("value", [0.1, 1.1, -3.3])
def test_own_rollouts_that_agree_get_exactly_zero(value):
    rewards = jnp.array([value, value, value, 2.0])
    out = grpo_split(rewards, steered=jnp.array([False, False, False, True]))
    assert not np.any(out[:3])
    np.testing.assert_allclose(out[3], 2.0 - value, rtol=1e-6)


def test_bfloat16_rewards():
    rewards = jnp.ones((2, 3), jnp.bfloat16)
    assert grpo_split(rewards, steered=jnp.zeros((2, 3), bool)).dtype == jnp.float32
