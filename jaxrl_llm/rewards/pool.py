"""Verifiers in worker processes, each call under an enforced deadline."""

import os
import queue
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.core import checks
from jaxrl_llm.core.compose import in_full
from jaxrl_llm.rewards import _worker
from jaxrl_llm.rewards._process import Outcome, Process, sendable
from jaxrl_llm.rewards.answers import answer_of, row_check
from jaxrl_llm.rewards.scoring import (
    Failure,
    Reward,
    RewardError,
    VerifierWarning,
    describe,
    name_of,
)

_WARNED_ONE_BY_ONE = 5
_PATIENCE_SECONDS = 600.0
_TOGETHER = 32  # calls of an async function in one worker
_LOST = ("hung", "crashed", "unreadable")  # ends of the worker rather than of a call
_RETRY_SECONDS = 1.0  # between workers that die while they start


def _clause(kind: str, payload: str) -> str:
    """A failure in words, after the name of the function."""
    return f"raised {payload}" if kind == "raised" else payload


class _Silence:
    """Seconds since the last value, on a clock that stops between calls; entered to make one."""

    def __init__(self) -> None:
        self._lock, self._asking = threading.Lock(), 0
        self._heard = self._left = time.monotonic()

    def __enter__(self) -> None:
        with self._lock:
            if not self._asking:
                self._heard += time.monotonic() - self._left
            self._asking += 1

    def __exit__(self, *_) -> None:
        with self._lock:
            self._asking -= 1
            self._left = time.monotonic()

    def end(self) -> None:
        """A call gave a value."""
        self._heard = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._heard


class VerifierPool:
    """Runs a reward in worker processes with a hard deadline per call.

    If a call exceeds the deadline, its worker is killed and replaced. A hang, an exception or the
    death of the process is a failed call: `on_error` of `score` decides its reward. Failed calls
    are counted and reported by warnings: one by one at first, then one line per batch. The training
    run continues until no call has returned a value for `patience` seconds of scoring. A
    replacement worker that dies during its start is replaced again. A non-finite value is an error
    of the function rather than of a completion, and raises in `score` as usual. So does a
    `RewardError` of the function: a row that it cannot grade, whatever the completion.

    Workers end with this process, however it ends, together with the programs that a call has
    started; a call that holds the interpreter then ends on its own, a few seconds after its
    deadline. A worker has a few environment variables, such as PATH, HOME, LANG, PYTHONPATH and
    those of jax, and no keys. Replies are plain data and never executed; an invalid reply fails
    that call and replaces its worker. The pool is not a sandbox: a call can read and write whatever
    this user can, and code that runs in a worker may alter the reward of its own call. Run code
    that a model wrote in the sandbox of :func:`run_python`, as `code_stdio` and `code_asserts` do.

    Args:
      function: A reward that another process can import: a function of a module, a picklable
        object, or a text "module:name". Its module may create the pool itself, as a config file
        does; inside the workers that pool has no workers. A worker runs up to 32 calls of an async
        function at one time; if one blocks or crashes the worker, the unfinished ones are run
        again, one at a time.
      workers: Number of processes.
      deadline: Seconds that one call may take, without the start of a worker.
      patience: Seconds of scoring without any value after which it raises `RewardError`, so that
        the caller never hangs. At least the deadline; None is ten minutes, or two deadlines if that
        is longer.
      environment: Names of further environment variables to pass to the workers if they are set,
        such as the key of a judge.

    Raises:
      ValueError: If the function cannot be sent to or loaded in a worker, workers, deadline or
        patience is not positive, patience is below the deadline, or environment is not names.
      RewardError: In scoring, if patience runs out, if a replacement worker cannot be started or
        cannot load the function, or if the function raises it.

    Example:
      >>> from jaxrl_llm.rewards import VerifierPool, score
      >>> with VerifierPool("jaxrl_llm.rewards:last_integer", workers=1) as pool:
      ...     score(pool, ["2 + 2 ="] * 2, ["4", "five"], [{"answer": "4"}] * 2).rewards.tolist()
      [1.0, 0.0]
    """

    def __init__(
        self,
        function: Reward | str,
        *,
        workers: int = 2,
        deadline: float = 5.0,
        patience: float | None = None,
        environment: Sequence[str] = (),
    ):
        checks.check_count("VerifierPool", workers=workers)
        checks.check_seconds("VerifierPool", deadline=deadline, patience=patience)
        if patience is None:
            patience = max(_PATIENCE_SECONDS, 2 * deadline)
        if patience < deadline:
            raise ValueError(
                f"VerifierPool: patience must not be below the deadline, got {patience:g} s and a "
                f"deadline of {deadline:g} s."
            )
        names = not isinstance(environment, str | bytes | Mapping)
        if not (names and all(isinstance(name, str) for name in environment)):
            raise ValueError(
                "VerifierPool: environment must be a sequence of names of variables, got "
                f"{type(environment).__name__}."
            )
        self._environment = frozenset(environment)
        self.workers, self.deadline, self.patience = workers, float(deadline), float(patience)
        self.failures, self._silence, self._concurrent = 0, _Silence(), False
        self.__qualname__ = function if isinstance(function, str) else name_of(function)
        self.in_full = function if isinstance(function, str) else in_full(function)
        self.answer, self.check_row = answer_of(function), row_check(function)
        self.weights_of_sum = getattr(function, "weights_of_sum", None)
        self.told_absent = set[str]()  # terms of the sum that a warning has named
        self._function = sendable(function)
        self._processes: set[Process] = set()
        self._idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
        self._lock = threading.Lock()

        def kill_all(processes: set[Process]) -> None:
            for process in list(processes):
                process.kill()
            processes.clear()

        # Also runs when the interpreter ends, so no worker outlives a script that forgot close().
        self._finalizer = weakref.finalize(self, kill_all, self._processes)
        if os.environ.get(_worker.LOADING):
            # A worker imports the module of its function, and that module makes this pool: it must
            # not start workers in turn.
            self.close()
            return
        started = [self._start() for _ in range(workers)]
        trouble = next((why for process in started if (why := process.wait_ready())), None)
        if trouble is not None:
            self.close()
            raise ValueError(
                f"VerifierPool: a worker process could not load {self.__qualname__}: {trouble}."
            )
        self._concurrent = started[0].concurrent
        for process in started:
            self._idle.put(process)

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stops the workers; the pool cannot be used afterwards. May be called twice."""
        self._finalizer()

    def __call__(self, prompt: str, completion: str, metadata: Mapping[str, Any]) -> Any:
        """Scores one completion; a hang or crash is 0.0."""
        (value,) = self.score_batch([prompt], [completion], [metadata])
        return 0.0 if isinstance(value, Failure) else value

    def score_batch(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[Any]:
        """The function's values in the order of the input, a `Failure` where a call failed."""
        rows = list(zip(prompts, completions, metadata, strict=True))
        outcomes: list[Outcome] = [("crashed", "was not run")] * len(rows)
        todo: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        # Calls of an async function run several at a time, spread over all workers.
        together = min(_TOGETHER, -(-len(rows) // self.workers)) if self._concurrent else 1
        for first in range(0, len(rows), together):
            todo.put(list(range(len(rows)))[first : first + together])
        errors: list[BaseException] = []
        stop = threading.Event()

        def drain() -> None:
            try:
                while not stop.is_set():
                    positions = todo.get_nowait()
                    ended = self._call([rows[position] for position in positions])
                    for position, (kind, payload) in zip(positions, ended, strict=True):
                        if kind in _LOST and len(positions) > 1:
                            todo.put([position])  # which of them it was is known once it runs alone
                            continue
                        outcomes[position] = kind, payload
                        if kind == "refused":
                            row = describe(position, metadata[position])
                            raise RewardError(
                                f"Verifier {self.__qualname__} cannot grade {row}: {payload}."
                            )
            except queue.Empty:
                pass
            except BaseException as error:
                errors.append(error)
                stop.set()

        threads = [
            threading.Thread(target=drain, daemon=True) for _ in range(min(self.workers, len(rows)))
        ]
        try:
            with self._silence:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    self._join(thread)
        finally:
            stop.set()  # after Ctrl-C the threads end with the call that they are in
        if errors:
            raise errors[0]
        self._warn(outcomes, metadata)
        return [
            payload if kind == "value" else Failure(_clause(kind, payload))
            for kind, payload in outcomes
        ]

    def _join(self, thread: threading.Thread) -> None:
        """Waits for a thread as long as the pool shows signs of life."""
        alive = True
        while alive:
            thread.join(timeout=min(self.patience, 1.0))
            alive = thread.is_alive()
            if self._silence.seconds() > self.patience:
                living = sum(p.process.poll() is None for p in list(self._processes))
                raise RewardError(
                    f"VerifierPool: {self.__qualname__} returned no value for "
                    f"{self.patience:g} s, though a call may take {self.deadline:g} s; "
                    f"{living} of {self.workers} workers are alive."
                )

    def _start(self) -> Process:
        process = Process(self._function, self._environment)
        with self._lock:
            if self._finalizer.alive:
                self._processes.add(process)
                return process
        process.kill()
        raise RuntimeError("VerifierPool: the pool is closed.")

    def _call(self, calls: list[tuple]) -> list[Outcome]:
        """Calls on an idle worker, which goes back to the idle ones or is replaced."""
        if not self._finalizer.alive:
            raise RuntimeError("VerifierPool: the pool is closed.")
        process = self._idle.get()
        try:
            process, outcomes = self._ask(process, calls)
        except BaseException as error:
            # Even a dead one: the next call replaces it, and no call waits for ever.
            self._idle.put(process)
            if not isinstance(error, OSError):
                raise
            raise RewardError(
                f"VerifierPool: no worker can be started for {self.__qualname__}: "
                f"{(error.strerror or str(error)).lower()}."
            ) from error
        self._idle.put(process)
        if any(kind == "value" for kind, _ in outcomes):
            self._silence.end()
        return outcomes

    def _ask(self, process: Process, calls: list[tuple]) -> tuple[Process, list[Outcome]]:
        """The outcomes of calls, and the process that the next ones may have."""
        if process.lost:
            process = self._start()
        for _ in range(2):
            while (trouble := process.wait_ready()) is not None:
                self._discard(process)
                if process.unloadable or self._silence.seconds() > self.patience:
                    raise RewardError(
                        f"VerifierPool: a worker in place of another could not load "
                        f"{self.__qualname__}: {trouble}."
                    )
                time.sleep(_RETRY_SECONDS)
                process = self._start()
            outcomes = process.call(calls, self.deadline)
            kinds = {kind for kind, _ in outcomes}
            if kinds <= {"value", "raised", "refused"}:
                return process, outcomes
            # Also after a call that was cancelled: it may have left something that goes on.
            self._discard(process)
            process = self._start()
            # The death of an idle worker is not due to these completions: ask the next.
            if kinds != {"gone"}:
                return process, outcomes
        return process, [("crashed", "lost its process twice")] * len(calls)

    def _discard(self, process: Process) -> None:
        process.kill()
        with self._lock:
            self._processes.discard(process)

    def _warn(self, outcomes: list[Outcome], metadata: Sequence[Mapping[str, Any]]) -> None:
        failed = [n for n, (kind, _) in enumerate(outcomes) if kind != "value"]
        alone = failed[: max(0, _WARNED_ONE_BY_ONE - self.failures)]
        self.failures += len(failed)
        for position in alone:
            kind, payload = outcomes[position]
            warnings.warn(
                f"Verifier {self.__qualname__} {_clause(kind, payload)} on "
                f"{describe(position, metadata[position])}.",
                VerifierWarning,
                stacklevel=3,
            )
        rest = Counter(outcomes[n][0] for n in failed[len(alone) :])
        if rest:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(rest.items()))
            warnings.warn(
                f"Verifier {self.__qualname__} failed on {rest.total()} more of {len(outcomes)} "
                f"completions ({kinds}), {self.failures} so far.",
                VerifierWarning,
                stacklevel=3,
            )
