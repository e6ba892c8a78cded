"""MASA's reward of predictions, and CGPO's rewards under constraints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import rewards as rw
from jaxrl_llm.advantages import center

REWARDS, LENGTHS = jnp.array([1.0, 1.0, 0.0, 0.0]), jnp.array([100, 200, 50, 60])
NONE = {"notions": jnp.zeros((1, 1), int), "notion_where": jnp.zeros((1, 1), bool)}
meta = jax.jit(rw.meta_rewards, static_argnames=("base", "inclusive"))


@for_each(
    ("length", "inclusive", "scored"),
    [(150, False, 1), (200, False, 0), (200, True, 1), (55, False, 0), (-1, False, 0)],
)
def test_a_length_between_those_of_right_solutions(length, inclusive, scored):
    prediction = rw.Prediction(jnp.array([length]), jnp.array([jnp.nan]), **NONE)
    ours = meta(prediction, REWARDS, LENGTHS, inclusive=inclusive)
    np.testing.assert_allclose(ours, [scored / 3], rtol=1e-6)
    wrong = meta(prediction, 0.0 * REWARDS, LENGTHS, inclusive=inclusive)
    assert wrong.tolist() == [0.0]


@for_each(("rate", "scored"), [(0.5, 1.0), (5 / 8, 0.562341), (0.25, 0.316228), (1.5, 0.01)])
def test_a_pass_rate_near_the_true_one(rate, scored):
    prediction = rw.Prediction(jnp.array([jnp.nan]), jnp.array([rate]), **NONE)
    np.testing.assert_allclose(meta(prediction, REWARDS, LENGTHS), [scored / 3], rtol=1e-5)


def test_all_three_and_what_is_missing():
    prediction = rw.Prediction(
        length=jnp.array([150.0, 150.0, jnp.nan]),
        rate=jnp.array([0.5, jnp.nan, jnp.nan]),
        notions=jnp.array([[2, 1], [1, -1], [5, 0]]),
        notion_where=jnp.array([[True, True], [True, True], [False, True]]),
    )
    ours = meta(prediction, REWARDS, LENGTHS)
    np.testing.assert_allclose(ours, [1.0, 0.5, 0.0], rtol=1e-6)
    where = jnp.array([True, False, True, True])
    junk = jnp.where(where, REWARDS, jnp.nan), jnp.where(where, 1.0 * LENGTHS, jnp.nan)
    lone = meta(prediction, *junk, where=where)  # one right solution: nothing lies between
    np.testing.assert_allclose(lone[0], (0.01 ** (1 / 6) + 1) / 3, rtol=1e-5)
    empty = meta(prediction, *junk, where=jnp.zeros(4, bool))
    np.testing.assert_allclose(empty, [1 / 3, 1 / 6, 0.0], rtol=1e-6)


def test_worked_rewards_under_constraints():
    """r = 1, 2, -1, 0; the second breaks a rule, the fourth is beyond the budget."""
    calibrated = rw.calibrated_rewards(jnp.array([[1.0, 2.0, -1.0, 0.0]]), baseline=jnp.zeros(1))
    satisfied = jnp.array([[True, False, True, True]])
    far = jnp.array([[1.0, 0.0, 2.0, 6.0]])
    soft = rw.constrained_rewards(calibrated, satisfied=satisfied, log_ratio=far, budget=5.0)
    np.testing.assert_allclose(soft, [[0.584847, 0.0, 0.161365, 0.0]], atol=1e-5)
    np.testing.assert_allclose(
        soft - soft.mean(), [[0.398294, -0.186553, -0.025188, -0.186553]], atol=1e-5
    )
    hard = rw.constrained_rewards(
        calibrated, satisfied=satisfied, log_ratio=far, budget=5.0, soft=False
    )
    np.testing.assert_allclose(hard, [[0.731059, 0.0, 0.268941, 0.0]], atol=1e-5)
    moved = rw.calibrated_rewards(jnp.array([[8.0, 9.0, 6.0, 7.0]]), baseline=jnp.array([7.0]))
    np.testing.assert_allclose(moved, calibrated, atol=1e-6)


@for_each("junk", [jnp.nan, jnp.inf, 1e4])
def test_dropped_rollouts_have_no_reward(junk):
    where = jnp.array([True, False])
    ours = rw.calibrated_rewards(jnp.array([0.0, junk]), baseline=jnp.array(0.0), where=where)
    assert ours.tolist() == [0.5, 0.0]
    near = rw.constrained_rewards(
        jnp.array([1.0, junk]),
        satisfied=jnp.array([True, True]),
        log_ratio=jnp.array([1.0, junk]),
        budget=2.0,
        where=where,
    )
    assert near.tolist() == [0.5, 0.0]


@for_each(
    ("error", "call", "message"),
    bad_calls(r"""
ValueError:
    rw.meta_rewards(rw.Prediction(jnp.zeros(1), jnp.zeros(2), **NONE), REWARDS, LENGTHS)
    # these must have the same shape: length
    rw.meta_rewards(rw.Prediction(jnp.zeros(1), jnp.zeros(1), **NONE), REWARDS, LENGTHS, base=1.0)
    # base must be in \(0, 1\); got 1
    rw.calibrated_rewards(REWARDS, baseline=jnp.zeros(3))  # baseline must have shape \(\)
    rw.constrained_rewards(REWARDS, satisfied=REWARDS > 0, log_ratio=REWARDS, budget=0.0)
    # budget must be above 0; got 0
"""),
)
def test_bad_input_is_one_sentence(error, call, message):
    raises(error, call, message, globals())


def test_crpg_rewards_of_the_entry():
    """r = (1, 2, -1, 0), J = (1, 0, 1, 1), d = (1, 0, 2, 6), a budget of 5."""
    mask = np.ones((4, 2), bool)
    ref = np.zeros((4, 2), np.float32)
    logp = np.float32([[0.5, 0.5], [0.0, 0.0], [3.0, -1.0], [6.0, 0.0]])
    got = rw.crpg_rewards(
        np.float32([1, 2, -1, 0]),
        satisfied=np.array([True, False, True, True]),
        baseline=np.float32(0),
        old_logp=logp,
        ref_logp=ref,
        mask=mask,
        budget=5.0,
    )
    np.testing.assert_allclose(got, [0.584847, 0.0, 0.161365, 0.0], atol=1e-6)
    centered = center(got)
    np.testing.assert_allclose(centered, [0.398294, -0.186553, -0.025188, -0.186553], atol=1e-6)


def test_crpg_rewards_against_answers_in_the_group():
    logp, mask = np.zeros((2, 3, 1), np.float32), np.ones((2, 3, 1), bool)
    reference = np.array([[False, True, True], [False, False, False]])
    rewards = np.float32([[3, 1, 2], [1, 1, 1]])
    options = {"satisfied": ~np.zeros((2, 3), bool), "mask": mask, "budget": 5.0}
    got = rw.crpg_rewards(
        rewards, reference=reference, old_logp=logp, ref_logp=logp, soft=False, **options
    )
    expected = 1 / (1 + np.exp(1.5 - rewards[0]))  # the second group has no answer
    np.testing.assert_allclose(got, [expected, [0, 0, 0]], rtol=1e-6)
    for answers in ({}, {"reference": reference, "baseline": np.zeros(2, np.float32)}):
        with pytest.raises(ValueError, match="crpg_rewards: pass either baseline or reference"):
            rw.crpg_rewards(rewards, old_logp=logp, ref_logp=logp, **options, **answers)


def test_long_predictions_and_budgets_are_exact():
    """Beyond 256 bfloat16 rounds whole numbers."""
    prediction = jr.rewards.Prediction(
        jnp.array([1001]), jnp.array([jnp.nan]), jnp.full((1, 1), -1), jnp.ones((1, 1), bool)
    )
    reward = jr.rewards.meta_rewards(prediction, jnp.ones(2), jnp.array([1000, 1002]))
    np.testing.assert_allclose(reward, [1 / 3], rtol=1e-6)
    mask = jnp.arange(1001) < 1000
    out = jr.rewards.budget_rewards(jnp.ones(1), mask[None], budgets=jnp.array([1001.0]), coef=0.1)
    np.testing.assert_allclose(out, [0.9], rtol=1e-6)
