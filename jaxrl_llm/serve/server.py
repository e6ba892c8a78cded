"""``TokenServer``: one thread that owns a generation and decodes for many callers.

Callers run in other threads. They put commands into a queue, and the server's thread executes the
commands between two chunks of decoding.
"""

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.rollout import Completion, Engine, Generation, Group
from jaxrl_llm.rollout._inputs import check_ids
from jaxrl_llm.rollout.engine.requests import empty_completion, slice_tokens
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import CANCELLED, STOP
from jaxrl_llm.serve.requests import RequestError, SampleRequest, find_stop
from jaxrl_llm.train.models.teachers import ModelTeacher, TokenScores

# Requests without a seed are numbered from here, so they do not collide with small seeds.
_FIRST_NUMBER, _NUMBERS = 2**30, 2**31


class Reply(NamedTuple):
    """The result of a request.

    Attributes:
      completions: One per choice; ``request`` is the number of the choice's random stream.
      version: Version of the oldest weights that sampled one of its tokens.
    """

    completions: tuple[Completion, ...]
    version: int


OnTokens = Callable[[int, Tokens], None]


@dataclass(eq=False)
class Ticket:
    """A request in the server; ``reply`` resolves to a :class:`Reply`, or to the server's error.

    Attributes:
      request: The request.
      on_tokens: ``on_tokens(choice, out)``, called in the server's thread with new tokens.
      reply: A future of the reply.
      after: Number of updates that came before the request.
      numbers: The request number of each choice, once the request runs.
      tokens: The tokens of each choice so far, if the ticket is watched.
      ends: The lengths of choices that ended at a stop of this request.
    """

    request: SampleRequest
    on_tokens: OnTokens | None = None
    reply: Future = field(default_factory=Future)
    after: int = 0
    numbers: tuple[int, ...] = ()
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)

    @property
    def watched(self) -> bool:
        """Whether tokens of the request are needed while it decodes."""
        return bool(self.request.stop_ids or self.request.stops or self.on_tokens)


class _Update(NamedTuple):
    params: ArrayTree
    version: int | None
    at_once: bool
    done: Future


class TokenServer:
    """Serves requests with one engine, on weights that may change.

    Each request is one group of a :class:`~jaxrl_llm.rollout.Generation`, so many requests decode
    at once. A response does not depend on other requests, except for rounding: response i of a
    request with seed s is that of request number s + i under the server's key.

    Args:
      engine: From :func:`~jaxrl_llm.rollout.make_engine`; ``vary`` names options of requests.
      params: Parameters of the engine's model.
      key: Typed key of all requests.
      version: Version of these parameters.
      decode_text: ``decode_text(ids) -> str``, required for requests with stop texts.
      max_waiting: Maximum number of requests that decode, are scored or wait; more raise
        RequestError.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.serve import SampleRequest, TokenServer
      >>> model, params = jr.testing.tiny_model()
      >>> engine = jr.rollout.make_engine(
      ...     model, rows=2, width=1, prompt_length=8, max_new_tokens=4)
      >>> with TokenServer(engine, params, key=jax.random.key(0)) as server:
      ...     ticket = server.submit(SampleRequest([1, 2, 3], choices=2, max_tokens=3))
      ...     reply = ticket.reply.result()
      ...     [len(completion) for completion in reply.completions], reply.version
      ([3, 3], 0)
    """

    def __init__(
        self,
        engine: Engine,
        params: ArrayTree,
        *,
        key: Array,
        version: int = 0,
        decode_text: Callable[[list[int]], str] | None = None,
        max_waiting: int = 1024,
    ):
        self.engine, self._key, self._decode_text = engine, key, decode_text
        self._max_waiting = max_waiting
        self._shapes = _shapes(params)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}  # by group id
        self._updates: deque[_Update] = deque()
        # Updates that came, and those of them that were applied or failed.
        self._came = self._applied = 0
        self._ids, self._unseeded = itertools.count(), itertools.count()
        self._open, self._ended, self._lock = 0, False, threading.Lock()
        self._closing, self._error = False, ""
        # Held while weights and their version change, so that both are read of the same ones.
        self._changing = threading.Lock()
        self._generation = self._new_generation(params, version)
        self._teacher, self._scoring = ModelTeacher(engine.model, (), rows=1), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="token-server", daemon=True)
        self._thread.start()

    def __enter__(self) -> "TokenServer":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    @property
    def open_requests(self) -> int:
        """Number of requests that decode, are scored or wait."""
        return self._open

    @property
    def failure(self) -> str:
        """The reason that the server has stopped; empty while it runs."""
        return self._error or ("the server has been closed" if self._closing else "")

    def submit(self, request: SampleRequest, *, on_tokens: OnTokens | None = None) -> Ticket:
        """Puts a request into the queue; the ticket resolves when all choices have ended.

        Raises:
          RequestError: If too many requests wait, the server has closed, or the request has stop
            texts and the server no ``decode_text``.
        """
        if request.stops and self._decode_text is None:
            raise RequestError("The request: stop texts are not served: this server has no texts.")
        ticket = Ticket(request, on_tokens)
        ticket.reply.set_running_or_notify_cancel()  # From now on only the server resolves it.
        with self._lock:
            self._admit()
            self._commands.put(lambda: self._take_ticket(ticket))
        return ticket

    def _admit(self) -> None:
        """Counts a request, under the lock; raises RequestError if it cannot be served."""
        if self._ended or self._closing:
            raise RequestError(f"Nothing is served: {self.failure}.", 503)
        if self._open >= self._max_waiting:
            raise RequestError(f"{self._open:,} requests wait already; ask again later.", 503)
        self._open += 1

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request that is scored, from before it waits for its turn.

        Raises:
          RequestError: If too many requests wait, or the server has closed.
        """
        with self._lock:
            self._admit()
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1

    def score_prompt(self, prompt: Sequence[int], top: int) -> tuple[TokenScores, int]:
        """Log-probabilities of a prompt's tokens except the first, and the top tokens per position.

        Computed in the caller's thread under the weights in use, at temperature 1, without filters.
        The second result is the version of these weights.
        """
        if len(prompt) < 2:
            empty = np.zeros((0, top))
            return TokenScores(np.zeros(0), empty, empty), self._version
        # The weights are read here, since calls that wait must not keep old ones alive.
        with self._scoring:
            teacher = self._teacher
            teacher.params, version = self._weights()
            try:
                return teacher.score([prompt[:1]], [prompt[1:]], top=top)[0], version
            finally:
                teacher.params = ()  # so that old weights are not kept alive after an update

    def _weights(self) -> tuple[ArrayTree, int]:
        with self._changing:
            return self._generation.params, self._generation.version

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request early, with its tokens so far; does nothing if it has ended."""
        self._commands.put(lambda: self._cancel(ticket))

    def update(
        self, params: ArrayTree, *, version: int | None = None, at_once: bool = False
    ) -> int:
        """Sets new weights; returns their version when they are in use.

        Earlier requests are answered with the old weights, later requests with the new weights.
        With ``at_once``, running requests continue with the new weights instead, and each token
        records the version that sampled it. Version None is the one after that in use.

        Raises:
          ValueError: If the parameters have other names or shapes than before, or ``version`` is
            out of range.
          RuntimeError: If the server has closed or fails.
        """
        if _shapes(params) != self._shapes:
            raise ValueError("update: the parameters have other names or shapes than before.")
        if version is not None:
            check_ids("update", version=version)
        update = _Update(params, version, at_once, Future())
        with self._lock:
            if self._ended or self._closing:
                raise RuntimeError(f"update: {self.failure}.")
            self._commands.put(lambda: self._take_update(update))
        return update.done.result()

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread after the current chunk and cancels requests that decode or wait.

        A signal handler may call this with ``wait=False``.
        """
        self._closing = True
        self._commands.put(lambda: None)
        if wait:
            self._thread.join()

    # The methods below run only in the server's thread.

    def _new_generation(self, params: ArrayTree, version: int) -> Generation:
        self._version = version
        return Generation(
            self.engine, params, key=self._key, version=version, on_tokens=self._watch
        )

    def _run(self) -> None:
        while not (self._closing or self._error):
            try:
                self._take_commands()
                self._advance()
            except Exception as error:
                self._recover(error)
        self._end()

    def _take_commands(self) -> None:
        """Executes queued commands; waits for one if there is nothing else to do."""
        block = not (self._generation.has_work or self._waiting or self._updates)
        while True:
            try:
                command = self._commands.get(block=block)
            except Empty:
                return
            command()
            block = False

    def _take_ticket(self, ticket: Ticket) -> None:
        ticket.after = self._came
        self._waiting.append(ticket)

    def _take_update(self, update: _Update) -> None:
        self._came += 1
        self._updates.append(update)

    def _advance(self) -> None:
        """Starts requests, sets new weights, decodes one chunk, and replies."""
        generation = self._generation
        self._start()
        while self._updates and (self._updates[0].at_once or not self._has_older()):
            update = self._updates[0]
            # Of all requests at once, only here it is known which version is in use.
            version = (self._version + 1) % 2**31 if update.version is None else update.version
            with self._changing:
                self._set_weights(update.params, version)
            self._version = version
            self._applied += 1
            self._updates.popleft().done.set_result(version)
            self._start()
        if generation.has_work:
            generation.watching = any(ticket.watched for ticket in self._running.values())
            generation.step()
        self._settle()

    def _set_weights(self, params: ArrayTree, version: int) -> None:
        """New weights, or the old ones with an error: the caller of the update hears of it."""
        generation = self._generation
        before = generation.params, generation.version
        try:
            generation.update(params, version=version)
        except BaseException:
            generation.params, generation.version = before
            raise

    def _has_older(self) -> bool:
        """Whether requests that came before the next update have not been answered."""
        return bool(self._running) or any(x.after <= self._applied for x in self._waiting)

    def _start(self) -> None:
        """Submits waiting requests in order; a request whose numbers are in use keeps waiting.

        So does a request that came after an update that was not yet applied.
        """
        used = {number for ticket in self._running.values() for number in ticket.numbers}
        for _ in range(len(self._waiting)):
            ticket = self._waiting.popleft()
            request = ticket.request
            if ticket.after > self._applied:
                self._waiting.append(ticket)
                continue
            if request.seed is None:
                free = (_FIRST_NUMBER + i % (_NUMBERS - _FIRST_NUMBER) for i in self._unseeded)
                numbers = tuple(
                    itertools.islice((n for n in free if n not in used), request.choices)
                )
            else:
                numbers = tuple(range(request.seed, request.seed + request.choices))
            if used.isdisjoint(numbers):
                self._submit(ticket, numbers)
            else:
                self._waiting.append(ticket)
            used.update(numbers)  # Waiting requests count too, so they stay in order.

    def _submit(self, ticket: Ticket, numbers: tuple[int, ...]) -> None:
        request, name = ticket.request, next(self._ids)
        # All groups have the same expected length, so they start in order of arrival.
        group = Group(
            name,
            request.prompt,
            numbers,
            max_new_tokens=request.max_tokens,
            expected=0.0,
            settings=request.settings,
        )
        try:
            self._generation.submit(group)
        except (TypeError, ValueError) as error:
            self._resolve(ticket, RequestError(str(error)))
            return
        ticket.numbers, self._running[name] = numbers, ticket

    def _watch(self, name: int, number: int, start: int, out: Tokens) -> None:
        """Ends a choice at a stop of its request, and passes new tokens to the listener."""
        ticket = self._running.get(name)
        if ticket is None or not ticket.watched:
            return
        choice = ticket.numbers.index(number)
        if choice in ticket.ends:
            return
        try:
            tokens = ticket.tokens.setdefault(choice, [])
            tokens += out.tokens.tolist()
            length = self._stop_length(ticket.request, tokens, start)
            if length is not None:
                ticket.ends[choice], out = length, slice_tokens(out, 0, length - start)
                self._cancel_number(number)
            if ticket.on_tokens is not None:
                ticket.on_tokens(choice, out)
        except Exception as error:  # from the caller's functions: only this request fails
            del self._running[name]
            self._resolve(ticket, error)
            for each in ticket.numbers:
                self._cancel_number(each)

    def _stop_length(self, request: SampleRequest, tokens: list[int], start: int) -> int | None:
        """The length at which a stop of the request ends a response, or None."""
        least = request.least  # which a stop comes after

        def text_of(n: int) -> str:
            return "" if self._decode_text is None else self._decode_text(tokens[:n])

        behind = len(text_of(least).rstrip("\ufffd")) if least and request.stops else 0

        def has_text(n: int) -> bool:
            return find_stop(text_of(n), request.stops, behind) is not None

        texts = bool(request.stops) and has_text(len(tokens))
        ends = range(max(start, least) + 1, len(tokens) + 1)
        return next(
            (n for n in ends if tokens[n - 1] in request.stop_ids or (texts and has_text(n))), None
        )

    def _cancel_number(self, number: int) -> None:
        with contextlib.suppress(KeyError):  # It has ended.
            self._generation.cancel(number)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            blank = empty_completion(-1, self.engine.spec.draw.blank)
            empty = (replace(blank, finish=CANCELLED),) * ticket.request.choices
            self._resolve(ticket, Reply(empty, self._version))
        elif not ticket.reply.done():
            for number in ticket.numbers:
                self._cancel_number(number)

    def _settle(self) -> None:
        """Replies to requests whose choices have all ended."""
        for done in self._generation.take_finished():
            ticket = self._running.pop(done.id, None)
            if ticket is None:
                continue
            ends = ticket.ends  # by stops of this request
            completions = tuple(
                each
                if choice not in ends
                else Completion(each.request, slice_tokens(each.out, 0, ends[choice]), STOP)
                for choice, each in enumerate(done.completions)
            )
            versions = [int(each.out.version.min()) for each in completions if len(each)]
            self._resolve(ticket, Reply(completions, min(versions, default=self._version)))

    def _resolve(self, ticket: Ticket, result: Reply | Exception) -> None:
        with self._lock:
            self._open -= 1
        if isinstance(result, Reply):
            ticket.reply.set_result(result)
        else:
            ticket.reply.set_exception(result)

    def _recover(self, error: Exception) -> None:
        """After an engine error, fails the running requests and updates, and makes new slots."""
        text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        message = f"the engine failed: {text}"
        for name in list(self._running):
            self._resolve(self._running.pop(name), RequestError(f"{message}.", 500))
        while self._updates:
            self._updates.popleft().done.set_exception(RuntimeError(f"update: {message}."))
        self._applied = self._came
        before, self._generation.slots = self._generation, None  # type: ignore[assignment]
        try:
            self._generation = self._new_generation(before.params, before.version)
        except Exception:
            self._error = message

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        # From now on no caller can add a request or update, so the queue can be drained.
        while not self._commands.empty():
            self._commands.get()()
        for ticket in [*self._waiting, *self._running.values()]:
            if self._error:
                self._resolve(ticket, RequestError(f"Nothing is served: {self._error}.", 503))
            else:
                self._cancel(ticket)
        if not self._error:
            self._settle()
        for update in self._updates:
            update.done.set_exception(RuntimeError(f"update: {self.failure}."))


def _shapes(params: ArrayTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(params)
    return structure, [np.shape(x) for x in leaves]
