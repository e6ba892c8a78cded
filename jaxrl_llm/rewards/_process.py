"""One worker process of a verifier pool, seen from the parent."""

import contextlib
import importlib.util
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards import _worker
from jaxrl_llm.rewards.scoring import name_of

_START_SECONDS = 120.0  # a worker may import something heavy before its first call
_END_SECONDS = 5.0  # what a process may take to end
_GRACE_SECONDS = 5.0  # what a worker may outlive a deadline if its parent is gone
_LAG_SECONDS = 1.0  # what the answer of a worker that minds the deadline itself may be late
_SMALL = 4096  # bytes that a pipe takes without a reader

Outcome = tuple[str, Any]
"""How a call ended, and its value or the reason."""


class Process:
    """One worker process.

    Attributes:
      ready, unloadable, lost: Whether it has loaded the function, cannot, or was killed.
      concurrent: Whether the function is async, so that several calls run in it at one time.
    """

    def __init__(self, function: str | bytes):
        # A fresh interpreter, never a fork: jax holds threads and locks. It is started by path,
        # without `__main__` of the parent, so a script needs no guard and jax is not imported
        # unless the function's module does.
        environment = dict(os.environ)
        environment["JAX_PLATFORMS"] = "cpu"  # a verifier must never take the accelerator
        environment[_worker.LOADING] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent; and its children end with it
        )
        self.messages: queue.SimpleQueue = queue.SimpleQueue()
        self.input: Any = self.process.stdin
        self.ready = self.unloadable = self.lost = self.concurrent = False
        self.started = time.monotonic()
        stream: Any = self.process.stdout
        messages = self.messages

        def forward() -> None:
            """Queues each message of the worker, and None when there are no more."""
            try:
                while True:
                    messages.put(_worker.read_message(stream))
            except BaseException as error:
                if not isinstance(error, EOFError | OSError | ValueError):
                    what = f"gave a value that cannot be read, for {type(error).__name__}: {error}"
                    messages.put((None, "unreadable", what))
                messages.put(None)
            finally:
                stream.close()

        threading.Thread(target=forward, daemon=True).start()
        self._send((list(sys.path), function), _START_SECONDS)

    def _send(self, message: Any, seconds: float) -> bool:
        body = pickle.dumps(message)
        # A process that is stopped reads nothing, and a full pipe would hold us for ever.
        watch = threading.Timer(seconds, self.kill) if len(body) > _SMALL else None
        try:
            if watch is not None:
                watch.daemon = True
                watch.start()
            _worker.write_body(self.input, body)
        except (OSError, ValueError):  # the process is gone, or its pipe closed
            return False
        finally:
            if watch is not None:
                watch.cancel()
        return True

    def wait_ready(self) -> str | None:
        """None once the function is loaded; otherwise why the worker cannot serve."""
        if self.ready:
            return None
        try:
            left = self.started + _START_SECONDS - time.monotonic()
            message = self.messages.get(timeout=max(left, 0.01))
        except queue.Empty:
            return f"it was not ready after {_START_SECONDS:g} s"
        if message is None:
            return f"it {self._ended()}"
        kind, payload = message
        self.ready, self.unloadable = kind == "ready", kind == "unloadable"
        self.concurrent = payload is True
        return None if self.ready else payload

    def call(self, calls: Sequence[tuple], deadline: float) -> list[Outcome]:
        """Outcomes of calls by their arguments; of one, unless the function is async.

        A kind is "value", "raised", "refused" or "late"; or, of the calls that a worker was in when
        it was lost, "hung", "crashed" or "unreadable"; or "gone" for one that had ended before.
        """
        if not self._send((deadline, _GRACE_SECONDS, list(calls)), deadline):
            return [("gone", None)] * len(calls)
        outcomes: dict[int, Outcome] = {}
        lost: Outcome = ("hung", f"gave nothing within {deadline:g} s")
        while len(outcomes) < len(calls):
            try:
                # An async call that hangs is answered for, unless it blocks the others.
                lag = _LAG_SECONDS if self.concurrent else 0.0
                message = self.messages.get(timeout=deadline + lag)
            except queue.Empty:
                break
            if message is None:
                lost = ("crashed", self._ended())
                break
            index, kind, payload = message
            if index is None:
                lost = (kind, payload)
                break
            outcomes[index] = (kind, payload)
        return [outcomes.get(n, lost) for n in range(len(calls))]

    def _ended(self) -> str:
        """What became of a process that sends no more."""
        try:
            return f"ended its process with exit status {self.process.wait(_END_SECONDS)}"
        except subprocess.TimeoutExpired:
            return "closed the connection of its process, which goes on"

    def kill(self) -> None:
        self.lost = True
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                if hasattr(os, "killpg"):
                    os.killpg(self.process.pid, signal.SIGKILL)
                else:
                    self.process.kill()
        with contextlib.suppress(OSError):
            self.input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)


def sendable(function: Callable | str) -> str | bytes:
    """What a worker needs to find the function, or a ValueError with the reason why it cannot."""
    if isinstance(function, str):
        module, colon, name = function.partition(":")
        if not (module and colon and name):
            raise ValueError(
                f"VerifierPool: a function named by a text is written 'module:name', got "
                f"{function!r}."
            )
        try:
            exists = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            exists = False
        if not exists:
            raise ValueError(f"VerifierPool: there is no module {module!r} to load {name!r} from.")
        return function
    if not callable(function):
        raise ValueError(
            "VerifierPool: function must be callable or a text 'module:name', got "
            f"{type(function).__name__}."
        )
    home = getattr(function, "__module__", None) or type(function).__module__
    reason = "it is defined in the running script or notebook"
    if home != "__main__":
        try:
            return pickle.dumps(function)
        except Exception as error:
            reason = " ".join(str(error).split())
    raise ValueError(
        f"VerifierPool: {name_of(function)} cannot be sent to another process ({reason}); define "
        "it at the top of a module and pass it, or pass 'module:name'."
    )
