"""Seconds of a train step whose responses share rows, beside the same with a row each.

python -m benchmarks.packing --save

A row holds one response ("never"), responses to one prompt ("always"), or prompts and responses of
any groups ("flat"). The skewed batch has log-normal lengths of mean 32, cut at 256, as rollouts of
a run have them. In the even one all responses are of full length, so that packing saves nothing and
costs what it costs. Both on a small random model in float32, rematerialized.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks import harness, workload
from benchmarks.engine import in_turns, ratio
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.models import ModelConfig, make_model

FORMS = ("never", "always", "flat")
SIZES = {
    "prompts": 8,
    "rollouts": 8,
    "prompt_tokens": 32,
    "mean": 32,
    "cap": 256,
    "even_tokens": 64,
    "width": 256,
    "layers": 4,
    "vocab_size": 4096,
    "least_saved": 128,
}
TINY = SIZES | {
    "prompts": 2,
    "rollouts": 4,
    "mean": 4,
    "cap": 16,
    "even_tokens": 8,
    "width": 32,
    "layers": 1,
    "vocab_size": 259,
    "least_saved": 1,
}


def network(size) -> jr.models.Model:
    """A decoder with heads of 64."""
    heads = max(2, size["width"] // 64)
    return make_model(
        ModelConfig(
            architecture="llama",
            vocab_size=size["vocab_size"],
            width=size["width"],
            num_layers=size["layers"],
            num_heads=heads,
            num_kv_heads=heads // 2,
            head_dim=size["width"] // heads,
            mlp_width=3 * size["width"],
            max_length=1024,
            tied=True,
        )
    )


def batch_of(lengths: np.ndarray, size, *, parts: int = 4) -> jr.recipes.Batch:
    """Random tokens of these lengths ``[P, G]``, as wide as the loop leaves them."""
    (P, G), step = lengths.shape, -(-size["cap"] // parts)
    length = int(-(-lengths.max() // step) * step)
    vocab_size = size["vocab_size"]
    prompts = workload.prompt_ids(P, size["prompt_tokens"], vocab_size=vocab_size)
    tokens = workload.response_ids(P, G, length, vocab_size=vocab_size)
    return jr.recipes.Batch(
        tokens=np.asarray(tokens, np.int32),
        mask=np.arange(length) < lengths[..., None],
        rewards=workload.rewards(P, G),
        where=np.ones((P, G), bool),
        prompt_tokens=np.asarray(prompts, np.int32),
        prompt_mask=np.ones((P, size["prompt_tokens"]), bool),
    )


def step_seconds(model, length: int, batches, rounds: int) -> dict[str, list[float]]:
    """Seconds of a Dr. GRPO step on batches by their names, in turns.

    Raises ValueError if the gradients of two batches differ in their norm.
    """
    recipe, optimizer = jr.recipes.dr_grpo(length=length), optax.adamw(1e-6)
    step = jr.train.make_step(model, recipe, optimizer, donate=False)
    params = model.init(jax.random.key(0))
    state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
    norms = {}

    def run(name: str, batch):
        batch = jax.tree.map(jnp.asarray, batch)

        def once():
            norms[name] = step(state, batch)[1]["grad_norm"]
            return norms[name]

        return once

    seconds = in_turns(rounds, {name: run(name, batch) for name, batch in batches.items()})
    values = {name: float(norm) for name, norm in norms.items()}
    if not math.isclose(min(values.values()), max(values.values()), rel_tol=1e-4):
        raise ValueError(f"the gradients differ: their norms are {values}")
    return seconds


def beside(model, lengths: np.ndarray, size, rounds: int) -> dict[str, Any]:
    """A step of the padded batch, with rows of a group, and with flat rows, in turns."""
    padded, least = batch_of(lengths, size), size["least_saved"]
    forms = {
        name: jr.train.pack_batch(padded, name, model=model, least_saved=least) for name in FORMS
    }
    batches = {name: batch for name, (batch, _) in forms.items()}
    seconds = step_seconds(model, size["cap"], batches, rounds)
    cells = padded.mask.size + padded.prompt_mask.size
    return {
        "tokens": int(lengths.sum() + padded.prompt_mask.sum()),
        "longest": int(lengths.max()),
        "cells": {name: round(cells * numbers["packed"]) for name, (_, numbers) in forms.items()},
        "padding": {name: round(numbers["padding"], 3) for name, (_, numbers) in forms.items()},
        "seconds": {name: harness.summary(s) for name, s in seconds.items()},
        "ratio": {name: round(ratio(seconds, "never", name), 3) for name in FORMS[1:]},
    }


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.parser(__doc__.splitlines()[0]).parse_args(argv)
    if options.peer_python is not None or options.gguf is not None:
        raise SystemExit("benchmarks.packing compares packing with itself on a random model.")
    size, rounds = (TINY if options.tiny else SIZES), options.rounds
    model, shape, sigma = network(size), (size["prompts"], size["rollouts"]), 1.0
    rng = np.random.default_rng(0)
    skewed = rng.lognormal(math.log(size["mean"]) - sigma**2 / 2, sigma, shape)
    skewed = np.clip(np.round(skewed), 1, size["cap"]).astype(int)
    even = np.full(shape, size["even_tokens"])
    result = {
        "name": "packing",
        "workload": {"dtype": "float32", **size, "runs": rounds},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "skewed": beside(model, skewed, size, rounds),
        "even": beside(model, even, size, rounds),
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
