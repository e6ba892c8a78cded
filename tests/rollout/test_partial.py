"""Rounds that end early and segments: the worked numbers, and simulated runs of both."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout import (
    off_policy_fraction,
    pick_groups,
    resume_budget,
    segment_status,
    split_round,
)
from jaxrl_llm.rollout.types import LENGTH, STOP, UNFINISHED

quick = settings(max_examples=40, deadline=None, database=None, derandomize=True)
INF = float("inf")


def test_buffered_groups_come_first_in_their_order():
    assert pick_groups([5, 2], [8, 9], in_flight=0, target=3).tolist() == [5, 2, 8]
    assert pick_groups([5, 2], [8, 9], in_flight=2, target=3).tolist() == [5]
    assert pick_groups([], [8, 9], in_flight=0, target=9).tolist() == [8, 9]
    for in_flight in (3, 4):
        assert pick_groups([5, 2], [8], in_flight=in_flight, target=3).tolist() == []


def test_a_round_trains_on_the_first_that_are_good():
    split = split_round([4.0, 1.0, INF, 2.0, 3.0], [True, True, True, False, True], n=2)
    assert split.train.tolist() == [1, 4] and split.recycle.tolist() == [0, 2]
    # What is not finished is not judged.
    assert split_round([INF, 1.0], [False, True], n=1).recycle.tolist() == [0]
    short = split_round([1.0, INF], [False, False], n=2)
    assert short.train.tolist() == [] and short.recycle.tolist() == [1]
    together = split_round([1.0, 1.0, 1.0], [True] * 3, n=2)
    assert together.train.tolist() == [0, 1] and together.recycle.tolist() == [2]


def test_equal_lengths_leave_the_surplus_with_all_its_tokens():
    n, target = 3, 5
    started = pick_groups([], range(9), in_flight=0, target=target)
    split = split_round(np.full(len(started), 7.0), np.ones(len(started), bool), n=n)
    assert len(split.train) == n and len(split.recycle) == target - n
    assert not resume_budget(np.full(len(split.recycle), 7), max_new_tokens=7).any()


class April:
    """Rounds of N groups out of N' in flight, token by token, with rejection and over-run."""

    def __init__(self, lengths, accepted, n, target, max_new):
        self.lengths, self.accepted = lengths, accepted
        self.n, self.target, self.max_new = n, target, max_new
        self.tokens = {g: [[] for _ in rows] for g, rows in enumerate(lengths)}
        self.buffer: list[int] = []
        self.new = list(range(len(lengths)))
        self.trained: list[int] = []
        self.rejected: list[int] = []
        self.submitted: list[int] = []

    def ended(self, g):
        return all(len(t) >= min(n, self.max_new) for t, n in zip(*self.rows(g), strict=True))

    def rows(self, g):
        return self.tokens[g], self.lengths[g]

    def round(self, version):
        started, times, rejected = [], [], set()
        before = len(self.submitted)
        for now in range(1000):
            good = [g for g, t in zip(started, times, strict=True) if t < INF and self.accepted[g]]
            if len(good) >= self.n:
                break
            in_flight = len(started) - len(rejected)
            fresh = pick_groups(self.buffer, self.new, in_flight=in_flight, target=self.target)
            for g in fresh.tolist():
                (self.buffer if g in self.buffer else self.new).remove(g)
            started += fresh.tolist()
            times += [INF] * len(fresh)
            if not any(t == INF for t in times):
                break  # the data has come to its end
            for i, g in enumerate(started):
                if times[i] < INF:
                    continue
                for tokens, length in zip(*self.rows(g), strict=True):
                    if len(tokens) < length and resume_budget(
                        len(tokens), max_new_tokens=self.max_new
                    ):
                        tokens.append(version)
                if self.ended(g):
                    times[i] = float(now)
                    if not self.accepted[g]:
                        rejected.add(g)
        self.submitted += started
        split = split_round(times, [self.accepted[g] for g in started], n=self.n)
        trained = [started[i] for i in split.train]
        recycled = [started[i] for i in split.recycle]
        self.trained += trained
        self.rejected += sorted(rejected)
        self.buffer += recycled
        assert len(trained) + len(recycled) + len(rejected) == len(self.submitted) - before
        return trained


@quick
@given(
    st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=2), min_size=10, max_size=24),
    st.data(),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_a_run_of_several_rounds_loses_nothing(lengths, data, n, more):
    accepted = [data.draw(st.booleans()) for _ in lengths]
    run = April(lengths, accepted, n, n + more, max_new=10)
    for version in range(4):
        cut = {g: [len(t) for t in run.tokens[g]] for g in run.buffer}
        trained = run.round(version)
        exhausted = not run.new and len(trained) < n
        assert len(trained) == n or exhausted
        assert all(accepted[g] and run.ended(g) for g in trained)
        # What was cut short and did not train yet still has its tokens, oldest versions first.
        for g, before in cut.items():
            assert all(len(t) >= b for t, b in zip(run.tokens[g], before, strict=True))
        for rows in run.tokens.values():
            assert all(len(t) <= 10 and t == sorted(t) for t in rows)
        if more == 0 and all(accepted):
            assert not run.buffer  # an ordinary synchronous round
    where = [*run.trained, *run.rejected, *run.buffer, *run.new]
    assert sorted(where) == list(range(len(lengths)))


def test_what_went_on_is_off_policy():
    # The second group finishes one token late and goes on under the next weights.
    run = April([[3, 3], [4, 4], [2, 2]], [True] * 3, n=1, target=2, max_new=9)
    assert run.round(0) == [0] and run.buffer == [1]
    assert run.round(1) == [1] and run.tokens[1] == [[0, 0, 0, 1]] * 2
    versions = np.array(run.tokens[1])
    mask = np.ones(versions.shape, bool)
    assert off_policy_fraction(versions, mask, current_version=1) == 0.75
    assert off_policy_fraction(versions, mask, current_version=0) == 0.0
    assert off_policy_fraction(versions, mask & (versions > 0), current_version=1) == 0.0
    assert off_policy_fraction(versions, ~mask, current_version=1) == 0.0


def test_budgets():
    assert resume_budget([0, 40, 64, 70], max_new_tokens=64).tolist() == [64, 24, 0, 0]
    assert resume_budget([0, 40, 64], max_new_tokens=64, segment=16).tolist() == [16, 16, 0]
    assert resume_budget([5, 5], max_new_tokens=[7, 4]).tolist() == [2, 0]
    assert int(resume_budget(3, max_new_tokens=8)) == 5


def test_status_after_a_segment():
    length, stopped = [16, 16, 128, 128, 130], [False, True, False, True, False]
    found = segment_status(length, stopped, max_new_tokens=128)
    assert found.tolist() == [UNFINISHED, STOP, LENGTH, STOP, LENGTH]
    assert found.dtype == np.int32


def test_segments_add_up_to_the_whole_response():
    lengths, limit, segment = np.array([3, 16, 17, 100, 128, 400]), 128, 16
    done, rounds = np.zeros_like(lengths), 0
    status = np.full(len(lengths), UNFINISHED)
    while (status == UNFINISHED).any():
        budget = resume_budget(done, max_new_tokens=limit, segment=segment)
        done += np.where(status == UNFINISHED, np.minimum(budget, lengths - done), 0)
        status = segment_status(done, done == lengths, max_new_tokens=limit)
        rounds += 1
    assert done.tolist() == [3, 16, 17, 100, 128, 128]
    assert status.tolist() == [STOP, STOP, STOP, STOP, STOP, LENGTH]
    assert rounds == 8


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: pick_groups([0.5], [], in_flight=0, target=1), TypeError, "buffered must hold"),
        (
            lambda: pick_groups([], [], in_flight=-1, target=1),
            ValueError,
            "pick_groups: in_flight must not be negative; got -1",
        ),
        (lambda: split_round([np.nan], [True], n=1), ValueError, r"finish_time .* NaN at \(0,\)"),
        (lambda: split_round([1.0], [1], n=1), TypeError, "accepted must be bool"),
        (lambda: split_round([1.0], [True, True], n=1), ValueError, r"shape \(1,\); got \(2,\)"),
        (lambda: split_round([1.0], [True], n=-1), ValueError, "n must not be negative"),
        (lambda: resume_budget([-1], max_new_tokens=3), ValueError, "length must not be negative"),
        (lambda: resume_budget([1], max_new_tokens=3, segment=0), ValueError, "segment must be"),
        (lambda: resume_budget([1], max_new_tokens=[3, 3]), ValueError, r"\(1,\); got \(2,\)"),
        (lambda: segment_status([1], [0], max_new_tokens=3), TypeError, "stopped must be bool"),
        (lambda: segment_status([1], [True], max_new_tokens=0), ValueError, "max_new_tokens must"),
        (
            lambda: off_policy_fraction([1.0], [True], current_version=1),
            TypeError,
            "versions must hold integers",
        ),
        (
            lambda: off_policy_fraction([1, 2], [True], current_version=1),
            ValueError,
            r"mask must have shape \(2,\); got \(1,\)",
        ),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()
