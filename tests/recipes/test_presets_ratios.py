"""Presets of ratios, on and off policy: the whole loss and its gradient in float64, row by row.

``x``, ``old``, ``ref`` and ``mu`` are the log-probabilities of a row's tokens under the policy that
moves, the one at the start of the step, the reference, and the one that sampled; ``a`` is its
advantage. With ``r = e^(x - old)`` and ``w = e^(old - mu)``, of each token or response

    luspo   T clip(e^mean(x - old), a)         minpro  -clip(e^(x - mu) least before it) a x
    gmpo    -a e^mean(clipped x - old)         dispo   -clip(r) a x, by the sign of a
    gbpo    |a| |r - 1 -+ 0.2|                 kl_cov  -r a, + |x - old| where selected
    icepop  w clip(r, a), 0 outside of [w]     m2po    -e^(x - mu) a, of the nearest to old
    vespo   -w^k e^(rate (1 - w)) a x, w of the whole response
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative import expect_derivative
from preset_cases import (
    LENGTHS,
    G,
    P,
    Rows,
    T,
    center,
    clip,
    example,
    expect_loss,
    k3,
    mean,
    prepared,
    z,
)
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import PRESETS, catalog

# Squared norms of the gradients of responses, which do not follow their lengths.
NORMS = np.array([[0.5, 8, 1, 3], [2, 1, 4, 1], [1, 7, 6, 2]]) * (LENGTHS[:P] > 0)


def make_batch(**extras):
    return example(3, extras={"prompt_ids": np.arange(P), "grad_sq_norms": NORMS, **extras})


def fipo(x, old, ref, mu, a, at):
    """All tokens of the response to come, each counting half after 32 tokens."""
    d = at - old
    future = [sum(2 ** (-(u - t) / 32) * d[u] for u in range(t, len(d))) for t in range(len(d))]
    return np.clip(np.exp(future), 1.0, 1.2) * clip(np.exp(x - old), a, high=1.28)


def gmpo(x, old, ref, mu, a, at):
    d, s = x - old, np.sign(a)
    moved = s * np.minimum(s * d, s * np.clip(d, -0.4, 0.4))
    return np.full(len(x), -a * np.exp(moved.mean()))


def minpro(x, old, ref, mu, a, at):
    q = np.exp(at - mu)
    least = [min(q[:t], default=1.0) for t in range(len(q))]
    return -np.clip(q * least, 0.0, 5.0) * a * x


def dcpo(x, old, ref, mu, a, at):
    low = 0.5 + 0.5 * np.sqrt(np.maximum(1 - 0.64 / np.exp(old), 0))
    high = np.minimum(0.5 + 0.5 * np.sqrt(1 + 0.8 / np.exp(old)), 10)
    return clip(np.exp(x - old), a, low, high)


def remix(x, old, ref, mu, a, at):
    """Of the first step, where the last policy has no share."""
    around = np.exp(old - mu)
    return clip(np.exp(x - mu), a, around - 0.2, around + 0.2) + 1e-3 * k3(x, ref)


def vespo(x, old, ref, mu, a, at):
    w = np.exp((at - mu).sum())
    k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return -(w**k) * np.exp(rate * (1 - w)) * a * x


def bounded(distance):
    """DPPO: no token that has moved too far the way its advantage pulls it."""

    def loss(x, old, ref, mu, a, at):
        away = at > mu if a > 0 else at < mu
        gone = away & (distance(np.exp(at), np.exp(mu)) > 0.05)
        return np.where(gone, 0.0, -np.exp(at - mu) * a * x)

    return loss


def binary_kl(p, q):
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


def truncated(cap, high):
    return lambda x, old, ref, mu, a, at: (
        np.minimum(np.exp(old - mu), cap) * clip(np.exp(x - old), a, high=high)
    )


def masked(lower, upper):
    def loss(x, old, ref, mu, a, at):
        w = np.exp(old - mu)
        return np.where((w >= lower) & (w <= upper), w, 0.0) * clip(np.exp(x - old), a)

    return loss


FAR = {"length": 7, "delta_low": 0.05, "delta_high": 0.05}
# The preset, its options, losses of tokens, advantages of a group, and what the mean is over. A
# weight without a gradient is that ``at`` the policy of which the gradient is.
CASES = {
    "luspo": (
        {},
        lambda x, old, ref, mu, a, at: (
            len(x) * clip(np.full(len(x), np.exp((x - old).mean())), a, 0.998, 1.0025)
        ),
        z,
        "sequence",
    ),
    "gmpo": ({}, gmpo, z, "sequence"),
    "gbpo": ({}, lambda x, *_: x, lambda r: z(r, ddof=0), "sequence"),  # see below
    "dcpo_dynamic_clip": ({"num_prompts": P}, dcpo, lambda r: z(r, 0.0), "sequence"),
    "dispo": (
        {},
        lambda x, old, ref, mu, a, at: (
            -np.clip(np.exp(at - old), *((0.8, 11.0) if a > 0 else (0, 101.0))) * a * x
        ),
        z,
        "token",
    ),
    "fipo": ({}, fipo, z, "token"),
    "minpro": ({}, minpro, z, "token"),
    "remix": ({}, remix, z, "token"),
    "clip_cov": (
        {"ratio": 0.2, "lower": 0.05, "upper": 0.8},
        lambda x, old, ref, mu, a, at: clip(np.exp(x - old), a, 0.0, 2.0),
        z,
        "token",
    ),
    "kl_cov": ({"ratio": 0.2}, lambda x, old, ref, mu, a, at: -np.exp(x - old) * a, z, "token"),
    "dppo_tv": (FAR, bounded(lambda p, q: np.abs(p - q)), center, "budget"),
    "dppo_kl": ({"length": 7}, bounded(binary_kl), center, "budget"),
    "m2po": ({}, lambda x, old, ref, mu, a, at: -np.exp(x - mu) * a, z, "token"),
    "vespo": ({}, vespo, z, "token"),
    "rollout_correction": ({}, truncated(2.0, 1.28), z, "token"),
    "icepop": ({"upper": 2.0}, masked(0.5, 2.0), z, "token"),
    "areal": ({"cap": 1.5}, masked(0.0, 1.5), z, "token"),
}


def reference(name, logp, batch, selected, at) -> float:
    _, token, scale, of = CASES[name]
    rows = Rows(logp, batch)
    advantages, medians = rows.each(scale), rows.each(lambda r: r - np.median(r))
    losses = [
        token(*each) if len(each[0]) else each[0]
        for each in zip(*rows.all, advantages, rows.tokens(at), strict=True)
    ]
    if name == "gbpo":
        losses = [
            np.abs(a) * np.abs(np.exp(x - old) - 1 - 0.2 * np.sign(median))
            for x, old, a, median in zip(rows.x, rows.old, advantages, medians, strict=True)
        ]
    chosen = rows.tokens(selected)
    if name == "clip_cov":
        losses = [np.where(s, 0.0, x) for s, x in zip(chosen, losses, strict=True)]
    if name == "kl_cov":
        far = [np.abs(x - old) for x, old in zip(rows.x, rows.old, strict=True)]
        losses = [x + s * d for s, x, d in zip(chosen, losses, far, strict=True)]
    if name == "m2po":  # the most tokens, nearest first, whose mean square is below 0.04
        square = [(old - mu) ** 2 for old, mu in zip(rows.old, rows.mu, strict=True)]
        order = np.sort(np.concatenate(square))
        below = (np.cumsum(order) / np.arange(1, len(order) + 1) < 0.04).sum()
        assert 0.3 < below / len(order) < 0.9
        each = zip(square, losses, strict=True)
        losses = [np.where(s <= order[below - 1], x, 0.0) for s, x in each]
    if of == "budget":
        return np.concatenate(losses).sum() / (7 * (rows.lengths > 0).sum())
    return mean(losses, of)


def made(name, **options):
    logp, batch = make_batch()
    recipe = PRESETS[name](**options)
    key = jax.random.key(0) if recipe.draws else None
    return recipe, logp, batch, prepared(recipe, batch, key=key)


@for_each("name", CASES)
def test_the_loss_and_its_gradient_are_the_papers(name):
    options = CASES[name][0]
    recipe, logp, batch, ready = made(name, **options)
    selected = np.asarray(ready.extras.get("selected", np.zeros((P, G, T), bool)))
    assert selected.any() == (name in ("clip_cov", "kl_cov"))
    formula = functools.partial(reference, name, batch=batch, selected=selected, at=logp)
    expect_loss(recipe, logp, ready, formula)


RULE = jr.bind(jr.corrections.rejection_mask, statistic="k2", level="sequence_mean", upper=0.15)


def test_a_correction_drops_sequences_that_are_far_and_bad_ones_that_are_near():
    logp, batch = example(17)
    recipe = jr.recipes.rollout_correction(reject=(RULE,), off_policy_threshold=0.05)
    ready = prepared(recipe, batch)
    rows, losses, dropped = Rows(logp, batch), [], [0, 0]
    each = zip(*rows.all, rows.each(z), strict=True)
    for x, old, ref, mu, a in (row for row in each if len(row[0])):
        d = old - mu
        far, worse = (d**2 / 2).mean() > 0.15, a < 0 and -d.mean() > 0.05
        dropped[0] += far
        dropped[1] += worse and not far
        if not far and not worse:
            losses.append(truncated(2.0, 1.28)(x, old, ref, mu, a, x))
    assert min(dropped) > 0
    assert float(recipe.loss(logp, ready)) == pytest.approx(mean(losses), rel=1e-5)


def test_areal_may_leave_out_the_tokens_with_the_largest_second_moments():
    recipe, logp, batch, ready = made("areal", cap=1.5, m2_threshold=0.1)
    rows = Rows(logp, batch)
    kept = np.sort((np.concatenate(rows.old) - np.concatenate(rows.mu)) ** 2)
    count = len(kept)
    while kept.mean() >= 0.1:
        kept = kept[:-1]
    assert 1 < len(kept) < count
    each = zip(*rows.all, rows.each(z), strict=True)
    losses = [masked(0.0, 1.5)(*row, row[0])[(row[1] - row[3]) ** 2 <= kept[-1]] for row in each]
    assert float(recipe.loss(logp, ready)) == pytest.approx(mean(losses), rel=1e-5)


@for_each("norms", ["exact", "length"])
def test_vcpo_has_the_baseline_of_least_variance(norms):
    """Each group's rewards minus the off-policy baseline, over their deviation."""
    recipe, logp, batch, ready = made("vcpo", cap=1.2, norms=norms)
    rows = Rows(logp, batch)
    sizes = rows.of("grad_sq_norms") if norms == "exact" else rows.lengths
    gaps = zip(rows.old, rows.mu, strict=True)
    w = np.exp([(old - mu).sum() for old, mu in gaps])
    v, a = w**2 * sizes, np.zeros(len(w))
    for group in rows.groups:
        r = rows.r[group]
        if np.ptp(r) > 0:
            a[group] = (r - v[group] @ r / v[group].sum()) / r.std()
    losses = [-min(b, 1.2) * c * x for b, c, x in zip(w, a, rows.x, strict=True)]
    assert float(recipe.loss(logp, ready)) == pytest.approx(mean(losses, "sequence"), rel=1e-5)


def test_vcpo_shrinks_the_step_by_the_effective_sample_size():
    _, batch = make_batch()
    mask = batch.mask & batch.where[..., None]
    share = float(jr.diagnostics.effective_sample_size(batch.old_logp, batch.behavior_logp, mask))
    for options, expected in (
        ({}, share**0.5),
        ({"power": 1.0}, share),
        ({"rho_base": 2.0}, (share / 2.0) ** 0.5),
        ({"rho_base": 1e-3}, 1.0),
    ):
        scale = prepared(jr.recipes.vcpo(**options), batch).extras["update_scale"]
        np.testing.assert_allclose(scale, expected, rtol=1e-5)


@for_each("baseline", [0.5, None])
@for_each("level", ["sequence", "token"])
def test_topr_is_the_mean_of_the_sums_over_sequences(level, baseline):
    recipe, logp, batch, ready = made("topr", level=level, baseline=baseline)
    rows, losses, least = Rows(logp, batch), [], 1.0
    advantages = rows.each(center if baseline is None else lambda r: r - baseline)
    for x, mu, a in zip(rows.x, rows.mu, advantages, strict=True):
        change = np.full(len(x), (x - mu).sum()) if level == "sequence" else x - mu
        weight = np.ones(len(x)) if a > 0 else np.minimum(np.exp(change), 1.0)
        least = min([least, *weight])
        losses.append(-weight * a * x)
    assert least < 0.99  # some bad response became unlikelier
    np.testing.assert_allclose(float(recipe.loss(logp, ready)), mean(losses, "sum"), rtol=1e-5)


@for_each("shift", [-0.1, 0.3])
def test_asymre_is_the_mean_of_the_sums_over_sequences_without_a_ratio(shift):
    recipe, logp, batch, ready = made("asymre", shift=shift)
    rows = Rows(logp, batch)
    losses = [-a * x for a, x in zip(rows.each(center) - shift, rows.x, strict=True)]
    found = float(recipe.loss(logp, ready))
    np.testing.assert_allclose(found, mean(losses, "sum"), rtol=1e-5)
    # Nothing of the policies that sampled or came before is read.
    far = batch.replace(old_logp=batch.old_logp - 3.0, behavior_logp=batch.behavior_logp - 2.0)
    assert float(recipe.loss(logp, prepared(recipe, far))) == pytest.approx(found, rel=1e-6)


def test_gvpo_is_the_mean_over_groups_of_the_squared_errors():
    recipe, logp, batch, ready = made("gvpo", beta=0.4)

    def total(x):
        rows, groups = Rows(x, batch), []
        d = np.array([0.4 * (a - b).sum() for a, b in zip(rows.x, rows.old, strict=True)])
        for group in rows.groups:
            members = group[rows.lengths[group] > 0]
            error = center(d[members]) - center(rows.r[members])
            groups.append((error**2).sum() / 2 / (len(members) - 1))
        return np.mean(groups)

    np.testing.assert_allclose(float(recipe.loss(logp, ready)), total(logp), rtol=1e-5)
    grad = np.asarray(jax.grad(recipe.loss)(jnp.asarray(logp), ready))
    expect_derivative(grad, total, logp, rtol=1e-4, atol=1e-6)
    # What is even in reward is held together too: its log-ratios are not even.
    assert np.abs(grad[1]).max() > 1e-3


def test_the_selections_are_those_of_the_old_policy_on_the_whole_batch():
    for name in ("clip_cov", "kl_cov"):
        _, _, batch, ready = made(name, **CASES[name][0])
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


def test_remix_lets_the_base_go_and_resets_it_once():
    recipe, logp, batch, ready = made("remix", kl_coef=1.0)
    prepare, state = jax.jit(recipe.prepare), recipe.init()
    for _ in range(51):
        later, state = prepare(batch, state)
    assert float(ready.extras["kl_share"][0, 0, 0]) == 1.0
    assert float(later.extras["kl_share"][0, 0, 0]) == pytest.approx(0.9)
    rows = Rows(logp, batch)
    x, old, ref = map(np.concatenate, (rows.x, rows.old, rows.ref))
    change = 0.1 * (k3(x, old) - k3(x, ref)).mean()
    got = float(recipe.loss(logp, later)) - float(recipe.loss(logp, ready))
    assert got == pytest.approx(change, rel=1e-3)
    recipe = jr.recipes.remix(reset_at=50)
    old, new = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}
    values = [recipe.reference(old, new, step)["w"].tolist() for step in (49, 50, 100)]
    assert values == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert jr.recipes.remix(reset_at=None).reference is None
    assert recipe.collector.until == 50 and recipe.collector.max_staleness == 2


@for_each("name", list(CASES)[:10])
def test_the_surrogate_of_a_preset_is_in_its_row(name):
    recipe = catalog.preset(name, length=T, num_prompts=P)
    (row,) = [m for m in catalog.CATALOG if m.preset == name]
    assert f"surrogates.{recipe.surrogate.__name__}" in row.functions
