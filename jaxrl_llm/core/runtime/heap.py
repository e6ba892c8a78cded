"""The heap of a process: what compilations free goes back to the system, what steps free stays."""

import ctypes
import functools
import os
import sys
from typing import Any

import jax

# The event that jax reports once XLA has compiled a program, with the duration in seconds.
_COMPILED = "/jax/core/compile/backend_compile_duration"
# Shorter compilations leave too little memory to search for.
_SECONDS = 1.0

# Parameters of glibc's ``mallopt`` and their values for :func:`keep_freed_memory`: one arena, no
# arrays in mappings of their own, and no return of what is free at the end of the heap.
_KEEP = {-8: 1, -4: 0, -1: -1}


def keep_freed_memory() -> bool:
    """From now on, freed memory stays in the process; returns whether that could be arranged.

    The next step then finds the memory of the last one. Otherwise glibc returns it, and the system
    fills it with zeros again, page by page, in each step. For a process that does nothing but
    train, before its threads start. Fragmentation may make the heap larger. Variables of the
    environment whose names begin with ``MALLOC_`` take precedence: with one of them, or on systems
    without glibc, nothing changes.
    """
    set_option = _c_function("mallopt")
    if set_option is None or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    return all([set_option(option, value) for option, value in _KEEP.items()])


@functools.cache
def trim_after_compiling() -> None:
    """From now on, long compilations return the memory that they freed to the system.

    XLA frees most of the memory that it needs to compile a train step. glibc keeps this memory, in
    pieces too small for any large array: half a gigabyte on top of the peak of the step. This
    function has no effect on systems without glibc, or when it is called again.
    """
    trim = _c_function("malloc_trim")
    if trim is None:
        return

    def listen(event: str, seconds: float, **_) -> None:
        if event == _COMPILED and seconds >= _SECONDS:
            trim(0)

    jax.monitoring.register_event_duration_secs_listener(listen)


def _c_function(name: str) -> Any:
    """A function of the C library, on Linux; None if there is none of this name."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)
