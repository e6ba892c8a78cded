"""Devices that are not there: their compilers, without a TPU or a GPU.

    pip install "jax[tpu]"                                               # libtpu, for Linux
    pip install --no-deps jax-cuda12-plugin==$JAX jax-cuda12-pjrt==$JAX  # of jax's own version
    pip install --no-deps nvidia-cudnn-cu12                              # for its attention

The programs are those that such a device would run, with all that its compiler knows of memory and
of communication; only their time cannot be had.
"""

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

# What a compiler for GPUs reads of an H100 with 80 GB.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  device_memory_size: 84942979072
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "H100"
"""


class Kind(NamedTuple):
    """A kind of device: as jax calls its platform, as the compiler does, what one of them holds."""

    backend: str
    compiler: str
    memory_bytes: float


KINDS = {"v5e": Kind("tpu", "tpu", 16e9), "h100": Kind("gpu", "cuda", 80e9)}


def prepare_environment() -> None:
    """What must be set before jax starts: it runs on CPUs, and looks for no TPU's host."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a chip would be for one process
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")


# Modules of a compiler, and the packages that they are in.
NEEDS = {
    "tpu": {"libtpu": "libtpu"},
    "cuda": {"jax_plugins.xla_cuda12": "jax-cuda12-plugin", "nvidia.cudnn": "nvidia-cudnn-cu12"},
}


def missing(kind: str) -> str | None:
    """A package that the compiler of a kind of device needs and that is not installed."""
    for module, package in NEEDS[KINDS[kind].compiler].items():
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return package
    return None


@contextlib.contextmanager
def present(kind: str, count: int) -> Iterator[Sequence]:
    """So many devices of a kind, as if they were there while programs are traced and compiled.

    Args:
      kind: A name in ``KINDS``.
      count: How many; for ``"v5e"`` a square or half of one.

    Yields:
      The devices, which ``jax.devices()`` gives too.
    """
    import jax
    from jax.experimental import topologies

    if name := missing(kind):
        raise SystemExit(f"absent.py: the compiler of {kind} is not here: pip install {name}.")
    compiler = KINDS[kind].compiler
    if compiler == "tpu":
        whole = max(count, 4)  # chips of a host
        rows = 2 ** math.floor(math.log2(whole) / 2)
        topology = topologies.get_topology_desc(f"{kind}:{rows}x{whole // rows}", "tpu")
    else:
        options = {"topology": f"1x1x{count}", "target_config": H100}
        topology = topologies.get_topology_desc(kind, "cuda", **options)
    devices = topology.devices[:count]
    with (
        mock.patch.object(jax, "devices", lambda *_: devices),
        mock.patch.object(jax, "default_backend", lambda: KINDS[kind].backend),
    ):
        yield devices
