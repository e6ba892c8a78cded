"""The preset "ulorl": loss and gradient in float64, and what the mask may and may not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative import expect_derivative
from preset_cases import batch_of, near
from rows import for_each

import jaxrl_llm as jr

P, G, T = 3, 4, 5


@pytest.fixture(scope="module")
def case():
    """Likely tokens; a group that agrees, an empty response, one left out, of two entropies."""
    rng = np.random.default_rng(3)
    lengths = np.array([[5, 2, 3, 1], [4, 4, 5, 2], [5, 0, 2, 3]])
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, np.nan]], np.float32)
    old = np.where(rng.random((P, G, T)) < 0.5, -0.003, -1.0) * rng.uniform(0.5, 1.5, (P, G, T))
    entropy = rng.uniform(0.0, 0.3, (P, G, 1)) + rng.uniform(0.0, 0.1, (P, G, T))
    logp = (old + rng.normal(0, 0.3, old.shape)).astype(np.float32)
    extras = {"old_entropy": entropy}
    behavior_logp = near(rng, old, 0.2)
    mask = np.arange(T) < lengths[..., None]
    batch = batch_of(mask, rewards, old_logp=old, behavior_logp=behavior_logp, extras=extras)
    return logp, batch


def reference(logp, batch, *, tau=0.99, sigma=0.2, old="recomputed"):
    """The loss, and how many tokens were dropped."""
    rewards, where = np.asarray(batch.rewards, float), np.asarray(batch.where)
    base = batch.old_logp if old == "recomputed" else batch.behavior_logp
    base, now = np.asarray(base, float), np.asarray(batch.old_logp, float)
    entropy, losses, dropped = np.asarray(batch.extras["old_entropy"], float), [], 0
    for p in range(P):
        r = rewards[p][where[p]]
        for g in np.flatnonzero(where[p]):
            a = 0.0 if r.max() == r.min() else (rewards[p, g] - r.mean()) / (r.std(ddof=1) + 1e-6)
            m = np.asarray(batch.mask[p, g])
            if not m.any():
                continue
            watched = rewards[p, g] == 1 and entropy[p, g][m].mean() < sigma
            drop = watched & (np.exp(now[p, g][m]) >= tau)
            ratio = np.exp(np.asarray(logp[p, g], float)[m] - base[p, g][m])
            losses += list((1 - drop) * -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a))
            dropped += int(drop.sum())
    return np.mean(losses), dropped


def prepared(batch, **options):
    recipe = jr.recipes.ulorl(**options)
    return recipe, recipe.prepare(batch, recipe.init())[0]


OPTIONS = [
    {},
    {"old": "sampled"},
    {"sigma": 0.0},
    {"sigma": float("inf")},
    {"tau": 0.3, "sigma": 0.3},
]


@for_each("options", OPTIONS, ids=str)
def test_the_loss_and_its_gradient(case, options):
    logp, batch = case
    recipe, ready = prepared(batch, **options)
    expected, dropped = reference(logp, batch, **options)
    assert dropped > 0 or options.get("sigma") == 0
    loss, gradient = jax.value_and_grad(recipe.loss)(jnp.asarray(logp), ready)
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    formula = lambda x: reference(x, batch, **options)[0]  # noqa: E731
    expect_derivative(np.asarray(gradient), formula, logp, rtol=1e-3, atol=1e-6)


def test_all_tokens_count_in_the_mean(case):
    _, batch = case
    _, ready = prepared(batch)
    kept = batch.mask & batch.where[..., None]
    assert (ready.mask == kept).all()
    np.testing.assert_allclose(ready.weights, kept / kept.sum(), rtol=1e-6)
    # Of responses without a reward nothing changes.
    wrong = (batch.rewards == 0)[..., None] & kept
    _, free = prepared(batch, sigma=0.0)
    assert (jnp.where(wrong, ready.advantages - free.advantages, 0) == 0).all() and wrong.any()
    assert (ready.advantages != free.advantages).any()
