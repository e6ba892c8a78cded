"""Presets on data of another policy: whole losses against the formulas in float64, row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import LENGTHS, MASK, REWARDS, batch_of, near, one_by_one
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import Batch

P, G, T = 3, 4, 5


# Squared norms of the gradients of responses, which do not follow their lengths.
NORMS = np.array([[0.5, 8, 1, 3], [2, 1, 4, 1], [1, 7, 6, 2]], np.float32)


def make_batch() -> tuple[np.ndarray, Batch]:
    """A group that agrees, an empty response, a rollout left out; policies that are far apart."""
    rng = np.random.default_rng(3)
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    others = {"old_logp": near(rng, logp), "behavior_logp": near(rng, logp, 0.6)}
    norms = NORMS * (LENGTHS[:P] > 0)
    return logp, batch_of(MASK[:P], REWARDS, **others, extras={"grad_sq_norms": norms})


def rows(logp, batch):
    """Of each response that is not empty: its place, its four arrays and its advantage."""
    for p in range(P):
        members = np.flatnonzero(batch.where[p])
        r = np.asarray(batch.rewards[p], float)[members]
        spread = r.max() > r.min()
        for g, reward in zip(members, r, strict=True):
            m = np.asarray(batch.mask[p, g])
            if m.any():
                three = (logp, batch.old_logp, batch.behavior_logp)
                x, old, behavior = (np.asarray(v[p, g], np.float64)[m] for v in three)
                a = (reward - r.mean()) / (r.std(ddof=1) + 1e-6) if spread else 0.0
                yield x, old, behavior, a


def clip(ratio, a, low, high):
    return -np.minimum(ratio * a, np.clip(ratio, low, high) * a)


def tis(logp, batch):
    tokens = [
        np.minimum(np.exp(old - mu), 2.0) * clip(np.exp(x - old), a, 0.8, 1.28)
        for x, old, mu, a in rows(logp, batch)
    ]
    return np.concatenate(tokens).mean()


def tis_rejecting(logp, batch):
    """Sequences whose mean k2 is too large, bad ones that are far, and what is left on average."""
    tokens = []
    for x, old, mu, a in rows(logp, batch):
        d = old - mu
        if (d**2 / 2).mean() <= 0.15 and not (a < 0 and -d.mean() > 0.1):
            tokens.append(np.minimum(np.exp(d), 2.0) * clip(np.exp(x - old), a, 0.8, 1.28))
    return np.concatenate(tokens).mean()


def icepop(logp, batch):
    tokens = []
    for x, old, mu, a in rows(logp, batch):
        w = np.exp(old - mu)
        w = np.where((w >= 0.5) & (w <= 2.0), w, 0.0)
        tokens.append(w * clip(np.exp(x - old), a, 0.8, 1.2))
    return np.concatenate(tokens).mean()


def areal(logp, batch):
    tokens = []
    for x, old, mu, a in rows(logp, batch):
        w = np.exp(old - mu)
        tokens.append(np.where(w <= 1.5, w, 0.0) * clip(np.exp(x - old), a, 0.8, 1.2))
    return np.concatenate(tokens).mean()


def areal_m2(logp, batch):
    found = list(rows(logp, batch))
    d = np.concatenate([old - mu for _, old, mu, _ in found])
    kept = np.sort(d**2)
    while kept.mean() >= 0.2:
        kept = kept[:-1]
    assert 1 < len(kept) < len(d)
    tokens = []
    for x, old, mu, a in found:
        w = np.exp(old - mu)
        loss = np.where(w <= 1.5, w, 0.0) * clip(np.exp(x - old), a, 0.8, 1.2)
        tokens.append(loss[(old - mu) ** 2 <= kept[-1]])
    return np.concatenate(tokens).mean()


def vespo(logp, batch):
    tokens = []
    for x, _, mu, a in rows(logp, batch):
        w = np.exp((x - mu).sum())
        k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        tokens.append(-(w**k) * np.exp(rate * (1 - w)) * a * x)
    return np.concatenate(tokens).mean()


def vcpo(logp, batch, norms=None):
    """Each group's rewards minus the off-policy baseline, over their deviation."""
    norms = np.asarray(batch.extras["grad_sq_norms"] if norms is None else norms)
    losses = []
    for p in range(P):
        members = np.flatnonzero(batch.where[p])
        r = np.asarray(batch.rewards[p], float)[members]
        masks = [np.asarray(batch.mask[p, g]) for g in members]
        gaps = np.asarray(batch.old_logp, np.float64) - np.asarray(batch.behavior_logp)
        w = np.exp([gaps[p, g][m].sum() for g, m in zip(members, masks, strict=True)])
        v = w**2 * norms[p, members]
        a = (r - (v * r).sum() / v.sum()) / r.std() if r.max() > r.min() else 0.0 * r
        for g, m, weight, advantage in zip(members, masks, w, a, strict=True):
            if m.any():
                losses.append((-min(weight, 1.2) * advantage * logp[p, g][m]).mean())
    return np.mean(losses)


def vcpo_by_length(logp, batch):
    return vcpo(logp, batch, batch.mask.sum(-1))


RULE = jr.bind(jr.corrections.rejection_mask, statistic="k2", level="sequence_mean", upper=0.15)
CASES = {
    "rollout_correction": (jr.recipes.rollout_correction, {}, tis),
    "rejecting": (
        jr.recipes.rollout_correction,
        {"reject": (RULE,), "off_policy_threshold": 0.1},
        tis_rejecting,
    ),
    "icepop": (jr.recipes.icepop, {"upper": 2.0}, icepop),
    "areal": (jr.recipes.areal, {"cap": 1.5}, areal),
    "areal_m2": (jr.recipes.areal, {"cap": 1.5, "m2_threshold": 0.2}, areal_m2),
    "vespo": (jr.recipes.vespo, {}, vespo),
    "vcpo": (jr.recipes.vcpo, {"cap": 1.2}, vcpo),
    "vcpo_by_length": (jr.recipes.vcpo, {"cap": 1.2, "norms": "length"}, vcpo_by_length),
}


@for_each("name", CASES)
def test_the_loss_is_the_formulas(name):
    logp, batch = make_batch()
    assert loss_with(name) == pytest.approx(CASES[name][2](logp, batch), rel=5e-6)


@for_each("name", CASES)
def test_on_policy_the_gradient_is_the_policy_gradient(name):
    make, options, _ = CASES[name]
    logp, batch = make_batch()
    logp = jnp.asarray(logp)
    recipe = make(**options)
    ready, _ = recipe.prepare(batch.replace(old_logp=logp, behavior_logp=logp), recipe.init())
    kept = np.asarray(batch.mask & batch.where[..., None])
    np.testing.assert_array_equal(ready.mask, kept)
    gradient = jax.grad(recipe.loss)(logp, ready)
    advantages = np.nan_to_num(np.asarray(ready.advantages))[..., None]
    np.testing.assert_allclose(gradient, -advantages * np.asarray(ready.weights), atol=1e-6)


CHANGES = {
    "rollout_correction": {"cap": 1.1, "level": "sequence", "normalize": True, "reject": (RULE,)}
    | {"off_policy_threshold": 0.1, "eps_low": 0.05, "eps_high": 0.05},
    "rejecting": {"keep_denominator": True},
    "icepop": {"lower": 0.9, "upper": 1.1, "eps_low": 0.05, "eps_high": 0.05},
    "areal": {"cap": 1.1, "dual_clip": 1.01, "eps_low": 0.05, "eps_high": 0.05},
    "vespo": {"k_pos": 1.0, "lambda_pos": 1.0, "k_neg": 1.0, "lambda_neg": 1.0},
    "vcpo": {"cap": 1.0, "norms": "length"},
}
OTHERS = [("rollout_correction", x) for x in ({"cap": None}, {"level": "geometric"})]


@functools.cache
def loss_with(name, **options):
    make, base, _ = CASES[name]
    logp, batch = make_batch()
    recipe = make(**{**base, **options})
    ready, _ = recipe.prepare(batch, recipe.init())
    return float(recipe.loss(logp, ready))


CHANGED = [*one_by_one(CHANGES), *OTHERS]


@pytest.mark.of_many
@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_the_loss(name):
    rows = [options for each, options in CHANGED if each == name]
    assert not [options for options in rows if loss_with(name, **options) == loss_with(name)]


def test_vcpo_shrinks_the_step_by_the_effective_sample_size():
    _, batch = make_batch()
    mask = batch.mask & batch.where[..., None]
    share = jr.diagnostics.effective_sample_size(batch.old_logp, batch.behavior_logp, mask)
    for options, expected in (
        ({}, float(share) ** 0.5),
        ({"power": 1.0}, float(share)),
        ({"rho_base": 2.0}, (float(share) / 2.0) ** 0.5),
        ({"rho_base": 1e-3}, 1.0),
    ):
        recipe = jr.recipes.vcpo(**options)
        ready, _ = recipe.prepare(batch, recipe.init())
        np.testing.assert_allclose(ready.extras["update_scale"], expected, rtol=1e-5)


def test_the_baseline_still_sees_what_the_correction_drops():
    _, batch = make_batch()
    recipe = jr.recipes.rollout_correction(off_policy_threshold=0.0, reject=(RULE,))
    ready, _ = recipe.prepare(batch, recipe.init())
    plain = jr.recipes.dapo()
    want, _ = plain.prepare(batch, plain.init())
    np.testing.assert_allclose(ready.advantages, want.advantages, rtol=1e-6)
    assert ready.mask.sum() < want.mask.sum()
