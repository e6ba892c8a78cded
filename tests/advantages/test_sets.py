"""Sets of rollouts by reward and diversity, against every set."""

import itertools

import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.advantages import dr_grpo, polychromic, set_advantages, set_scores

PAIRS = np.array([[0, 1], [2, 3]])


def test_ids_beyond_the_integers_of_float32_stay_apart():
    ids = np.array([0, 1, 1, 1])
    want = polychromic(np.ones(4), answer_ids=ids, size=2)
    assert np.any(want != 0)
    equal(polychromic(np.ones(4), answer_ids=ids + 2**24, size=2), want)


def test_worked_numbers():
    rewards, ids = np.array([1.0, 1.0, 0.0, 0.0]), np.arange(4)
    scores = set_scores(rewards, ids, PAIRS)
    assert scores.tolist() == [1.0, 0.0]
    expected = [0.5, 0.5, -0.5, -0.5]
    assert set_advantages(scores, PAIRS, group_size=4).tolist() == expected
    assert polychromic(rewards, answer_ids=ids, size=2, sets="disjoint").tolist() == expected
    # Right ones alike, and one of two right ones apart, score the same.
    alike = np.array([1.0, 1.0, 0.0, 1.0]), np.array([0, 0, 1, 2])
    assert set_scores(*alike, PAIRS).tolist() == [0.5, 0.5]
    ours = polychromic(alike[0], answer_ids=alike[1], size=2, sets="disjoint")
    assert not np.asarray(ours).any()
    # Nothing right is 0 whatever differs; an answer given twice lowers a set of equal reward.
    assert not set_scores(np.zeros(4), np.arange(4), PAIRS).any()
    assert set_scores(np.ones(4), np.array([0, 0, 1, 2]), PAIRS).tolist() == [0.5, 1.0]
    # A member of two sets has the mean of them; one of none 0.
    overlap = np.array([[0, 1], [1, 2]])
    ours = set_advantages(np.array([1.0, 0.0]), overlap, group_size=4)
    assert ours.tolist() == [0.5, 0.0, -0.5, 0.0]


def every_set(rewards, ids, where, size):
    """The mean over all sets with a member, minus that over all sets."""
    out = np.zeros(rewards.shape)
    for p in range(len(rewards)):
        there = np.flatnonzero(where[p])
        n = min(size, len(there))
        scores = {}
        for s in itertools.combinations(there, n):
            distinct = len({ids[p, i] for i in s if ids[p, i] >= 0})
            scores[s] = np.mean(np.float64(rewards[p, list(s)])) * distinct / n
        for i in there:
            mine = [f for s, f in scores.items() if i in s]
            out[p, i] = np.mean(mine) - np.mean(list(scores.values()))
    return out


@for_each("size", [2, 3, 4])
def test_the_closed_form_is_the_mean_over_every_set(size):
    rng = np.random.default_rng(size)
    rewards = rng.random((6, 7)).astype(np.float32)
    ids = rng.integers(-1, 4, (6, 7))
    where = rng.random((6, 7)) < 0.8
    where[0], where[1] = True, np.arange(7) < 1
    ids[2], rewards[3] = 2, 1.0
    junk = np.where(where, rewards, np.nan)
    ours = polychromic(junk, answer_ids=ids, where=where, size=size)
    close(ours, every_set(rewards, ids, where, size), atol=2e-6)
    order = rng.permutation(7)
    moved = polychromic(junk[:, order], answer_ids=ids[:, order], where=where[:, order], size=size)
    close(moved, np.asarray(ours)[:, order], atol=1e-6)


def test_constant_diversity_is_a_mean_baseline_and_equal_rollouts_are_0():
    rewards = np.array([[1.0, 0.0, 0.5, 0.25]])
    ours = polychromic(rewards, answer_ids=np.arange(4)[None], size=2)
    # A member's mean over sets moves by (N - n) / (n (N - 1)) of its reward.
    close(ours, dr_grpo(rewards) / 3, atol=1e-6)
    same = np.full((1, 4), 0.1)
    assert not np.asarray(polychromic(same, answer_ids=np.full((1, 4), 3), size=2)).any()
    assert not polychromic(rewards, answer_ids=np.arange(4)[None], size=4).any()
    assert not polychromic(rewards, answer_ids=np.arange(4)[None], size=9).any()


def test_members_that_take_no_part_leave_their_sets_smaller():
    rewards = np.array([1.0, np.nan, 0.5, 1.0, np.nan, 0.0])
    where = np.array([True, False, True, True, False, True])
    ids, sets = np.arange(6), np.array([[0, 1], [2, 3], [4, 5]])
    assert set_scores(rewards, ids, sets, where=where).tolist() == [0.0, 0.75, 0.0]
    ours = polychromic(rewards, answer_ids=ids, where=where, size=2, sets="disjoint")
    assert not np.asarray(ours).any()  # one set of two is left
    ours = polychromic(rewards, answer_ids=ids, where=where, size=3, sets="disjoint")
    assert ours.tolist() == [0.125, 0.0, 0.125, -0.125, 0.0, -0.125]
