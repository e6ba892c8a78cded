"""Seconds of a train step on trees of responses, beside the same step with a row each.

python -m benchmarks.tree_step --save

A group is 4 trees of 4 responses, which have the first half in common: 10 halves of 16 are unique.
The rows of the tree hold each unique token once. On a small random model in float32,
rematerialized; both steps make the same update.
"""

from typing import Any

import numpy as np

import jaxrl_llm as jr
from benchmarks import harness
from benchmarks.packing import batch_of, network, step_seconds
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
    tree, numbers = jr.train.pack_batch(flattened, "tree", model=model)
    batches = {"flattened": flattened, "tree": tree}
    seconds = step_seconds(model, size["response_tokens"], batches, rounds)
    cells, prompts = flattened.mask.size, flattened.prompt_mask.size
    packed = round((cells + prompts) * numbers["packed"]) - prompts
    shares = [t / f for f, t in zip(seconds["flattened"], seconds["tree"], strict=True)]
    return {
        "cells": {"flattened": cells, "tree": packed},
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
