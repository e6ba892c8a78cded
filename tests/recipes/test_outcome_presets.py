"""Presets of group advantages: the whole loss and its gradient against float64, group by group.

Of rewards r of a group with n rollouts, c of them right:

    maxrl           (r - mean) / mean             mc_grpo         (r - lower median) / its median
    pkpo, k = 2     (n - c) / (n - 1) if right    v05_baseline    r - w mean - (1 - w) prior
    grpo_passk      best - second, at the best    passk_training  the mean over all pairs with it
    gdpo            scores of each column, added  jspo            means of group and others, mixed
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from preset_cases import Rows, T, center, clip, example, expect_loss, k3, mean, prepared, z
from rows import for_each

from jaxrl_llm.recipes import PRESETS

REWARDS = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, np.nan], [1, 0, 1, 0]])
PRIOR = np.array([0.5, 0.6, 0.2, 0.9])
# Options of the preset, and what the mean is over.
CASES = {
    "drpo_len": ({"length": T, "tau": 0.7, "lam": 0.3, "kl_estimator": "k3"}, "group"),
    "gdpo": ({}, "token"),
    "grpo_passk": ({}, "token"),
    "jspo": ({}, "token"),
    "maxrl": ({}, "token"),
    "mc_grpo": ({"scale_eps": 0.1}, "sequence"),
    "passk_training": ({"k": 2}, "token"),
    "pkpo": ({"k": 2}, "sum"),
    "real": ({}, "group"),
    "v05_baseline": ({}, "sequence"),
}


def make_batch():
    """The second column of rewards lacks a number."""
    second = np.random.default_rng(4).uniform(0, 1, REWARDS.shape)
    second[0, 1] = np.nan
    columns = {"right": REWARDS, "short": second}
    return example(4, REWARDS, reward_components=columns, extras={"prior": PRIOR})


def lower_median(x):
    return np.sort(x)[(len(x) - 1) // 2]


def mc_grpo(r):
    a = r - lower_median(r)
    return a / (lower_median(np.abs(a)) + 0.1)


def grpo_passk(r):
    best, second = np.sort(r)[[-1, -2]]
    return np.where(np.arange(len(r)) == r.argmax(), (best - second) / (r.std(ddof=1) + 1e-6), 0)


def pkpo(r):
    n, c = len(r), int((r > 0.5).sum())
    return np.where(r > 0.5, math.comb(n - c, 1) / math.comb(n - 1, 1), 0.0)


def passk_training(r):
    pairs = list(itertools.combinations(range(len(r)), 2))
    passed = np.array([(r[list(s)] > 0.5).any() for s in pairs], float)
    a = (passed - passed.mean()) / (passed.std() + 1e-6)
    return np.array([a[[i in s for s in pairs]].mean() for i in range(len(r))])


OF_GROUP = {
    "mc_grpo": mc_grpo,
    "grpo_passk": grpo_passk,
    "pkpo": pkpo,
    "passk_training": passk_training,
    "maxrl": lambda r: center(r) / (r.mean() + 1e-6),
}


def jspo(rows):
    groups, out = [rows.r[group] for group in rows.groups], []
    for g, r in enumerate(groups):
        others = [x for i, x in enumerate(groups) if i != g]
        v = np.mean([x.var(ddof=1) / len(x) for x in others])
        share = v / (v + np.var([x.mean() for x in others]) + 1e-6)
        loo = (r.sum() - r) / (len(r) - 1)
        out.append(r - (1 - share) * loo - share * np.concatenate(others).mean())
    return np.concatenate(out)


def gdpo(rows):
    total = np.zeros(len(rows.r))
    for column in rows.batch.reward_components.values():
        x = np.array([float(column[i]) for i in rows.places])
        for group in rows.groups:
            there = group[~np.isnan(x[group])]
            total[there] += z(x[there], 1e-4)
    return z(total, 1e-4)


def v05_baseline(rows):
    q = PRIOR[[p for p, _ in rows.places]]
    n, m = rows.each(lambda r: 0 * r + len(r)), rows.each(lambda r: 0 * r + r.mean())
    w = np.maximum(0.0, 1 - 0.25 / n / (m - q) ** 2)
    return rows.r - w * m - (1 - w) * q


def drpo(rows, right):
    """-J of one group: rows of log-probabilities, of answers that have tokens."""
    if right.all() or not right.any():
        return 0.0
    s = np.array([x.mean() for x in rows])
    w = np.where(right, np.exp((1 - np.array([len(x) for x in rows]) / T) / 0.3), 0.0)
    return -(w / w.sum() @ s) + 0.7 * np.log(np.mean(np.exp(s[~right] / 0.7)))


def real(scores, right):
    """Right and wrong responses, each against a logit of 0."""
    if right.all() or not right.any():
        return 0.0
    s = np.array(scores) / 0.5
    return np.log(1 + np.exp(-s[right]).sum()) + np.log(1 + np.exp(s[~right]).sum())


def reference(name, logp, batch, pivots) -> float:
    rows, of = Rows(logp, batch), CASES[name][1]
    keep = (rows.lengths > 0) & ~np.array([pivots[i] for i in rows.places])
    if of == "group":
        losses = []
        for group in ([i for i in group if keep[i]] for group in rows.groups):
            right, r = rows.r[group] > 0.5, [rows.x[i] for i in group]
            if name == "drpo_len":
                losses.append(drpo(r, right))
            else:
                losses.append(real([(rows.x[i] - rows.old[i]).mean() for i in group], right))
        return np.mean(losses)
    whole = {"jspo": jspo, "gdpo": gdpo, "v05_baseline": v05_baseline}
    a = whole[name](rows) if name in whole else rows.each(OF_GROUP[name])
    high, kl = (1.28 if name == "jspo" else 1.2), (0.04 if name == "mc_grpo" else 0.0)
    losses = [
        clip(np.exp(x - old), each, high=high) + kl * k3(x, ref)
        for x, old, ref, each, kept in zip(rows.x, rows.old, rows.ref, a, keep, strict=True)
        if kept
    ]
    return mean(losses, of)


def pivots_of(name, batch, ready) -> np.ndarray:
    """Which rollouts the recipe took out, after checking that they are those it may take out."""
    gone = np.asarray((batch.mask & batch.where[..., None] & ~ready.mask).any(-1))
    for row, keep, out in zip(REWARDS, np.asarray(batch.where), gone, strict=True):
        # At most one: the pivot may be a response without a token.
        assert out.sum() <= (name == "mc_grpo")
        assert (row[out] == lower_median(row[keep])).all()
    return gone


@for_each("name", CASES)
def test_loss_and_gradient_are_the_papers(name):
    logp, batch = make_batch()
    recipe = PRESETS[name](**CASES[name][0])
    ready = prepared(recipe, batch, key=jax.random.key(5) if recipe.draws else None)
    gone = pivots_of(name, batch, ready)
    formula = functools.partial(reference, name, batch=batch, pivots=gone)
    expect_loss(recipe, logp, ready, lambda x: formula(np.float64(x)))


def test_what_has_happened_before_reaches_the_penalty_of_drpo_len():
    """Its constraint on the divergence of the old policy, which the next step measures."""
    logp, batch = make_batch()
    recipe = PRESETS["drpo_len"](length=T, delta=0.01, beta=3.0)
    ready = prepared(recipe, batch)
    far = logp + 0.3 * np.float32(ready.mask)
    values = [float(recipe.loss(far, recipe.measure(ready, jnp.asarray(x)))) for x in (logp, far)]
    assert values[0] != values[1]
