"""Who is where: the groups that wait, and which of their requests each slot holds.

The bookkeeping of a :class:`~jaxrl_llm.rollout.Generation`, without anything of the device.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxrl_llm.rollout.grid import pick_next
from jaxrl_llm.rollout.requests import Completion, FinishedGroup, Group, has_ended

Place = tuple[int, int]
"""Row and column of a slot."""


class OpenGroup:
    """A group that has been submitted: which of its requests wait, and which have ended."""

    def __init__(self, group: Group, expected: float):
        self.group, self.expected = group, expected
        self.requests = list(group.requests)
        self.begun = dict(group.partial)
        self.done: dict[int, Completion] = {}
        self.waiting: deque[int] = deque()
        for request in self.requests:
            if has_ended(self.begun.get(request)):
                self.done[request] = self.begun.pop(request)
            else:
                self.waiting.append(request)

    def fork(self, request: int, new: int) -> None:
        """Adds a request that asks for what another one does."""
        most = self.group.max_new_tokens
        if isinstance(most, tuple):
            most = (*most, most[self.requests.index(request)])
        self.requests.append(new)
        self.group = self.group._replace(requests=tuple(self.requests), max_new_tokens=most)

    @property
    def complete(self) -> bool:
        """Whether all of its requests have ended."""
        return len(self.done) == len(self.requests)

    def finished(self) -> FinishedGroup:
        """The group with its completions."""
        return FinishedGroup(
            self.group._replace(partial={}), tuple(self.done[r] for r in self.requests)
        )

    def unfinished(self) -> Group:
        """The group with what there is of it, to be submitted again."""
        partial = {**self.begun, **self.done}
        return self.group._replace(partial=partial)


class Begin(NamedTuple):
    """A request that starts: where, of which group, and whether its row has to read the prompt."""

    place: Place
    request: int
    group: OpenGroup
    new_row: bool


class Board:
    """The queue of groups and a grid of ``rows * width`` slots.

    Attributes:
      queue: Groups that no row has taken, the longest expected first.
      rows: The group whose prompt each row holds, or None.
      held: The request in each slot that is taken.
      seen: How many of its tokens the host knows of, by slot.
      ready: Groups that are finished and have not been handed out.
    """

    def __init__(self, rows: int, width: int):
        self.width = width
        self.queue: list[OpenGroup] = []
        self.rows: list[OpenGroup | None] = [None] * rows
        self.held: dict[Place, int] = {}
        self.seen: dict[Place, int] = {}
        self.ready: deque[FinishedGroup] = deque()

    def submit(self, groups: Iterable[tuple[Group, float]]) -> None:
        """Puts groups, each with its expected length, into the queue."""
        for group, expected in groups:
            opened = OpenGroup(group, expected)
            if opened.complete:
                self.ready.append(opened.finished())
            else:
                self.queue.append(opened)
        self.queue.sort(key=lambda each: -each.expected)

    def open(self) -> Iterator[OpenGroup]:
        """Every group that is not finished."""
        yield from self.queue
        yield from self.under_way()

    def under_way(self) -> list[OpenGroup]:
        """The groups in rows, each once."""
        return list({id(each): each for each in self.rows if each is not None}.values())

    def begin(self) -> list[Begin]:
        """Takes the requests that start now out of the queue and puts them into slots."""
        # No more groups can start than there are rows; the rest of a long queue is left alone.
        groups = [*self.under_way(), *self.queue[: len(self.rows)]]
        index = {id(each): i for i, each in enumerate(groups)}
        busy = np.zeros((len(self.rows), self.width), bool)
        for place in self.held:
            busy[place] = True
        starts = pick_next(
            np.array([len(each.waiting) for each in groups], np.int64),
            np.array([each.expected for each in groups], np.float64),
            np.array([-1 if each is None else index[id(each)] for each in self.rows], np.int64),
            busy,
        )
        begun = []
        for i, _, row, column, new_row in zip(*map(np.ndarray.tolist, starts), strict=True):
            group = groups[i]
            if new_row:
                self.rows[row] = group
                self.queue = [each for each in self.queue if each is not group]
            request = group.waiting.popleft()
            self.held[row, column], self.seen[row, column] = request, 0
            begun.append(Begin((row, column), request, group, new_row))
        return begun

    def end(self, place: Place, completion: Completion) -> None:
        """Frees a slot; the group keeps what was in it."""
        group = self.group(place[0])
        del self.held[place], self.seen[place]
        (group.done if has_ended(completion) else group.begun)[completion.request] = completion

    def clear_rows(self) -> list[int]:
        """Frees the rows whose group has nothing left for them; finished groups become ready."""
        taken = {row for row, _ in self.held}
        groups = self.under_way()
        free = [
            row
            for row, each in enumerate(self.rows)
            if each is not None and row not in taken and not each.waiting
        ]
        for row in free:
            self.rows[row] = None
        self.ready.extend(each.finished() for each in groups if each.complete)
        return free

    def group(self, row: int) -> OpenGroup:
        """The group whose prompt a row holds; raises KeyError if it holds none."""
        group = self.rows[row]
        if group is None:
            raise KeyError(f"Generation: row {row} holds no prompt.")
        return group

    def find(self, request: int) -> OpenGroup:
        """The group of a request that has not ended; raises KeyError if there is none."""
        for each in self.open():
            if request in each.requests and request not in each.done:
                return each
        raise KeyError(f"Generation: request {request} is not there, or has ended.")

    def place(self, request: int) -> Place | None:
        """The slot of a request, or None."""
        return next((place for place, held in self.held.items() if held == request), None)

    def drop(self, group: OpenGroup) -> None:
        """A group of the queue all of whose requests have ended is ready."""
        self.queue = [each for each in self.queue if each is not group]
        self.ready.append(group.finished())

    def empty(self) -> list[Group]:
        """Takes out every group that was not handed out; no slot may be taken."""
        groups = [
            done.group._replace(partial={c.request: c for c in done.completions})
            for done in self.ready
        ]
        groups += [each.unfinished() for each in (*self.under_way(), *self.queue)]
        self.ready.clear()
        self.queue.clear()
        self.rows = [None] * len(self.rows)
        return groups
