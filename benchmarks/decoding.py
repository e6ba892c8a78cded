"""Tokens a second of the sampler beside its matrix products alone, and beside another checkout.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.decoding --before /tmp/before --save
    python -m benchmarks.decoding --tiny         # a look, on any machine

SmolLM2-135M with random weights, 8 prompts of 64 tokens and 8 responses to each, in float32 and in
bfloat16. No token ends a response. The products are those of a decode step with 64 slots, one after
another; the sampler also reads the prompts, attends and draws. Both run in one process, which has
compiled everything before; each checkout has processes of its own, in turns.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxrl_llm as jr
from benchmarks import harness, workload
from benchmarks.checkpoint import SMOLLM2
from jaxrl_llm.models.protocol import cast_params
from jaxrl_llm.testing import tiny_config

PROMPTS, ROLLOUTS, LENGTH = 8, 8, 64
CASES = (("float32", 64), ("bfloat16", 64), ("bfloat16", 256))  # dtype, tokens of a response
TINY_CASES = (("float32", 4), ("bfloat16", 4), ("bfloat16", 8))
# Times that the products of a step are run.
_PRODUCTS = 32


def products(params, slots: int) -> Callable[[], Any]:
    """The matrix products of a decode step alone, ready to run.

    The parameters are in the dtype of the products, whose results are float32.
    """
    matrices = [x for x in jax.tree.leaves(params) if x.ndim == 2]
    inputs = {n: jnp.ones((slots, n), x.dtype) for x in matrices for n in x.shape}

    @jax.jit
    def run(matrices, inputs):
        # Sums keep the products alive and cost next to nothing; the embedding is [V, D].
        out = 0.0
        for x in matrices:
            axis = int(x.shape[0] > 8 * x.shape[1])
            left, dimensions = inputs[x.shape[axis]], (((1,), (axis,)), ((), ()))
            y = jax.lax.dot_general(left, x, dimensions, preferred_element_type=jnp.float32)
            out += y[0, 0] + y[-1, -1]
        return out

    return lambda: run(matrices, inputs)


def product_flops(params, slots: int) -> int:
    """Operations of :func:`products`."""
    return 2 * slots * sum(x.size for x in jax.tree.leaves(params) if x.ndim == 2)


def _child(dtype: str, new: int, tiny: bool) -> None:
    """Prints the seconds of a run of the sampler, and of the products of as many steps."""
    config = tiny_config(max_length=LENGTH + new) if tiny else SMOLLM2
    model = jr.models.make_model(dataclasses.replace(config, dtype=dtype))
    params = jax.jit(model.init)(jax.random.key(0))
    prompts = workload.prompt_ids(PROMPTS, LENGTH, vocab_size=config.vocab_size)
    sample = jr.rollout.make_sampler(
        model, max_new_tokens=new, group_size=ROLLOUTS, stop_ids=(), temperature=1.0
    )
    matrices = jax.jit(lambda x: cast_params(model, x))(params)
    once = products(matrices, PROMPTS * ROLLOUTS)
    sample.compile_for(params, jax.random.key(0), prompts).result()  # type: ignore[attr-defined]
    jax.block_until_ready(once())
    start = time.perf_counter()
    jax.block_until_ready([once() for _ in range(_PRODUCTS)])
    middle = time.perf_counter()
    jax.block_until_ready(sample(params, jax.random.key(0), prompts))
    taken = time.perf_counter() - middle
    print(json.dumps({"sampler": taken, "products": (middle - start) * new / _PRODUCTS}))


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.options_beside(__doc__.splitlines()[0], argv)
    if options.child is not None:
        _child(**options.child)
        return
    checkouts = harness.checkouts(options.before)
    slots = PROMPTS * ROLLOUTS
    ours: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype, new in TINY_CASES if options.tiny else CASES:
            request = {"dtype": dtype, "new": new, "tiny": options.tiny}
            seconds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
            for _ in range(options.turns):
                for name, path in checkouts.items():
                    programs = {"JAX_COMPILATION_CACHE_DIR": str(Path(folder) / name)}
                    seconds[name].append(harness.run_child(__file__, request, path, **programs))
            case = f"{dtype}, {LENGTH} + {new} tokens"
            ours[case] = {
                name: {
                    "tokens_per_s": harness.summary([slots * new / x["sampler"] for x in taken]),
                    "share_of_products": harness.summary(
                        [x["products"] / x["sampler"] for x in taken]
                    ),
                }
                for name, taken in seconds.items()
            }
    size = {"model": "tiny" if options.tiny else "SmolLM2-135M", "slots": slots}
    if options.before is not None:
        size["before"] = harness.commit(options.before)
    result = harness.of_ours("decoding", size, ours)
    if options.before is not None:
        rates = {
            case: {name: x["tokens_per_s"]["median"] for name, x in of.items()}
            for case, of in ours.items()
        }
        result["ratios"] = {case: round(x["now"] / x["before"], 2) for case, x in rates.items()}
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
