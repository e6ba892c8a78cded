"""A guarded step of AdamW on a few matrices, compiled: bytes, in sizes of the parameters."""

import json
import sys

from benchmarks.absent import prepare_environment, present

prepare_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jaxrl_llm.train import OptimizerConfig, make_optimizer  # noqa: E402
from jaxrl_llm.train.optimizer import apply_if_finite  # noqa: E402

SHAPES = {f"{i}": {"up": (2048, 6144), "down": (6144, 2048)} for i in range(4)}


def step(optimizer):
    def loss(params, x):
        for layer in params.values():
            x = jnp.tanh(x @ layer["up"]) @ layer["down"]
        return jnp.sum(x)

    def update(carry, x):
        value, grads = jax.value_and_grad(loss)(carry[0], x)
        return apply_if_finite(optimizer, carry, value, grads)

    return jax.jit(update, donate_argnums=0)


def main(kind: str) -> None:
    optimizer = make_optimizer(OptimizerConfig())
    with present(kind, 1) as devices:
        place = jax.sharding.SingleDeviceSharding(devices[0])
        params = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place),
            SHAPES,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            jax.eval_shape(optimizer.init, params),
        )
        x = jax.ShapeDtypeStruct((64, 2048), jnp.float32, sharding=place)
        memory = step(optimizer).lower((params, state), x).compile().memory_analysis()
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    found = {"temporary": memory.temp_size_in_bytes, "aliased": memory.alias_size_in_bytes}
    print(json.dumps({name: value / size for name, value in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
