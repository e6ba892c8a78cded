"""A train step on an accelerator: model FLOP utilization, peak memory, where time goes.

    python -m benchmarks.gpu --part train --save     # Qwen3-1.7B's size, 16k tokens a step
    python -m benchmarks.gpu --part train --remat full dots none --peak-flops 989e12
    python -m benchmarks.gpu --part train --tiny     # a look, on any machine

Weights are random: float32 ones that the optimizer moves, bfloat16 in the products. A step is that
of `train.make_step` with AdamW on 4 prompts of 512 tokens with 8 responses of 448 each: 16,384
tokens, a prompt counted once. Utilization is that of the metrics of a run (`train.profile`), so
recomputation does not count, and is of a large product in bfloat16 measured in the same run; with
`--peak-flops` also of the number that the vendor gives.

`program_bytes` is what the compiled step takes, its state included; `peak_memory_bytes` what the
device had in use at most by the time the step had run, which is why what keeps less is run first.
Parts are compiled pieces of the same shapes. Backward is the gradient of all layers less their
forward pass, and so holds what is computed again; rest is what the step takes beside its parts, and
negative where the whole program does better than its pieces.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks import harness, workload
from benchmarks.accelerator import (
    Timed,
    compile_time,
    in_turns,
    make_model,
    model_name,
    random_params,
    rounded,
)
from benchmarks.worker import jax_device_memory, package_versions, peak_memory
from jaxrl_llm.core import trees
from jaxrl_llm.train.batches import split_microbatches
from jaxrl_llm.train.models.score import score_hidden
from jaxrl_llm.train.optimizer import apply_if_finite
from jaxrl_llm.train.profile import Meter, measured_peak

# By the memory they need: a device does not forget its peak.
REMAT = ("full", "dots", "none")
SIZE = {"prompts": 4, "rollouts": 8, "prompt_tokens": 512, "response_tokens": 448}
TINY = {"prompts": 2, "rollouts": 2, "prompt_tokens": 16, "response_tokens": 8}
# Rows of the square matrices whose product is the measured peak.
PRODUCT, TINY_PRODUCT = 16384, 256


class Alive:
    """The one state there is: every step, and the optimizer's piece, gives it away and back."""

    def __init__(self, model: jr.models.Model, recipe: jr.recipes.Recipe):
        self.model, self.recipe = model, recipe
        self.optimizer = jr.train.make_optimizer(jr.train.OptimizerConfig())
        params = random_params(model, "float32")
        self.state = jr.train.init_state(
            params, self.optimizer, recipe, key=jax.random.key(0), copy=False
        )


class Compiled(NamedTuple):
    """A step that is ready to run, and what it takes."""

    run: Callable[[], Any]
    compile_seconds: float
    program_bytes: int
    # Bytes of the device by the end of the first run; empty before.
    peak: list[int]


def batch_of(size, vocab_size: int) -> jr.recipes.Batch:
    """Random tokens, all of them kept."""
    shape = (size["prompts"], size["rollouts"])
    prompts = workload.prompt_ids(shape[0], size["prompt_tokens"], vocab_size=vocab_size)
    tokens = workload.response_ids(*shape, size["response_tokens"], vocab_size=vocab_size)
    batch = jr.recipes.Batch(
        tokens=np.asarray(tokens, np.int32),
        mask=np.ones((*shape, size["response_tokens"]), bool),
        rewards=workload.rewards(*shape),
        where=np.ones(shape, bool),
        prompt_tokens=np.asarray(prompts, np.int32),
        prompt_mask=np.ones((shape[0], size["prompt_tokens"]), bool),
    )
    return jax.tree.map(jnp.asarray, batch)


def step_of(alive: Alive, batch: jr.recipes.Batch, *, microbatches: int, remat: str) -> Compiled:
    """One update, compiled once for its memory and its runs."""
    step: Any = jr.train.make_step(
        alive.model, alive.recipe, alive.optimizer, microbatches=microbatches, remat=remat
    )
    lowered = step.lower(alive.state, batch)
    begin = time.perf_counter()
    step.compiled = lowered.compile()
    seconds, memory = time.perf_counter() - begin, step.compiled.memory_analysis()
    taken = memory.argument_size_in_bytes + memory.output_size_in_bytes
    taken += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    peak: list[int] = []

    def run() -> None:
        alive.state, metrics = step(alive.state, batch)
        jax.block_until_ready(alive.state)
        if float(metrics["skipped"]):
            raise ValueError(f"the update of the step with remat {remat!r} was skipped")
        if not peak:
            peak.append(jax_device_memory() or peak_memory())

    return Compiled(run, seconds, taken, peak)


def pieces(alive: Alive, part: jr.recipes.Batch, remat: Sequence[str]) -> dict[str, Callable]:
    """The pieces of a step by name, ready to run, for one microbatch."""
    model, optimizer = alive.model, alive.optimizer
    arrays = (part.prompt_tokens, part.prompt_mask, part.tokens, part.mask)

    def hidden_of(params, arrays, remat="none"):
        return score_hidden(model, params, *arrays, remat=remat)

    def gradient(params, cotangent, arrays, remat):
        _, pull = jax.vjp(lambda params: hidden_of(params, arrays, remat), params)
        return trees.cast(pull(cotangent)[0], jnp.float32)

    def vocabulary(params, hidden, tokens, mask):
        def total(matrix, hidden):
            return jnp.sum(jr.logprobs.token_logprobs(hidden, matrix, tokens, mask=mask)[0])

        return jax.grad(total, argnums=(0, 1))(model.output_matrix(params), hidden)

    def update(carry, grads):
        return apply_if_finite(optimizer, carry, jnp.float32(0), grads)[0]

    params = alive.state.params
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 1e-6, jnp.float32), params)
    cotangent = jnp.ones((*part.tokens.shape, model.config.width), model.config.dtype)
    forward, projects = jax.jit(hidden_of), jax.jit(vocabulary)
    updates = jax.jit(update, donate_argnums=0)

    def run_optimizer():
        state = alive.state
        params, opt_state = updates((state.params, state.opt_state), grads)
        alive.state = state._replace(params=params, opt_state=opt_state)
        return params, opt_state

    runs = {
        "forward": lambda: forward(alive.state.params, arrays),
        "vocabulary": lambda: projects(alive.state.params, cotangent, part.tokens, part.mask),
        "optimizer": run_optimizer,
    }
    for name in remat:
        piece = jax.jit(partial(gradient, remat=name))
        runs[f"gradient {name}"] = lambda p=piece: p(alive.state.params, cotangent, arrays)
    return runs


def parts_of(
    seconds: float, found: dict[str, Timed], *, remat: str, microbatches: int
) -> dict[str, float]:
    """Seconds of a step by part, from those of its pieces."""
    forward, gradient = found["forward"].median, found[f"gradient {remat}"].median
    parts = {
        "forward": microbatches * forward,
        "backward": microbatches * (gradient - forward),
        "vocabulary": microbatches * found["vocabulary"].median,
        "optimizer": found["optimizer"].median,
    }
    parts["rest"] = seconds - sum(parts.values())
    return {name: rounded(value) for name, value in parts.items()}


def measure(
    *,
    tiny: bool,
    rounds: int,
    microbatches: int = 1,
    remat: Sequence[str] = REMAT[:2],
    peak_flops: float | None = None,
) -> dict[str, Any]:
    """Steps with each rematerialization in turns, then their pieces.

    Args:
        tiny: Whether for a look alone.
        rounds: Runs of each.
        microbatches: Of the step; divides the prompts.
        remat: What steps keep of a layer.
        peak_flops: Operations a second by the vendor.
    """
    model, size = make_model(tiny=tiny), TINY if tiny else SIZE
    dtype = str(jnp.dtype(model.config.dtype))
    peaks = {"measured": measured_peak(dtype, size=TINY_PRODUCT if tiny else PRODUCT)}
    if peak_flops is not None:
        peaks["vendor"] = peak_flops
    batch = batch_of(size, model.config.vocab_size)
    alive = Alive(model, jr.recipes.dr_grpo(length=size["response_tokens"]))
    remat = [name for name in REMAT if name in remat]
    steps = {}
    for name in remat:
        steps[name] = step_of(alive, batch, microbatches=microbatches, remat=name)
        steps[name].run()
    found = in_turns(rounds, {f"step {name}": step.run for name, step in steps.items()})
    part = jax.tree.map(lambda x: x[0], split_microbatches(batch, microbatches))
    found |= in_turns(rounds, pieces(alive, part, remat))
    ours, meter = {}, Meter(model, peak_flops=peaks["measured"])
    for name, step in steps.items():
        timed = found[f"step {name}"]
        ours[name] = {
            **speed(meter, batch, timed.seconds, peaks),
            **compile_time(step.compile_seconds),
            "program_bytes": step.program_bytes,
            "peak_memory_bytes": step.peak[0],
            "parts_seconds": parts_of(timed.median, found, remat=name, microbatches=microbatches),
        }
    return {
        "workload": {
            "model": model_name(tiny=tiny),
            "dtype": dtype,
            "master_dtype": str(optax.tree.dtype(alive.state.params)),
            "optimizer": "adamw",
            **size,
            "tokens": size["prompts"]
            * (size["prompt_tokens"] + size["rollouts"] * size["response_tokens"]),
            "microbatches": microbatches,
            "runs": rounds,
        },
        "versions": {"ours": package_versions(("jax", "jaxlib", "optax", "jaxrl_llm"))},
        "commit": harness.commit(),
        "peak_flops_per_s": {name: rounded(peak) for name, peak in peaks.items()},
        "ours": ours,
    }


def speed(meter: Meter, batch, seconds: Sequence[float], peaks: dict[str, float]) -> dict[str, Any]:
    """Figures of runs of a step: seconds, tokens and operations a second, utilization."""
    runs = [meter(batch, {"wait": 0.0, "score": 0.0, "train": s}) for s in seconds]
    tokens = [run["unique_tokens_per_second"] for run in runs]
    flops = [run["flops_per_second"] for run in runs]
    return {
        "seconds": harness.summary(seconds),
        "tokens_per_s": harness.summary(tokens),
        "flops_per_s": harness.summary(flops),
        "mfu": {name: harness.summary([x / peak for x in flops]) for name, peak in peaks.items()},
    }
