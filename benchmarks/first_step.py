"""What the first train step costs before it runs, beside another checkout of this code.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.first_step --before /tmp/before --save
    python -m benchmarks.first_step --tiny         # a look, on any machine

Processor seconds to trace and lower the step, to compile it, and to read it as the cache of
programs does, at several depths of SmolLM2-135M's layers and in both dtypes: the batch of
configs/quickstart.py, 8 prompts that begin with the same 40 tokens and 8 responses of up to 16
tokens to each, packed as the training loop packs it. Each is measured in a new process without a
cache of programs, the checkouts in turns, with the compiler's options of the command.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.checkpoint import SMOLLM2
from jaxrl_llm.recipes import Batch
from jaxrl_llm.testing import tiny_config
from jaxrl_llm.train.batches import Passes
from jaxrl_llm.train.policy_gradient import RunOptions, make_policy_gradient

LAYERS, TINY_LAYERS, DTYPES = (6, 30), (1, 2), ("float32", "bfloat16")
PROMPTS, ROLLOUTS, RESPONSE, PROMPT, SHARED = 8, 8, 16, 60, 40
PARTS = ("trace_and_lower", "compile", "read")


def _batch(vocab_size: int) -> Batch:
    """Long responses, as at the beginning of a run."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocab_size, (PROMPTS, PROMPT), dtype=np.int32)
    prompts[:, :SHARED] = prompts[0, :SHARED]
    lengths = rng.integers(RESPONSE - 4, RESPONSE + 1, (PROMPTS, ROLLOUTS, 1))
    mask = np.arange(RESPONSE) < lengths
    return Batch(
        tokens=rng.integers(0, vocab_size, mask.shape, dtype=np.int32),
        mask=mask,
        rewards=rng.integers(0, 2, mask.shape[:2]).astype(np.float32),
        where=np.ones(mask.shape[:2], bool),
        prompt_tokens=prompts,
        prompt_mask=np.ones(prompts.shape, bool),
        behavior_logp=np.where(mask, -1.0, 0.0).astype(np.float32),
    )


def _set_options_of_the_command() -> None:
    """As ``jaxrl-llm`` does before it uses jax; checkouts before this one set nothing."""
    try:
        from jaxrl_llm.core.runtime.compiler import copy_functions_late
    except ImportError:
        return
    copy_functions_late()


def _child(layers: int, dtype: str, tiny: bool) -> None:
    """Prints the processor seconds of the parts."""
    _set_options_of_the_command()
    config = tiny_config() if tiny else SMOLLM2
    config = dataclasses.replace(config, num_layers=layers, dtype=jnp.dtype(dtype))
    model = jr.models.make_model(config)
    recipe = jr.recipes.dr_grpo(length=RESPONSE).replace(
        regularizers=(jr.bind(jr.regularizers.entropy_bonus, coef=0.02),)
    )
    optimizer = jr.train.make_optimizer(jr.train.OptimizerConfig(learning_rate=2e-5))
    options = RunOptions(
        passes=Passes(),
        temperature=1.0,
        remat="none",
        shared_prefix_len=SHARED,
        packing="auto",
        stale=False,
        mesh=None,
    )
    algorithm = make_policy_gradient(model, recipe, optimizer, lambda: None, options=options)
    params = jax.jit(model.init)(jax.random.key(0))
    state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0), copy=False)
    batch, _ = algorithm.score(_batch(config.vocab_size))
    step: Any = algorithm.step
    lowered, traced = _timed(step.lower, state, batch)
    compiled, compiling = _timed(lowered.compile)
    stored = serialize_executable.serialize(compiled)
    del compiled
    _, reading = _timed(serialize_executable.deserialize_and_load, *stored)
    print(json.dumps(dict(zip(PARTS, (traced, compiling, reading), strict=True))))


def _timed(function: Callable, *args: Any) -> tuple[Any, float]:
    """What a function returns, and its processor seconds."""
    start = time.process_time()
    result = function(*args)
    return result, time.process_time() - start


def _seconds(checkout: Path, layers: int, dtype: str, tiny: bool) -> dict[str, float]:
    """The parts in a process of a checkout."""
    request = {"layers": layers, "dtype": dtype, "tiny": tiny}
    return harness.run_child(__file__, request, checkout, JAX_ENABLE_COMPILATION_CACHE="false")


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
    checkouts = harness.checkouts(options.before)
    ours: dict[str, Any] = {}
    for layers, dtype in itertools.product(TINY_LAYERS if options.tiny else LAYERS, DTYPES):
        rounds = [
            {
                name: _seconds(folder, layers, dtype, options.tiny)
                for name, folder in checkouts.items()
            }
            for _ in range(options.rounds)
        ]
        ours[f"{layers} layers, {dtype}"] = {
            name: {part: harness.summary([r[name][part] for r in rounds]) for part in PARTS}
            for name in checkouts
        }
    workload = {
        "model": "tiny" if options.tiny else "SmolLM2-135M's layers, random",
        "rounds": options.rounds,
    }
    result = harness.of_ours("first_step", workload, ours)
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
