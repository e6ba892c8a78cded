"""The side of a benchmark that is measured: one process, JSON lines over stdin and stdout.

    -> the workload, as the first line
    <- {"event": "ready", "check": [...], "warm_up_seconds": s, "versions": {...}, "device": "..."}
    -> {"command": "run", "seed": n}      <- {"seconds": s}
    -> {"command": "close"}               <- {"peak_memory_bytes": n}

Between two commands a worker waits on stdin and uses no processor. This module needs the standard
library alone, since it runs in the Python of every peer.
"""

import importlib
import json
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

# Two, since a trainer may compile again once its optimizer state comes from its own step.
WARM_UPS = 2
# What tells kinds of processors apart in /proc/cpuinfo.
_KIND = ("vendor_id", "cpu family", "model")


class Measured(NamedTuple):
    """What a worker measures.

    `run(seed)` does the work once and blocks until it is done; `check()` gives, after the warm-up,
    numbers that must agree between workers.
    """

    run: Callable[[int], Any]
    check: Callable[[], list]
    device: str
    packages: Sequence[str]
    device_memory: Callable[[], int | None] = lambda: None


def cpu_name() -> str:
    """The cores this process may use, and their kind where the system tells: "cpu-2core-amd-25-17".

    That is vendor, family and model: of two kinds one may multiply twice as fast as the other.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu-{cores}core{processor_kind()}"


def processor_kind(file: Path = Path("/proc/cpuinfo")) -> str:
    """``-vendor-family-model`` of an x86 processor under Linux, else nothing.

    It ends with ``-avx2`` where a host hides AVX-512 from its guests: products in bfloat16 are then
    not faster, and those in float32 half as fast.
    """
    text = file.read_text() if file.is_file() else ""
    fields = [re.search(rf"^{name}\s*: (\S+)$", text, re.M) for name in _KIND]
    found = [match[1] for match in fields if match]
    if len(found) < len(_KIND):
        return ""
    vendor = found[0].removeprefix("Genuine").removeprefix("Authentic").lower()
    flags = re.search(r"^flags\s*: (.+)$", text, re.M)
    hidden = flags is not None and "avx512f" not in flags[1].split()
    return "-".join(("", vendor, *found[1:], *(("avx2",) if hidden else ())))


def jax_device_name() -> str:
    """The device jax computes on: "cpu-2core", "nvidia-h100-80gb-hbm3"."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return cpu_name()
    name = re.sub(r"[^a-z0-9]+", "-", device.device_kind.lower()).strip("-")
    return name if jax.device_count() == 1 else f"{jax.device_count()}x-{name}"


def jax_device_memory() -> int | None:
    """Peak bytes on the accelerator, or None where the host's memory is the device's."""
    import jax

    stats = jax.devices()[0].memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats and "peak_bytes_in_use" in stats else None


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    # What getrusage tells begins with the size of the process that started this one.
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if platform.system() == "Darwin" else size * 1024


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            versions[package] = importlib.import_module(package).__version__
    return versions


def _timed(run: Callable[[int], Any], seed: int) -> float:
    start = time.perf_counter()
    run(seed)
    return time.perf_counter() - start


def serve(setup: Callable[[dict], Measured]) -> None:
    """Answer the benchmark until it closes the pipe.

    Args:
        setup: Makes the measured thing from the workload, before anything is timed.
    """
    # Libraries print; what they print must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    measured = setup(json.loads(sys.stdin.readline()))
    # These runs compile; the runs that count come after them.
    warm_up_seconds = sum(_timed(measured.run, 0) for _ in range(WARM_UPS))
    answer(
        event="ready",
        check=measured.check(),
        warm_up_seconds=warm_up_seconds,
        versions=package_versions(measured.packages),
        device=measured.device,
    )
    for line in sys.stdin:
        message = json.loads(line)
        if message["command"] == "close":
            break
        answer(event="done", seconds=_timed(measured.run, message["seed"]))
    answer(event="closed", peak_memory_bytes=measured.device_memory() or peak_memory())
