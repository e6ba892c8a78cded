"""How long a checkpoint keeps a training step waiting, beside how long it takes to be written.

    python -m benchmarks.checkpoint --save           # measure and write the result
    python -m benchmarks.checkpoint --tiny           # a quick look at a small model

The state is that of SmolLM2-135M with AdamW, float32, with random weights: 1.6 GB. An update is a
compiled program that reads and writes the whole state, which it is given (donated): the least that
a train step does with it, and all of it that a save can hold up.

- blocked: seconds in which `Checkpoints.save` does not return, so that no step can run.
- whole: seconds from its call until the checkpoint has its checksums and its name.
- share: blocked / whole, of one save; its bar is 0.05.
- first_update: seconds of the update right behind a save, and how many more than alone. On a CPU
  what is saved is not copied before the step but kept, so that this update cannot write over it.
- copy: seconds in which the state is copied in memory, for comparison.
- restore: seconds in which it is read, checksums included; the files are in the page cache.

Saves, updates and copies take turns. The first save, which imports Orbax, is not counted.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.models import ModelConfig, make_model, param_shapes
from jaxrl_llm.testing import tiny_config
from jaxrl_llm.train import Checkpoints, TrainState, init_state
from jaxrl_llm.train.checkpoint.serialization import shapes_of

BAR = 0.05
SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    max_length=8192,
    tied=True,
)


def make_state(config: ModelConfig, seed: int = 0) -> TrainState:
    """A state of random numbers: zeros could be written in less."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        return jax.device_put(rng.standard_normal(shape.shape, np.float32))

    params = jax.tree.map(draw, param_shapes(make_model(config)))
    key = jax.random.key(seed)
    state = init_state(params, optax.adamw(1e-3), jr.recipes.dapo(), key=key, copy=False)
    moments = jax.tree.map(lambda x: draw(x) if x.ndim else x, state.opt_state)
    return state._replace(opt_state=moments)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call and what it gave, arrays awaited."""
    start = time.perf_counter()
    out = jax.block_until_ready(function())
    return time.perf_counter() - start, out


def measure(config: ModelConfig, folder: Path, *, rounds: int) -> dict[str, Any]:
    """The figures of one model.

    Args:
        config: The model.
        folder: On the disk that is measured.
        rounds: Saves after the first.
    """
    state = make_state(config)
    size = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    checkpoints = Checkpoints(folder, model=make_model(config), keep=1)
    names = ("blocked", "whole", "update", "first_update", "first_update_more", "copy")
    found: dict[str, list[float]] = {name: [] for name in (*names, "share", "restore")}

    @jax.jit
    def change(arrays):
        return jax.tree.map(lambda x: x * 0.999 if x.ndim else x, arrays)

    update = jax.jit(change, donate_argnums=0)

    def step(state: TrainState) -> TrainState:
        params, opt_state = update((state.params, state.opt_state))
        return state._replace(params=params, opt_state=opt_state, step=state.step + 1)

    state = step(step(state))
    for number in range(rounds + 1):
        alone, state = timed(lambda s=state: step(s))
        copy, copied = timed(lambda s=state: change((s.params, s.opt_state)))
        del copied
        start = time.perf_counter()
        checkpoints.save(state)
        blocked = time.perf_counter() - start
        first, state = timed(lambda s=state: step(s))
        checkpoints.wait()
        whole = time.perf_counter() - start
        like = shapes_of(state)
        restore, restored = timed(lambda s=like: checkpoints.restore(s))
        del restored
        values = (blocked, whole, alone, first, first - alone, copy, blocked / whole, restore)
        print(f"save {number}: " + ", ".join(f"{v:.3g}" for v in values), file=sys.stderr)
        if number:
            for name, value in zip(found, values, strict=True):
                found[name].append(value)
    figures = {name: harness.summary(values) for name, values in found.items()}
    gigabytes = [size / 1e9 / seconds for seconds in found["whole"]]
    return figures | {"bytes": size, "gb_per_s": harness.summary(gigabytes)}


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=harness.MIN_ROUNDS)
    parser.add_argument("--tiny", action="store_true", help="a small model, for tests")
    parser.add_argument("--folder", help="on the disk to measure; a temporary one without")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    config = tiny_config() if options.tiny else SMOLLM2
    folder = Path(tempfile.mkdtemp(prefix="jaxrl_llm-checkpoint-", dir=options.folder))
    try:
        figures = measure(config, folder / "checkpoints", rounds=options.rounds)
    finally:
        shutil.rmtree(folder)
    result = {
        "name": "checkpoint",
        "workload": {
            "model": "tiny" if options.tiny else "SmolLM2-135M",
            "dtype": "float32",
            "optimizer": "adamw",
            "runs": options.rounds,
        },
        "device": jax_device_name(),
        "versions": package_versions(["jax", "jaxlib", "orbax-checkpoint", "tensorstore"]),
        "commit": harness.commit(),
        "bars": {"share": BAR},
        "ours": figures,
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
