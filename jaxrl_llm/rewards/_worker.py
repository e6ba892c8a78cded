"""Body of a verifier process: started by path, it imports nothing of the package by itself.

A message stands behind its length in eight bytes. Requests are pickles, on the standard input: the
first holds `sys.path` and the function; each later one holds the deadline of a call, how many
seconds after it the worker may live on, and the arguments of calls: one, or several that run at one
time if the function is async. Replies are JSON, since the code of a call may write them too: the
parent executes nothing of them, and takes only those with the number of its last request, which is
random. Each call has one reply.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import inspect
import json
import os
import pickle
import queue
import secrets
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

HEADER = struct.Struct(">Q")
LONGEST = 1 << 26  # bytes of a reply
THREADS = 64
NOTE = "term "  # begins the note that `weighted_sum` adds to an exception of a term
LOADING = "JAXRL_LLM_VERIFIER_LOADING"  # in the environment of a worker until it is ready


def read_body(stream, longest: int | None = None) -> bytes:
    """The next message of a stream, as bytes.

    Raises:
      EOFError: If the other side is gone.
      ValueError: If it says that it is longer than ``longest``.
    """
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(header)
    if longest is not None and size > longest:
        raise ValueError(f"a reply of {size} bytes is longer than {longest}")
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return body


def write_body(stream, body: bytes) -> None:
    """Writes one message."""
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def encode(value):
    """A value as JSON, from which `_process.decode` makes an equal one.

    Anything with ``__array__`` becomes an array of NumPy, and what is a number only by its
    ``__float__``, as a fraction is, a float.

    Raises:
      TypeError: If it is, or holds, neither a number, a text, a list nor a mapping.
    """
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):  # a long one may not be written in decimal digits
        value = int(value)
        return value if abs(value) < 1 << 63 else {"i": hex(value)}
    if isinstance(value, list):
        return [encode(x) for x in value]
    if isinstance(value, Mapping):
        return {"d": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {"b": value.hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if hasattr(type(value), "__array__"):
        numpy = importlib.import_module("numpy")
        array = numpy.asarray(value)
        if array.dtype.kind in "biufc" or array.dtype.name == "bfloat16":
            scalar = isinstance(value, numpy.generic)
            return {"n": [array.dtype.name, list(array.shape), array.tobytes().hex(), scalar]}
        raise TypeError(f"an array of {array.dtype} is neither a number nor a list of them")
    for tag, kind in (("s", set), ("f", frozenset), ("t", Sequence)):
        if isinstance(value, kind):
            return {tag: [encode(x) for x in value]}
    if type(value).__name__ == "Failure" and type(value).__module__ == "jaxrl_llm.rewards.scoring":
        return {"x": value.reason}  # by name: this file imports nothing of the package
    if hasattr(type(value), "__float__"):
        return float(value)
    raise TypeError(f"{repr(value)[:100]} is neither a number, a text, a list nor a mapping")


def load(path: list[str], function: str | bytes):
    """The function, from "module:name" or from a pickle."""
    sys.path[:] = path
    if isinstance(function, bytes):
        return pickle.loads(function)
    module, _, name = function.partition(":")
    value = importlib.import_module(module)
    for attribute in name.split("."):
        value = getattr(value, attribute)
    if not callable(value):
        raise TypeError(f"{function} is not callable")
    return value


def _explain(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _duplicate(descriptor: int) -> int:
    """A copy of a descriptor, at a random number, that no program or fork of a call inherits."""
    try:
        import fcntl  # not on Windows

        least = 100 + secrets.randbelow(100)
        copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)
    except (ImportError, OSError):  # or fewer may be open
        copy = os.dup(descriptor)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: os.close(copy))
    return copy


def kill_descendants(process: int) -> None:
    """Kills all that a process has started, also what left its group, where there is a /proc.

    A worker takes in what its children leave behind, so that all of it is below the worker.
    """
    killed: set[int] = set()
    while more := _descendants(process) - killed:
        killed |= more
        for each in more:
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)


def _descendants(process: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):  # none, or it has ended
            with open(f"/proc/{int(name)}/stat", errors="replace") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    below, waiting = set(), [process]
    while waiting:
        new = children.get(waiting.pop(), [])
        below.update(new)
        waiting.extend(new)
    return below


def _adopt() -> None:
    """What the children of this process leave behind becomes its child, on Linux."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def main() -> None:
    """Loads the function, reports it, then answers calls until the parent closes the stream."""
    source, sink = os.fdopen(os.dup(0), "rb"), _duplicate(1)
    # What the function reads or prints must not get into the messages.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    _adopt()
    inbox: queue.SimpleQueue = queue.SimpleQueue()

    def read_all() -> None:
        # Passes calls on; ends the process and those it started once the parent is gone.
        try:
            while True:
                inbox.put(pickle.loads(read_body(source)))
        except BaseException:
            if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
                kill_descendants(os.getpid())
                os.killpg(0, signal.SIGKILL)
            os._exit(0)

    def reply(number: str, index: int, kind: str, payload) -> None:
        body = json.dumps([number, index, kind, encode(payload)]).encode()
        if len(body) > LONGEST:
            raise ValueError(f"the value takes {len(body)} bytes, more than {LONGEST}")
        message = HEADER.pack(len(body)) + body
        while message:
            message = message[os.write(sink, message) :]

    threading.Thread(target=read_all, daemon=True).start()
    number, path, function = inbox.get()
    try:
        function = load(path, function)
    except BaseException as error:
        reply(number, 0, "unloadable", _explain(error))
        return
    os.environ.pop(LOADING, None)
    reply(number, 0, "ready", is_async(function))
    runner, concurrent = asyncio.Runner(), is_async(function)
    if concurrent:  # a thread for each call that sends work to one
        runner.get_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    while True:
        number, deadline, grace, calls = inbox.get()

        def watch(seconds: float = deadline + grace) -> None:
            # The thread that sees the parent go needs the interpreter, which C code may hold.
            faulthandler.dump_traceback_later(seconds, exit=True, file=nothing)

        def answer(index: int, kind: str, payload, number=number, watch=watch) -> None:
            watch()
            try:
                reply(number, index, kind, payload)
            except OSError:
                raise
            except Exception as error:  # the value cannot be sent
                reply(number, index, *_failure(error))

        watch()
        if concurrent:
            runner.run(_gather(function, calls, deadline, answer))
        for index, arguments in enumerate(() if concurrent else calls):
            try:
                value = function(*arguments)
                if inspect.isawaitable(value):
                    value = asyncio.run(asyncio.wait_for(value, timeout=None))
            except BaseException as error:
                answer(index, *_failure(error))
            else:
                answer(index, "value", value)
        faulthandler.cancel_dump_traceback_later()


def is_async(function) -> bool:
    """Whether a function is async, so that calls of it can run at one time."""
    if type(function).__name__ == "Bound":  # of the package, by name; a partial needs no care
        function = function.function
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _failure(error: BaseException) -> tuple[str, str]:
    # By name: this file imports nothing of the package.
    refused = any(kind.__name__ == "RewardError" for kind in type(error).__mro__)
    return ("refused" if refused else "raised"), _explain(error) + where_raised(error)


def where_raised(error: BaseException) -> str:
    """The term of a sum and the line of the user's code that raised, as " (term 'a', b.py:3)".

    The line is the innermost one outside of this package and Python's own files, if there is one
    also outside of installed packages.
    """
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    python, installed = os.path.dirname(os.__file__) + os.sep, f"{os.sep}site-packages{os.sep}"
    theirs = [
        (path, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not (path := frame.f_code.co_filename).startswith((ours, "<frozen", "<string"))
        and (installed in path or not path.startswith(python))
    ]
    nearest = [line for line in theirs if installed not in line[0]] or theirs
    parts = [note for note in getattr(error, "__notes__", ()) if note.startswith(NOTE)]
    if nearest:
        path, number = nearest[-1]
        with contextlib.suppress(OSError):  # no working directory
            path = path.removeprefix(os.getcwd() + os.sep)
        parts.append(f"{path}:{number}")
    return f" ({', '.join(parts)})" if parts else ""


async def _gather(function, calls, deadline: float, answer) -> None:
    """Answers calls as they end, each within the deadline after it began."""
    loop, finished = asyncio.get_running_loop(), asyncio.Event()
    unanswered = set(range(len(calls)))

    def end(index: int, kind: str, payload) -> None:
        if index in unanswered:
            unanswered.remove(index)
            answer(index, kind, payload)
            if not unanswered:
                finished.set()

    def late(index: int) -> None:
        end(index, "late", f"gave nothing within {deadline:g} s")
        tasks[index].cancel()

    async def one(index: int, arguments: tuple) -> None:
        timer = loop.call_later(deadline, late, index)
        try:
            value = await function(*arguments)
        except BaseException as error:
            end(index, *_failure(error))
        else:
            end(index, "value", value)
        timer.cancel()

    tasks = [loop.create_task(one(n, arguments)) for n, arguments in enumerate(calls)]
    await finished.wait()  # and not for a task that ignores that it is cancelled


if __name__ == "__main__":
    main()
