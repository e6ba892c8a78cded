"""Presets that bound the ratio in other ways: the whole loss against float64, row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative import expect_derivative
from preset_cases import MASK, REWARDS, batch_of, expect_loss, near, one_by_one
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import PRESETS, Batch, catalog
from jaxrl_llm.testing.cases import make_case

P, G, T = 3, 4, 5
NAMES = (
    "clip_cov",
    "dcpo_dynamic_clip",
    "dispo",
    "fipo",
    "gbpo",
    "gmpo",
    "kl_cov",
    "luspo",
    "minpro",
    "remix",
)
# Enough tokens for the selections to find some.
OPTIONS = {"clip_cov": {"ratio": 0.2, "lower": 0.05, "upper": 0.8}, "kl_cov": {"ratio": 0.2}}


def make_batch() -> tuple[np.ndarray, Batch]:
    """Ratios far from 1; a group that agrees, an empty response, a rollout left out."""
    rng = np.random.default_rng(3)
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    names = ("old_logp", "ref_logp", "behavior_logp")
    others = {name: near(rng, logp) for name in names}
    return logp, batch_of(MASK[:P], REWARDS, **others, extras={"prompt_ids": np.arange(P)})


def clip(r, a, low, high):
    return np.maximum(-r * a, -np.clip(r, low, high) * a)


def k3(d):
    return np.exp(-d) - 1 + d


def future_weights(x, old):
    """FIPO's: all tokens of the response to come, each counting half after 32 tokens."""
    d = x - old
    future = [sum(2 ** (-(u - t) / 32) * d[u] for u in range(t, len(d))) for t in range(len(d))]
    return np.clip(np.exp(future), 1.0, 1.2)


def token_loss(name, x, old, ref, behavior, a, median, selected):
    """Token losses of one response; `x` moves, what is a weight was computed from it before."""
    r = np.exp(x - old)
    if name == "luspo":
        return len(x) * clip(np.full(len(x), np.exp((x - old).mean())), a, 0.998, 1.0025)
    if name == "gmpo":
        d, s = x - old, np.sign(a)
        z = s * np.minimum(s * d, s * np.clip(d, -0.4, 0.4))
        return np.full(len(x), -a * np.exp(z.mean()))
    if name == "dispo":
        return -(np.clip(r, 0.8, 11.0) if a > 0 else np.clip(r, 0.0, 101.0)) * a * x
    if name == "minpro":
        q = np.exp(x - behavior)
        least = [min(q[:t], default=1.0) for t in range(len(q))]
        return -np.clip(q * least, 0.0, 5.0) * a * x
    if name == "clip_cov":
        return np.where(selected, 0.0, clip(r, a, 0.0, 2.0))
    if name == "kl_cov":
        return -r * a + selected * np.abs(x - old)
    if name == "fipo":
        return future_weights(x, old) * clip(r, a, 0.8, 1.28)
    if name == "gbpo":
        return np.abs(a) * np.abs(r - (1 + 0.2 * np.sign(median)))
    if name == "dcpo_dynamic_clip":
        low = 0.5 + 0.5 * np.sqrt(np.maximum(1 - 0.64 / np.exp(old), 0))
        high = np.minimum(0.5 + 0.5 * np.sqrt(1 + 0.8 / np.exp(old)), 10)
        return clip(r, a, low, high)
    center = np.exp(old - behavior)
    kl = k3(x - ref)  # of the first step, where the last policy has no share
    return clip(np.exp(x - behavior), a, center - 0.2, center + 0.2) + 1e-3 * kl


def standardized(name, r):
    if r.max() == r.min():
        return 0 * r
    if name == "dcpo_dynamic_clip":
        return (r - r.mean()) / r.std(ddof=1)
    return (r - r.mean()) / (r.std(ddof=0 if name == "gbpo" else 1) + 1e-6)


def reference(name, logp, batch, selected) -> float:
    rows = []
    for p in range(P):
        members = np.flatnonzero(batch.where[p])
        r = np.asarray(batch.rewards[p], float)[members]
        for g, a, median in zip(members, standardized(name, r), r - np.median(r), strict=True):
            m = np.asarray(batch.mask[p, g])
            if m.any():
                arrays = (logp, batch.old_logp, batch.ref_logp, batch.behavior_logp)
                values = [np.asarray(v[p, g], np.float64)[m] for v in arrays]
                rows.append(token_loss(name, *values, a, median, selected[p, g][m]))
    if name in ("luspo", "gmpo", "gbpo", "dcpo_dynamic_clip"):
        return np.mean([row.mean() for row in rows])
    return np.concatenate(rows).mean()


def prepared(name, **options):
    logp, batch = make_batch()
    more = {"num_prompts": P} if name == "dcpo_dynamic_clip" else {}
    recipe = PRESETS[name](**more, **options)
    key = jax.random.key(0) if recipe.draws else None
    ready, _ = jax.jit(recipe.prepare)(batch, recipe.init(), key=key)
    return recipe, logp, batch, ready


@for_each("name", NAMES)
def test_the_loss_and_its_gradient_are_the_papers(name):
    """Of dispo, fipo and minpro not the gradient: their weights are constants."""
    recipe, logp, batch, ready = prepared(name, **OPTIONS.get(name, {}))
    selected = np.asarray(ready.extras.get("selected", np.zeros((P, G, T), bool)))
    assert selected.any() == (name in OPTIONS)
    formula = functools.partial(reference, name, batch=batch, selected=selected)
    least = None if name in ("dispo", "fipo", "minpro") else 1e-4
    expect_loss(recipe, logp, ready, formula, rel=5e-6, least=least)


@for_each("baseline", [0.5, None])
@for_each("level", ["sequence", "token"])
def test_topr_is_the_mean_of_the_sums_over_sequences(level, baseline):
    recipe, logp, batch, ready = prepared("topr", level=level, baseline=baseline)
    rows, weights = [], []
    for p, g in np.argwhere(np.asarray(batch.where)):
        m, members = np.asarray(batch.mask[p, g]), np.asarray(batch.where[p])
        r = np.asarray(batch.rewards[p], np.float64)
        a = r[g] - (r[members].mean() if baseline is None else baseline)
        x, mu = (np.asarray(v[p, g], np.float64)[m] for v in (logp, batch.behavior_logp))
        change = (x - mu).sum() if level == "sequence" else x - mu
        weights.append(np.ones(len(x)) if a > 0 else np.minimum(np.exp(change), 1.0))
        if m.any():
            rows.append((-weights[-1] * a * x).sum())
    assert min(w.min() for w in weights if w.size) < 0.99  # some bad response became unlikelier
    np.testing.assert_allclose(float(recipe.loss(logp, ready)), np.mean(rows), rtol=1e-5)


@for_each("shift", [-0.1, 0.3])
def test_asymre_is_the_mean_of_the_sums_over_sequences_without_a_ratio(shift):
    recipe, logp, batch, ready = prepared("asymre", shift=shift)
    rows = []
    for p, g in np.argwhere(np.asarray(batch.where)):
        m, r = np.asarray(batch.mask[p, g]), np.asarray(batch.rewards[p], np.float64)
        a = r[g] - (r[np.asarray(batch.where[p])].mean() + shift)
        if m.any():
            rows.append((-a * np.float64(logp[p, g])[m]).sum())
    np.testing.assert_allclose(float(recipe.loss(logp, ready)), np.mean(rows), rtol=1e-5)
    # Nothing of the policies that sampled or came before is read.
    far = batch.replace(old_logp=batch.old_logp - 3.0, behavior_logp=batch.behavior_logp - 2.0)
    other, _ = recipe.prepare(far, recipe.init())
    assert float(recipe.loss(logp, other)) == float(recipe.loss(logp, ready))


def test_gvpo_is_the_mean_over_groups_of_the_squared_errors():
    recipe, logp, batch, ready = prepared("gvpo", beta=0.4)
    mask, where = np.asarray(batch.mask), np.asarray(batch.where)

    def total(x):
        groups = []
        for p in range(P):
            members = [g for g in range(G) if where[p, g] and mask[p, g].any()]
            r = np.asarray(batch.rewards, np.float64)[p, members]
            change = np.where(mask[p], x[p] - np.asarray(batch.old_logp[p], np.float64), 0.0)
            d = 0.4 * change.sum(-1)[members]
            error = (d - d.mean()) - (r - r.mean())
            groups.append((error**2).sum() / 2 / (len(members) - 1))
        return np.mean(groups)

    np.testing.assert_allclose(float(recipe.loss(logp, ready)), total(logp), rtol=1e-5)
    grad = np.asarray(jax.grad(recipe.loss)(jnp.asarray(logp), ready))
    expect_derivative(grad, total, logp, rtol=1e-4, atol=1e-6)
    # What is even in reward is held together too: its log-ratios are not even.
    assert np.abs(grad[1]).max() > 1e-3


def test_the_selections_are_those_of_the_old_policy_on_the_whole_batch():
    for name in OPTIONS:
        _, _, batch, ready = prepared(name, **OPTIONS[name])
        mask = np.asarray(ready.mask)
        a = np.broadcast_to(np.asarray(ready.advantages)[..., None], mask.shape)
        old = np.asarray(batch.old_logp)
        covariance = (a - a[mask].mean()) * (old - old[mask].mean())
        selected = np.asarray(ready.extras["selected"])
        assert selected.sum() == int(0.2 * mask.sum()) and not selected[~mask].any()
        if name == "kl_cov":
            assert covariance[selected].min() >= covariance[mask & ~selected].max()
        else:
            assert (covariance[selected] > 0.05).all() and (covariance[selected] < 0.8).all()


def test_remix_lets_the_base_go():
    recipe, logp, batch, ready = prepared("remix", kl_coef=1.0)
    state = recipe.init()
    for _ in range(51):
        later, state = recipe.prepare(batch, state)
    assert float(ready.extras["kl_share"][0, 0, 0]) == 1.0
    assert float(later.extras["kl_share"][0, 0, 0]) == pytest.approx(0.9)
    m = np.asarray(ready.mask)
    x, old, ref = (np.asarray(v, np.float64)[m] for v in (logp, batch.old_logp, batch.ref_logp))
    change = 0.1 * (k3(x - old) - k3(x - ref)).mean()
    got = float(recipe.loss(logp, later)) - float(recipe.loss(logp, ready))
    assert got == pytest.approx(change, rel=1e-3)


def test_remix_resets_its_base_once():
    recipe = jr.recipes.remix(reset_at=50)
    old, new = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}
    assert recipe.reference(old, new, 49)["w"].tolist() == [0.0, 0.0]
    assert recipe.reference(old, new, 50)["w"].tolist() == [1.0, 1.0]
    assert recipe.reference(old, new, 100)["w"].tolist() == [0.0, 0.0]
    assert jr.recipes.remix(reset_at=None).reference is None
    assert recipe.collector.until == 50 and recipe.collector.max_staleness == 2


def near_the_sampler(old, behavior, trains):
    """The tokens that M2PO leaves: the most, nearest first, whose mean square is below 0.04."""
    square = np.where(trains, (old - behavior) ** 2, np.inf)
    in_order = np.sort(square[trains])
    below = np.cumsum(in_order) / np.arange(1, len(in_order) + 1) < 0.04
    return square <= in_order[below.sum() - 1]


def binary(name, p, q):
    """How far the probability of a token has moved."""
    if name == "dppo_tv":
        return np.abs(p - q)
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


@for_each("name", ["dppo_tv", "dppo_kl", "m2po"])
def test_the_gradient_of_presets_off_policy_is_a_weighted_policy_gradient(name):
    most, length = 0.05, 7
    options = {"delta_low": most, "delta_high": most} if name == "dppo_tv" else {}
    options |= {} if name == "m2po" else {"length": length}
    recipe, logp, batch, ready = prepared(name, **options)
    x, old, behavior = (np.float64(v) for v in (logp, batch.old_logp, batch.behavior_logp))
    trains = np.asarray(batch.mask & batch.where[..., None])
    weights = np.exp(x - behavior)
    if name == "m2po":
        kept = near_the_sampler(old, behavior, trains)
        assert 0.3 < kept[trains].mean() < 0.9
    else:
        moved = binary(name, np.exp(x), np.exp(behavior))
    of_batch = trains.sum() if name == "m2po" else trains.any(-1).sum() * length
    expected = np.zeros((P, G, T))
    for p in range(P):
        members = np.flatnonzero(batch.where[p])
        r = np.asarray(batch.rewards[p], float)[members]
        centered = standardized(name, r) if name == "m2po" else r - r.mean()
        for g, a in zip(members, centered, strict=True):
            if name == "m2po":
                keep = kept[p, g]
            else:
                away = x[p, g] > behavior[p, g] if a > 0 else x[p, g] < behavior[p, g]
                keep = ~(away & (moved[p, g] > most))
            expected[p, g] = np.where(trains[p, g] & keep, -weights[p, g] * a, 0.0) / of_batch
    grad = np.asarray(jax.grad(recipe.loss)(jnp.asarray(logp), ready))
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)
    dropped = trains & (expected == 0) & (np.asarray(ready.advantages)[..., None] != 0)
    assert dropped.any()


CHANGES = {
    "dppo_tv": {"delta_low": 0.01, "delta_high": 0.01, "w_max": 0.5, "length": 7},
    "dppo_kl": {"delta_low": 0.5, "delta_high": 0.001, "w_max": 0.5, "length": 7},
    "m2po": {"threshold": 1.0},
    "luspo": {"eps_low": 0.3, "eps_high": 0.3},
    "gmpo": {"eps_low": 0.05, "eps_high": 0.05},
    "dispo": {"eps_pos": (0.0, 0.1), "eps_neg": (0.0, 0.1)},
    "asymre": {"shift": 0.0},
    "gvpo": {"beta": 0.2},
    "fipo": {"half_life": 1.0, "w_min": 0.8, "w_max": 1.1, "safe_ratio": 1.1, "dual_clip": 1.1}
    | {"eps_low": 0.05, "eps_high": 0.05},
    "topr": {"level": "token", "baseline": 0.25},
    "minpro": {"w_min": 0.9, "w_max": 0.5, "cap_one": True},
    "clip_cov": {"eps_low": 0.1, "eps_high": 0.1},
    "kl_cov": {"ratio": 0.5, "coef": 0.5},
    "gbpo": {"eps_low": 0.05, "eps_high": 0.05},
    "remix": {"eps_low": 0.05, "eps_high": 0.05, "kl_coef": 0.0, "kl_estimator": "k2"},
    "dcpo_dynamic_clip": {"eps_low": 0.01, "eps_high": 0.01, "r_max": 1.05, "dual_clip": 1.01},
}
TOGETHER = [("topr", {"baseline": None}), ("clip_cov", {"ratio": 0.5, "lower": 0.0})]


@functools.cache
def loss_with(name, **options):
    recipe, logp, _, ready = prepared(name, **options)
    return float(recipe.loss(logp, ready))


CHANGED = [*one_by_one(CHANGES), *TOGETHER]


@pytest.mark.of_many
@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_the_loss(name):
    rows = [options for each, options in CHANGED if each == name]
    assert not [options for options in rows if loss_with(name, **options) == loss_with(name)]


@for_each("name", NAMES)
def test_the_surrogate_of_a_preset_is_in_its_row(name):
    recipe = catalog.preset(name, length=T, num_prompts=P)
    (row,) = [m for m in catalog.CATALOG if m.preset == name]
    assert f"surrogates.{recipe.surrogate.__name__}" in row.functions


def test_hapo_is_its_three_functions_in_a_row():
    case = make_case()
    batch, recipe = case.batch, jr.recipes.hapo(quantile=0.6, alpha=0.5)
    ready, _ = recipe.prepare(batch, recipe.init())
    mask = batch.mask & batch.where[..., None]
    signal = jr.advantages.entropy_signal(batch.extras["old_entropy"], mask, quantile=0.6).signal
    advantages = jr.advantages.token_grpo(batch.rewards, mask=mask, where=batch.where)
    loss = jr.surrogates.hapo(case.logp, batch.old_logp, advantages, mask, signal=signal, alpha=0.5)
    expected = jr.aggregate.weighted_sum(loss, jr.aggregate.token_mean(mask))
    assert float(recipe.loss(case.logp, ready)) == pytest.approx(float(expected), rel=1e-6)


def test_hapo_penalizes_the_last_tokens_of_a_budget():
    batch = make_case().batch
    width = batch.mask.shape[-1]
    recipe = jr.recipes.hapo(length=width, overlong_factor=2.0)
    ready, _ = recipe.prepare(batch, recipe.init())
    mask = np.asarray(batch.mask & batch.where[..., None])
    start = 0.6 * width
    penalty = -2.0 * np.clip((mask.sum(-1) - start) / (width - start), 0.0, 1.0)
    assert np.ptp(penalty) > 0
    rewards = jnp.where(batch.where, batch.rewards + penalty, 0.0)
    expected = jr.advantages.token_grpo(rewards, mask=jnp.asarray(mask), where=batch.where)
    np.testing.assert_allclose(ready.advantages, expected, rtol=1e-5, atol=1e-6)
