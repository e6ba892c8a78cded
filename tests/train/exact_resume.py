"""A run that is killed and resumed, beside the one that was not."""

import dataclasses
import shutil

import jax
import numpy as np
from test_checkpoint import assert_same

from jaxrl_llm.train import train


def assert_resumes(config, whole, folder, *, first=1):
    """Resumes a copy of a run, with a checkpoint of each step, from its step ``first``.

    Fails unless its end is that of ``whole``. Returns the resumed run.
    """
    shutil.copytree(config.run_dir, folder)
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name.removeprefix("step_")) > first:
            shutil.rmtree(path)
    assert (folder / "checkpoints" / f"step_{first:08d}").is_dir()  # else it would begin anew
    again = train(dataclasses.replace(config, run_dir=str(folder)), resume=True)
    assert_same(again.state, whole.state)
    assert again.state.data_cursor == whole.state.data_cursor
    states = (run.state.collector_state for run in (again, whole))
    jax.tree.map(np.testing.assert_array_equal, *states)
    return again
