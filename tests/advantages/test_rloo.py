"""rloo: the worked numbers, the leave-one-out form, and that its gradient is unbiased."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import dr_grpo, rloo


def test_worked_numbers():
    third = 1.0 / 3.0
    np.testing.assert_allclose(
        rloo(jnp.array([1.0, 0.0, 0.0, 0.0])), [1.0, -third, -third, -third], rtol=1e-6
    )


def test_is_the_reward_minus_the_mean_of_the_others():
    rng = np.random.default_rng(2)
    rewards = rng.normal(size=(4, 5)).astype(np.float32)
    where = rng.random((4, 5)) < 0.8
    where[0] = True
    expected = np.zeros((4, 5))
    for p, g in itertools.product(range(4), range(5)):
        others = where[p] & (np.arange(5) != g)
        if where[p, g] and others.any():
            expected[p, g] = rewards[p, g] - rewards[p][others].astype(np.float64).mean()
    np.testing.assert_allclose(rloo(jnp.asarray(rewards), where=where), expected, atol=1e-6)


def test_tends_to_dr_grpo_in_a_large_group():
    rewards = jax.random.normal(jax.random.key(0), (1, 4096))
    np.testing.assert_allclose(rloo(rewards), dr_grpo(rewards), rtol=1e-3)


@pytest.mark.parametrize("size", [2, 3])
def test_the_policy_gradient_is_unbiased_on_a_three_armed_bandit(size):
    # Every possible group of a softmax policy, each with its probability: the expectation is exact.
    theta = np.array([0.3, -0.2, 0.5])
    pay = np.array([1.0, 0.2, -0.7])
    pi = np.exp(theta) / np.exp(theta).sum()
    true_gradient = pi * (pay - pi @ pay)
    arms = np.array(list(itertools.product(range(3), repeat=size)))
    probability = pi[arms].prod(-1)
    score = np.eye(3)[arms] - pi

    def expected(estimator):
        advantages = np.asarray(estimator(jnp.asarray(pay[arms], jnp.float32)), np.float64)
        return np.einsum("n,ng,nga->a", probability, advantages / size, score)

    np.testing.assert_allclose(expected(rloo), true_gradient, atol=1e-6)
    # Not leaving the rollout out shrinks the gradient; the test can tell the two apart.
    np.testing.assert_allclose(expected(dr_grpo), true_gradient * (size - 1) / size, atol=1e-6)


def test_raw_singleton_keeps_its_reward():
    assert rloo(jnp.array([[3.0]]), singleton="raw").tolist() == [[3.0]]
    assert rloo(jnp.array([[3.0]])).tolist() == [[0.0]]
