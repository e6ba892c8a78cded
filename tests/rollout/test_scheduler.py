"""The scheduler without a device: which siblings take which slots, and no request is lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.rollout import Completion, Group, pick_next
from jaxrl_llm.rollout.engine.requests import limits_of
from jaxrl_llm.rollout.engine.scheduler import Scheduler, plan_chunk
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import CANCELLED, STOP, UNFINISHED

quick = settings(max_examples=40, deadline=None, database=None, derandomize=True)
IDLE = np.zeros((3, 2), bool)


def entries(starts):
    return [tuple(int(x) for x in entry) for entry in zip(*starts, strict=True)]


def test_siblings_of_a_row_come_before_other_groups():
    busy = np.array([[True, False], [False, False]])
    # Group 1 is expected to be longer, but the slot's row holds group 0.
    starts = pick_next([1, 2], [1, 9], [0, -1], busy)
    assert entries(starts) == [(0, 0, 0, 1, 0), (1, 0, 1, 0, 1), (1, 1, 1, 1, 0)]


def test_new_groups_take_free_rows_the_longest_first():
    starts = pick_next([2, 3, 1, 2], [5, 5, 9, 1], [-1, -1, -1], IDLE)
    assert entries(starts) == [
        (2, 0, 0, 0, 1),
        (0, 0, 1, 0, 1),
        (0, 1, 1, 1, 0),
        (1, 0, 2, 0, 1),
        (1, 1, 2, 1, 0),
    ]


def test_a_group_gets_a_second_row_only_where_no_other_waits():
    spread = pick_next([5, 0], [1, 1], [-1, -1, -1], IDLE)
    assert spread.row.tolist() == [0, 0, 1, 1, 2]
    assert spread.sibling.tolist() == [0, 1, 2, 3, 4]
    assert spread.prefill.tolist() == [True, False, True, False, True]
    assert pick_next([5, 1], [9, 1], [-1, -1, -1], IDLE).group.tolist() == [0, 0, 1, 0, 0]
    # Among those with a row, the longest expected first, one row each in turn.
    turns = pick_next([9, 9], [1, 2], [-1] * 4, np.zeros((4, 1), bool))
    assert turns.group.tolist() == [1, 0, 1, 0]


def test_a_row_goes_on_with_its_group_after_a_pause():
    # No slot is busy, but siblings wait for the prompt that row 1 holds.
    starts = pick_next([0, 3], [1, 1], [0, 1, -1], IDLE)
    assert starts.row.tolist() == [1, 1, 0] and starts.prefill.tolist() == [False, False, True]


def test_no_more_new_groups_than_allowed():
    for limit, groups in ((0, []), (1, [2, 2]), (2, [2, 2, 1, 1])):
        starts = pick_next([2, 2, 2], [1, 2, 3], [-1] * 3, IDLE, max_new_groups=limit)
        assert starts.group.tolist() == groups
    # Siblings of a group that has begun are none of them; free rows are theirs.
    busy = np.array([[True, True], [False, False]])
    starts = pick_next([2, 2], [1, 2], [0, -1], busy, max_new_groups=0)
    assert starts.group.tolist() == [0, 0] and starts.row.tolist() == [1, 1]


def test_nothing_to_do():
    for waiting, busy in (([0, 0], IDLE), ([4, 4], ~IDLE)):
        starts = pick_next(waiting, [1, 1], [0, 1, 0], busy)
        assert all(len(x) == 0 for x in starts) and starts.prefill.dtype == bool
    assert len(pick_next([], [], [-1], np.zeros((1, 2), bool)).row) == 0
    assert len(pick_next([3], [1], [], np.zeros((0, 2), bool)).row) == 0


class Grid:
    """Slots that hold (group, request) and the steps left, driven by the rule."""

    def __init__(self, lengths, expected, rows, width):
        self.waiting = [list(range(len(group))) for group in lengths]
        self.lengths, self.expected = lengths, expected
        self.row_group = np.full(rows, -1)
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.left: dict[tuple[int, int], int] = {}
        self.shape, self.started, self.prefills = (rows, width), [], 0

    @property
    def busy(self):
        busy = np.zeros(self.shape, bool)
        for place in self.slots:
            busy[place] = True
        return busy

    def start(self, limit):
        before, held = self.busy, self.row_group.copy()
        counts = [len(w) for w in self.waiting]
        starts = pick_next(counts, self.expected, held, before, max_new_groups=limit)
        takes = {g: list(self.waiting[g]) for g in set(starts.group.tolist())}
        for group, sibling, row, slot, prefill in entries(starts):
            assert (row, slot) not in self.slots, "a slot is free once"
            if prefill:
                assert not before[row].any(), "a prompt replaces none that is in use"
                self.row_group[row] = group
                self.prefills += 1
            assert self.row_group[row] == group, "a row never mixes prompts"
            request = takes[group][sibling]
            self.waiting[group].remove(request)
            self.slots[row, slot] = group, request
            self.left[row, slot] = self.lengths[group][request]
            self.started.append((group, request))
        return starts

    def idle_beside_a_waiting_sibling(self):
        holds = {
            self.row_group[row] for row, slot in np.argwhere(~self.busy) if self.busy[row].any()
        }
        return [g for g in holds if self.waiting[g]]

    def run(self):
        shortest = min(self.left.values())
        for place in list(self.slots):
            self.left[place] -= shortest
            if not self.left[place]:
                del self.slots[place], self.left[place]


LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=7)


@quick
@given(LENGTHS, st.data(), st.integers(1, 4), st.integers(1, 4))
def test_a_run_starts_every_request_once_and_leaves_no_slot_idle(lengths, data, rows, width):
    expected = [data.draw(st.integers(0, 9)) for _ in lengths]
    grid, total = Grid(lengths, expected, rows, width), sum(map(len, lengths))
    for _ in range(total + 1):
        before = grid.busy.any(axis=1)
        starts = grid.start(data.draw(st.sampled_from([None, 1, 2])))
        assert not grid.idle_beside_a_waiting_sibling()
        if any(grid.waiting):
            begun = {int(g) for g in starts.group} | {g for g, _ in grid.slots.values()}
            assert grid.slots, "something always runs while something waits"
            free = ~grid.busy.any(axis=1)
            # A row stays empty only if the limit stops the others.
            assert not free.any() or not any(grid.waiting[g] for g in begun)
        # No second row for a group while another that may start waits.
        fresh = starts.row[starts.prefill]
        assert not before[fresh].any()
        if not grid.slots:
            break
        grid.run()
    expected = [(g, r) for g, group in enumerate(lengths) for r in range(len(group))]
    assert sorted(grid.started) == expected


@quick
@given(LENGTHS, st.integers(1, 4), st.integers(1, 4))
def test_a_prompt_is_read_again_only_for_rows_that_would_stay_empty(lengths, rows, width):
    grid = Grid(lengths, [max(group) for group in lengths], rows, width)
    order = sorted(range(len(lengths)), key=lambda g: (-max(lengths[g]), g))
    first: list[int] = []
    while any(grid.waiting) or grid.slots:
        starts = grid.start(None)
        for group, _, _, _, prefill in entries(starts):
            if prefill and group in first:
                assert len(first) == len(lengths), "others were still waiting for a first row"
            elif prefill:
                first.append(group)
        grid.run()
    assert first == order
    if rows == 1:
        assert grid.prefills == len(lengths)


@for_each(
    ("changes", "error", "words"),
    [
        ({"row_group": [0, 2, -1]}, ValueError, "row_group must be -1 or one of the 2 groups"),
        ({"row_group": [0, -2, -1]}, ValueError, "row_group must be -1 or one of the 2 groups"),
        ({"row_group": [0, -1]}, ValueError, r"row_group must have shape \(3,\); got \(2,\)"),
        ({"row_group": [0.0, -1, -1]}, TypeError, "row_group must hold integers"),
        ({"busy": ~IDLE}, ValueError, "row 1 has a busy slot but holds no prompt"),
        ({"busy": IDLE.astype(int)}, TypeError, "busy must be bool"),
        ({"busy": IDLE[0]}, ValueError, "busy must have 2 axes"),
        ({"waiting": [1, -1]}, ValueError, "pick_next: waiting must not be negative; got -1"),
        ({"waiting": [0.5, 1]}, TypeError, "waiting must hold integers"),
        ({"expected": [1.0]}, ValueError, r"waiting \(2,\), expected \(1,\)"),
        ({"expected": [np.nan, 1]}, ValueError, r"expected must be numbers; it is NaN at \(0,\)"),
        ({"max_new_groups": -1}, ValueError, "max_new_groups must not be negative"),
    ],
)
def test_bad_input(changes, error, words):
    good = {"waiting": [1, 1], "expected": [1, 1], "row_group": [0, -1, -1], "busy": IDLE}
    with pytest.raises(error, match=words):
        pick_next(**{**good, **changes})


T = 9


def completion(request, n, finish):
    return Completion(request, Tokens(*[[0] * n] * 5), finish)


class Run:
    """Random moves; of the tokens of a request only their number is modeled."""

    def __init__(self, draw, shards):
        self.draw, self.scheduler = draw, Scheduler(4, 2, shards)
        self.next, self.submitted, self.handed, self.tokens = 0, {}, {}, {}

    def number(self, most):
        return self.draw(st.integers(0, most))

    def submit(self):
        size = 1 + self.number(4)
        requests = tuple(range(self.next, self.next + size))
        self.next += size
        expected = float(self.number(T)) if self.number(1) else None
        group = Group(requests[0], [1], requests, expected=expected)
        self.submitted |= dict.fromkeys(requests, requests[0])
        self.scheduler.submit([(group, limits_of(group, T))])

    def begin(self):
        scheduler, before = self.scheduler, set(self.scheduler.slots)
        starts = scheduler.start_requests()
        assert len(starts) == len({each.slot for each in starts})
        assert set(scheduler.slots) == before | {each.request for each in starts}
        for each in starts:
            assert scheduler.rows[each.slot[0]] is each.group
            assert scheduler.lengths[each.request] == self.tokens.get(each.request, 0)
        # No slot stays free that a waiting sibling of its row could take, nor any row for a group.
        for row, group in enumerate(scheduler.rows):
            assert group is None or not group.waiting or scheduler.busy[row].all()
            assert group is not None or not scheduler.queue

    def end(self):
        finish = [STOP, CANCELLED, UNFINISHED][self.number(2)]
        waiting = [r for g in self.scheduler.groups.values() for r in g.waiting]
        running = sorted(self.scheduler.slots)
        requests = running if self.number(2) else sorted(set(waiting))
        if requests and (finish != UNFINISHED or requests == running):
            request = requests[self.number(len(requests) - 1)]
            self.tokens[request] = self.tokens.get(request, 0) + 1
            self.scheduler.end(request, completion(request, self.tokens[request], finish))
            self.scheduler.free_rows()

    def fork(self):
        if running := sorted(self.scheduler.slots):
            request = running[self.number(len(running) - 1)]
            slot = self.scheduler.slot_for_fork(request)
            if slot is not None:
                size = 4 // self.scheduler.shards
                assert slot[0] // size == self.scheduler.slots[request][0] // size
                self.scheduler.fork(request, self.next, slot)
                self.submitted[self.next] = self.submitted[request]
                self.tokens[self.next] = self.scheduler.lengths[request]
                self.next += 1

    def take(self):
        while self.scheduler.finished:
            done = self.scheduler.finished.popleft()
            for each in done.completions:
                assert each.request not in self.handed
                self.handed[each.request] = done.id

    def stop(self):
        for request in list(self.scheduler.slots):
            n = self.tokens.setdefault(request, 0)
            self.scheduler.end(request, completion(request, n, UNFINISHED))
        rest = self.scheduler.unfinished()
        self.scheduler = Scheduler(4, 2, self.scheduler.shards)
        for group in rest:
            self.scheduler.submit([(group, limits_of(group, T))])

    def check(self):
        """Every request is handed out, finished, or in one state of its group."""
        scheduler = self.scheduler
        finished = {c.request: done.id for done in scheduler.finished for c in done.completions}
        opened = {r: group.group.id for r, group in scheduler.groups.items()}
        assert len(finished) + len(opened) + len(self.handed) == len(self.submitted)
        assert finished | opened | self.handed == self.submitted
        for group in {id(g): g for g in scheduler.groups.values()}.values():
            running = {r for r in group.limits if r in scheduler.slots}
            states = [running, set(group.waiting), set(group.done)]
            states.append(set(group.partial) - running - set(group.waiting))
            assert sum(map(len, states)) == len(group.limits)
            assert group.running == len(running) and set().union(*states) == set(group.limits)
            assert (group in scheduler.paused) == (not running and not group.waiting)
        busy = {slot: r for r, slot in scheduler.slots.items()}
        assert len(busy) == len(scheduler.slots) == scheduler.busy.sum()
        assert set(scheduler.lengths) == set(scheduler.slots)
        for (row, column), request in busy.items():
            assert scheduler.busy[row, column] and scheduler.rows[row] is scheduler.groups[request]


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_no_request_is_lost_or_handed_out_twice(data):
    run = Run(data.draw, shards=data.draw(st.sampled_from([1, 2])))
    moves = [run.submit, run.begin, run.end, run.end, run.fork, run.take, run.stop]
    for _ in range(data.draw(st.integers(5, 40))):
        data.draw(st.sampled_from(moves))()
        run.check()
    # In the end all are answered.
    run.stop()
    for _ in range(10_000):
        run.begin()
        if not run.scheduler.slots:
            break
        for request in list(run.scheduler.slots):
            run.scheduler.end(request, completion(request, 1, STOP))
        run.scheduler.free_rows()
    run.take()
    assert run.handed == run.submitted and not run.scheduler.groups and not run.scheduler.has_work


def test_a_cancelled_request_that_came_back_leaves_nothing_in_the_queue():
    scheduler = Scheduler(1, 2)
    group = Group("a", [1], (0, 1), follow=lambda completion: None)
    scheduler.submit([(group, limits_of(group, T))])
    scheduler.start_requests()
    for request in (0, 1):
        scheduler.leave(request)
    scheduler.free_rows()
    scheduler.come_back(0, None)
    scheduler.end(0, completion(0, 1, CANCELLED))
    # The other one is still away, so there is work, and nothing that could start.
    assert scheduler.has_work and not scheduler.has_waiting
    scheduler.come_back(1, None)
    assert [each.request for each in scheduler.start_requests()] == [1]
    scheduler.end(1, completion(1, 1, STOP))
    assert [done.id for done in scheduler.finished] == ["a"]


def test_a_request_that_comes_back_starts_before_groups_that_have_not_begun():
    scheduler = Scheduler(1, 1)
    for request, expected in enumerate((1, 5, 9, 7)):
        group = Group(request, [1], (request,), expected=expected, follow=lambda completion: None)
        scheduler.submit([(group, limits_of(group, T))])
        if request == 0:
            scheduler.start_requests()
    scheduler.leave(0)
    assert [each.request for each in scheduler.start_requests()] == [2]
    scheduler.come_back(0, None)
    late = Group(4, [1], (4,), expected=8)
    scheduler.submit([(late, limits_of(late, T))])
    assert [each.group.id for each in scheduler.queue] == [0, 4, 3, 1]
    scheduler.end(2, completion(2, 1, STOP))
    assert [each.request for each in scheduler.start_requests()] == [0]


def chunk(waiting, running, *, small, follow=None):
    """The plan for a grid of 4 rows of 4 slots, each of whose rows has ``running`` responses."""
    scheduler = Scheduler(4, 4)
    for number in range(4 + waiting):
        group = Group(number, [1], tuple(range(8 * number, 8 * number + running)), follow=follow)
        scheduler.submit([(group, limits_of(group, T))])
    scheduler.start_requests()
    return plan_chunk(scheduler, small)


def test_a_grid_whose_rows_are_mostly_empty_decodes_smaller_also_while_others_wait():
    for waiting in (0, 3):
        leave_at, compaction = chunk(waiting, 1, small=(4, 1))
        assert compaction is not None and compaction.used.sum() == 4
        assert leave_at == (3 if waiting else 0)
        # A grid that is more than a quarter full is decoded whole, down to a quarter or a refill.
        leave_at, compaction = chunk(waiting, 3, small=(4, 1))
        assert compaction is None and leave_at == (9 if waiting else 4)
    assert chunk(0, 1, small=(4, 1), follow=lambda completion: None)[0] == 3
    assert chunk(2, 1, small=None) == (3, None)
