"""A program that stays in a sandbox and answers one message after another."""

import contextlib
import os
import select
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from jaxrl_llm.rewards.sandbox import Limits, Program, SandboxError, _engine, _Process
from jaxrl_llm.rewards.scoring import one_line

_LENGTH = struct.Struct(">Q")
_LONGEST = 1 << 16  # bytes of an answer


class ServiceEnded(Exception):
    """The program gave no answer: it ended, or was killed after the time for one."""


class Service:
    """A program in a sandbox, which ends with this object or this process.

    It reads requests from descriptor 3 and writes answers to descriptor 4, each behind its length
    in eight bytes. The code of a request may answer in its name: the caller must not trust it.

    Args:
      program: The program, without descriptors.
      limits: Limits of each of its processes; ``seconds`` counts CPU time only.

    Raises:
      SandboxError: If the sandbox cannot run here.
    """

    def __init__(self, program: Program, limits: Limits):
        engine = _engine()
        process = self._process = _Process(limits)
        self.made_by = os.getpid()
        (asked, self._ask), (self._answers, answer) = os.pipe(), os.pipe()
        program = replace(program, descriptors=(asked, answer))
        begun, ended = Future(), threading.Event()

        def live() -> None:
            # The kernel ends bubblewrap with the thread that started it, so this one stays.
            try:
                try:
                    process.start(engine, program)
                finally:
                    os.close(asked)
                    os.close(answer)
                process.wait_started()
            except BaseException as error:
                begun.set_exception(error)
            else:
                begun.set_result(None)
                ended.wait()

        numbers = (self._ask, self._answers)
        self.close = weakref.finalize(self, _close, process, numbers, ended, self.made_by)
        threading.Thread(target=live, daemon=True, name="sandbox").start()
        try:
            begun.result()
        except OSError as error:
            self.close()
            raise SandboxError(f"The sandbox cannot be started: {one_line(str(error))}.") from error
        except BaseException:
            self.close()
            raise
        for number in numbers:
            os.set_blocking(number, False)

    def ask(self, body: bytes, seconds: float) -> bytes:
        """The answer to a request; the service can be used after it only if there is one.

        Raises:
          ServiceEnded: If there is none within the seconds.
        """
        end, message = time.monotonic() + seconds, memoryview(_LENGTH.pack(len(body)) + body)
        try:
            while message:
                self._wait(end, writing=True)
                with contextlib.suppress(BlockingIOError):
                    message = message[os.write(self._ask, message) :]
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size, end))
            if size > _LONGEST:
                raise ServiceEnded(f"gave an answer of {size} bytes")
            return self._read(size, end)
        except OSError as error:
            raise ServiceEnded(f"ended ({error})") from error

    def _read(self, size: int, end: float) -> bytes:
        text = b""
        while len(text) < size:
            self._wait(end, writing=False)
            with contextlib.suppress(BlockingIOError):
                if not (more := os.read(self._answers, size - len(text))):
                    lines = self._process.result().stderr.strip().splitlines()
                    raise ServiceEnded(f"ended: {one_line(lines[-1])}" if lines else "ended")
                text += more
        return text

    def _wait(self, end: float, *, writing: bool) -> None:
        waiting = select.poll()
        number, event = (self._ask, select.POLLOUT) if writing else (self._answers, select.POLLIN)
        waiting.register(number, event)
        if not waiting.poll(max(end - time.monotonic(), 0.0) * 1000):
            raise ServiceEnded("gave no answer in time")


def _close(process: _Process, numbers: Sequence[int], ended: threading.Event, made_by: int) -> None:
    """Ends a service, unless this process is a fork of the one that has it."""
    if os.getpid() == made_by:
        process.close()
        for number in numbers:
            os.close(number)
        ended.set()
