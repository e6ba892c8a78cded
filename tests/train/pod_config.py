"""A run of several processes, as small as one can be; the environment says how its reward behaves.

SLOW: seconds that a reward takes. BROKEN: the process in which it fails.
"""

import dataclasses
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax  # noqa: E402
from tiny_run import low_bytes, tiny_run, without_plot  # noqa: E402

from jaxrl_llm.train import CheckpointConfig, MeshConfig, OptimizerConfig  # noqa: E402

if "POD" in os.environ:  # not where a test imports this file
    without_plot()


def reward(prompt, completion, metadata):
    if os.environ.get("BROKEN") == str(jax.process_index()):
        raise ValueError("no such verifier")
    time.sleep(float(os.environ.get("SLOW", "0")))
    return low_bytes(prompt, completion, metadata)


# Adam's eps is large: it would blow rounding up where a gradient is nearly zero.
config = dataclasses.replace(
    tiny_run("set --run-dir"),
    reward=reward,
    optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-2),
    mesh=MeshConfig(fsdp=2, tensor=2),
    checkpoint=CheckpointConfig(every=1, keep=9),
    steps=4,
)
