"""``Generation``: the host side of the engine. It decides what enters the slots and takes what
leaves them; everything that lasts is in one :class:`~jaxrl_llm.rollout.slots.Slots`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.interrupt import deferred_interrupt
from jaxrl_llm.rollout.engine import Engine, blank_requests, fits, too_large
from jaxrl_llm.rollout.requests import Completion, FinishedGroup, Group, has_ended
from jaxrl_llm.rollout.rollout import CANCELLED, FAILED, STOP, UNFINISHED


class _Open:
    """A group that has been submitted: which of its requests wait, and which are done."""

    def __init__(self, group: Group):
        self.group = group
        self.requests = list(group.requests)
        self.done: dict[int, Completion] = {}
        self.begun = dict(group.partial)
        self.waiting: deque[int] = deque()
        for request in self.requests:
            if has_ended(self.begun.get(request)):
                self.done[request] = self.begun.pop(request)
            else:
                self.waiting.append(request)
        self.row: int | None = None

    @property
    def complete(self) -> bool:
        return len(self.done) == len(self.requests)

    def finished(self) -> FinishedGroup:
        group = self.group._replace(requests=tuple(self.requests), partial={})
        return FinishedGroup(group, tuple(self.done[r] for r in self.requests))

    def unfinished(self) -> Group:
        partial = {**self.begun, **self.done}
        return self.group._replace(requests=tuple(self.requests), partial=partial)


class Generation:
    """Decodes groups of requests in an engine's slots; iterating over it yields finished groups.

    Groups wait in a queue, the longest expected first and otherwise in the order in which they
    came. Between two chunks of decoding, finished rollouts leave, and free slots take the next
    siblings of their row's prompt, or a new prompt where a row is empty.

    Iteration ends when nothing is left; then, and at any time before, more may be submitted. If it
    is left early, or by Ctrl-C, nothing is lost: iterate on, or take the rest with :meth:`stop`.

    Args:
      engine: From :func:`~jaxrl_llm.rollout.make_engine`.
      params: Parameters of its model.
      key: Typed key of all requests.
      version: Recorded with each token that these parameters sample.
      deltas: Low-rank deltas with a leading axis ``[N]``, of which each group names one.
      stop_strings: Texts that end a response; the token that completes one is its last.
      decode_text: ``decode_text(ids) -> str``, needed for ``stop_strings``.
      on_tokens: ``on_tokens(group_id, request, start, out)``, called after each chunk with the new
        tokens of each slot, ``out`` holding arrays ``[n]`` from place ``start`` on.

    Raises:
      ValueError: If ``stop_strings`` and ``decode_text`` are not given together.
      MemoryError: If the slots do not fit the device; it says how many would.
    """

    def __init__(
        self,
        engine: Engine,
        params: ArrayTree,
        *,
        key: Array,
        version: int = 0,
        deltas: ArrayTree | None = None,
        stop_strings: Sequence[str] = (),
        decode_text: Callable[[list[int]], str] | None = None,
        on_tokens: Callable[..., Any] | None = None,
    ):
        if bool(stop_strings) != (decode_text is not None):
            raise ValueError("Generation: stop_strings and decode_text take each other.")
        self.engine, self.params, self.key, self.version = engine, params, key, version
        self.deltas, self.on_tokens = deltas, on_tokens
        self.stop_strings, self.decode_text = tuple(stop_strings), decode_text
        self.slots = self._call(engine.init)
        self._queue: list[_Open] = []
        self._rows: list[_Open | None] = [None] * engine.rows
        self._held: dict[tuple[int, int], int] = {}  # (row, column) -> request
        self._seen: dict[tuple[int, int], int] = {}  # (row, column) -> tokens already looked at
        self._ready: deque[FinishedGroup] = deque()

    def submit(self, *groups: Group) -> None:
        """Puts groups into the queue.

        Raises:
          ValueError: If a prompt is empty, too long or holds an id outside the vocabulary, a
            request is there twice or asks for more tokens than a slot holds, or a setting is none
            that may vary; it names the group, and none of the groups is taken.
        """
        known = {r for each in self._opened() for r in each.requests}
        for group in groups:
            self._check(group, known)
            known |= set(group.requests)
        for group in groups:
            opened = _Open(group)
            if opened.complete:
                self._ready.append(opened.finished())
            else:
                self._queue.append(opened)
        self._queue.sort(key=lambda each: -self._expected(each.group))

    def __iter__(self) -> Iterator[FinishedGroup]:
        while self._ready or self._opened():
            if not self._ready:
                self.step()
            while self._ready:
                yield self._ready.popleft()

    def step(self) -> None:
        """One round: fill free slots, decode a chunk, take what has finished."""
        with deferred_interrupt():
            self._admit()
            if not self._held:
                return
            waiting = any(each is not None and each.waiting for each in self._rows)
            active = len(self._held)
            leave_at = active - max(1, active // 4) if waiting or self._queue else 0
            self.slots = self._call(
                self.engine.functions["decode"],
                self.params,
                self.slots,
                self.key,
                np.int32(self.version),
                np.int32(self.engine.chunk),
                np.int32(leave_at),
                self.deltas,
            )
            self._harvest()

    def update(self, params: ArrayTree, *, version: int) -> None:
        """New weights in the middle of decoding.

        The tokens so far are kept; their keys and values are computed again, and decoding goes on.

        Args:
          params: The new parameters.
          version: Recorded with each token that they sample.
        """
        self.params, self.version = params, version
        self._fill([r for r, each in enumerate(self._rows) if each is not None])

    def cancel(self, *requests: int) -> None:
        """Ends requests as they are, with finish CANCELLED; those that wait never begin.

        Raises:
          KeyError: If a request is not known, or has ended.
        """
        where = np.zeros((self.engine.rows, self.engine.width), bool)
        for request in requests:
            each = self._find(request)
            place = self._place(request)
            if place is not None:
                where[place] = True
            else:
                each.waiting.remove(request)
                begun = each.begun.pop(request, None) or self._nothing(request)
                each.done[request] = begun._replace(finish=CANCELLED)
                if each.row is None and each.complete:
                    self._queue.remove(each)
                    self._ready.append(each.finished())
        self._release(where, CANCELLED)
        self._harvest()

    def fork(self, request: int, new: int) -> bool:
        """A second rollout that shares what ``request`` has so far, and goes its own way from here.

        Args:
          request: One that is decoding.
          new: The id of the copy, which joins the group.

        Returns:
          False if neither the row of the request has a free slot nor another row is empty.

        Raises:
          KeyError: If ``request`` is not decoding.
          ValueError: If ``new`` is in use.
        """
        source = self._place(request)
        if source is None:
            raise KeyError(f"fork: request {request} is not decoding.")
        if any(new in each.requests for each in self._opened()):
            raise ValueError(f"fork: request {new} is in use.")
        each = self._rows[source[0]]
        free = [c for c in range(self.engine.width) if (source[0], c) not in self._held]
        if each is None or not free:
            return False
        target = (source[0], free[0])
        self.slots = self._call(
            self.engine.functions["copy_slot"], self.slots, *map(np.int32, (source, target)), new
        )
        each.requests.append(new)
        self._held[target] = new
        self._seen[target] = self._seen[source]
        return True

    def stop(self) -> list[Group]:
        """Empties slots and queue, and returns every group that was not handed out.

        Groups carry what has been sampled: submit them again, here or elsewhere, and they go on
        from there, in the order in which they are given.
        """
        self._release(np.ones((self.engine.rows, self.engine.width), bool), UNFINISHED)
        rows = [each for each in self._rows if each is not None]
        self._harvest()
        groups = []
        for done in self._ready:
            partial = {c.request: c for c in done.completions}
            groups.append(done.group._replace(partial=partial))
        groups += [each.unfinished() for each in rows if not each.complete]
        groups += [each.unfinished() for each in self._queue]
        self._ready.clear()
        self._queue.clear()
        self._rows = [None] * self.engine.rows
        return groups

    # What enters.

    def _admit(self) -> None:
        """Gives empty rows to waiting groups and free slots to waiting siblings."""
        new = []
        for row, each in enumerate(self._rows):
            if each is None and self._queue:
                self._rows[row] = self._queue.pop(0)
                self._rows[row].row = row
                new.append(row)
        if new:
            self._put_prompts(new)
        take = np.zeros((self.engine.rows, self.engine.width), bool)
        asked, resumed = blank_requests(self.engine), []
        for row, each in enumerate(self._rows):
            for column in range(self.engine.width if each is not None else 0):
                place = (row, column)
                if place in self._held or not each.waiting:
                    continue
                request = each.waiting.popleft()
                take[place], self._held[place], self._seen[place] = True, request, 0
                asked.id[place] = request
                asked.limit[place] = self._limit(each.group)
                for option, value in each.group.settings.items():
                    asked.settings[option][place] = value
                if len(each.begun.get(request, ())):
                    resumed.append((place, each.begun.pop(request)))
        if take.any():
            self.slots = self._call(self.engine.functions["start"], self.slots, take, asked)
        for place, begun in resumed:
            self._resume(place, begun)
        self._fill(sorted({*new, *(place[0] for place, _ in resumed)}))

    def _put_prompts(self, rows: list[int]) -> None:
        engine = self.engine
        count = fits(engine.row_counts, len(rows))
        where = np.full(count, engine.rows, np.int32)
        tokens = np.full((count, engine.prompt_length), engine.pad_id, np.int32)
        length, adapter = np.ones(count, np.int32), np.zeros(count, np.int32)
        for i, row in enumerate(rows):
            group = self._rows[row].group
            where[i], length[i], adapter[i] = row, len(group.prompt), group.adapter
            tokens[i, : len(group.prompt)] = group.prompt
        put = self.engine.functions["put_prompts"]
        self.slots = self._call(put, self.slots, where, tokens, length, adapter)

    def _resume(self, place: tuple[int, int], begun: Completion) -> None:
        def padded(buffer: Array, x: np.ndarray) -> np.ndarray:
            row = np.zeros(buffer.shape[2:], buffer.dtype)
            row[: len(x)] = x
            return row

        out = jax.tree.map(padded, self.slots.out, begun.out)
        places = map(np.int32, place)
        function = self.engine.functions["resume"]
        self.slots = self._call(function, self.slots, *places, out, np.int32(len(begun)))
        self._seen[place] = len(begun)

    def _fill(self, rows: list[int]) -> None:
        """Computes keys and values of rows, as many at a time as there are."""
        if not rows:
            return
        engine = self.engine
        where = np.full(fits(engine.row_counts, len(rows)), engine.rows, np.int32)
        where[: len(rows)] = rows
        longest = max(len(self._rows[row].group.prompt) for row in rows)
        own = max((n for (row, _), n in self._seen.items() if row in set(rows)), default=0)
        self.slots = self._call(
            engine.functions["fill"],
            self.params,
            self.slots,
            where,
            self.deltas,
            prompt_width=fits(engine.prompt_widths, longest),
            own_width=fits(engine.own_widths, own) if own else 0,
        )

    # What leaves.

    def _harvest(self) -> None:
        """Takes finished rollouts out of their slots, and finished groups out of their rows."""
        if not self._held:
            return
        active, length, finish = jax.device_get(
            (self.slots.active, self.slots.length, self.slots.finish)
        )
        if self.stop_strings or self.on_tokens is not None:
            active, length, finish = self._look(active, length, finish)
        ended = [place for place in self._held if not active[place]]
        for place in self._held:
            self._seen[place] = int(length[place])
        self._take(ended, length, finish)

    def _take(self, ended: list[tuple[int, int]], length: np.ndarray, finish: np.ndarray) -> None:
        wipe = np.zeros((self.engine.rows, self.engine.width), bool)
        for place, out in zip(ended, self._gather(ended), strict=True):
            request, each = self._held.pop(place), self._rows[place[0]]
            n, why = int(length[place]), int(finish[place])
            completion = Completion(request, jax.tree.map(lambda x, n=n: x[:n].copy(), out), why)
            wipe[place] = why == FAILED
            del self._seen[place]
            if why == UNFINISHED:
                each.begun[request] = completion
            else:
                each.done[request] = completion
        for row, each in enumerate(self._rows):
            if each is None or each.waiting or any(r == row for r, _ in self._held):
                continue
            self._rows[row] = None
            if wipe[row].any():
                wipe[row] = True
            if each.complete:
                self._ready.append(each.finished())
        if wipe.any():
            self.slots = self._call(self.engine.functions["wipe"], self.slots, wipe)

    def _gather(self, places: list[tuple[int, int]]) -> list[Any]:
        """The outputs of some slots, on the host."""
        if not places:
            return []
        size = 1 << (len(places) - 1).bit_length()
        padded = np.array(places + places[:1] * (size - len(places)), np.int32)
        gather = self.engine.functions["gather"]
        out = jax.device_get(gather(self.slots.out, padded[:, 0], padded[:, 1]))
        return [jax.tree.map(lambda x, i=i: x[i], out) for i in range(len(places))]

    def _look(self, active, length, finish):
        """Tells of new tokens, and ends responses that hold a stop string."""
        places = list(self._held)
        length, finish, found = length.copy(), finish.copy(), np.zeros_like(active)
        for place, out in zip(places, self._gather(places), strict=True):
            start, end = self._seen[place], int(length[place])
            stop = self._stop_at(out.tokens[:end].tolist(), start)
            if stop is not None:
                end = length[place] = stop
                finish[place], found[place] = STOP, True
            if self.on_tokens is not None and end > start:
                new = jax.tree.map(lambda x, a=start, b=end: x[a:b].copy(), out)
                self.on_tokens(self._rows[place[0]].group.id, self._held[place], start, new)
        self._release(found, STOP)
        return active & ~found, length, finish

    def _stop_at(self, tokens: list[int], start: int) -> int | None:
        """After how many tokens a stop string is complete, or None; ``start`` are known not to."""
        if self.decode_text is None or len(tokens) == start:
            return None

        def ends(n: int) -> bool:
            text = self.decode_text(tokens[:n])
            return any(stop in text for stop in self.stop_strings)

        if not ends(len(tokens)):
            return None
        return next(n for n in range(start + 1, len(tokens) + 1) if ends(n))

    def _release(self, where: np.ndarray, finish: int) -> None:
        if where.any():
            release = self.engine.functions["release"]
            self.slots = self._call(release, self.slots, where, np.int32(finish))

    # What is there.

    def _opened(self) -> list[_Open]:
        return self._queue + [each for each in self._rows if each is not None]

    def _find(self, request: int) -> _Open:
        for each in self._opened():
            if request in each.requests and request not in each.done:
                return each
        raise KeyError(f"Generation: request {request} is not there, or has ended.")

    def _place(self, request: int) -> tuple[int, int] | None:
        return next((place for place, r in self._held.items() if r == request), None)

    def _nothing(self, request: int) -> Completion:
        empty = jax.tree.map(lambda x: np.zeros((0, *x.shape[3:]), x.dtype), self.slots.out)
        return Completion(request, empty, UNFINISHED)

    def _limit(self, group: Group) -> int:
        most = self.engine.max_new_tokens
        return most if group.max_new_tokens is None else group.max_new_tokens

    def _expected(self, group: Group) -> float:
        return self._limit(group) if group.expected is None else group.expected

    def _call(self, function: Callable, *arguments, **options):
        """Calls into the device; if it is out of memory, says how much would fit."""
        try:
            return function(*arguments, **options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(too_large(self.engine)) from error

    def _check(self, group: Group, known: set[int]) -> None:
        engine, prompt = self.engine, group.prompt
        start, limit = f"submit: group {group.id!r}", self._limit(group)
        if not len(prompt):
            raise ValueError(f"{start} has an empty prompt; it needs at least one token.")
        if len(prompt) > engine.prompt_length:
            raise ValueError(
                f"{start} has a prompt of {len(prompt)} tokens; the engine's slots hold "
                f"prompt_length {engine.prompt_length}."
            )
        size = engine.model.config.vocab_size
        if wrong := [t for t in prompt if not 0 <= t < size]:
            raise ValueError(f"{start} holds token {wrong[0]}, outside the vocabulary of {size}.")
        if not group.requests:
            raise ValueError(f"{start} has no requests.")
        if twice := [r for r in group.requests if r in known or group.requests.count(r) > 1]:
            raise ValueError(f"{start}: request {twice[0]} is there twice.")
        if not 1 <= limit <= engine.max_new_tokens:
            raise ValueError(
                f"{start} asks for {limit} new tokens; the engine's slots hold between 1 and "
                f"max_new_tokens {engine.max_new_tokens}."
            )
        if unknown := set(group.settings) - set(engine.draw.settings):
            vary = ", ".join(engine.draw.settings) or "none"
            raise ValueError(
                f"{start} sets {sorted(unknown)[0]!r}; options that may vary with this engine: "
                f"{vary}."
            )
        if unknown := set(group.partial) - set(group.requests):
            raise ValueError(f"{start} has a partial response of request {min(unknown)}, not its.")
