"""Ends this process from outside while one call holds the interpreter.

While a regular expression backtracks for years, no other thread and no signal handler can run, so
this process cannot enforce a deadline. Another process does: this file, run as a script. It reads
lines from its standard input. A line holds a number, the seconds until the next line with this
number is due, and what is running; or the number alone, when the call has ended. Between the lines
it reads signals, one byte each, which Python writes there without the interpreter.
"""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HELD_SECONDS = 30.0
"""Seconds past its deadline for which a call may hold the interpreter before the process ends."""

_TICK = 0.5  # seconds
_PATIENCE = 5.0  # seconds to wait for a watcher that is behind; it reads at once unless stopped
_LONGEST = 300  # characters of a text, so that a line is written in one piece or not at all
_END_SECONDS = 5.0
_STOP_SECONDS = 5.0  # for which a call may hold the interpreter after a second Ctrl-C
_CONTROL = bytes(set(range(32)) - {10})  # never part of a line
_SAVED = (
    "what was saved stands, for --resume. In a process of its own, such as a VerifierPool has, "
    "such a call ends alone."
)


class Watchdog:
    """Watches calls of this process from another process, which starts with the first call.

    Time in which this process is stopped, as by Ctrl-Z or a debugger, does not count. Nor does time
    in which the whole machine is suspended.

    Example:
      >>> with Watchdog().watching(60.0) as note:
      ...     note("the first of two calls holds the interpreter")
      ...     note("the second of two calls holds the interpreter")
    """

    def __init__(self) -> None:
        self._lock, self._numbers = threading.Lock(), itertools.count(1)
        self._process: subprocess.Popen | None = None
        self._owner = 0  # the process that started the watcher; a fork has no watcher

    @contextlib.contextmanager
    def watching(self, seconds: float) -> Iterator[Callable[[str], None]]:
        """Inside, this process is ended unless the yielded function is called every ``seconds``.

        The function takes a clause on what is running, which is printed when the process is ended.
        Nothing is watched before the first call of the function.
        """
        number, ended = next(self._numbers), threading.Event()

        def note(text: str) -> None:
            with self._lock:
                if not ended.is_set():  # an abandoned call may still begin another
                    self._send([number, seconds, text[:_LONGEST]])

        try:
            yield note
        finally:
            with self._lock:
                ended.set()
                self._send([number])

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Inside, a second Ctrl-C ends this process even while a call holds the interpreter.

        This has no effect outside the main thread, or if something else listens for signals.
        """
        if os.name != "posix" or threading.current_thread() is not threading.main_thread():
            yield
            return
        with self._lock:
            self._send([0, 0.0, ""])
            process = self._process
        if process is None:
            yield
            return
        pipe: Any = process.stdin
        before = signal.set_wakeup_fd(pipe.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        try:
            yield
        finally:
            if before == -1:
                signal.set_wakeup_fd(-1)

    def _send(self, message: list[Any]) -> None:
        if os.name != "posix":
            return
        # An error here must not fail the watched call, which then goes on unwatched.
        try:
            self._write(message)
        except BlockingIOError:  # the watcher is behind, or is stopped and reads nothing
            if len(message) == 1:
                self._write_late(message)
        except OSError:  # the watcher was ended
            self._process = None
            with contextlib.suppress(OSError):
                self._write(message)

    def _write_late(self, message: list[Any]) -> None:
        """Writes the end of a call, without which the watcher would end this process later."""
        process: Any = self._process
        with contextlib.suppress(OSError):
            if select.select([], [process.stdin], [], _PATIENCE)[1]:
                self._write(message)

    def _write(self, message: list[Any]) -> None:
        if self._process is None or self._owner != os.getpid():
            if len(message) == 1:
                return
            self._process, self._owner = _start(), os.getpid()
            weakref.finalize(self, _end, self._process, self._owner)
        pipe: Any = self._process.stdin
        os.write(pipe.fileno(), json.dumps(message).encode() + b"\n")


def _start() -> subprocess.Popen:
    command = [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid())]
    # In a session of its own, so that the terminal stops or ends only its parent.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    pipe: Any = process.stdin
    os.set_blocking(pipe.fileno(), False)
    return process


def _end(process: subprocess.Popen, owner: int) -> None:
    """Closes the input of the watcher, which then ends."""
    if owner != os.getpid():
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        pipe: Any = process.stdin
        pipe.close()
        process.wait(_END_SECONDS)


SHARED = Watchdog()
"""The watchdog of this process."""


class _Due:
    """The running calls, how much longer each of them may run, and the signals that arrived."""

    def __init__(self) -> None:
        self.left: dict[int, float] = {}
        self.lines: dict[int, tuple[float, str]] = {}
        self.signals, self.stops = 0, False

    def read(self, data: bytes) -> None:
        """Reads complete lines."""
        for line in data.split(b"\n"):
            for byte in line:
                if byte in (signal.SIGINT, signal.SIGTERM):
                    self.signals += 1
                    self.stops = self.signals > 1 and byte == signal.SIGINT
            with contextlib.suppress(ValueError):  # an empty line, or a signal of a high number
                number, *message = json.loads(line.translate(None, _CONTROL))
                self.left.pop(number, None)
                if not number:  # signals are counted anew
                    self.signals, self.stops = 0, False
                elif message:
                    self.lines[number] = message[0], message[1]
                    self.left[number] = message[0]
        if self.stops:
            self.left = {n: min(x, _STOP_SECONDS) for n, x in self.left.items()}

    def late(self) -> str | None:
        """The sentence to print about an overdue call, or None."""
        for number, left in self.left.items():
            seconds, text = self.lines[number]
            if left <= 0 and self.stops:
                return f"jaxrl-llm: stopped: {text}; {_SAVED}"
            if left <= 0:
                held = f"nothing else ran for {seconds:g} s, so the process ends"
                return f"jaxrl-llm: error: {text}: {held}; {_SAVED}"
        return None


def _state(process: int) -> str:
    """The state of a process as one letter; empty if it is unknown."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        pass
    try:
        command = ["ps", "-o", "state=", "-p", str(process)]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()[:1]
    except OSError:
        return ""


def main(parent: int) -> None:
    """Reads lines until the parent closes the pipe, and ends the parent once a call is overdue."""
    due, rest, before = _Due(), b"", time.monotonic()
    while True:
        readable, _, _ = select.select([0], [], [], _TICK if due.left else None)
        now = time.monotonic()
        # More time than that passes only if the machine sleeps or this process is stopped.
        passed, before = min(now - before, 2 * _TICK), now
        for number in due.left:
            due.left[number] -= passed
        if readable:
            data = rest + os.read(0, 1 << 16)
            if data == rest:
                return
            end = data.rfind(b"\n") + 1
            if data[end:].strip(_CONTROL):  # the last line is not complete yet
                data, rest = data[:end], data[end:]
            else:
                rest = b""
            due.read(data)
        if (told := due.late()) is None:
            continue
        if _state(parent) in ("T", "t"):
            due.left = {number: due.lines[number][0] for number in due.left}
        elif os.getppid() == parent:
            if select.select([], [2], [], 1.0)[1]:  # a full pipe would block the write
                os.write(2, f"{told}\n".encode(errors="replace"))
            os.kill(parent, signal.SIGKILL)
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
