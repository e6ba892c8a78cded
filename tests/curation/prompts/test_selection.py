"""Which prompts are rolled out next: scores, draws without replacement, candidates."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_curation import (
    belief_init,
    belief_update,
    beta_bernoulli_information,
    candidate_pool,
    draw_prompts,
    gumbel_top,
    insight_scores,
    learnability,
    nearest_target,
    select_top,
    target_logits,
    thompson_rates,
    vade_information_gain,
    within_band,
)
from rows import for_each
from scipy import stats

from jaxrl_llm.advantages import uncertainty_sampling_weights
from jaxrl_llm.curation import PromptBelief

KEY = jax.random.key(0)
KEYS = jax.random.split(jax.random.key(1), 3000)


@for_each(
    ("score", "rates", "expected"),
    [
        (learnability, [0.0, 0.25, 0.5, 0.75, 1.0], [0, 0.1875, 0.25, 0.1875, 0]),
        (lambda p: learnability(p, power=2.0), [0.0, 0.5], [0, 0.0625]),
        (vade_information_gain, [0, 0.13, 0.32, 0.9, 1], [0, 0.098397, 0.147968, 0.009, 0]),
        (lambda p: nearest_target(p, target=0.25), [0.25, 0.75], [0, -0.25]),
        (lambda p: target_logits(p), [0.5, 0.499, 0.6], [0, -1, -100]),
    ],
)  # fmt: skip
def test_scores_worked_numbers(score, rates, expected):
    np.testing.assert_allclose(score(jnp.array(rates)), expected, rtol=1e-4, atol=1e-6)


def test_scores():
    # The best rate of each score.
    rates = jnp.linspace(0, 1, 1201)
    for score, best in (
        (learnability, 1 / 2),
        (vade_information_gain, 1 / 3),
        (nearest_target, 1 / 2),
    ):
        np.testing.assert_allclose(rates[jnp.argmax(score(rates))], best, atol=1e-6)

    # Insight is the weight at the mean times the information.
    rng = np.random.default_rng(0)
    state = PromptBelief(*jnp.asarray(rng.uniform(0.5, 20, (2, 50)), jnp.float32))
    m = np.asarray(state.alpha / (state.alpha + state.beta), np.float64)
    weight = m * (1 - m) * np.exp(-3.0 * (m - 0.3) ** 2)
    info = beta_bernoulli_information(state.alpha, state.beta, rollouts=4)
    np.testing.assert_allclose(insight_scores(state, rollouts=4), weight * info, rtol=1e-5)
    n = state.alpha + state.beta
    cheap = insight_scores(state, rollouts=4, sharpness=0.0, information="variance")
    np.testing.assert_allclose(cheap, (m * (1 - m)) ** 2 * 4 / ((n + 1) * (n + 4)), rtol=1e-4)

    # Insight leaves what is well known.
    state = PromptBelief(jnp.array([400.0, 2.0]), jnp.array([400.0, 8.0]))
    assert select_top(insight_scores(state, rollouts=8), count=1).tolist() == [1]

    # Permuting the prompts permutes the scores and the choice.
    rates, order = jnp.array([0.1, 0.7, 0.4, 0.95]), jnp.array([2, 0, 3, 1])
    for score in (learnability, vade_information_gain, nearest_target, target_logits):
        np.testing.assert_array_equal(score(rates)[order], score(rates[order]))
        chosen = select_top(score(rates), count=2)
        assert order[select_top(score(rates[order]), count=2)].tolist() == chosen.tolist()

    # Target logits draw in log space.
    probs = jax.nn.softmax(target_logits(jnp.array([0.5, 0.499, 0.6])))
    np.testing.assert_allclose(probs, [0.731059, 0.268941, 0], atol=1e-5)
    flat = target_logits(jnp.array([0.0, 0.4, 0.9]), temperature=1e9)
    np.testing.assert_allclose(jax.nn.softmax(flat), 1 / 3, rtol=1e-6)


def test_selection():
    # Band comes first in random order then the nearest.
    rates = jnp.array([0.05, 0.3, 0.7, 0.9, 0.5, jnp.nan])
    draw = jax.jit(
        jax.vmap(lambda key: select_top(within_band(key, rates, low=0.25, high=0.75), count=6))
    )
    ids = np.asarray(draw(KEYS[:300]))
    assert set(map(tuple, ids[:, :3])) == set(itertools.permutations([1, 2, 4]))
    assert (ids[:, 3:] == [3, 0, -1]).all()

    # Select top ranks leaves out and breaks ties by position.
    scores = jnp.array([1.0, jnp.nan, 3.0, 3.0, -jnp.inf, jnp.inf])
    assert select_top(scores, count=6).tolist() == [5, 2, 3, 0, -1, -1]
    where = jnp.array([True, True, True, False, True, False])
    assert jax.jit(select_top, static_argnames="count")(scores, count=3, where=where).tolist() == [
        2,
        0,
        -1,
    ]


def draws(weights, count, **options):
    draw = jax.vmap(lambda key: draw_prompts(key, jnp.asarray(weights), count=count, **options))
    return np.asarray(jax.jit(draw)(KEYS))


def test_draws():
    # Draws follow the weights without replacement.
    weights = np.array([0.5, 0.2, 0.0, 0.3])
    pairs = {}
    for a, b in itertools.permutations([0, 1, 3], 2):
        pairs[a, b] = weights[a] * weights[b] / (1 - weights[a])
    drawn = [tuple(ids) for ids in draws(weights, 2)]
    expected = [p * len(drawn) for p in pairs.values()]
    assert stats.chisquare([drawn.count(pair) for pair in pairs], expected).pvalue > 0.01
    # The same through logits, with another noise.
    logits = jnp.log(jnp.asarray(weights))
    ids = jax.jit(jax.vmap(lambda key: gumbel_top(key, logits, count=2)))(KEYS)
    drawn = [tuple(pair) for pair in np.asarray(ids)]
    assert stats.chisquare([drawn.count(pair) for pair in pairs], expected).pvalue > 0.01

    # Weights of zero come last and all of them are drawn alike.
    ids = draws([0.0, 1e-30, 0.0, 1e30], 4)
    assert (ids[:, :2] == [3, 1]).all()
    assert {tuple(x) for x in ids[:, 2:]} == {(0, 2), (2, 0)}
    first = draws(np.zeros(4), 1)[:, 0]
    assert stats.chisquare(np.bincount(first, minlength=4)).pvalue > 0.01

    # A share of the draw ignores the weights.
    weights = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    ids = draws(weights, 4, uniform=0.5)
    assert (np.sort(ids[:, :2]) == [0, 1]).all()
    rest = np.bincount(ids[:, 2:].ravel(), minlength=6)
    assert rest[:2].sum() == 0 and stats.chisquare(rest[2:]).pvalue > 0.01
    assert stats.chisquare(np.bincount(draws(weights, 1, uniform=1.0)[:, 0])).pvalue > 0.01

    # Weights of spo draw as its code does.
    weights = uncertainty_sampling_weights(jnp.array([0.0, 0.5, 0.9]))
    np.testing.assert_allclose(weights, np.array([0.05, 0.55, 0.35]) / 0.95, rtol=1e-5)
    first = np.bincount(draws(np.asarray(weights), 1)[:, 0], minlength=3)
    expected = np.array([0.05, 0.55, 0.35]) / 0.95 * len(KEYS)
    assert stats.chisquare(first, expected).pvalue > 0.01


@for_each("uniform", [0.0, 0.5, 1.0])
def test_what_is_left_out_is_never_drawn_and_ids_end_in_minus_one(uniform):
    weights = jnp.array([1.0, jnp.nan, 5.0, 2.0, jnp.inf])
    where = jnp.array([True, True, True, False, False])
    ids = draw_prompts(KEY, weights, count=4, uniform=uniform, where=where)
    assert sorted(ids.tolist()) == [-1, -1, 0, 2] and ids[2:].tolist() == [-1, -1]


@for_each(("prompts", "size"), [(10, 4), (7, 7), (2_000_000_000, 5), (100, 1)])
def test_candidates_are_one_of_each_stretch(prompts, size):
    ids = np.asarray(candidate_pool(KEY, num_prompts=prompts, size=size), np.int64)
    edges = np.array([i * (prompts // size) + min(i, prompts % size) for i in range(size + 1)])
    assert ((edges[:-1] <= ids) & (ids < edges[1:])).all() and edges[-1] == prompts


def vade(key, belief):
    return vade_information_gain(thompson_rates(key, belief))


def mopps(key, belief):
    return nearest_target(thompson_rates(key, belief), target=0.7)


def insight(key, belief):
    return insight_scores(belief, rollouts=8)


@pytest.mark.of_many
@pytest.mark.parametrize(
    ("score", "options", "low", "high"),
    [
        (vade, {"retain": 0.2, "retain_rest": 0.999}, 0.2, 0.5),
        (mopps, {"retain": 0.5}, 0.6, 0.8),
        (insight, {"retain": 0.5}, 0.25, 0.6),
    ],
)
def test_selection_and_belief_together_find_the_prompts_that_are_wanted(score, options, low, high):
    """200 prompts of constant success rates, of which 20 a step get 8 rollouts."""
    rates = jnp.linspace(0.0, 1.0, 200)

    def step(belief, key):
        draw, outcome = jax.random.split(key)
        ids = select_top(score(draw, belief), count=20)
        rewards = jax.random.uniform(outcome, (20, 8)) < rates[ids][:, None]
        return belief_update(belief, ids, rewards.astype(jnp.float32), **options), rates[ids]

    _, chosen = jax.lax.scan(step, belief_init(200), KEYS[:80])
    assert low < chosen[-40:].mean() < high
    wanted = (low + high) / 2
    spread = jnp.abs(chosen - wanted).mean(-1)
    assert spread[-40:].mean() < 0.75 * spread[:4].mean()


RATES = jnp.array([0.1, 0.9])


BAD = {
    "learnability: rates must be floating point": lambda: learnability(jnp.ones(2, int)),
    "learnability: power must be above 0": lambda: learnability(RATES, power=0.0),
    "nearest_target: target must be in [0, 1]": lambda: nearest_target(RATES, target=2.0),
    "low must not be above high; got 0.8 and 0.2": lambda: within_band(
        KEY, RATES, low=0.8, high=0.2
    ),
    "information must be one of 'mutual', 'variance'": lambda: insight_scores(
        PromptBelief(RATES, RATES), rollouts=4, information="mi"
    ),
    "target_logits: temperature must be above 0": lambda: target_logits(RATES, temperature=0.0),
    "select_top: count must be an integer from 1 to 2; got 3": lambda: select_top(RATES, count=3),
    "select_top: scores must have 1 axis": lambda: select_top(RATES[None], count=1),
    "gumbel_top: where must be bool": lambda: gumbel_top(KEY, RATES, count=1, where=RATES),
    "draw_prompts: where must have shape (2,)": lambda: draw_prompts(
        KEY, RATES, count=1, where=jnp.ones(3, bool)
    ),
    "uniform must be in [0, 1]; got -0.1": lambda: draw_prompts(KEY, RATES, count=1, uniform=-0.1),
    "size must be an integer from 1 to 3; got 4": lambda: candidate_pool(
        KEY, num_prompts=3, size=4
    ),
    "size must be an integer from 1 to 3; got 0": lambda: candidate_pool(
        KEY, num_prompts=3, size=0
    ),
}


@for_each("words", BAD)
def test_bad_input(words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        BAD[words]()
