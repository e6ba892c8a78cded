"""What a device holds of slots, and what to say when it is not enough."""

import math
import os

import jax

from jaxrl_llm.core.axes import ArrayTree


def device_memory() -> tuple[int, int] | None:
    """Bytes of memory that a device has and that are in use, or None if it does not tell."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"], stats["bytes_in_use"]
    if jax.default_backend() == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
    return None


def row_bytes(slots: ArrayTree, shardings: ArrayTree | None = None) -> int:
    """Bytes of a row of slots; on a mesh, of the part of it that one of its devices holds."""

    def held(x, sharding=None) -> int:
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape[1:]) * x.dtype.itemsize

    given = (slots,) if shardings is None else (slots, shardings)
    return sum(jax.tree.leaves(jax.tree.map(held, *given)))


def too_many(rows: int, width: int, row_bytes: int, *, shards: int = 1, held: bool = False) -> str:
    """One sentence for a device that is out of memory: how many slots would fit.

    Args:
      rows: R, of all devices.
      width: W, slots of a row.
      row_bytes: Bytes of a row of slots.
      shards: Over how many devices the rows are spread.
      held: Whether the slots are among what is in use.
    """
    text = (
        f"The engine's {rows} rows of {width} slots take {_gib(rows * row_bytes)} GiB for keys, "
        "values and outputs"
    )
    known = device_memory()
    if known is None:
        return f"{text}, more than the device has left; make rows, width or lengths smaller."
    free = shards * (known[0] - known[1]) + held * rows * row_bytes
    # A tenth is left to the activations of a step; what did not fit was too much.
    most = min(int(0.9 * max(free, 0)) // row_bytes, rows - 1) // shards * shards
    return (
        f"{text}, and {_gib(free)} GiB are there for them and the activations: about {most} rows "
        f"({most * width} slots) would fit."
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g}"


def fit(rows: int, row_bytes: int, *, shards: int = 1) -> bool:
    """Whether so many rows of slots fit the memory of their devices, as far as they tell."""
    known = device_memory()
    return known is None or rows * row_bytes <= shards * (known[0] - known[1])
