"""Body of a verifier process: started by path, it imports nothing of the package by itself.

Messages are pickles, each behind its length in eight bytes, on the standard streams. The first
from the parent holds `sys.path` and the function; each later one holds the arguments of a call.
"""

import asyncio
import importlib
import inspect
import os
import pickle
import queue
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
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{function} is not callable")
    return found


def _explain(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _read_all(stream, inbox: queue.SimpleQueue) -> None:
    """Passes calls on; ends the process, whatever it is doing, once the parent is gone."""
    try:
        while True:
            inbox.put(read_message(stream))
    except BaseException:
        os._exit(0)


def main() -> None:
    """Loads the function, says so, then answers calls until the parent closes the stream."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the function reads or prints must not get into the messages.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    try:
        function = load(*read_message(source))
    except BaseException as error:
        write_message(sink, ("unloadable", _explain(error)))
        return
    os.environ.pop(LOADING, None)
    write_message(sink, ("ready", None))
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read_all, args=(source, inbox), daemon=True).start()
    while True:
        arguments = inbox.get()
        try:
            value = function(*arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_wait(value))
            write_message(sink, ("value", value))
        except BaseException as error:
            write_message(sink, ("raised", _explain(error)))


async def _wait(value):
    return await value


if __name__ == "__main__":
    main()
