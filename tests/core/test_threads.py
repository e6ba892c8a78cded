"""Calls of a worker in order; a thread that hangs holds neither the end nor a signal."""

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import CancelledError, Future

import pytest
from bare import command, environment
from rows import for_each

from jaxrl_llm.core.runtime import threads
from jaxrl_llm.core.runtime.threads import Worker, compile_aside, wait_for_one


def test_calls_run_in_order_and_errors_are_theirs():
    worker, order = Worker("test"), []

    def fails():
        raise KeyError("x")

    futures = [worker.submit(lambda n=n: order.append(n) or n) for n in range(20)]
    broken, last = worker.submit(fails), worker.submit(lambda: "last")
    assert last.result(60) == "last" and order == list(range(20))
    assert [future.result() for future in futures] == order
    with pytest.raises(KeyError, match="x"):
        broken.result()
    worker.close()
    worker._thread.join(60)
    assert not worker._thread.is_alive()


def test_what_is_compiled_aside_has_no_result_and_keeps_its_error():
    def fails():
        raise KeyError("x")

    assert compile_aside("test", lambda: 1).result(60) is None
    with pytest.raises(KeyError, match="x"):
        compile_aside("test", fails).result(60)


def test_closing_cancels_what_has_not_begun():
    worker, begun, go_on = Worker("test"), threading.Event(), threading.Event()
    first = worker.submit(lambda: begun.set() or go_on.wait(60))
    second = worker.submit(lambda: 2)
    assert begun.wait(60)
    worker.close()
    assert second.cancelled() and not first.done()
    with pytest.raises(CancelledError):
        second.result()
    go_on.set()
    assert first.result(60)


@for_each("kind", ["worker", "thread", "pool"])
def test_a_thread_that_hangs_does_not_hold_the_end_of_the_program(kind):
    """A worker's is a daemon; for those of others the end has a bound."""
    script = f"""
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from jaxrl_llm.core.runtime import threads
threads._PATIENCE = 0.1
begun, never = threading.Event(), threading.Event()

def hang():
    begun.set()
    never.wait(600)

if {kind!r} == "worker":
    worker = threads.Worker("hangs")
    worker.submit(hang)
    begun.wait(60)
    worker.close()
elif {kind!r} == "thread":
    threading.Thread(target=hang).start()
    threads.end_within(0.1, 7)
else:
    ThreadPoolExecutor(1).submit(hang)
    threads.end_within(0.1, 7)
sys.exit(7)
"""
    assert subprocess.run(command(script), env=environment(), timeout=120).returncode == 7


def test_waiting_ends_with_the_first_that_is_done_and_at_once_without_any():
    first, second = Future(), Future()
    second.set_result(2)
    wait_for_one({"a": first, "b": second}.values())
    wait_for_one([])
    assert not first.done()


@pytest.mark.skipif(os.name != "posix", reason="needs signals of Unix")
def test_a_signal_is_heard_that_does_not_end_the_wait(monkeypatch):
    # Sent to another thread, it does not wake the main one: as if it came just before the wait.
    monkeypatch.setattr(threads, "SIGNAL_SECONDS", 0.05)
    heard = Future()

    def send():
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.set_result(number))
    # Where it is not heard, the test fails instead of waiting without end.
    late = threading.Timer(60, lambda: heard.done() or heard.set_result("late"))
    late.start()
    try:
        threading.Thread(target=send).start()
        wait_for_one([heard])
    finally:
        late.cancel()
        signal.signal(signal.SIGUSR1, before)
    assert heard.result() == signal.SIGUSR1
