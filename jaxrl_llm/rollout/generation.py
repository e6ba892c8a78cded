"""``Generation``: what goes on between two chunks of decoding."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.interrupt import deferred_interrupt
from jaxrl_llm.rollout.board import Board, Place
from jaxrl_llm.rollout.engine import Engine, blank_requests, fits, too_large
from jaxrl_llm.rollout.requests import (
    Completion,
    FinishedGroup,
    Group,
    check_group,
    expected_length,
    limits,
    stop_place,
)
from jaxrl_llm.rollout.rollout import CANCELLED, FAILED, STOP, UNFINISHED
from jaxrl_llm.rollout.slots import Tokens


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
        self._adapters = 1
        if deltas is not None:
            self._adapters = next(x.shape[0] for x in jax.tree.leaves(deltas) if jnp.ndim(x) == 3)
        self.slots = engine.init()
        self._board = Board(engine.rows, engine.width)

    def submit(self, *groups: Group) -> None:
        """Puts groups into the queue.

        Raises:
          ValueError: If a prompt is empty, too long or holds an id outside the vocabulary, a
            request is there twice or asks for more tokens than a slot holds, or a setting is none
            that may vary; it names the group, and none of the groups is taken.
        """
        engine, known = self.engine, {r for each in self._board.open() for r in each.requests}
        for group in groups:
            check_group(
                group,
                known,
                prompt_length=engine.prompt_length,
                max_new_tokens=engine.max_new_tokens,
                vocab_size=engine.model.config.vocab_size,
                settings=engine.draw.settings,
                adapters=self._adapters,
            )
            known |= set(group.requests)
        most = engine.max_new_tokens
        self._board.submit((group, expected_length(group, most)) for group in groups)

    def __iter__(self) -> Iterator[FinishedGroup]:
        board = self._board
        while board.ready or any(board.open()):
            if not board.ready:
                self.step()
            while board.ready:
                yield board.ready.popleft()

    def step(self) -> None:
        """One round: fill free slots, decode a chunk, take what has finished."""
        board = self._board
        with deferred_interrupt():
            self._admit()
            if not board.held:
                return
            active = len(board.held)
            more = board.queue or any(each.waiting for each in board.under_way())
            self.slots = self._call(
                "decode",
                self.params,
                self.slots,
                self.key,
                np.int32(self.version),
                np.int32(self.engine.chunk),
                # With more to come, a quarter of the slots free is worth a look.
                np.int32(active - max(1, active // 4) if more else 0),
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
        self._fill([r for r, each in enumerate(self._board.rows) if each is not None])

    def cancel(self, *requests: int) -> None:
        """Ends requests as they are, with finish CANCELLED; those that wait never begin.

        Raises:
          KeyError: If a request is not known, or has ended.
        """
        where = self._nobody()
        for request in requests:
            group, place = self._board.find(request), self._board.place(request)
            if place is not None:
                where[place] = True
                continue
            group.waiting.remove(request)
            begun = group.begun.pop(request, None) or self._nothing(request)
            group.done[request] = begun._replace(finish=CANCELLED)
            if group in self._board.queue and group.complete:
                self._board.drop(group)
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
        board = self._board
        source = board.place(request)
        if source is None:
            raise KeyError(f"fork: request {request} is not decoding.")
        if any(new in each.requests for each in board.open()):
            raise ValueError(f"fork: request {new} is in use.")
        row, group = source[0], board.find(request)
        free = [(row, c) for c in range(self.engine.width) if (row, c) not in board.held]
        free += [(r, 0) for r, each in enumerate(board.rows) if each is None]
        if not free:
            return False
        target = free[0]
        places = np.array(source, np.int32), np.array(target, np.int32)
        self.slots = self._call("copy_slot", self.slots, *places, np.int32(new))
        group.fork(request, new)
        board.rows[target[0]] = group
        board.held[target], board.seen[target] = new, board.seen[source]
        return True

    def stop(self) -> list[Group]:
        """Empties slots and queue, and returns every group that was not handed out.

        Groups carry what has been sampled: submit them again, here or elsewhere, and they go on
        from there, in the order in which they are given.
        """
        self._release(~self._nobody(), UNFINISHED)
        self._harvest()
        return self._board.empty()

    # What enters.

    def _admit(self) -> None:
        """Gives empty rows to waiting groups and free slots to waiting siblings."""
        starts = self._board.begin()
        if not starts:
            return
        new = {each.place[0]: each.group.group for each in starts if each.new_row}
        if new:
            self._put_prompts(new)
        take, asked, resumed = self._nobody(), blank_requests(self.engine), set()
        for place, request, group, _ in starts:
            take[place] = True
            most = limits(group.group, self.engine.max_new_tokens)
            asked.id[place], asked.limit[place] = request, most[request]
            for option, value in group.group.settings.items():
                asked.settings[option][place] = value
        self.slots = self._call("start", self.slots, take, asked)
        for place, request, group, _ in starts:
            begun = group.begun.pop(request, None)
            if begun is not None and len(begun):
                self._resume(place, begun)
                resumed.add(place[0])
        self._fill(sorted({*new, *resumed}))

    def _put_prompts(self, groups: dict[int, Group]) -> None:
        engine = self.engine
        count = fits(engine.row_counts, len(groups))
        rows = np.full(count, engine.rows, np.int32)
        tokens = np.full((count, engine.prompt_length), engine.pad_id, np.int32)
        length, adapter = np.ones(count, np.int32), np.zeros(count, np.int32)
        for i, (row, group) in enumerate(groups.items()):
            rows[i], length[i], adapter[i] = row, len(group.prompt), group.adapter
            tokens[i, : len(group.prompt)] = group.prompt
        self.slots = self._call("put_prompts", self.slots, rows, tokens, length, adapter)

    def _resume(self, place: Place, begun: Completion) -> None:
        def padded(buffer: Array, x: np.ndarray) -> np.ndarray:
            row = np.zeros(buffer.shape[2:], buffer.dtype)
            row[: len(x)] = x
            return row

        out = jax.tree.map(padded, self.slots.out, begun.out)
        places = map(np.int32, place)
        self.slots = self._call("resume", self.slots, *places, out, np.int32(len(begun)))
        self._board.seen[place] = len(begun)

    def _fill(self, rows: list[int]) -> None:
        """Computes the keys and values of rows: of prompts, and of responses that have begun."""
        if not rows:
            return
        engine, board = self.engine, self._board
        where = np.full(fits(engine.row_counts, len(rows)), engine.rows, np.int32)
        where[: len(rows)] = rows
        longest = max(len(board.group(row).group.prompt) for row in rows)
        own = max((n for (row, _), n in board.seen.items() if row in set(rows)), default=0)
        self.slots = self._call(
            "fill",
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
        board = self._board
        if board.held:
            state = (self.slots.active, self.slots.length, self.slots.finish)
            active, length, finish = jax.device_get(state)
            if self.stop_strings or self.on_tokens is not None:
                active, length, finish = self._look(active, length, finish)
            for place in board.held:
                board.seen[place] = int(length[place])
            self._take([place for place in board.held if not active[place]], length, finish)

    def _take(self, ended: list[Place], length: np.ndarray, finish: np.ndarray) -> None:
        board, failed = self._board, self._nobody()
        for place, out in zip(ended, self._gather(ended), strict=True):
            n, why = int(length[place]), int(finish[place])
            out = jax.tree.map(lambda x, n=n: x[:n].copy(), out)
            failed[place] = why == FAILED
            board.end(place, Completion(board.held[place], out, why))
        for row in board.clear_rows():
            failed[row] = failed[row].any()
        if failed.any():
            self.slots = self._call("wipe", self.slots, failed)

    def _gather(self, places: list[Place]) -> list[Tokens]:
        """The outputs of some slots, on the host."""
        if not places:
            return []
        size = 1 << (len(places) - 1).bit_length()
        padded = np.array(places + places[:1] * (size - len(places)), np.int32)
        out = jax.device_get(self._call("gather", self.slots.out, padded[:, 0], padded[:, 1]))
        return [jax.tree.map(lambda x, i=i: x[i], out) for i in range(len(places))]

    def _look(self, active, length, finish):
        """Tells of new tokens, and ends responses that hold a stop string."""
        board, places = self._board, list(self._board.held)
        length, finish, found = length.copy(), finish.copy(), np.zeros_like(active)
        for place, out in zip(places, self._gather(places), strict=True):
            begin, end = board.seen[place], int(length[place])
            stop = stop_place(out.tokens[:end].tolist(), begin, self.stop_strings, self.decode_text)
            if stop is not None:
                end = length[place] = stop
                finish[place], found[place] = STOP, True
            if self.on_tokens is not None and end > begin:
                new = jax.tree.map(lambda x, a=begin, b=end: x[a:b].copy(), out)
                self.on_tokens(board.group(place[0]).group.id, board.held[place], begin, new)
        self._release(found, STOP)
        return active & ~found, length, finish

    def _release(self, where: np.ndarray, finish: int) -> None:
        if where.any():
            self.slots = self._call("release", self.slots, where, np.int32(finish))

    # What is there.

    def _nobody(self) -> np.ndarray:
        return np.zeros((self.engine.rows, self.engine.width), bool)

    def _nothing(self, request: int) -> Completion:
        empty = jax.tree.map(lambda x: np.zeros((0, *x.shape[3:]), x.dtype), self.slots.out)
        return Completion(request, empty, UNFINISHED)

    def _call(self, name: str, *arguments, **options):
        """One of the engine's functions; if the device is out of memory, says what would fit."""
        try:
            return self.engine.functions[name](*arguments, **options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(too_large(self.engine)) from error
