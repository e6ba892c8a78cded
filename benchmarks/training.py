"""What the training engine costs, beside its own parts: no peers, random weights.

    python -m benchmarks.training --save
    python -m benchmarks.training --tiny             # a look, on any machine
    python -m benchmarks.training --part logprobs    # one part; saved, the others stay

- logprobs: log-probabilities and entropies with their gradients, 4,096 tokens over a vocabulary of
  151,936 at width 1,024, beside the same by whole logits. `temporary` is the memory of the compiled
  program beside its inputs and outputs, in parts of the float32 logits.
- growth: a step with one prompt of 1,024 tokens and G responses of 64, as G doubles.
- remat: temporary memory and seconds of a step (2 prompts x 8, 192 + 64) by what is kept of a
  layer, and `product_share`: its useful operations a second, recomputation not counted, in parts of
  those of the model's largest matrix products, measured in turns with it.
- devices: the same step on one device and on eight fake ones that share its processor, one prompt
  each, by the tokens that a device has. What is communicated does not grow with them.

Steps are those of SmolLM2-135M in float32 with AdamW.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.checkpoint import SMOLLM2
from benchmarks.gpu import in_turns, rounded
from jaxrl_llm.logprobs import token_logprobs
from jaxrl_llm.models.sharding import param_shardings, shard
from jaxrl_llm.testing import tiny_config
from jaxrl_llm.train.mesh import place_batch
from jaxrl_llm.train.profile import model_size, train_flops

DEVICES = 8
TINY = tiny_config(num_layers=1)


def _step(config, prompts: int, rollouts: int, lengths, *, remat="full", mesh=None):
    """A compiled step as a function without arguments, and its temporary bytes."""
    model = jr.models.make_model(config)
    recipe = jr.recipes.reinforce_pp()  # takes groups of one, too
    optimizer = optax.adamw(1e-6)
    step: Any = jr.train.make_step(model, recipe, optimizer, remat=remat, mesh=mesh)
    params = jax.jit(model.init)(jax.random.key(0))
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh))
    state = jr.train.init_state(
        params, optimizer, recipe, key=jax.random.key(0), mesh=mesh, copy=False
    )
    rng = np.random.default_rng(0)
    before, after = ((prompts, lengths[0]), (prompts, rollouts, lengths[1]))
    batch = jr.recipes.Batch(
        tokens=rng.integers(0, config.vocab_size, after, dtype=np.int32),
        mask=np.ones(after, bool),
        rewards=rng.random(after[:2], np.float32),
        where=np.ones(after[:2], bool),
        prompt_tokens=rng.integers(0, config.vocab_size, before, dtype=np.int32),
        prompt_mask=np.ones(before, bool),
    )
    batch = jax.device_put(batch) if mesh is None else place_batch(batch, mesh)
    step.compiled = step.lower(state, batch).compile()  # the program that runs: traced once
    memory = step.compiled.memory_analysis().temp_size_in_bytes
    alive = [state]
    del params, state

    def run():
        state, metrics = step(alive.pop(), batch)
        alive.append(state)
        return jax.block_until_ready((state, metrics))[1]

    return run, memory


def logprobs(tiny: bool, rounds: int) -> dict[str, Any]:
    """Ours beside whole logits."""
    tokens, vocab, width = (64, 512, 16) if tiny else (4096, 151936, 1024)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, width))
    matrix = 0.05 * jax.random.normal(keys[1], (vocab, width))
    targets = jax.random.randint(keys[2], (tokens,), 0, vocab)

    def plain(hidden, matrix, targets):
        log_p = jax.nn.log_softmax(hidden @ matrix.T)
        logp = jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0]
        return logp, -jnp.sum(jnp.exp(log_p) * log_p, axis=1)

    def loss(function, hidden, matrix):
        logp, entropy = function(hidden, matrix, targets)
        return jnp.sum(logp) + 0.1 * jnp.sum(entropy)

    programs = {
        name: jax.jit(jax.grad(functools.partial(loss, function), (0, 1)))
        .lower(hidden, matrix)
        .compile()
        for name, function in (("ours", token_logprobs), ("plain", plain))
    }
    runs = {
        name: functools.partial(_norms, program, hidden, matrix)
        for name, program in programs.items()
    }
    timed = in_turns(rounds, runs)
    logits = 4 * tokens * vocab
    return {
        "tokens": tokens,
        "vocab_size": vocab,
        "width": width,
        "seconds": {name: harness.summary(t.seconds) for name, t in timed.items()},
        "time_of_plain": rounded(timed["ours"].median / timed["plain"].median),
        "temporary": {
            name: rounded(program.memory_analysis().temp_size_in_bytes / logits)
            for name, program in programs.items()
        },
    }


def _norms(program: Callable, *arrays) -> list[float]:
    return [float(jnp.vdot(x, x)) for x in program(*arrays)]


def growth(tiny: bool, rounds: int) -> dict[str, Any]:
    """A step as the group doubles."""
    config, lengths = (TINY, (32, 4)) if tiny else (SMOLLM2, (1024, 64))
    found = {}
    for group in (1, 2, 4, 8):  # one in memory at a time
        run, _ = _step(config, 1, group, lengths)
        found[str(group)] = in_turns(rounds, {f"growth, G={group}": run})[f"growth, G={group}"]
    medians = [timed.median for timed in found.values()]
    return {
        "prompt_tokens": lengths[0],
        "response_tokens": lengths[1],
        "seconds": {group: harness.summary(timed.seconds) for group, timed in found.items()},
        "doubling": [rounded(b / a) for a, b in zip(medians, medians[1:], strict=False)],
    }


def remat(tiny: bool, rounds: int) -> dict[str, Any]:
    """A step by what is kept of a layer, and a matrix product in turns with it."""
    config, rows, lengths = TINY, (2, 2), (8, 4)
    if not tiny:
        config, rows, lengths = SMOLLM2, (2, 8), (192, 64)
    tokens = rows[0] * (lengths[0] + rows[1] * lengths[1])
    size = model_size(jr.models.make_model(config))
    assert size is not None, "the built-in decoder says its size"
    flops = train_flops([lengths[0]] * rows[0], np.full(rows, lengths[1]), size=size)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, config.width))
    up = jax.random.normal(keys[1], (config.width, config.mlp_width)) * config.width**-0.5
    down = jax.random.normal(keys[2], up.shape[::-1]) * config.mlp_width**-0.5
    pairs = 8
    # One after the other, so that no result is written to memory that the system has to find first.
    product = jax.jit(lambda x: functools.reduce(lambda x, _: x @ up @ down, range(pairs), x))
    operations = 2 * 2 * pairs * x.size * up.shape[1]
    cases, products = {}, []
    for kept in ("none", "dots", "full"):
        run, memory = _step(config, *rows, lengths, remat=kept)
        timed = in_turns(rounds, {f"remat {kept}": run, "product": lambda: product(x)})
        cases[kept] = (timed[f"remat {kept}"], memory)
        products += timed["product"].seconds
        del run
    rate = operations / min(products)  # the best of all turns: nothing else slowed it
    result: dict[str, Any] = {"prompts": rows[0], "rollouts": rows[1], "tokens": list(lengths)}
    result["product_flops_per_second"] = rounded(rate)
    for kept, (timed, memory) in cases.items():
        result[kept] = {
            "seconds": harness.summary(timed.seconds),
            "temporary_bytes": memory,
            "product_share": rounded(flops / timed.median / rate),
        }
    return result


def devices(tiny: bool, rounds: int) -> dict[str, Any]:
    """The same step on one device and on eight that share its processor, each in a process."""
    layouts = {"one": {}, "data": {"data": DEVICES}, "fsdp": {"fsdp": DEVICES}}
    found = {}
    for rollouts, lengths in ((2, (8, 4)),) if tiny else ((4, (64, 64)), (8, (192, 64))):
        size = {"rollouts": rollouts, "lengths": lengths}
        seconds = {
            name: _in_a_process(layout, tiny=tiny, rounds=rounds, **size)
            for name, layout in layouts.items()
        }
        one = seconds["one"]["median"]
        tokens = lengths[0] + rollouts * lengths[1]  # one prompt a device
        found[str(tokens)] = {
            "rollouts": rollouts,
            "tokens": list(lengths),
            "seconds": seconds,
            "time_of_one": {
                name: rounded(timed["median"] / one)
                for name, timed in seconds.items()
                if name != "one"
            },
        }
    return {"devices": DEVICES, "tokens_of_a_device": found}


def _in_a_process(layout: dict[str, int], **request) -> dict[str, Any]:
    """Seconds of a layout, from a process with as many devices."""
    count = DEVICES if layout else 1
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    child = json.dumps({"layout": layout} | request)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", "--child", child],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=harness.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _child(layout: dict[str, Any], tiny: bool, rounds: int, rollouts: int, lengths) -> None:
    """Times one layout and prints its seconds."""
    config = TINY if tiny else SMOLLM2
    mesh = jr.train.make_mesh(**layout)
    run, _ = _step(config, DEVICES, rollouts, lengths, mesh=mesh)
    print(json.dumps(harness.summary(in_turns(rounds, {"devices": run})["devices"].seconds)))


PARTS = {"logprobs": logprobs, "growth": growth, "remat": remat, "devices": devices}


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="all without")
    parser.add_argument("--child", type=json.loads, help="used by --part devices itself")
    options = parser.parse_args(argv)
    if options.child is not None:
        _child(**options.child)
        return
    harness.refuse_peers(parser, options)
    chosen = options.part or list(PARTS)
    workload = {
        "model": "tiny" if options.tiny else "SmolLM2-135M's size, random",
        "dtype": "float32",
        "runs": options.rounds,
    }
    result = harness.of_ours(
        "training", workload, {part: PARTS[part](options.tiny, options.rounds) for part in chosen}
    )
    saved = harness.RESULTS / f"{result['name']}-{result['device']}.json"
    if options.save and saved.is_file():  # the other parts stay
        result["ours"] = json.loads(saved.read_text())["ours"] | result["ours"]
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
