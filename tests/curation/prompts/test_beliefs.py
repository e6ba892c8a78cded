"""Beliefs of success rates: updates of VADE, MoPPS and InSight, draws, information."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_curation import (
    belief_init,
    belief_mean,
    belief_update,
    beta_bernoulli_information,
    thompson_rates,
    variance_reduction,
)
from rows import for_each
from scipy import special, stats

from jaxrl_llm.advantages import BetaTracker, beta_tracker_update
from jaxrl_llm.curation import PromptBelief


def state_of(alpha, beta):
    return PromptBelief(jnp.array(alpha, jnp.float32), jnp.array(beta, jnp.float32))


def outcomes(right, rollouts=8):
    """One row of ``rollouts`` rewards a prompt."""
    right = jnp.asarray(right)[:, None]
    return (jnp.arange(rollouts) < right).astype(jnp.float32)


# The counts that VADE's overview prints are without the prior of 1.
VADE = {"retain": 0.2, "retain_rest": 0.999}


@for_each(
    ("start", "right", "options", "expected"),
    [
        ((1.1, 9.4), 1, VADE, (2.02, 9.68)),
        ((3.7, 6.3), 4, VADE, (5.54, 6.06)),
        ((3.0, 5.0), 2, {"retain": 0.5}, (4.0, 9.0)),
        ((3.0, 5.0), 2, {"retain": 1.0}, (5.0, 11.0)),
        ((3.0, 5.0), 2, {"retain": 0.0}, (3.0, 7.0)),
        ((3.0, 5.0), 2, {"retain": 0.5, "prior": (0.0, 0.0)}, (3.5, 8.5)),
    ],
)
def test_update_worked_numbers(start, right, options, expected):
    state = belief_update(
        state_of([start[0]], [start[1]]), jnp.array([0]), outcomes([right]), **options
    )
    np.testing.assert_allclose([state.alpha[0], state.beta[0]], expected, rtol=1e-5)


def test_updates():
    # What is not visited drifts to the prior.
    state = belief_update(state_of([10.0, 1], [1.2, 1]), jnp.array([1]), outcomes([3]), **VADE)
    np.testing.assert_allclose([state.alpha[0], state.beta[0]], [9.991, 1.1998], rtol=1e-5)
    state = belief_update(state_of([10.0, 1], [1.2, 1]), jnp.array([1]), outcomes([3]), retain=0.5)
    np.testing.assert_allclose([state.alpha[0], state.beta[0]], [10.0, 1.2])

    # A constant outcome settles at its share of the past.
    state = state_of([1.0], [1.0])
    update = jax.jit(lambda s: belief_update(s, jnp.array([0]), outcomes([3]), retain=0.2))
    for _ in range(12):
        state = update(state)
    np.testing.assert_allclose([state.alpha[0] - 1, state.beta[0] - 1], [3.75, 6.25], rtol=1e-4)

    # Update equals the float64 reference with repeats strangers and junk.
    rng = np.random.default_rng(0)
    ids = np.array([2, 0, 2, -1, 7, 4, 3])
    rewards = rng.random((7, 4))
    where = rng.random((7, 4)) < 0.7
    where[5] = False  # no visit
    state = PromptBelief(*rng.uniform(1, 9, (2, 5)).astype(np.float32))
    retain = rng.random(7).astype(np.float32)
    options = {"retain_rest": 0.9, "prior": (1.5, 0.5)}
    expected = reference(state, ids, rewards, where, retain, 0.9, (1.5, 0.5))
    junk = np.where(where, rewards, np.resize([np.nan, np.inf, 1e30], where.shape))
    out = belief_update(
        jax.tree.map(jnp.asarray, state), jnp.asarray(ids), jnp.asarray(junk, jnp.float32),
        retain=jnp.asarray(retain), where=jnp.asarray(where), **options,
    )  # fmt: skip
    np.testing.assert_allclose(out.alpha, expected[0], rtol=1e-5)
    np.testing.assert_allclose(out.beta, expected[1], rtol=1e-5)

    # The tracker of spo is the same recursion without a prior.
    rewards, ids = jnp.array([[1.0], [0.0], [1.0]]), jnp.array([1, 0, 1])
    tracker = BetaTracker(jnp.array([2.0, 3.0]), jnp.array([5.0, 4.0]))
    ours = belief_update(tracker, ids, rewards, retain=0.875, prior=(0.0, 0.0))
    theirs = beta_tracker_update(tracker, ids, rewards, 0.875)
    assert isinstance(ours, BetaTracker)
    np.testing.assert_allclose(ours, theirs)

    # Init and mean.
    state = belief_init(3, prior=(2.0, 6.0))
    assert state.alpha.tolist() == [2.0] * 3 and belief_mean(state).tolist() == [0.25] * 3
    state = belief_init(2, successes=jnp.array([2, 0]), samples=jnp.array([8, 0]), weight=3.0)
    assert state.alpha.tolist() == [7.0, 1.0] and state.beta.tolist() == [19.0, 1.0]
    assert belief_mean(state_of([0.0], [0.0])).tolist() == [0.5]


def reference(state, ids, rewards, where, retain, rest, prior):
    out = []
    for values, base, hit in zip(state, prior, (lambda r: r, lambda r: 1 - r), strict=True):
        values = np.array(values, np.float64)
        for prompt in range(len(values)):
            rows = [i for i, x in enumerate(ids) if x == prompt and where[i].any()]
            share = np.mean([retain[i] for i in rows]) if rows else rest
            values[prompt] = share * values[prompt] + (1 - share) * base
            values[prompt] += sum(hit(rewards[i][where[i]]).sum() for i in rows)
        out.append(values)
    return out


@for_each(("alpha", "beta"), [(1, 1), (2.5, 7), (0.3, 0.6), (50, 3), (4000, 9000)])
def test_draws_have_the_distribution_of_the_belief(alpha, beta):
    size = 4000
    state = state_of([alpha] * size, [beta] * size)
    rates = thompson_rates(jax.random.key(3), state)
    assert stats.kstest(np.asarray(rates, np.float64), stats.beta(alpha, beta).cdf).pvalue > 0.01


def test_draws_of_candidates_extremes_and_strangers():
    state = state_of([0.0, 3.0, 1.0, jnp.nan, 1.0, jnp.inf], [2.0, 0.0, 1.0, 1.0, -1.0, 1.0])
    rates = thompson_rates(jax.random.key(0), state)
    assert rates[:2].tolist() == [0.0, 1.0] and 0 < rates[2] < 1 and jnp.isnan(rates[3])
    some = thompson_rates(jax.random.key(0), state, jnp.array([2, -1, 6, 0]))
    assert jnp.isnan(some).tolist() == [False, True, True, False] and some[3] == 0
    again = jax.jit(thompson_rates)(jax.random.key(0), state, jnp.array([2, -1, 6, 0]))
    np.testing.assert_array_equal(some, again)


@for_each(
    ("alpha", "beta", "rollouts", "expected"),
    [
        (1, 1, 1, math.log(2) - 0.5), (2, 2, 1, 0.109814), (1, 1, 8, 0.766390),
        (5, 5, 8, 0.293033), (50, 50, 8, 0.038479),
    ],
)  # fmt: skip
def test_information_worked_numbers(alpha, beta, rollouts, expected):
    out = beta_bernoulli_information(jnp.float32(alpha), jnp.float32(beta), rollouts=rollouts)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def entropy(a, b):
    psi = special.digamma
    return special.betaln(a, b) - (a - 1) * psi(a) - (b - 1) * psi(b) + (a + b - 2) * psi(a + b)


@for_each("rollouts", [1, 16])
def test_information_equals_the_float64_entropies_of_the_paper(rollouts):
    counts = np.array([0.05, 0.7, 1.0, 5.9, 6.1, 40.0, 900.0, 20_000.0])
    a, b = (x.ravel() for x in np.meshgrid(counts, counts))
    expected = entropy(a, b)
    for s in range(rollouts + 1):
        log_prob = special.betaln(a + s, b + rollouts - s) - special.betaln(a, b)
        expected -= math.comb(rollouts, s) * np.exp(log_prob) * entropy(a + s, b + rollouts - s)
    out = beta_bernoulli_information(
        jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), rollouts=rollouts
    )
    # The float64 entropies of large counts cancel to some 1e-9.
    np.testing.assert_allclose(out, expected, rtol=2e-4, atol=1e-8)


def test_information():
    # Information falls with evidence grows with rollouts and is symmetric.
    m = jnp.array([1.0, 2.0, 10.0, 100.0, 1e4, 1e6])
    by_evidence = beta_bernoulli_information(0.3 * m, 0.7 * m, rollouts=8)
    assert (jnp.diff(by_evidence) < 0).all()
    by_rollouts = [beta_bernoulli_information(m, 2 * m, rollouts=k) for k in (1, 2, 5, 9)]
    assert (jnp.diff(jnp.stack(by_rollouts), axis=0) > 0).all()
    np.testing.assert_allclose(
        by_rollouts[1], beta_bernoulli_information(2 * m, m, rollouts=2), rtol=1e-4
    )

    # Variance reduction is the expected fall of the variance.
    a, b, k = 2.0, 5.0, 6
    expected = stats.beta(a, b).var()
    for s in range(k + 1):
        prob = stats.betabinom(k, a, b).pmf(s)
        expected -= prob * stats.beta(a + s, b + k - s).var()
    out = variance_reduction(jnp.float32(a), jnp.float32(b), rollouts=k)
    np.testing.assert_allclose(out, expected, rtol=1e-5)


@for_each(("counts", "rollouts", "expected"), [(1.0, 1, 1 / 36), (2.0, 1, 0.01), (1.0, 8, 1 / 15)])
def test_variance_reduction_worked_numbers(counts, rollouts, expected):
    out = variance_reduction(jnp.float32(counts), jnp.float32(counts), rollouts=rollouts)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


STATE = state_of([1.0, 1.0], [1.0, 1.0])
IDS, REWARDS = jnp.array([0]), jnp.ones((1, 2))


BAD = {
    "belief_init: num_prompts must be an integer above 0": lambda: belief_init(0),
    "belief_init: prior[0] must be above 0": lambda: belief_init(2, prior=(0.0, 1.0)),
    "successes and samples are required together": lambda: belief_init(2, successes=IDS),
    "belief_update: retain must be in [0, 1]; got 1.5": lambda: belief_update(
        STATE, IDS, REWARDS, retain=1.5
    ),
    "prior[0] must not be negative": lambda: belief_update(STATE, IDS, REWARDS, prior=(-1.0, 0.0)),
    "belief_update: rewards must have 2 axes": lambda: belief_update(STATE, IDS, REWARDS[0]),
    "belief_update: prompt_ids must hold integers": lambda: belief_update(
        STATE, jnp.array([0.0]), REWARDS
    ),
    "belief_update: where must be bool": lambda: belief_update(
        STATE, IDS, REWARDS, where=jnp.ones((1, 2))
    ),
    "thompson_rates: prompt_ids must hold integers": lambda: thompson_rates(
        jax.random.key(0), STATE, jnp.ones(1)
    ),
    "rollouts must be an integer above 0; got 0": lambda: beta_bernoulli_information(
        *STATE, rollouts=0
    ),
    "variance_reduction: these must have the same shape": lambda: variance_reduction(
        STATE.alpha, STATE.beta[:1], rollouts=1
    ),
}


@for_each("words", BAD)
def test_bad_input(words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        BAD[words]()
