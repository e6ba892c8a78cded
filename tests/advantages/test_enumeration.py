"""What the estimators are in expectation, by enumerating every group of a three-armed bandit."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close
from rows import for_each

from jaxrl_llm.advantages import dr_grpo, grpo_passk, maclaurin, pkpo, rloo

N = 4
ARMS = np.array(list(itertools.product(range(3), repeat=N)))
POLICY = np.array([0.2, 0.5, 0.3])
# Two policies whose right answers have probabilities .2 and .7, and one with three levels.
BINARY = [np.array([1.0, 0.0, 0.0]), np.array([1.0, 1.0, 0.0])]
LEVELS = np.array([1.0, 0.25, -0.5])


def expectation(advantage, values, *, total=False):
    """E[mean_i A_i grad log pi(a_i)] over all groups of N arms, in the logits of the policy."""
    advantages = np.asarray(advantage(jnp.asarray(values[ARMS], jnp.float32)), np.float64)
    chance = POLICY[ARMS].prod(-1)
    scores = np.eye(3)[ARMS] - POLICY
    per_group = np.einsum("gi,gia->ga", advantages, scores)
    return chance @ per_group / (1 if total else N)


def gradient(objective):
    """The gradient of ``objective(probabilities)`` in the logits, by central differences."""
    logits, out = np.log(POLICY), np.zeros(3)
    for i in range(3):
        values = []
        for step in (1e-5, -1e-5):
            z = logits + step * np.eye(3)[i]
            values.append(objective(np.exp(z) / np.exp(z).sum()))
        out[i] = (values[0] - values[1]) / 2e-5
    return out


def right(values):
    """The probability of a right answer under ``probabilities``."""
    return lambda probabilities: float(probabilities @ (values > 0.5))


@for_each("values", [*BINARY, LEVELS])
def test_leaving_one_out_is_unbiased_and_the_group_mean_shrinks(values):
    want = gradient(lambda p: p @ values)
    close(expectation(rloo, values), want, atol=1e-6)
    close(expectation(dr_grpo, values), want * (N - 1) / N, atol=1e-6)


@for_each("values", BINARY)
@for_each("k", [1, 2, 3, 4])
def test_pkpo_is_the_gradient_of_pass_at_k_over_k(values, k):
    p = right(values)
    want = gradient(lambda probabilities: (1 - (1 - p(probabilities)) ** k) / k)
    close(expectation(lambda r: pkpo(r, k=k), values), want, atol=1e-6)


def test_the_bias_of_the_specification():
    # Two arms, success probability .3: in d/dp the estimate is .70 without and .80 with it.
    p, n, k = 0.3, 4, 2
    totals = {False: 0.0, True: 0.0}
    for c in range(n + 1):
        chance = math.comb(n, c) * p**c * (1 - p) ** (n - c)
        rewards = (np.arange(n) < c).astype(jnp.float32)
        score = np.where(np.arange(n) < c, 1 / p, -1 / (1 - p))
        for loo in totals:
            totals[loo] += chance * float(np.mean(np.asarray(pkpo(rewards, k=k, loo=loo)) * score))
    assert totals[False] == pytest.approx(0.70, abs=1e-6)
    assert totals[True] == pytest.approx(0.80, abs=1e-6)


@for_each("values", BINARY)
@for_each("order", [1, 2, 3, 4])
def test_the_series_of_the_log_probability(values, order):
    p = right(values)
    want = gradient(
        lambda probabilities: -sum((1 - p(probabilities)) ** j / j for j in range(1, order + 1))
    )
    got = expectation(lambda r: maclaurin(r, order=order), values)
    close(got, want, atol=1e-6)


@for_each("values", [*BINARY, LEVELS])
def test_the_lead_of_the_best_is_the_gradient_of_the_expected_best(values):
    def best(probabilities):
        return probabilities[ARMS].prod(-1) @ values[ARMS].max(-1)

    got = expectation(lambda r: grpo_passk(r, scale="none"), values, total=True)
    close(got, gradient(best), atol=1e-6)
