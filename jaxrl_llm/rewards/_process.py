"""One worker process of a verifier pool, seen from the parent.

What the worker writes is not trusted: the code of a call may write in its name. A reply is JSON of
a bounded length; it counts if it has the number of the request under way and the shape of a reply,
and otherwise costs that call and the worker.
"""

import contextlib
import importlib.util
import json
import os
import pickle
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.rewards import _worker
from jaxrl_llm.rewards.scoring import Failure, name_of

_START_SECONDS = 120.0  # a worker may import something heavy before its first call
_END_SECONDS = 5.0  # what a process may take to end
_GRACE_SECONDS = 5.0  # what a worker may outlive a deadline if its parent is gone
_LAG_SECONDS = 1.0  # what the answer of a worker that minds the deadline itself may be late
_SMALL = 4096  # bytes that a pipe takes without a reader

# The environment variables that a worker has, by name and by how names begin.
_VARIABLES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP"),
        *("SYSTEMROOT", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("OPENBLAS_NUM_THREADS", "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUTF8"),
        *("PYTHONIOENCODING", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS"),
    )
)
_PREFIXES = ("LC_", "JAX_", "XLA_", "TF_CPP_")
_DTYPES = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "float128"),
        *("complex64", "complex128", "complex256"),
    )
)
_KINDS = {"value": object, "raised": str, "refused": str, "late": str}

Outcome = tuple[str, Any]
"""How a call ended, and its value or the reason."""


def decode(entry: Any) -> Any:
    """The value of an entry that `_worker.encode` made.

    Raises:
      Exception: If it did not make the entry.
    """
    if isinstance(entry, list):
        return [decode(x) for x in entry]
    if not isinstance(entry, dict):
        return entry
    ((tag, content),) = entry.items()
    if tag == "d":
        return {decode(k): decode(v) for k, v in content}
    if tag == "n":
        name, shape, data, scalar = content
        if name not in _DTYPES:
            raise ValueError(f"no array has dtype {name!r}")
        array = np.frombuffer(bytes.fromhex(data), np.dtype(name)).reshape(shape).copy()
        return array[()] if scalar else array
    make: Callable[[Any], Any] = {
        "i": lambda text: int(text, 16),
        "b": bytes.fromhex,
        "c": lambda parts: complex(parts[0], parts[1]),
        "s": lambda entries: {decode(x) for x in entries},
        "f": lambda entries: frozenset(decode(x) for x in entries),
        "t": lambda entries: tuple(decode(x) for x in entries),
        "x": Failure,
    }[tag]
    return make(content)


def _environment(names: Collection[str]) -> dict[str, str]:
    """The variables of a worker: a few that programs need, and those of these names."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in _VARIABLES or name in names or name.startswith(_PREFIXES)
    }
    # A verifier must never take the accelerator.
    return variables | {"JAX_PLATFORMS": "cpu", _worker.LOADING: "1"}


class Process:
    """One worker process.

    Args:
      function: From :func:`sendable`.
      environment: Names of the environment variables that it has beside the usual ones.

    Attributes:
      ready, unloadable, lost: Whether it has loaded the function, cannot, or was killed.
      concurrent: Whether the function is async, so that several calls run in it at one time.
    """

    def __init__(self, function: str | bytes, environment: Collection[str] = ()):
        # A fresh interpreter, never a fork: jax holds threads and locks. It is started by path,
        # without `__main__` of the parent, so a script needs no guard and jax is not imported
        # unless the function's module does.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(environment),
            start_new_session=True,  # Ctrl-C is for the parent; and its children end with it
        )
        self.messages: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        self.input: Any = self.process.stdin
        self.ready = self.unloadable = self.lost = self.concurrent = False
        self.started = time.monotonic()
        stream: Any = self.process.stdout
        messages = self.messages

        def forward() -> None:
            """Queues each message of the worker, and None when there are no more."""
            try:
                while True:
                    messages.put(_worker.read_body(stream, _worker.LONGEST))
            except (EOFError, OSError):
                messages.put(None)
            except Exception as error:  # a length that no reply has
                messages.put(error)
            finally:
                stream.close()

        threading.Thread(target=forward, daemon=True).start()
        self._request = secrets.token_hex(16)
        self._send((self._request, list(sys.path), function), _START_SECONDS)

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

    def _receive(self, seconds: float) -> tuple[int, str, Any] | None:
        """The next reply: its index, kind and payload; None if there are no more.

        Raises:
          queue.Empty: If none comes.
          ValueError: If it is not a reply to the request under way.
        """
        body = self.messages.get(timeout=seconds)
        if body is None:
            return None
        try:
            if isinstance(body, Exception):
                raise body
            request, index, kind, payload = json.loads(body)
            if request != self._request:
                raise ValueError("it does not answer the call")
            if type(index) is not int or not isinstance(kind, str):
                raise ValueError("it does not have the form of a reply")
            return index, kind, decode(payload)
        except Exception as error:
            why = " ".join(str(error).split())[:100] or type(error).__name__
            raise ValueError(f"gave a reply that cannot be read: {why}") from error

    def wait_ready(self) -> str | None:
        """None once the function is loaded; otherwise why the worker cannot serve."""
        if self.ready:
            return None
        try:
            left = self.started + _START_SECONDS - time.monotonic()
            message = self._receive(max(left, 0.01))
        except queue.Empty:
            return f"it was not ready after {_START_SECONDS:g} s"
        except ValueError as error:
            return f"it {error}"
        if message is None:
            return f"it {self._ended()}"
        _, kind, payload = message
        self.ready, self.unloadable = kind == "ready", kind == "unloadable"
        self.concurrent = payload is True
        return None if self.ready else str(payload)

    def call(self, calls: Sequence[tuple], deadline: float) -> list[Outcome]:
        """Outcomes of calls by their arguments; of one, unless the function is async.

        A kind is "value", "raised", "refused" or "late"; or, of the calls that a worker was in when
        it was lost, "hung", "crashed" or "unreadable"; or "gone" for one that had ended before.
        """
        self._request = secrets.token_hex(16)
        if not self._send((self._request, deadline, _GRACE_SECONDS, list(calls)), deadline):
            return [("gone", None)] * len(calls)
        outcomes: dict[int, Outcome] = {}
        lost: Outcome = ("hung", f"gave nothing within {deadline:g} s")
        while len(outcomes) < len(calls):
            try:
                # An async call that hangs is answered for, unless it blocks the others.
                lag = _LAG_SECONDS if self.concurrent else 0.0
                message = self._receive(deadline + lag)
                if message is None:
                    lost = ("crashed", self._ended())
                    break
                index, kind, payload = message
                expected = index in range(len(calls)) and index not in outcomes
                if not expected or not isinstance(payload, _KINDS.get(kind, ())):
                    raise ValueError("gave a reply that cannot be read: it has another form")
            except queue.Empty:
                break
            except ValueError as error:
                lost = ("unreadable", str(error))
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
                    os.kill(self.process.pid, signal.SIGSTOP)  # it starts no more
                    _worker.kill_descendants(self.process.pid)
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
