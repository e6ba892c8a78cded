"""Returns of turns, leave-one-out at each turn, and the way to tokens.

Rewards of three rollouts of two turns ((0, 1), (0, 0), (1, 1)) have the returns
((1, 1), (0, 0), (2, 1)), and trloo takes from each the mean of the others at the same turn:
((0, 1/2), (-3/2, -1), (3/2, 1/2)). A rollout that stopped early does not count at later turns, a
gap costs a discount, and a turn that nobody else has is zero or its return.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, grad
from rows import for_each

from jaxrl_llm.advantages import (
    dr_grpo,
    equal_turns,
    grpo,
    mc_turns,
    trloo,
    turn_grpo,
    turn_returns,
    turns_to_tokens,
    ui_s1,
)
from jaxrl_llm.aggregate import token_mean, weighted_sum
from jaxrl_llm.core import traits_of


def sample(seed, shape=(3, 4, 3)):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=shape).astype(np.float32)
    # Rollouts stop after 0 to K turns.
    turn_where = np.arange(shape[-1]) < rng.integers(0, shape[-1] + 1, shape[:-1])[..., None]
    return rewards, turn_where, rng.random(shape[:-1]) < 0.8


def reference(rewards, turn_where, where, gamma, singleton):
    """The step table: one row a turn, grouped by prompt and turn."""
    out = np.zeros(rewards.shape)
    taken = turn_where & where[..., None]
    for p in range(rewards.shape[0]):
        returns = {}
        for g, k in zip(*np.nonzero(taken[p]), strict=True):
            later = [j for j in range(k, rewards.shape[2]) if taken[p, g, j]]
            returns[g, k] = sum(gamma ** (j - k) * float(rewards[p, g, j]) for j in later)
        for (g, k), value in returns.items():
            others = [v for (h, j), v in returns.items() if j == k and h != g]
            if others:
                out[p, g, k] = value - np.mean(others)
            elif singleton == "raw":
                out[p, g, k] = value
    return out


def test_worked_numbers():
    rewards = np.array([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]])
    assert turn_returns(rewards).tolist() == [[1.0, 1.0], [0.0, 0.0], [2.0, 1.0]]
    expected = [[0.0, 0.5], [-1.5, -1.0], [1.5, 0.5]]
    close(trloo(rewards), expected, atol=1e-6)


@for_each("singleton", ["raw", "zero"])
@for_each("gamma", [0.0, 0.5, 1.0])
def test_equals_the_step_table(singleton, gamma):
    for seed in range(3):
        rewards, turn_where, where = sample(seed)
        out = trloo(rewards, turn_where=turn_where, where=where, gamma=gamma, singleton=singleton)
        expected = reference(rewards, turn_where, where, gamma, singleton)
        close(out, expected, atol=2e-6)
        assert out.dtype == jnp.float32


def test_returns_end_where_the_expert_is_left():
    rewards, matches = np.array([1.0, 1.0, 0.1, 1.0]), np.array([True, True, False, True])
    out = turn_returns(rewards, matches=matches, gamma=0.5)
    close(out, [1.5, 1.0, 0.1, 1.0], atol=1e-6)
    every = np.ones(4, bool)
    plain = turn_returns(rewards, gamma=0.5)
    equal(turn_returns(rewards, matches=every, gamma=0.5), plain)
    close(turn_returns(rewards, matches=matches, gamma=0.0), rewards)
    # A turn that did not happen deviates from nothing.
    there = np.array([True, True, False, True])
    gap = turn_returns(rewards, turn_where=there, matches=matches, gamma=0.5)
    close(gap, [1.625, 1.25, 0.0, 1.0])


def test_turns_standardized_together():
    rewards = np.array([[0.2, 0.3, 1.0], [0.1, -0.1, 0.0]])
    one = [[-0.1270, 0.1270, 1.9050], [-0.3810, -0.8890, -0.6350]]
    to_come = [[1.9050, 2.0320, 1.9050], [-1.9050, -1.5240, -0.6350]]
    close(turn_grpo(rewards, gamma=0.0), one, atol=6e-5)
    close(turn_grpo(rewards), to_come, atol=1e-4)
    assert not np.asarray(turn_grpo(np.full((2, 3), 0.1))).any()
    assert turn_grpo(np.array([[3.0]])).tolist() == [[0.0]]
    single, _, where = sample(8)
    close(
        turn_grpo(single[..., :1], where=where)[..., 0],
        grpo(single[..., 0], where=where),
        atol=1e-6,
    )


def test_monte_carlo_returns_minus_each_baseline():
    rewards, turn_where, where = sample(9)
    options = {"turn_where": turn_where, "where": where, "gamma": 0.7}
    taken = turn_where & where[..., None]
    returns = np.where(taken, turn_returns(rewards, turn_where=taken, gamma=0.7), np.nan)
    by_turn = returns - np.nanmean(np.where(taken.any(-2, keepdims=True), returns, 0), -2)[:, None]
    joint = returns - np.nanmean(returns, (-1, -2))[:, None, None]
    for baseline, expected in (("none", returns), ("turn", by_turn), ("group", joint)):
        out = mc_turns(rewards, baseline=baseline, **options)
        close(out, np.nan_to_num(expected), atol=2e-6)
    out = mc_turns(rewards[..., :1], where=where)[..., 0]
    close(out, dr_grpo(rewards[..., 0], where=where), atol=1e-6)


def test_ui_s1_adds_steps_and_episodes():
    rewards, turn_where, where = sample(10)
    rng = np.random.default_rng(11)
    matches = rng.random(rewards.shape) < 0.7
    options = {"matches": matches, "turn_where": turn_where, "where": where}
    static = ("scale", "episode", "singleton")
    credit = jax.jit(ui_s1, static_argnames=static)
    taken = turn_where & where[..., None]
    returns = turn_returns(rewards, turn_where=taken, matches=matches, gamma=0.5)
    across = grpo(np.swapaxes(returns, 1, 2), where=np.swapaxes(taken, 1, 2))
    step = np.swapaxes(across, 1, 2)
    close(credit(rewards, episode_weight=0.0, **options), step, atol=1e-6)
    together = np.asarray(turn_grpo(rewards, turn_where=turn_where, where=where, gamma=0.0))
    out = credit(rewards, step_weight=2.0, episode_weight=0.5, **options)
    close(out, 2.0 * step + 0.5 * together, atol=1e-5)
    total = grpo(np.where(taken, rewards, 0.0).sum(-1), where=where)
    out = credit(rewards, episode="rollouts", **options)
    expected = step + np.where(taken, np.asarray(total)[..., None], 0.0)
    close(out, expected, atol=1e-5)
    junk = np.where(taken, rewards, np.nan)
    equal(credit(junk, episode="rollouts", **options), out)


def test_a_turn_counts_once_whatever_its_length():
    rng = np.random.default_rng(12)
    turn_ids = np.array([[[0, 0, 0, -1, 1], [0, 1, 1, 2, 2]]])
    mask = np.array([[[True, True, True, True, True], [True, True, True, True, False]]])
    advantages = np.asarray(rng.normal(size=(1, 2, 5)), jnp.float32)
    out = equal_turns(advantages, mask, turn_ids=turn_ids)
    a = np.float64(advantages[0])
    turns = [a[0, :3], a[0, 4:5], a[1, :1], a[1, 1:3], a[1, 3:4]]
    # The mean over tokens counts the one of no turn too.
    mean = weighted_sum(out, token_mean(mask))
    assert float(mean) == pytest.approx(np.mean([x.mean() for x in turns]), abs=1e-6)
    assert not np.asarray(out)[0, 0, 3] and not np.asarray(out)[0, 1, 4]
    loud = equal_turns(np.where(mask, advantages, np.nan), mask, turn_ids=turn_ids)
    equal(loud, out)


def test_tokens_take_the_value_of_their_turn():
    advantages = np.array([[[1.0, 2.0], [3.0, 4.0]]])
    turn_ids = np.array([[[0, 0, 1, -1], [1, 0, 7, 7]]])
    mask = np.array([[[True, True, True, True], [True, True, False, False]]])
    out = turns_to_tokens(advantages, mask, turn_ids=turn_ids)
    assert out.tolist() == [[[1.0, 1.0, 2.0, 0.0], [4.0, 3.0, 0.0, 0.0]]]
    # An id that no turn has, on a token that is kept.
    loud = turns_to_tokens(advantages, np.ones((1, 2, 4), bool), turn_ids=turn_ids)
    assert np.isnan(np.asarray(loud)[0, 1, 2:]).all()
    assert np.isfinite(np.asarray(loud)[0, 0]).all()
    assert traits_of(turns_to_tokens).token_values and not traits_of(trloo).token_values


def test_each_turn_gets_the_gradient_of_its_tokens():
    turn_ids, mask = np.array([[0, 1, 1, 5]]), np.array([[True, True, True, False]])
    gradient = grad(lambda a: turns_to_tokens(a, mask, turn_ids=turn_ids).sum())
    assert gradient(np.array([[1.0, 2.0, 3.0]])).tolist() == [[1.0, 2.0, 0.0]]
