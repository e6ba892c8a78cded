"""Presets of group advantages: the whole loss and its gradient against float64, row by row."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import MASK, batch_of, expect_loss, near, one_by_one
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import Batch, catalog

P, G, T = 4, 4, 5
KEY = jax.random.key(5)
PRIOR = np.array([0.5, 0.6, 0.2, 0.9])
LAST_KL = 0.02
NAMES = (
    "drpo_len",
    "gdpo",
    "grpo_passk",
    "jspo",
    "maxrl",
    "mc_grpo",
    "passk_training",
    "pkpo",
    "real",
    "v05_baseline",
)
OPTIONS = {
    "drpo_len": {"tau": 0.7, "lam": 0.3, "kl_estimator": "k3"},  # k1 is below 0 here
    "passk_training": {"k": 2},
    "pkpo": {"k": 2},
    "mc_grpo": {"scale_eps": 0.1},
}


def make_batch() -> tuple[np.ndarray, Batch]:
    """Ratios far from 1; a group that agrees, an empty response, a rollout left out."""
    rng = np.random.default_rng(4)
    rewards = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, np.nan], [1, 0, 1, 0]])
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    second = rng.uniform(0, 1, (P, G)).astype(np.float32)
    second[0, 1] = np.nan
    batch = batch_of(
        MASK,
        rewards,
        old_logp=near(rng, logp),
        ref_logp=near(rng, logp),
        reward_components={"right": rewards, "short": second},
        extras={"prior": PRIOR},
    )
    return logp, batch


def lower_median(x):
    return np.sort(x)[(len(x) - 1) // 2]


def of_group(name, p, r):
    """The advantages of one group, from the formula of the paper."""
    n, c = len(r), int((r > 0.5).sum())
    right = r > 0.5
    if name == "mc_grpo":
        a = r - lower_median(r)
        return a / (lower_median(np.abs(a)) + 0.1)
    if name == "grpo_passk":
        best, second = np.sort(r)[[-1, -2]]
        a = np.zeros(n)
        a[np.argmax(r)] = (best - second) / (r.std(ddof=1) + 1e-6)
        return a
    if name == "maxrl":
        return (r - r.mean()) / (r.mean() + 1e-6)
    if name == "pkpo":
        return np.where(right, math.comb(n - c, 1) / math.comb(n - 1, 1), 0.0)
    if name == "passk_training":
        pairs = list(itertools.combinations(range(n), 2))
        passed = np.array([right[list(s)].any() for s in pairs], float)
        a = (passed - passed.mean()) / (passed.std() + 1e-6)
        return np.array([a[[i in s for s in pairs]].mean() for i in range(n)])
    if name == "v05_baseline":
        q = PRIOR[p]
        w = max(0.0, 1 - 0.25 / n / (r.mean() - q) ** 2)
        return r - w * r.mean() - (1 - w) * q
    return r - r.mean()  # drpo_len and real: of which the sign counts


def of_batch(name, groups, components):
    """The advantages of all groups; each group is the places of its rollouts and their rewards."""
    if name == "jspo":
        out = []
        for g, (_, r) in enumerate(groups):
            others = [x for i, (_, x) in enumerate(groups) if i != g]
            v = np.mean([x.var(ddof=1) / len(x) for x in others])
            share = v / (v + np.var([x.mean() for x in others]) + 1e-6)
            loo = (r.sum() - r) / (len(r) - 1)
            out.append(r - (1 - share) * loo - share * np.concatenate(others).mean())
        return out
    if name == "gdpo":
        sums = []
        for p, (members, _) in enumerate(groups):
            total = np.zeros(len(members))
            for column in components:
                x = column[p, members]
                there = ~np.isnan(x)
                if x[there].max() > x[there].min():
                    z = (x[there] - x[there].mean()) / (x[there].std(ddof=1) + 1e-4)
                    total[there] += z
            sums.append(total)
        every = np.concatenate(sums)
        return [(a - every.mean()) / (every.std(ddof=1) + 1e-4) for a in sums]
    return [of_group(name, p, r) for p, (_, r) in enumerate(groups)]


def clip(ratio, a, low, high):
    return -np.minimum(ratio * a, np.clip(ratio, low, high) * a)


def drpo(rows, right):
    """-J of one group: rows of log-probabilities, of answers that have tokens."""
    s = np.array([x.mean() for x in rows])
    if right.all() or not right.any():
        return 0.0
    w = np.where(right, np.exp((1 - np.array([len(x) for x in rows]) / T) / 0.3), 0.0)
    return -(w / w.sum() @ s) + 0.7 * np.log(np.mean(np.exp(s[~right] / 0.7)))


def labels(scores, right):
    """The loss of one group: right and wrong responses, each against a logit of 0."""
    if right.all() or not right.any():
        return 0.0
    s = np.array(scores) / 0.5
    return np.log(1 + np.exp(-s[right]).sum()) + np.log(1 + np.exp(s[~right]).sum())


def reference(name, logp, batch, pivots) -> float:
    where, mask = np.asarray(batch.where), np.asarray(batch.mask)
    old, ref = (np.asarray(x, np.float64) for x in (batch.old_logp, batch.ref_logp))
    places = [np.flatnonzero(row) for row in where]
    rewards = np.asarray(batch.rewards, float)
    groups = [(m, rewards[p, m]) for p, m in enumerate(places)]
    components = [np.asarray(x, float) for x in batch.reward_components.values()]
    means, rows = [], []
    for p, (members, advantages) in enumerate(
        zip(places, of_batch(name, groups, components), strict=True)
    ):
        group, sides = [], []
        for g, a in zip(members, advantages, strict=True):
            m = mask[p, g]
            if not m.any() or pivots[p, g]:
                continue
            x, o, f = logp[p, g][m], old[p, g][m], ref[p, g][m]
            if name == "drpo_len":
                rows.append(x)
                group.append((x, 0.0))  # nothing has moved in the first update
                sides.append(a > 0)
            elif name == "real":
                group.append((x - o).mean())
                sides.append(a > 0)
            else:
                high = 1.28 if name == "jspo" else 1.2
                kl = 0.04 * (np.exp(f - x) - 1 - (f - x)) if name == "mc_grpo" else 0.0
                rows.append(clip(np.exp(x - o), a, 0.8, high) + kl)
        if name == "drpo_len":
            loss = drpo([x for x, _ in group], np.array(sides)) if any(advantages) else 0.0
            means.append(loss + np.mean([k for _, k in group]))
        if name == "real":
            means.append(labels(group, np.array(sides)))
    if name in ("drpo_len", "real"):
        return np.mean(means)
    if name == "pkpo":
        return np.mean([row.sum() for row in rows])
    if name in ("mc_grpo", "v05_baseline"):
        return np.mean([row.mean() for row in rows])
    return np.concatenate(rows).mean()


def prepared(name, **options):
    logp, batch = make_batch()
    length = {"length": T} if name == "drpo_len" else {}
    recipe = catalog.PRESETS[name](**length | OPTIONS.get(name, {}) | options)
    state = recipe.init()._replace(last_kl=jnp.float32(LAST_KL))
    ready, _ = recipe.prepare(batch, state, key=KEY if recipe.draws else None)
    return logp, batch, recipe, ready


def pivots(name, batch, ready) -> np.ndarray:
    """Which rollouts the recipe took out, after checking that they are those it may take out."""
    gone = np.asarray((batch.mask & batch.where[..., None] & ~ready.mask).any(-1))
    if name != "mc_grpo":
        assert not gone.any()
        return gone
    where, rewards = np.asarray(batch.where), np.asarray(batch.rewards)
    for row, keep, out in zip(rewards, where, gone, strict=True):
        # At most one: the pivot may be a response without a token.
        assert out.sum() <= 1
        assert (row[out] == lower_median(row[keep])).all()
    return gone


@for_each("name", NAMES)
def test_loss_and_gradient_are_the_papers(name):
    logp, batch, recipe, ready = prepared(name)
    out = pivots(name, batch, ready)
    formula = functools.partial(reference, name, batch=batch, pivots=out)
    expect_loss(recipe, logp, ready, lambda x: formula(np.float64(x)), rel=1e-5, atol=2e-6)


CHANGES = {
    "drpo_len": {"length": 9, "lam": 1.0, "tau": 5.0, "beta": 1.0, "delta": 0.01}
    | {"kl_estimator": "k1"},
    "gdpo": {"weights": (("right", 1.0), ("short", 0.5)), "gate": ("right", 1.0)}
    | {"batch_norm": "token", "eps_low": 0.05, "eps_high": 0.05},
    "grpo_passk": {"scale": "none", "eps_high": 0.05},
    "jspo": {"eps_low": 0.05, "eps_high": 0.05},
    "maxrl": {"scale": "root", "eps_low": 0.05},
    "mc_grpo": {"scale": "std", "scale_eps": 0.2, "rescale_nonzero": True, "kl_coef": 0.0},
    "passk_training": {"k": 1, "threshold": 1.5},
    "pkpo": {"k": 1, "loo": True, "threshold": 1.5},
    "real": {"tau": 1.0},
    "v05_baseline": {"var": "sample", "scale": "group", "eps_low": 0.05},
}


@functools.cache
def loss_with(name, **options):
    logp, _, recipe, ready = prepared(name, **options)
    return float(recipe.loss(logp, recipe.measure(ready, jnp.asarray(logp))))


CHANGED = [*one_by_one(CHANGES), ("gdpo", {"batch_norm": "none"})]


@pytest.mark.of_many
@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_the_loss(name):
    rows = [options for each, options in CHANGED if each == name]
    assert not [options for options in rows if loss_with(name, **options) == loss_with(name)]


def test_what_they_need():
    assert jr.recipes.gdpo().required_fields == {"reward_components"}
    assert jr.recipes.v05_baseline().required_fields == {"prior"}
    assert not jr.recipes.v05_baseline().group_relative
    assert jr.recipes.v05_baseline(scale="group").group_relative
    assert jr.recipes.mc_grpo().draws
    assert jr.recipes.mc_grpo().required_fields == {"ref_logp"}
    assert not jr.recipes.mc_grpo(kl_coef=0.0).required_fields
    assert not jr.recipes.drpo_len(length=8).required_fields
