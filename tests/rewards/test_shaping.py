"""Rewards of judges: the worked numbers of FAPO and its step judge, and float64 row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import grpo
from jaxrl_llm.core import chain, stateless
from jaxrl_llm.rewards import fapo_reward, genrm_step_reward, steered_bonus

quick = settings(max_examples=40, deadline=None, database=None, derandomize=True)


def test_fapo_rewards_of_each_kind():
    rewards = jnp.array([1.0, 1.0, 0.0, 0.0])
    flawed = jnp.array([False, True, False, True])
    assert fapo_reward(rewards, flawed=flawed).tolist() == [1, 0, -1, -1]
    assert fapo_reward(2 * rewards - 1, flawed=flawed).tolist() == [1, 0, -1, -1]
    assert fapo_reward(rewards, flawed=flawed, lam=0.0).tolist() == [1, 1, -1, -1]
    assert fapo_reward(rewards, flawed=flawed, lam=2.0).tolist() == [1, -1, -1, -1]
    assert fapo_reward(rewards, flawed=flawed, lam=0.5).tolist() == [1, 0.5, -1, -1]


@for_each(
    ("rewards", "flawed", "expected"),
    [
        ([1, 1, 0, 0], [0, 1, 0, 0], [1.305581, 0.261116, -0.783349, -0.783349]),
        ([1, 1, 1, 0], [0, 0, 1, 0], [0.783349, 0.783349, -0.261116, -1.305581]),
    ],
)
def test_fapo_at_the_head_of_grpo(rewards, flawed, expected):
    advantage = chain(stateless(fapo_reward), stateless(grpo))
    rewards, flawed = jnp.array([rewards], jnp.float32), jnp.array([flawed], bool)
    where = jnp.ones((1, 4), bool)
    out, _ = advantage.update(rewards, advantage.init(), flawed=flawed, where=where)
    np.testing.assert_allclose(out[0], expected, atol=2e-6)


@quick
@given(
    right=hnp.arrays(np.bool_, 6), flawed=hnp.arrays(np.bool_, 6), lam=st.sampled_from([0, 0.5, 1])
)
def test_fapo_equals_its_formula(right, flawed, lam):
    expected = [2 * c - 1 - lam * c * f for c, f in zip(right * 1.0, flawed * 1.0, strict=True)]
    rewards = jnp.asarray(right, jnp.float32)
    np.testing.assert_array_equal(fapo_reward(rewards, flawed=flawed, lam=lam), expected)


@for_each(("clean", "flawed", "wrong"), [(1, 1, 3), (3, 1, 1), (2, 2, 2), (0, 2, 3), (4, 1, 0)])
def test_the_sign_of_a_flawed_answer_is_that_of_wrong_minus_clean(clean, flawed, wrong):
    rewards = jnp.array([1.0] * (clean + flawed) + [0.0] * wrong)
    flaw = jnp.array([False] * clean + [True] * flawed + [False] * wrong)
    out = grpo(fapo_reward(rewards, flawed=flaw))
    assert np.sign(out[clean]) == np.sign(wrong - clean)


def test_fapo_reads_no_dropped_reward_and_hides_no_kept_nan():
    rewards = jnp.array([1.0, jnp.nan, jnp.inf, 0.0])
    where = jnp.array([True, False, False, True])
    flawed = jnp.zeros(4, bool)
    assert fapo_reward(rewards, flawed=flawed, where=where).tolist() == [1, 0, 0, -1]
    assert jnp.isnan(fapo_reward(rewards, flawed=flawed)[1])


def test_fapo_in_bfloat16_and_compiled():
    rewards, flawed = jnp.array([1.0, 0.0, 1.0], jnp.bfloat16), jnp.array([True, False, False])
    out = jax.jit(fapo_reward)(rewards, flawed=flawed)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, [0.0, -1.0, 1.0])


@for_each(
    ("predicted", "truth", "steps", "expected"),
    [
        (-1, -1, 5, 1.0),
        (0, -1, 5, -1.0),
        (-1, 3, 5, -1.0),
        (3, 3, 5, 1.0),
        (2, 4, 5, 0.6),
        (0, 4, 5, 0.2),
        (5, 3, 5, -1.0),  # out of range
        (-2, 3, 5, -1.0),
        (0, 0, 1, 1.0),
        (0, 0, 0, -1.0),  # there is no step 0
        (-1, -1, 0, 1.0),
    ],
)
def test_step_judge(predicted, truth, steps, expected):
    out = genrm_step_reward(*(jnp.array([x]) for x in (predicted, truth, steps)))
    np.testing.assert_allclose(out, [expected], rtol=1e-6)
    assert out.dtype == jnp.float32


def test_an_illegible_judgement_gets_minus_one():
    ones = jnp.ones(2, int)
    valid = jnp.array([True, False])
    assert genrm_step_reward(ones, ones, 3 * ones, valid=valid).tolist() == [1.0, -1.0]


def test_steered_bonus_in_a_chain_with_a_controllers_value():
    rewards = jnp.array([[1.0, 0.5, jnp.nan]])
    steered, where = jnp.array([[True, False, True]]), jnp.array([[True, True, False]])
    bonus = jnp.full((1, 1, 1), 1.5)
    out = steered_bonus(rewards, steered=steered, bonus=bonus, where=where)
    assert out.tolist() == [[1.5, 0.5, 0.0]]


REWARDS, FLAGS = jnp.ones((2, 3)), jnp.zeros((2, 3), bool)
INTEGERS = jnp.ones(2, int)


@for_each(
    ("call", "message"),
    [
        (
            lambda: fapo_reward(jnp.ones((2, 3), int), flawed=FLAGS),
            "fapo_reward: rewards must be floating point; got int32",
        ),
        (
            lambda: fapo_reward(jnp.ones(3), flawed=None),
            "fapo_reward: flawed must be an array; got NoneType",
        ),
        (
            lambda: genrm_step_reward(jnp.arange(3), None, jnp.arange(3)),
            "genrm_step_reward: truth must be an array; got NoneType",
        ),
        (lambda: fapo_reward(REWARDS, flawed=REWARDS), "fapo_reward: flawed must be bool"),
        (
            lambda: genrm_step_reward(INTEGERS, jnp.ones(2), INTEGERS),
            "genrm_step_reward: truth must hold integers",
        ),
        (
            lambda: steered_bonus(REWARDS, steered=None, bonus=1.0),
            "steered_bonus: steered must be an array; got NoneType",
        ),
        (
            lambda: steered_bonus(REWARDS, steered=REWARDS, bonus=1.0),
            "steered_bonus: steered must be bool",
        ),
    ],
)
def test_inputs_of_another_type(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@for_each(
    ("call", "message"),
    [
        (
            lambda: fapo_reward(REWARDS, flawed=FLAGS[:, :2]),
            r"fapo_reward: .*rewards \(2, 3\), flawed \(2, 2\)",
        ),
        (
            lambda: fapo_reward(REWARDS, flawed=FLAGS, lam=-1.0),
            "fapo_reward: lam must not be negative; got -1",
        ),
        (
            lambda: genrm_step_reward(INTEGERS, jnp.ones(3, int), INTEGERS),
            "genrm_step_reward: these must have the same shape",
        ),
        (
            lambda: steered_bonus(REWARDS, steered=FLAGS[:, :2], bonus=1.0),
            "steered_bonus: these must have the same shape",
        ),
    ],
)
def test_other_shapes_and_options_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()
