"""OSPO, its fairness and its fleet_grpo with returns, against loops over a step table."""

import jax.numpy as jnp
import numpy as np
from cheap import close, equal, value_and_grad
from jax.test_util import check_grads
from rows import for_each

from jaxrl_llm.advantages import fleet_fairness, fleet_grpo, ospo


def sample(seed, shape=(5, 4)):
    rng = np.random.default_rng(seed)
    rewards, where = rng.normal(size=shape).astype(np.float32), rng.random(shape) < 0.6
    where[2] = False
    where[3] = np.arange(shape[1]) == 1
    return rewards, where


def fairness(rewards, where):
    """What each agent has earned, and how uneven that is, one time after the other."""
    earned, before, out = np.zeros(rewards.shape[1]), 0.0, []
    for r, w in zip(rewards.astype(np.float64), where, strict=True):
        earned = earned + np.where(w, r, 0.0)
        out.append(before - earned.std())
        before = earned.std()
    return np.array(out)


def z(x):
    return (x - x.mean()) / (x.std() + 1e-8) if len(x) and x.max() != x.min() else 0.0 * x


def to_go(values, where, gamma):
    """Agent by agent, discounted by the time between its tasks."""
    out = np.zeros(values.shape)
    for i in range(values.shape[1]):
        later, at = 0.0, None
        for t in reversed(np.nonzero(where[:, i])[0]):
            later = values[t, i] + (0.0 if at is None else gamma ** (at - t) * later)
            out[t, i], at = later, t
    return out


def reference(rewards, where):
    out, fair = np.zeros(rewards.shape), fairness(rewards, where)
    for t in range(len(rewards)):
        kept = rewards[t][where[t]].astype(np.float64)
        out[t][where[t]] = z(kept) + fair[t]
    return out


def variant_reference(rewards, where, gamma, norm, punishment):
    raw, scaled = np.where(where, rewards, 0.0).astype(np.float64), np.zeros(rewards.shape)
    if norm == "all":
        scaled[where] = z(raw[where])
    else:
        for t in range(len(raw)):
            scaled[t][where[t]] = z(raw[t][where[t]])
    out = to_go(scaled, where, gamma)
    if punishment == "history":
        out = out + fairness(rewards, where)[:, None]
    if punishment == "to_go":
        returns = to_go(raw, where, gamma)
        for t in range(len(raw)):
            if where[t].any():
                out[t] -= returns[t][where[t]].std()
    return np.where(where, out, 0.0)


def test_worked_numbers():
    rewards = np.array([[1.0, 2.0, 3.0]])
    expected = [[-1.224745, 0.0, 1.224745]]
    close(ospo(rewards, fairness=0.0), expected, atol=1e-6)
    # The first spread is the deviation itself.
    close(fleet_fairness(rewards), [-np.std([1, 2, 3])], rtol=1e-6)


@for_each("seed", range(3))
def test_equals_the_reference(seed):
    rewards, where = sample(seed)
    close(ospo(rewards, where=where), reference(rewards, where), atol=2e-5)
    close(fleet_fairness(rewards, where=where), fairness(rewards, where), atol=1e-5)


@for_each("norm", ["all", "time"])
@for_each("punishment", ["none", "history", "to_go"])
def test_variant_equals_the_reference(norm, punishment):
    for seed in range(2):
        rewards, where = sample(seed)
        for gamma in (0.0, 0.9):
            out = fleet_grpo(rewards, where=where, gamma=gamma, norm=norm, punishment=punishment)
            expected = variant_reference(rewards, where, gamma, norm, punishment)
            close(out, expected, atol=3e-5)


@for_each("function", [ospo, fleet_grpo])
def test_dropped_steps_are_never_read_in_value_or_gradient(function):
    rewards, where = sample(8)
    weights = np.random.default_rng(0).normal(size=rewards.shape).astype(np.float32)

    run = value_and_grad(lambda r: jnp.sum(weights * function(r, where=where)))

    value, slope = run(rewards)
    assert np.isfinite(slope).all() and not np.asarray(slope)[~where].any()
    for junk in (1e4, np.nan, np.inf):
        other, gradient = run(np.where(where, rewards, np.float32(junk)))
        assert other == value
        equal(gradient, slope)


@for_each("function", [ospo, fleet_grpo])
def test_gradient_permutation_leading_axes_and_bfloat16(function):
    rewards, where = sample(9)
    where[3] = True
    check_grads(
        lambda r: function(r, where=where), (rewards,), order=1, modes=["rev"],
        atol=1e-2, rtol=1e-2, eps=3e-3,
    )  # fmt: skip
    out, order = np.asarray(function(rewards, where=where)), [3, 0, 2, 1]
    moved = function(rewards[:, order], where=where[:, order])
    close(moved, out[:, order], atol=1e-5)
    if function is ospo:
        both = function(np.stack([rewards, rewards]), where=np.stack([where, where]))
        close(both, np.stack([out, out]), atol=1e-5)
    half = np.asarray(rewards, jnp.bfloat16)
    assert function(half, where=where).dtype == jnp.float32
    close(function(half, where=where), function(half.astype(jnp.float32), where=where), rtol=1e-6)


def test_constant_rewards_give_no_advantage():
    rewards = np.full((3, 4), 0.1)
    assert not np.asarray(ospo(rewards)).any()
    assert not np.asarray(fleet_grpo(rewards)).any()
    close(ospo(rewards), ospo(rewards))
