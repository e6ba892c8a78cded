"""What a run with an adapter begins with: its parts in place, and a digest of what is frozen."""

import hashlib

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.lora import Adapted, LoRAConfig, adapted_model, init_lora, trainable
from jaxrl_llm.models.protocol import Model, cast_params
from jaxrl_llm.train.checkpoint import Checkpoints


def with_adapter(
    model: Model, params: ArrayTree, config: LoRAConfig, *, mesh: jax.sharding.Mesh | None = None
) -> tuple[Model, ArrayTree]:
    """Model and parameters with the adapter that a configuration asks for; as they are if none.

    Args:
      model: The model.
      params: Its parameters, on the mesh if there is one.
      config: With a rank or without.
      mesh: Over which the adapter is split as the matrices beside it.
    """
    if config.rank is None:
        return model, params
    adapter = init_lora(params, config)
    if mesh is not None:
        from jaxrl_llm.models.sharding import param_shardings, shard

        adapter = shard(adapter, param_shardings(adapter, mesh))
    # As matrix products take it: what never moves loses nothing in their dtype.
    return adapted_model(model, config), Adapted(cast_params(model, params, rounded=False), adapter)


def base_fingerprint(params: ArrayTree, config: LoRAConfig) -> dict[str, str]:
    """What a checkpoint of an adapter says of the model that is not in it."""
    if not isinstance(params, Adapted):
        return {}
    return {"lora": repr(config), "base": digest(params.base)}


def restore_policy(
    checkpoints: Checkpoints, params: ArrayTree, *, step: int | None = None
) -> ArrayTree:
    """The policy of a checkpoint: parameters like those given, of which a base stays as it is."""
    found = checkpoints.restore_params(trainable(params), step=step)
    return params._replace(adapter=found) if isinstance(params, Adapted) else found


def described(params: ArrayTree) -> str:
    """How many parameters there are, in words."""
    if not isinstance(params, Adapted):
        return f"{trees.size(params):,} parameters"
    moving = trees.size(params.adapter)
    return f"{trees.size(params.base):,} frozen parameters and {moving:,} of an adapter"


def digest(params: ArrayTree) -> str:
    """A short name of the values of parameters, the same on every mesh.

    Integer sums over the bits of each array, made on the devices that hold it: no array is moved,
    and their order does not matter.
    """
    lines = [
        f"{trees.path_str(path)} {x.shape} {x.dtype} {_bit_sums(x).tolist()}"
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@jax.jit
def _bit_sums(x: Array) -> Array:
    """Two sums of the bits of an array, weighted by place, modulo 2^32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    bits, place = bits.astype(jnp.uint32), jnp.uint32(1)
    for axis, size in enumerate(x.shape):
        own = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        place = place * jnp.uint32(size) + own
    place = (place ^ (place >> 15)) * jnp.uint32(0x2C1B3C6D)
    place = (place ^ (place >> 12)) * jnp.uint32(0x297A2D39) | 1
    return jnp.stack([jnp.sum(bits * place), jnp.sum((bits ^ place) * (place >> 7 | 1))])
