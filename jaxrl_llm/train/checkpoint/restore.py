"""Reads the last checkpoint that can be read; all processes of a run agree on which one it is.

Processes that judged alone could choose different ones, or wait for each other.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime import files, processes
from jaxrl_llm.train.checkpoint import record
from jaxrl_llm.train.checkpoint.serialization import OtherRun, abstract, check_same_run, orbax

T = TypeVar("T")
Kind = Literal["other run", "hindered", "damaged"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read."""


class Unreadable(Exception):
    """A checkpoint cannot be used.

    Attributes:
      kind: Whether it belongs to another run, cannot be opened at the moment, or is damaged.
      why: The reason, in a few words.
    """

    def __init__(self, kind: Kind, why: str):
        super().__init__(kind, why)
        self.kind, self.why = kind, why


def read_last(
    paths: Sequence[Path], like: ArrayTree, wanted: Mapping[str, Any], *, partial: bool = False
) -> tuple[ArrayTree, int]:
    """Reads the last checkpoint that can be read; damaged ones are skipped with a warning.

    Args:
      paths: Paths of the checkpoints, in order; the first process decides.
      like: Arrays, or their shapes and shardings.
      wanted: The fingerprint that the checkpoint must have.
      partial: Whether the checkpoint may hold more than ``like``.

    Returns:
      Its content, and its index in ``paths``.

    Raises:
      ValueError: If the last complete one belongs to another run.
      CheckpointError: If none can be read, or one cannot be opened at the moment.
    """

    def read(path: Path) -> ArrayTree:
        """The content of a checkpoint, after checks that it is complete and of this run."""
        # This reads all files, and one process is enough.
        step = int(path.stem.removeprefix("step_"))
        _attempt(lambda: record.check_record(path, step=step) if processes.is_first() else None)
        with orbax(partial=partial) as ocp:
            metadata = _attempt(lambda: ocp.metadata(path).custom_metadata or {})
            _attempt(lambda: check_same_run(path, metadata, wanted))
            return _attempt(lambda: ocp.load(path, jax.tree.map(abstract, like)))

    passed: list[str] = []
    for place in reversed(range(len(paths))):
        told = f"The checkpoint {str(paths[place])!r} cannot be read"
        try:
            tree = read(paths[place])
        except Unreadable as error:
            if error.kind == "other run":
                raise ValueError(error.why) from None
            if error.kind == "hindered":
                raise CheckpointError(f"{told}: {error.why}.") from error.__cause__
            passed.append(f"{told} and is passed over: {error.why}")
            continue
        step = int(paths[place].stem.removeprefix("step_"))
        _warn_of(passed, f"the one of step {step} is used, what came after it is lost")
        return tree, place
    _warn_of(passed, "none is left")
    raise CheckpointError(f"There is no checkpoint that can be read in {str(paths[0].parent)!r}.")


def _attempt(function: Callable[[], T]) -> T:
    """The result of a function once it has succeeded in all processes; all of them call it.

    Raises:
      Unreadable: If it failed in one; the same in all.
    """
    value, error, problem = None, None, None
    try:
        value = function()
    except OtherRun as caught:
        error, problem = caught, ("other run", str(caught))
    except Exception as caught:
        error, problem = caught, ("damaged", files.reason(caught))
        if (why := files.hindrance(caught)) is not None:
            problem = ("hindered", why)
    failure: tuple[Kind, str] | None = processes.any_of(problem)
    if failure is not None:
        kind, why = failure
        raise Unreadable(kind, why) from error
    return value  # type: ignore[return-value]


def _warn_of(passed: Iterable[str], instead: str) -> None:
    """Warns of each checkpoint that was skipped, and of what was done instead."""
    for told in passed:
        warnings.warn(f"{told}; {instead}.", stacklevel=6)
