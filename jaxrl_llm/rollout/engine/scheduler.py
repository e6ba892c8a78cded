"""The scheduler: the queue of groups, the requests in each slot, and which of them start next.

It is the host's bookkeeping of a :class:`~jaxrl_llm.rollout.Generation`; nothing here touches the
device. The slots are a grid of R rows of W slots. A row holds the keys and values of one prompt,
and each of its slots one response at a time; a group with more requests than slots streams through
its row.

The two rules, :func:`pick_next` and :func:`longest_first`, are NumPy in and NumPy out; they raise
TypeError for counts that are not integers or a mask that is not bool, and ValueError where shapes
do not match or a number is NaN or out of its range.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.rollout._inputs import counts, numbers
from jaxrl_llm.rollout.compaction import Compaction, compact_slots
from jaxrl_llm.rollout.engine.requests import Completion, FinishedGroup, Group, has_ended
from jaxrl_llm.rollout.slots import Slots

SlotIndex = tuple[int, int]
"""Row and column of a slot."""


class OpenGroup:
    """A group whose requests wait, decode in slots, have ended, or are paused after a segment.

    Attributes:
      group: The submitted group, with its forks.
      limits: The longest response, by request.
      left: How many tokens have left the response between turns, by request.
      expected: Expected length of a response; infinite if some have begun before.
      partial: Responses that go on from their last token, by request.
      done: Responses that have ended, by request.
      waiting: Requests without a slot, in order.
      away: How many requests have left their slot between two turns.
      running: How many requests are in slots.
      number: Its place in the order in which groups started; infinite before.
    """

    def __init__(self, group: Group, limits: dict[int, int]):
        self.group, self.left = group, dict.fromkeys(group.requests, 0) | dict(group.left)
        self.limits = {request: limit - self.left[request] for request, limit in limits.items()}
        expected = max(limits.values()) if group.expected is None else group.expected
        self.expected = math.inf if group.partial else float(expected)
        self.partial = {r: c for r, c in group.partial.items() if not has_ended(c)}
        self.done = {r: c for r, c in group.partial.items() if has_ended(c)}
        self.waiting = deque(r for r in group.requests if r not in self.done)
        self.running = self.away = 0
        self.number = math.inf

    @property
    def complete(self) -> bool:
        """Whether all of its requests have ended."""
        return len(self.done) == len(self.limits)

    def fork(self, request: int, new: int) -> None:
        """Adds a running request with the limit of another one."""
        self.limits[new], self.left[new] = self.limits[request], self.left[request]
        requests = (*self.group.requests, new)
        limits = tuple(self.limits[r] + self.left[r] for r in requests)
        left = dict(self.group.left)
        if self.group.follow is None and request in left:  # else it would begin again, without them
            left[new] = left[request]
        self.group = self.group._replace(requests=requests, max_new_tokens=limits, left=left)
        self.running += 1

    def cut(self, request: int, count: int) -> None:
        """Tokens leave a response between two turns; it may have as many fewer from here on."""
        self.left[request] += count
        self.limits[request] -= count

    def finished(self) -> FinishedGroup:
        """The group with its completions."""
        completions = tuple(self.done[r] for r in self.group.requests)
        return FinishedGroup(self.group._replace(partial={}), completions)

    def unfinished(self) -> Group:
        """The group with its responses so far, to be submitted again."""
        if self.group.follow is not None:
            return self.group  # What comes after a turn cannot be asked for twice: it begins again.
        return self.group._replace(partial={**self.partial, **self.done})


class StartedRequest(NamedTuple):
    """A request that starts or comes back, its slot and group, and whether its row is new.

    ``back`` are its slot's contents if it comes back: they bring the prompt.
    """

    slot: SlotIndex
    request: int
    group: OpenGroup
    new_row: bool
    back: Slots | None = None


class Scheduler:
    """The queue of groups and a grid of ``rows * width`` slots in ``shards`` equal shards of rows.

    Attributes:
      queue: Groups without a row, in the order of :func:`longest_first`; those that have begun
        before come first.
      rows: The group whose prompt each row holds, or None.
      paused: Groups whose requests have ended or are paused.
      finished: Finished groups that have not been handed out.
      groups: The group of each request in ``queue``, ``rows`` and ``paused``.
      slots: The slot of each request that is in one.
      lengths: The tokens of each request in a slot that the host knows of.
      busy: bool ``[R, W]``, the slots in use.
      between: Requests in slots that wait for what comes after a turn.
      back: What was in the slots of requests that left them between two turns and may go on.
    """

    def __init__(self, rows: int, width: int, shards: int = 1):
        self.shards = shards
        self.queue: list[OpenGroup] = []
        self.rows: list[OpenGroup | None] = [None] * rows
        self.paused: list[OpenGroup] = []
        self.finished: deque[FinishedGroup] = deque()
        self.groups: dict[int, OpenGroup] = {}
        self.slots: dict[int, SlotIndex] = {}
        self.lengths: dict[int, int] = {}
        self.busy = np.zeros((rows, width), bool)
        self.between: set[int] = set()
        self.back: dict[int, Slots] = {}
        self._started = self._away = 0

    @property
    def has_work(self) -> bool:
        """Whether anything is left to decode."""
        return bool(self.queue or self._away) or any(each is not None for each in self.rows)

    @property
    def active(self) -> dict[int, SlotIndex]:
        """The slots of requests that decode."""
        return {r: slot for r, slot in self.slots.items() if r not in self.between}

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for a slot."""
        return bool(self.queue) or any(each and each.waiting for each in self.rows)

    def submit(self, groups: Iterable[tuple[Group, dict[int, int]]]) -> None:
        """Puts groups, each with the limits of its requests, into the queue."""
        for group, limits in groups:
            opened = OpenGroup(group, limits)
            if opened.complete:
                self.finished.append(opened.finished())
                continue
            self.groups |= dict.fromkeys(group.requests, opened)
            bisect.insort(self.queue, opened, key=lambda each: -each.expected)

    def groups_in_rows(self) -> list[OpenGroup]:
        """The groups in rows, each once."""
        return list({id(each): each for each in self.rows if each is not None}.values())

    def start_requests(self) -> list[StartedRequest]:
        """Moves the requests that start now from the queue into slots."""
        self.free_rows()
        if self.busy.all() or not self.has_waiting:
            return []
        # No more groups can start than there are rows; the rest of a long queue is not touched.
        groups = [*self.groups_in_rows(), *self.queue[: len(self.rows)]]
        index = {id(each): i for i, each in enumerate(groups)}
        starts = pick_next(
            np.array([len(each.waiting) for each in groups], np.int64),
            np.array([each.expected for each in groups], np.float64),
            np.array([-1 if each is None else index[id(each)] for each in self.rows], np.int64),
            self.busy,
        )
        started = []
        for i, _, row, column, new_row in zip(*map(np.ndarray.tolist, starts), strict=True):
            group = groups[i]
            if new_row:
                self.rows[row] = group
                if group in self.queue:
                    self.queue.remove(group)
                if group.number == math.inf:
                    group.number, self._started = self._started, self._started + 1
            request = group.waiting.popleft()
            group.running += 1
            back = self.back.pop(request, None)
            partial = group.partial.get(request, ())
            length = len(partial) if back is None else int(back.length.max())
            self._occupy((row, column), request, length)
            started.append(StartedRequest((row, column), request, group, new_row, back))
        return started

    def _occupy(self, slot: SlotIndex, request: int, length: int) -> None:
        self.slots[request], self.lengths[request], self.busy[slot] = slot, length, True

    def pick_leaving(self, late: Iterable[int]) -> set[int]:
        """Which of some requests between two turns leave their slots to waiting requests.

        As in :func:`pick_next`, the siblings of a row take single slots of it; other waiting
        requests take rows in which no slot is busy.
        """
        if not self.has_waiting:
            return set()
        width, leaving = self.busy.shape[1], set[int]()
        groups = (*self.groups_in_rows(), *self.queue[: len(self.rows)])
        need = {id(each): len(each.waiting) for each in groups}
        rows: dict[int, list[int]] = {}
        for request in late:
            rows.setdefault(self.slots[request][0], []).append(request)
        for row, requests in rows.items():
            group, free = id(self.rows[row]), width - int(self.busy[row].sum())
            taken = min(need[group], free + len(requests))
            need[group] -= taken
            leaving.update(requests[: max(taken - free, 0)])
        rows_needed = sum(-(-each // width) for each in need.values()) - self.rows.count(None)
        for row, requests in rows.items():
            only = self.busy[row].sum() == len(requests) and not self.groups[requests[0]].waiting
            if only and rows_needed > 0:
                leaving.update(requests)
                rows_needed -= 1
        return leaving

    def leave(self, request: int) -> None:
        """Takes a request between two turns out of its slot, which others may use."""
        group = self.groups[request]
        self.between.discard(request)
        self.busy[self.slots.pop(request)] = False
        del self.lengths[request]
        group.running -= 1
        group.away += 1
        self._away += 1

    def come_back(self, request: int, slots: Slots | None) -> None:
        """A request that has left its slot may go on, with what was in its slot."""
        group = self.groups[request]
        group.away -= 1
        self._away -= 1
        group.waiting.appendleft(request)
        if slots is not None:
            self.back[request] = slots
        if group not in self.queue and all(each is not group for each in self.rows):
            group.expected = math.inf  # it has begun before
            self.queue.insert(0, group)

    def slot_for_fork(self, request: int) -> SlotIndex | None:
        """A free slot for a fork of a request: in its row, else in an empty row of its shard."""
        row = self.slots[request][0]
        if not self.busy[row].all():
            return row, int(np.argmin(self.busy[row]))
        size = len(self.rows) // self.shards
        shard = range(row // size * size, (row // size + 1) * size)
        return next(((r, 0) for r in shard if self.rows[r] is None), None)

    def fork(self, request: int, new: int, slot: SlotIndex) -> None:
        """Records a fork of a request in a slot."""
        group = self.groups[request]
        group.fork(request, new)
        self.rows[slot[0]] = self.groups[new] = group
        self._occupy(slot, new, self.lengths[request])

    def group_of(self, request: int) -> OpenGroup:
        """The group of a request that has not ended; raises KeyError if there is none."""
        group = self.groups.get(request)
        if group is None or request in group.done:
            raise KeyError(f"Generation: request {request} is unknown or has ended.")
        return group

    def end(self, request: int, completion: Completion) -> None:
        """Takes a request that has ended, or is paused, out of its slot or the queue."""
        group = self.groups[request]
        if request in self.slots:
            self.between.discard(request)
            self.busy[self.slots.pop(request)] = False
            del self.lengths[request]
            group.running -= 1
        elif request in group.waiting:
            group.waiting.remove(request)
        elif group.away:
            group.away -= 1
            self._away -= 1
        elif group in self.paused:  # with all of its requests
            self.paused.remove(group)
        self.back.pop(request, None)
        group.partial.pop(request, None)
        (group.done if has_ended(completion) else group.partial)[request] = completion
        if group in self.queue and not group.waiting:
            self.queue.remove(group)
        if group.waiting or group.running or group.away:
            return
        if group.complete:
            self.finished.append(group.finished())
            for each in group.limits:
                del self.groups[each]
        else:
            self.paused.append(group)

    def free_rows(self) -> None:
        """Frees the rows whose group has no request left for them."""
        for row, group in enumerate(self.rows):
            if group is not None and not group.waiting and not self.busy[row].any():
                self.rows[row] = None

    def unfinished(self) -> list[Group]:
        """Every group that was not handed out, with its responses so far."""
        self.free_rows()
        groups = [
            done.group._replace(partial={c.request: c for c in done.completions})
            for done in self.finished
        ]
        open_groups = {id(each): each for each in (*self.paused, *self.groups.values())}
        waiting = {id(each) for each in self.queue}
        started = [each for number, each in open_groups.items() if number not in waiting]
        started.sort(key=lambda each: each.number)
        return groups + [each.unfinished() for each in (*started, *self.queue)]


class Starts(NamedTuple):
    """Requests that start now, one entry each, siblings of a row together.

    Attributes:
      group: int ``[n]``, which group.
      sibling: int ``[n]``, which of its waiting requests: 0 is the next.
      row: int ``[n]``, the row of the slot.
      slot: int ``[n]``, the slot in its row.
      prefill: bool ``[n]``, True for the first entry of a row that must read the prompt.
    """

    group: np.ndarray
    sibling: np.ndarray
    row: np.ndarray
    slot: np.ndarray
    prefill: np.ndarray


def pick_next(waiting, expected, row_group, busy, *, max_new_groups: int | None = None) -> Starts:
    """Assigns waiting requests to free slots of a grid whose rows hold one prompt each.

        1. free slots of a row in use:   siblings of the group that the row holds
        2. free rows:                    groups that have no row yet, by :func:`longest_first`
        3. rows still free:              a further row for groups with siblings left, in turns, by
                                         :func:`longest_first`

    A row is free when none of its slots is busy and its group has no waiting sibling. A prompt is
    thus read once, and again only if a row would otherwise be empty.

    Args:
      waiting: int ``[N]``, how many requests of each group have not started.
      expected: ``[N]``, the expected length of each group's responses, in any unit.
      row_group: int ``[R]``, the group whose prompt each row holds; -1 for none.
      busy: bool ``[R, W]``, True for slots that are decoding.
      max_new_groups: The most groups that may get their first row, such as what staleness leaves
        (``corrections.staleness_capacity``); None for any number.

    Returns:
      :class:`Starts`; empty arrays where nothing can start.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> busy = np.array([[True, False], [False, False]])
      >>> starts = jr.rollout.pick_next([1, 3, 2], [9, 5, 7], [0, -1], busy)
      >>> list(zip(starts.group.tolist(), starts.row.tolist(), starts.slot.tolist()))
      [(0, 0, 1), (2, 1, 0), (2, 1, 1)]

    References:
      None; ours.
    """
    function = "pick_next"
    (waiting,) = counts(function, waiting=waiting)
    expected = numbers(function, expected=expected)
    row_group, busy = np.asarray(row_group), np.asarray(busy)
    checks.check_rank(function, 1, waiting=waiting, row_group=row_group)
    checks.check_same_shape(function, waiting=waiting, expected=expected)
    checks.check_bool(function, busy=busy)
    checks.check_rank(function, 2, busy=busy)
    checks.check_shape(function, "row_group", row_group, busy.shape[:1])
    if row_group.size:
        checks.check_integer(function, row_group=row_group)
        if not (row_group.min() >= -1 and row_group.max() < len(waiting)):
            raise ValueError(
                f"{function}: row_group must be -1 or one of the {len(waiting)} groups; got "
                f"{row_group.tolist()}."
            )
    for row in np.flatnonzero(busy.any(axis=1) & (row_group < 0))[:1]:
        raise ValueError(f"{function}: row {row} has a busy slot but holds no prompt.")
    checks.check_non_negative(function, max_new_groups=max_new_groups)
    row_group, left = row_group.astype(np.int64), waiting.copy()
    starts: list[tuple[int, int, int, int, bool]] = []

    def fill(row: int, group: int, prefill: bool) -> None:
        for slot in np.flatnonzero(~busy[row])[: left[group]]:
            starts.append((group, waiting[group] - left[group], row, slot, prefill))
            left[group] -= 1
            prefill = False

    for row in np.flatnonzero((row_group >= 0) & ~busy.all(axis=1)):
        fill(row, row_group[row], prefill=False)
    in_use = busy.any(axis=1)
    in_use[[row for _, _, row, _, _ in starts]] = True
    free = np.flatnonzero(~in_use).tolist()

    order = longest_first(expected, np.arange(len(expected)))
    has_row = np.zeros(len(left), bool)
    has_row[row_group[in_use]] = True
    groups = order[~has_row[order] & (left[order] > 0)][:max_new_groups]
    has_row[groups] = True
    while free and (left[has_row] > 0).any():
        for group in groups[: len(free)]:
            fill(free.pop(0), group, prefill=True)
        groups = order[has_row[order] & (left[order] > 0)]
    group, sibling, row, slot, prefill = np.array(starts, np.int64).reshape(-1, 5).T
    return Starts(group, sibling, row, slot, prefill.astype(bool))


def longest_first(expected, group) -> np.ndarray:
    """The order in which known requests start: the scheduler's order of groups.

        groups by their longest expected response, descending; ties, and siblings, in their order

    If a long response starts last, the other slots are idle until it ends; neighboring siblings
    share one pass over their prompt.

    Args:
      expected: ``[N]``, the expected length of each response, in tokens.
      group: int ``[N]``, which prompt each request belongs to.

    Returns:
      int64 ``[N]``: the indices of the requests in the order of their start.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.longest_first([5, 9, 30, 7], [0, 1, 0, 1]).tolist()
      [0, 2, 1, 3]

    References:
      None; longest processing time first (Graham, 1969), over groups.
    """
    function = "longest_first"
    expected, group = numbers(function, expected=expected), np.asarray(group)
    checks.check_rank(function, 1, expected=expected, group=group)
    checks.check_same_shape(function, expected=expected, group=group)
    if not group.size:
        return np.zeros(0, np.int64)
    checks.check_integer(function, group=group)
    _, first, of_group = np.unique(group, return_index=True, return_inverse=True)
    longest = np.full(len(first), -np.inf)
    np.maximum.at(longest, of_group, expected)
    return np.lexsort((np.arange(len(group)), first[of_group], -longest[of_group]))


def plan_chunk(
    scheduler: Scheduler, small_grid: tuple[int, int] | None
) -> tuple[int, Compaction | None]:
    """The number of active slots at which the next chunk ends early, and its compaction.

    Called once all requests have started for which there is a row and a slot.
    """
    slots_in_use = scheduler.active
    active = len(slots_in_use)
    # That many free slots are worth a refill, or the next turns of their responses.
    some = active - max(1, active // 4)
    turns = any(scheduler.groups[r].group.follow for r in slots_in_use)
    leave_at = some if scheduler.has_waiting or turns else 0
    if small_grid is None:
        return leave_at, None
    slots = small_grid[0] * small_grid[1]
    if active > slots:
        return leave_at or slots, None
    # Also while others wait: rows with fewer responses than slots leave the rest of theirs empty.
    return leave_at, compact_slots(slots_in_use.values(), small_grid)
