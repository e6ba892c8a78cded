"""The mass balance of BroRL against a softmax that takes the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, one_program_a_call, quick  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_llm.diagnostics import mass_balance, unsampled_second_moment

PROBS = np.array([0.4, 0.3, 0.2, 0.1])
CORRECT, SAMPLED = np.array([1, 1, 0, 0], bool), np.array([1, 0, 1, 0], bool)


def gradient_of_mass(probs, correct, sampled, rc, rw):
    """d Q_pos / d logits dot d objective / d logits, float64: N/lr times the first-order change."""
    jacobian = np.diag(probs) - np.outer(probs, probs)
    reward = np.where(correct, rc, rw) * sampled
    return (jacobian @ correct.astype(float)) @ (jacobian @ reward)


def test_worked_numbers():
    balance = mass_balance(np.array(PROBS, jnp.float32), CORRECT, SAMPLED)
    close(balance, [0.2, 0.0384, 0.0336, -0.0040], atol=1e-7)
    close(sum(balance[1:]), 0.068, atol=1e-7)


@quick
@given(
    logits=hnp.arrays(np.float64, 6, elements=st.integers(-8, 8).map(lambda i: i / 4)),
    correct=hnp.arrays(np.bool_, 6),
    sampled=hnp.arrays(np.bool_, 6),
    rewards=st.sampled_from([(1.0, -1.0), (1.0, 0.0), (0.5, -2.0)]),
)
def test_the_parts_add_up_to_the_change_of_the_right_mass(logits, correct, sampled, rewards):
    probs = np.exp(logits) / np.exp(logits).sum()
    balance = mass_balance(
        np.asarray(probs, jnp.float32),
        correct,
        sampled,
        correct_reward=rewards[0],
        wrong_reward=rewards[1],
    )
    expected = gradient_of_mass(probs, correct, sampled, *rewards)
    close(sum(balance[1:]), expected, atol=2e-6)
    assert balance.correct >= 0 and balance.wrong >= 0
    if sampled.all():
        assert balance.unsampled == 0


def test_what_stays_unsampled():
    for rollouts, expected in ((0, 0.3), (1, 0.2), (16, 0.003323)):
        moment = unsampled_second_moment(np.array(PROBS, jnp.float32), rollouts=rollouts)
        close(moment, expected, atol=1e-6)
    draws = jax.random.categorical(jax.random.key(0), np.log(PROBS), shape=(4000, 3))
    missed = ~(draws[..., None] == np.arange(4)).any(1)
    average = (missed * PROBS**2).sum(-1).mean()
    moment = unsampled_second_moment(np.array(PROBS, jnp.float32), rollouts=3)
    close(average, moment, rtol=0.05)
    assert unsampled_second_moment(np.array([1.0, 0.0]), rollouts=5) == 0


def test_leading_axes_and_bfloat16():
    probs = np.stack([np.array(PROBS), np.array(PROBS[::-1])]).astype(jnp.bfloat16)
    balance = jax.jit(mass_balance)(probs, np.stack([CORRECT] * 2), np.stack([SAMPLED] * 2))
    assert all(x.shape == (2,) and x.dtype == jnp.float32 for x in balance)


def test_bad_input():
    probs = np.array(PROBS)
    with pytest.raises(TypeError, match="mass_balance: sampled must be an array; got NoneType"):
        mass_balance(probs, CORRECT, None)
    with pytest.raises(TypeError, match="mass_balance: correct must be bool"):
        mass_balance(probs, probs, SAMPLED)
    with pytest.raises(ValueError, match=r"mass_balance: .*probs \(4,\), correct \(3,\)"):
        mass_balance(probs, CORRECT[:3], SAMPLED)
    with pytest.raises(ValueError, match="mass_balance: wrong_reward must not be above 0; got 1"):
        mass_balance(probs, CORRECT, SAMPLED, wrong_reward=1.0)
    with pytest.raises(ValueError, match="mass_balance: correct_reward must not be negative"):
        mass_balance(probs, CORRECT, SAMPLED, correct_reward=-1.0)
    with pytest.raises(ValueError, match="unsampled_second_moment: rollouts must not be negative"):
        unsampled_second_moment(probs, rollouts=-1)
