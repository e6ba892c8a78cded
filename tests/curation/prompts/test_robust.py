"""Bins of prompts by difficulty: Prompt-GDRO's weights, Rollout-GDRO's arms."""

import itertools

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import BinScores

EDGES = (0.4, 0.75)


def test_bins():
    # History equals a deque a prompt.
    window, size, rng = 3, 4, np.random.default_rng(0)
    history, rings = cur.pass_history_init(size, window), [[] for _ in range(size)]
    update = jax.jit(cur.pass_history_update)
    for _ in range(6):
        ids = rng.integers(-1, size + 1, 7)
        hit, where = rng.random(7) < 0.5, rng.random(7) < 0.8
        history = update(history, jnp.asarray(ids), jnp.asarray(hit), where=jnp.asarray(where))
        for prompt, right, valid in zip(ids, hit, where, strict=True):
            if valid and 0 <= prompt < size:
                rings[prompt] = [*rings[prompt], right][-window:]
        expected = [np.mean(ring) if ring else 0 for ring in rings]
        close(cur.pass_history_rate(history), expected, rtol=1e-6)

    # Bins of equal rates and of extremes.
    rates = jnp.linspace(0, 1, 11)
    edges = tuple(i / 10 for i in range(1, 10))
    expected = np.minimum(np.arange(11), 9)
    equal(cur.difficulty_bins(rates, edges=edges), expected)
    expected[[0, -1]] = -1
    equal(cur.difficulty_bins(rates, edges=edges, extremes=False), expected)

    # Means of bins leave out what has none.
    values = jnp.array([[1.0, 2.0, jnp.nan], [4.0, jnp.inf, 7.0]])
    bins = jnp.array([[0, 2, 1], [2, -1, 5]])
    where = jnp.array([[True, True, False], [True, True, True]])
    means, present = cur.bin_means(values, bins, num_bins=4, where=where)
    assert means.tolist() == [1.0, 0.0, 3.0, 0.0]
    assert present.tolist() == [True, False, True, False]
    shared, _ = cur.bin_means(values, bins, num_bins=4, by_share=True, where=where)
    close(shared, [3.0, 0.0, 4.5, 0.0], rtol=1e-6)


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
    bins = cur.difficulty_bins(
        jnp.float32(rate), edges=EDGES, last=jnp.int32(last), hysteresis=0.03
    )
    assert int(bins) == expected


def test_scores():
    # Scores start at the first mean and then follow.
    state = BinScores(jnp.zeros(3), jnp.zeros(3, bool))
    present = jnp.array([True, False, True])
    state = cur.bin_scores_update(state, jnp.array([2.0, jnp.nan, 4.0]), present, rate=0.25)
    assert state.scores.tolist() == [2.0, 0.0, 4.0] and state.seen.tolist() == present.tolist()
    state = cur.bin_scores_update(
        state, jnp.full(3, 8.0), jnp.array([False, True, True]), rate=0.25
    )
    assert state.scores.tolist() == [2.0, 8.0, 5.0] and state.seen.all()

    # Weights worked numbers.
    close(jnp.exp(SCORES), [1.221403, 1.822119, 0.904837], rtol=1e-6)
    weights = cur.exponential_weights(SCORES, eta=1.0, explore=0.1, bound=2.0)
    close(weights, [0.311743, 0.448672, 0.239585], atol=1e-6)
    for even in (
        cur.exponential_weights(SCORES, eta=0.0),
        cur.exponential_weights(SCORES, explore=1.0),
        cur.exponential_weights(jnp.full(3, 7.0), eta=5.0, explore=0.0),
        cur.exponential_weights(SCORES, eta=9.0, explore=0.0, bound=1e-9),
    ):
        close(even, 1 / 3, rtol=1e-6)

    # Absent bins have no weight and are not read.
    scores, present = jnp.array([0.5, jnp.nan, 0.1]), jnp.array([True, False, True])
    weights = cur.exponential_weights(scores, present=present, explore=0.2)
    some = cur.exponential_weights(scores[jnp.array([0, 2])], explore=0.2)
    close(weights[jnp.array([0, 2])], some, rtol=1e-6)
    assert weights[1] == 0
    assert not cur.exponential_weights(scores, present=jnp.zeros(3, bool)).any()
    huge = cur.exponential_weights(jnp.array([1e30, -1e30]), explore=0.0)
    assert huge.tolist() == [1.0, 0.0]

    # Standardized scores.
    seen = jnp.array([True, True, True, False])
    scores = jnp.array([1.0, 2.0, 3.0, jnp.nan])
    z = (np.arange(3) - 1) / np.std([1, 2, 3])
    expected = np.exp(2 * z) / np.exp(2 * z).sum()
    weights = cur.exponential_weights(
        scores, eta=2.0, explore=0.0, present=seen, standardize=True, seen=seen
    )
    close(weights[:3], expected, rtol=1e-5)


SCORES = jnp.array([0.2, 0.6, -0.1])


def test_weights():
    # Factors of advantages have mean one up to the cap.
    weights = jnp.array([0.1, 0.2, 0.7])
    bins = jnp.array([[0, 0, 1], [2, -1, 2]])
    where = jnp.array([[True, True, True], [True, True, False]])
    factor = np.asarray(cur.bin_advantage_weights(weights, bins, where=where))
    inside = factor[[0, 0, 0, 1], [0, 1, 2, 0]]
    close(inside.mean(), 1.0, rtol=1e-6)
    close(inside / inside[0], [1, 1, 2, 7], rtol=1e-5)
    assert factor[1, 1] == factor[1, 2] == 1
    close(cur.bin_advantage_weights(weights, bins, most=0.5).max(), 1.0)
    assert cur.bin_advantage_weights(weights, bins, most=0.5)[0].max() <= 0.5
    equal(cur.bin_advantage_weights(jnp.zeros(3), bins), np.ones((2, 3)))


def run_gdro(batches, **options):
    robust = cur.prompt_gdro(num_prompts=6, edges=EDGES, signal="failure", **options)
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
    batches, rng = [], np.random.default_rng(0)
    for _ in range(4):
        ids = jnp.asarray(rng.permutation(6)[:4])
        rewards = jnp.asarray(rng.random((4, 5)) < rng.random((4, 1)), jnp.float32)
        batches.append((ids, rewards, jnp.asarray(rng.random((4, 5)) < 0.8)))
    options = {"window": 3, "hysteresis": 0.05, "extremes": True, "eta": 3.0, "explore": 0.1}
    factors, state = run_gdro(batches, rate=0.5, **options)
    history, last = cur.pass_history_init(6, 3), jnp.full(6, -1)
    adversary = BinScores(jnp.zeros(3), jnp.zeros(3, bool))
    for (ids, rewards, where), factor in zip(batches, factors, strict=True):
        rates = cur.pass_history_rate(history)[ids]
        bins = cur.difficulty_bins(rates, edges=EDGES, last=last[ids], hysteresis=0.05)
        each = jnp.repeat(bins[:, None], 5, 1)
        failure, present = cur.bin_means(1 - rewards, each, num_bins=3, by_share=True, where=where)
        weights = cur.exponential_weights(adversary.scores, eta=3.0, explore=0.1, present=present)
        expected = cur.bin_advantage_weights(weights, each, where=where)
        close(factor, expected, rtol=1e-6)
        hit = jnp.any((rewards > 0.5) & where, -1)
        history = cur.pass_history_update(history, ids, hit, where=where.any(-1))
        last = last.at[ids].set(bins)
        adversary = cur.bin_scores_update(adversary, failure, present, rate=0.5)
    close(state.adversary.scores, adversary.scores, rtol=1e-6)
    equal(state.bins, last)
    assert not np.allclose(factors[-1], 1.0) and np.allclose(factors[0], 1.0)

    # The scores of bins by hand. Ratios of 1.5 for the first prompt: its losses are -1.28 and
    # 1.5; the other's -1 and 1.
    robust = cur.prompt_gdro(num_prompts=2, edges=(0.5,), extremes=True, eta=2.0, explore=0.0)
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
    equal(advantages, plain)
    close(state.adversary.scores, [0.055, 0.0], atol=1e-6)  # 0.22 over 4
    advantages, state = step(state)  # the first prompt, which was solved, is in the upper bin now
    assert state.bins.tolist() == [1, 0]
    # A mean of 0.11 over a share of a half; that of the lower bin is 0.
    close(state.adversary.scores, [0.0484, 0.22], atol=1e-6)
    weights = np.exp(2 * np.array([0.22, 0.0484]))
    factors = weights / weights.mean()
    advantages, state = step(state)
    close(advantages, plain * factors[:, None], rtol=1e-5)
    # The losses are those of the advantages without the weights.
    close(state.adversary.scores, [0.042592, 0.22], atol=1e-6)

    # Junk in masked rollouts and strangers change nothing.
    ids, where = jnp.array([1, 9]), jnp.array([[True, False], [True, True]])
    clean = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    junk = clean.at[0, 1].set(jnp.nan)
    (first, *_), state = run_gdro([(ids, clean, where)], extremes=True)
    (second, *_), other = run_gdro([(ids, junk, where)], extremes=True)
    equal(first, second)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        equal(a, b)
    assert state.history.count.tolist() == [0, 1, 0, 0, 0, 0] and first[1].tolist() == [1, 1]


@for_each("total", [7, 20, 33, 200])
def test_arms_are_the_best_of_all_choices(total):
    counts, arms = np.array([3, 0, 2, 4]), (1, 2, 5)
    likes = np.log(np.random.default_rng(total).dirichlet(np.ones(3), 4))
    present = np.flatnonzero(counts)

    def order(choice):
        spent = sum(counts[b] * arms[i] for b, i in zip(present, choice, strict=True))
        return abs(spent - total), -sum(likes[b, i] for b, i in zip(present, choice, strict=True))

    best = min(itertools.product(range(3), repeat=3), key=order)
    chosen = cur.choose_arms(jnp.asarray(likes, jnp.float32), counts, arms=arms, total=total)
    assert chosen[present].tolist() == list(best) and chosen[1] == -1


def test_arms():
    # One bin gets the mean whatever its scores and no bin nothing.
    likes = jnp.array([[-9.0, -0.1, -8.0]])
    assert cur.choose_arms(likes, jnp.array([5]), arms=(2, 4, 8), total=10).tolist() == [0]
    assert cur.choose_arms(likes, jnp.array([0]), arms=(2, 4, 8), total=10).tolist() == [-1]

    # Arm scores and price.
    scores = cur.arm_scores_update(
        jnp.ones((3, 2)), jnp.array([1, -1, 0]), jnp.array([0.5, jnp.nan, 0.25]),
        arms=(2, 6), price=0.125, mean_rollouts=4.0,
    )  # fmt: skip
    close(scores, [[1, 1.25], [1, 1], [1.5, 1]])
    close(cur.shadow_price(0.0, 4.5, mean_rollouts=4.0, rate=0.1), 0.05, rtol=1e-6)
    close(cur.shadow_price(0.3, 3.0, mean_rollouts=4.0), 0.25, rtol=1e-6)


def test_a_ratio_has_a_least_value():
    losses = jr.curation.clipped_losses(
        jnp.array([[-60.0]]), jnp.zeros((1, 1)), jnp.ones(1), jnp.ones((1, 1), bool)
    )
    close(losses, -np.exp([-20.0]), rtol=1e-5)
