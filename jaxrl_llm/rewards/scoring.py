"""Calls a reward on every completion of a batch and checks its results."""

import asyncio
import contextlib
import contextvars
import inspect
import math
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.runtime import watchdog
from jaxrl_llm.core.runtime.terminal import str_or_type
from jaxrl_llm.core.runtime.watchdog import Watchdog
from jaxrl_llm.rewards._worker import where_raised
from jaxrl_llm.rewards.answers import without_options

_CALL_SECONDS, _BATCH_SECONDS = 60.0, 3600.0
_THREADS = 32  # of calls that an async reward sends to threads
_TURN_SECONDS = 0.5  # in which what is supervised is looked at once


OnError = Literal["drop", "zero", "raise"]
"""Treatment of a completion whose call failed: no reward, a reward of 0, or `RewardError`."""

ON_ERROR = get_args(OnError)


class RewardError(RuntimeError):
    """A reward raised, hung, or returned something other than a finite number."""


class VerifierWarning(UserWarning):
    """Calls of a reward hung, raised or crashed."""


@dataclass(frozen=True)
class Failure:
    """The entry of a batch for a completion whose call failed.

    Attributes:
      reason: The failure, as it follows the name of the reward: "raised KeyError: 'x'".
      error: The exception, if it was raised in this process.
    """

    reason: str = "failed"
    error: BaseException | None = field(default=None, compare=False, repr=False)


FAILED = Failure()
"""A `Failure` for no reason that is known."""


def name_of(reward: Any) -> str:
    """The name by which messages call a reward."""
    inner = without_options(reward)
    named = getattr(inner, "func", inner)  # what wraps a function is named after it
    return getattr(named, "__qualname__", None) or type(inner).__name__


# Those of verl's compute_score, and an answer where the whole row is passed: such a function would
# take one thing for another, and every reward be 0.
_OTHER_ARGUMENTS = {"data_source", "solution_str", "ground_truth", "answer"}


def check_arguments(function: str, reward: Callable) -> None:
    """Raises TypeError for a reward that does not take a prompt, a completion and the metadata."""
    try:
        # Of what is called, not of what it wraps.
        signature = inspect.signature(reward, follow_wrapped=False)
    except (TypeError, ValueError):  # of a builtin, which has none
        return
    message = (
        f"{function}: a reward is called as reward(prompt, completion, metadata), for one "
        f"completion at a time; {name_of(reward)} takes {signature}."
    )
    try:
        bound = signature.bind("", "", {})
    except TypeError as error:
        raise TypeError(message) from error
    if not _OTHER_ARGUMENTS.isdisjoint(bound.arguments):
        raise TypeError(f"{message} The answer is in metadata, the row of the data.")


def describe(position: int, metadata: Mapping[str, Any]) -> str:
    """How messages name one row of a batch."""
    identity = metadata.get("id") if isinstance(metadata, Mapping) else None
    return f"prompt {position}" if identity is None else f"prompt {position} (id {identity!r})"


def one_line(text: str) -> str:
    """A text of an error for the middle of a sentence."""
    return " ".join(text.split()).rstrip(".")[:300] or "no message"


class _Calls:
    """The calls of a batch, made in one thread and supervised by another."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.waiting: dict[int, float] = {}  # calls under way, and since when
        self.tasks: dict[int, asyncio.Task] = {}  # of awaited calls
        self.error: tuple[int, BaseException] | None = None
        self.note: Callable[[int], None] = lambda position: None  # called when a call begins
        self.last = 0  # that began
        self._loop: asyncio.AbstractEventLoop | None = None
        self._moved = time.monotonic()  # when a call last began or ended
        self._stopped = False

    def start(self, position: int) -> None:
        self.last = position
        self.waiting[position] = self._moved = time.monotonic()
        self.note(position)

    def end(self, position: int) -> None:
        self.waiting.pop(position, None)
        self._moved = time.monotonic()

    def overdue(self, deadline: float) -> list[int]:
        """Calls that outlast the deadline, in order."""
        now = time.monotonic()
        late = {n for n, since in self.waiting.copy().items() if now - since > deadline}
        if now - self._moved > deadline:  # a call that blocks the event loop lets no other begin
            late |= self.tasks.keys() - self.values.keys() - self.waiting.copy().keys()
        return sorted(late)

    async def gather(self, awaited: dict[int, Awaitable[Any]], *, stop_on_error: bool) -> None:
        """Awaits all; only an error that ends the batch ends the others."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(_Threads())

        async def one(position: int, value: Awaitable[Any]) -> None:
            if self._stopped or position in self.values:
                _close(value)
                return
            self.start(position)
            try:
                result = await value
            except BaseException as error:
                if stop_on_error or isinstance(error, RewardError):
                    self.error = self.error or (position, error)
                text = one_line(str_or_type(error)) + where_raised(error)
                result = Failure(f"raised {type(error).__name__}: {text}", error)
            self.values.setdefault(position, result)
            self.end(position)

        self.tasks = {n: asyncio.ensure_future(one(n, value)) for n, value in awaited.items()}
        await asyncio.wait(self.tasks.values())

    def abandon(self, position: int, failure: Failure) -> None:
        """Gives up an awaited call, which may or may not heed that it is cancelled."""
        self.values.setdefault(position, failure)
        self._cancel([position])

    def stop(self) -> None:
        """Cancels every awaited call that is under way."""
        self._stopped = True
        self._cancel(self.tasks)

    def _cancel(self, positions: Sequence[int] | Mapping[int, Any]) -> None:
        for position in positions:
            if self.waiting.pop(position, None) is not None and self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self.tasks[position].cancel)


def _close(value: Awaitable[Any]) -> None:
    if inspect.iscoroutine(value):
        value.close()


@contextlib.contextmanager
def _watched(
    watch: Watchdog | None, reward: Any, deadline: float
) -> Iterator[Callable[[str], None]]:
    """Inside, the process ends if nothing is noted until long after the deadline of a call.

    It yields what notes that the interpreter runs, and on what the reward is called.
    """
    if watch is None:
        yield lambda what: None
        return
    with watch.watching(deadline + watchdog.HELD_SECONDS) as note:
        yield lambda what: note(f"Reward {name_of(reward)} holds the interpreter on {what}")


def in_batch(
    reward: Any,
    prompts: Sequence[str],
    completions: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    deadline: float | None,
    watch: Watchdog | None = None,
) -> list[Any]:
    """Values of a `BatchReward`, under a deadline unless it enforces its own."""
    if has_patience(reward):
        return reward.score_batch(prompts, completions, metadata)
    deadline = _BATCH_SECONDS if deadline is None else deadline
    where = f"{len(prompts)} completions, of which the first is of {describe(0, metadata[0])}"
    end = time.monotonic() + deadline
    with _watched(watch, reward, deadline) as note:
        note(where)
        done: Future = _Threads().submit(
            contextvars.copy_context().run, reward.score_batch, prompts, completions, metadata
        )
        while (left := end - time.monotonic()) > 0 and not done.done():
            wait([done], timeout=min(left, _TURN_SECONDS))
            note(where)
    if done.done():
        return done.result()
    raise RewardError(
        f"Reward {name_of(reward)} gave nothing for a batch of {len(prompts)} completions "
        f"within {deadline:g} s."
    )


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
    *,
    stop_on_error: bool,
    watch: Watchdog | None = None,
) -> list[Any]:
    """Values of all calls, a `Failure` for an awaited call that raises or exceeds the deadline.

    A plain call that does so, and with `stop_on_error` also an awaited call, raises in the caller.
    """
    deadline = _CALL_SECONDS if deadline is None else deadline
    calls, context = _Calls(), contextvars.copy_context()

    def work() -> None:
        awaited: dict[int, Awaitable[Any]] = {}
        rows = zip(prompts, completions, metadata, strict=True)
        for position, (prompt, completion, entry) in enumerate(rows):
            calls.start(position)
            try:
                value = reward(prompt, completion, entry)
            except BaseException as error:
                calls.error = (position, error)
                for other in awaited.values():
                    _close(other)
                return
            finally:
                calls.end(position)
            if inspect.isawaitable(value):
                awaited[position] = value
            else:
                calls.values[position] = value
        if awaited:
            try:
                asyncio.run(calls.gather(awaited, stop_on_error=stop_on_error))
            except BaseException as error:
                calls.error = calls.error or (min(awaited), error)

    thread = threading.Thread(
        target=context.run, args=(work,), daemon=True, name=f"reward {name_of(reward)}"
    )
    try:
        with _watched(watch, reward, deadline) as note:

            def note_call(position: int) -> None:
                others = len(calls.waiting) - 1
                awaited = f" or one of {others} others that are awaited" if others > 0 else ""
                note(f"{describe(position, metadata[position])}{awaited}")

            calls.note = note_call
            thread.start()
            # Calls that are cancelled may refuse to end; nobody waits for them.
            while thread.is_alive() and calls.error is None and len(calls.values) < len(prompts):
                thread.join(timeout=min(deadline / 4, _TURN_SECONDS))
                note_call(calls.last)
                for late in calls.overdue(deadline) if thread.is_alive() else ():
                    if not calls.tasks or stop_on_error:
                        raise RewardError(
                            f"Reward {name_of(reward)} gave nothing for "
                            f"{describe(late, metadata[late])} within {deadline:g} s."
                        )
                    calls.abandon(late, Failure(f"gave nothing within {deadline:g} s"))
    finally:
        calls.stop()
    if calls.error is not None:
        position, error = calls.error
        raise RewardError(
            f"Reward {name_of(reward)} raised {type(error).__name__} on "
            f"{describe(position, metadata[position])}: {one_line(str_or_type(error))}"
            f"{where_raised(error)}."
        ) from error
    return [calls.values[position] for position in range(len(prompts))]


Entry = float | int | bool | str | Sequence[float] | Sequence[Sequence[float]]
"""A named value of a reward: a number, a text, a list of numbers or of lists of equal length."""

Value = float | int | bool | Mapping[str, Entry]
"""The result of a reward for one completion."""

Reward = Callable[[str, str, Mapping[str, Any]], Value | Awaitable[Value]]
"""A reward: `(prompt, completion, metadata)` to a number, or to one entry per name."""

_LARGEST = float(np.finfo(np.float32).max)


class Scores(NamedTuple):
    """Rewards of N completions.

    Attributes:
      rewards: float32 [N], the number that training uses; 0 where the call failed.
      reward_components: One float32 [N] per name if the reward returns a mapping; else empty. NaN
        where a component does not apply, 0 where the call failed.
      failed: bool [N], True for completions without a reward because their call failed: it hung,
        raised or crashed.
      zeroed: bool [N], True for completions whose call failed and whose reward is 0 by
        `on_error="zero"`; None for none.
      error: The first failure, as in "raised KeyError: 'x' on prompt 1"; empty for none.
      details: Other results of the reward, N entries per name: texts, or lists of numbers as
        float32 ``[n]`` or ``[n, m]``; None where the call failed.
    """

    rewards: np.ndarray
    reward_components: dict[str, np.ndarray]
    failed: np.ndarray
    zeroed: np.ndarray | None = None
    error: str = ""
    details: Mapping[str, tuple[Any, ...]] = {}

    @property
    def unanswered(self) -> np.ndarray:
        """Completions whose call failed, bool [N]."""
        return self.failed if self.zeroed is None else self.failed | self.zeroed

    @property
    def failures(self) -> int:
        """Number of calls that failed."""
        return int(self.unanswered.sum())

    def take(self, rows: np.ndarray) -> "Scores":
        """The scores of rows [M]; a row of -1 counts as failed."""
        absent = rows < 0

        def values(x: np.ndarray) -> np.ndarray:
            return np.where(absent, np.zeros((), x.dtype), x[rows])

        components = {name: values(x) for name, x in self.reward_components.items()}
        zeroed = None if self.zeroed is None else values(self.zeroed)
        failed = self.failed[rows] | absent
        details = {
            name: tuple(None if row < 0 else entries[row] for row in rows)
            for name, entries in self.details.items()
        }
        return Scores(values(self.rewards), components, failed, zeroed, self.error, details)


def join_scores(calls: Sequence[Scores]) -> Scores:
    """Joins the scores of several batches into one.

    A batch whose calls all failed has no names; its components are zero, and its details None.

    Raises:
        RewardError: If batches differ in the names of their components or details.
    """
    answered = [call for call in calls if not call.unanswered.all()]
    names = answered[0].reward_components.keys() if answered else ()
    detail_names = answered[0].details.keys() if answered else ()
    for call in answered:
        if call.reward_components.keys() != set(names) or call.details.keys() != set(detail_names):
            raise RewardError(
                f"The reward gave the names {sorted({*call.reward_components, *call.details})} for "
                f"one prompt and {sorted({*names, *detail_names})} for another."
            )
    details = {
        name: tuple(
            entry for call in calls for entry in call.details.get(name, (None,) * len(call.rewards))
        )
        for name in detail_names
    }
    components = {
        name: np.concatenate(
            [x.reward_components.get(name, np.zeros_like(x.rewards)) for x in calls]
        )
        for name in names
    }
    rewards = np.concatenate([call.rewards for call in calls])
    failed = np.concatenate([call.failed for call in calls])
    zeroed = None
    if any(call.zeroed is not None for call in calls):
        zeroed = np.concatenate([call.unanswered & ~call.failed for call in calls])
    error = next((call.error for call in calls if call.error), "")
    return Scores(rewards, components, failed, zeroed, error, details)


@runtime_checkable
class BatchReward(Protocol):
    """A reward that scores a batch in one call.

    One with an attribute `patience`, such as `VerifierPool`, enforces its own deadlines.
    """

    def score_batch(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[Any]:
        """One value, or a `Failure` such as `FAILED`, per completion."""
        ...


def has_patience(reward: Any) -> bool:
    """Whether a reward enforces its own deadlines and warns of calls that fail."""
    return isinstance(reward, BatchReward) and hasattr(reward, "patience")


def score(
    reward: Reward | BatchReward,
    prompts: Sequence[str],
    completions: Sequence[str],
    metadata: Sequence[Mapping[str, Any]] | None = None,
    *,
    deadline: float | None = None,
    on_error: OnError = "drop",
) -> Scores:
    """Rewards of a batch, each checked to be a finite number.

        rewards[n] = reward(prompts[n], completions[n], metadata[n])

    If a reward returns a mapping, each name is a component; the total is the entry "reward" if
    there is one, else the sum of the entries. An entry of NaN does not apply to that completion and
    is excluded from the sum. Texts and lists of numbers, such as the results of unit tests or the
    rewards of turns, are not part of the sum; they are in `Scores.details`. Results of an async
    reward are awaited together. A `BatchReward` such as `VerifierPool` gets the batch in one call.

    A call fails if an awaited result raises or exceeds the deadline, or if a verifier process
    hangs, raises or dies; the other calls continue, and a warning reports how many failed and why.
    A plain function that raises or hangs is an error in the code and always raises here.

    Args:
      reward: Callable `(prompt, completion, metadata) -> number | mapping`, sync or async.
      prompts: N texts, as the reward should see them.
      completions: N texts.
      metadata: N mappings, usually with "answer" and "id"; None gives every call an empty one.
      deadline: Seconds that one call may take; None is a minute. Calls run in a thread, so the
        caller does not hang on a call that never ends. For a `BatchReward` it is the time of the
        batch, and None is an hour; one with a `patience` uses its deadline instead.
      on_error: Treatment of a failed call: "drop" gives no reward, marked in `Scores.failed`;
        "zero" a reward of 0, which trains as such; "raise" raises.

    Raises:
      RewardError: If a plain call raises or exceeds the deadline; if all calls of an async reward
        fail; if one raises `RewardError`, as for a row that cannot be graded; or if one returns
        None, a text, an infinity, NaN for the total, other names than the first call, or a name
        that is a number in some calls and not in others. The message names the prompt.
      ValueError: If the batch is empty, the lists differ in length, deadline is not positive, or
        on_error is unknown.

    Example:
      >>> from jaxrl_llm.rewards import score
      >>> def short(prompt, completion, metadata):
      ...     return {"short": len(completion) < 4, "right": completion == metadata["answer"]}
      >>> scores = score(short, ["2 + 2 ="] * 2, ["4", "five"], [{"answer": "4"}] * 2)
      >>> scores.rewards.tolist(), scores.reward_components["right"].tolist()
      ([2.0, 0.0], [1.0, 0.0])
    """
    scores = grade(reward, prompts, completions, metadata, deadline=deadline, on_error=on_error)
    warn_of_absent(reward, scores.reward_components, ~scores.unanswered)
    # What has a patience decides by that how long it goes on without a value.
    if not has_patience(reward):
        check_answered([scores])
    return scores


def warn_of_absent(
    reward: Any, components: Mapping[str, np.ndarray], graded: np.ndarray
) -> dict[str, int]:
    """To how many of the graded responses each component does not apply: those where it is NaN.

    It warns of each term of a sum that does not apply to most of them: a function without
    ``return`` returns None, which a sum leaves out. A term is named once.

    Args:
      reward: The reward that made the components.
      components: float32 ``[N]`` by name.
      graded: bool ``[N]``. Where all components are NaN, something else graded the response.
    """
    columns = np.array([np.isnan(x) for x in components.values()]).reshape(-1, len(graded))
    graded = graded & ~columns.all(axis=0) if components else graded
    counts = {name: int((np.isnan(x) & graded).sum()) for name, x in components.items()}
    total, told = int(graded.sum()), getattr(reward, "told_absent", None)
    for name in getattr(reward, "weights_of_sum", None) or ():
        if 2 * counts.get(name, 0) <= total or (told is not None and name in told):
            continue
        warnings.warn(
            f"Reward {name_of(reward)}: term {name!r} did not apply to {counts[name]} of {total} "
            "responses, for which it returned None or NaN; a function without `return` returns "
            "None.",
            VerifierWarning,
            stacklevel=3,
        )
        if told is not None:
            told.add(name)
    return counts


def check_answered(batches: Sequence[Scores], where: str = "") -> None:
    """Raises RewardError, with the first failure, if every call of these batches failed."""
    if all(scores.unanswered.all() for scores in batches):
        size = sum(len(scores.failed) for scores in batches)
        error = next((scores.error for scores in batches if scores.error), "")
        first = f"; the first {error}" if error else ""
        raise RewardError(f"The reward failed on all {size} responses{where}{first}.")


def grade(
    reward: Reward | BatchReward,
    prompts: Sequence[str],
    completions: Sequence[str],
    metadata: Sequence[Mapping[str, Any]] | None = None,
    *,
    deadline: float | None = None,
    on_error: OnError = "drop",
    watch: Watchdog | None = None,
) -> Scores:
    """:func:`score` of a part of a batch, all calls of which may fail.

    ``watch`` ends the process if a call in this process holds the interpreter.
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
    checks.check_option("score", "on_error", on_error, ON_ERROR)
    if isinstance(reward, BatchReward):
        values = in_batch(reward, prompts, completions, metadata, deadline, watch)
        if len(values) != len(prompts):
            raise RewardError(
                f"Reward {name_of(reward)} gave {len(values)} values for {len(prompts)} prompts."
            )
    elif callable(reward):
        stop = on_error == "raise"
        values = in_thread(
            reward, prompts, completions, metadata, deadline, stop_on_error=stop, watch=watch
        )
    else:
        raise TypeError(f"score: reward must be callable, got {type(reward).__name__}.")
    scores = _table(reward, values, metadata, on_error)
    if scores.error and not has_patience(reward):  # a pool has warned already
        warnings.warn(
            f"Reward {name_of(reward)} failed on {scores.failures} of {len(values)} completions; "
            f"the first {scores.error}.",
            VerifierWarning,
            stacklevel=3,
        )
    return scores


def _show(value: Any) -> str:
    try:
        return one_line(repr(value))
    except Exception:  # a broken __repr__, or an integer too long to print
        return f"an object of type {type(value).__name__}"


def _number(value: Any) -> float | None:
    """The value as a float32 number, finite or NaN, or None where it is not one."""
    if isinstance(value, str | bytes | complex) or value is None:
        return None
    if getattr(value, "shape", ()) != ():
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isnan(number) or abs(number) <= _LARGEST else None


def _entries(reward, value: Any, row: str) -> tuple[dict[str | None, float], dict[str, Any]]:
    """The numbers and the details of one value; a plain number is the one entry named None.

    They are finite, but for NaN in a mapping where a number does not apply.
    """
    named = value if isinstance(value, Mapping) else {None: value}
    if isinstance(value, Mapping) and not (value and all(isinstance(name, str) for name in value)):
        raise RewardError(
            f"Reward {name_of(reward)} gave {_show(value)} for {row}, where a mapping "
            "needs at least one name and every name is a text."
        )
    numbers: dict[str | None, float] = {}
    details: dict[str, Any] = {}
    for name, entry in named.items():
        number = _number(entry)
        if name not in (None, "reward") and (detail := _detail(entry)) is not None:
            details[name] = detail
            continue
        if number is None or (math.isnan(number) and name in (None, "reward")):
            where = "" if name is None else f" as {name!r}"
            kind = "" if name in (None, "reward") else ", a text or a list of such numbers"
            raise RewardError(
                f"Reward {name_of(reward)} gave {_show(entry)}{where} for {row}, "
                f"where a finite number{kind} is needed for this one completion."
            )
        numbers[name] = number
    return numbers, details


def split_numbers(reward, value: Any, row: str) -> tuple[float, dict[str, float]]:
    """What a reward returned, as the number that trains and the finite other entries.

    Example:
      >>> from jaxrl_llm.rewards.scoring import split_numbers
      >>> split_numbers(len, {"right": 1.0, "short": 0.5, "rule": "b"}, "a row")
      (1.5, {'right': 1.0, 'short': 0.5})

    Raises:
      RewardError: If there is no finite number; the message names the ``row``.
    """
    numbers, _ = _entries(reward, value, row)
    others = {k: v for k, v in numbers.items() if k and k != "reward" and not math.isnan(v)}
    return _total(reward, numbers, row), others


def _detail(entry: Any) -> str | np.ndarray | None:
    """A text as it is, a list of numbers as float32 ``[n]`` or ``[n, m]``; None for others."""
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, Sequence) and not getattr(entry, "shape", ()):
        return None
    try:
        array = np.asarray(entry)
    except (TypeError, ValueError):  # lists of different lengths
        return None
    if array.dtype.kind not in "biuf" or array.ndim not in (1, 2):
        return None
    array = array.astype(np.float32)
    return array if np.isfinite(array).all() else None


def _total(reward, numbers: Mapping[str | None, float], row: str) -> float:
    """The entry "reward", or the sum of the entries that apply."""
    if "reward" in numbers:
        return numbers["reward"]
    if not numbers:
        raise RewardError(
            f"Reward {name_of(reward)} gave no number for {row}; an entry 'reward' must say what "
            "the completion is worth."
        )
    apply = [number for number in numbers.values() if not math.isnan(number)]
    if not apply:
        raise RewardError(
            f"Reward {name_of(reward)} gave NaN in every entry for {row}; where none applies, an "
            "entry 'reward' must say what the completion is worth."
        )
    total = _number(sum(apply))
    if total is None:
        raise RewardError(f"Reward {name_of(reward)} gave entries of no finite sum for {row}.")
    return total


def _table(
    reward, values: list[Any], metadata: Sequence[Mapping[str, Any]], on_error: OnError
) -> Scores:
    """Checks every value and lays them out by name; failed calls are zero in each."""
    components: dict[str | None, np.ndarray] = {}
    details: dict[str, list[Any]] = {}
    rewards, error = np.zeros(len(values), np.float32), ""
    failed = np.array([isinstance(value, Failure) for value in values])
    for position, value in enumerate(values):
        row = describe(position, metadata[position])
        if isinstance(value, Failure):
            clause = f"{value.reason} on {row}"
            if on_error == "raise":
                raise RewardError(f"Reward {name_of(reward)} {clause}.") from value.error
            error = error or clause
            continue
        try:
            numbers, row_details = _entries(reward, value, row)
        except RewardError:
            raise
        except Exception as fault:  # of the value itself, such as a broken __float__
            raise RewardError(
                f"Reward {name_of(reward)} gave for {row} a {type(value).__name__} that cannot be "
                f"read: {type(fault).__name__}: {one_line(str_or_type(fault))}."
            ) from fault
        if not components and not details:
            components = {name: np.zeros(len(values), np.float32) for name in numbers}
            details = {name: [None] * len(values) for name in row_details}
        elif numbers.keys() | row_details.keys() != components.keys() | details.keys():
            raise RewardError(
                f"Reward {name_of(reward)} gave {_kind({**numbers, **row_details})} for {row} "
                f"but {_kind({**components, **details})} before."
            )
        elif changed := numbers.keys() ^ components.keys():
            raise RewardError(
                f"Reward {name_of(reward)} gave a number as {min(map(str, changed))!r} for some "
                f"completions, and a text or a list for others, of which one is {row}."
            )
        for name, number in numbers.items():
            components[name][position] = number
        for name, detail in row_details.items():
            details[name][position] = detail
        rewards[position] = _total(reward, numbers, row)
    named = {name: c for name, c in components.items() if name is not None}
    named_details = {name: tuple(entries) for name, entries in details.items()}
    zeroed = failed if on_error == "zero" else None
    dropped = failed if zeroed is None else np.zeros_like(failed)
    return Scores(rewards, named, dropped, zeroed, error, named_details)


def _kind(names: Mapping[str | None, Any]) -> str:
    return "a plain number" if None in names else f"the names {sorted(map(str, names))}"
