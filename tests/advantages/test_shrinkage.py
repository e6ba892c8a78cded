"""Baselines v05_baseline with a prior (v05_baseline) and with the other groups (jspo)."""

import jax.numpy as jnp
import numpy as np
from cheap import close, equal, grad, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import (
    jspo,
    osla_continue,
    positive_part,
    shrinkage_baseline,
    v05_baseline,
)

SHAPE = (4, 3)
eighths = hnp.arrays(np.float32, SHAPE, elements=st.integers(0, 8).map(lambda i: i / 8))
priors = hnp.arrays(np.float32, SHAPE[:1], elements=st.integers(0, 16).map(lambda i: i / 16))
kept = hnp.arrays(np.bool_, SHAPE)


def ref_baseline(r, prior, var="prior"):
    q = np.clip(np.float64(prior), 1e-3, 1 - 1e-3)
    if len(r) == 0:
        return q, 0.0
    mean = r.mean()
    s2 = {"prior": q * (1 - q), "sample": mean * (1 - mean)}
    s2 |= {"max": max(s2.values()), "bound": 0.25}
    d2 = (mean - q) ** 2
    w = max(0.0, 1 - s2[var] / len(r) / d2) if d2 > 0 else 0.0
    return w * mean + (1 - w) * q, w


def ref_v05(rewards, prior, where, var="prior", scale="none"):
    out = np.zeros(rewards.shape)
    for row, q, keep, result in zip(rewards.astype(np.float64), prior, where, out, strict=True):
        r = row[keep]
        a = r - ref_baseline(r, q, var)[0]
        if scale == "group":
            constant = len(r) == 0 or r.max() == r.min()
            a = 0 * a if constant else a / (r.std(ddof=1) + 1e-6)
        result[keep] = a
    return out


def ref_jspo(rewards, where, eps=1e-6):
    groups = [row[keep].astype(np.float64) for row, keep in zip(rewards, where, strict=True)]
    out = np.zeros(rewards.shape)
    for g, (own, keep) in enumerate(zip(groups, where, strict=True)):
        others = [r for i, r in enumerate(groups) if i != g and len(r)]
        n = len(own)
        loo = (own.sum() - own) / (n - 1) if n > 1 else own
        if not others:
            out[g, keep] = own - loo
            continue
        means = np.array([r.mean() for r in others])
        noise = [r.var(ddof=1) / len(r) for r in others if len(r) > 1]
        v, s = (np.mean(noise) if noise else 0.0), means.var()
        share = 1.0 if n == 1 else v / (v + s + eps)
        out[g, keep] = own - (1 - share) * loo - share * np.concatenate(others).mean()
    return out


@for_each(
    ("prior", "mean", "n", "baseline", "weight"),
    [
        (0.7, 0.75, 4, 0.7, 0.0),
        (0.7, 0.0, 4, 0.075, 0.892857),
        (0.7, 0.0, 400, 0.00075, 0.998929),
        (0.5, 1.0, 4, 0.875, 0.75),
        (0.5, 0.5, 4, 0.5, 0.0),
    ],
)
def test_worked_numbers(prior, mean, n, baseline, weight):
    rewards = np.asarray(np.arange(n) < mean * n, jnp.float32)
    got = shrinkage_baseline(rewards, prior=np.array(prior))
    close(got, [baseline, weight], atol=1e-6)
    close(v05_baseline(rewards, prior=np.array(prior)), rewards - baseline, atol=1e-6)


@for_each("var", ["prior", "sample", "max"])
@for_each("scale", ["none", "group"])
@quick
@given(rewards=eighths, prior=priors, where=kept)
def test_fusion_equals_float64(var, scale, rewards, prior, where):
    got = v05_baseline(rewards, prior=prior, where=where, var=var, scale=scale)
    expected = ref_v05(rewards, prior, where, var, scale)
    close(got, expected, rtol=1e-4, atol=2e-5)
    baseline, weight = shrinkage_baseline(rewards, prior=prior, where=where, var=var)
    rows = [
        ref_baseline(r[k].astype(np.float64), q, var)
        for r, k, q in zip(rewards, where, prior, strict=True)
    ]
    close(baseline, [b for b, _ in rows], atol=2e-5)
    close(weight, [w for _, w in rows], atol=2e-4)


def test_positive_part():
    d2 = np.array([0.0, 0.1, 0.25, 0.5, 1.0])
    close(positive_part(d2, np.array(0.25)), [0, 0, 0, 0.5, 0.75])
    bias = np.maximum(np.asarray(d2) - 0.25, 0)
    close(positive_part(d2, np.array(0.25)), bias / (bias + 0.25), atol=1e-7)
    assert np.isfinite(grad(lambda d: positive_part(d, np.array(0.25)).sum())(d2)).all()
    assert np.isnan(positive_part(np.array(np.nan), np.array(0.1)))


@for_each(
    ("mean", "prior", "count", "baseline", "weight", "goes_on"),
    [
        (0.5, 0.4, 4, 0.4, 0.0, False),
        (1.0, -0.5, 4, 0.833333, 0.888889, True),
        (1.0, -0.5, 15, 0.955556, 0.970370, True),
        (1.0, -0.5, 16, 0.958333, 0.972222, False),
        (0.547723, 0.0, 4, 0.091287, 0.166667, False),  # D = 0.05
    ],
)
def test_the_numbers_of_v05_on_rewards_of_minus_one_and_one(
    mean, prior, count, baseline, weight, goes_on
):
    """Its variance bound of 1 and cost of 0.0039 are 1/4 and 0.0039 / 4 for rewards of 0 and 1."""
    rewards = np.full((1, count), 0.5 + 0.5 * mean)
    halved = np.array([0.5 + 0.5 * prior])
    v05_baseline, share = shrinkage_baseline(rewards, prior=halved, var="bound")
    close(2 * v05_baseline - 1, baseline, atol=2e-6)
    close(share, weight, atol=2e-6)
    options = {"prior": halved, "cost": 0.0039 / 4, "var": "bound"}
    counts = np.array([count])
    assert bool(osla_continue(rewards[:, 0], counts, **options)[0]) == goes_on


def test_one_step_ahead():
    def error(n, mean, q, count):
        s2 = q * (1 - q)
        d = max((mean - q) ** 2 - s2 / count, 0)
        return s2 / n * d / (s2 / n + d)

    mean = np.array([0.75, 0.0, 0.0, 0.5, 0.0, 1.0], np.float32)
    prior = np.array([0.7, 0.7, 0.7, 0.9, 0.7, 0.5], np.float32)
    count = np.array([4, 4, 16, 6, 2, 8])
    for cost in (1e-3, 5e-3, 0.0):
        gain = [error(n, m, q, n) - error(n + 1, m, q, n) for n, m, q in zip(count, mean, prior)]  # noqa: B905
        expected = (count < 4) | ((count < 16) & (np.array(gain) > cost))
        got = osla_continue(mean, count, prior=prior, cost=cost)
        equal(got, expected)
    assert osla_continue(np.array([np.nan]), np.array([0]), prior=np.array([0.5])).all()
    assert not osla_continue(np.zeros(1), np.array([16]), prior=np.array([0.7]), cost=0.0).any()


@quick
@given(rewards=eighths, where=kept)
def test_pooling_equals_float64(rewards, where):
    got = jspo(rewards, where=where)
    close(got, ref_jspo(rewards, where), rtol=1e-4, atol=2e-5)


def test_pooling_of_equal_groups_as_in_the_authors_code():
    rewards = np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    # For the first: v = (1/4 + 0) / 2, s = 1/16, so the share is 2/3 of the pool's mean 1/4.
    close(jspo(rewards), [[0.5, 0.5], [-1.0, 1.0], [-0.5, -0.5]], atol=2e-5)
