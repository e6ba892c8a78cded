"""The dtype in which a machine multiplies matrices fastest."""

import functools
from pathlib import Path

import jax

# Of x86 processors: instructions whose operands are bfloat16.
_FLAGS = {"avx512_bf16", "amx_bf16"}


def resolve_dtype(dtype: str) -> str:
    """The dtype itself, or for "auto" the one that the default device multiplies fastest.

    That is "bfloat16" on TPUs, on NVIDIA GPUs from compute capability 8.0 on, and on x86 processors
    under Linux with AVX512-BF16 or AMX; "float32" elsewhere.

    Example:
      >>> resolve_dtype("float32")
      'float32'
    """
    return fastest_dtype(jax.default_backend()) if dtype == "auto" else dtype


@functools.cache
def fastest_dtype(platform: str, *, root: str = "/") -> str:
    """As :func:`resolve_dtype` of "auto", with the files of the operating system below ``root``."""
    if platform == "cpu":
        return "bfloat16" if _FLAGS & _flags(root) else "float32"
    if platform == "tpu":
        return "bfloat16"
    # "9.0"; AMD's is a name such as "gfx942".
    capability = getattr(jax.local_devices(backend=platform)[0], "compute_capability", "")
    major = capability.partition(".")[0]
    return "bfloat16" if major.isdigit() and int(major) >= 8 else "float32"


def _flags(root: str) -> set[str]:
    """The instruction sets of the processor, as Linux names them."""
    try:
        lines = Path(root, "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}
