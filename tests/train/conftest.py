"""Lets the tests of this folder import their helpers, and keeps their signals to themselves."""

import signal
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_late_signal():
    """A signal that comes after the end of its test fails that test, and stops no later run.

    ``catch_interrupt`` sends a Ctrl-C again, in a timer, where Python dropped the exception of the
    first. The run may have ended by then; the next one would stop after its first step.
    """
    yield
    late, numbers = [], (signal.SIGINT, signal.SIGTERM)
    before = {x: signal.signal(x, lambda number, frame: late.append(number)) for x in numbers}
    try:
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(60)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not late, f"signals {late} came after the end of the test"
