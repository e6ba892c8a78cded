"""Rounds of groups, and how far sampling may run ahead of training."""

import math
import random
from collections import deque

import numpy as np
from bad_calls import bad_calls, raises
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.rollout import (
    Completion,
    FinishedGroup,
    Group,
    first_g_finished,
    off_policy_fraction,
    resume_budget,
    roll_budget,
    sample_round,
    usable,
)
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import LENGTH, UNFINISHED

quick = settings(max_examples=30, deadline=None, database=None, derandomize=True)


class FakeGeneration:
    """A generation without a model: all groups add a token of its version at each step."""

    def __init__(self, lengths, version):
        self.lengths, self.version, self.groups, self.started = lengths, version, [], []

    def submit(self, group):
        self.groups.append(group)
        self.started.append(group.id)

    def add_token(self, group):
        partial = {}
        for request in group.requests:
            old = group.partial.get(request)
            versions = [] if old is None else old.out.version.tolist()
            if len(versions) < self.lengths[request]:
                versions.append(self.version)
            finish = LENGTH if len(versions) == self.lengths[request] else UNFINISHED
            zeros, version = np.zeros(len(versions)), np.array(versions)
            out = Tokens(version, zeros, zeros, zeros, version)
            partial[request] = Completion(request, out, finish)
        return group._replace(partial=partial)

    def __iter__(self):
        while self.groups:
            self.groups = [self.add_token(group) for group in self.groups]
            # A consumer may submit and stop between two groups.
            for group in list(self.groups):
                completions = tuple(group.partial.values())
                if all(c.finish == LENGTH for c in completions) and group in self.groups:
                    self.groups.remove(group)
                    yield FinishedGroup(group, completions)

    def stop(self):
        groups, self.groups = self.groups, []
        return groups


def versions(completions):
    return [c.out.version.tolist() for c in completions]


@quick
@given(
    st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=2), min_size=10, max_size=24),
    st.data(),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_a_run_of_several_rounds_loses_nothing(lengths, data, n, more):
    accepted = [data.draw(st.booleans()) for _ in lengths]
    by_request = [length for pair in lengths for length in pair]
    new = iter([Group(i, [1], (2 * i, 2 * i + 1)) for i in range(len(lengths))])
    buffered, trained, rejected, begun = deque(), [], [], set()

    def accept(done):
        rejected.extend([] if accepted[done.id] else [done.id])
        return accepted[done.id]

    for version in range(4):
        before = {group.id: versions(group.partial.values()) for group in buffered}
        generation, first = FakeGeneration(by_request, version), len(rejected)
        batch = list(sample_round(generation, buffered, new, n=n, target=n + more, accept=accept))
        assert generation.started[: len(before)] == list(before)[: len(generation.started)]
        # In flight: what trains, what is put back, and at most as many as the target at one time.
        back = [group.id for group in buffered if group.id in generation.started]
        assert len(batch) + len(rejected) - first + len(back) == len(generation.started)
        assert len(batch) + len(back) <= n + more
        begun.update(generation.started)
        if len(lengths) - 1 not in begun:  # while others wait, one begins for each that is rejected
            assert len(batch) + len(back) == n + more
        assert len(batch) == n or not buffered
        trained += [done.id for done in batch]
        assert all(accepted[done.id] for done in batch)
        for done in batch:
            assert [len(c) for c in done.completions] == lengths[done.id]
            assert all(v == sorted(v) for v in versions(done.completions))
        # A buffered group has the tokens that it had, and newer ones behind them.
        for group in buffered:
            for old, now in zip(
                before.get(group.id, []), versions(group.partial.values()), strict=False
            ):
                assert now[: len(old)] == old and now == sorted(now)
        if more == 0 and all(accepted):
            assert not buffered  # an ordinary synchronous round
    everywhere = [*trained, *rejected, *(g.id for g in buffered), *(g.id for g in new)]
    assert sorted(everywhere) == list(range(len(lengths)))


def test_resumed_tokens_are_off_policy():
    # The second group finishes one token late and goes on under the next weights.
    lengths, buffered = [3, 3, 4, 4, 2, 2], deque()
    new = iter([Group(i, [1], (2 * i, 2 * i + 1)) for i in range(3)])
    batches = [
        list(sample_round(FakeGeneration(lengths, version), buffered, new, n=1, target=2))
        for version in range(2)
    ]
    assert [[done.id for done in batch] for batch in batches] == [[0], [1]]
    (done,) = batches[1]
    version = np.array(versions(done.completions))
    assert version.tolist() == [[0, 0, 0, 1]] * 2
    mask = np.ones(version.shape, bool)
    assert off_policy_fraction(version, mask, current_version=1) == 0.75
    assert off_policy_fraction(version, mask, current_version=0) == 0.0
    assert off_policy_fraction(version, mask & (version > 0), current_version=1) == 0.0
    assert off_policy_fraction(version, ~mask, current_version=1) == 0.0
    assert off_policy_fraction([-1, 0, 1, 1], [True] * 4, current_version=1) == 0.25  # -1 unknown


def test_budgets():
    assert resume_budget([0, 40, 64, 70], max_new_tokens=64).tolist() == [64, 24, 0, 0]
    assert resume_budget([0, 40, 64], max_new_tokens=64, segment=16).tolist() == [16, 16, 0]
    assert resume_budget([5, 5], max_new_tokens=[7, 4]).tolist() == [2, 0]
    assert int(resume_budget(3, max_new_tokens=8)) == 5


def test_roll_budget():
    assert roll_budget([0, 1, 2, 3], batch_size=8, alpha=0.0).tolist() == [0, 8, 16, 24]
    # At most two batches before the first update.
    assert roll_budget([0, 1, 2], batch_size=8, alpha=1.0).tolist() == [0, 16, 24]
    assert roll_budget(2, batch_size=8, alpha=0.3) == 3 + 16
    # 0.07 * 100 is a little above 7 in floats.
    assert roll_budget(1, batch_size=100, alpha=0.07) == 107


def test_usable_by_the_step_of_the_start():
    start = [0, 1, 2, 3, 4]
    assert usable(start, step=4, alpha=0.0).tolist() == [False] * 4 + [True]
    assert usable(start, step=4, alpha=1.0).tolist() == [False] * 3 + [True] * 2
    assert usable(start, step=4, alpha=1.2).tolist() == [False] * 2 + [True] * 3
    assert usable([], step=4, alpha=1.0).tolist() == []


def test_the_oldest_step_gives_the_fraction():
    start = [3, 2, 3, 4, 3, 3]
    for alpha, kept in ((0.5, 2), (0.75, 3), (0.2, 0)):
        result = usable(start, step=4, alpha=alpha, batch_size=4)
        assert (result & (np.array(start) == 3)).sum() == kept
        assert result[3] and not result[1]
    # The first ones; a whole alpha has no such bound.
    assert (
        usable(start, step=4, alpha=0.5, batch_size=4).tolist()
        == [True, False, True, True] + [False] * 2
    )
    assert usable(start, step=4, alpha=1.0, batch_size=1).sum() == 5
    # In floats, the fraction of 2.3 times ten is a little below 3.
    assert usable([1] * 9, step=4, alpha=2.3, batch_size=10).sum() == 3


@quick
@given(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]), st.integers(1, 5), st.integers(0, 99))
def test_a_simulated_buffer_never_lags_by_more(alpha, batch, seed):
    rng, running, finished, completed = random.Random(seed), [], [], 0
    lags, most = [], 0
    for step in range(1, 9):
        while True:
            while len(running) + completed < roll_budget(step, batch_size=batch, alpha=alpha):
                running.append(step)
            most = max(most, len(running) + len(finished))
            if not running:
                break
            # Any may finish next, but half of the time the oldest does.
            at = 0 if rng.random() < 0.5 else rng.randrange(len(running))
            finished.append(running.pop(at))
            completed += 1
            finished.sort()
            ready = usable(finished, step=step, alpha=alpha)
            if ready.sum() >= batch and rng.random() < 0.7:
                break
        assert sum(usable(finished, step=step, alpha=alpha)) >= batch
        taken = [s for s, ok in zip(finished, ready, strict=True) if ok][:batch]
        lags += [step - s for s in taken]
        for s in taken:
            finished.remove(s)
        kept = usable(finished, step=step + 1, alpha=alpha)
        finished = [s for s, ok in zip(finished, kept, strict=True) if ok]
        kept = usable(running, step=step + 1, alpha=alpha)
        running = [s for s, ok in zip(running, kept, strict=True) if ok]
        if alpha == 0:
            assert not finished and not running and completed == step * batch
    assert max(lags) <= math.ceil(alpha)
    assert most <= batch + math.ceil(alpha * batch)


def test_the_first_to_finish():
    times = np.array([[3.0, 1.0, 2.0, np.inf], [5.0, 5.0, 5.0, 5.0], [np.inf, 9.0, np.inf, np.inf]])
    assert first_g_finished(times, group_size=2).tolist() == [
        [False, True, True, False],
        [True, True, False, False],
        [False, True, False, False],
    ]
    assert first_g_finished(times[0], group_size=4).tolist() == [True, True, True, False]


BAD = r"""
ValueError:
roll_budget([-1], batch_size=4, alpha=0.0)  # steps must not be neg
roll_budget([1], batch_size=0, alpha=0.0)  # batch_size must be above
roll_budget([1], batch_size=4, alpha=-1.0)  # alpha must not be neg
roll_budget([1], batch_size=4, alpha=math.inf)  # alpha must be fini
usable([1], step=1, alpha=math.inf)  # alpha must be finite
usable([[1]], step=1, alpha=0.0)  # start_step must have 1 axis
usable([1], step=-1, alpha=0.0)  # step must not be negative
usable([1], step=1, alpha=0.5, batch_size=0)  # batch_size must be
first_g_finished([1.0], group_size=2)  # from 1 to 1; got 2
first_g_finished([1.0], group_size=0)  # from 1 to 1; got 0
first_g_finished([np.nan], group_size=1)  # finish_time must be numb
resume_budget([-1], max_new_tokens=3)  # length must not be negative
resume_budget([1], max_new_tokens=3, segment=0)  # segment must be
resume_budget([1], max_new_tokens=[3, 3])  # \(1,\); got \(2,\)
off_policy_fraction([1, 2], [True], current_version=1)  # mask must have shape \(2,\); got \(1,\)
TypeError:
roll_budget([0.5], batch_size=4, alpha=1.0)  # steps must hold integers
roll_budget([1], batch_size=2.5, alpha=0.0)  # must be an integer
off_policy_fraction([1.0], [True], current_version=1)  # versions must hold integers
"""


@for_each(("error", "call", "message"), bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, globals())
