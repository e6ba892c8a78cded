"""Time of every estimator as a ratio to one read of its inputs and one write of its outputs.

    python -m benchmarks.estimators --save           # measure and write the result
    python -m benchmarks.estimators --tiny           # a quick look at small sizes

Rewards are [4096, 16], tokens [256, 16, 1024]. The floor of a function is a compiled program that
reads the same inputs and writes outputs of the same shapes, measured in turn with it. "gradient" is
the token loss together with a product of its Jacobian: its ratio is to the floor of the loss alone,
its "own" ratio to the floor of a program that also writes an array like the gradient.

The C library keeps its memory while this runs: handing back and zeroing pages would cost several
times what is measured, and more for two outputs than for one.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.estimator_cases import ADVANTAGES, TERMS, Case, inputs_of
from benchmarks.worker import jax_device_name, package_versions

# The bars of a surrogate: forward, and with its gradient.
BARS = {"forward": 3.0, "gradient": 6.0}


def floor(inputs: dict[str, Any], outputs) -> Callable:
    """A compiled program that reads the inputs once and writes arrays of the outputs' shapes once.

    Args:
      inputs: Arrays by name.
      outputs: Their shapes, a tree.
    """
    shapes = [leaf for leaf in jax.tree.leaves(outputs) if leaf.ndim]
    largest = max((x.shape for x in jax.tree.leaves(inputs)), key=np.prod)

    def read(arrays):
        total = jnp.zeros(largest, jnp.float32)
        for x in jax.tree.leaves(arrays):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                continue
            x = x.astype(jnp.float32)
            total = total + x.reshape(x.shape + (1,) * (len(largest) - x.ndim))
        return total

    def write(total, shape):
        extra = total.ndim - len(shape)
        value = total[(...,) + (0,) * extra] if extra > 0 else total
        return jnp.broadcast_to(value.reshape(value.shape + (1,) * (-min(extra, 0))), shape)

    def run(arrays):
        total = read(arrays)
        reduced = total.sum(-1) if total.ndim == 3 and all(s.ndim < 3 for s in shapes) else total
        return [write(reduced, s.shape).astype(s.dtype) for s in shapes]

    return jax.jit(run)


def seconds(function: Callable, arrays, repeats: int) -> float:
    """Seconds of one call, from as many as take a few milliseconds."""
    start, out = time.perf_counter(), None
    for _ in range(repeats):
        out = function(arrays)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def timed(functions: Sequence[Callable], arrays, *, rounds: int) -> list[list[float]]:
    """Seconds of each function in each round, in turn, after a warm-up."""
    repeats = []
    for function in functions:
        jax.block_until_ready(function(arrays))
        once = seconds(function, arrays, 1)
        repeats.append(max(1, min(200, int(0.02 / max(once, 1e-6)))))
    found: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for times, function, count in zip(found, functions, repeats, strict=True):
            times.append(seconds(function, arrays, count))
    return found


def measure(case: Case, arrays: dict[str, Any], *, rounds: int) -> dict[str, Any]:
    """Median milliseconds and ratios of one function."""
    inputs = inputs_of(case, arrays)

    def forward(x):
        return case.call(x)

    functions = [floor(inputs, jax.eval_shape(forward, inputs)), jax.jit(forward)]
    if case.differentiate:

        def gradient(x):
            loss, pull = jax.vjp(lambda logp: forward({**x, "logp": logp}), x["logp"])
            return loss, pull(loss)

        functions.append(jax.jit(gradient))
        functions.append(floor(inputs, jax.eval_shape(gradient, inputs)))
    least, *times = timed(functions, inputs, rounds=rounds)
    result: dict[str, Any] = {"floor_ms": rounded(1e3 * statistics.median(least))}
    for name, values in zip(("forward", "gradient"), times, strict=False):
        result[f"{name}_ms"] = rounded(1e3 * statistics.median(values))
        result[f"{name}_ratio"] = ratio(values, least)
    if case.differentiate:
        result["gradient_own_ratio"] = ratio(times[1], times[2])
    return result


def ratio(values: Sequence[float], least: Sequence[float]) -> float:
    """Median of the ratios of the rounds."""
    return rounded(statistics.median(a / b for a, b in zip(values, least, strict=True)))


def growth(case: Case, make: Callable[[int], dict[str, Any]], *, rounds: int) -> float:
    """How much longer four times as many groups take, over four: 1 is linear, 4 is quadratic."""
    times = []
    for scale in (1, 4):
        inputs = inputs_of(case, make(scale))
        (found,) = timed([jax.jit(case.call)], inputs, rounds=rounds)
        times.append(min(found))
    return rounded(times[1] / times[0] / 4)


def rounded(x: float) -> float:
    return float(f"{x:.3g}")


def arrays_of(groups: int, rollouts: int, tokens: int, *, seed: int = 0) -> dict[str, Any]:
    """Every array that an estimator may name: rewards, log-probabilities, masks, and so on."""
    rng = np.random.default_rng(seed)
    sequence, token = (groups, rollouts), (groups, rollouts, tokens)

    def floats(low, high, shape):
        return jnp.asarray(rng.uniform(low, high, shape), jnp.float32)

    lengths = rng.integers(tokens // 4, tokens + 1, (*sequence, 1))
    logp = floats(-4.0, -0.05, token)

    def near(spread):
        return logp + spread * jnp.asarray(rng.standard_normal(token, np.float32))

    ids = jnp.arange(groups, dtype=jnp.int32)
    return {
        "rewards": jnp.asarray(rng.integers(0, 2, sequence), jnp.float32),
        "where": jnp.asarray(rng.random(sequence) < 0.95),
        "mask": jnp.asarray(np.arange(tokens) < lengths),
        "advantages": jnp.asarray(rng.standard_normal(sequence), jnp.float32),
        "median_advantages": jnp.asarray(rng.standard_normal(sequence), jnp.float32),
        "token_advantages": jnp.asarray(rng.standard_normal(token, np.float32)),
        "logp": logp,
        "old_logp": near(0.1),
        "behavior_logp": near(0.1),
        "ref_logp": near(0.2),
        "old_entropy": floats(0.0, 2.0, token),
        "entropy": floats(0.0, 2.0, token),
        "sum_pi_sq": floats(0.9, 1.0, token),
        "values": floats(0.0, 1.0, token),
        "old_values": floats(0.0, 1.0, token),
        "returns": floats(0.0, 1.0, token),
        "selected": jnp.asarray(rng.random(token) < 0.01),
        "turn_ids": jnp.broadcast_to(jnp.arange(tokens) * 4 // tokens, token),
        "steered": jnp.asarray(rng.random(sequence) < 0.1),
        "has_teacher": jnp.asarray(rng.random(sequence) < 0.5),
        "mean_log_probs": floats(-12.0, -8.0, token),
        "old_mean_log_probs": floats(-12.0, -8.0, token),
        "teacher_token_logp": near(0.3),
        "one_token_loss": floats(0.0, 1.0, token),
        "greedy_rewards": floats(0.0, 1.0, (groups,)),
        "prior": floats(0.1, 0.9, (groups,)),
        "budgets": jnp.asarray(rng.choice([512.0, 1024.0, 2048.0], sequence), jnp.float32),
        "prompt_ids": ids,
        "columns": {"one": floats(0, 1, sequence), "two": floats(0, 1, sequence)},
        "versions": jnp.asarray(rng.integers(0, 3, token), jnp.int32),
        "key": jax.random.key(0),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--rounds", type=int, default=9, help="measured in turn, so many times")
    parser.add_argument("--only", nargs="*", default=None, help="names of functions")
    options = parser.parse_args(argv)
    rounds = 3 if options.tiny else options.rounds
    rewards_shape = (64, 4) if options.tiny else (4096, 16)
    tokens_shape = (8, 4, 32) if options.tiny else (256, 16, 1024)
    wanted = set(options.only or ())
    tables: dict[str, dict] = {"advantages": {}, "token_terms": {}}
    groups, rollouts = rewards_shape
    few = arrays_of(groups, rollouts, 2)
    for case in ADVANTAGES:
        if wanted and case.name not in wanted:
            continue
        found = measure(case, few, rounds=rounds)
        found["growth"] = growth(case, lambda s: arrays_of(s * groups, rollouts, 2), rounds=rounds)
        tables["advantages"][case.name] = found
        print(f"{case.name:24} {found}", flush=True)
    many = arrays_of(*tokens_shape)
    for case in TERMS:
        if wanted and case.name not in wanted:
            continue
        found = tables["token_terms"][case.name] = measure(case, many, rounds=rounds)
        print(f"{case.name:24} {found}", flush=True)
    result = {
        "name": "estimators",
        "workload": {
            "rewards": list(rewards_shape),
            "tokens": list(tokens_shape),
            "dtype": "float32",
            "rounds": rounds,
        },
        "device": jax_device_name(),
        "versions": package_versions(("jax", "jaxlib", "jaxrl_llm")),
        "commit": harness.commit(),
        "bars": BARS,
        **tables,
    }
    harness.finish(result, to_file=options.save)


def keeping_memory() -> None:
    """Starts the process anew with a C library that keeps its memory, unless it already does."""
    settings = {
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**29),
        "MALLOC_ARENA_MAX": "1",
    }
    if not settings.keys() <= os.environ.keys():
        command = [sys.executable, "-m", "benchmarks.estimators", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **settings})


if __name__ == "__main__":
    keeping_memory()
    main()
