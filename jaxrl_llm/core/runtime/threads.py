"""Threads for calls that may hang; the program ends without waiting for them."""

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
_COMPILES_WITHIN = 60.0  # seconds
# Held while a program starts on devices that several threads use. Programs with collectives that
# started in different orders on different devices would wait for each other forever.
LAUNCHING = threading.Lock()
# Python runs a signal handler between two instructions of its main thread. A signal that arrives
# just as an endless wait begins, or in another thread, would be handled only after the wait. So
# waits here end after this time and begin again.
SIGNAL_SECONDS = 1.0


class Worker:
    """A daemon thread that runs calls one after the other; it starts with the first call.

    The end of the program waits a few seconds, and no longer, for a running call, since a call that
    computes on a device must not be cut off.

    Args:
      name: Name of the thread.

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
        """Queues a call and returns a future of its result."""
        future: Future = Future()
        self._calls.put((future, call))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """Cancels the calls that have not begun; a running call goes on."""
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
            del waiting, future, call  # frees their arrays while the thread waits for a call


def compile_aside(name: str, call: Callable[[], Any]) -> Future:
    """Runs a call that compiles a program in a thread of its own; returns a future without result.

    The end of the program waits for the call: cut off while it compiles, it may end in a crash.

    Args:
      name: Name of the thread.
      call: The call; its result is dropped, and an exception is that of the future.
    """
    future: Future = Future()

    def run() -> None:
        try:
            call()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    atexit.register(wait, [future], _COMPILES_WITHIN)
    return future


def wait_for_one(futures: Collection[Future]) -> None:
    """Waits until one of the futures is done; returns at once if there are none.

    A Ctrl-C is handled within a second, whenever it arrives.
    """
    while futures and not wait(futures, SIGNAL_SECONDS, FIRST_COMPLETED).done:
        pass


def end_within(seconds: float, code: int) -> None:
    """Ends the process with ``code`` if it still runs ``seconds`` from now; call it last.

    A normal exit waits for every thread that is not a daemon, and a thread that hangs would block
    the exit forever. Buffered output must be flushed before.
    """

    def end() -> None:
        # It does not wait for the end of the main thread, which waits for the pools' threads.
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="end", daemon=True).start()
