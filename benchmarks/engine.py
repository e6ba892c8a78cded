"""The rollout engine against its own limits: SmolLM2-135M in float32 on one machine.

python -m benchmarks.engine --save

One result holds: the tokens a second of 64 slots beside the machine's matrix products alone; many
requests of skewed lengths beside static batches of the same engine; a long prompt with eight
rollouts beside the same with one; and the seconds until the first rollout, with an empty and a
filled compilation cache.
"""

import dataclasses
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import jaxrl_llm as jr
from benchmarks import decoding, harness, workload
from benchmarks.worker import jax_device_name, package_versions

SIZES = {
    "slots": 64,
    "width": 8,
    "prompt_tokens": 64,
    "new_tokens": 64,
    "long_prompt": 1024,
    "skewed_requests": 256,
    "skewed_group": 8,
    "skewed_rows": 32,
    "skewed_mean": 32,
    "skewed_cap": 256,
}
TINY = {
    "slots": 4,
    "width": 2,
    "prompt_tokens": 16,
    "new_tokens": 8,
    "long_prompt": 64,
    "skewed_requests": 16,
    "skewed_group": 4,
    "skewed_rows": 2,
    "skewed_mean": 4,
    "skewed_cap": 16,
}


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds of one call, the device's work included."""
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def in_turns(
    rounds: int, runs: Mapping[str, Callable[[], Any]], *, compiled: bool = False
) -> dict[str, list[float]]:
    """Seconds of each function, run in turns; a call before, that compiles, is not counted."""
    for run in () if compiled else runs.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(seconds_of(run))
            print(f"{name}: {seconds[name][-1]:.4g} s", file=sys.stderr, flush=True)
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times faster the second is, by medians."""
    return statistics.median(seconds[slow]) / statistics.median(seconds[fast])


def groups_of(prompts, size: int, limits=None) -> list:
    """Groups of ``size`` requests each, with limits ``[groups, size]`` if lengths differ."""
    return [
        jr.rollout.Group(
            id=i,
            prompt=prompt,
            requests=tuple(range(i * size, (i + 1) * size)),
            max_new_tokens=None if limits is None else tuple(limits[i].tolist()),
        )
        for i, prompt in enumerate(prompts)
    ]


def against_products(model, params, size, rounds: int) -> dict[str, Any]:
    """Tokens a second of full slots, and of the matrix products of a decode step alone."""
    slots, new = size["slots"], size["new_tokens"]
    rows = slots // size["width"]
    prompts = workload.prompt_ids(rows, size["prompt_tokens"], vocab_size=model.config.vocab_size)
    engine = jr.rollout.make_engine(
        model,
        rows=rows,
        width=size["width"],
        prompt_length=size["prompt_tokens"],
        max_new_tokens=new,
        chunk=new,
    )
    products = decoding.products(params, slots)

    def many_products():
        return [products() for _ in range(new)]

    def generate():
        generation = jr.rollout.Generation(engine, params, key=jax.random.key(0))
        generation.submit(*groups_of(prompts, size["width"]))
        return [c.out.tokens for done in generation for c in done.completions]

    seconds = in_turns(rounds, {"products": many_products, "engine": generate})
    total = slots * new
    flops = decoding.product_flops(params, slots)
    return {
        "engine_tokens_per_s": harness.summary([total / s for s in seconds["engine"]]),
        "products_tokens_per_s": harness.summary([total / s for s in seconds["products"]]),
        "products_gflop_per_s": harness.summary(
            [new * flops / s / 1e9 for s in seconds["products"]]
        ),
        "share_of_products": round(1 / ratio(seconds, "engine", "products"), 3),
    }


def skewed(model, params, size, rounds: int) -> dict[str, Any]:
    """Requests of log-normal lengths through slots, beside static batches of the same engine."""
    cap, group = size["skewed_cap"], size["skewed_group"]
    count = size["skewed_requests"] // group
    rng = np.random.default_rng(0)
    mean, sigma = size["skewed_mean"], 1.0
    lengths = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, (count, group))
    lengths = np.clip(np.round(lengths), 1, cap).astype(int)
    prompts = workload.prompt_ids(count, size["prompt_tokens"], vocab_size=model.config.vocab_size)
    groups = groups_of(prompts, group, lengths)

    def engine(rows: int, width: int):
        made = jr.rollout.make_engine(
            model,
            rows=rows,
            width=width,
            prompt_length=size["prompt_tokens"],
            max_new_tokens=cap,
        )
        made.warm_up(params)
        return made

    # A static batch keeps its size until its longest response has ended.
    whole = dataclasses.replace(engine(size["slots"] // group, group), small_grid=None)
    streaming = engine(size["skewed_rows"], size["slots"] // size["skewed_rows"])

    def static():
        generation = jr.rollout.Generation(whole, params, key=jax.random.key(0))
        done = []
        for i in range(0, count, whole.spec.rows):
            generation.submit(*groups[i : i + whole.spec.rows])
            done += list(generation)
        return check(done)

    def slots():
        generation = jr.rollout.Generation(streaming, params, key=jax.random.key(0))
        generation.submit(*groups)
        return check(list(generation))

    def check(done):
        found = {each.id: [len(c) for c in each.completions] for each in done}
        if [found[i] for i in range(count)] != lengths.tolist():
            raise ValueError("a request did not get the tokens that it asked for")
        return None

    seconds = in_turns(rounds, {"static": static, "slots": slots}, compiled=True)
    total = int(lengths.sum())
    return {
        "tokens": total,
        "longest": int(lengths.max()),
        "mean": float(f"{lengths.mean():.4g}"),
        "slots_tokens_per_s": harness.summary([total / s for s in seconds["slots"]]),
        "static_tokens_per_s": harness.summary([total / s for s in seconds["static"]]),
        "ratio": round(ratio(seconds, "static", "slots"), 3),
    }


def long_prompt(model, params, size, rounds: int) -> dict[str, Any]:
    """One long prompt with eight slots beside the same with one: prompt cache and prefill."""
    length, key = size["long_prompt"], jax.random.key(0)
    (prompt,) = workload.prompt_ids(1, length, vocab_size=model.config.vocab_size)
    prefill, cache = {}, {}
    for width in (1, 8):
        engine = jr.rollout.make_engine(
            model,
            rows=1,
            width=width,
            prompt_length=length,
            max_new_tokens=16,
        )
        generation = jr.rollout.Generation(engine, params, key=key)
        leaves = jax.tree.leaves(generation.slots.prompts.prefix)
        cache[width] = sum(x.nbytes for x in leaves)

        def run(engine=engine, width=width, generation=generation):
            generation.submit(*groups_of([prompt], width))
            generation.admit()
            jax.block_until_ready(generation.slots)
            generation.stop()

        prefill[f"rollouts_{width}"] = run
    seconds = in_turns(rounds, prefill)
    return {
        "prompt_cache_bytes": {f"rollouts_{w}": n for w, n in cache.items()},
        "prompt_cache_ratio": cache[8] / cache[1],
        "prefill_seconds": {name: harness.summary(s) for name, s in seconds.items()},
        "prefill_ratio": round(ratio(seconds, "rollouts_8", "rollouts_1"), 3),
    }


_FIRST_ROLLOUT = """
import sys, time
import jax
import jaxrl_llm as jr
tiny, name, *sizes = sys.argv[1:]
slots, width, prompt, new = map(int, sizes)
if tiny == "True":
    model, params = jr.testing.tiny_model(num_layers=1)
else:
    model, params = jr.models.load_model(name)
jax.block_until_ready(params)
begin = time.perf_counter()
engine = jr.rollout.make_engine(model, rows=slots // width, width=width, prompt_length=prompt,
                                max_new_tokens=new)
engine.warm_up(params)
print(time.perf_counter() - begin)
"""


def startup(size, *, tiny: bool, name: str) -> dict[str, float]:
    """Seconds until the engine has compiled all it needs, in fresh processes."""
    arguments = [size[k] for k in ("slots", "width", "prompt_tokens", "new_tokens")]
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-compiled-") as folder:
        environment = dict(
            os.environ,
            JAX_COMPILATION_CACHE_DIR=folder,
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            PYTHONPATH=str(harness.ROOT),
        )
        command = [sys.executable, "-c", _FIRST_ROLLOUT, str(tiny), name, *map(str, arguments)]

        def once() -> float:
            done = subprocess.run(
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
            return float(f"{float(done.stdout.split()[-1]):.3g}")

        return {"compile_seconds": once(), "warm_start_seconds": once()}


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.parser(__doc__.splitlines()[0]).parse_args(argv)
    if options.peer_python is not None:
        raise SystemExit("benchmarks.engine compares the engine with itself; it has no peers.")
    size, rounds = (TINY if options.tiny else SIZES), options.rounds
    name = options.gguf or "smollm2-135m-instruct"
    started = startup(size, tiny=options.tiny, name=name)
    if options.tiny:
        model, params = jr.testing.tiny_model(num_layers=1)
    else:
        model, params = jr.models.load_model(name)
    result = {
        "name": "engine",
        "workload": {
            "model": "tiny" if options.tiny else "SmolLM2-135M-Instruct",
            "dtype": "float32",
            **size,
            "runs": rounds,
        },
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "products": against_products(model, params, size, rounds),
        "skewed": skewed(model, params, size, rounds),
        "long_prompt": long_prompt(model, params, size, rounds),
        "startup": started,
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
