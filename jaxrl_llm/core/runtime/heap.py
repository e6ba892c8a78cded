"""Returns heap memory to the system after a compilation, before the program first runs."""

import ctypes
import functools
import sys

import jax

# The event that jax reports once XLA has compiled a program, with the duration in seconds.
_COMPILED = "/jax/core/compile/backend_compile_duration"
# Shorter compilations leave too little memory to search for.
_SECONDS = 1.0


@functools.cache
def trim_after_compiling() -> None:
    """From now on, long compilations return the memory that they freed to the system.

    XLA frees most of the memory that it needs to compile a train step. glibc keeps this memory, in
    pieces too small for any large array: half a gigabyte on top of the peak of the step. This
    function has no effect on systems without glibc, or when it is called again.
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
