"""Checkpoints of a run: atomic, kept to the last few, restorable on another mesh.

A checkpoint is a folder ``step_00000010`` that Orbax writes under another name and renames when it
is whole, so a folder of that name is complete or was damaged later. A damaged one is passed over
with a warning, and nothing is deleted because of it.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.train import files
from jaxrl_llm.train.state import TrainState

_NAME = re.compile(r"step_(\d{8})")
_FORMAT = 2


# The name, and in the metadata the key, of what stands beside the state.
_BESIDE = "waiting"


class Beside(NamedTuple):
    """What is saved with a state and is no part of it: its shapes need not be known to read it.

    Attributes:
      arrays: NumPy arrays in dicts and lists.
      notes: What JSON knows.
    """

    arrays: ArrayTree
    notes: Any


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none could be read."""


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)


def shapes_of(state: TrainState) -> TrainState:
    """The state with shapes, dtypes and shardings in place of its large arrays.

    :meth:`Checkpoints.restore` needs no more, so the arrays can be freed before it reads others.
    """
    names = ("params", "opt_state", "algo_state", "critic", "reference")
    return state._replace(**{k: jax.tree.map(_abstract, getattr(state, k)) for k in names})


def fingerprint(model: Model, state: TrainState) -> dict[str, Any]:
    """What must agree between a checkpoint and the run that reads it."""
    return {
        "format": _FORMAT,
        "model": repr(model.config),
        "params": _shapes_digest(state.params),
        "state": _shapes_digest((state.opt_state, state.algo_state, state.critic, state.reference)),
    }


def _shapes_digest(tree: ArrayTree) -> str:
    """A digest of the paths, shapes and dtypes of a tree, the same on every mesh."""
    lines = [
        f"{trees.path_str(path)} {tuple(x.shape)} {x.dtype}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
      folder: Where they are; made on the first save.
      model: The model of the run; checkpoints of another one are refused.
      keep: How many to keep; older ones are deleted after a newer one is whole.
      run: What else must agree where a run is resumed, by name.

    Attributes:
      last: The step of the last checkpoint that was begun or restored here, or None.

    Raises:
      ValueError: If ``keep`` is below one.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: Model,
        keep: int = 2,
        run: Mapping[str, str | int] | None = None,
    ):
        checks.check_positive("Checkpoints", keep=keep)
        self.folder, self.model, self.keep = Path(folder).absolute(), model, keep
        self.run = dict(run or {})
        self.last: int | None = None
        self._pending: tuple[int, Any] | None = None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        return steps_in(self.folder)

    def path(self, step: int) -> Path:
        """The folder of one checkpoint."""
        return self.folder / f"step_{step:08d}"

    def save(self, state: TrainState, *, beside: Beside | None = None) -> None:
        """Starts to write the state of its step; returns when the state may be changed again.

        Args:
          state: The state.
          beside: What :meth:`restore_beside` is to give back.

        Raises:
          CheckpointError: If this one or the one before could not be written. What was there before
            stands.
        """
        self.wait()
        step = int(state.step)
        path = self.path(step)
        with self._failing_clearly(step), _orbax() as ocp:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.sweep()
            # A damaged one that a resumed run passed over is set aside, not deleted.
            if path.exists():
                path.rename(files.free_name(path))
            items = {"state": _to_arrays(state)}
            marks = fingerprint(self.model, state) | self.run
            if beside is not None:
                items[_BESIDE], marks[_BESIDE] = beside.arrays, beside.notes
            # A write that fails halfway is cleaned up too, but Orbax' threads complain for a page.
            if shutil.disk_usage(self.folder).free < sum(x.nbytes for x in jax.tree.leaves(items)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            response = ocp.save_checkpointables_async(path, items, custom_metadata=marks)
            self._pending, self.last = (step, response), step

    def wait(self) -> None:
        """Waits until the last save is whole, then deletes all but the ``keep`` up to it.

        Later steps are no part of this run: it went on from before them, since they are damaged.
        """
        if self._pending is None:
            return
        (step, response), self._pending = self._pending, None
        with self._failing_clearly(step):
            response.result()
            if jax.process_index() == 0:
                files.write_sizes(self.path(step))
                for old in [s for s in self.steps() if s <= step][: -self.keep]:
                    shutil.rmtree(self.path(old))

    @contextlib.contextmanager
    def _failing_clearly(self, step: int):
        try:
            yield
        except Exception as error:
            self.sweep()
            stands = self.steps()
            last = f"; the one of step {stands[-1]} stands" if stands else ""
            raise CheckpointError(
                f"The checkpoint of step {step} cannot be written to {str(self.folder)!r}: "
                f"{files.reason(error)}{last}."
            ) from error

    def sweep(self) -> None:
        """Removes what saves that were cut short left; call it while none is under way."""
        for path in self.folder.glob("step_*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)

    def restore(self, like: TrainState, *, step: int | None = None) -> TrainState:
        """The last state that can be read, on the devices of ``like``.

        Args:
          like: A state of the same run, or its :func:`shapes_of`.
          step: Which one; by default the last that is whole.

        Raises:
          ValueError: If the checkpoint belongs to another model, optimizer, recipe or run.
          CheckpointError: If there is none, or none can be read.
        """
        wanted = fingerprint(self.model, like) | self.run
        state = _from_arrays(self._load(_to_arrays(like), wanted, step), like)
        self.last = int(state.step)
        return state

    def restore_beside(self) -> Beside | None:
        """What was saved beside the state that was restored last; None if there was nothing.

        One that cannot be read is passed over with a warning.
        """
        if self.last is None:
            return None
        path = self.path(self.last)
        try:
            with _orbax() as ocp:
                notes = (ocp.metadata(path).custom_metadata or {}).get(_BESIDE)
                if notes is None:
                    return None
                return Beside(ocp.load(path, checkpointable_name=_BESIDE), notes)
        except Exception as error:
            told = f"The rollouts in the checkpoint {str(path)!r} cannot be read"
            warnings.warn(f"{told} and are passed over: {files.reason(error)}.", stacklevel=2)
            return None

    def restore_params(self, like: ArrayTree, *, step: int | None = None) -> ArrayTree:
        """Only the parameters of the last state that can be read; arguments as :meth:`restore`."""
        wanted = {"params": _shapes_digest(like), "model": repr(self.model.config)}
        return self._load({"params": like}, wanted, step, partial=True)["params"]

    def _load(self, like: ArrayTree, wanted: dict, step: int | None, *, partial=False) -> ArrayTree:
        steps = self.steps()
        if step is not None:
            if step not in steps:
                there = ", ".join(map(str, steps)) or "none"
                raise CheckpointError(
                    f"There is no checkpoint of step {step} in {str(self.folder)!r}; "
                    f"there are {there}."
                )
            steps = [step]
        for candidate in reversed(steps):
            path = self.path(candidate)
            try:
                files.check_sizes(path)
                with _orbax(partial=partial) as ocp:
                    found = ocp.metadata(path).custom_metadata or {}
                    self._check_same_run(path, found, wanted)
                    return ocp.load(path, jax.tree.map(_abstract, like))
            except _OtherRun as error:
                raise ValueError(str(error)) from None
            except Exception as error:
                told = f"The checkpoint {str(path)!r} cannot be read"
                if (why := files.hindrance(error)) is not None:
                    raise CheckpointError(f"{told}: {why}.") from error
                warnings.warn(f"{told} and is passed over: {files.reason(error)}.", stacklevel=3)
        what = "no checkpoint" if not steps else "no checkpoint that can be read"
        raise CheckpointError(f"There is {what} in {str(self.folder)!r}.")

    def _check_same_run(self, path: Path, found: dict, wanted: dict) -> None:
        """Raises _OtherRun with one sentence about the first thing that differs."""
        for key, value in wanted.items():
            if key not in found:
                raise ValueError("it does not say which model it belongs to")
            if found[key] != value:
                what = {
                    "format": f"has format {found[key]}, this version reads {value}",
                    "model": f"is of another model: {found[key]}, not {value}",
                    "params": "is of another model: its parameters have other names or shapes",
                    "state": "was made with another optimizer or recipe than this run has",
                    "questions": "was made with other questions, or another split or order of them",
                    "seed": f"was made with seed {found[key]}, this run has {value}",
                }[key]
                raise _OtherRun(f"The checkpoint {str(path)!r} {what}.")


class _OtherRun(Exception):
    """The checkpoint is whole, but not of this run."""


def _to_arrays(state: TrainState) -> dict[str, Any]:
    """The state as plain arrays: a typed key as its data, the integers of the cursor as arrays."""
    tree = state._asdict()
    tree["key"] = jax.random.key_data(state.key)
    tree["data_cursor"] = [np.asarray(x, np.int64) for x in jax.tree.leaves(state.data_cursor)]
    return tree


def _from_arrays(tree: dict[str, Any], like: TrainState) -> TrainState:
    key = jax.random.wrap_key_data(tree.pop("key"), impl=jax.random.key_impl(like.key))
    leaves = [int(x) for x in tree.pop("data_cursor")]
    cursor = jax.tree.unflatten(jax.tree.structure(like.data_cursor), leaves)
    return TrainState(**tree, key=key, data_cursor=cursor)


def _abstract(x):
    if isinstance(x, np.ndarray):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@contextlib.contextmanager
def _orbax(*, partial: bool = False):
    """Orbax without compression, since weights hardly compress, and without its own log."""
    from orbax.checkpoint import v1 as ocp

    logging.getLogger("absl").addFilter(_not_orbax)
    options = ocp.options
    context = ocp.Context(
        array_options=options.ArrayOptions(
            saving=options.ArrayOptions.Saving(use_compression=False)
        ),
        pytree_options=options.PyTreeOptions(
            loading=options.PyTreeOptions.Loading(partial_load=partial)
        ),
    )
    with context:
        yield ocp


def _not_orbax(record: logging.LogRecord) -> bool:
    """Its errors reach us as exceptions; as log lines they would bury the one sentence."""
    return "orbax" not in record.pathname
