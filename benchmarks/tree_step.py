"""Seconds of a train step on trees of responses, beside the same step with a row each.

python -m benchmarks.tree_step --save

A group is 4 trees of 4 responses, which have the first half in common: 10 halves of 16 are unique.
The rows of the tree hold each unique token once. On a small random model in float32,
rematerialized; both steps make the same update.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.engine import in_turns
from benchmarks.packing import batch_of, network
from benchmarks.worker import jax_device_name, package_versions

SIZES = {
    "prompts": 4,
    "trees": 4,
    "branches": 4,
    "prompt_tokens": 32,
    "response_tokens": 128,
    "width": 256,
    "layers": 4,
    "vocab_size": 4096,
}
TINY = SIZES | {"prompts": 2, "response_tokens": 8, "width": 32, "layers": 1, "vocab_size": 259}


def forked_batch(size) -> jr.recipes.Batch:
    """Random tokens; the branches of a tree have the first half of the first one."""
    trees, branches, length = size["trees"], size["branches"], size["response_tokens"]
    lengths = np.full((size["prompts"], trees * branches), length)
    batch = batch_of(lengths, size | {"cap": length})
    tokens = batch.tokens.reshape(-1, trees, branches, length).copy()
    tokens[..., : length // 2] = tokens[:, :, :1, : length // 2]
    return batch.replace(tokens=tokens.reshape(batch.tokens.shape))


def compare(size, rounds: int) -> dict[str, Any]:
    """A step of the flattened rows and of the trees, in turns."""
    model, flattened = network(size), forked_batch(size)
    recipe = jr.recipes.dr_grpo(length=size["response_tokens"])
    optimizer = optax.adamw(1e-6)
    step = jr.train.make_step(model, recipe, optimizer, donate=False)
    params = model.init(jax.random.key(0))
    state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
    tree, numbers = jr.train.pack_batch(flattened, "tree", model=model)
    norms = {}

    def run(name: str, batch):
        batch = jax.tree.map(jnp.asarray, batch)

        def once():
            norms[name] = step(state, batch)[1]["grad_norm"]
            return norms[name]

        return once

    seconds = in_turns(rounds, flattened=run("flattened", flattened), tree=run("tree", tree))
    first, second = (float(norms[name]) for name in ("flattened", "tree"))
    if not math.isclose(first, second, rel_tol=1e-4):
        raise ValueError(f"the gradients differ: their norms are {first} and {second}")
    cells = flattened.mask.size
    shares = [t / f for f, t in zip(seconds["flattened"], seconds["tree"], strict=True)]
    return {
        "cells": {"flattened": cells, "tree": round(cells * numbers["packed"])},
        "seconds": {name: harness.summary(s) for name, s in seconds.items()},
        # Of the runs of one turn, so that what slows the machine for a while slows both.
        "share": {name: round(x, 3) for name, x in harness.summary(shares).items()},
    }


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.parser(__doc__.splitlines()[0]).parse_args(argv)
    if options.peer_python is not None or options.gguf is not None:
        raise SystemExit("benchmarks.tree_step compares trees with rows on a random model.")
    size = TINY if options.tiny else SIZES
    result = {
        "name": "tree_step",
        "workload": {"dtype": "float32", **size, "runs": options.rounds},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "ours": compare(size, options.rounds),
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
