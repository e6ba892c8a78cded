"""Body of a verifier process: started by path, it imports nothing of the package by itself.

Messages are pickles, each behind its length in eight bytes, on the standard streams. The first
from the parent holds `sys.path` and the function; each later one holds how many seconds the worker
may live on in a call, and its arguments.
"""

import asyncio
import faulthandler
import importlib
import inspect
import os
import pickle
import queue
import signal
import struct
import sys
import threading

HEADER = struct.Struct(">Q")
LOADING = "JAXRL_LLM_VERIFIER_LOADING"  # in the environment of a worker until it is ready


def read_message(stream):
    """The next message of a stream; EOFError where the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (size,) = HEADER.unpack(header)
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return pickle.loads(body)


def write_message(stream, message) -> None:
    """Writes one message; an object that cannot be pickled raises before anything is written."""
    write_body(stream, pickle.dumps(message))


def write_body(stream, body: bytes) -> None:
    """Writes a message that is a pickle already."""
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


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


def main() -> None:
    """Loads the function, reports it, then answers calls until the parent closes the stream."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the function reads or prints must not get into the messages.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    inbox: queue.SimpleQueue = queue.SimpleQueue()

    def read_all() -> None:
        # Passes calls on; ends the process and those it started once the parent is gone.
        try:
            while True:
                inbox.put(read_message(source))
        except BaseException:
            if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
            os._exit(0)

    threading.Thread(target=read_all, daemon=True).start()
    try:
        function = load(*inbox.get())
    except BaseException as error:
        write_message(sink, ("unloadable", _explain(error)))
        return
    os.environ.pop(LOADING, None)
    write_message(sink, ("ready", None))
    while True:
        seconds, arguments = inbox.get()
        # The thread that sees the parent go needs the interpreter, which a call in C may hold.
        faulthandler.dump_traceback_later(seconds, exit=True, file=nothing)
        try:
            value = function(*arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_wait(value))
            write_message(sink, ("value", value))
        except BaseException as error:
            # By name: this file imports nothing of the package.
            refused = any(kind.__name__ == "RewardError" for kind in type(error).__mro__)
            write_message(sink, ("refused" if refused else "raised", _explain(error)))
        faulthandler.cancel_dump_traceback_later()


async def _wait(value):
    return await value


if __name__ == "__main__":
    main()
