"""Calls a reward on every completion of a batch and checks what comes back."""

import asyncio
import contextvars
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

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

    done: Future = _Threads().submit(
        contextvars.copy_context().run, reward.score_batch, prompts, completions, metadata
    )
    try:
        return done.result(timeout=deadline)
    except TimeoutError:
        if done.done():  # raised by the reward itself
            raise
        raise RewardError(
            f"Reward {name_of(reward)} gave nothing for a batch of {len(prompts)} completions "
            f"within {deadline:g} s."
        ) from None


class _Threads(ThreadPoolExecutor):
    """Threads that neither the end of an event loop nor that of the program waits for."""

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
        awaited: dict[int, Awaitable[Any]] = {}
        rows = zip(prompts, completions, metadata, strict=True)
        for position, (prompt, completion, entry) in enumerate(rows):
            progress.start(position)
            try:
                value = reward(prompt, completion, entry)
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


Value = float | int | bool | Mapping[str, float]
"""What a reward returns for one completion."""

Reward = Callable[[str, str, Mapping[str, Any]], Value | Awaitable[Value]]
"""A reward: `(prompt, completion, metadata)` to a number, or to one number a name."""

_LARGEST = float(np.finfo(np.float32).max)

FAILED = type("_Failed", (), {"__repr__": lambda self: "FAILED"})()
"""Stands in a batch for a completion whose verifier hung or crashed; it scores zero."""


class Scores(NamedTuple):
    """Rewards of N completions.

    Attributes:
      rewards: float32 [N], the number that training uses.
      reward_components: one float32 [N] a name, when the reward returns a mapping; else empty.
      failed: bool [N], True for completions without a reward, since a verifier process hung or
        crashed; their numbers are zero.
    """

    rewards: np.ndarray
    reward_components: dict[str, np.ndarray]
    failed: np.ndarray

    @property
    def failures(self) -> int:
        """How many completions have no reward."""
        return int(self.failed.sum())

    def take(self, rows: np.ndarray) -> "Scores":
        """The scores of rows [M]; a row of -1 counts as failed."""
        absent = rows < 0

        def values(x: np.ndarray) -> np.ndarray:
            return np.where(absent, np.zeros((), x.dtype), x[rows])

        components = {name: values(x) for name, x in self.reward_components.items()}
        return Scores(values(self.rewards), components, self.failed[rows] | absent)


def join_scores(calls: Sequence[Scores]) -> Scores:
    """Scores of several calls as those of one.

    A call all of whose verifiers failed has no components; it counts zero in those of the others.

    Raises:
        RewardError: If calls differ in the names of their components.
    """
    answered = [call for call in calls if not call.failed.all()]
    names = answered[0].reward_components.keys() if answered else ()
    for call in answered:
        if call.reward_components.keys() != set(names):
            raise RewardError(
                f"The reward gave the names {sorted(call.reward_components)} for one prompt and "
                f"{sorted(names)} for another."
            )
    components = {
        name: np.concatenate(
            [x.reward_components.get(name, np.zeros_like(x.rewards)) for x in calls]
        )
        for name in names
    }
    rewards = np.concatenate([call.rewards for call in calls])
    return Scores(rewards, components, np.concatenate([call.failed for call in calls]))


@runtime_checkable
class BatchReward(Protocol):
    """A reward that scores a batch in one call.

    One with an attribute `patience`, such as `VerifierPool`, ends by itself whatever hangs in it.
    """

    def score_batch(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[Any]:
        """One value, or `FAILED`, a completion."""
        ...


def score(
    reward: Reward | BatchReward,
    prompts: Sequence[str],
    completions: Sequence[str],
    metadata: Sequence[Mapping[str, Any]] | None = None,
    *,
    deadline: float | None = None,
) -> Scores:
    """Rewards of a batch, each checked to be a finite number.

        rewards[n] = reward(prompts[n], completions[n], metadata[n])

    A reward that returns a mapping makes one component a name; its total is the entry "reward" if
    there is one, else the sum of the entries. Results of an async reward are awaited together. A
    `BatchReward` such as `VerifierPool` gets the batch in one call.

    Args:
      reward: Callable `(prompt, completion, metadata) -> number | mapping`, sync or async.
      prompts: N texts, as the reward should see them.
      completions: N texts.
      metadata: N mappings, usually with "answer" and "id"; None gives every call an empty one.
      deadline: Seconds that one call may take; None is a minute. Calls run in a thread, so the
        caller is freed even from a call that never ends. The call of a `BatchReward` is that of
        the batch, and None an hour; one with a `patience` uses its deadline instead.

    Raises:
      RewardError: If a call raises, outlasts the deadline, or returns None, a text, NaN, an
        infinity, or other names than the first call. The message names the prompt.
      ValueError: If the batch is empty, the lists differ in length, or deadline is not positive.

    Example:
      >>> from jaxrl_llm.rewards import score
      >>> def short(prompt, completion, metadata):
      ...     return {"short": len(completion) < 4, "right": completion == metadata["answer"]}
      >>> scores = score(short, ["2 + 2 ="] * 2, ["4", "five"], [{"answer": "4"}] * 2)
      >>> scores.rewards.tolist(), scores.reward_components["right"].tolist()
      ([2.0, 0.0], [1.0, 0.0])
    """
    if metadata is None:
        metadata = [{}] * len(prompts)
    sizes = (len(prompts), len(completions), len(metadata))
    if len(set(sizes)) != 1:
        raise ValueError(
            "score: prompts, completions and metadata must have one length, "
            f"got {sizes[0]}, {sizes[1]} and {sizes[2]}."
        )
    if not sizes[0]:
        raise ValueError("score: the batch is empty, there is nothing to score.")
    if deadline is not None and not deadline > 0:
        raise ValueError(f"score: deadline must be positive, got {deadline!r}.")
    if isinstance(reward, BatchReward):
        values = in_batch(reward, prompts, completions, metadata, deadline)
        if len(values) != len(prompts):
            raise RewardError(
                f"Reward {name_of(reward)} gave {len(values)} values for {len(prompts)} prompts."
            )
    elif callable(reward):
        values = in_thread(reward, prompts, completions, metadata, deadline)
    else:
        raise TypeError(f"score: reward must be callable, got {type(reward).__name__}.")
    return _table(reward, values, metadata)


def _show(value: Any) -> str:
    try:
        return one_line(repr(value))
    except Exception:  # a broken __repr__, or an integer too long to print
        return f"an object of type {type(value).__name__}"


def _number(value: Any) -> float | None:
    """The value as a finite float32 number, or None where it is not one."""
    if isinstance(value, str | bytes | complex) or value is None:
        return None
    if getattr(value, "shape", ()) != ():
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= _LARGEST else None


def _numbers(reward, value: Any, row: str) -> dict[str | None, float]:
    """The entries of one value, all finite; a plain number is the one entry named None."""
    named = value if isinstance(value, Mapping) else {None: value}
    if isinstance(value, Mapping) and not (value and all(isinstance(name, str) for name in value)):
        raise RewardError(
            f"Reward {name_of(reward)} gave {_show(value)} for {row}, where a mapping "
            "needs at least one name and every name is a text."
        )
    numbers: dict[str | None, float] = {}
    for name, entry in named.items():
        number = _number(entry)
        if number is None:
            where = "" if name is None else f" as {name!r}"
            raise RewardError(
                f"Reward {name_of(reward)} gave {_show(entry)}{where} for {row}, "
                "where a finite number is needed."
            )
        numbers[name] = number
    return numbers


def _table(reward, values: list[Any], metadata: Sequence[Mapping[str, Any]]) -> Scores:
    """Checks every value and lays them out by name; failed calls are zero in each."""
    components: dict[str | None, np.ndarray] = {}
    total = np.zeros(len(values), np.float32)
    failed = np.array([value is FAILED for value in values])
    for position, value in enumerate(values):
        if value is FAILED:
            continue
        row = describe(position, metadata[position])
        numbers = _numbers(reward, value, row)
        if not components:
            components = {name: np.zeros(len(values), np.float32) for name in numbers}
        elif numbers.keys() != components.keys():
            raise RewardError(
                f"Reward {name_of(reward)} gave {_kind(numbers)} for {row} "
                f"but {_kind(components)} before."
            )
        for name, number in numbers.items():
            components[name][position] = number
        row_total = _number(numbers["reward"] if "reward" in numbers else sum(numbers.values()))
        if row_total is None:
            raise RewardError(f"Reward {name_of(reward)} gave entries of no finite sum for {row}.")
        total[position] = row_total
    return Scores(total, {name: c for name, c in components.items() if name is not None}, failed)


def _kind(names: Mapping[str | None, Any]) -> str:
    return "a plain number" if None in names else f"the names {sorted(map(str, names))}"
