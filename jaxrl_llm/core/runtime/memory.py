"""The memory that a device has for a run."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import jax

# By version of control groups: the controller, and the names of its memory limit, of the memory in
# use, and of the part of that memory in files that can be dropped.
_GROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory(devices: int = 1, *, root: str = "/") -> int | None:
    """Bytes that one device has for a run; None if it does not report them.

    On CPUs this is the free memory of the machine or container, divided equally among the run's
    ``devices`` there. The files of the operating system are below ``root``.
    """

    def left_in_groups() -> Iterator[int]:
        """Bytes left under each limit of the process's control groups, such as a container's."""
        try:
            lines = Path(root, "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return
        for _, names, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
            for kind, limit, used, droppable in _GROUPS:
                if kind not in names.split(","):
                    continue
                here = PurePosixPath(path.lstrip("/"))
                for part in (here, *here.parents):  # a container may see its group as the root
                    folder = Path(root, "sys/fs/cgroup", kind, part)
                    try:
                        most, taken = (int((folder / name).read_text()) for name in (limit, used))
                        taken -= _numbers(folder / "memory.stat").get(droppable, 0)
                    except (OSError, ValueError):  # absent, or "max", which is no limit
                        continue
                    yield max(most - taken, 0)

    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu":
        return None
    try:
        lines = _numbers(Path(root, "proc/meminfo"))
        left = min([lines["MemAvailable:"] * 1024, *left_in_groups()])
    except (OSError, KeyError, ValueError):
        return None
    return left // max(min(devices, jax.local_device_count()), 1)


def _numbers(path: Path) -> dict[str, int]:
    """Names and numbers, the first two words of each line of an operating-system file."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
