"""Checkpoints of a run: atomic, limited to the last few and the best, restorable on another mesh.

A checkpoint is a folder ``step_00000010``. It is written under another name and renamed once it is
complete, has its checksums and is on disk, so a folder of that name is complete or was damaged
later. A damaged checkpoint is skipped with a warning. The next save renames it to
``step_00000010.damaged`` and deletes nothing because of it.

A save of a step that has an intact checkpoint replaces it: the old folder becomes
``step_00000010.replaced``, the new one takes its name, and the old one is deleted. A kill between
these two renames leaves both complete. The old one is then the checkpoint of its step for everyone
who reads, and the next :meth:`Checkpoints.restore`, resumed run or save gives it its name back.
"""

import contextlib
import errno
import math
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime import files, processes
from jaxrl_llm.models.lora import Adapted, trainable
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.train.checkpoint import record
from jaxrl_llm.train.checkpoint.config_text import config_text, without_precision
from jaxrl_llm.train.checkpoint.restore import CheckpointError, read_last
from jaxrl_llm.train.checkpoint.serialization import (
    UNFINISHED,
    Extras,
    fingerprint,
    from_arrays,
    orbax,
    shapes_digest,
    to_arrays,
)
from jaxrl_llm.train.state import TrainState

_NAME = re.compile(r"step_(\d{8})")
_REPLACED = ".replaced"  # the suffix of an intact one while another of its step takes its name
# The name, and in the metadata the key, of what is saved with the state.
_EXTRAS, _UPDATES = "extras", "updates"  # in the metadata
# Seconds that a process with an error waits for the others to reach the same point.
_WAIT = 10
# Seconds after which a write is looked at again, and after which one that stands still has failed.
_TURN_SECONDS, _STALL_SECONDS = 5.0, 600.0
_THREADS = "jaxrl_llm_checkpoint"  # how the names of the threads begin that save
_SLOWEST = 1e6  # bytes a second of a disk that a save is waited for


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    names = (path for path in folder.iterdir() if path.is_dir())
    steps = (step_of(x.with_suffix("") if x.suffix == _REPLACED else x) for x in names)
    return sorted({step for step in steps if step is not None})


def step_of(path: Path) -> int | None:
    """The step of a checkpoint by the name of its folder; None if it is no such name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def left_in(folder: Path) -> bool:
    """Whether a folder has any checkpoint, including damaged and renamed ones."""
    return any(UNFINISHED not in path.name for path in folder.glob("step_*"))


def best_of(scores: Mapping[int, float]) -> int | None:
    """The step with the highest score, the latest in a tie; non-finite scores do not count.

    Example:
      >>> best_of({2: 0.5, 4: 0.75, 6: 0.75, 8: float("nan")})
      6
    """
    known = [step for step, value in scores.items() if math.isfinite(value)]
    return max(known, key=lambda step: (scores[step], step), default=None)


def superseded(steps: Sequence[int], scores: Mapping[int, float], *, keep: int) -> list[int]:
    """The steps that may be deleted: all but the last ``keep`` and the best.

    Args:
      steps: Steps of the checkpoints, in order.
      scores: Scores by step, for steps that have one; more is better.
      keep: How many of the latest checkpoints to keep, at least one.

    Example:
      >>> superseded([2, 4, 6, 8], {2: 0.5, 4: 0.25}, keep=2)
      [4]
    """
    best = best_of({step: scores[step] for step in steps if step in scores})
    return [step for step in steps[:-keep] if step != best]


class _Pending(NamedTuple):
    """A save under way: its step, the rest of it in a thread, the step before it, and its bytes."""

    step: int
    finishing: Future
    required: bool
    before: int | None
    size: int


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
      folder: The folder of the checkpoints; created on the first save.
      model: The model of the run; checkpoints of another model are refused.
      keep: How many to keep; older ones are deleted once a newer one is complete.
      best: Also keep the best by this metric, of the steps that :meth:`set_score` was called for.
      run: Other values that must agree when a run is resumed, by name.
      updates: Optimizer steps of a batch, by which the optimizer's state counts.

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
        best: str | None = None,
        run: Mapping[str, str | int] | None = None,
        updates: int = 1,
    ):
        checks.check_positive("Checkpoints", keep=keep)
        self.folder, self.model = Path(folder).absolute(), model
        self.keep, self.best, self.run, self.updates = keep, best, dict(run or {}), updates
        self.last: int | None = None
        self._pending: _Pending | None = None
        self._scores: dict[int, float] = {}
        self._passed: list[int] = []  # damaged ones, later than the one that was read

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        return steps_in(self.folder)

    def path(self, step: int) -> Path:
        """The folder of one checkpoint, under another name if a save was killed as it replaced it.

        Only :meth:`sweep` and :meth:`restore` rename it, so that who only reads changes nothing.
        """
        path, aside = self._complete(step), self._complete(step).with_suffix(_REPLACED)
        return aside if aside.is_dir() and not path.exists() else path

    def _complete(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _unfinished(self, step: int) -> Path:
        return self._complete(step).with_suffix(UNFINISHED)

    def set_score(self, step: int, values: Mapping[str, float]) -> None:
        """Sets the score of a step, before or after it is saved; needed only with ``best``.

        Of the metrics by name, only the metric ``best`` is used; more is better.
        """
        if self.best is None or self.best not in values:
            return
        self._scores = {step: float(values[self.best])}
        if self._pending is not None and self._pending.step == step:
            self.wait()
        if self.last == step and jax.process_index() == 0:
            try:
                record.replace_notes(self.path(step), self._notes(step))
            except (OSError, ValueError) as error:
                told = f"The score of the checkpoint {str(self.path(step))!r} cannot be written"
                warnings.warn(f"{told}: {files.reason(error)}. The run goes on.", stacklevel=2)

    def forget_scores(self) -> None:
        """Removes the scores of all checkpoints, with which those that follow do not compare.

        Raises:
          CheckpointError: If one cannot be removed.
        """

        def forget() -> None:
            for step in self.steps():
                path = self.path(step)
                try:
                    if record.read_notes(path):
                        record.replace_notes(path, {})
                except OSError as error:
                    raise CheckpointError(
                        f"The score of the checkpoint {str(path)!r} cannot be removed: "
                        f"{files.reason(error)}."
                    ) from error

        processes.from_first(forget)

    def save(
        self, state: TrainState, *, extras: Extras | None = None, required: bool = True
    ) -> None:
        """Starts to write the state of its step; returns when the state may be changed again.

        Args:
          state: The state.
          extras: What :meth:`restore_extras` returns later.
          required: Whether a failure is an error. If not, it is a warning, raised by
            :meth:`poll` or the next method that is called.

        Raises:
          CheckpointError: If this one or the one before is required and could not be written. What
            was saved before is still there.
        """
        self.wait()
        step = int(state.step)

        def make_room() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.sweep()
            # A write that fails halfway is cleaned up too, but Orbax' threads log a page of errors.
            if shutil.disk_usage(self.folder).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def finish(written: Any, notes: Mapping[str, Any]) -> OSError | None:
            """Runs in a thread: ends the write, adds checksums, renames, deletes old checkpoints.

            Returns the error if old ones could not be deleted.
            """
            if jax.process_count() > 1:  # Orbax has the same limit, to hear of one that is lost
                written.result()
            else:
                _wait_for(written, self._unfinished(step))
            if jax.process_index() != 0:
                return None
            unfinished = self._unfinished(step)
            record.write_record(unfinished, notes, step=step)
            files.sync_all(unfinished)
            replaced = self._make_way(step)
            unfinished.rename(self._complete(step))
            files.sync(self.folder)  # before older ones are deleted
            try:
                if replaced is not None:
                    # Under this name, remains of it are swept and never put back.
                    shutil.rmtree(replaced.rename(unfinished))
                for damaged in list(self._passed):
                    self._set_aside(damaged)
                steps = [s for s in self.steps() if s <= step]  # later ones are not of this run
                scores = self._read_scores(steps) if self.best is not None else {}
                for old in superseded(steps, scores, keep=self.keep):
                    # Under this name, remains of it are swept later.
                    shutil.rmtree(self.path(old).rename(self._unfinished(old)))
            except OSError as error:
                return error
            return None

        items = {"state": to_arrays(state)}
        metadata = fingerprint(self.model, state) | self.run | {_UPDATES: self.updates}
        if extras is not None:
            items[_EXTRAS], metadata[_EXTRAS] = extras.arrays, extras.notes
        size = sum(x.nbytes for x in jax.tree.leaves(items))
        with self._failing_clearly(step, required), orbax(seconds=_patience(size)) as ocp:
            processes.from_first(make_room)
            written = ocp.save_checkpointables_async(
                self._unfinished(step), items, custom_metadata=metadata
            )
            pool = ThreadPoolExecutor(1, thread_name_prefix=_THREADS)
            finishing = pool.submit(finish, written, self._notes(step))
            pool.shutdown(wait=False)
            self._pending = _Pending(step, finishing, required, self.last, size)
            self.last = step

    def _make_way(self, step: int) -> Path | None:
        """Renames the checkpoint that a step has; returns its new name if it may be deleted.

        One that may not was skipped as damaged, or differs from its record.
        """
        if not (path := self._complete(step)).exists():
            return None
        if step in self._passed or not _is_intact(path, step):
            self._set_aside(step)
            return None
        return path.rename(path.with_suffix(_REPLACED))

    def _set_aside(self, step: int) -> None:
        """Renames a damaged checkpoint that was skipped."""
        if (path := self.path(step)).exists():
            path.rename(files.free_name(path))
        self._passed = [damaged for damaged in self._passed if damaged != step]

    def best_step(self) -> int | None:
        """The step of the best checkpoint by the metric that ``best`` names; None if none has it.

        Raises:
          ValueError: If ``best`` is None.
        """
        if self.best is None:
            raise ValueError("best_step: these checkpoints were made without best=METRIC.")
        return best_of(self._read_scores([s for s in self.steps() if s not in self._passed]))

    def _read_scores(self, steps: Sequence[int]) -> dict[int, float]:
        """The scores of those steps that have one, by step."""
        scores = {step: record.read_notes(self.path(step)).get(self.best or "") for step in steps}
        return {step: score for step, score in scores.items() if isinstance(score, float)}

    def _notes(self, step: int) -> dict[str, float]:
        return {self.best: self._scores[step]} if self.best and step in self._scores else {}

    def poll(self) -> None:
        """Like :meth:`wait` if the last save has ended; otherwise does nothing."""
        if self._pending is not None and self._pending.finishing.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is complete and older checkpoints are deleted.

        Raises:
          CheckpointError: If it was required and could not be written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        undeleted = None
        with self._failing_clearly(pending.step, pending.required):
            limit = _patience(pending.size)
            try:
                undeleted = pending.finishing.result(timeout=limit)
            except BaseException as error:
                self.last = pending.before
                if isinstance(error, TimeoutError) and not pending.finishing.done():
                    raise TimeoutError(f"it was not complete after {limit:.4g} s") from error
                raise
        if undeleted is not None:
            told = f"Old checkpoints in {str(self.folder)!r} cannot be deleted"
            warnings.warn(f"{told}: {files.reason(undeleted)}. The run goes on.", stacklevel=3)

    @contextlib.contextmanager
    def _failing_clearly(self, step: int, required: bool):
        try:
            yield
        except Exception as error:
            steps = []
            with contextlib.suppress(OSError):  # the folder may go while it is read
                self.sweep()
                steps = self.steps()
            last = f"; the one of step {steps[-1]} stands" if steps else ""
            told = (
                f"The checkpoint of step {step} cannot be written to {str(self.folder)!r}: "
                f"{files.reason(error)}{last}"
            )
            if required:
                raise CheckpointError(f"{told}.") from error
            warnings.warn(f"{told}. The run goes on.", stacklevel=4)

    def sweep(self) -> None:
        """Removes the remains of interrupted saves; call it only while no save is running.

        A checkpoint that such a save had not yet replaced gets its name back.
        """
        if jax.process_index() == 0:
            self._put_back()
            for path in self.folder.glob(f"step_*{UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _put_back(self) -> None:
        """Gives the checkpoints their names back that a save was killed before it replaced."""
        for path in self.folder.glob(f"step_*{_REPLACED}"):
            if (place := path.with_suffix("")).exists():  # killed after it was replaced
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):  # a folder that may only be read
                    path.rename(place)

    def restore(
        self, like: TrainState, *, step: int | None = None, any_precision: bool = False
    ) -> TrainState:
        """The last state that can be read, on the devices of ``like``.

        Args:
          like: A state of the same run, or its :func:`shapes_of`.
          step: The step to restore; by default the last complete one.
          any_precision: Whether the model may multiply in another precision than that of the run.

        Raises:
          ValueError: If the checkpoint belongs to another model, optimizer, recipe or run.
          CheckpointError: If there is none, or none can be read.
        """
        # A save under way, which the first process alone may know, may be between its two renames.
        processes.from_first(lambda: None if self._pending is not None else self._put_back())
        wanted = fingerprint(self.model, like) | self.run
        if any_precision:
            wanted["model"] = without_precision(config_text(self.model.config))
        return from_arrays(self._load(to_arrays(like), wanted, step), like)

    def restored_updates(self) -> int:
        """The optimizer steps of a batch at the state that was restored last.

        Those of this run if it was saved by a version that did not record them.
        """
        if self.last is None:
            return self.updates
        with orbax() as ocp:
            notes = ocp.metadata(self.path(self.last)).custom_metadata or {}
        return int(notes.get(_UPDATES, self.updates))

    def restore_extras(self) -> Extras | None:
        """The extras of the state that was restored last; None if it has none.

        Extras that cannot be read are skipped with a warning.
        """
        if self.last is None:
            return None
        path = self.path(self.last)
        try:
            with orbax() as ocp:
                notes = (ocp.metadata(path).custom_metadata or {}).get(_EXTRAS)
                if notes is None:
                    return None
                return Extras(ocp.load(path, checkpointable_name=_EXTRAS), notes)
        except Exception as error:
            told = f"The rollouts in the checkpoint {str(path)!r} cannot be read"
            warnings.warn(f"{told} and are passed over: {files.reason(error)}.", stacklevel=2)
            return None

    def restore_params(self, like: ArrayTree, *, step: int | None = None) -> ArrayTree:
        """Only the parameters of the last readable state, for a model in any precision.

        Arguments as in :meth:`restore`.
        """
        model = without_precision(config_text(self.model.config))
        wanted = {"params": shapes_digest(like), "model": model}
        checked = ("lora", "base", "questions", "reference")
        wanted |= {name: mark for name, mark in self.run.items() if name in checked}
        return self._load({"params": like}, wanted, step, partial=True)["params"]

    def restore_policy(self, params: ArrayTree, *, step: int | None = None) -> ArrayTree:
        """The policy of a checkpoint; of parameters with an adapter, the base is left as it is."""
        trained = self.restore_params(trainable(params), step=step)
        return params._replace(adapter=trained) if isinstance(params, Adapted) else trained

    def restore_collector(self, like: ArrayTree, *, step: int | None = None) -> ArrayTree:
        """The state of the recipe's collector; arguments as in :meth:`restore`."""
        return self._load({"collector_state": like}, {}, step, partial=True)["collector_state"]

    def candidates(self, step: int | None) -> list[int]:
        """The steps that a restore may read, in order: one, or with None all complete ones.

        Raises:
          CheckpointError: If there is none.
        """
        steps = processes.from_first(self.steps)
        if step is not None:
            if step not in steps:
                existing = ", ".join(map(str, steps)) or "none"
                raise CheckpointError(
                    f"There is no checkpoint of step {step} in {str(self.folder)!r}; "
                    f"there are {existing}."
                )
            return [step]
        if not steps:
            what = "no checkpoint that can be read" if left_in(self.folder) else "no checkpoint"
            raise CheckpointError(f"There is {what} in {str(self.folder)!r}.")
        return steps

    def _load(self, like: ArrayTree, wanted: dict, step: int | None, *, partial=False) -> ArrayTree:
        for leaf in jax.tree.leaves(like):
            if isinstance(leaf, jax.core.Tracer):  # as of a plan, which then calls the function
                raise jax.errors.ConcretizationTypeError(leaf, "A checkpoint is read into arrays.")
        steps = self.candidates(step)
        paths = [self.path(candidate) for candidate in steps]
        tree, place = read_last(paths, like, wanted, partial=partial)
        self.last, self._passed = steps[place], steps[place + 1 :]
        return tree


def _is_intact(path: Path, step: int) -> bool:
    """Whether a checkpoint agrees with its record; one that cannot be read does not."""
    try:
        record.check_record(path, step=step)
    except Exception:  # a damaged record may hold anything
        return False
    return True


def _patience(size: int) -> float:
    """Seconds that a save of this many bytes may take."""
    return _STALL_SECONDS + size / _SLOWEST


def _wait_for(written: Any, path: Path) -> None:
    """Waits until Orbax has written a folder, as long as the folder is there and grows.

    Raises:
      OSError: If the folder is missing or stops growing.
    """
    size, moved, absent = -1, time.monotonic(), 0
    while True:
        turn = time.monotonic() + _TURN_SECONDS
        try:
            return written.result(timeout=_TURN_SECONDS)
        except TimeoutError:
            if time.monotonic() < turn:  # not ours
                raise
        # Orbax adds to the name until it is complete.
        folders = list(path.parent.glob(f"{path.name}*"))
        absent = 0 if folders else absent + 1
        if absent > 1:  # at one moment between two names there may be none
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        present = size
        with contextlib.suppress(OSError):  # what is renamed in the middle of it
            present = sum(x.stat().st_size for folder in folders for x in folder.rglob("*"))
        if present != size:
            size, moved = present, time.monotonic()
        elif time.monotonic() - moved > _STALL_SECONDS:
            raise TimeoutError(f"nothing was written for {_STALL_SECONDS:g} s")


def save(folder: str | Path, state: TrainState, *, model: Model) -> None:
    """Writes the state of a loop that you write, and waits until it is complete.

    The last two checkpoints are kept. The model is checked when the state is restored. Checkpoints
    of later steps stay, with a warning, since :func:`restore` would read them.

    Args:
      folder: The folder of the checkpoints; it is created if it does not exist. A loop that goes
        on from an earlier step needs another one.
      state: The state, saved under the number of its step.
      model: The model.

    Raises:
      CheckpointError: If it cannot be written. Earlier checkpoints are unchanged.

    Example:
      >>> import tempfile
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe, optimizer = jr.recipes.dr_grpo(length=4), optax.sgd(0.1)
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for step in (1, 2, 3):
      ...         state = state._replace(step=jax.numpy.int32(step))
      ...         jr.train.save(folder, state, model=model)
      ...     [int(jr.train.restore(folder, state, model=model, step=n).step) for n in (2, 3)]
      [2, 3]
    """
    checkpoints = Checkpoints(folder, model=model)
    if later := [step for step in checkpoints.steps() if step > int(state.step)]:
        warnings.warn(
            f"save: {str(folder)!r} has checkpoints of later steps ({', '.join(map(str, later))}) "
            f"than {int(state.step)}, which restore reads by default; save to another folder.",
            stacklevel=2,
        )
    checkpoints.save(state)
    checkpoints.wait()


def restore(
    folder: str | Path, like: TrainState, *, model: Model, step: int | None = None
) -> TrainState:
    """The last state in a folder that can be read, on the devices of ``like``.

    Args:
      folder: The folder of the checkpoints.
      like: A state of the same model, optimizer and recipe, such as that of ``init_state``.
      model: The model.
      step: The step to restore; by default the last complete one.

    Raises:
      ValueError: If it belongs to another model, optimizer or recipe.
      CheckpointError: If there is none, or none can be read.

    Example:
      >>> import tempfile
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe, optimizer = jr.recipes.dr_grpo(length=4), optax.sgd(0.1)
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> other = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(1))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jr.train.save(folder, state, model=model)
      ...     restored = jr.train.restore(folder, other, model=model)
      >>> bool(restored.key == state.key)
      True
    """
    return Checkpoints(folder, model=model).restore(like, step=step)


def wait_for_saves() -> None:
    """Waits for saves that a second Ctrl-C has left under way in this process."""
    for thread in threading.enumerate():
        if thread.name.startswith(_THREADS):
            thread.join(_STALL_SECONDS)


@contextlib.contextmanager
def saved_on_error(
    checkpoints: Checkpoints,
    current: Callable[[], TrainState],
    save: Callable[[TrainState], None],
    log: Callable[[str], Any],
) -> Iterator[None]:
    """A context that waits for the last checkpoint, and after an error saves the state first.

    After a KeyboardInterrupt it does neither: a save under way goes on as long as the process does.

    ``current`` returns the state after the last complete step, ``save`` begins its checkpoint, and
    ``log`` is told what was saved.
    """
    try:
        yield
    except Exception as error:  # a second Ctrl-C should not wait
        # Only together can processes save. After an error that all have, all come here; where one
        # has failed alone, the others wait for it somewhere else.
        alone = False
        if jax.process_count() > 1:
            from orbax.checkpoint import multihost

            everyone = set(range(jax.process_count()))
            try:
                multihost.sync_global_processes("error", timeout=_WAIT, processes=everyone)
            except Exception:
                alone = True
        if alone:
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise processes.ProcessError(
                    "The computation across processes failed, probably because one of them ended. "
                    f"Start all of them again with --resume. {error}"
                ) from error
            raise
        try:
            if not isinstance(error, CheckpointError):  # a full disk stays full
                state = current()
                arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
                if not any(x.is_deleted() for x in arrays):  # a failed step may have consumed it
                    checkpoints.wait()  # if that save fails, this state is newer
                    step = int(state.step)
                    if processes.from_first(lambda: step > (checkpoints.last or 0)):
                        save(state)
                        checkpoints.wait()
                        log(
                            f"An error ended the run; the state after step {step} is saved, for "
                            "--resume."
                        )
            checkpoints.wait()
        except CheckpointError as failed:
            warnings.warn(str(failed), stacklevel=2)
        raise
    checkpoints.wait()
