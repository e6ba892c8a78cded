"""Rewards of judges: the worked numbers of FAPO and its step judge, and float64 row by row."""

import jax.numpy as jnp
import numpy as np
from bad_calls import bad_calls, raises
from cheap import quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import grpo
from jaxrl_llm.core import chain, stateless
from jaxrl_llm.rewards import fapo_reward, genrm_step_reward, steered_bonus


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


def test_fapo_reads_no_dropped_reward_and_hides_no_kept_nan():
    rewards = jnp.array([1.0, jnp.nan, jnp.inf, 0.0])
    where = jnp.array([True, False, False, True])
    flawed = jnp.zeros(4, bool)
    assert fapo_reward(rewards, flawed=flawed, where=where).tolist() == [1, 0, 0, -1]
    assert jnp.isnan(fapo_reward(rewards, flawed=flawed)[1])


def test_step_judge():
    """-1 says that no step is wrong; 5 and -2 are none of the 5 steps, 0 is none of none."""
    cases = [(-1, -1, 5, 1.0), (0, -1, 5, -1.0), (-1, 3, 5, -1.0), (3, 3, 5, 1.0), (2, 4, 5, 0.6)]
    cases += [(0, 4, 5, 0.2), (5, 3, 5, -1.0), (-2, 3, 5, -1.0), (0, 0, 1, 1.0), (0, 0, 0, -1.0)]
    *arrays, expected = map(jnp.array, zip(*cases, (-1, -1, 0, 1.0), strict=True))
    out = genrm_step_reward(*arrays)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    assert out.dtype == jnp.float32
    valid = jnp.arange(11) != 3  # an illegible judgement gets -1
    assert genrm_step_reward(*arrays, valid=valid)[3] == -1.0


def test_steered_bonus_in_a_chain_with_a_controllers_value():
    rewards = jnp.array([[1.0, 0.5, jnp.nan]])
    steered, where = jnp.array([[True, False, True]]), jnp.array([[True, True, False]])
    bonus = jnp.full((1, 1, 1), 1.5)
    out = steered_bonus(rewards, steered=steered, bonus=bonus, where=where)
    assert out.tolist() == [[1.5, 0.5, 0.0]]


REWARDS, FLAGS = jnp.ones((2, 3)), jnp.zeros((2, 3), bool)
INTEGERS = jnp.ones(2, int)


@for_each(
    ("error", "call", "message"),
    bad_calls(r"""
TypeError:
    fapo_reward(jnp.ones((2, 3), int), flawed=FLAGS)  # rewards must be floating point; got int32
    fapo_reward(jnp.ones(3), flawed=None)  # flawed must be an array; got NoneType
    genrm_step_reward(jnp.arange(3), None, jnp.arange(3))  # truth must be an array; got NoneType
    fapo_reward(REWARDS, flawed=REWARDS)  # flawed must be bool
    genrm_step_reward(INTEGERS, jnp.ones(2), INTEGERS)  # truth must hold integers
    steered_bonus(REWARDS, steered=None, bonus=1.0)  # steered must be an array; got NoneType
    steered_bonus(REWARDS, steered=REWARDS, bonus=1.0)  # steered must be bool
ValueError:
    fapo_reward(REWARDS, flawed=FLAGS[:, :2])  # rewards \(2, 3\), flawed \(2, 2\)
    fapo_reward(REWARDS, flawed=FLAGS, lam=-1.0)  # lam must not be negative; got -1
    genrm_step_reward(INTEGERS, jnp.ones(3, int), INTEGERS)  # these must have the same shape
    steered_bonus(REWARDS, steered=FLAGS[:, :2], bonus=1.0)  # these must have the same shape
"""),
)
def test_bad_input(error, call, message):
    raises(error, call, message, globals())
