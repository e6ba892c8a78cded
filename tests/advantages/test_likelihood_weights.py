"""maxrl and the truncated maclaurin of the log-probability."""

import math

import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import maclaurin, maclaurin_weights, maxrl

SHAPE = (3, 5)
positive = hnp.arrays(np.float32, SHAPE, elements=st.integers(0, 8).map(lambda i: i / 8))
binary = hnp.arrays(np.float32, SHAPE, elements=st.sampled_from([0.0, 1.0]))
kept = hnp.arrays(np.bool_, SHAPE)


def ref_maxrl(r, scale="mean", eps=1e-6):
    if r.max() == r.min():
        return np.zeros(len(r))
    return (r - r.mean()) / ((r.mean() if scale == "mean" else np.sqrt(r.mean())) + eps)


def ref_maclaurin(r, order):
    n, c = len(r), int(r.sum())
    terms = range(2, min(order, n - c) + 1)
    wrong = sum(math.comb(n - c - 1, j - 1) / math.comb(n - 1, j - 1) for j in terms)
    return np.where(r > 0.5, 1.0, -wrong)


def by_rows(function, rewards, where):
    out = np.zeros(rewards.shape)
    for row, keep, result in zip(rewards.astype(np.float64), where, out, strict=True):
        if keep.any():
            result[keep] = function(row[keep])
    return out


def test_worked_numbers():
    close(maxrl(np.array([1.0, 0, 0, 0])), [3, -1, -1, -1], atol=2e-5)
    close(maxrl(np.array([1.0, 1, 0, 0])), [1, 1, -1, -1], atol=2e-5)
    for c, order, right, wrong in [
        (1, 1, 0.25, 0.0),
        (1, 2, 0.25, -0.166667),
        (1, 4, 0.25, -0.25),
        (0, 4, 0.25, -0.75),
    ]:
        got = maclaurin_weights(np.array(c), np.array(4), order=order)
        close(got, [right, wrong], atol=1e-6)


@for_each("scale", ["mean", "root"])
@quick
@given(rewards=positive, where=kept)
def test_maxrl_equals_float64(scale, rewards, where):
    got = maxrl(rewards, where=where, scale=scale)
    expected = by_rows(lambda r: ref_maxrl(r, scale), rewards, where)
    close(got, expected, rtol=2e-5, atol=2e-6)
    close(got.sum(-1), 0.0, atol=2e-5)


@for_each("order", [1, 2, 3, 5, 9])
@quick
@given(rewards=binary, where=kept)
def test_the_series_equals_float64(order, rewards, where):
    got = maclaurin(rewards, where=where, order=order)
    expected = by_rows(lambda r: ref_maclaurin(r, order), rewards, where)
    close(got, expected, rtol=1e-5, atol=1e-6)


def test_order_one_is_the_reward_itself_and_all_wrong_is_not_nothing():
    rewards = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    equal(maclaurin(rewards, order=1), rewards)
    close(maclaurin(rewards, order=2)[1], -1.0)
    close(maclaurin(rewards, order=7)[1], -2.0)


@for_each("scale", ["mean", "root"])
def test_equal_rewards(scale):
    function = lambda r: maxrl(r, scale=scale)  # noqa: E731
    for value in (0.0, 0.1, 1.1):
        assert not function(np.full((2, 3), value)).any()


def test_an_empty_group_weighs_nothing():
    got = maclaurin_weights(np.array([0, 0]), np.array([0, 1]), order=4)
    assert [x.tolist() for x in got] == [[0.0, 1.0], [0.0, 0.0]]
