"""Sampling on an accelerator: tokens a second, the share of memory bandwidth, where time goes.

    python -m benchmarks.gpu --save                  # Qwen3-1.7B's size, bfloat16, 64 to 512 slots
    python -m benchmarks.gpu --tiny --slots 8        # a look, on any machine

Weights are random. A decode step reads all weights, the keys and values of each prompt once, and
those of each response so far: `bandwidth_share` is what these bytes over the time of a step are of
the bandwidth of a plain copy, measured in the same run. A step's parts are measured as compiled
pieces of the same shapes; projections are what a pass of the model takes beside its attention.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxrl_llm as jr
from benchmarks import decode_parts, harness, workload
from benchmarks.worker import (
    jax_device_memory,
    jax_device_name,
    package_versions,
    peak_memory,
)

MODEL = {
    "architecture": "qwen3",
    "vocab_size": 151936,
    "width": 2048,
    "num_layers": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "mlp_width": 6144,
    "max_length": 40960,
    "rope_theta": 1e6,
    "tied": True,
    "qk_norm": True,
}
SIZE = {"rollouts": 8, "prompt_tokens": 512, "new_tokens": 256, "copied_bytes": 2**31}
TINY = {"rollouts": 4, "prompt_tokens": 16, "new_tokens": 8, "copied_bytes": 2**22}


def random_model(*, tiny: bool) -> tuple[jr.models.Model, Any]:
    """A model and random parameters, both bfloat16."""
    if tiny:
        config = jr.testing.tiny_config(dtype="bfloat16")
    else:
        config = jr.models.ModelConfig(**MODEL, dtype="bfloat16")
    model = jr.models.make_model(config)

    @jax.jit
    def init(key):
        return jax.tree.map(lambda x: x.astype(config.dtype), model.init(key))

    return model, init(jax.random.key(0))


class Timed(NamedTuple):
    """Seconds of the first run of a function, which compiles, and of those that count."""

    first: float
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def in_turns(rounds: int, runs: dict[str, Callable[[], Any]]) -> dict[str, Timed]:
    """Times functions in turns."""

    def seconds_of(run: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - begin

    found = {name: Timed(seconds_of(run), []) for name, run in runs.items()}
    for turn in range(1, rounds + 1):
        for name, run in runs.items():
            found[name].seconds.append(seconds_of(run))
            message = f"{name}: run {turn} of {rounds}, {found[name].seconds[-1]:.3g} s"
            print(message, file=sys.stderr, flush=True)
    return found


def copy_bandwidth(size: int, rounds: int) -> dict[str, float]:
    """Bytes a second, read and written, of a plain copy of ``size`` bytes."""
    source = jnp.ones(size // 4, jnp.float32)
    copy = jax.jit(lambda x: -x)
    timed = in_turns(rounds, {"copy": lambda: copy(source)})["copy"]
    return harness.summary([2 * source.nbytes / s for s in timed.seconds])


def step_bytes(model, params, size) -> dict[str, int]:
    """What a decode step has to read: weights, and keys and values by their mean length."""
    config, itemsize = model.config, jnp.dtype(model.config.dtype).itemsize
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    if not config.tied:  # Of the embedding, a row a slot.
        weights -= params["embed"]["embedding"].nbytes
    return {
        "weights": weights,
        "prompts": size["prompts"] * size["prompt_tokens"] * token,
        "responses": size["slots"] * (size["new_tokens"] + 1) // 2 * token,
    }


def sampler_run(model, params, prompts, size) -> Callable[[], Any]:
    """All rollouts at once: ``rollout.make_sampler``."""
    sample = jr.rollout.make_sampler(
        model, max_new_tokens=size["new_tokens"], group_size=size["rollouts"]
    )

    def run():
        rollout = sample(params, jax.random.key(1), prompts)
        if not rollout.mask.all():
            raise ValueError("the sampler did not fill every response")
        return rollout

    return run


def engine_run(model, params, prompts, size) -> Callable[[], Any]:
    """Twice as many groups as there are rows, through the slots of ``rollout.make_engine``."""
    engine = jr.rollout.make_engine(
        model,
        rows=size["prompts"],
        width=size["rollouts"],
        prompt_length=size["prompt_tokens"],
        max_new_tokens=size["new_tokens"],
    )
    width, rows = size["rollouts"], size["prompts"]
    groups = [
        jr.rollout.Group(
            id=i, prompt=prompts[i % rows], requests=tuple(range(i * width, (i + 1) * width))
        )
        for i in range(2 * rows)
    ]

    def run():
        generation = jr.rollout.Generation(engine, params, key=jax.random.key(1))
        generation.submit(*groups)
        if len(list(generation)) != len(groups):
            raise ValueError("the engine did not finish every group")

    return run


def case(model, params, size, *, bandwidth: float, rounds: int) -> dict[str, Any]:
    """Sampler and engine with one number of slots."""
    prompts = workload.prompt_ids(
        size["prompts"], size["prompt_tokens"], vocab_size=model.config.vocab_size
    )
    tokens = size["slots"] * size["new_tokens"]
    ways = {"sampler": (sampler_run, tokens), "engine": (engine_run, 2 * tokens)}
    runs = {name: make(model, params, prompts, size) for name, (make, _) in ways.items()}
    found, peaks = in_turns(rounds, runs), jax_device_memory() or peak_memory()
    result: dict[str, Any] = {}
    for name, timed in found.items():
        result[name] = {
            "seconds": harness.summary(timed.seconds),
            "tokens_per_s": harness.summary([ways[name][1] / s for s in timed.seconds]),
            "compile_seconds": rounded(max(0.0, timed.first - timed.median)),
        }
    pieces = in_turns(rounds, decode_parts.pieces(model, params, size))
    parts = {name: timed.median for name, timed in pieces.items()}
    seconds = (found["sampler"].median - parts.pop("prefill")) / size["new_tokens"]
    result["step"] = step(seconds, parts, step_bytes(model, params, size), bandwidth)
    # Of all cases so far: a device does not forget its peak.
    return result | {"peak_memory_bytes": peaks}


def step(
    seconds: float, parts: dict[str, float], read: dict[str, int], bandwidth: float
) -> dict[str, Any]:
    """A decode step of the sampler, from the seconds of its pieces."""
    parts = {name: value / decode_parts.STEPS for name, value in parts.items()}
    parts = {
        "attention": parts["attention"],
        "projections": parts["forward"] - parts["attention"],
        "output_and_draw": parts["output_and_draw"],
        "rest": seconds - parts["forward"] - parts["output_and_draw"],
    }
    return {
        "seconds": rounded(seconds),
        "parts_seconds": {name: rounded(value) for name, value in parts.items()},
        "bytes": read,
        "bandwidth_share": rounded(sum(read.values()) / seconds / bandwidth),
    }


def rounded(x: float) -> float:
    return float(f"{x:.3g}")


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", help="64 128 256 512 without; tiny: 8")
    options = parser.parse_args(argv)
    if options.peer_python or options.gguf:
        parser.error("weights are random and there are no peers: no --gguf, no --peer-python")
    slots = options.slots or ([8] if options.tiny else [64, 128, 256, 512])
    size = TINY if options.tiny else SIZE
    for count in slots:
        if count < 1 or count % size["rollouts"]:
            parser.error(f"--slots {count} is not a multiple of {size['rollouts']} rollouts")
    model, params = random_model(tiny=options.tiny)
    copied = copy_bandwidth(size["copied_bytes"], options.rounds)
    ours = {}
    for count in slots:
        here = {**size, "slots": count, "prompts": count // size["rollouts"]}
        ours[str(count)] = case(
            model, params, here, bandwidth=copied["median"], rounds=options.rounds
        )
    result = {
        "name": "gpu",
        "workload": {
            "model": "tiny" if options.tiny else "Qwen3-1.7B, random",
            "dtype": model.config.dtype,
            "slots": slots,
            **size,
            "runs": options.rounds,
        },
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "copy_bytes_per_s": copied,
        "ours": ours,
        "peers": {},
        "ratios": {},
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
