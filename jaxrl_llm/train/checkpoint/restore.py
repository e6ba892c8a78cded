"""Which checkpoint of several is read, as all processes of a run see it.

Each that judged for itself could choose another one than the others, or wait for them.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.train import files
from jaxrl_llm.train.checkpoint import record
from jaxrl_llm.train.checkpoint.serialization import OtherRun, abstract, check_same_run, orbax

T = TypeVar("T")
Kind = Literal["other run", "hindered", "damaged"]


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read."""


class Unreadable(Exception):
    """A checkpoint cannot be used.

    Attributes:
      kind: Whether it is of another run, something else is in the way, or it is damaged.
      why: In a few words.
    """

    def __init__(self, kind: Kind, why: str):
        super().__init__(kind, why)
        self.kind, self.why = kind, why


def read_last(
    paths: Sequence[Path], like: ArrayTree, wanted: Mapping[str, Any], *, partial: bool = False
) -> tuple[ArrayTree, int]:
    """The last of some checkpoints that can be read; damaged ones are passed over with a warning.

    Args:
      paths: Of the checkpoints, in order; those of the first process count.
      like: Arrays, or their shapes and shardings.
      wanted: The marks that it must have.
      partial: Whether it may hold more than ``like``.

    Returns:
      What is in it, and its place among ``paths``.

    Raises:
      ValueError: If the last that is whole belongs to another run.
      CheckpointError: If none can be read, or something is in the way.
    """
    passed: list[str] = []
    for place in reversed(range(len(paths))):
        told = f"The checkpoint {str(paths[place])!r} cannot be read"
        try:
            tree = _read(paths[place], like, wanted, partial=partial)
        except Unreadable as error:
            if error.kind == "other run":
                raise ValueError(error.why) from None
            if error.kind == "hindered":
                raise CheckpointError(f"{told}: {error.why}.") from error.__cause__
            passed.append(f"{told} and is passed over: {error.why}")
            continue
        step = int(paths[place].name.removeprefix("step_"))
        _warn_of(passed, f"the one of step {step} is used, what came after it is lost")
        return tree, place
    _warn_of(passed, "none is left")
    raise CheckpointError(f"There is no checkpoint that can be read in {str(paths[0].parent)!r}.")


def _read(path: Path, like: ArrayTree, wanted: Mapping[str, Any], *, partial: bool) -> ArrayTree:
    """What is in a checkpoint, once it is found to be whole and of this run."""
    # It reads all files, and once is enough.
    _attempt(lambda: record.check_record(path) if processes.is_first() else None)
    with orbax(partial=partial) as ocp:
        found = _attempt(lambda: ocp.metadata(path).custom_metadata or {})
        _attempt(lambda: check_same_run(path, found, wanted))
        return _attempt(lambda: ocp.load(path, jax.tree.map(abstract, like)))


def _attempt(function: Callable[[], T]) -> T:
    """What a function gives in this process, once it has succeeded in all; all of them call it.

    Raises:
      Unreadable: If it failed in one; it is the same in all.
    """
    value, error = None, None
    try:
        value = function()
    except Exception as caught:
        error = caught
    found = processes.any_of(None if error is None else _judge(error))
    if found is not None:
        raise Unreadable(*found) from error
    return value  # type: ignore[return-value]


def _judge(error: Exception) -> tuple[Kind, str]:
    if isinstance(error, OtherRun):
        return "other run", str(error)
    if (why := files.hindrance(error)) is not None:
        return "hindered", why
    return "damaged", files.reason(error)


def _warn_of(passed: Iterable[str], instead: str) -> None:
    """Warns of the checkpoints that were passed over, and says what was done instead."""
    for told in passed:
        warnings.warn(f"{told}; {instead}.", stacklevel=6)
