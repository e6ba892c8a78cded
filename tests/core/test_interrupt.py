"""Ctrl-C and SIGTERM between two steps."""

import gc
import os
import signal
import sys
import threading
import types

import pytest
from rows import for_each

from jaxrl_llm.core.runtime import interrupt
from jaxrl_llm.core.runtime.interrupt import catch_interrupt


def handlers():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


@for_each("first", [signal.SIGINT, signal.SIGTERM])
def test_after_either_a_ctrl_c_is_not_caught(capfd, first):
    before = handlers()
    with catch_interrupt(notice="stopping") as interrupt:
        assert not interrupt
        signal.raise_signal(first)
        assert interrupt and interrupt.signal == first
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert handlers() == before and capfd.readouterr().err == "stopping"


def test_a_ctrl_c_that_answers_the_notice_is_not_caught(monkeypatch):
    monkeypatch.setattr(os, "write", lambda *_: signal.raise_signal(signal.SIGINT))
    with catch_interrupt(notice="stopping") as interrupt:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert interrupt.signal == signal.SIGTERM


def test_a_notice_that_nobody_reads_is_not_an_error():
    """In a pipe whose reader ended with the same Ctrl-C, the run still stops in order."""
    error, (read, write) = os.dup(2), os.pipe()
    os.close(read)
    try:
        os.dup2(write, 2)
        with catch_interrupt(notice="stopping") as interrupt:
            signal.raise_signal(signal.SIGINT)
    finally:
        os.dup2(error, 2)
        os.close(error)
        os.close(write)
    assert interrupt.signal == signal.SIGINT


@for_each("first", [signal.SIGINT, signal.SIGTERM])
def test_a_sigterm_more_changes_nothing(capfd, first):
    before = handlers()
    with catch_interrupt(notice="stopping") as interrupt:
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)  # would end this process
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.signal == first
    assert handlers() == before and capfd.readouterr().err == "stopping"


def test_a_ctrl_c_that_the_garbage_collector_drops_is_raised_again():
    hook, collections = sys.unraisablehook, []

    def raise_within(phase, info):
        del info
        if phase == "start" and not collections:
            collections.append(phase)
            signal.raise_signal(signal.SIGINT)

    with catch_interrupt():
        signal.raise_signal(signal.SIGINT)
        gc.callbacks.append(raise_within)
        try:
            gc.collect()  # which reports the exception and goes on
            with pytest.raises(KeyboardInterrupt):
                threading.Event().wait(60.0)
        finally:
            gc.callbacks.remove(raise_within)
    assert collections and sys.unraisablehook is hook


def test_a_hook_that_was_set_within_stays(monkeypatch):
    # As that of checkpoints, whose dropped errors may arrive after the run.
    told, sent = [], []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr(interrupt, "_send_ctrl_c", lambda: sent.append(True))
    with catch_interrupt():
        before = sys.unraisablehook
        within = lambda dropped: before(dropped)  # noqa: E731
        sys.unraisablehook = within
    assert sys.unraisablehook is within
    dropped = types.SimpleNamespace(exc_type=KeyboardInterrupt)
    sys.unraisablehook(dropped)
    assert told == [dropped] and not sent  # and nothing is raised again after it


def test_another_thread_catches_nothing():
    found = []

    def elsewhere():
        before = handlers()
        with catch_interrupt() as interrupt:
            found.append((bool(interrupt), handlers() == before))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [(False, True)]
