"""The loop of the sampler, compiled for a GPU: what a step of it launches, copies and joins."""

import json
import re
import sys

from benchmarks.absent import prepare_environment, present

prepare_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jaxrl_llm as jr  # noqa: E402

P, G, PROMPT, RESPONSE = 8, 8, 128, 128
SIZES = {
    "architecture": "qwen3",
    "vocab_size": 1024,
    "width": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
SIZES |= {"mlp_width": 512, "max_length": 1024, "qk_norm": True, "dtype": "bfloat16"}
# What starts no kernel.
FREE = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}


def loop_of(layers: int, device) -> tuple[list[str], str]:
    """The operations of a step of the largest loop, as text, and the whole program."""
    place = jax.sharding.SingleDeviceSharding(device)

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    model = jr.models.make_model(jr.models.ModelConfig(num_layers=layers, **SIZES))
    params = jax.tree.map(lambda x: struct(x.shape, jnp.bfloat16), jr.models.param_shapes(model))
    sample = jr.rollout.make_sampler(model, max_new_tokens=RESPONSE, group_size=G)
    inputs = [struct((P, PROMPT), jnp.int32), struct((P, PROMPT), bool)]
    inputs += [struct((P, G), jnp.int32), struct((), jnp.int32)]
    traced = sample.compiled.trace(params, struct((), jax.random.key(0).dtype), *inputs)
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    found = []
    for body in re.findall(r"while\(.*?body=%([\w.\-]+)", text):
        lines = re.search(rf"^%{re.escape(body)} .*?^}}", text, re.S | re.M).group().split("\n")
        kind = [re.match(r"\s+(?:ROOT )?%[\w.\-]+ = .*? ([\w\-]+)\(", line) for line in lines]
        found.append(
            [line for line, k in zip(lines, kind, strict=True) if k and k.group(1) not in FREE]
        )
    return max(found, key=len), text


def main(kind: str) -> None:
    with present(kind, 1) as devices:
        (one, _), (two, text) = (loop_of(layers, devices[0]) for layers in (1, 2))
    cache = f"bf16[{P},{G},{SIZES['num_kv_heads']},"
    # Of the rows of a step; those of prompts are not joined.
    of_step = rf"^%gemm_fusion[^\n]*bf16\[{P * G},.*?^}}"
    products = re.findall(of_step, text, re.S | re.M)
    found = {
        "kernels of a layer": len(two) - len(one),
        "copies of a cache": sum(" copy(" in line and cache in line for line in two),
        "kernels for attention": sum("decode_attention" in line for line in two),
        "products": len(products),
        "products of kernels that lie apart": sum(" concatenate(" in x for x in products),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
