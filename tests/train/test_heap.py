"""What a compiler leaves is given back: when, how often, and that jax still reports it."""

import jax
import pytest

from jaxrl_llm.train import heap


@pytest.mark.parametrize(
    ("event", "seconds", "times"),
    [(heap._COMPILED, 1.0, 1), (heap._COMPILED, 0.5, 0), ("/jax/core/compile/other", 9.0, 0)],
)
def test_only_a_long_compilation_is_followed_by_a_trim(event, seconds, times):
    kept = []
    heap._after(kept.append, event, seconds, fun_name="step")
    assert kept == [0] * times


def test_jax_reports_a_compilation_by_this_name():
    events = []

    def listen(event, seconds, **_):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 41)(1.0)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert heap._COMPILED in events


@pytest.mark.parametrize("there", [True, False])
def test_one_listener_where_the_library_can_trim(monkeypatch, there):
    listeners = []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)
    monkeypatch.setattr(heap, "_malloc_trim", lambda: (lambda pad: 0) if there else None)
    heap.trim_after_compiling.cache_clear()
    try:
        heap.trim_after_compiling()
        heap.trim_after_compiling()
        assert len(listeners) == there
    finally:
        heap.trim_after_compiling.cache_clear()


def test_the_library_of_this_system_is_asked(monkeypatch):
    trim = heap._malloc_trim()
    assert trim is None or trim(0) in (0, 1)
    monkeypatch.setattr(heap.sys, "platform", "darwin")
    assert heap._malloc_trim() is None
