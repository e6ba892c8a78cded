"""Presets of distillation: the loss of a batch with a teacher's numbers, in float64 NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import batch_of
from rows import for_each

import jaxrl_llm as jr

P, G, T = 2, 3, 5
# Two tokens of this policy in one span, and a last one that no span has.
SPANS = np.array([0, 0, 1, 2, -1])


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    mask = np.arange(T) < rng.integers(1, T + 1, (P, G, 1))
    logp, old, teacher, span = -rng.uniform(0.1, 2.0, (4, P, G, T))
    extras = {
        "teacher_token_logp": teacher,
        "texts": np.array([[False] * G, [True] * G]),  # which are groups of their own
        "divergence": rng.uniform(0.0, 1.0, (P, G, T)),
        "teacher_span_logp": span,
        "span_ids": np.broadcast_to(SPANS, (P, G, T)),
    }
    batch = batch_of(
        np.broadcast_to(mask, (P, G, T)),
        rng.uniform(size=(P, G)),
        old_logp=old,
        behavior_logp=np.log(0.8 * np.exp(old) + 0.2 * np.exp(teacher)),
        extras=extras,
    )
    return logp, old, mask, batch, extras


def log_ratio(old, mask, batch, extras):
    return extras["teacher_token_logp"] - old


def weighted(old, mask, batch, extras):
    a = np.where(mask, log_ratio(old, mask, batch, extras), 0.0)
    before = np.cumsum(abs(a), -1) - abs(a)
    return a * (1 + 0.5 * (1 - before / abs(a).sum(-1, keepdims=True)))


def group_advantages(batch):
    r = np.asarray(batch.rewards, np.float64)
    return (r - r.mean(-1, keepdims=True)) / (r.std(-1, ddof=1, keepdims=True) + 1e-6)


def rest(old, mask, batch, extras):
    """Mean log-ratio of the rest of a response."""
    a = log_ratio(old, mask, batch, extras)
    means = np.zeros_like(a)
    for p, g, t in np.argwhere(mask):
        means[p, g, t] = a[p, g, t : mask[p, g].sum()].mean()
    return means


def spans(old, mask, batch, extras):
    out = np.zeros_like(old)
    for p, g, t in np.argwhere(mask & (SPANS >= 0)):
        same = mask[p, g] & (SPANS[t] == SPANS)
        out[p, g, t] = extras["teacher_span_logp"][p, g, t] - old[p, g, same].sum()
    return out


@for_each(
    ("recipe", "advantages"),
    [
        (jr.recipes.gkd(), None),
        (jr.recipes.on_policy_distillation(), log_ratio),
        (jr.recipes.iw_opd(), weighted),
        (jr.recipes.span_distillation(), spans),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_loss_of_a_batch(case, recipe, advantages):
    logp, old, mask, batch, extras = case
    prepared, _ = recipe.prepare(batch, recipe.init())
    loss = np.zeros_like(logp)
    if advantages is not None:
        a, ratio = advantages(old, mask, batch, extras), np.exp(logp - old)
        loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    if recipe.name == "gkd":
        loss += extras["divergence"]
    statistics = {"divergence": prepared.extras["divergence"]}
    got = recipe.loss(jnp.asarray(logp, jnp.float32), prepared, statistics=statistics)
    np.testing.assert_allclose(got, loss[mask].mean(), rtol=1e-5)


@for_each("texts", [True, False])
def test_minillm_weighs_by_what_sampled_and_learns_texts(case, texts):
    """The mean over what policy and teacher sampled, and the mean over the texts beside it."""
    logp, old, mask, batch, extras = case
    recipe = jr.recipes.minillm(text_coef=0.5 * texts, rewards=not texts)
    prepared, _ = recipe.prepare(batch, recipe.init())
    a = rest(old, mask, batch, extras)
    if not texts:
        a = a + group_advantages(batch)[..., None]
    # The mixture of the two policies, the teacher at 0.2, has drawn the tokens.
    mixture = 0.8 * np.exp(old) + 0.2 * np.exp(extras["teacher_token_logp"])
    ratio = np.exp(logp) / mixture
    loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a) + extras["divergence"]
    sampled = mask & ~extras["texts"][..., None] if texts else mask
    expected = loss[sampled].mean()
    if texts:
        expected -= 0.5 * logp[mask & ~sampled].mean()
    statistics = {"divergence": prepared.extras["divergence"]}
    got = recipe.loss(jnp.asarray(logp, jnp.float32), prepared, statistics=statistics)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
