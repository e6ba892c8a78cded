"""Rewards of length: DAPO's overlong penalty and HBPO's budgets."""

import jax
import jax.numpy as jnp
import numpy as np
from bad_calls import bad_calls, raises
from cheap import quick
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.rewards import hbpo_reward, hbpo_rewards, overlong_penalty, overlong_rewards


def test_overlong_worked_numbers():
    lengths = jnp.array([1000, 16384, 18432, 20480, 30000])
    penalty = overlong_penalty(lengths, max_length=20480, buffer=4096)
    np.testing.assert_array_equal(penalty, [0, 0, -0.5, -1, -1])
    assert penalty.dtype == jnp.float32
    assert not overlong_penalty(lengths, max_length=20480, buffer=4096, factor=0.0).any()


@quick
@given(
    lengths=st.lists(st.integers(0, 80), min_size=5, max_size=5),
    buffer=st.integers(1, 40),
    factor=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_overlong_equals_its_formula_and_never_rises(lengths, buffer, factor):
    penalty = overlong_penalty(
        jnp.array(sorted(lengths)), max_length=40, buffer=buffer, factor=factor
    )
    expected = [
        max(min(-(n - (40 - buffer)) / buffer * factor, 0.0), -factor) for n in sorted(lengths)
    ]
    np.testing.assert_allclose(penalty, expected, atol=1e-6)
    assert (np.diff(penalty) <= 0).all()


def test_overlong_rewards_count_the_kept_tokens_and_skip_dropped_rollouts():
    mask = jnp.arange(8) < jnp.array([[4, 7], [8, 8]])[..., None]
    rewards = jnp.array([[1.0, -1.0], [1.0, jnp.nan]])
    where = jnp.array([[True, True], [True, False]])
    out = jax.jit(lambda r, m, w: overlong_rewards(r, m, max_length=8, buffer=2, where=w))(
        rewards, mask, where
    )
    np.testing.assert_array_equal(out, [[1.0, -1.5], [0.0, 0.0]])
    assert jnp.isnan(overlong_rewards(rewards, mask, max_length=8, buffer=2)[1, 1])


def reference(correct, length, budget, l_max=4096, k=4.0, d=None, floor=None):
    """One row in float64, as the released reward reads."""
    d = 1 / l_max if d is None else d
    if not correct or length > l_max:
        return 0.0
    reached = k * np.cos(np.pi * length / (2 * l_max))
    if budget < l_max:
        reached = min(reached - abs(budget - length) * d, k * np.cos(np.pi * budget / (2 * l_max)))
    return reached if floor is None else max(reached, floor)


@for_each(
    ("budget", "at_length"),
    [
        (512, {512: 3.923141, 0: 3.875, 4096: -0.875, 4097: 0.0}),
        (1024, {1024: 3.695518}),
        (2048, {0: 2.828427, 1000: 2.828427, 2048: 2.828427, 2560: 2.0973, 4096: -0.5}),
        (2560, {2560: 2.222281}),
        (4096, {0: 4.0, 2048: 2.828427, 4096: 0.0}),
    ],
)
def test_hbpo_worked_numbers(budget, at_length):
    """The ideal reward is that of the budget itself, and at most that."""
    lengths = jnp.array(list(at_length))
    reward = hbpo_reward(jnp.ones(len(lengths), bool), lengths, jnp.full(len(lengths), budget))
    np.testing.assert_allclose(reward, list(at_length.values()), atol=1e-4)


def test_hbpo_wrong_unreadable_and_floor():
    lengths, budgets = jnp.array([4096, 4096, 100, 100]), jnp.full(4, 512)
    correct = jnp.array([True, True, False, True])
    parsed = jnp.array([True, False, True, True])
    np.testing.assert_allclose(
        hbpo_reward(correct, lengths, budgets, parsed=parsed, floor=0.0),
        [0.0, -1.0, 0.0, reference(True, 100, 512)],
        rtol=1e-5,
    )


@quick
@given(
    length=st.integers(0, 5000),
    budget=st.sampled_from([512, 1024, 2048, 2560, 4096]),
    correct=st.booleans(),
    slope=st.sampled_from([None, 0.0, 1e-3]),
    floor=st.sampled_from([None, 0.0]),
)
def test_hbpo_equals_the_float64_reference(length, budget, correct, slope, floor):
    reward = hbpo_reward(
        jnp.array(correct), jnp.array(length), jnp.array(budget), slope=slope, floor=floor
    )
    expected = reference(correct, length, budget, d=slope, floor=floor)
    np.testing.assert_allclose(reward, expected, atol=2e-5)


def test_hbpo_rewards_read_signs_and_lengths_of_a_batch():
    mask = jnp.arange(32) < jnp.array([[8, 20, 8, 8, 8]])[..., None]
    rewards = jnp.array([[1.0, 1.0, 0.0, -1.0, jnp.nan]])
    where = jnp.array([[True, True, True, True, False]])
    budgets = jnp.array([[16.0, 8.0, 16.0, 16.0, jnp.nan]])
    out = jax.jit(lambda r, m, b, w: hbpo_rewards(r, m, budgets=b, max_length=32, where=w))(
        rewards, mask, budgets, where
    )
    expected = [reference(True, 8, 16, 32), reference(True, 20, 8, 32), 0.0, -1.0, 0.0]
    np.testing.assert_allclose(out[0], expected, rtol=1e-5)
    assert jnp.isnan(hbpo_rewards(rewards, mask, budgets=budgets, max_length=32)[0, 4])


REWARDS, MASK = jnp.ones((2, 3)), jnp.ones((2, 3, 4), bool)


@for_each(
    ("error", "call", "message"),
    bad_calls(r"""
ValueError:
    overlong_penalty(jnp.ones(2), max_length=4, buffer=5)  # buffer must not exceed max_length
    overlong_rewards(REWARDS, MASK, max_length=4, buffer=0)
    # !overlong_penalty: buffer must be above 0; got 0
    overlong_penalty(jnp.ones(2), max_length=4, buffer=2, factor=-1.0)
    # factor must not be negative
    overlong_penalty(jnp.ones(2), max_length=float("inf"), buffer=2)
    # max_length must be finite; got inf
    overlong_rewards(REWARDS, MASK[:, :2], max_length=4, buffer=2)
    # mask must have shape \(2, 3, 4\)
    hbpo_reward(REWARDS > 0, REWARDS, REWARDS[:1])  # these must have the same shape
    hbpo_rewards(REWARDS, MASK, budgets=REWARDS[:1])  # budgets must have shape \(2, 3\)
    hbpo_rewards(REWARDS, MASK, budgets=REWARDS, max_length=0)
    # !hbpo_reward: max_length must be above 0
TypeError:
    overlong_rewards(REWARDS, MASK * 1.0, max_length=4, buffer=2)  # mask must be bool
    hbpo_reward(None, REWARDS, REWARDS)  # correct must be an array; got NoneType
    hbpo_reward(REWARDS, REWARDS, REWARDS)  # correct must be bool
"""),
)
def test_bad_input(error, call, message):
    raises(error, call, message, globals())
