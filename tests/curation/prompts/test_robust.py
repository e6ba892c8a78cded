"""Bins of prompts by difficulty: Prompt-GDRO's weights, Rollout-GDRO's arms."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_curation import (
    arm_scores_update,
    bin_advantage_weights,
    bin_means,
    bin_scores_update,
    choose_arms,
    difficulty_bins,
    exponential_weights,
    pass_history_init,
    pass_history_rate,
    pass_history_update,
    prompt_gdro,
    shadow_price,
)
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import BinScores

RNG = np.random.default_rng(0)
EDGES = (0.4, 0.75)


def test_bins():
    # History equals a deque a prompt.
    window, size = 3, 4
    history, rings = pass_history_init(size, window), [[] for _ in range(size)]
    update = jax.jit(pass_history_update)
    for _ in range(6):
        ids = RNG.integers(-1, size + 1, 7)
        hit, where = RNG.random(7) < 0.5, RNG.random(7) < 0.8
        history = update(history, jnp.asarray(ids), jnp.asarray(hit), where=jnp.asarray(where))
        for prompt, right, valid in zip(ids, hit, where, strict=True):
            if valid and 0 <= prompt < size:
                rings[prompt] = [*rings[prompt], right][-window:]
        expected = [np.mean(ring) if ring else 0 for ring in rings]
        np.testing.assert_allclose(pass_history_rate(history), expected, rtol=1e-6)

    # Bins of equal rates and of extremes.
    rates = jnp.linspace(0, 1, 11)
    edges = tuple(i / 10 for i in range(1, 10))
    expected = np.minimum(np.arange(11), 9)
    np.testing.assert_array_equal(difficulty_bins(rates, edges=edges), expected)
    expected[[0, -1]] = -1
    np.testing.assert_array_equal(difficulty_bins(rates, edges=edges, extremes=False), expected)

    # Means of bins leave out what has none.
    values = jnp.array([[1.0, 2.0, jnp.nan], [4.0, jnp.inf, 7.0]])
    bins = jnp.array([[0, 2, 1], [2, -1, 5]])
    where = jnp.array([[True, True, False], [True, True, True]])
    means, present = bin_means(values, bins, num_bins=4, where=where)
    assert means.tolist() == [1.0, 0.0, 3.0, 0.0]
    assert present.tolist() == [True, False, True, False]
    shared, _ = bin_means(values, bins, num_bins=4, by_share=True, where=where)
    np.testing.assert_allclose(shared, [3.0, 0.0, 4.5, 0.0], rtol=1e-6)


@for_each(
    ("rate", "last", "expected"),
    [
        (0.39, -1, 0), (0.4, -1, 1), (0.75, -1, 2), (1.0, -1, 2), (0.0, -1, 0),
        (0.42, 0, 0), (0.43, 0, 1), (0.9, 0, 2),
        (0.74, 2, 2), (0.72, 2, 1), (0.71, 2, 1),
        (0.38, 1, 1), (0.36, 1, 0), (0.38, 2, 0), (0.5, 1, 1),
    ],
)  # fmt: skip
def test_bins_are_left_only_well_past_the_border(rate, last, expected):
    bins = difficulty_bins(jnp.float32(rate), edges=EDGES, last=jnp.int32(last), hysteresis=0.03)
    assert int(bins) == expected


def test_scores():
    # Scores start at the first mean and then follow.
    state = BinScores(jnp.zeros(3), jnp.zeros(3, bool))
    present = jnp.array([True, False, True])
    state = bin_scores_update(state, jnp.array([2.0, jnp.nan, 4.0]), present, rate=0.25)
    assert state.scores.tolist() == [2.0, 0.0, 4.0] and state.seen.tolist() == present.tolist()
    state = bin_scores_update(state, jnp.full(3, 8.0), jnp.array([False, True, True]), rate=0.25)
    assert state.scores.tolist() == [2.0, 8.0, 5.0] and state.seen.all()

    # Weights worked numbers.
    np.testing.assert_allclose(jnp.exp(SCORES), [1.221403, 1.822119, 0.904837], rtol=1e-6)
    weights = exponential_weights(SCORES, eta=1.0, explore=0.1, bound=2.0)
    np.testing.assert_allclose(weights, [0.311743, 0.448672, 0.239585], atol=1e-6)
    for even in (
        exponential_weights(SCORES, eta=0.0),
        exponential_weights(SCORES, explore=1.0),
        exponential_weights(jnp.full(3, 7.0), eta=5.0, explore=0.0),
        exponential_weights(SCORES, eta=9.0, explore=0.0, bound=1e-9),
    ):
        np.testing.assert_allclose(even, 1 / 3, rtol=1e-6)

    # Absent bins have no weight and are not read.
    scores, present = jnp.array([0.5, jnp.nan, 0.1]), jnp.array([True, False, True])
    weights = exponential_weights(scores, present=present, explore=0.2)
    some = exponential_weights(scores[jnp.array([0, 2])], explore=0.2)
    np.testing.assert_allclose(weights[jnp.array([0, 2])], some, rtol=1e-6)
    assert weights[1] == 0
    assert not exponential_weights(scores, present=jnp.zeros(3, bool)).any()
    huge = exponential_weights(jnp.array([1e30, -1e30]), explore=0.0)
    assert huge.tolist() == [1.0, 0.0]

    # Standardized scores.
    seen = jnp.array([True, True, True, False])
    scores = jnp.array([1.0, 2.0, 3.0, jnp.nan])
    z = (np.arange(3) - 1) / np.std([1, 2, 3])
    expected = np.exp(2 * z) / np.exp(2 * z).sum()
    weights = exponential_weights(
        scores, eta=2.0, explore=0.0, present=seen, standardize=True, seen=seen
    )
    np.testing.assert_allclose(weights[:3], expected, rtol=1e-5)


SCORES = jnp.array([0.2, 0.6, -0.1])


def test_weights():
    # Weights are the best response of an adversary with entropy.
    eta = 0.7
    q = np.asarray(exponential_weights(SCORES, eta=eta, explore=0.0), np.float64)
    value = (q * SCORES).sum() - (q * np.log(q)).sum() / eta
    np.testing.assert_allclose(
        value, np.log(np.exp(eta * np.float64(SCORES)).sum()) / eta, rtol=1e-6
    )
    others = RNG.dirichlet(np.ones(3), 200)
    assert ((others @ SCORES - (others * np.log(others)).sum(-1) / eta) <= value + 1e-6).all()

    # Factors of advantages have mean one up to the cap.
    weights = jnp.array([0.1, 0.2, 0.7])
    bins = jnp.array([[0, 0, 1], [2, -1, 2]])
    where = jnp.array([[True, True, True], [True, True, False]])
    factor = np.asarray(bin_advantage_weights(weights, bins, where=where))
    inside = factor[[0, 0, 0, 1], [0, 1, 2, 0]]
    np.testing.assert_allclose(inside.mean(), 1.0, rtol=1e-6)
    np.testing.assert_allclose(inside / inside[0], [1, 1, 2, 7], rtol=1e-5)
    assert factor[1, 1] == factor[1, 2] == 1
    np.testing.assert_allclose(bin_advantage_weights(weights, bins, most=0.5).max(), 1.0)
    assert bin_advantage_weights(weights, bins, most=0.5)[0].max() <= 0.5
    np.testing.assert_array_equal(bin_advantage_weights(jnp.zeros(3), bins), np.ones((2, 3)))


def run_gdro(batches, **options):
    robust = prompt_gdro(num_prompts=6, edges=EDGES, signal="failure", **options)
    state, factors = robust.init(), []
    for ids, rewards, where in batches:
        context = {"prompt_ids": ids, "rewards": rewards, "where": where}
        out, same = robust.update(jnp.ones(rewards.shape), state, **context)
        assert same is state
        state = robust.learn(state, **context)
        factors.append(out)
    return factors, state


def test_prompt_gdro():
    # The transform is its parts and weighs by what came before.
    batches = []
    for _ in range(4):
        ids = jnp.asarray(RNG.permutation(6)[:4])
        rewards = jnp.asarray(RNG.random((4, 5)) < RNG.random((4, 1)), jnp.float32)
        batches.append((ids, rewards, jnp.asarray(RNG.random((4, 5)) < 0.8)))
    options = {"window": 3, "hysteresis": 0.05, "extremes": True, "eta": 3.0, "explore": 0.1}
    factors, state = run_gdro(batches, rate=0.5, **options)
    history, last = pass_history_init(6, 3), jnp.full(6, -1)
    adversary = BinScores(jnp.zeros(3), jnp.zeros(3, bool))
    for (ids, rewards, where), factor in zip(batches, factors, strict=True):
        rates = pass_history_rate(history)[ids]
        bins = difficulty_bins(rates, edges=EDGES, last=last[ids], hysteresis=0.05)
        each = jnp.repeat(bins[:, None], 5, 1)
        failure, present = bin_means(1 - rewards, each, num_bins=3, by_share=True, where=where)
        weights = exponential_weights(adversary.scores, eta=3.0, explore=0.1, present=present)
        expected = bin_advantage_weights(weights, each, where=where)
        np.testing.assert_allclose(factor, expected, rtol=1e-6)
        hit = jnp.any((rewards > 0.5) & where, -1)
        history = pass_history_update(history, ids, hit, where=where.any(-1))
        last = last.at[ids].set(bins)
        adversary = bin_scores_update(adversary, failure, present, rate=0.5)
    np.testing.assert_allclose(state.adversary.scores, adversary.scores, rtol=1e-6)
    np.testing.assert_array_equal(state.bins, last)
    assert not np.allclose(factors[-1], 1.0) and np.allclose(factors[0], 1.0)

    # The scores of bins by hand. Ratios of 1.5 for the first prompt: its losses are -1.28 and
    # 1.5; the other's -1 and 1.
    robust = prompt_gdro(num_prompts=2, edges=(0.5,), extremes=True, eta=2.0, explore=0.0)
    rewards, ids, mask = (
        jnp.array([[1.0, 0.0], [0.0, 0.0]]),
        jnp.arange(2),
        jnp.ones((2, 2, 1), bool),
    )
    plain = jnp.array([[1.0, -1.0], [1.0, -1.0]])
    logp = jnp.log(jnp.array([1.5, 1.0]))[:, None, None] * jnp.ones((2, 2, 1))
    batch = {"prompt_ids": ids, "rewards": rewards, "where": rewards >= 0}
    of_update = {"logp": logp, "old_logp": jnp.zeros((2, 2, 1)), "mask": mask}

    def step(state):
        advantages, same = robust.update(plain, state, **batch)
        assert same is state
        return advantages, robust.learn(state, advantages=advantages, **batch, **of_update)

    advantages, state = step(robust.init())
    np.testing.assert_array_equal(advantages, plain)
    np.testing.assert_allclose(state.adversary.scores, [0.055, 0.0], atol=1e-6)  # 0.22 over 4
    advantages, state = step(state)  # the first prompt, which was solved, is in the upper bin now
    assert state.bins.tolist() == [1, 0]
    # A mean of 0.11 over a share of a half; that of the lower bin is 0.
    np.testing.assert_allclose(state.adversary.scores, [0.0484, 0.22], atol=1e-6)
    weights = np.exp(2 * np.array([0.22, 0.0484]))
    factors = weights / weights.mean()
    advantages, state = step(state)
    np.testing.assert_allclose(advantages, plain * factors[:, None], rtol=1e-5)
    # The losses are those of the advantages without the weights.
    np.testing.assert_allclose(state.adversary.scores, [0.042592, 0.22], atol=1e-6)

    # Eta zero is plain grpo and tokens take the factor of their sequence.
    robust = jr.chain(jr.stateless(jr.advantages.grpo), prompt_gdro(num_prompts=3, eta=0.0))
    rewards, ids = jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([2, 0])
    out, _ = robust.update(rewards, robust.init(), prompt_ids=ids, rewards=rewards)
    np.testing.assert_allclose(out, jr.advantages.grpo(rewards), rtol=1e-6)
    tokens, state = prompt_gdro(num_prompts=3), prompt_gdro(num_prompts=3).init()
    out, _ = tokens.update(jnp.ones((2, 2, 4)), state, prompt_ids=ids, rewards=rewards)
    assert out.shape == (2, 2, 4)

    # Junk in masked rollouts and strangers change nothing.
    ids, where = jnp.array([1, 9]), jnp.array([[True, False], [True, True]])
    clean = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    junk = clean.at[0, 1].set(jnp.nan)
    (first, *_), state = run_gdro([(ids, clean, where)], extremes=True)
    (second, *_), other = run_gdro([(ids, junk, where)], extremes=True)
    np.testing.assert_array_equal(first, second)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    assert state.history.count.tolist() == [0, 1, 0, 0, 0, 0] and first[1].tolist() == [1, 1]


@for_each("total", [7, 20, 33, 200])
def test_arms_are_the_best_of_all_choices(total):
    counts, arms = np.array([3, 0, 2, 4]), (1, 2, 5)
    likes = np.log(RNG.dirichlet(np.ones(3), 4))
    present = np.flatnonzero(counts)

    def order(choice):
        spent = sum(counts[b] * arms[i] for b, i in zip(present, choice, strict=True))
        return abs(spent - total), -sum(likes[b, i] for b, i in zip(present, choice, strict=True))

    best = min(itertools.product(range(3), repeat=3), key=order)
    chosen = choose_arms(jnp.asarray(likes, jnp.float32), counts, arms=arms, total=total)
    assert chosen[present].tolist() == list(best) and chosen[1] == -1


def test_arms():
    # One bin gets the mean whatever its scores and no bin nothing.
    likes = jnp.array([[-9.0, -0.1, -8.0]])
    assert choose_arms(likes, jnp.array([5]), arms=(2, 4, 8), total=10).tolist() == [0]
    assert choose_arms(likes, jnp.array([0]), arms=(2, 4, 8), total=10).tolist() == [-1]

    # Arm scores and price.
    scores = arm_scores_update(
        jnp.ones((3, 2)), jnp.array([1, -1, 0]), jnp.array([0.5, jnp.nan, 0.25]),
        arms=(2, 6), price=0.125, mean_rollouts=4.0,
    )  # fmt: skip
    np.testing.assert_allclose(scores, [[1, 1.25], [1, 1], [1.5, 1]])
    np.testing.assert_allclose(shadow_price(0.0, 4.5, mean_rollouts=4.0, rate=0.1), 0.05, rtol=1e-6)
    np.testing.assert_allclose(shadow_price(0.3, 3.0, mean_rollouts=4.0), 0.25, rtol=1e-6)


ZEROS = jnp.zeros(3)
INTS = jnp.zeros(3, int)
BAD = {
    "pass_history_init: window must be an integer above 0; got 0": lambda: pass_history_init(3, 0),
    "pass_history_update: hit must be bool": lambda: pass_history_update(
        pass_history_init(3, 2), INTS, ZEROS
    ),
    "difficulty_bins: edges must be a tuple of numbers within (0, 1)": lambda: difficulty_bins(
        ZEROS, edges=(0.5, 0.2)
    ),
    "difficulty_bins: hysteresis=0.1 has no effect without last": lambda: difficulty_bins(
        ZEROS, edges=EDGES, hysteresis=0.1
    ),
    "bin_means: these must have the same shape": lambda: bin_means(ZEROS, INTS[:2], num_bins=2),
    "bin_scores_update: rate must be in (0, 1]; got 0": lambda: bin_scores_update(
        BinScores(ZEROS, ZEROS > 0), ZEROS, ZEROS > 0, rate=0.0
    ),
    "exponential_weights: explore must be in [0, 1]": lambda: exponential_weights(
        ZEROS, explore=1.5
    ),
    "exponential_weights: seen=": lambda: exponential_weights(ZEROS, seen=ZEROS > 0),
    "bin_advantage_weights: most must be above 0": lambda: bin_advantage_weights(
        ZEROS, INTS, most=0.0
    ),
    "choose_arms: arms must be 2 integers above 0 in ascending order; got (4, 2)": lambda: (
        choose_arms(jnp.zeros((1, 2)), INTS[:1], arms=(4, 2), total=3)
    ),
    "choose_arms: counts must not be negative": lambda: choose_arms(
        jnp.zeros((1, 2)), -jnp.ones(1, int), arms=(1, 2), total=3
    ),
    "arm_scores_update: chosen must have shape (2,)": lambda: arm_scores_update(
        jnp.zeros((2, 2)), INTS, ZEROS, arms=(1, 2), price=0.0, mean_rollouts=1.0
    ),
    "shadow_price: rate must be above 0": lambda: shadow_price(0, 1, mean_rollouts=1, rate=0.0),
    'prompt_gdro: eps_low has no effect with signal "failure"': lambda: prompt_gdro(
        num_prompts=2, signal="failure", eps_low=0.1
    ),
    "prompt_gdro: signal must be one of 'loss', 'failure'": lambda: prompt_gdro(
        num_prompts=2, signal="rate"
    ),
    "prompt_gdro: explore must be in [0, 1]": lambda: prompt_gdro(num_prompts=2, explore=2.0),
    "prompt_gdro: prompt_ids must have shape (2,)": lambda: prompt_gdro(num_prompts=2).update(
        jnp.zeros((2, 3)),
        prompt_gdro(num_prompts=2).init(),
        prompt_ids=INTS,
        rewards=jnp.zeros((2, 3)),
    ),
}


@for_each("words", BAD)
def test_bad_input(words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        BAD[words]()


def test_a_ratio_has_a_least_value():
    losses = jr.curation.clipped_losses(
        jnp.array([[-60.0]]), jnp.zeros((1, 1)), jnp.ones(1), jnp.ones((1, 1), bool)
    )
    np.testing.assert_allclose(losses, -np.exp([-20.0]), rtol=1e-5)
