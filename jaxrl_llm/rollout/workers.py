"""Threads that run the calls of environments, each with a deadline."""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.core.runtime import watchdog
from jaxrl_llm.core.runtime.watchdog import Watchdog

# Times a deadline is checked before it passes, and seconds between two checks at the most.
_CHECKS, _CHECK_SECONDS = 20, 0.5


class DeadlineError(RuntimeError):
    """A call took longer than it may."""


@dataclass(eq=False)
class _Job:
    what: str
    call: Callable[[], Any]
    done: Future
    begun: float = math.inf


class Workers:
    """Threads that run calls, each with a deadline; a thread whose call hangs is replaced.

    Args:
      count: How many.
      seconds: The most that a call may take from when it begins.
      watch: Ends the process where a call holds the interpreter, so that no deadline is minded.
    """

    def __init__(self, count: int, seconds: float, watch: Watchdog | None = None):
        self._count, self._seconds = count, seconds
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: dict[int, _Job] = {}
        self._threads = 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._watch, self._watched = watch, contextlib.ExitStack()
        self._note: Callable[[str], None] | None = None

    def run(self, what: str, call: Callable[[], Any]) -> Future:
        """A future of what the call returns or raises: an exception is a result as well.

        ``what`` names the call where it holds the interpreter. After :meth:`close`, the future is
        cancelled at once.
        """
        job = _Job(what, call, Future())
        with self._lock:
            if self._closed.is_set():  # by a call that returned after the batch had ended
                job.done.cancel()
                return job.done
            if self._threads < self._count:
                self._begin_thread()
            if self._thread is None:
                self._thread = threading.Thread(target=self._end_late, daemon=True)
                self._thread.start()
            self._queue.put(job)
        return job.done

    def close(self) -> None:
        """Ends threads once their calls return; calls that wait are cancelled."""
        with self._lock:
            self._closed.set()
            self._tell()
        with contextlib.suppress(queue.Empty):
            while True:
                if (waiting := self._queue.get_nowait()) is not None:
                    waiting.done.cancel()
        for _ in range(self._threads):
            self._queue.put(None)

    def _tell(self) -> None:
        """Tells the watchdog that the interpreter runs, and which calls do; under the lock."""
        if self._watch is None:
            return
        if not self._running or self._closed.is_set():
            self._watched.close()
            self._note = None
            return
        if self._note is None:
            seconds = self._seconds + watchdog.HELD_SECONDS
            self._note = self._watched.enter_context(self._watch.watching(seconds))
        last, others = list(self._running.values())[-1].what, len(self._running) - 1
        more = f", or one of {others} other calls under way," if others else ""
        self._note(f"{last}{more} holds the interpreter")

    def _begin_thread(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        me = threading.get_ident()
        while (job := self._queue.get()) is not None:
            job.begun = time.monotonic()
            with self._lock:
                self._running[me] = job
                self._tell()
            try:
                result = job.call()
            except BaseException as error:
                result = error
            with self._lock:
                replaced = self._running.pop(me, None) is None
                self._tell()
            _set(job.done, result)
            if replaced:  # by another thread, when its call was late
                return

    def _end_late(self) -> None:
        while not self._closed.wait(min(self._seconds / _CHECKS, _CHECK_SECONDS)):
            now = time.monotonic()
            with self._lock:
                late = {i: x for i, x in self._running.items() if now - x.begun > self._seconds}
                for thread in late:
                    del self._running[thread]
                    self._threads -= 1
                    self._begin_thread()
                self._tell()
            for job in late.values():
                _set(job.done, DeadlineError(f"it took longer than {self._seconds:g} s"))


def _set(future: Future, result: Any) -> None:
    """Sets a result unless there is one."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)
