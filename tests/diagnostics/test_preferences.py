"""How scores order responses, by enumeration."""

import itertools

import numpy as np
from cheap import close, equal

from jaxrl_llm.diagnostics import pair_order, response_scores


def test_pairs_are_counted_one_by_one():
    random = np.random.default_rng(0)
    scores = random.integers(0, 3, (5, 4)).astype(np.float32)
    rewards = random.integers(0, 3, (5, 4)).astype(np.float32)
    where = random.random((5, 4)) < 0.8
    right, margins = [], []
    for p, i, j in itertools.product(range(5), range(4), range(4)):
        if where[p, i] and where[p, j] and rewards[p, i] > rewards[p, j]:
            gap = scores[p, i] - scores[p, j]
            right.append(0.5 if gap == 0 else float(gap > 0))
            margins.append(gap)
    junk = np.where(where, scores, np.nan), np.where(where, rewards, 1e4)
    for s, r in ((scores, rewards), junk):
        order = pair_order(np.array(s), np.array(r), where=np.array(where))
        close(order.accuracy, np.mean(right), rtol=1e-6)
        close(order.margin, np.mean(margins), rtol=1e-6)
        close(order.chosen - order.rejected, order.margin, atol=1e-6)
        assert order.pairs == len(right)


def test_responses_of_one_side_make_no_pair():
    scores, rewards = np.array([0.0, 1.0, 3.0, -1.0]), np.array([0.5, 0.0, 1.0, 0.5])
    order = pair_order(scores, rewards, sides=np.array([True, False, False, True]))
    # 0 over 1, 2 over 0, 3 over 1, 2 over 3.
    assert order.pairs == 4
    close([order.accuracy, order.margin], [0.5, (-1 + 3 - 2 + 4) / 4])
    apart = pair_order(scores, rewards, sides=np.arange(4))
    equal(apart, pair_order(scores, rewards))
    assert pair_order(scores, rewards, sides=np.zeros(4, int)).pairs == 0


def test_no_pair_is_zero():
    order = pair_order(np.ones((2, 1)), np.ones((2, 1)))
    assert [float(x) for x in order] == [0.0] * 5


def test_response_scores_of_sums_and_means():
    logp, ref_logp = np.array([[-1.001, -2.0, np.nan]]), np.array([[-1.5, -1.0, np.nan]])
    mask = np.array([[True, True, False]])
    close(response_scores(logp, ref_logp, mask), [-0.501], rtol=1e-5)
    close(response_scores(logp, None, mask), [-1.5005], rtol=1e-6)
