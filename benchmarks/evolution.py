"""Evolution strategies against plain inference: one layer, a whole model, the update, memory.

    python -m benchmarks.evolution --save                  # all parts
    python -m benchmarks.evolution --part layer --save     # one; the others stay as they were

`layer`: rows of a batch that are a member each, through one square matrix; plain, with noise that
was made before, with noise that is drawn again at every call, and with a perturbed copy of the
matrix a member. `decoding`: SmolLM2-135M's size, every member answers a prompt of its own, beside
plain decoding of the same prompts, and the update that follows. `dense`: the same with a perturbed
copy of the model a member, one after the other. `memory`: the peak of a process that does nothing
else. Weights are random. Dense noise is measured for few members and counted for all: its cost is
that of a member times their number.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks import harness, workload
from benchmarks.accelerator import Timed, in_turns, rounded
from benchmarks.worker import jax_device_name, package_versions, peak_memory
from jaxrl_llm.core.runtime.heap import trim_after_compiling

MODEL = {
    "architecture": "llama",
    "vocab_size": 49152,
    "width": 576,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "mlp_width": 1536,
    "max_length": 8192,
    "rope_theta": 1e5,
    "tied": True,
}
LAYER = {"width": 2048, "rows": 1024, "dense_rows": 8, "calls": 10}
TINY_LAYER = {"width": 16, "rows": 8, "dense_rows": 2, "calls": 1}
DECODING = {"members": 64, "prompt_tokens": 16, "new_tokens": 64}
TINY_DECODING = {"members": 4, "prompt_tokens": 4, "new_tokens": 3}
DENSE_MEMBERS = 2
MEMORY_MEMBERS = 256
SIGMA = 1e-3
PARTS = ("layer", "decoding", "dense", "memory")


def make_model(*, tiny: bool) -> jr.models.Model:
    """SmolLM2-135M's shape, or a tiny one; both compute in float32."""
    config = jr.testing.tiny_config(num_layers=1) if tiny else jr.models.ModelConfig(**MODEL)
    return jr.models.make_model(config)


def shares(found: dict[str, Timed], plain: str, times: dict[str, float]) -> dict[str, float]:
    """The speed of each run in that of the plain one, by medians.

    Args:
      found: By name.
      plain: The name of the plain one.
      times: By how much the seconds of a run count, where it is a part of the work.
    """
    median = found[plain].median
    return {
        name: rounded(median / (timed.median * times.get(name, 1.0)))
        for name, timed in found.items()
        if name != plain
    }


def seconds(found: dict[str, Timed]) -> dict[str, dict[str, float]]:
    """Of all runs."""
    return {name: harness.summary(timed.seconds) for name, timed in found.items()}


def layer_runs(size, dtype=jnp.float32) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """The ways of one layer as functions, and by how much the seconds of the dense ones count."""
    width, rows, few = size["width"], size["rows"], size["dense_rows"]
    key, shape = jax.random.key(0), (width, width)
    w = jax.random.normal(jax.random.key(1), shape, dtype)
    x = jax.random.normal(jax.random.key(2), (rows, 1, width), dtype)
    members = np.arange(rows)

    def noise(epoch):
        return jr.evolution.lowrank_noise(key, epoch, members, shape, dtype=dtype)

    def perturbed(w, epoch, member):
        drawn = jr.evolution.full_noise(key, epoch, member, shape, dtype=dtype)
        return w + (SIGMA * drawn.sign * drawn.eps).astype(dtype)

    made = jax.jit(noise)(0)
    copies = jax.jit(lambda w: jax.vmap(lambda n: perturbed(w, 0, n))(members[:few]))(w)
    plain = jax.jit(lambda x, w: x @ w)
    premade = jax.jit(lambda x, w, made: jr.evolution.eggroll_matmul(x, w, made, sigma=SIGMA))
    redrawn = jax.jit(
        lambda x, w, epoch: jr.evolution.eggroll_matmul(x, w, noise(epoch), sigma=SIGMA)
    )
    # One copy at a time, as the copies of all members fit no memory.
    dense = jax.jit(
        lambda x, w, epoch: jax.lax.map(
            lambda each: each[0] @ perturbed(w, epoch, each[1]), (x[:few], members[:few])
        )
    )

    def often(call, *arguments):
        return lambda: [call(*arguments) for _ in range(size["calls"])]

    runs = {
        "plain": often(plain, x, w),
        "premade": often(premade, x, w, made),
        "redrawn": often(redrawn, x, w, 1),
        "dense_premade": often(plain, x[:few], copies),
        "dense": lambda: dense(x, w, 1),
    }
    return runs, {"dense_premade": rows / few, "dense": size["calls"] * rows / few}


def layer(size, rounds: int, dtype=jnp.float32) -> dict[str, Any]:
    """One linear layer."""
    runs, times = layer_runs(size, dtype)
    found = in_turns(rounds, runs)
    return {"seconds": seconds(found), "share_of_plain": shares(found, "plain", times)}


class Population:
    """Members of a model, each with a prompt of its own, and the ways to decode them."""

    def __init__(self, model: jr.models.Model, params, size):
        self.model, self.params, self.key = model, params, jax.random.key(0)
        self.recipe = jr.recipes.eggroll(sigma=SIGMA).replace(dtype=model.config.dtype)
        self.prompts = workload.prompt_ids(
            size["members"], size["prompt_tokens"], vocab_size=model.config.vocab_size
        )
        classes, members = self.recipe.classes(params), np.arange(size["members"])
        new = {"max_new_tokens": size["new_tokens"]}
        self.sample = jr.rollout.make_population_sampler(model, shared=False, **new)
        self.sample_plain = jr.rollout.make_sampler(model, group_size=1, temperature=0.0, **new)
        self.draw = jax.jit(
            lambda params, epoch: self.recipe.delta(
                params, classes, self.key, epoch, members, share_pairs=True
            )
        )

    def plain(self) -> jr.rollout.Rollout:
        return self.sample_plain(self.params, self.key, self.prompts)

    def answer(self, deltas=None) -> jr.rollout.Rollout:
        """With noise that is there, or is drawn now."""
        deltas = self.draw(self.params, 1) if deltas is None else deltas
        return self.sample(self.params, deltas, self.key, self.prompts)


class Update:
    """An update of a state by a population's scores, which random numbers stand for."""

    def __init__(self, population: Population):
        rollout, recipe = population.answer(), population.recipe
        optimizer = optax.sgd(0.5)
        self.state = jr.train.init_state(population.params, optimizer, recipe, key=population.key)
        self.step = jr.train.make_evolution_step(recipe, optimizer)
        # Of one question: [P, 1, T] as [1, N, T].
        members = rollout.tokens.shape[0]
        scores = jax.random.normal(jax.random.key(3), (1, members))
        self.batch = jr.recipes.Batch(
            tokens=rollout.tokens.reshape(1, members, -1),
            mask=rollout.mask.reshape(1, members, -1),
            rewards=scores,
            where=jnp.ones_like(scores, bool),
            prompt_tokens=rollout.prompt_tokens[:1],
            prompt_mask=rollout.prompt_mask[:1],
        )

    def __call__(self):
        self.state, metrics = self.step(self.state, self.batch)
        return self.state.params, metrics


def decoding(model, params, size, rounds: int) -> dict[str, Any]:
    """Plain decoding, that of a population, and its update."""
    population = Population(model, params, size)
    made = jax.block_until_ready(population.draw(params, 0))
    runs = {
        "plain": population.plain,
        "premade": lambda: population.answer(made),
        "redrawn": population.answer,
        "noise": lambda: population.draw(params, 2),
        "update": Update(population),
    }
    found = in_turns(rounds, runs)
    ways = {name: found[name] for name in ("plain", "premade", "redrawn")}
    tokens = size["members"] * size["new_tokens"]
    return {
        "seconds": seconds(found),
        "tokens_per_s": {
            name: harness.summary([tokens / s for s in way.seconds]) for name, way in ways.items()
        },
        "share_of_plain": shares(ways, "plain", {}),
        "update_of_evaluation": rounded(found["update"].median / found["redrawn"].median),
    }


def dense(model, params, size, rounds: int) -> dict[str, Any]:
    """Full noise, a copy of the model a member, beside plain decoding of all prompts."""
    population = Population(model, params, size)
    recipe = jr.recipes.open_es(sigma=SIGMA)
    new = {"max_new_tokens": size["new_tokens"]}
    answer = jr.train.make_population(model, recipe, group_size=DENSE_MEMBERS, **new)
    runs = {
        "plain": population.plain,
        "dense": lambda: answer(params, population.key, population.prompts[:1], version=1),
    }
    found = in_turns(rounds, runs)
    times = {"dense": size["members"] / DENSE_MEMBERS}
    return {
        "members": DENSE_MEMBERS,
        "seconds": seconds(found),
        "share_of_plain": shares(found, "plain", times)["dense"],
    }


def model_and_cache(model: jr.models.Model, size) -> dict[str, int]:
    """Bytes of a model's weights, and of the keys and values of one batch."""
    config, itemsize = model.config, jnp.dtype(model.config.dtype).itemsize
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
    tokens = size["members"] * (size["prompt_tokens"] + size["new_tokens"])
    return {"model": 4 * jr.models.count_params(model), "cache": token * tokens}


def peak_of(way: str, size, *, tiny: bool) -> int:
    """Largest resident size of this process, once it has decoded in one way or only loaded."""
    trim_after_compiling()  # as in every training run
    model = make_model(tiny=tiny)
    # Drawing weights takes more memory than decoding with them; here their values do not matter.
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype), shapes)
    jax.block_until_ready(params)
    if way != "loaded":
        population = Population(model, params, size)
        jax.block_until_ready(population.plain() if way == "plain" else population.answer())
    return peak_memory()


_PEAK = """
import json, sys
from benchmarks import evolution
way, size, tiny = json.loads(sys.argv[1])
print(evolution.peak_of(way, size, tiny=tiny))
"""


def memory(size, *, tiny: bool) -> dict[str, Any]:
    """Peaks of fresh processes: the weights alone, plain decoding, a population."""

    def once(way: str) -> int:
        command = [sys.executable, "-c", _PEAK, json.dumps([way, size, tiny])]
        done = subprocess.run(
            command, cwd=harness.ROOT, check=True, stdout=subprocess.PIPE, text=True
        )
        print(f"memory, {way}: {int(done.stdout):,}", file=sys.stderr, flush=True)
        return int(done.stdout)

    peaks = {way: once(way) for way in ("loaded", "plain", "population")}
    parts = model_and_cache(make_model(tiny=tiny), size)
    # What a process with nothing but the weights takes beside them.
    runtime = peaks["loaded"] - parts["model"]
    return {
        "members": size["members"],
        "bytes": {**parts, "runtime": runtime},
        "peak_memory_bytes": peaks,
        "times_model_and_cache": rounded((peaks["population"] - runtime) / sum(parts.values())),
        "times_plain": rounded(peaks["population"] / peaks["plain"]),
    }


def measure(parts: Sequence[str], *, tiny: bool, rounds: int) -> dict[str, Any]:
    """Some parts, by name."""
    size = TINY_DECODING if tiny else DECODING
    ours: dict[str, Any] = {}
    if "layer" in parts:
        ours["layer"] = layer(TINY_LAYER if tiny else LAYER, rounds)
    if {"decoding", "dense"} & set(parts):
        model = make_model(tiny=tiny)
        given = (model, jax.jit(model.init)(jax.random.key(0)), size, rounds)
        ways = {"decoding": decoding, "dense": dense}
        ours |= {name: way(*given) for name, way in ways.items() if name in parts}
    if "memory" in parts:
        many = size if tiny else {**size, "members": MEMORY_MEMBERS}
        ours["memory"] = memory(many, tiny=tiny)
    return {name: {**found, "commit": harness.commit()} for name, found in ours.items()}


def with_saved(result: dict[str, Any], folder: Path = harness.RESULTS) -> dict[str, Any]:
    """A result beside the parts that were saved before and are not in it."""
    path = folder / f"{result['name']}-{result['device']}.json"
    if not path.exists():
        return result
    parts = {**json.loads(path.read_text())["ours"], **result["ours"]}
    return {**result, "ours": {name: parts[name] for name in PARTS if name in parts}}


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS, help="what to measure")
    options = parser.parse_args(argv)
    harness.refuse_peers(parser, options)
    tiny = options.tiny
    result: dict[str, Any] = {
        "name": "evolution",
        "workload": {
            "model": "tiny" if tiny else "SmolLM2-135M, random",
            "dtype": "float32",
            "layer": TINY_LAYER if tiny else LAYER,
            **(TINY_DECODING if tiny else DECODING),
            "runs": options.rounds,
        },
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "optax", "jaxrl_llm"))},
        "commit": harness.commit(),
        "ours": measure(options.part, tiny=tiny, rounds=options.rounds),
        "peers": {},
        "ratios": {},
    }
    harness.finish(with_saved(result) if options.save else result, to_file=options.save)


if __name__ == "__main__":
    main()
