"""Who is where: the groups that wait, and which of their requests each slot holds.

The bookkeeping of a :class:`~jaxrl_llm.rollout.Generation`, without anything of the device.
"""

import bisect
import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxrl_llm.rollout.engine.grid import pick_next
from jaxrl_llm.rollout.engine.requests import Completion, FinishedGroup, Group, has_ended

Place = tuple[int, int]
"""Row and column of a slot."""


class OpenGroup:
    """A group that is not finished.

    Each of its requests waits, is in a slot, has ended, or is set aside with its segment used up.

    Attributes:
      group: What was submitted, with its forks.
      limits: The longest response, by request.
      expected: How long a response is expected to be; infinite if some have begun before.
      begun: Responses that go on from where they are, by request.
      done: Those that have ended.
      waiting: Requests that no slot has taken, in order.
      running: How many are in slots.
      number: Which of all groups it was to start; infinite before.
    """

    def __init__(self, group: Group, limits: dict[int, int]):
        self.group, self.limits = group, dict(limits)
        expected = max(limits.values()) if group.expected is None else group.expected
        self.expected = math.inf if group.partial else float(expected)
        self.begun = {r: c for r, c in group.partial.items() if not has_ended(c)}
        self.done = {r: c for r, c in group.partial.items() if has_ended(c)}
        self.waiting = deque(r for r in group.requests if r not in self.done)
        self.running = 0
        self.number = math.inf

    @property
    def complete(self) -> bool:
        """Whether all of its requests have ended."""
        return len(self.done) == len(self.limits)

    def fork(self, request: int, new: int) -> None:
        """Adds a request that asks for what another one does, and is in a slot."""
        self.limits[new] = self.limits[request]
        requests = (*self.group.requests, new)
        limits = tuple(self.limits[r] for r in requests)
        self.group = self.group._replace(requests=requests, max_new_tokens=limits)
        self.running += 1

    def finished(self) -> FinishedGroup:
        """The group with its completions."""
        completions = tuple(self.done[r] for r in self.group.requests)
        return FinishedGroup(self.group._replace(partial={}), completions)

    def unfinished(self) -> Group:
        """The group with what there is of it, to be submitted again."""
        return self.group._replace(partial={**self.begun, **self.done})


class Begin(NamedTuple):
    """A request that starts: where, of which group, and whether its row has to read the prompt."""

    place: Place
    request: int
    group: OpenGroup
    new_row: bool


class Board:
    """The queue of groups and a grid of ``rows * width`` slots in ``shards`` parts.

    Attributes:
      queue: Groups that no row has taken: those that have begun before, then the longest expected.
      rows: The group whose prompt each row holds, or None.
      aside: Groups of which all that has not ended is set aside.
      ready: Groups that are finished and have not been handed out.
      groups: The group of each request that is in one of the first three.
      held: The slot of each request that is in one.
      seen: How many of its tokens the host knows of.
      busy: bool ``[R, W]``, the slots that are taken.
    """

    def __init__(self, rows: int, width: int, shards: int = 1):
        self.shards = shards
        self.queue: list[OpenGroup] = []
        self.rows: list[OpenGroup | None] = [None] * rows
        self.aside: list[OpenGroup] = []
        self.ready: deque[FinishedGroup] = deque()
        self.groups: dict[int, OpenGroup] = {}
        self.held: dict[int, Place] = {}
        self.seen: dict[int, int] = {}
        self.busy = np.zeros((rows, width), bool)
        self._started = 0

    @property
    def open(self) -> bool:
        """Whether there is anything left to decode."""
        return bool(self.queue) or any(each is not None for each in self.rows)

    @property
    def crowded(self) -> bool:
        """Whether requests wait for a slot."""
        return bool(self.queue) or any(each and each.waiting for each in self.rows)

    def submit(self, groups: Iterable[tuple[Group, dict[int, int]]]) -> None:
        """Puts groups, each with the limits of its requests, into the queue."""
        for group, limits in groups:
            opened = OpenGroup(group, limits)
            if opened.complete:
                self.ready.append(opened.finished())
                continue
            self.groups |= dict.fromkeys(group.requests, opened)
            bisect.insort(self.queue, opened, key=lambda each: -each.expected)

    def under_way(self) -> list[OpenGroup]:
        """The groups in rows, each once."""
        return list({id(each): each for each in self.rows if each is not None}.values())

    def begin(self) -> list[Begin]:
        """Takes the requests that start now out of the queue and puts them into slots."""
        self.clear_rows()
        if self.busy.all() or not self.crowded:
            return []
        # No more groups can start than there are rows; the rest of a long queue is left alone.
        groups = [*self.under_way(), *self.queue[: len(self.rows)]]
        index = {id(each): i for i, each in enumerate(groups)}
        starts = pick_next(
            np.array([len(each.waiting) for each in groups], np.int64),
            np.array([each.expected for each in groups], np.float64),
            np.array([-1 if each is None else index[id(each)] for each in self.rows], np.int64),
            self.busy,
        )
        begun = []
        for i, _, row, column, new_row in zip(*map(np.ndarray.tolist, starts), strict=True):
            group = groups[i]
            if new_row:
                self.rows[row] = group
                if group.number == math.inf:
                    self.queue.remove(group)
                    group.number, self._started = self._started, self._started + 1
            request = group.waiting.popleft()
            group.running += 1
            self._hold(request, (row, column), len(group.begun.get(request, ())))
            begun.append(Begin((row, column), request, group, new_row))
        return begun

    def _hold(self, request: int, place: Place, seen: int) -> None:
        self.held[request], self.seen[request], self.busy[place] = place, seen, True

    def spare(self, request: int) -> Place | None:
        """A free slot for a fork of a request: in its row, else in an empty one of its part."""
        row = self.held[request][0]
        if not self.busy[row].all():
            return row, int(np.argmin(self.busy[row]))
        size = len(self.rows) // self.shards
        part = range(row // size * size, (row // size + 1) * size)
        return next(((r, 0) for r in part if self.rows[r] is None), None)

    def fork(self, request: int, new: int, place: Place) -> None:
        """A fork of a request is in a slot."""
        group = self.groups[request]
        group.fork(request, new)
        self.rows[place[0]] = self.groups[new] = group
        self._hold(new, place, self.seen[request])

    def find(self, request: int) -> OpenGroup:
        """The group of a request that has not ended; raises KeyError if there is none."""
        group = self.groups.get(request)
        if group is None or request in group.done:
            raise KeyError(f"Generation: request {request} is not there, or has ended.")
        return group

    def end(self, request: int, completion: Completion) -> None:
        """A request leaves its slot or the queue: it has ended, or is set aside."""
        group = self.groups[request]
        if request in self.held:
            self.busy[self.held.pop(request)] = False
            del self.seen[request]
            group.running -= 1
        elif request in group.waiting:
            group.waiting.remove(request)
        else:
            self.aside.remove(group)
        group.begun.pop(request, None)
        (group.done if has_ended(completion) else group.begun)[request] = completion
        if not group.waiting and not group.running:
            self._leave(group)

    def _leave(self, group: OpenGroup) -> None:
        """A group of which nothing waits or decodes is ready, or set aside."""
        if group.number == math.inf:
            self.queue.remove(group)
        if group.complete:
            self.ready.append(group.finished())
            for request in group.limits:
                del self.groups[request]
        else:
            self.aside.append(group)

    def clear_rows(self) -> None:
        """Frees the rows whose group has nothing left for them."""
        for row, group in enumerate(self.rows):
            if group is not None and not group.waiting and not self.busy[row].any():
                self.rows[row] = None

    def rest(self) -> list[Group]:
        """Every group that was not handed out, with what is known of it."""
        self.clear_rows()
        groups = [
            done.group._replace(partial={c.request: c for c in done.completions})
            for done in self.ready
        ]
        begun = sorted([*self.aside, *self.under_way()], key=lambda each: each.number)
        return groups + [each.unfinished() for each in (*begun, *self.queue)]
