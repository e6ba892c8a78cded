"""``Generation``: what goes on between two chunks of decoding."""

from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime.interrupt import deferred_interrupt
from jaxrl_llm.models.protocol import cast_params
from jaxrl_llm.rollout.engine.compaction import next_grid
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.request_arrays import (
    begun_arrays,
    place_array,
    prompt_arrays,
    request_arrays,
)
from jaxrl_llm.rollout.engine.requests import (
    Completion,
    FinishedGroup,
    Group,
    check_group,
    count_deltas,
    cut,
    limits_of,
    nothing,
)
from jaxrl_llm.rollout.engine.scheduler import Board, Place
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import CANCELLED, LENGTH, STOP, UNFINISHED


class Generation:
    """Decodes groups of requests in an engine's slots; iterating over it yields finished groups.

    Groups wait in a queue: first those that have begun before, then the longest expected, and
    otherwise in the order in which they came. Between two chunks of decoding, finished rollouts
    leave, and free slots take the next siblings of their row's prompt, or a new prompt where a row
    is empty.

    Iteration ends when nothing is left to decode; then, and at any time before, more may be
    submitted. If it is left early, or by Ctrl-C, nothing is lost: iterate on, or take the rest with
    :meth:`stop`.

    Args:
      engine: From :func:`~jaxrl_llm.rollout.make_engine`.
      params: Parameters of its model.
      key: Typed key of all requests.
      version: Recorded with each token that these parameters sample.
      deltas: Low-rank deltas with a leading axis ``[N]``, of which each group names one.
      segment: The most tokens a response takes before it is set aside, unfinished, for
        :meth:`stop` to return it; None for no such limit.
      stop_strings: Texts that end a response; the token that completes one is its last.
      decode_text: ``decode_text(ids) -> str``, needed for ``stop_strings``.
      on_tokens: ``on_tokens(group_id, request, start, out)``, called after each chunk with the new
        tokens of each slot, ``out`` holding arrays ``[n]`` from place ``start`` on. It may cancel
        and fork. A fork begins with what its source had, of which it is not told again.

    Raises:
      TypeError: If ``stop_strings`` is one string.
      ValueError: If ``stop_strings`` and ``decode_text`` are not given together, a stop string is
        empty, ``segment`` is not above 0 or the deltas have not one leading axis.
      MemoryError: If the slots do not fit the device; it says how many would. So do all methods
        that decode.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> engine = jr.rollout.make_engine(
      ...     model, rows=1, width=2, prompt_length=8, max_new_tokens=4)
      >>> generation = jr.rollout.Generation(engine, params, key=jax.random.key(0), segment=3)
      >>> generation.submit(jr.rollout.Group(id="a", prompt=[1, 2, 3], requests=(0, 1)))
      >>> list(generation), [len(c) for c in generation.stop()[0].partial.values()]
      ([], [3, 3])

    References:
      APRIL (arXiv:2509.18521) for :meth:`stop`; AReaL (arXiv:2505.24298) for :meth:`update`, which
      here records with each token the version that sampled it, not that of its return; UloRL
      (arXiv:2507.19766), PAPER reading, for ``segment``.
    """

    def __init__(
        self,
        engine: Engine,
        params: ArrayTree,
        *,
        key: Array,
        version: int = 0,
        deltas: ArrayTree | None = None,
        segment: int | None = None,
        stop_strings: Sequence[str] = (),
        decode_text: Callable[[list[int]], str] | None = None,
        on_tokens: Callable[..., Any] | None = None,
    ):
        checks.check_positive("Generation", segment=segment)
        self.engine, self.key, self.version = engine, key, version
        self.params = cast_params(engine.model, params)
        self.deltas, self._adapters = deltas, count_deltas("Generation", deltas)
        self.segment, self._watch = segment, Watch(stop_strings, decode_text, on_tokens)
        self.slots = engine.init()
        self._board = self._empty()
        self._spoiled = self._nobody()
        self._half_filled = False

    @deferred_interrupt()
    def submit(self, *groups: Group) -> None:
        """Puts groups into the queue.

        Raises:
          ValueError: If a prompt is empty, too long or holds an id outside the vocabulary, a
            request is there twice or asks for more tokens than a slot holds, or a setting is none
            that may vary; it names the group, and none of the groups is taken.
        """
        known: ChainMap[int, Any] = ChainMap({}, self._board.groups)
        for group in groups:
            check_group(group, self.engine, known=known, adapters=self._adapters)
            known.update(dict.fromkeys(group.requests))
        most = self.engine.max_new_tokens
        self._board.submit((group, limits_of(group, most)) for group in groups)

    def __iter__(self) -> Iterator[FinishedGroup]:
        while self._board.ready or self._board.open:
            if not self._board.ready:
                self.step()
            while self._board.ready:
                yield self._board.ready.popleft()

    def step(self) -> None:
        """One round: fill free slots, decode a chunk, take what has finished."""
        self.admit()
        with deferred_interrupt():
            if self._board.held:
                leave_at, packing = next_grid(self._board, self.engine.tail)
                limits = map(np.int32, (self.version, self.engine.chunk, leave_at))
                given = (self.params, self.slots, self.key, *limits, self.deltas, packing)
                self.slots = self.engine.call("decode", *given)
                self._harvest()
        self._watch.tell()

    @deferred_interrupt()
    def admit(self) -> None:
        """Gives empty rows to waiting groups and free slots to waiting siblings.

        Raises:
          RuntimeError: If an error has left slots half filled.
        """
        self._check_slots()
        starts, engine = self._board.begin(), self.engine
        if not starts:
            return
        self._half_filled = True
        take, asked = request_arrays(engine, starts, segment=self.segment)
        if (spoiled := take & self._spoiled).any():
            self.slots = engine.call("wipe", self.slots, spoiled)
        new = {each.place[0]: each.group.group for each in starts if each.new_row}
        if new:
            prompts = prompt_arrays(engine, new)
            self.slots = engine.call("put_prompts", self.slots, *prompts)
        self.slots = engine.call("start", self.slots, take, asked)
        begun = {each.place: each.group.begun.get(each.request) for each in starts}
        begun = {place: each for place, each in begun.items() if each}
        if begun:
            self.slots = engine.call("resume", self.slots, *begun_arrays(engine, begun))
        self._read(list(new), list(begun))

    @deferred_interrupt()
    def update(self, params: ArrayTree, *, version: int, deltas: ArrayTree | None = None) -> None:
        """New weights in the middle of decoding.

        The tokens so far are kept; their keys and values are computed again, and decoding goes on.

        Args:
          params: The new parameters.
          version: Recorded with each token that they sample.
          deltas: New low-rank deltas, as many as before; None keeps those there are.
        """
        if deltas is not None:
            if count_deltas("update", deltas) != self._adapters or self.deltas is None:
                raise ValueError(f"update: deltas must be {self._adapters}, as before.")
            self.deltas = deltas
        self._check_slots()
        self.params, self.version = cast_params(self.engine.model, params), version
        board = self._board
        rows = [row for row, each in enumerate(board.rows) if each]
        self._half_filled = bool(rows)
        self._read(rows, [board.held[request] for request, n in board.seen.items() if n])

    def _read(self, rows: list[int], places: list[Place]) -> None:
        """Reads the prompts of rows and the responses in slots; with that they are filled."""
        prompts = {row: each.group.prompt for row, each in enumerate(self._board.rows) if each}
        rows = sorted(rows, key=lambda row: len(prompts[row]))
        self.slots = self.engine.read(self.params, self.slots, self.deltas, rows, places)
        self._half_filled = False

    @deferred_interrupt()
    def cancel(self, *requests: int) -> None:
        """Ends requests as they are, with finish CANCELLED; those that wait never begin.

        Raises:
          KeyError: If a request is not known, or has ended; then all go on.
        """
        self._check_slots()
        board, where = self._board, self._nobody()
        groups = {request: board.find(request) for request in requests}
        for request, group in groups.items():
            if request in board.held:
                where[board.held[request]] = True
            else:
                begun = group.begun.get(request) or nothing(request, self.engine.draw.blank)
                board.end(request, replace(begun, finish=CANCELLED))
        self._release(where, CANCELLED)
        self._harvest()

    @deferred_interrupt()
    def fork(self, request: int, new: int) -> bool:
        """A second rollout that shares what ``request`` has so far, and goes its own way from here.

        Args:
          request: One that is decoding.
          new: The id of the copy, which joins the group.

        Returns:
          False if neither the row of the request has a free slot nor another row of its device is
          empty.

        Raises:
          KeyError: If ``request`` is not decoding.
          ValueError: If ``new`` is in use, or no id.
        """
        self._check_slots()
        board = self._board
        if request not in board.held:
            raise KeyError(f"fork: request {request} is not decoding.")
        if new in board.groups or not 0 <= new < 2**31:
            raise ValueError(f"fork: request {new} is in use, or no integer from 0 to 2**31 - 1.")
        place = board.spare(request)
        if place is None:
            return False
        places = (place_array(self.engine, each) for each in (board.held[request], place))
        self.slots = self.engine.call("copy_slot", self.slots, *places, np.int32(new))
        board.fork(request, new, place)
        return True

    def stop(self) -> list[Group]:
        """Empties slots and queue, and returns every group that was not handed out.

        Groups carry what has been sampled: submit them again, here or elsewhere, and they go on
        from there. They come in the order in which they started. After an error of the device, what
        was in slots is lost, and they go on from what they were submitted with.
        """
        with deferred_interrupt():
            if self._board.held and not self._lost():
                try:
                    self._release(~self._nobody(), UNFINISHED)
                    self._harvest()
                except (MemoryError, jax.errors.JaxRuntimeError):
                    self._half_filled = True
        self._watch.tell()
        # Not before all else is done: whoever interrupts it can call it again.
        groups, self._board = self._board.rest(), self._empty()
        return groups

    def _harvest(self) -> None:
        """Takes finished rollouts out of their slots, and finished groups out of their rows."""
        board, slots = self._board, self.slots
        if board.held:
            state = (slots.active, slots.length, slots.finish, slots.spoiled)
            active, length, finish, self._spoiled = self.engine.fetch(state)
            curious, stopped = self._watch.curious, self._nobody()
            looked_at = {
                r: place for r, place in board.held.items() if curious or not active[place]
            }
            outputs = self.engine.outputs(slots, list(looked_at.values()))
            outs = dict(zip(looked_at, outputs, strict=True))
            for request, place in list(board.held.items()):
                n, why = int(length[place]), None if active[place] else int(finish[place])
                if request in outs:
                    stopped[place] = self._look(request, outs[request], n, why)
                else:
                    board.seen[request] = n
            self._release(stopped & active, STOP)
        board.clear_rows()

    def _look(self, request: int, out: Tokens, length: int, why: int | None) -> bool:
        """Takes note of what is new of a request; True if a stop string has ended it."""
        board, start = self._board, self._board.seen[request]
        group, found = board.groups[request], self._watch.stop_place(out, start, length)
        if found is not None:
            length, why = found, STOP
        elif why == LENGTH and length < group.limits[request]:
            why = UNFINISHED  # The end of its segment.
        board.seen[request] = length
        self._watch.note(group.group.id, request, out, start, length)
        if why is not None:
            board.end(request, Completion(request, cut(out, 0, length), why))
        return found is not None

    def _release(self, where: np.ndarray, finish: int) -> None:
        if where.any():
            self.slots = self.engine.call("release", self.slots, where, np.int32(finish))

    def _lost(self) -> bool:
        """Whether an error came while slots were filled, or had been given to a call."""
        return self._half_filled or any(x.is_deleted() for x in jax.tree.leaves(self.slots))

    def _check_slots(self) -> None:
        if self._lost():
            raise RuntimeError(
                "Generation: the slots were lost with an error; stop() returns all groups, which a "
                "new Generation can take."
            )

    def _empty(self) -> Board:
        return Board(self.engine.rows, self.engine.width, self.engine.shards)

    def _nobody(self) -> np.ndarray:
        return np.zeros((self.engine.rows, self.engine.width), bool)


class Watch:
    """Looks for stop strings, and tells of new tokens.

    Args:
      stop_strings: Texts that end a response.
      decode_text: ``decode_text(ids) -> str``; None without stop strings.
      on_tokens: ``on_tokens(group_id, request, start, out)``, or None.

    Raises:
      TypeError: If ``stop_strings`` is one string.
      ValueError: If one of the first two is given without the other, or a stop string is empty.
    """

    def __init__(
        self,
        stop_strings: Sequence[str],
        decode_text: Callable[[list[int]], str] | None,
        on_tokens: Callable[..., Any] | None,
    ):
        if isinstance(stop_strings, str):
            raise TypeError("Generation: stop_strings must be several; got one string.")
        if bool(stop_strings) != (decode_text is not None):
            raise ValueError("Generation: stop_strings and decode_text take each other.")
        if "" in stop_strings:
            raise ValueError("Generation: a stop string is empty.")
        self._stop_strings, self._decode_text = tuple(stop_strings), decode_text
        self._on_tokens = on_tokens
        self._news: deque[tuple] = deque()
        self.curious = bool(stop_strings) or on_tokens is not None

    def stop_place(self, out: Tokens, start: int, length: int) -> int | None:
        """After how many tokens a stop string is complete, or None; ``start`` hold none."""
        decode_text, tokens = self._decode_text, out.tokens[:length].tolist()

        def ends(n: int) -> bool:
            text = "" if decode_text is None else decode_text(tokens[:n])
            return any(stop in text for stop in self._stop_strings)

        if length == start or not ends(length):
            return None
        return next(n for n in range(start + 1, length + 1) if ends(n))

    def note(self, group: Any, request: int, out: Tokens, start: int, length: int) -> None:
        """Takes note of the tokens from one place to another, to be told."""
        if self._on_tokens is not None and length > start:
            self._news.append((group, request, start, cut(out, start, length)))

    def tell(self) -> None:
        """Tells of all that is noted, each once, even if a call fails or leads to more."""
        while self._news and self._on_tokens is not None:
            self._on_tokens(*self._news.popleft())
