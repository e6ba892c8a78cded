"""Sampling and training on an accelerator: speed, and the share of what the device can do.

    python -m benchmarks.gpu --save                  # Qwen3-1.7B's size, bfloat16: all parts
    python -m benchmarks.gpu --part sample           # 64 to 512 slots
    python -m benchmarks.gpu --part train            # see benchmarks/gpu_train.py
    python -m benchmarks.gpu --part evolution        # see benchmarks/gpu_evolution.py
    python -m benchmarks.gpu --tiny --slots 8        # a look, on any machine

Weights are random. A decode step reads all weights, the keys and values of each prompt once, and
those of each response so far: `bandwidth_share` is what these bytes over the time of a step are of
the bandwidth of a plain copy, measured in the same run. A step's parts are measured as compiled
pieces of the same shapes; projections are what a pass of the model takes beside its attention.

The result holds the train step under "train" and populations under "evolution", each with its own
workload, versions and commit; saving one part leaves the others as they were saved before.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxrl_llm as jr
from benchmarks import decode_parts, gpu_evolution, gpu_train, harness, workload
from benchmarks.accelerator import (
    compile_time,
    in_turns,
    make_model,
    model_name,
    random_params,
    rounded,
)
from benchmarks.worker import (
    jax_device_memory,
    jax_device_name,
    package_versions,
    peak_memory,
)

SIZE = {"rollouts": 8, "prompt_tokens": 512, "new_tokens": 256, "copied_bytes": 2**31}
TINY = {"rollouts": 4, "prompt_tokens": 16, "new_tokens": 8, "copied_bytes": 2**22}
COPIES = 16  # in one program
# Parts with a workload of their own.
OWN = ("evolution", "train")
# Options that some parts have no use for.
OPTIONS = {
    "sample": ("slots",),
    "evolution": ("members",),
    "train": ("microbatches", "remat", "peak_flops"),
}


def random_model(*, tiny: bool) -> tuple[jr.models.Model, Any]:
    """A model and random parameters, both bfloat16."""
    model = make_model(tiny=tiny)
    return model, random_params(model, model.config.dtype)


def copy_bandwidth(size: int, rounds: int) -> dict[str, float]:
    """Bytes a second, read and written, of a plain copy of ``size`` bytes.

    Of several in one program, since starting one takes up to as long as a copy.
    """
    held = jnp.ones(size // 4, jnp.float32)
    copies = jax.jit(lambda x: jax.lax.fori_loop(0, COPIES, lambda _, x: -x, x), donate_argnums=0)

    def run() -> jax.Array:
        nonlocal held
        held = copies(held)
        return held

    timed = in_turns(rounds, {"copy": run})["copy"]
    return harness.summary([COPIES * 2 * held.nbytes / s for s in timed.seconds])


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
            **compile_time(timed.first - timed.median),
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


def sampling(model, params, *, tiny: bool, slots: list[int], rounds: int) -> dict[str, Any]:
    """Every number of slots in turn."""
    size = TINY if tiny else SIZE
    copied = copy_bandwidth(size["copied_bytes"], rounds)
    ours = {}
    for count in slots:
        here = {**size, "slots": count, "prompts": count // size["rollouts"]}
        ours[str(count)] = case(model, params, here, bandwidth=copied["median"], rounds=rounds)
    return {
        "workload": {
            "model": model_name(tiny=tiny),
            "dtype": model.config.dtype,
            "slots": slots,
            **size,
            "runs": rounds,
        },
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "copy_bytes_per_s": copied,
        "ours": ours,
    }


def with_saved(result: dict[str, Any], part: str, folder: Path = harness.RESULTS) -> dict[str, Any]:
    """A result of one part beside the others that were saved before, if they were."""
    path = folder / f"{result['name']}-{result['device']}.json"
    if part == "all" or not path.exists():
        return result
    saved = json.loads(path.read_text())
    if part == "sample":
        return {**result, **{name: saved[name] for name in OWN if name in saved}}
    return {**saved, part: result[part]}


def checked(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options, with their defaults filled in."""
    parser.add_argument("--part", choices=("all", *OPTIONS), default="all", help="what")
    parser.add_argument("--slots", type=int, nargs="+", help="64 128 256 512 without; tiny: 8")
    parser.add_argument("--members", type=int, nargs="+", help="512 2048 without; tiny: 4")
    parser.add_argument("--microbatches", type=int, help="of a train step; 1 without")
    parser.add_argument("--remat", choices=gpu_train.REMAT, nargs="+", help="full dots without")
    parser.add_argument("--peak-flops", type=float, help="operations a second by the vendor")
    options = parser.parse_args(argv)
    harness.refuse_peers(parser, options)
    for name in (name for part in OPTIONS for name in OPTIONS[part] if options.part != part):
        if options.part != "all" and getattr(options, name) is not None:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} has no effect with --part {options.part}")
    options.members = options.members or list(
        gpu_evolution.TINY_MEMBERS if options.tiny else gpu_evolution.MEMBERS
    )
    for count in options.members:
        if count < 2 or count % 2:
            parser.error(f"--members {count} is not a number of pairs")
    options.slots = options.slots or ([8] if options.tiny else [64, 128, 256, 512])
    rollouts = (TINY if options.tiny else SIZE)["rollouts"]
    for count in options.slots:
        if count < 1 or count % rollouts:
            parser.error(f"--slots {count} is not a multiple of {rollouts} rollouts")
    options.microbatches = 1 if options.microbatches is None else options.microbatches
    prompts = (gpu_train.TINY if options.tiny else gpu_train.SIZE)["prompts"]
    if options.microbatches < 1 or prompts % options.microbatches:
        parser.error(f"--microbatches {options.microbatches} does not divide {prompts} prompts")
    options.remat = options.remat or list(gpu_train.REMAT[:2])
    if options.peak_flops is not None and not 0 < options.peak_flops < math.inf:
        parser.error(f"--peak-flops {options.peak_flops} is not above 0")
    return options


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = checked(harness.parser(__doc__.splitlines()[0]), argv)
    result: dict[str, Any] = {
        "name": "gpu",
        "device": jax_device_name(),
        "ours": {},
        "peers": {},
        "ratios": {},
    }
    shared = {"tiny": options.tiny, "rounds": options.rounds}
    # Training last: a device does not forget its peak, and training needs the most.
    if options.part != "train":
        given = random_model(tiny=options.tiny)
        if options.part != "evolution":
            result |= sampling(*given, slots=options.slots, **shared)
        if options.part != "sample":
            result["evolution"] = gpu_evolution.measure(*given, members=options.members, **shared)
        del given
    if options.part in ("all", "train"):
        result["train"] = gpu_train.measure(
            microbatches=options.microbatches,
            remat=options.remat,
            peak_flops=options.peak_flops,
            **shared,
        )
    if options.save:
        result = with_saved(result, options.part)
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
