"""Ctrl-C between two steps instead of in the middle of one."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

_LATER = 0.05  # seconds until a dropped KeyboardInterrupt is raised again


class Interrupt:
    """Set by the first Ctrl-C or SIGTERM, to its number."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def catch_interrupt(*, notice: str = "") -> Iterator[Interrupt]:
    """Within it, the first Ctrl-C or SIGTERM only sets a flag, for the loop to stop after its step.

    A Ctrl-C after either acts as it did before. A SIGTERM does not: a job manager often sends it
    twice, to the process and to its group, and the second must not cost what the first one saves.
    One that is raised where Python drops exceptions (a callback of the garbage collector, a
    ``__del__``) is raised again. In a thread other than the main one, where Python does not deliver
    signals, nothing is caught.
    ``notice`` is what the first one prints.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number, frame):
        del frame
        if interrupt:
            return
        # First: the next Ctrl-C may come at any moment, also as an answer to the notice.
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        interrupt.signal = number
        # Not print: the signal may have come in the middle of one.
        with contextlib.suppress(OSError):  # its reader may have ended with the same Ctrl-C
            os.write(2, notice.encode())

    unraisable, within = sys.unraisablehook, True

    def raise_again(dropped):
        if within and dropped.exc_type is KeyboardInterrupt:
            # Later: raised in here, it would be dropped once more.
            threading.Timer(_LATER, _send_ctrl_c).start()
        else:
            unraisable(dropped)

    for number in numbers:
        signal.signal(number, note)
    sys.unraisablehook = raise_again
    try:
        yield interrupt
    finally:
        within = False
        # A hook that was set meanwhile stays, and calls this one.
        if sys.unraisablehook is raise_again:
            sys.unraisablehook = unraisable
        for number, handler in before.items():
            signal.signal(number, handler)


def _send_ctrl_c() -> None:
    # To the process where that is possible: it wakes a main thread that waits for a lock.
    if os.name == "posix":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Within it, Ctrl-C waits for the end; then KeyboardInterrupt is raised, with all work done.

    Does nothing where the signal has another handler already, or outside the main thread.
    """
    handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if handled or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if caught:
        raise KeyboardInterrupt
