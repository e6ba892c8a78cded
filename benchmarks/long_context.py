"""What a step of long inputs needs, beside another checkout of this code: random weights.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.long_context --before /tmp/before --save
    python -m benchmarks.long_context --tiny         # a look, on any machine

- memory: bytes of a compiled step, one prompt and one response of equal lengths, each layer
  computed again in the backward pass: weights, optimizer and all temporary arrays.
- seconds: of the step at the shortest of the lengths, each checkout in a process, in turns.

Steps are those of SmolLM2-135M in float32 with AdamW.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.checkpoint import SMOLLM2
from jaxrl_llm.recipes import Batch
from jaxrl_llm.testing import tiny_config

LENGTHS = (1024, 8192)


def one_response(length: int, vocab_size: int) -> Batch:
    """One prompt and one response."""
    rng = np.random.default_rng(0)
    return Batch(
        tokens=rng.integers(0, vocab_size, (1, 1, length), dtype=np.int32),
        mask=np.ones((1, 1, length), bool),
        rewards=np.ones((1, 1), np.float32),
        where=np.ones((1, 1), bool),
        prompt_tokens=rng.integers(0, vocab_size, (1, length), dtype=np.int32),
        prompt_mask=np.ones((1, length), bool),
    )


def _child(lengths: list[int], runs: int, tiny: bool) -> None:
    """Prints bytes by length; then, for each line of stdin, seconds of a step of the shortest."""
    config = tiny_config(num_layers=1) if tiny else SMOLLM2
    model = jr.models.make_model(config)
    recipe, optimizer = jr.recipes.reinforce_pp(), optax.adamw(1e-6)
    params = jax.jit(model.init)(jax.random.key(0))
    state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0), copy=False)
    taken: dict[int, int] = {}
    compiled = []
    for length in lengths:
        step: Any = jr.train.make_step(model, recipe, optimizer, remat="full")
        program = step.lower(state, one_response(length, config.vocab_size)).compile()
        memory = program.memory_analysis()
        taken[length] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        if length == min(lengths):
            step.compiled = program
            compiled.append(step)
    print(json.dumps(taken), flush=True)
    batch = jax.device_put(one_response(min(lengths), config.vocab_size))
    for _ in range(runs + 1):  # the first is a warm-up
        if not sys.stdin.readline():
            return
        start = time.perf_counter()
        state, metrics = compiled[0](state, batch)
        jax.block_until_ready((state, metrics))
        print(time.perf_counter() - start, flush=True)


def _processes(checkouts: dict[str, Path], request: dict[str, Any]) -> dict[str, Any]:
    """Bytes and seconds of each checkout."""
    alive, taken = {}, {}
    for name, folder in checkouts.items():
        alive[name] = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(request)],
            env=os.environ | {"PYTHONPATH": str(folder.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        taken[name] = json.loads(alive[name].stdout.readline())
    seconds: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(request["runs"] + 1):
        for name, process in alive.items():
            process.stdin.write("\n")
            process.stdin.flush()
            seconds[name].append(float(process.stdout.readline()))
    for process in alive.values():
        process.communicate()
    return {
        name: {"bytes": taken[name], "seconds": harness.summary(seconds[name][1:])}
        for name in checkouts
    }


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--child", type=json.loads, help="used by the command itself")
    options = parser.parse_args(argv)
    if options.child is not None:
        _child(**options.child)
        return
    harness.refuse_peers(parser, options)
    lengths = [8, 16] if options.tiny else list(LENGTHS)
    checkouts = harness.checkouts(options.before)
    request = {"lengths": lengths, "runs": options.rounds, "tiny": options.tiny}
    ours: dict[str, Any] = _processes(checkouts, request)
    if options.before is not None:
        now, before = (ours[name]["seconds"]["median"] for name in ("now", "before"))
        ours["times_faster"] = round(before / now, 3)
    workload = {
        "model": "tiny" if options.tiny else "SmolLM2-135M's size, random",
        "dtype": "float32",
        "lengths": lengths,
        "runs": options.rounds,
    }
    result = harness.of_ours("long_context", workload, ours)
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
