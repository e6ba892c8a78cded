"""opob and vcpo_advantage: worked numbers, overflow, and that the opob is optimal."""

import numpy as np
from cheap import close, grad, put
from rows import for_each

from jaxrl_llm.advantages import opob, vcpo_advantage

REWARDS = np.array([1.0, 0.0, 1.0, 1.0])
NORMS = np.array([1.0, 4.0, 1.0, 2.0])
LOG_WEIGHTS = np.log(np.array([1.0, 2.0, 0.5, 4.0]))


def test_worked_numbers():
    close(opob(REWARDS, LOG_WEIGHTS, NORMS), 0.675127, atol=1e-6)
    close(opob(REWARDS, np.zeros(4), NORMS), 0.5, atol=1e-6)
    close(opob(REWARDS, np.zeros(4), np.ones(4)), 0.75, atol=1e-6)


@for_each("shift", [-200.0, 60.0, 500.0])
def test_a_common_factor_of_the_weights_cancels_without_overflow(shift):
    expected = opob(REWARDS, LOG_WEIGHTS, NORMS)
    out = opob(REWARDS, LOG_WEIGHTS + shift, NORMS * 1e3)
    close(out, expected, rtol=1e-4)


def test_a_rollout_without_a_gradient_does_not_hide_the_others():
    weights = put(LOG_WEIGHTS, 0, 300.0)
    out = opob(REWARDS, weights, put(NORMS, 0, 0.0))
    expected = opob(REWARDS[1:], LOG_WEIGHTS[1:], NORMS[1:])
    close(out, expected, rtol=1e-6)
    close(opob(REWARDS, weights, np.zeros(4)), 0.75)


def data(seed=0):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(3, 4)).astype(np.float32)
    old_logp, behavior_logp = -rng.exponential(size=(2, 3, 4, 5)).astype(np.float32)
    mask, where = rng.random((3, 4, 5)) < 0.8, rng.random((3, 4)) < 0.8
    where[0] = False
    norms = rng.exponential(size=(3, 4)).astype(np.float32)
    return rewards, old_logp, behavior_logp, mask, where, norms


@for_each("scale", ["group", "none"])
@for_each("proxy", [False, True])
def test_equals_the_float64_reference(scale, proxy):
    rewards, old_logp, behavior_logp, mask, where, norms = data()
    expected = np.zeros(rewards.shape)
    for p in range(3):
        keep = where[p]
        r = np.float64(rewards[p][keep])
        if len(r) < 2:
            continue
        ratio = np.where(mask[p], np.float64(old_logp[p]) - np.float64(behavior_logp[p]), 0.0)
        squares = np.exp(ratio.sum(-1)[keep]) ** 2
        squares *= mask[p].sum(-1)[keep] if proxy else norms[p][keep]
        expected[p][keep] = r - squares @ r / squares.sum()
        if scale == "group":
            expected[p][keep] /= r.std()
    out = vcpo_advantage(
        rewards,
        old_logp=old_logp,
        behavior_logp=behavior_logp,
        mask=mask,
        where=where,
        grad_sq_norms=None if proxy else norms,
        scale=scale,
    )
    close(out, expected, rtol=1e-4, atol=1e-5)


@for_each("value", [0.1, -3.3])
def test_equal_rewards_and_singletons_give_exactly_zero(value):
    _, old_logp, behavior_logp, mask, _, norms = data(2)
    options = {"old_logp": old_logp, "behavior_logp": behavior_logp, "mask": mask}
    options |= {"grad_sq_norms": norms}
    rewards = np.full((3, 4), value)
    assert not vcpo_advantage(rewards, **options).any()
    alone = put(np.zeros((3, 4), bool), np.s_[:, 1], True)
    assert not vcpo_advantage(np.arange(12.0).reshape(3, 4), **options, where=alone).any()
    gradient = grad(lambda r: vcpo_advantage(r, **options).sum())(rewards)
    assert np.isfinite(gradient).all()
