"""After an error in the middle of a run, saves a checkpoint of the last complete step."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxrl_llm.core.runtime import processes
from jaxrl_llm.train.checkpoint.checkpoints import Checkpoints
from jaxrl_llm.train.checkpoint.restore import CheckpointError
from jaxrl_llm.train.state import TrainState

# Seconds that a process with an error waits for the others to reach the same point.
_PATIENCE = 10


@contextlib.contextmanager
def saved_on_error(
    checkpoints: Checkpoints,
    current: Callable[[], TrainState],
    save: Callable[[TrainState], None],
    log: Callable[[str], Any],
) -> Iterator[None]:
    """A context that waits for the last checkpoint, and after an error saves the state first.

    ``current`` returns the state after the last complete step, ``save`` begins its checkpoint, and
    ``log`` is told what was saved.
    """
    try:
        yield
    except BaseException as error:
        if not _all_processes_failed():
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise processes.ProcessError(
                    "The computation of all processes broke off; one of them has probably ended. "
                    f"Start all of them again with --resume. {error}"
                ) from error
            raise
        try:
            # A second Ctrl-C should not wait, and a full disk stays full.
            if isinstance(error, Exception) and not isinstance(error, CheckpointError):
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


def _all_processes_failed() -> bool:
    """Whether all processes reached this point; only then can they save a checkpoint.

    They do after an error that all have. Where one has failed alone, the others wait for it
    somewhere else.
    """
    if jax.process_count() == 1:
        return True
    from orbax.checkpoint import multihost

    everyone = set(range(jax.process_count()))
    try:
        multihost.sync_global_processes("error", timeout=_PATIENCE, processes=everyone)
    except Exception:
        return False
    return True
