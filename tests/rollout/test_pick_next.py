"""Which siblings take which slots: by hand, and the laws in a simulated run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout import pick_next

quick = settings(max_examples=80, deadline=None, database=None, derandomize=True)
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


@pytest.mark.parametrize(
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
