"""Returns the memory that a compilation leaves in the heap, before the program first runs."""

import ctypes
import functools
import sys

import jax

# What jax reports once XLA has compiled a program, with the seconds that it took.
_COMPILED = "/jax/core/compile/backend_compile_duration"
# Shorter compilations leave too little to search for.
_SECONDS = 1.0


@functools.cache
def trim_after_compiling() -> None:
    """From now on, long compilations hand the memory that they freed back to the system.

    XLA frees most of what it takes to compile a train step, but glibc keeps that for later, in
    pieces too small for any large array: half a gigabyte on top of the step at its peak. On systems
    without glibc nothing changes. Called again, it does nothing more.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return

    def listen(event: str, seconds: float, **_) -> None:
        if event == _COMPILED and seconds >= _SECONDS:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(listen)
