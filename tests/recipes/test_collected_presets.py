"""Presets whose collectors choose, repeat or cut rollouts: their losses and their collectors.

The loss of each is built of one clipped surrogate, row by row in float64:

    rollout_replay, dots, fading_replay   around e^(old - mu), as other weights sampled
    llm_replay, sol_rl                    times e^(old - mu), which sol_rl cuts at 2
    ettrl      of votes, less where a response is uncertain
    cgpo       of calibrated rewards near the reference
    pf_ppo     of generalized advantages, with a penalty at each token
    verl_erank with a bonus for a rank of hidden states that grows
"""

import typing

import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import G, P, Rows, T, center, clip, example, k3, loss_of, mean, z
from rows import for_each

import jaxrl_llm as jr

PLAIN = ("april", "arrol", "pf_ppo", "training_free_grpo")


def make_batch():
    def extras(rng, logp):
        values = rng.normal(0, 0.5, (P, G, T))
        return {
            "greedy_rewards": np.array([0.25, 1.0, 0.5]),
            "satisfied": rng.random((P, G)) < 0.7,
            "answer_ids": np.array([[3, 3, 5, 7], [4, 4, 4, 4], [1, 2, 2, 1]]),
            "old_entropy": rng.uniform(0.1, 2.0, (P, G, T)),
            "hidden_rank": rng.uniform(0.2, 3.0, (P, G, 3)),
            "values": values,
            "old_values": values[..., None],
        }

    return example(8, extras=extras)


class Row(typing.NamedTuple):
    """Float64 numbers of the tokens of a rollout."""

    x: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    mu: np.ndarray
    entropy: np.ndarray


def rows_of(rows) -> list[Row]:
    return [Row(*row) for row in zip(*rows.all, rows.extra("old_entropy"), strict=True)]


def plain(row, a, high=1.2):
    return clip(np.exp(row.x - row.old), a, high=high)


def replay(row, a):
    """Around what the policy was at the start of the step."""
    around = np.exp(row.old - row.mu)
    return clip(np.exp(row.x - row.mu), a, 0.8 * around, 1.2 * around)


def kl(row):
    return k3(row.x, row.ref)


TOKEN_LOSS = dict.fromkeys(PLAIN, plain) | {
    "spark": lambda row, a: plain(row, a) + 0.001 * kl(row),
    "latr": lambda row, a: plain(row, a) + 0.01 * kl(row),
    "verl_erank": lambda row, a: plain(row, a) + 0.001 * (kl(row) - row.entropy),
    "rollout_replay": replay,
    "dots": replay,
    "fading_replay": replay,
    "llm_replay": lambda row, a: np.exp(row.old - row.mu) * plain(row, a),
    "ssb": lambda row, a: clip(np.exp(row.x - row.mu), a),
    "sol_rl": lambda row, a: np.minimum(np.exp(row.old - row.mu), 2.0) * plain(row, a),
    "grpo_roc": lambda row, a: plain(row, a, high=1.28),
    "sapo_swarm": lambda row, a: plain(row, a, high=1.28),
    "ettrl": lambda row, a: plain(row, a) + 0.001 * kl(row),
    "cgpo": lambda row, a: -a * row.x,
}


def voted(rows):
    """Of the most common answer of a group, less where a response is uncertain."""
    ids, rewards, factors = rows.of("answer_ids").tolist(), rows.r.copy(), rows.r.copy()
    spoken = rows.lengths > 0
    entropy = np.array([x.mean() if len(x) else 0.0 for x in rows.extra("old_entropy")])
    for group in rows.groups:
        answers = [ids[i] for i in group]
        rewards[group] = np.equal(answers, max(answers, key=answers.count))
        mean = entropy[group][spoken[group]].mean()
        own = np.where(spoken[group], entropy[group], mean)
        factors[group] = np.maximum(0.0, 2 - own / mean)
    return rows.each(z, rewards) * factors


def calibrated(rows, budget=5.0):
    base = np.array([float(rows.batch.extras["greedy_rewards"][p]) for p, _ in rows.places])
    far = [(old - ref).sum() for old, ref in zip(rows.old, rows.ref, strict=True)]
    nearness = np.maximum(0.0, 1 - np.array(far) / budget)
    return center(rows.of("satisfied") * nearness / (1 + np.exp(base - rows.r)))


def spreading(rows, seen):
    """GRPO's with a bonus for ranks above the average of the batch before, ``seen``."""
    out, every = rows.each(z), np.float64(rows.of("hidden_rank"))
    rank, velocity, acceleration = np.clip((every - seen) / (abs(seen) + 1e-8), -5, 5).T
    b = 1 / (1 + np.exp(-2 * acceleration))
    bonus = b * np.tanh(rank) + (1 - b) * np.tanh(velocity)
    return out + (rows.lengths > 0) * np.minimum(np.maximum(bonus, 0.0), abs(out) / 2)


def returns_above_values(rows, lam=0.95, kl_coef=0.02):
    """The generalized advantages of PPO on scores over their deviation, a penalty at each token."""
    std, out = np.std(rows.r, ddof=1), []
    for r, old, ref, v in zip(rows.r, rows.old, rows.ref, rows.extra("values"), strict=True):
        rewards = -kl_coef * (old - ref)
        if len(rewards):
            rewards[-1] += np.clip(r / std, -10, 10)
        errors = rewards + np.append(v[1:], 0.0)[: len(rewards)] - v
        every = [sum(lam**k * e for k, e in enumerate(errors[t:])) for t in range(len(errors))]
        out.append(np.array(every))
    return out


SPECIAL = {"cgpo": calibrated, "ettrl": voted, "pf_ppo": returns_above_values}


def reference(name, logp, batch, seen=None):
    rows = Rows(logp, batch)
    advantages = SPECIAL[name](rows) if name in SPECIAL else rows.each(z)
    if name == "verl_erank" and seen is not None:
        advantages = spreading(rows, seen)
    keep = rows.each(np.ptp) > 0 if name == "grpo_roc" else rows.lengths >= 0
    each = zip(rows_of(rows), advantages, keep, strict=True)
    return mean([TOKEN_LOSS[name](row, a) for row, a, kept in each if kept])


@for_each("name", TOKEN_LOSS)
def test_the_loss_is_the_papers(name):
    logp, batch = make_batch()
    recipe = jr.recipes.PRESETS[name]()
    ready, state = recipe.prepare(batch, recipe.init())
    expected, entropy = reference(name, logp, batch), batch.extras["old_entropy"]
    got = float(recipe.loss(jnp.asarray(logp), ready, entropy=entropy))
    assert got == pytest.approx(expected, rel=1e-5)
    if name == "verl_erank":
        # The first batch has no bonus; its mean is what the second is compared with.
        every = np.float64(batch.extras["hidden_rank"])[np.asarray(batch.where)]
        ready, _ = recipe.prepare(batch, state)
        with_bonus = reference(name, logp, batch, seen=every.mean(0))
        assert abs(with_bonus - expected) > 1e-3
        got = float(recipe.loss(jnp.asarray(logp), ready, entropy=entropy))
        assert got == pytest.approx(with_bonus, rel=1e-5)


def test_training_free_grpo_makes_no_update():
    _, batch = make_batch()
    recipe = jr.recipes.training_free_grpo()
    ready, _ = recipe.prepare(batch, recipe.init())
    assert not np.asarray(ready.extras["update_scale"]).any()


def test_mpo_compares_the_best_and_the_worst_of_each_group():
    logp, batch = make_batch()
    rows = Rows(logp, batch)
    at = {place: i for i, place in enumerate(rows.places)}
    # The only success of the last group has no token; the second group agrees.
    groups = ([((0, 0), (0, 1)), ((0, 0), (0, 2))], [((2, 2), (2, 0))])
    now, before = (
        {at: 0.3 * (x - ref).sum() for at, x, ref in zip(rows.places, xs, rows.ref, strict=True)}
        for xs in (rows.x, rows.old)
    )
    middles = [np.mean([before[w] + before[other] for w, other in x]) / 2 for x in groups]
    middle, total = np.mean(middles), 0.0
    for pairs in groups:
        for won, lost in pairs:
            a, b = now[won], now[lost]
            classes = np.logaddexp(0, middle - a) + np.logaddexp(0, b - middle)
            likelihood = rows.x[at[won]].mean()
            total += (0.8 * np.logaddexp(0, b - a) + 0.2 * classes - likelihood) / len(pairs)
    found = loss_of(jr.recipes.mpo(beta=0.3), logp, batch)
    assert found == pytest.approx(total / len(groups), rel=1e-5)


def test_dart_trains_on_the_least_certain_steps():
    logp, batch = make_batch()
    turn_ids = jnp.broadcast_to(jnp.arange(T) // 2, (P, G, T))
    batch = batch.replace(extras={**batch.extras, "turn_ids": turn_ids})
    rows, losses = Rows(logp, batch), []
    every, advantages = rows_of(rows), rows.each(z)
    for group in rows.groups:
        cuts = [(i, slice(t, t + 2)) for i in group for t in range(0, rows.lengths[i], 2)]
        entropy = [every[i].entropy[cut].mean() for i, cut in cuts]
        least = sorted(entropy, reverse=True)[len(cuts) // 2 - 1]
        for (i, cut), uncertain in zip(cuts, entropy, strict=True):
            if uncertain >= least:
                row, a = every[i], advantages[i]
                loss = clip(np.exp(row.x - row.old), a, high=1.28, dual=10.0)
                loss = np.minimum(np.exp(row.old - row.mu), 1.0) * loss + 0.1 * kl(row)
                losses.append(loss[cut])
    found = loss_of(jr.recipes.dart(keep=0.5), logp, batch)
    assert found == pytest.approx(mean(losses), rel=1e-5)


def test_ettrl_may_clip_in_place_of_reshaping():
    logp, batch = make_batch()
    recipe = jr.recipes.ettrl(reshape=False, bound=0.4, kl_coef=0.0)
    ready, _ = recipe.prepare(batch, recipe.init())
    ids = np.asarray(batch.extras["answer_ids"])
    rows, most = Rows(logp, batch), {0: 3, 1: 4, 2: 2}
    votes = rows.each(z, [float(ids[p, g] == most[p]) for p, g in rows.places])
    got = [float(ready.advantages[place]) for place in rows.places]
    np.testing.assert_allclose(got, np.clip(votes, -0.4, 0.4), atol=1e-6)


# How a preset collects its batch; what each of these collectors does stands in tests/curation.
COLLECTORS = """
april  partial_rollouts(segments=8, oversample=2.0)
arrol  pruned(quality_survivors(share=0.5, balance=0.5, warmup=20, bins=20, learning_rate=0.1))
cgpo  None
ettrl  forked(top_entropy_forks, forks=2, branches=2)
fading_replay  replayed(capacity=512, share=0.5, priority=fading_probs(factor=7.0))
grpo_roc  downsampled(resample_on_correct(min_right=2, min_wrong=2), oversample=2)
pf_ppo  downsampled(resample_groups(rule='best_worst'), oversample=1)
rollout_replay  replayed(capacity=512, share=0.5, store=informative_groups, unique=True)
sapo_swarm  replayed(capacity=64, share=0.5, store=informative_groups)
sol_rl  downsampled(contrasts, oversample=4)
spark  judged(judges=0.25, refines=0.25)
verl_erank  None
"""


def test_the_collector_of_a_preset_with_the_numbers_of_its_paper():
    for line in COLLECTORS.strip().splitlines():
        name, collector = line.split("  ")
        assert repr(jr.recipes.PRESETS[name]().collector) == collector, name
    priority = jr.bind(jr.curation.replay_priorities, power=1.0)
    options = {"capacity": 64, "replace": jr.curation.informative_groups, "priority": priority}
    options["store"] = jr.curation.informative_groups
    by_size = jr.curation.replayed(**options, score=jr.curation.advantage_sizes)
    old = {"score": jr.curation.replay_scores, "evict": "lowest", "max_staleness": 8}
    assert jr.recipes.ssb().collector == by_size
    assert jr.recipes.llm_replay().collector == jr.curation.replayed(**options, **old)
    recipe, options = jr.recipes.dots(), {"share": 0.5, "capacity": 512, "unique": True}
    source = jr.curation.replayed(store=jr.curation.informative_groups, start=2, **options)
    assert recipe.collector.source == source
    assert recipe.minibatches == jr.recipes.rollout_replay().minibatches
