"""Body of a verifier process: started by path, it imports nothing of the package by itself.

Messages are pickles, each behind its length in eight bytes, on the standard streams. The first
from the parent holds `sys.path` and the function; each later one holds the deadline of a call, how
many seconds after it the worker may live on, and the arguments of calls: one, or several that run
at one time if the function is async. Each call has one answer, with its index.
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
from concurrent.futures import ThreadPoolExecutor

HEADER = struct.Struct(">Q")
THREADS = 64
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
    write_message(sink, ("ready", is_async(function)))
    runner, concurrent = asyncio.Runner(), is_async(function)
    if concurrent:  # a thread for each call that sends work to one
        runner.get_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    while True:
        deadline, grace, calls = inbox.get()

        def watch(seconds: float = deadline + grace) -> None:
            # The thread that sees the parent go needs the interpreter, which C code may hold.
            faulthandler.dump_traceback_later(seconds, exit=True, file=nothing)

        def answer(index: int, kind: str, payload, watch=watch) -> None:
            watch()
            try:
                write_message(sink, (index, kind, payload))
            except Exception as error:  # the value cannot be pickled
                write_message(sink, (index, *_failure(error)))

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
    return ("refused" if refused else "raised"), _explain(error)


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
