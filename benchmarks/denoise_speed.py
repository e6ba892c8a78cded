"""The sampler of denoisers against the machine's matrix products: SmolLM2-135M's shapes, float32.

    python -m benchmarks.denoise_speed --save

A random model of these shapes with `causal=False` uncovers 64 tokens behind 64 of a prompt, for 4
prompts x 4 responses, in 8 steps: of one block, whose logits are all there in each step, and of
blocks of 16. Tokens are those of the forward passes, prompts included. In turns with it, the matrix
products of the same shapes run alone: those of the layers for all tokens, that of the vocabulary
for the cells of a block. Attention, norms and the draws come on top of them in the sampler.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxrl_llm as jr
from benchmarks import harness, workload
from benchmarks.engine import in_turns, ratio
from benchmarks.training import SMOLLM2
from benchmarks.worker import jax_device_name, package_versions

SIZES = {"prompts": 4, "responses": 4, "prompt_tokens": 64, "new_tokens": 64, "steps": 8}
TINY = {"prompts": 2, "responses": 2, "prompt_tokens": 16, "new_tokens": 8, "steps": 4}
# Into how many blocks a response is divided.
BLOCKS = (1, 4)


def against_products(model, params, size, blocks: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of the sampler's forward passes, and of their matrix products alone."""
    config, steps, new = model.config, size["steps"], size["new_tokens"]
    rows, block = size["prompts"] * size["responses"], new // blocks
    width = size["prompt_tokens"] + new
    prompts = workload.prompt_ids(
        size["prompts"], size["prompt_tokens"], vocab_size=config.vocab_size
    )
    sample = jr.rollout.make_denoising_sampler(
        model,
        max_new_tokens=new,
        group_size=size["responses"],
        options=jr.rollout.DenoisingOptions(steps=steps, block_length=block),
        buckets=(size["prompt_tokens"],),
    )
    matrices = [x for x in jax.tree.leaves(params["layers"]) if x.ndim == 2]
    inputs = {n: jnp.ones((rows * width, n)) for n in {x.shape[0] for x in matrices}}
    cells, vocabulary = jnp.ones((rows * block, config.width)), model.output_matrix(params)

    @jax.jit
    def products(matrices, inputs, cells, vocabulary):
        # Sums keep the products alive and cost next to nothing.
        out = 0.0
        for x, y in [(inputs[x.shape[0]], x) for x in matrices] + [(cells, vocabulary.T)]:
            z = x @ y
            out += z[0, 0] + z[-1, -1]
        return out

    def many_products():
        return [products(matrices, inputs, cells, vocabulary) for _ in range(steps)]

    def generate():
        return sample(params, jax.random.key(0), prompts).tokens

    seconds = in_turns(rounds, {"products": many_products, "sampler": generate})
    total = steps * rows * width
    flops = (
        2 * steps * (rows * width * sum(x.size for x in matrices) + cells.size * len(vocabulary))
    )
    return {
        "block": block,
        "sampler_tokens_per_s": harness.summary([total / s for s in seconds["sampler"]]),
        "products_tokens_per_s": harness.summary([total / s for s in seconds["products"]]),
        "products_gflop_per_s": harness.summary([flops / s / 1e9 for s in seconds["products"]]),
        "share_of_products": round(1 / ratio(seconds, "sampler", "products"), 3),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.parser(__doc__.splitlines()[0]).parse_args(argv)
    if options.peer_python is not None or options.gguf is not None:
        raise SystemExit("benchmarks.denoise_speed has a random model and no peers.")
    size = TINY if options.tiny else SIZES
    config = jr.testing.tiny_config(num_layers=1) if options.tiny else SMOLLM2
    config = dataclasses.replace(config, causal=False, mask_id=config.vocab_size - 1)
    model = jr.models.make_model(config)
    params = model.init(jax.random.key(0))
    result = {
        "name": "denoise_speed",
        "workload": {
            "model": "tiny" if options.tiny else "SmolLM2-135M, random",
            "dtype": "float32",
            **size,
            "runs": options.rounds,
        },
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "cases": [
            against_products(model, params, size, blocks, options.rounds) for blocks in BLOCKS
        ],
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
