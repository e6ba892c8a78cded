"""Prints what devices with an axis `expert` exchange for the gradient of a mixture of experts.

The shapes of three axes or more that their collectives have, compiled.
"""

import json
import re
import sys

from benchmarks.absent import prepare_environment, present

prepare_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

from jaxrl_llm.core import trees  # noqa: E402
from jaxrl_llm.models import AttentionContext, ExpertsConfig, make_model  # noqa: E402
from jaxrl_llm.models.sharding import batch_sharding, on_mesh, param_spec  # noqa: E402
from jaxrl_llm.models.transformer import param_shapes  # noqa: E402
from jaxrl_llm.testing import tiny_config  # noqa: E402
from jaxrl_llm.train import make_mesh  # noqa: E402

EXPERTS = ExpertsConfig(count=16, active=2, width=256)


def moved(devices, sizes: dict[str, int]) -> list[tuple[int, ...]]:
    """Shapes that the gradient of a layer's parameters moves between devices."""
    model = make_model(
        tiny_config(num_layers=1, width=512, experts=EXPERTS, dtype="bfloat16", vocab_size=256)
    )
    mesh = make_mesh(**sizes, devices=devices)
    params = trees.map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, param_spec(path, x.shape, mesh))
        ),
        param_shapes(model),
    )
    tokens = jax.ShapeDtypeStruct((8, 2, 128), jnp.int32, sharding=batch_sharding(mesh))

    def loss(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        context = AttentionContext(mask=jnp.ones(tokens.shape, bool))
        hidden, _ = model.apply(params, tokens, positions, context)
        return jnp.sum(jnp.sin(hidden.astype(jnp.float32)))

    shardings = jax.tree.map(lambda x: x.sharding, params)
    compiled = jax.jit(on_mesh(jax.grad(loss), mesh), out_shardings=shardings)
    text = compiled.lower(params, tokens).compile().as_text()
    names = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    found = re.findall(rf"\w+\[([\d,]+)\]\S*\)? (?:{names})(?:-start)?\(", text)
    return sorted({tuple(map(int, x.split(","))) for x in found if x.count(",") >= 2})


def main(kind: str) -> None:
    with present(kind, 4) as devices:
        print(json.dumps(moved(devices, {"expert": 4})))


if __name__ == "__main__":
    main(sys.argv[1])
