"""What a compiler leaves is given back: when, how often, and that jax still reports it."""

import ctypes
import sys
from types import SimpleNamespace

import jax
import pytest

from jaxrl_llm.core.runtime.heap import trim_after_compiling

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def listeners(monkeypatch):
    """The listeners that are registered with jax, which never calls these."""
    registered = []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", registered.append)
    trim_after_compiling.cache_clear()
    yield registered
    trim_after_compiling.cache_clear()


@pytest.mark.parametrize(
    ("event", "seconds", "times"),
    [(COMPILED, 1.0, 1), (COMPILED, 0.5, 0), ("/jax/core/compile/other", 9.0, 0)],
)
def test_only_a_long_compilation_is_followed_by_a_trim(
    listeners, monkeypatch, event, seconds, times
):
    trims = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=trims.append))
    trim_after_compiling()
    trim_after_compiling()
    (listener,) = listeners
    listener(event, seconds, fun_name="step")
    assert trims == [0] * times


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_no_listener_where_the_library_cannot_trim(listeners, monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    trim_after_compiling()
    assert listeners == []


def test_jax_reports_a_compilation_by_this_name():
    events = []

    def listen(event, seconds, **_):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 41)(1.0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert COMPILED in events


def test_the_library_of_this_system_trims(listeners):
    trim_after_compiling()
    for listener in listeners:  # none on a system without glibc
        listener(COMPILED, 2.0)
    assert len(listeners) == hasattr(ctypes.CDLL(None), "malloc_trim")
