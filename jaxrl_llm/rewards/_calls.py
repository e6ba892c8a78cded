"""Calls of a reward, in threads, so that one that never ends does not hold its caller."""

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_CALL_SECONDS, _BATCH_SECONDS = 60.0, 3600.0
_THREADS = 32  # of calls that an async reward sends to threads


class RewardError(RuntimeError):
    """A reward raised, hung, or gave something that is not a finite number."""


def name_of(reward: Any) -> str:
    """The name by which messages call a reward."""
    inner = getattr(reward, "func", reward)  # a functools.partial is named after its function
    return getattr(inner, "__qualname__", None) or type(reward).__name__


def describe(position: int, metadata: Mapping[str, Any]) -> str:
    """How messages name one row of a batch."""
    identity = metadata.get("id") if isinstance(metadata, Mapping) else None
    return f"prompt {position}" if identity is None else f"prompt {position} (id {identity!r})"


def one_line(text: str) -> str:
    """A text of an error for the middle of a sentence."""
    return " ".join(text.split()).rstrip(".")[:300] or "no message"


class _Progress:
    """Which calls are under way and since when; written by the thread, read by the caller."""

    def __init__(self) -> None:
        self.waiting: dict[int, float] = {}
        self.values: list[Any] = []
        self.error: tuple[int, BaseException] | None = None

    def start(self, position: int) -> None:
        self.waiting[position] = time.monotonic()

    def overdue(self, deadline: float) -> int | None:
        now = time.monotonic()
        late = [n for n, since in self.waiting.copy().items() if now - since > deadline]
        return min(late) if late else None


def in_batch(
    reward: Any,
    prompts: Sequence[str],
    completions: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    deadline: float | None,
) -> list[Any]:
    """Values of a `BatchReward`, under a deadline unless it minds that itself."""
    if hasattr(reward, "patience"):
        return reward.score_batch(prompts, completions, metadata)
    deadline = _BATCH_SECONDS if deadline is None else deadline

    def whole(prompts, completions, metadata):
        return reward.score_batch(prompts, completions, metadata)

    done: Future = _Threads().submit(
        contextvars.copy_context().run, whole, prompts, completions, metadata
    )
    try:
        return done.result(timeout=deadline)
    except TimeoutError:
        if done.done():  # its own
            raise
        raise RewardError(
            f"Reward {name_of(reward)} gave nothing for a batch of {len(prompts)} completions "
            f"within {deadline:g} s."
        ) from None


class _Threads(ThreadPoolExecutor):
    """Threads that nobody waits for: neither the end of an event loop nor that of the program."""

    def __init__(self) -> None:
        super().__init__()
        self._free = threading.Semaphore(_THREADS)

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()

        def work() -> None:
            with self._free:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=work, daemon=True, name="reward").start()
        return future


def in_thread(
    reward: Callable,
    prompts: Sequence[str],
    completions: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    deadline: float | None,
) -> list[Any]:
    """Values of all calls; raises in the caller when one raises or outlasts the deadline."""
    deadline = _CALL_SECONDS if deadline is None else deadline
    progress = _Progress()
    progress.values = [None] * len(prompts)
    context = contextvars.copy_context()

    def work() -> None:
        _call_all(reward, list(zip(prompts, completions, metadata, strict=True)), progress)

    thread = threading.Thread(
        target=context.run, args=(work,), daemon=True, name=f"reward {name_of(reward)}"
    )
    thread.start()
    # After an error the others are told to end, which some may refuse.
    while thread.is_alive() and progress.error is None:
        thread.join(timeout=min(deadline / 4, 0.5))
        late = progress.overdue(deadline) if thread.is_alive() else None
        if late is not None:
            raise RewardError(
                f"Reward {name_of(reward)} gave nothing for {describe(late, metadata[late])} "
                f"within {deadline:g} s."
            )
    if progress.error is not None:
        position, error = progress.error
        raise RewardError(
            f"Reward {name_of(reward)} raised {type(error).__name__} on "
            f"{describe(position, metadata[position])}: {one_line(str(error))}."
        ) from error
    return progress.values


def _call_all(reward, rows: list[tuple], progress: _Progress) -> None:
    """Fills `progress.values`, or `progress.error` with the first call that raised."""
    awaited: dict[int, Awaitable[Any]] = {}
    for position, row in enumerate(rows):
        progress.start(position)
        try:
            value = reward(*row)
        except BaseException as error:
            progress.error = (position, error)
            for other in awaited.values():
                if inspect.iscoroutine(other):
                    other.close()
            return
        finally:
            progress.waiting.pop(position, None)
        if inspect.isawaitable(value):
            awaited[position] = value
        progress.values[position] = value
    if awaited:
        try:
            asyncio.run(_gather(awaited, progress))
        except BaseException as error:
            progress.error = progress.error or (min(awaited), error)


async def _gather(awaited: dict[int, Awaitable[Any]], progress: _Progress) -> None:
    asyncio.get_running_loop().set_default_executor(_Threads())

    async def one(position: int, value: Awaitable[Any]) -> None:
        progress.start(position)
        try:
            progress.values[position] = await value
        except BaseException as error:
            progress.error = progress.error or (position, error)
            raise  # ends the others too: the first error is the one that is told
        finally:
            progress.waiting.pop(position, None)

    await asyncio.gather(*(one(position, value) for position, value in awaited.items()))
