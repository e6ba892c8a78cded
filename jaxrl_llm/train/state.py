"""``TrainState``: everything that a resumed run needs, in one pytree of arrays or shapes.

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

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.models.lora import Adapted, merge_adapter, trainable
from jaxrl_llm.models.sharding import (
    RULES,
    ShardingRules,
    batch_sharding,
    param_shardings,
    update_shardings,
)
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.regularizers import Anchored, Iterates, StoredPolicies
from jaxrl_llm.train.critic import CriticState
from jaxrl_llm.train.mesh import replicated
from jaxrl_llm.train.moving import adapter_of, first_reference


class SubagentState(NamedTuple):
    """The state of a second policy that the first one calls.

    Attributes:
      params: Its parameters.
      opt_state: State of its optimizer.
      algo_state: State of its recipe.
    """

    params: ArrayTree
    opt_state: ArrayTree
    algo_state: ArrayTree


class TrainState(NamedTuple):
    """The complete state of a run between two steps.

    Attributes:
      params: The trained parameters: the parameters of the model, or an adapter.
      opt_state: State of the optimizer.
      algo_state: State of the recipe: trackers and controllers; often empty.
      key: A typed key that never changes; the randomness of a step comes from ``fold_in(key,
        step)``.
      step: int32 ``[]``, number of steps so far.
      data_cursor: Position in the prompt order: Python integers, which stay on the host.
      critic: A :class:`~jaxrl_llm.train.CriticState` of a critic or a process reward model, or
        ``()`` for a recipe without one.
      reference: A moving reference with the structure of ``params``, or the state of its rule;
        ``()`` for none.
      earlier: Policies of earlier iterations, each with the structure of ``params``, see
        ``regularizers.Earlier``; ``()`` for none.
      base: Frozen parameters below an adapter, or ``()``: passed from step to step by reference,
        and not part of a checkpoint.
      collector_state: State of the recipe's collector: NumPy arrays, which stay on the host.
      subagent: A :class:`SubagentState`, or ``()`` for a recipe without a subagent.
    """

    params: ArrayTree
    opt_state: ArrayTree
    algo_state: ArrayTree
    key: Array
    step: Array
    data_cursor: Any = ()
    critic: ArrayTree = ()
    reference: ArrayTree = ()
    base: ArrayTree = ()
    collector_state: ArrayTree = ()
    earlier: ArrayTree = ()
    subagent: ArrayTree = ()

    @property
    def policy(self) -> ArrayTree:
        """Parameters in the form that the model takes: ``params``, with any base."""
        return self.with_base(self.params)

    @property
    def reference_params(self) -> ArrayTree:
        """Parameters of a moving reference, with the structure of ``params``.

        Of an adapter, its factors have several times the rank; see :mod:`jaxrl_llm.train.moving`.
        """
        state, stateful = self.reference, Iterates | Anchored | StoredPolicies
        return adapter_of(state.reference if isinstance(state, stateful) else state)

    @property
    def anchor_policy(self) -> ArrayTree:
        """Parameters that an anchored reference began with, in the form that the model takes."""
        return self.with_base(adapter_of(self.reference.anchor))

    @property
    def reference_policy(self) -> ArrayTree:
        """Parameters of a moving reference, in the form that the model takes."""
        return self.with_base(self.reference_params)

    def with_base(self, params: ArrayTree) -> ArrayTree:
        """Parameters with the structure of ``self.params``, in the form that the model takes."""
        return merge_adapter(self.base, params)


def check_step_parts(function: str, recipe: Any, optimizer: Any) -> None:
    """Raises TypeError unless there is a recipe, and an optimizer of optax."""
    if not hasattr(recipe, "forward_only"):  # of every kind of recipe
        what = f"a Recipe, such as jr.recipes.grpo(); got {recipe!r}"
        raise TypeError(f"{function}: recipe must be {what}.")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        what = f"a transformation of optax, such as optax.adamw(1e-6); got {optimizer!r}"
        raise TypeError(f"{function}: optimizer must be {what}.")


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
    if recipe.second_model is None and (critic is not None or critic_optimizer is not None):
        raise ValueError(f"init_state: recipe {recipe.name!r} has no critic, but one is passed.")
    if recipe.second_model is not None and (critic is None or critic_optimizer is None):
        raise ValueError(
            f"init_state: recipe {recipe.name!r} has a critic; give critic="
            f"init_critic(model, params, heads={recipe.second_model.heads}, key=...) and its "
            "critic_optimizer."
        )
    if mesh is not None:
        sharding = replicated(mesh)

        def place(x: Array) -> Array:
            """The array on the mesh; unchanged if it is already on one."""
            placed = isinstance(x.sharding, jax.sharding.NamedSharding)
            return x if placed else processes.place(x, sharding)

        rest, critic = jax.tree.map(place, (rest, critic))
    opt_state = _optimizer_state(optimizer, params, recipe, mesh, rules)
    critic_state, anchor = (), ()
    if critic is not None and critic_optimizer is not None:
        critic_opt = _optimizer_state(critic_optimizer, critic, recipe, mesh, rules)
        target = () if recipe.second_model.target_rate is None else jax.tree.map(jnp.copy, critic)
        copied = jax.tree.map(jnp.copy, critic) if copy else critic
        critic_state = CriticState(copied, critic_opt, target)
    if recipe.reference is not None:
        start = params if reference is None else trainable(reference)
        anchor = first_reference(recipe.reference, start, adapter=base != ())
        if isinstance(anchor, Iterates):  # it moves away from the policy, not from the reference
            anchor = anchor._replace(previous=params)
        anchor = jax.tree.map(jnp.copy, anchor)
    elif reference is not None:
        raise ValueError(
            f"init_state: recipe {recipe.name!r} has a frozen reference, which is not part of the "
            "state; pass it to the function that computes ref_logp."
        )
    earlier: ArrayTree = ()
    if recipe.earlier is not None:
        earlier = jax.tree.map(jnp.copy, recipe.earlier.init(params))
        if mesh is not None:
            count = processes.place(earlier.count, replicated(mesh))
            earlier = earlier._replace(count=count)
    algo_state, key, step = rest
    params = jax.tree.map(jnp.copy, params) if copy else params
    state = TrainState(params, opt_state, algo_state, key, step, data_cursor)
    return state._replace(critic=critic_state, reference=anchor, earlier=earlier, base=base)


def optimizer_shardings(
    opt_state: ArrayTree, recipe, mesh: jax.sharding.Mesh, rules: ShardingRules = RULES
) -> ArrayTree:
    """A ``NamedSharding`` for each leaf of an optimizer's state.

    The state is split like the parameters, and also over ``data``. For an evolution recipe it is
    not split over ``data``: every device makes the full update from the scores, and devices
    exchange only scalars.
    """
    place = param_shardings if recipe.forward_only else update_shardings
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


def device_bytes(tree: ArrayTree) -> int:
    """Bytes per device of a tree of arrays or shapes."""

    def size(x) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(size(x) for x in jax.tree.leaves(tree))


def _placed(tree: ArrayTree, shardings: ArrayTree) -> ArrayTree:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )
