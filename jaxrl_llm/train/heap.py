"""Gives back what a compiler leaves in the heap of a process, before its program first runs."""

import ctypes
import functools
import sys
from collections.abc import Callable

import jax

# What jax reports once XLA has compiled a program, with the seconds that it took.
_COMPILED = "/jax/core/compile/backend_compile_duration"
# Shorter compilations leave too little to look for.
_SECONDS = 1.0


@functools.cache
def trim_after_compiling() -> None:
    """From now on, long compilations hand the memory that they freed back to the system.

    XLA frees most of what it takes to compile a train step, but glibc keeps that for later, in
    pieces that no large array fits into: half a gigabyte that stands beside the step at its peak.
    On systems without glibc nothing changes. Called again, it does nothing more.
    """
    trim = _malloc_trim()
    if trim is not None:
        listener = functools.partial(_after, trim)
        jax.monitoring.register_event_duration_secs_listener(listener)


def _after(trim: Callable[[int], int], event: str, seconds: float, **_) -> None:
    if event == _COMPILED and seconds >= _SECONDS:
        trim(0)


def _malloc_trim() -> Callable[[int], int] | None:
    """The function of the C library that gives free memory back; None where it has none."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
