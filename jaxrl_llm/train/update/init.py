"""The first state of a run, as arrays or as shapes.

Shapes and shardings alone suffice to compile or plan a step for a mesh of any size.

Shared arguments:

- ``params``: parameters of the model, or their shapes.
- ``optimizer``, ``recipe``: any optax transformation, and the method.
- ``mesh``: its devices need not exist if only shapes are computed.
- ``rules``: how the mesh splits parameters, the ``sharding_rules`` of the model.
- ``critic``, ``critic_optimizer``: for a recipe with a critic, its parameters (or shapes) from
  :func:`~jaxrl_llm.train.init_critic`, and their optimizer.
- ``reference``: the initial value of a moving reference, by default the policy.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.models.lora import Adapted, trainable
from jaxrl_llm.models.sharding import (
    RULES,
    ShardingRules,
    batch_sharding,
    param_shardings,
    update_shardings,
)
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.mesh import replicated
from jaxrl_llm.train.state import TrainState, check_step_parts
from jaxrl_llm.train.update.part import Setup, Start
from jaxrl_llm.train.update.parts import parts_of


def init_state(
    params: ArrayTree,
    optimizer: optax.GradientTransformation,
    recipe,
    *,
    key: Array,
    data_cursor: Any = (),
    mesh=None,
    rules: ShardingRules = RULES,
    copy: bool = True,
    critic: ArrayTree | None = None,
    critic_optimizer: optax.GradientTransformation | None = None,
    reference: ArrayTree | None = None,
    output_shape: tuple[int, int] | None = None,
) -> TrainState:
    """The state before the first step.

    The optimizer's state is float32 even for bfloat16 parameters, which themselves lose small
    updates. :func:`optimizer_shardings` splits this state.

    Args:
      optimizer, recipe, rules, critic, critic_optimizer, reference: See the module.
      params: Parameters, already placed on the mesh if there is one. If they are
        :class:`~jaxrl_llm.train.Adapted`, the adapter is trained and the base is never copied.
      key: A typed key, ``jax.random.key(seed)``.
      data_cursor: Initial position in the prompt order, integers only.
      mesh: Small leaves are replicated over it.
      output_shape: ``(V, D)`` of the model's output matrix, for a recipe with numbers computed from
        "optimizer", such as capo.
      copy: Whether to copy the parameters of policy and critic, since a step donates its state;
        False saves this memory if no other code uses the parameters.

    Raises:
      TypeError: If ``key`` is not a typed key.
      ValueError: If the recipe has a critic and its parameters or optimizer are absent, or the
        recipe has no critic and they are passed.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> recipe, optimizer = jr.recipes.dr_grpo(length=4), optax.adamw(1e-3)
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> int(state.step), jax.tree.structure(state.policy) == jax.tree.structure(params)
      (0, True)
    """
    check_step_parts("init_state", recipe, optimizer)
    checks.check_key("init_state", key)
    base = params.base if isinstance(params, Adapted) else ()
    params = trainable(params)
    # As the step will return it: a checkpoint is read into arrays of the same types.
    algo_state = trees.as_arrays(recipe.init(output_shape))
    rest = (algo_state, key, jnp.zeros((), jnp.int32))
    nothing: Any = None
    parts = parts_of(Setup(recipe=recipe, scorer=nothing)) if recipe.needs.sums_gradients else ()
    if (critic, critic_optimizer) != (None, None) and not any(p.name == "critic" for p in parts):
        raise ValueError(f"init_state: recipe {recipe.name!r} has no critic, but one is passed.")
    if reference is not None and not any(part.name == "reference" for part in parts):
        raise ValueError(
            f"init_state: recipe {recipe.name!r} has a frozen reference, which is not part of the "
            "state; pass it to the function that computes ref_logp."
        )
    if mesh is not None:
        rest, critic = jax.tree.map(lambda x: _replicated(x, mesh), (rest, critic))

    def optimizer_state(optimizer: optax.GradientTransformation, params: ArrayTree) -> ArrayTree:
        return _optimizer_state(optimizer, params, recipe, mesh, rules)

    start = Start(
        params=params,
        adapter=base != (),
        reference=None if reference is None else trainable(reference),
        second_params=critic,
        second_optimizer=critic_optimizer,
        optimizer_state=optimizer_state,
        replicated=lambda x: x if mesh is None else _replicated(x, mesh),
        copy=copy,
    )
    states = {part.name: part.init(recipe, start) for part in parts if part.init is not None}
    opt_state = optimizer_state(optimizer, params)
    algo_state, key, step = rest
    params = jax.tree.map(jnp.copy, params) if copy else params
    state = TrainState(params, opt_state, algo_state, key, step, data_cursor, base)
    return state.with_parts(**states)


def _replicated(x: Array, mesh: jax.sharding.Mesh) -> Array:
    """The array on the mesh; unchanged if it is already on one."""
    placed = isinstance(x.sharding, jax.sharding.NamedSharding)
    return x if placed else processes.place(x, replicated(mesh))


def optimizer_shardings(
    opt_state: ArrayTree, recipe, mesh: jax.sharding.Mesh, rules: ShardingRules = RULES
) -> ArrayTree:
    """A ``NamedSharding`` for each leaf of an optimizer's state.

    The state is split like the parameters, and also over ``data``. For an evolution recipe it is
    not split over ``data``: every device makes the full update from the scores, and devices
    exchange only scalars.
    """
    place = update_shardings if recipe.needs.sums_gradients else param_shardings
    return place(opt_state, mesh, rules)


def _optimizer_state(
    optimizer: optax.GradientTransformation,
    params: ArrayTree,
    recipe,
    mesh,
    rules: ShardingRules,
) -> ArrayTree:
    def statistics(x: Array) -> Array:
        # Gradients are float32 for any dtype of the parameters.
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def init(params):
        return optimizer.init(jax.tree.map(statistics, params))

    if mesh is None:
        return trees.as_arrays(init(params))
    shardings = optimizer_shardings(jax.eval_shape(init, params), recipe, mesh, rules)
    return jax.jit(init, out_shardings=shardings)(params)


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
    output_shape: tuple[int, int] | None = None,
) -> TrainState:
    """The state before the first step, with a ``jax.ShapeDtypeStruct`` in place of each array.

    The layout is that of :func:`init_state`. Shapes of parameters come from
    :func:`~jaxrl_llm.models.param_shapes`.

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
            output_shape=output_shape,
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
    for name, of_part in state.parts.items():
        if hasattr(of_part, "opt_state"):
            moments = optimizer_shardings(of_part.opt_state, recipe, mesh, rules)
            placed = shardings.parts[name]._replace(opt_state=moments)
            shardings = shardings.with_parts(**{name: placed})
    return _placed(state, shardings)


def abstract_batch(
    prompts: int,
    group_size: int,
    length: int,
    *,
    prompt_length: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Batch:
    """A batch ``[P, G, T]`` with the shapes of the arrays that every recipe has."""
    array, grid = jax.ShapeDtypeStruct, (prompts, group_size)
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


def _placed(tree: ArrayTree, shardings: ArrayTree) -> ArrayTree:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )
