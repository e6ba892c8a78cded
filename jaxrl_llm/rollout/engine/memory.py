"""The memory that slots take on a device, and the message when there is too little."""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_llm.core.axes import ArrayTree


def device_memory(devices: Sequence[Any] = ()) -> tuple[int, int] | None:
    """Bytes of memory of a device and those in use, or None if it does not report them.

    Of several devices it is the one with the least free; without any, the first of this process.
    """
    stats = [device.memory_stats() or {} for device in devices or jax.local_devices()[:1]]
    known = [(x["bytes_limit"], x["bytes_in_use"]) for x in stats if "bytes_limit" in x]
    if known:
        return min(known, key=lambda each: each[0] - each[1])
    if jax.default_backend() == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
    return None


def row_bytes(slots: ArrayTree, shardings: ArrayTree | None = None) -> int:
    """Bytes of a row of slots; on a mesh, of the part of it that one of its devices holds."""

    def row(shape, dtype) -> int:
        return math.prod(shape[1:]) * dtype.itemsize

    if shardings is None:
        return sum(row(x.shape, x.dtype) for x in jax.tree.leaves(slots))
    sizes = jax.tree.map(lambda x, s: row(s.shard_shape(x.shape), x.dtype), slots, shardings)
    return sum(jax.tree.leaves(sizes))


def has_room(rows: int, row_bytes: int, *, shards: int = 1, devices: Sequence[Any] = ()) -> bool:
    """Whether the devices have memory for this many rows; True if they do not report it."""
    known = device_memory(devices)
    return known is None or rows * row_bytes <= shards * (known[0] - known[1])


def out_of_memory(
    rows: int,
    width: int,
    row_bytes: int,
    *,
    shards: int = 1,
    devices: Sequence[Any] = (),
    allocated: bool = False,
) -> str:
    """The message for devices that are out of memory: how many rows of slots they have room for.

    ``row_bytes`` are those of a row of slots; ``allocated`` is whether the memory in use has them.
    """
    text = (
        f"The engine's {rows} rows of {width} slots take {_gib(rows * row_bytes)} GiB for keys, "
        "values and outputs"
    )
    known = device_memory(devices)
    if known is None:
        return f"{text}, more than the device has left; make rows, width or lengths smaller."
    free = shards * (known[0] - known[1]) + allocated * rows * row_bytes
    # A tenth is for the activations of a step; the current number of rows was too much.
    most = min(int(0.9 * max(free, 0)) // row_bytes, rows - 1) // shards * shards
    return (
        f"{text}, and {_gib(free)} GiB are there for them and the activations: about {most} rows "
        f"({most * width} slots) would fit."
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g}"
