"""What a compiler leaves is given back, and what a step frees is kept where that is wanted."""

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from bare import command
from rows import for_each

from jaxrl_llm.core.runtime.heap import keep_freed_memory, trim_after_compiling

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


def test_no_listener_where_the_library_cannot_trim(listeners, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    for platform in ("linux", "darwin"):
        monkeypatch.setattr(sys, "platform", platform)
        trim_after_compiling.cache_clear()
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


def test_freed_memory_is_kept_unless_the_environment_chooses(monkeypatch):
    calls = []

    def mallopt(*values):
        calls.append(values)
        return 1

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    for name in [x for x in os.environ if x.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    assert keep_freed_memory()
    assert sorted(calls) == [(-8, 1), (-4, 0), (-1, -1)]
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not keep_freed_memory() and len(calls) == 3
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not keep_freed_memory()


_ALLOCATES = """
import ctypes, resource, threading
from jaxrl_llm.core.runtime.heap import keep_freed_memory

kept = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def touch():
    array = libc.malloc(2**26)
    ctypes.memset(array, 1, 2**26)
    libc.free(array)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        thread = threading.Thread(target=touch)
        thread.start()
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(kept, faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="a system without glibc")
@for_each("chosen", [False, True])
def test_a_process_finds_the_memory_that_its_threads_freed(chosen):
    variables = {k: x for k, x in os.environ.items() if not k.startswith("MALLOC_")}
    variables |= {"MALLOC_TOP_PAD_": "0"} if chosen else {}
    words = command("sys.modules['jax'] = types.ModuleType('jax')" + _ALLOCATES)
    run = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    kept, faults = run.stdout.split()
    assert kept == str(not chosen)
    assert int(faults) < 1_000 if kept == "True" else int(faults) > 10_000  # of 4 x 16,384 pages
