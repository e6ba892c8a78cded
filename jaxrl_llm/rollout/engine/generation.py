"""``Generation``: the host's loop around an engine, between two chunks of decoding.

Methods that decode raise MemoryError if the device's memory is too small; the message names the
number of slots that fit. Methods that access slots raise RuntimeError after an error that has lost
them.
"""

from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime.interrupt import deferred_interrupt
from jaxrl_llm.core.runtime.threads import wait_for_one
from jaxrl_llm.models.protocol import cast_params
from jaxrl_llm.rollout._inputs import check_ids, check_sizes, check_tokens
from jaxrl_llm.rollout.decode import count_deltas
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.request_arrays import (
    partial_arrays,
    prompt_arrays,
    request_arrays,
    slot_array,
    taken_from,
)
from jaxrl_llm.rollout.engine.requests import (
    Completion,
    FinishedGroup,
    Group,
    NextTurn,
    check_group,
    empty_completion,
    limits_of,
    slice_tokens,
)
from jaxrl_llm.rollout.engine.scheduler import Scheduler, SlotIndex, plan_chunk
from jaxrl_llm.rollout.slots import Slots, Tokens
from jaxrl_llm.rollout.types import CANCELLED, LENGTH, STOP, UNFINISHED

# Seconds in which an answer counts as quick. Responses with slower answers decode only after the
# answer, so that the responses of a round, and with them the rounding of numbers, do not depend on
# which answer is first.
_PATIENCE = 0.05


@dataclass(eq=False)
class BetweenTurns:
    """A response between two of its turns.

    Attributes:
      completion: The response so far.
      next: What comes after the turn.
      waited: Whether others have decoded since the turn ended.
      away: Whether it has left its slot.
      slots: What was in its slot, if others use it now.
    """

    completion: Completion
    next: Future
    waited: bool = False
    away: bool = False
    slots: Slots | None = None


class Generation:
    """Decodes groups of requests in an engine's slots; iterating over it yields finished groups.

    Groups wait in a queue: first those that have begun before, then by decreasing expected length,
    otherwise in the order of submission. Between two chunks of decoding, finished responses leave
    their slots, and free slots take the next siblings of their row's prompt, or a new prompt if a
    row is empty.

    A group with ``follow`` has responses of several turns. When a turn ends, by a stop token or by
    the group's ``turn_limit``, ``follow`` is called for the next tokens while others decode; the
    response reads these and continues in its slot, with its keys and values. If the call takes long
    and a request that waits can take the slot, the response leaves it and returns later.

    Iteration ends when nothing is left to decode; more groups may be submitted at any time. If
    iteration stops early, or by Ctrl-C, nothing is lost: continue to iterate, or take the rest with
    :meth:`stop`.

    Args:
      engine: From :func:`~jaxrl_llm.rollout.make_engine`.
      params: Parameters of its model.
      key: Typed key of all requests.
      version: Recorded with each token that these parameters sample.
      deltas: Low-rank deltas with a leading axis ``[N]``; each group names one.
      segment: Maximum number of tokens that a response adds before it is paused, unfinished, until
        :meth:`stop` returns it; None for no limit.
      stop_strings: Texts that end a response; the token that completes one is its last.
      decode_text: ``decode_text(ids) -> str``, needed for ``stop_strings``.
      on_tokens: ``on_tokens(group_id, request, start, out)``, called after each chunk with the new
        tokens of each slot: arrays ``[n]``, from token ``start`` on. It may cancel and fork. For a
        fork, the tokens of its source are not reported again.

    Raises:
      TypeError: If ``stop_strings`` is one string.
      ValueError: If only one of ``stop_strings`` and ``decode_text`` is set, a stop string is
        empty, ``segment`` is not above 0 or the deltas differ in their leading axis.

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
        if segment is not None:
            check_sizes("Generation", segment=segment)
        check_ids("Generation", version=version)
        self.engine, self.key, self.version = engine, key, version
        self.params = cast_params(engine.model, params)
        self.deltas, self._num_deltas = deltas, count_deltas("Generation", deltas)
        self.segment = segment
        self._monitor = StopStringMonitor(stop_strings, decode_text, on_tokens)
        self.slots = engine.init()
        self._turns: dict[int, BetweenTurns] = {}
        self._scheduler = self._new_scheduler()
        self._nonfinite = self._no_slots()
        self._half_filled = False

    @property
    def decoding(self) -> tuple[int, ...]:
        """The requests that decode in slots."""
        return tuple(self._scheduler.active)

    @property
    def has_work(self) -> bool:
        """Whether anything is left to decode."""
        return self._scheduler.has_work

    @property
    def watching(self) -> bool:
        """Whether ``on_tokens`` is called; off, tokens stay on the device until a response ends.

        It may change between two steps. Tokens of a step without it are not reported later.
        """
        return self._monitor.watching

    @watching.setter
    def watching(self, value: bool) -> None:
        self._monitor.watching = value

    def take_finished(self) -> list[FinishedGroup]:
        """The finished groups that were not yet returned; unlike iteration, it decodes nothing."""
        finished = list(self._scheduler.finished)
        self._scheduler.finished.clear()
        return finished

    @deferred_interrupt()
    def submit(self, *groups: Group) -> None:
        """Puts groups into the queue.

        Raises:
          ValueError: If a prompt is empty, too long or holds an id outside the vocabulary, a
            request is there twice or asks for more tokens than a slot holds, or a setting may not
            vary; it names the group, and none of the groups is queued.
        """
        spec = self.engine.spec
        known: ChainMap[int, Any] = ChainMap({}, self._scheduler.groups)
        for group in groups:
            check_group(group, spec, known=known, num_deltas=self._num_deltas)
            if group.follow is not None and self.segment is not None:
                raise ValueError(
                    f"submit: group {group.id!r} has turns, which cannot be cut into segments."
                )
            if group.follow is not None and self._monitor.stops:
                raise ValueError(
                    f"submit: group {group.id!r} has turns, which stop strings would all end at "
                    "the first one; let `follow` look for them."
                )
            known.update(dict.fromkeys(group.requests))
        self._scheduler.submit((group, limits_of(group, spec.max_new_tokens)) for group in groups)

    def __iter__(self) -> Iterator[FinishedGroup]:
        while self._scheduler.finished or self._scheduler.has_work:
            if not self._scheduler.finished:
                self.step()
            while self._scheduler.finished:
                yield self._scheduler.finished.popleft()

    def step(self) -> None:
        """One round: fills free slots, decodes a chunk, collects what has finished."""
        if fresh := [between.next for between in self._turns.values() if not between.waited]:
            wait(fresh, timeout=_PATIENCE)
        if self._turns and not (self._scheduler.active or self._scheduler.has_waiting):
            wait_for_one([between.next for between in self._turns.values()])
        self.admit()
        with deferred_interrupt():
            if self._scheduler.active:
                engine = self.engine
                leave_at, compaction = plan_chunk(self._scheduler, engine.small_grid)
                self.slots = engine.call(
                    "decode",
                    self.params,
                    self.slots,
                    self.key,
                    np.int32(self.version),
                    np.int32(engine.spec.chunk),
                    np.int32(leave_at),
                    self.deltas,
                    compaction,
                )
                self._collect()
        self._monitor.report()

    @deferred_interrupt()
    def admit(self) -> None:
        """Goes on with responses whose turns came, and assigns free rows and slots to waiting ones.

        Raises what ``follow`` raised; the response then waits as before.
        """
        self._check_slots()
        follows = self._end_turns()
        started, engine = self._scheduler.start_requests(), self.engine
        if not started and not follows:
            return
        self._half_filled = True
        # A returning response has its prompt in its stored slot.
        back = {each.slot[0] for each in started if each.back is not None}
        fresh = [each for each in started if each.back is None]
        where, requests = request_arrays(engine.spec, fresh, segment=self.segment)
        stale = where.copy()
        for each in started:
            stale[each.slot] = True
        if (nonfinite := stale & self._nonfinite).any():
            self.slots = engine.call("clear_cache", self.slots, nonfinite)
        new_rows = {each.slot[0]: each.group.group for each in started if each.new_row}
        new_rows = {row: group for row, group in new_rows.items() if row not in back}
        if new_rows:
            rows, tokens, length, adapter = prompt_arrays(engine.spec, new_rows)
            self.slots = engine.call("put_prompts", self.slots, rows, tokens, length, adapter)
        for each in started:
            if each.back is not None:
                index = slot_array(engine.spec, each.slot)
                self.slots = engine.call("put_slot", self.slots, index, each.back)
        if fresh:
            self.slots = engine.call("start", self.slots, where, requests)
        # What comes back has grown since it began with these.
        partial = {each.slot: each.group.partial.get(each.request) for each in fresh}
        resumed = {slot: completion for slot, completion in partial.items() if completion}
        if resumed:
            where, out, length = partial_arrays(engine.spec, resumed)
            self.slots = engine.call("resume", self.slots, where, out, length)
        self._fill(list(new_rows), list(resumed))
        self._extend(follows)

    def _end_turns(self) -> dict[int, NextTurn]:
        """The next turns that have arrived, by request.

        Responses that nothing comes after end. Those whose answer takes long leave their slot if
        others that wait can take it.
        """
        scheduler, follows = self._scheduler, {}
        late = [r for r, x in self._turns.items() if x.waited and not (x.away or x.next.done())]
        leaving = scheduler.pick_leaving(late)
        for request, between in list(self._turns.items()):
            if not between.next.done():
                if request in leaving:
                    spec, slot = self.engine.spec, scheduler.slots[request]
                    taken = self.engine.call("take_slot", self.slots, slot_array(spec, slot))
                    between.slots = taken_from(spec, slot, self.engine.fetch(taken))
                    between.away = True
                    scheduler.leave(request)
                between.waited = True
                continue
            following = between.next.result()
            if following is None:
                del self._turns[request]
                scheduler.end(request, between.completion)
                continue
            self._check_turn(request, between.completion, following)
            follows[request] = following
            if between.away:
                between.away = False
                scheduler.come_back(request, between.slots)
        return follows

    def _check_turn(self, request: int, completion: Completion, following: NextTurn) -> None:
        group = self._scheduler.groups[request]
        start = f"follow: what comes after {len(completion)} tokens of request {request}"
        check_tokens(start, following.tokens, self.engine.spec.vocab_size)
        if following.keep is not None and not 0 <= following.keep <= len(completion):
            raise ValueError(f"{start} cannot follow the first {following.keep} of them.")
        most = group.limits[request] - len(completion) - 1
        if not 1 <= len(following.tokens) <= most:
            raise ValueError(
                f"{start} has {len(following.tokens)} tokens; there is room for 1 to {most} and "
                "one to sample."
            )

    def _extend(self, follows: dict[int, NextTurn]) -> None:
        """Adds what comes after turns to the responses that are in slots; the others wait."""
        scheduler, turns, lengths, read_before = self._scheduler, {}, {}, {}
        for request, following in follows.items():
            if request not in scheduler.slots:
                continue
            slot, group = scheduler.slots[request], scheduler.groups[request]
            length = read = len(self._turns.pop(request).completion)
            if following.keep is not None:
                group.cut(request, length - following.keep)
                if following.keep < length and self.engine.has_states:
                    read = 0  # a state cannot go back to an earlier token
                else:
                    read = following.keep
                length = following.keep
            end = length + len(following.tokens)
            if group.group.turn_limit is not None:
                limit = min(group.limits[request], end + group.group.turn_limit)
            else:
                limit = group.limits[request]
            turns[slot], lengths[slot] = (following.tokens, limit), length
            read_before[slot] = read
            scheduler.lengths[request] = end
            scheduler.between.discard(request)
        if turns:
            self._half_filled = True
            self.slots = self.engine.extend(
                self.params, self.slots, self.deltas, turns, lengths, read_before
            )
            self._half_filled = False

    @deferred_interrupt()
    def update(self, params: ArrayTree, *, version: int, deltas: ArrayTree | None = None) -> None:
        """Sets new weights during decoding.

        The tokens so far are kept; their keys and values are recomputed, and decoding continues.
        ``version`` is recorded with each token from now on; the number of ``deltas`` must not
        change, and None keeps the old ones.

        Raises:
          ValueError: If the number of deltas changes, or ``version`` is out of range.
        """
        check_ids("update", version=version)
        if deltas is not None:
            if count_deltas("update", deltas) != self._num_deltas or self.deltas is None:
                raise ValueError(f"update: the number of deltas must stay {self._num_deltas}.")
            self.deltas = deltas
        self._check_slots()
        self.params, self.version = cast_params(self.engine.model, params), version
        scheduler = self._scheduler
        # Those that have left their slots are read again when they come back.
        for request, between in self._turns.items():
            if request not in scheduler.slots:
                partial = replace(between.completion, finish=UNFINISHED)
                scheduler.groups[request].partial[request] = partial
                between.slots = None
                scheduler.back.pop(request, None)
        rows = [row for row, group in enumerate(scheduler.rows) if group]
        self._half_filled = bool(rows)
        self._fill(
            rows, [scheduler.slots[request] for request, n in scheduler.lengths.items() if n]
        )

    def _fill(self, rows: list[int], resumed: list[SlotIndex]) -> None:
        """Reads the prompts of rows and the tokens of resumed responses.

        A prompt that several rows of a device hold is read once and copied.
        """
        groups, size = self._scheduler.rows, self.engine.spec.shard_rows
        lengths = {row: len(group.group.prompt) for row, group in enumerate(groups) if group}
        first: dict[tuple[int, int], int] = {}
        copies, new = {}, set(rows)
        for row in sorted(lengths, key=lambda row: (row in new, lengths[row], row)):
            source = first.setdefault((row // size, id(groups[row])), row)
            if row in new and source != row:
                copies[row] = source
        rows = sorted(new - set(copies), key=lambda row: (lengths[row], row))
        self.slots = self.engine.fill(self.params, self.slots, self.deltas, rows, resumed, copies)
        self._half_filled = False

    @deferred_interrupt()
    def cancel(self, *requests: int) -> None:
        """Ends requests with their tokens so far, with finish CANCELLED; waiting ones never begin.

        Raises:
          KeyError: If a request is unknown, or has ended; then none is cancelled.
        """
        self._check_slots()
        scheduler, where = self._scheduler, self._no_slots()
        groups = {request: scheduler.group_of(request) for request in requests}
        for request, group in groups.items():
            if request in scheduler.active:
                where[scheduler.slots[request]] = True
            elif request in self._turns:
                between = self._turns.pop(request)
                between.next.cancel()
                scheduler.end(request, replace(between.completion, finish=CANCELLED))
            else:
                empty = empty_completion(request, self.engine.spec.draw.blank)
                partial = group.partial.get(request) or empty
                scheduler.end(request, replace(partial, finish=CANCELLED))
        self._end_slots(where, CANCELLED)
        self._collect()

    @deferred_interrupt()
    def fork(self, request: int, new: int) -> bool:
        """A second response that shares the tokens of ``request`` so far and differs from here on.

        ``new`` is its id; it joins the group. Returns False if neither the row of the request has a
        free slot nor another row of its device is empty.

        Raises:
          KeyError: If ``request`` is not decoding.
          ValueError: If ``new`` is in use, or not a valid id.
        """
        self._check_slots()
        scheduler, spec = self._scheduler, self.engine.spec
        if request not in scheduler.active:
            raise KeyError(f"fork: request {request} is not decoding.")
        if new in scheduler.groups or not 0 <= new < 2**31:
            raise ValueError(
                f"fork: request {new} is in use, or not an integer from 0 to 2**31 - 1."
            )
        slot = scheduler.slot_for_fork(request)
        if slot is None:
            return False
        source, target = slot_array(spec, scheduler.slots[request]), slot_array(spec, slot)
        self.slots = self.engine.call("copy_slot", self.slots, source, target, np.int32(new))
        scheduler.fork(request, new, slot)
        return True

    def stop(self) -> list[Group]:
        """Empties slots and queue, and returns every group that was not yet returned.

        Groups include their tokens so far: submit them again, here or elsewhere, to continue. They
        are returned in the order in which they started. After a device error, the tokens in slots
        are lost, and groups continue from their state at submission. Groups of several turns start
        again.
        """
        with deferred_interrupt():
            if self._scheduler.active and not self._lost():
                try:
                    self._end_slots(~self._no_slots(), UNFINISHED)
                    self._collect()
                except (MemoryError, jax.errors.JaxRuntimeError):
                    self._half_filled = True
        self._monitor.report()
        # Last, so that an interrupted stop() can be called again.
        for between in self._turns.values():
            between.next.cancel()
        self._turns = {}
        groups, self._scheduler = self._scheduler.unfinished(), self._new_scheduler()
        return groups

    def _collect(self) -> None:
        """Takes finished responses out of their slots, and finished groups out of their rows."""
        scheduler, slots = self._scheduler, self.slots
        if scheduler.active:
            state = (slots.active, slots.length, slots.finish, slots.nonfinite)
            active, length, finish, self._nonfinite = self.engine.fetch(state)
            stopped, all_tokens = self._no_slots(), self._monitor.needs_tokens
            decoded = scheduler.active
            read = {r: i for r, i in decoded.items() if all_tokens or not active[i]}
            outputs = dict(zip(read, self.engine.outputs(slots, list(read.values())), strict=True))
            for request, slot in decoded.items():
                n, reason = int(length[slot]), None if active[slot] else int(finish[slot])
                if request not in outputs:
                    scheduler.lengths[request] = n
                    continue
                group, out = scheduler.groups[request], outputs[request]
                start = scheduler.lengths[request]
                stop = self._monitor.stop_length(out, start, n)
                if stop is not None:
                    n, reason = stop, STOP
                elif reason == LENGTH and n < group.limits[request] and not group.group.follow:
                    reason = UNFINISHED  # The end of its segment.
                scheduler.lengths[request] = n
                self._monitor.add(group.group.id, request, out, start, n)
                if reason is not None:
                    done = Completion(request, slice_tokens(out, 0, n), reason)
                    if group.group.follow is not None and reason in (STOP, LENGTH):
                        self._turns[request] = BetweenTurns(done, group.group.follow(done))
                        scheduler.between.add(request)
                    else:
                        scheduler.end(request, done)
                stopped[slot] = stop is not None
            self._end_slots(stopped & active, STOP)
        scheduler.free_rows()

    def _end_slots(self, where: np.ndarray, finish: int) -> None:
        if where.any():
            self.slots = self.engine.call("end_slots", self.slots, where, np.int32(finish))

    def _lost(self) -> bool:
        """Whether an error came while slots were being filled, or were donated to a call."""
        return self._half_filled or any(x.is_deleted() for x in jax.tree.leaves(self.slots))

    def _check_slots(self) -> None:
        if self._lost():
            raise RuntimeError(
                "Generation: the slots were lost with an error; stop() returns all groups, which a "
                "new Generation can run."
            )

    def _new_scheduler(self) -> Scheduler:
        spec = self.engine.spec
        return Scheduler(spec.rows, spec.width, spec.shards)

    def _no_slots(self) -> np.ndarray:
        return np.zeros(self.engine.spec.grid, bool)


class StopStringMonitor:
    """Searches new tokens for stop strings and reports them to a callback; see :class:`Generation`.

    ``watching`` is whether there is a callback that wants them.
    """

    def __init__(
        self,
        stop_strings: Sequence[str],
        decode_text: Callable[[list[int]], str] | None,
        on_tokens: Callable[..., Any] | None,
    ):
        if isinstance(stop_strings, str):
            raise TypeError(
                "Generation: stop_strings must be a sequence of strings; got one string."
            )
        if bool(stop_strings) != (decode_text is not None):
            raise ValueError("Generation: stop_strings and decode_text must be set together.")
        if "" in stop_strings:
            raise ValueError("Generation: a stop string is empty.")
        self._stop_strings, self._decode_text = tuple(stop_strings), decode_text
        self._on_tokens = on_tokens
        self._pending: deque[tuple[Any, int, int, Tokens]] = deque()
        self.watching = on_tokens is not None

    @property
    def stops(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop_strings)

    @property
    def needs_tokens(self) -> bool:
        """Whether it needs the tokens of all slots after each chunk."""
        return bool(self._stop_strings) or self.watching

    def stop_length(self, out: Tokens, start: int, length: int) -> int | None:
        """The length with the first stop string, or None; the first ``start`` tokens have none."""
        decode_text, tokens = self._decode_text, out.tokens[:length].tolist()

        def stops(n: int) -> bool:
            text = "" if decode_text is None else decode_text(tokens[:n])
            return any(stop in text for stop in self._stop_strings)

        if length == start or not stops(length):
            return None
        return next(n for n in range(start + 1, length + 1) if stops(n))

    def add(self, group: Any, request: int, out: Tokens, start: int, length: int) -> None:
        """Adds the tokens from ``start`` to ``length`` to the next report."""
        if self.watching and length > start:
            self._pending.append((group, request, start, slice_tokens(out, start, length)))

    def report(self) -> None:
        """Reports all added tokens, each once, even if the callback raises or adds more."""
        while self._pending and self._on_tokens is not None:
            group, request, start, out = self._pending.popleft()
            self._on_tokens(group, request, start, out)
