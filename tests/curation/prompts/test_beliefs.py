"""Beliefs of success rates: updates of VADE, MoPPS and InSight, draws, information."""

import math

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
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
    state = cur.belief_update(
        state_of([start[0]], [start[1]]), jnp.array([0]), outcomes([right]), **options
    )
    close([state.alpha[0], state.beta[0]], expected, rtol=1e-5)


def test_updates():
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
    out = cur.belief_update(
        jax.tree.map(jnp.asarray, state), jnp.asarray(ids), jnp.asarray(junk, jnp.float32),
        retain=jnp.asarray(retain), where=jnp.asarray(where), **options,
    )  # fmt: skip
    close(out.alpha, expected[0], rtol=1e-5)
    close(out.beta, expected[1], rtol=1e-5)

    # The tracker of spo is the same recursion without a prior.
    rewards, ids = jnp.array([[1.0], [0.0], [1.0]]), jnp.array([1, 0, 1])
    tracker = BetaTracker(jnp.array([2.0, 3.0]), jnp.array([5.0, 4.0]))
    ours = cur.belief_update(tracker, ids, rewards, retain=0.875, prior=(0.0, 0.0))
    theirs = beta_tracker_update(tracker, ids, rewards, 0.875)
    assert isinstance(ours, BetaTracker)
    close(ours, theirs)

    # Init and mean.
    state = cur.belief_init(3, prior=(2.0, 6.0))
    assert state.alpha.tolist() == [2.0] * 3 and cur.belief_mean(state).tolist() == [0.25] * 3
    state = cur.belief_init(2, successes=jnp.array([2, 0]), samples=jnp.array([8, 0]), weight=3.0)
    assert state.alpha.tolist() == [7.0, 1.0] and state.beta.tolist() == [19.0, 1.0]
    assert cur.belief_mean(state_of([0.0], [0.0])).tolist() == [0.5]


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
    rates = cur.thompson_rates(jax.random.key(3), state)
    assert stats.kstest(np.asarray(rates, np.float64), stats.beta(alpha, beta).cdf).pvalue > 0.01


def test_draws_of_candidates_extremes_and_strangers():
    state = state_of([0.0, 3.0, 1.0, jnp.nan, 1.0, jnp.inf], [2.0, 0.0, 1.0, 1.0, -1.0, 1.0])
    rates = cur.thompson_rates(jax.random.key(0), state)
    assert rates[:2].tolist() == [0.0, 1.0] and 0 < rates[2] < 1 and jnp.isnan(rates[3])
    some = cur.thompson_rates(jax.random.key(0), state, jnp.array([2, -1, 6, 0]))
    assert jnp.isnan(some).tolist() == [False, True, True, False] and some[3] == 0
    again = jax.jit(cur.thompson_rates)(jax.random.key(0), state, jnp.array([2, -1, 6, 0]))
    equal(some, again)


@for_each(
    ("alpha", "beta", "rollouts", "expected"),
    [
        (1, 1, 1, math.log(2) - 0.5), (2, 2, 1, 0.109814), (1, 1, 8, 0.766390),
        (5, 5, 8, 0.293033), (50, 50, 8, 0.038479),
    ],
)  # fmt: skip
def test_information_worked_numbers(alpha, beta, rollouts, expected):
    out = cur.beta_bernoulli_information(jnp.float32(alpha), jnp.float32(beta), rollouts=rollouts)
    close(out, expected, atol=1e-6)


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
    out = cur.beta_bernoulli_information(
        jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), rollouts=rollouts
    )
    # The float64 entropies of large counts cancel to some 1e-9.
    close(out, expected, rtol=2e-4, atol=1e-8)


def test_information():
    # Variance reduction is the expected fall of the variance.
    a, b, k = 2.0, 5.0, 6
    expected = stats.beta(a, b).var()
    for s in range(k + 1):
        prob = stats.betabinom(k, a, b).pmf(s)
        expected -= prob * stats.beta(a + s, b + k - s).var()
    out = cur.variance_reduction(jnp.float32(a), jnp.float32(b), rollouts=k)
    close(out, expected, rtol=1e-5)


@for_each(("counts", "rollouts", "expected"), [(1.0, 1, 1 / 36), (2.0, 1, 0.01), (1.0, 8, 1 / 15)])
def test_variance_reduction_worked_numbers(counts, rollouts, expected):
    out = cur.variance_reduction(jnp.float32(counts), jnp.float32(counts), rollouts=rollouts)
    close(out, expected, rtol=1e-6)
