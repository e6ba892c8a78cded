"""States and batches as shapes and shardings, to compile or plan a step for a mesh of any size."""

import math

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.sharding import RULES, ShardingRules, batch_sharding, param_shardings
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.state import TrainState, init_state, optimizer_shardings


def abstract_state(
    params: ArrayTree,
    optimizer: optax.GradientTransformation,
    recipe: Recipe,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: ShardingRules = RULES,
    critic: ArrayTree | None = None,
    critic_optimizer: optax.GradientTransformation | None = None,
    reference: ArrayTree | None = None,
) -> TrainState:
    """The state before the first step, without its arrays.

    Args:
      params: Parameters, or their shapes (:func:`~jaxrl_llm.models.param_shapes`).
      optimizer: Any optax transformation.
      recipe: The method.
      mesh: The mesh of the shardings; its devices need not exist.
      rules: How it splits parameters: ``sharding_rules`` of the model.
      critic: Shapes of a critic's parameters, for a recipe with a critic.
      critic_optimizer: Its optimizer.
      reference: Where a reference that moves begins; the parameters of the policy by default.

    Returns:
      A state of ``jax.ShapeDtypeStruct``, laid out as :func:`~jaxrl_llm.train.init_state` lays out
      arrays.

    Example:
      >>> import optax
      >>> import jaxrl_llm as jr
      >>> shapes = jr.models.param_shapes(jr.testing.tiny_model()[0])
      >>> state = abstract_state(shapes, optax.adamw(1e-3), jr.recipes.rloo())
      >>> state.opt_state[0].mu["embed"]["embedding"].shape
      (259, 32)
    """
    state = jax.eval_shape(
        lambda params, critic, reference: init_state(
            params,
            optimizer,
            recipe,
            key=jax.random.key(0),
            copy=False,
            critic=critic,
            critic_optimizer=critic_optimizer,
            reference=reference,
        ),
        params,
        critic,
        reference,
    )
    if mesh is None:
        return state
    shardings = param_shardings(state, mesh, rules)._replace(
        opt_state=optimizer_shardings(state.opt_state, recipe, mesh, rules)
    )
    if state.critic:
        moments = optimizer_shardings(state.critic.opt_state, recipe, mesh, rules)
        shardings = shardings._replace(critic=shardings.critic._replace(opt_state=moments))
    return _placed(state, shardings)


def abstract_batch(
    prompts: int,
    group_size: int,
    length: int,
    *,
    prompt_length: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Batch:
    """A batch ``[P, G, T]`` of the arrays that every recipe has, without the arrays."""

    def array(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    grid = (prompts, group_size)
    batch = Batch(
        tokens=array((*grid, length), jnp.int32),
        mask=array((*grid, length), jnp.bool_),
        rewards=array(grid, jnp.float32),
        where=array(grid, jnp.bool_),
        prompt_tokens=array((prompts, prompt_length), jnp.int32),
        prompt_mask=array((prompts, prompt_length), jnp.bool_),
        behavior_logp=array((*grid, length), jnp.float32),
    )
    if mesh is None:
        return batch
    return _placed(batch, jax.tree.map(lambda _: batch_sharding(mesh), batch))


def device_bytes(tree: ArrayTree) -> int:
    """Bytes that each device holds of a tree of arrays or of their shapes."""

    def size(x) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(size(x) for x in jax.tree.leaves(tree))


def _placed(tree: ArrayTree, shardings: ArrayTree) -> ArrayTree:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )
