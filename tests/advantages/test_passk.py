"""pass@k advantages against sums over all subsets of a group.

- passk_training takes each k rollouts for one answer, as good as their best: rewards (1, 0, 0, 0)
  with k = 2 have (1, -1/3, -1/3, -1/3), and (1, 1, 1, 0) nothing to learn.
- pkpo is the unbiased gradient of pass@k over k: (1, 1, 0, 0) with k = 2 has (2/3, 2/3, 0, 0).
- grpo_passk gives the best rollout its lead over the second: (0.9, 0.5, 0.1) has (0.4, 0, 0).

`test_enumeration.py` compares their expectations with the gradients of what they optimize.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, grad, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import grpo_passk, log_comb, passk_training, pkpo

SHAPE = (3, 5)
eighths = hnp.arrays(np.float32, SHAPE, elements=st.integers(-4, 4).map(lambda i: i / 8))
binary = hnp.arrays(np.float32, SHAPE, elements=st.sampled_from([0.0, 1.0]))
kept = hnp.arrays(np.bool_, SHAPE)


def by_rows(function, rewards, where):
    out = np.zeros(rewards.shape)
    for row, keep, result in zip(rewards.astype(np.float64), where, out, strict=True):
        if keep.any():
            result[keep] = function(row[keep])
    return out


def ref_best(r, scale="group", ddof=1, eps=1e-6):
    out = np.zeros(len(r))
    if len(r) > 1:
        order = np.sort(r)
        lead = order[-1] - order[-2]
        out[np.argmax(r)] = lead / (r.std(ddof=ddof) + eps) if scale == "group" else lead
    return out


def ref_training(r, k, eps=1e-6):
    """Each k of the group are one answer; a rollout has the mean advantage of those it is in."""
    subsets = list(itertools.combinations(range(len(r)), min(k, len(r))))
    passed = np.array([max(r[list(s)]) for s in subsets])
    advantage = (passed - passed.mean()) / (passed.std() + eps)
    return np.array([advantage[[i in s for s in subsets]].mean() for i in range(len(r))])


def ref_pkpo(r, k, loo):
    n = len(r)
    w = np.zeros(n)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        draws = list(itertools.combinations(others, min(k, n) - 1))
        w[i] = r[i] * np.mean([not any(r[list(d)]) for d in draws])
    return w - (w.sum() - w) / (n - 1) if loo and n > 1 else w


def ref_maximum(r, k):
    n, k = len(r), min(k, len(r))
    others = [[j for j in range(n) if j != i] for i in range(n)]
    draws = [list(itertools.combinations(js, k - 1)) for js in others]
    if k == 1:
        return np.array(r, np.float64)
    return np.array(
        [np.mean([max(0.0, r[i] - max(r[list(d)])) for d in draws[i]]) for i in range(n)]
    )


@for_each("k, loo", [(1, False), (2, True), (3, False), (3, True), (5, False), (7, True)])
def test_pkpo_of_rewards_of_any_size(k, loo):
    rng = np.random.default_rng(k)
    rewards = rng.normal(size=(4, 6)).round(1)  # some are equal
    where = rng.random((4, 6)) < 0.8
    where[2] = np.arange(6) == 3
    where[3] = False
    binary = np.float32(rng.random((4, 6)) < 0.5)

    @jax.jit
    def run(rewards, binary):
        options = {"k": k, "loo": loo}
        got = pkpo(rewards, where=where, **options, threshold=None)
        return got, pkpo(binary, **options, threshold=None), pkpo(binary, **options)

    got, as_any, as_binary = map(np.asarray, run(np.where(where, rewards, np.nan), binary))
    for row, mask, values in zip(rewards, where, got, strict=True):
        w = ref_maximum(row[mask], k) if mask.any() else np.zeros(0)
        if loo and len(w) > 1:
            w = w - (w.sum() - w) / (len(w) - 1)
        close(values[mask], w, atol=1e-5)
        assert not values[~mask].any()
    close(as_any, as_binary, atol=1e-6)


def test_log_comb():
    n, k = np.meshgrid(np.arange(-1, 20), np.arange(-2, 22))
    got = np.asarray(log_comb(np.asarray(n), np.asarray(k)))
    expected = [
        [math.log(math.comb(a, b)) if 0 <= b <= a else -np.inf for a, b in zip(*rows, strict=True)]
        for rows in zip(n.tolist(), k.tolist(), strict=True)
    ]
    close(got, expected, atol=1e-5)
    assert log_comb(4, 2).shape == ()
    assert float(log_comb(64, 32)) == pytest.approx(math.log(math.comb(64, 32)), abs=5e-5)
    gradient = grad(lambda k: jnp.where(jnp.isfinite(x := log_comb(4.0, k)), x, 0.0))
    assert np.isfinite([gradient(2.0), gradient(7.0), gradient(-1.0)]).all()


@for_each(
    ("function", "options", "rewards", "expected"),
    [
        (grpo_passk, {}, [0.9, 0.5, 0.1], [1, 0, 0]),
        (grpo_passk, {"scale": "none"}, [0.9, 0.5, 0.1], [0.4, 0, 0]),
        (grpo_passk, {}, [1.0, 1.0, 0.0], [0, 0, 0]),
        (passk_training, {"k": 2}, [1, 0, 0, 0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (passk_training, {"k": 2}, [1, 1, 0, 0], [0.447212, 0.447212, -0.447212, -0.447212]),
        (passk_training, {"k": 2}, [1, 1, 1, 0], [0, 0, 0, 0]),
        (passk_training, {"k": 4}, [1, 1] + [0] * 6, [0.522232] * 2 + [-0.174077] * 6),
        (passk_training, {"k": 1}, [1, 0, 0, 0], [1.732047] + [-0.577349] * 3),
        (pkpo, {"k": 2}, [1, 0, 0, 0], [1, 0, 0, 0]),
        (pkpo, {"k": 2, "loo": True}, [1, 0, 0, 0], [1] + [-1 / 3] * 3),
        (pkpo, {"k": 2}, [1, 1, 0, 0], [2 / 3, 2 / 3, 0, 0]),
        (pkpo, {"k": 2, "loo": True}, [1, 1, 0, 0], [0.444444, 0.444444, -0.444444, -0.444444]),
        (pkpo, {"k": 2}, [1, 1, 1, 0], [1 / 3] * 3 + [0]),
        (pkpo, {"k": 2, "loo": True}, [1, 1, 1, 0], [0.111111] * 3 + [-1 / 3]),
        (pkpo, {"k": 4}, [1, 1, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_worked_numbers(function, options, rewards, expected):
    got = function(np.array(rewards, jnp.float32), **options)
    close(got, expected, atol=4e-6)


@for_each("options", [{}, {"ddof": 0, "eps": 0.1}, {"scale": "none"}])
@quick
@given(rewards=eighths, where=kept)
def test_the_lead_equals_float64(options, rewards, where):
    got = np.asarray(grpo_passk(rewards, where=where, **options))
    expected = by_rows(lambda r: ref_best(r, **options), rewards, where)
    close(got, expected, rtol=1e-5, atol=1e-6)
    assert (got >= 0).all()
    assert ((got > 0).sum(-1) <= 1).all()
    shifted = grpo_passk(rewards + 3, where=where, **options)
    close(shifted, got, rtol=1e-4, atol=1e-5)


@for_each("k", [1, 2, 5, 9])
@quick
@given(rewards=binary, where=kept)
def test_advantages_of_all_subsets(k, rewards, where):
    got = np.asarray(passk_training(rewards, where=where, k=k))
    expected = by_rows(lambda r: ref_training(r, k), rewards, where)
    close(got, expected, rtol=2e-5, atol=3e-6)
    close(got.sum(-1), 0.0, atol=2e-5)
    for loo in (False, True):
        close(
            pkpo(rewards, where=where, k=k, loo=loo),
            by_rows(lambda r, loo=loo: ref_pkpo(r, k, loo), rewards, where),
            rtol=1e-5,
            atol=1e-6,
        )


def test_large_groups_keep_their_digits():
    n, c, k = 512, 40, 64
    rewards = np.arange(n) < c
    got = pkpo(rewards.astype(jnp.float32), k=k)
    exact = math.comb(n - c, k - 1) / math.comb(n - 1, k - 1)
    assert float(got[0]) == pytest.approx(exact, rel=2e-5)
    rho = 1 - math.comb(n - c, k) / math.comb(n, k)
    blamed = math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)
    sigma = math.sqrt(rho * (1 - rho)) + 1e-6
    out = passk_training(rewards.astype(jnp.float32), k=k)
    assert float(out[0]) == pytest.approx((1 - rho) / sigma, rel=1e-4)
    assert float(out[-1]) == pytest.approx((1 - rho - blamed) / sigma, rel=1e-4)


def test_the_threshold_says_what_is_right():
    rewards = np.array([2.0, 1.0, -1.0, 0.5])
    equal(pkpo(rewards, k=2), pkpo(np.array([1.0, 1.0, 0.0, 0.0]), k=2))
    equal(pkpo(rewards, k=2, threshold=1.5), pkpo(np.array([1.0, 0.0, 0.0, 0.0]), k=2))
