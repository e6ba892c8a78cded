"""Threads for calls that may hang, which the end of the program does not wait for."""

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

_PATIENCE = 5.0  # seconds
# Python runs the handler of a signal between two instructions of its main thread. One that comes
# just as a wait without end begins, or in another thread, would be heard only after it, so waits
# end here and begin again.
SIGNAL_SECONDS = 1.0


class Worker:
    """A daemon thread that runs calls one after the other; it starts with the first.

    The end of the program waits a few seconds for a call under way, since one that computes on a
    device must not be cut off, and no longer.

    Args:
      name: Of the thread.

    Example:
      >>> worker = Worker("sums")
      >>> worker.submit(lambda: 1 + 1).result()
      2
      >>> worker.close()
    """

    def __init__(self, name: str):
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._running: Future | None = None

    def submit(self, call: Callable[[], Any]) -> Future:
        """A future of what the call returns."""
        future: Future = Future()
        self._calls.put((future, call))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """Cancels the calls that have not begun; the one under way goes on."""
        with contextlib.suppress(queue.Empty):
            while (waiting := self._calls.get_nowait()) is not None:
                waiting[0].cancel()
        self._calls.put(None)
        if self._thread is not None and self._running is not None:
            atexit.register(self._thread.join, _PATIENCE)

    def _run(self) -> None:
        while (waiting := self._calls.get()) is not None:
            future, call = waiting
            if future.set_running_or_notify_cancel():
                self._running = future
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
                self._running = None
            del waiting, future, call  # nothing holds their arrays while it waits for the next


def wait_for_one(futures: Collection[Future]) -> None:
    """Waits until one of the futures is done; returns at once where there is none.

    A Ctrl-C is heard within a second, whenever it comes.
    """
    while futures and not wait(futures, SIGNAL_SECONDS, FIRST_COMPLETED).done:
        pass


def end_within(seconds: float, code: int) -> None:
    """Ends the process with a code if it goes on for so many seconds after its main thread.

    The usual end waits for every thread that is no daemon, and one that hangs would never let it.
    What is buffered must be flushed before.
    """

    def end() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="end", daemon=True).start()
