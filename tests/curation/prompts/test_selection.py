"""Which prompts are rolled out next: scores, draws without replacement, candidates."""

import itertools

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each
from scipy import stats

from jaxrl_llm.curation import PromptBelief

KEY = jax.random.key(0)
KEYS = jax.random.split(jax.random.key(1), 3000)


@for_each(
    ("score", "rates", "expected"),
    [
        (cur.learnability, [0.0, 0.25, 0.5, 0.75, 1.0], [0, 0.1875, 0.25, 0.1875, 0]),
        (lambda p: cur.learnability(p, power=2.0), [0.0, 0.5], [0, 0.0625]),
        (cur.vade_information_gain, [0, 0.13, 0.32, 0.9, 1], [0, 0.098397, 0.147968, 0.009, 0]),
        (lambda p: cur.nearest_target(p, target=0.25), [0.25, 0.75], [0, -0.25]),
        (lambda p: cur.target_logits(p), [0.5, 0.499, 0.6], [0, -1, -100]),
    ],
)  # fmt: skip
def test_scores_worked_numbers(score, rates, expected):
    close(score(jnp.array(rates)), expected, rtol=1e-4, atol=1e-6)


def test_scores():
    # Insight is the weight at the mean times the information.
    rng = np.random.default_rng(0)
    state = PromptBelief(*jnp.asarray(rng.uniform(0.5, 20, (2, 50)), jnp.float32))
    m = np.asarray(state.alpha / (state.alpha + state.beta), np.float64)
    weight = m * (1 - m) * np.exp(-3.0 * (m - 0.3) ** 2)
    info = cur.beta_bernoulli_information(state.alpha, state.beta, rollouts=4)
    close(cur.insight_scores(state, rollouts=4), weight * info, rtol=1e-5)
    n = state.alpha + state.beta
    cheap = cur.insight_scores(state, rollouts=4, sharpness=0.0, information="variance")
    close(cheap, (m * (1 - m)) ** 2 * 4 / ((n + 1) * (n + 4)), rtol=1e-4)


def test_selection():
    # Band comes first in random order then the nearest.
    rates = jnp.array([0.05, 0.3, 0.7, 0.9, 0.5, jnp.nan])
    draw = jax.jit(
        jax.vmap(
            lambda key: cur.select_top(cur.within_band(key, rates, low=0.25, high=0.75), count=6)
        )
    )
    ids = np.asarray(draw(KEYS[:300]))
    assert set(map(tuple, ids[:, :3])) == set(itertools.permutations([1, 2, 4]))
    assert (ids[:, 3:] == [3, 0, -1]).all()

    # Select top ranks leaves out and breaks ties by position.
    scores = jnp.array([1.0, jnp.nan, 3.0, 3.0, -jnp.inf, jnp.inf])
    assert cur.select_top(scores, count=6).tolist() == [5, 2, 3, 0, -1, -1]
    where = jnp.array([True, True, True, False, True, False])
    equal(
        jax.jit(cur.select_top, static_argnames="count")(scores, count=3, where=where), [2, 0, -1]
    )


def draws(weights, count, **options):
    draw = jax.vmap(lambda key: cur.draw_prompts(key, jnp.asarray(weights), count=count, **options))
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
    ids = jax.jit(jax.vmap(lambda key: cur.gumbel_top(key, logits, count=2)))(KEYS)
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


@for_each("uniform", [0.0, 0.5, 1.0])
def test_what_is_left_out_is_never_drawn_and_ids_end_in_minus_one(uniform):
    weights = jnp.array([1.0, jnp.nan, 5.0, 2.0, jnp.inf])
    where = jnp.array([True, True, True, False, False])
    ids = cur.draw_prompts(KEY, weights, count=4, uniform=uniform, where=where)
    assert sorted(ids.tolist()) == [-1, -1, 0, 2] and ids[2:].tolist() == [-1, -1]


@for_each(("prompts", "size"), [(10, 4), (7, 7), (2_000_000_000, 5), (100, 1)])
def test_candidates_are_one_of_each_stretch(prompts, size):
    ids = np.asarray(cur.candidate_pool(KEY, num_prompts=prompts, size=size), np.int64)
    edges = np.array([i * (prompts // size) + min(i, prompts % size) for i in range(size + 1)])
    assert ((edges[:-1] <= ids) & (ids < edges[1:])).all() and edges[-1] == prompts
