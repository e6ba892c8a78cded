"""Presets with a memory, with evidence and of turns: the whole loss against float64, row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from preset_cases import Rows, clip, example, expect_loss, k3, mean, near, z
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import PRESETS, Batch

P, G, T, K, U = 3, 4, 6, 2, 3
NAMES = (
    "ace",
    "dcpo_distribution",
    "hbpo",
    "mssr",
    "spo_tracker",
    "trloo",
    "verpo",
    "xrpo",
)
MAKE = {
    "mssr": {"num_prompts": 5},
    "spo_tracker": {"num_prompts": 5, "length": T, "first": 0},
    "hbpo": {"length": T},
}
# Lower and upper bound of the ratio, the dual clip, and how the loss is averaged.
LOSS = {
    "ace": (0.8, 1.28, 10.0, "token"),
    "dcpo_distribution": (0.8, 1.2, 3.0, "token"),
    "hbpo": (0.8, 1.2, 1e9, "token"),
    "mssr": (0.8, 1.3, 3.0, "token"),
    "spo_tracker": (0.8, 1.28, 10.0, "token"),
    "trloo": (0.8, 1.28, 3.0, "sum"),
    "verpo": (0.8, 1.2, 1e9, "sequence"),
    "xrpo": (0.8, 1.2, 1e9, "sequence"),
}


def make_batch() -> tuple[np.ndarray, Batch]:
    """Ratios far from 1; a group that agrees, an empty response, a rollout left out."""
    lengths = np.array([[6, 2, 3, 5], [4, 4, 6, 2], [5, 0, 2, 3]])
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, np.nan]], np.float32)
    mask, turn = np.arange(T) < lengths[..., None], np.arange(T) // 3

    def extras(rng, logp):
        return {
            "prompt_ids": np.array([4, 0, 2]),
            "policy_shift": np.array([0.0, 0.01, 0.05]),
            "budgets": rng.choice([2.0, 4.0, 6.0], (P, G)),
            "turn_rewards": rng.uniform(0, 1, (P, G, K)),
            "turn_where": np.stack([(mask & (turn == k)).any(-1) for k in range(K)], -1),
            "turn_ids": np.broadcast_to(turn, mask.shape),
            "test_passes": rng.random((P, G, K, U)) < 0.5,
            "test_where": np.array([[True, True, True], [True, True, False], [True, True, True]]),
            "old_entropy": rng.uniform(0.1, 2.0, (P, G, T)),
            "hot_logp": near(rng, logp),
            "cold_logp": near(rng, logp),
        }

    return example(5, rewards, mask=mask, extras=extras)


def members(batch, p):
    return np.flatnonzero(batch.where[p])


def z_scores(batch):
    out, rows = np.zeros((P, G)), Rows(batch.old_logp, batch)
    out[tuple(zip(*rows.places, strict=True))] = rows.each(z)
    return out


def seen(array, batch, p, g):
    return np.asarray(array[p, g], np.float64)[np.asarray(batch.mask[p, g])]


def normalized(batch, values, ddof):
    """Rewards minus values over the deviation of the batch."""
    where = np.asarray(batch.where)
    gain = (np.asarray(batch.rewards, float) - np.asarray(values)[:, None])[where]
    out = np.zeros((P, G))
    out[where] = (gain - gain.mean()) / gain.std(ddof=ddof)
    return out


def after_one_visit(batch, rho, prior):
    """Success rates after the same batch was seen once."""
    rates = []
    for p in range(P):
        r = np.asarray(batch.rewards[p], float)[members(batch, p)]
        retained = prior * np.broadcast_to(rho, P)[p]
        alpha, beta = retained + r.sum(), retained + (1 - r).sum()
        rates.append(alpha / (alpha + beta))
    return rates


def xrpo(batch):
    a = z_scores(batch)
    for p in range(P):
        spoken = [g for g in members(batch, p) if np.asarray(batch.mask[p, g]).any()]
        score = {g: seen(batch.old_logp, batch, p, g).mean() for g in spoken}
        mean = np.mean(list(score.values()))
        for g in spoken:
            if a[p, g] > 0:
                a[p, g] += min(max(2.5 * (1 - np.exp(score[g] - mean)), 0), 0.5 * a[p, g])
    return a


def ace(batch):
    a = z_scores(batch)
    for p, g in np.argwhere(a < 0):
        d = seen(batch.old_logp, batch, p, g) - seen(batch.ref_logp, batch, p, g)
        a[p, g] *= 1 + np.log1p(np.exp(min(d.sum(), 10.0)))
    return a


def hbpo(batch):
    reward, out = np.zeros((P, G)), np.zeros((P, G))
    budgets = np.asarray(batch.extras["budgets"], float)
    ideal = np.where(budgets >= T, 0.0, 4 * np.cos(np.pi * budgets / (2 * T)))
    for p in range(P):
        for g in members(batch, p):
            n = float(np.asarray(batch.mask[p, g]).sum())
            reached = 4 * np.cos(np.pi * n / (2 * T)) if n < T else 0.0
            if batch.rewards[p, g] > 0:
                told = budgets[p, g] < T
                within = min(reached - abs(budgets[p, g] - n) / T, ideal[p, g])
                reward[p, g] = within if told else reached
        kept = members(batch, p)
        r = reward[p, kept]
        a = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        for i, g in enumerate(kept):
            same = r[budgets[p, kept] == budgets[p, g]]
            out[p, g] = a[i] + same.mean() - ideal[p, g]
    return out


def trloo(batch):
    out, x = np.zeros((P, G, K)), batch.extras
    taken = np.asarray(x["turn_where"]) & np.asarray(batch.where)[..., None]
    r = np.where(taken, np.asarray(x["turn_rewards"], float), 0.0)
    returns = np.cumsum(r[..., ::-1], -1)[..., ::-1]
    for p, g, k in np.argwhere(taken):
        others = [returns[p, h, k] for h in range(G) if h != g and taken[p, h, k]]
        out[p, g, k] = returns[p, g, k] - (np.mean(others) if others else 0.0)
    return out


def verpo(batch):
    out, x = np.zeros((P, G, K)), batch.extras
    taken = np.asarray(x["turn_where"]) & np.asarray(batch.where)[..., None]
    for p in range(P):
        attempts = [tuple(i) for i in np.argwhere(taken[p])]
        tests = np.flatnonzero(x["test_where"][p])
        passes = np.asarray(x["test_passes"][p], float)
        rho = {j: np.mean([passes[g, k, j] for g, k in attempts]) for j in tests}
        crowd = {j: sum(np.exp(-50 * (rho[j] - rho[m]) ** 2) for m in tests) for j in tests}
        weight = {j: np.exp(-2 * rho[j]) / (crowd[j] + 1e-6) for j in tests}
        dense = {(g, k): sum(weight[j] * passes[g, k, j] for j in tests) for g, k in attempts}
        outcome = {g: float(batch.rewards[p, g]) * 0.95 ** taken[p, g].sum() for g, _ in attempts}
        for g, k in attempts:
            turn = dense[g, k] - np.mean(list(dense.values()))
            out[p, g, k] = outcome[g] - np.mean(list(outcome.values())) + 0.5 * turn
    return out


def token_advantages(name, batch) -> np.ndarray:
    """What the second step on this batch makes of it."""
    spread = np.ones((P, G, T))
    if name in ("xrpo", "ace", "hbpo"):
        return globals()[name](batch)[..., None] * spread
    if name in ("trloo", "verpo"):
        turns = np.asarray(batch.extras["turn_ids"])
        return np.take_along_axis(globals()[name](batch), turns, -1)
    if name == "spo_tracker":
        shift = np.asarray(batch.extras["policy_shift"], float)
        rho = np.clip(2.0 ** (-shift / 0.06), 0.875, 0.96)
        return normalized(batch, after_one_visit(batch, rho, 0.5), 1)[..., None] * spread
    if name == "mssr":
        # No KL was measured before the first step: the middle of the two factors.
        a = normalized(batch, after_one_visit(batch, 0.9175, 4.0), 0)[..., None] * spread
        old = np.asarray(batch.old_logp, float)
        return a + np.minimum(-0.4 * np.exp(old) * old, np.abs(a) / 2)
    where, mask = np.asarray(batch.where), np.asarray(batch.mask)
    old = np.asarray(batch.old_logp, float)
    entropy = -old[mask & where[..., None]].mean()  # of the first step
    good = (np.asarray(batch.rewards) > 0.05) & where
    x = min(abs(0.5 - entropy), 0.1) / (good.sum() / where.sum())
    tempered = batch.extras["hot_logp" if entropy <= 0.5 else "cold_logp"]
    rho = np.exp(np.asarray(tempered, float) - old)
    return (z_scores(batch)[..., None] + x * good[..., None] * rho) / (1 + x)


def reference(name, logp, batch) -> float:
    low, high, dual, average = LOSS[name]
    rows = Rows(logp, batch)
    a = rows.tokens(token_advantages(name, batch))
    losses = [
        clip(np.exp(x - old), each, low, high, dual) + (name == "mssr") * 0.01 * k3(x, ref)
        for x, old, ref, each in zip(rows.x, rows.old, rows.ref, a, strict=True)
    ]
    return mean(losses, average)


@for_each("name", NAMES)
def test_the_loss_and_its_gradient_are_the_papers(name):
    """Of a second visit, with the state that the first one left."""
    logp, batch = make_batch()
    recipe = PRESETS[name](**MAKE.get(name, {}))
    prepare = jax.jit(recipe.prepare)
    ready, _ = prepare(batch, prepare(batch, recipe.init())[1])
    expect_loss(recipe, logp, ready, functools.partial(reference, name, batch=batch))


def test_a_single_turn_of_one_rollout_keeps_its_return_unless_told():
    _, batch = make_batch()
    alone = batch.replace(where=batch.where.at[0, 1:].set(False))
    kept, dropped = (
        jr.recipes.trloo(singleton=s).prepare(alone, jr.recipes.trloo().init())[0]
        for s in ("raw", "zero")
    )
    assert (kept.advantages[0, 0] != 0).any() and not np.asarray(dropped.advantages[0]).any()


def test_temperatures_reach_the_statistics_of_the_old_policy():
    recipe = jr.recipes.dcpo_distribution(hot=2.0, cold=0.5)
    scored = recipe.computed_from("old_policy")
    logits, targets = jnp.array([[2.0, 0.0, -1.0]]), jnp.array([1])
    for name, temperature in (("hot_logp", 2.0), ("cold_logp", 0.5)):
        expected = jax.nn.log_softmax(logits / temperature)[0, 1]
        np.testing.assert_allclose(scored[name](logits, targets), [expected], rtol=1e-6)
