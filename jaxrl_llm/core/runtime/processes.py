"""Programs of several processes, as on a pod: shared values, and the process that reports.

Every process runs the same Python on the same values; arrays on a mesh are spread over the devices
of all processes. A value that only one process knows (a reward, a signal, a file) is shared here
before any process acts on it. Otherwise a process could wait for another in a computation that the
other never starts. With one process these functions are trivial.
"""

import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.sizes import power_of_two

T = TypeVar("T")


_USAGE = 2  # the exit code of a usage error
_LEAVE_SECONDS = 10.0


class ProcessError(RuntimeError):
    """Another process failed.

    Attributes:
      kind: The class of its error, or the nearest base class from Python or this package.
      errno: The ``errno`` of its error, or of the cause of its error.
    """

    def __init__(self, text: str, kind: type = RuntimeError, errno: int | None = None):
        super().__init__(text)
        self.kind, self.errno = kind, errno


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    silence: int = 45,
) -> None:
    """Connects this process to the others of the program; must run before any use of a device.

    Args:
      coordinator: ``HOST:PORT``, free on the host of process 0 and reachable from all.
      processes: Number of processes.
      process: Index of this process, from 0. None for all three reads them from the cluster: a TPU
        pod, Slurm, Open MPI or Kubernetes.
      silence: Seconds without a heartbeat after which a process counts as dead, which ends all
        processes.

    Raises:
      RuntimeError: If jax has used a device already, or the others do not answer.
    """
    # We do this: a process that is told to end agrees with the others on a common last step.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        cluster_detection_method=None if coordinator is None else "deactivate",
        heartbeat_timeout_seconds=silence,
    )


def leave(code: int) -> None:
    """Ends a process that has failed, if there are others; otherwise returns.

    A normal exit waits for the other processes, which wait for this one in a computation. After
    this exit they fail, at the latest after the silence that :func:`start` allows. A usage error
    occurs in all processes. They leave together, since none can report it once the first has gone.
    """
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        if code == _USAGE:
            ending = threading.Thread(target=jax.distributed.shutdown, daemon=True)
            ending.start()
            ending.join(_LEAVE_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish() -> None:
    """Disconnects this process from the others, if any, once all have called this function."""
    if jax.distributed.is_initialized():
        share(None)
        jax.distributed.shutdown()


def is_first() -> bool:
    """Whether this process writes files and talks to the user."""
    return jax.process_index() == 0


def place(tree: ArrayTree, sharding: Any) -> ArrayTree:
    """Lays out arrays or typed keys, which every process holds in full, over all devices.

    ``sharding`` is one sharding for all of them, or a tree of shardings.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    if isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(_place, tree, sharding)


def _place(x, sharding: jax.sharding.Sharding):
    there = isinstance(x, jax.Array) and not x.is_fully_addressable
    if there or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _place(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    full = np.asarray(x)
    # Not device_put, which compares the values of all processes each time.
    return jax.make_array_from_callback(full.shape, sharding, lambda index: full[index])


def to_host(tree: ArrayTree) -> ArrayTree:
    """Arrays as full NumPy arrays in every process; all processes must call this function."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    def fetch(x):
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return multihost_utils.process_allgather(x, tiled=True)
        return jax.device_get(x)

    return jax.tree.map(fetch, tree)  # one at a time: each is gathered in full on every device


def share(value: T) -> list[T]:
    """The values of all processes, in order; each process must pass a value that can be pickled."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    width = power_of_two(int(sizes.max()))
    padded = np.pad(data, (0, width - len(data)))
    rows = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]


def any_of(value: T | None) -> T | None:
    """The value of the first process that has one."""
    return next((x for x in share(value) if x is not None), None)


def from_first(function: Callable[[], T]) -> T:
    """The result of a function that only the first process calls; errors are raised in all."""
    return together(lambda: function() if is_first() else None)[0]  # type: ignore[return-value]


def together(function: Callable[[], T]) -> list[T]:
    """The results of a function in all processes; a failure in one is a failure in all.

    A process in which the function failed raises its error; the others raise :class:`ProcessError`.
    """
    if jax.process_count() == 1:
        return [function()]
    value, error = None, None
    try:
        value = function()
    except Exception as caught:
        error = caught
    failed = None if error is None else _described(error)
    outcomes = share((value, failed))
    if error is not None:
        raise error
    for index, (_, other) in enumerate(outcomes):
        if other is not None:
            text, kind, errno = other
            raise ProcessError(f"Process {index} failed: {text}", kind, errno)
    return [value for value, _ in outcomes]  # type: ignore[misc]


def _described(error: Exception) -> tuple[str, type, int | None]:
    """An error in a form for the other processes, which may lack its class."""
    package = __name__.partition(".")[0]
    there = ("builtins", package)
    kind = next(x for x in type(error).__mro__ if x.__module__.partition(".")[0] in there)
    numbers = [getattr(x, "errno", None) for x in (error, error.__cause__)]
    number = next((x for x in numbers if isinstance(x, int)), None)
    return f"{type(error).__name__}: {error}", kind, number


def portion(count: int) -> slice:
    """The slice of ``count`` items that this process handles; one process handles each item."""
    index, processes = jax.process_index(), jax.process_count()
    return slice(index * count // processes, (index + 1) * count // processes)
