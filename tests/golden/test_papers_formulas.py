"""Methods whose code is not public, against float64 NumPy of what their papers print.

VADE (arXiv:2511.18902): the update in the figure of its project page, whose counts leave the prior
out. InSight (arXiv:2603.01907): equations 6, 15 and 16, with the information integrated over the
success rate in place of a sum of divergences. ADHint (arXiv:2512.13095): the ratio of a hint, of a
note on the paper. ReMix (arXiv:2507.06892): the clip around the last policy, of a note as well; its
repository holds a README alone.
"""

import jax.numpy as jnp
import numpy as np
from scipy import special, stats

from jaxrl_llm import curation, surrogates


def test_vade_counts_of_its_figure():
    rng = np.random.default_rng(71)
    counts = np.zeros((2, 10))  # successes and failures without the prior of (1, 1)
    state = curation.belief_init(10)
    for _ in range(6):
        ids, rewards = rng.permutation(10)[:4], rng.integers(0, 2, (4, 8)).astype(np.float32)
        before, counts = counts, counts * 0.999
        for row, i in enumerate(ids):
            right = float(rewards[row].sum())
            counts[:, i] = 0.2 * before[:, i] + np.array([right, 8.0 - right])
        state = curation.belief_update(
            state, jnp.asarray(ids), jnp.asarray(rewards), retain=0.2, retain_rest=0.999
        )
    np.testing.assert_allclose(state.alpha, counts[0] + 1, rtol=1e-5)
    np.testing.assert_allclose(state.beta, counts[1] + 1, rtol=1e-5)
    rates = rng.random(10)
    gain = curation.vade_information_gain(jnp.asarray(rates, jnp.float32))
    np.testing.assert_allclose(gain, rates * (1 - rates) * (1 - rates), rtol=1e-5)
    order = np.argsort(-np.asarray(rates - 2 * rates**2 + rates**3))[:3]
    assert set(np.asarray(curation.select_top(gain, count=3)).tolist()) == set(order.tolist())


def information(alpha, beta, rollouts):
    """Entropy of the number of right answers, less its mean at a known rate."""
    nodes, weights = special.roots_legendre(400)
    rate, weight = (nodes + 1) / 2, weights / 2 * stats.beta.pdf((nodes + 1) / 2, alpha, beta)
    at_rate = stats.binom.pmf(np.arange(rollouts + 1)[:, None], rollouts, rate)
    marginal = at_rate @ weight

    def entropy(p):
        return -np.sum(special.xlogy(p, p), axis=0)

    return entropy(marginal) - entropy(at_rate) @ weight


def test_insight_scores_by_integration():
    rng = np.random.default_rng(72)
    alpha, beta = rng.uniform(1.0, 30.0, (2, 12))
    expected = []
    for a, b in zip(alpha, beta, strict=True):
        mean = a / (a + b)
        weight = mean * (1 - mean) * np.exp(-3.0 * (mean - 0.3) ** 2)
        expected.append(weight * information(a, b, 8))
    state = curation.PromptBelief(jnp.asarray(alpha, jnp.float32), jnp.asarray(beta, jnp.float32))
    scores = curation.insight_scores(state, rollouts=8)
    np.testing.assert_allclose(scores, expected, rtol=2e-4)


def test_adhint_shows_more_of_a_solution_that_is_harder():
    rng = np.random.default_rng(73)
    rewards = rng.integers(0, 2, (9, 8)).astype(np.float32)
    where = rng.random((9, 8)) < 0.7
    expected = []
    for row, there in zip(rewards.astype(np.float64), where, strict=True):
        share = 0.1 + 0.8 * (1 - row[there].mean()) if there.any() else 0.1
        expected.append(min(max(share, 0.0), 1.0))
    ratio = curation.adhint_ratio(jnp.asarray(rewards), where=jnp.asarray(where), low=0.1, high=0.9)
    np.testing.assert_allclose(ratio, expected, rtol=1e-5)
    shown = curation.prefix_length(jnp.full(9, 64), ratio)
    np.testing.assert_array_equal(shown, np.round(64 * np.float32(expected)))


def test_remix_clips_around_the_last_policy():
    rng = np.random.default_rng(74)
    logp, last, sampler = -rng.gamma(2.0, 0.5, (3, 40, 5))
    last, sampler = (0.1 * x + 0.9 * logp for x in (last, sampler))
    advantages = rng.normal(size=40)
    expected = np.zeros((40, 5))
    for i, t in np.ndindex(40, 5):
        ratio, center = np.exp(logp[i, t] - sampler[i, t]), np.exp(last[i, t] - sampler[i, t])
        clipped = min(max(ratio, center - 0.2), center + 0.2)
        expected[i, t] = -min(ratio * advantages[i], clipped * advantages[i])
    arrays = (jnp.asarray(x, jnp.float32) for x in (logp, last, advantages, sampler))
    logp, last, advantages, sampler = arrays
    mask = jnp.ones((40, 5), bool)
    loss = surrogates.mix_ppg(logp, last, advantages, mask, behavior_logp=sampler)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    clipped = np.abs(np.exp(logp - sampler) - np.exp(last - sampler)) > 0.2
    assert 10 < clipped.sum() < 190
