"""``TrainState``: everything that a resumed run needs, in one pytree."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.train.mesh import replicated


class TrainState(NamedTuple):
    """The whole state of a run between two steps.

    Attributes:
      params: Parameters of the model.
      opt_state: State of the optimizer.
      algo_state: State of the recipe: trackers and controllers; often empty.
      key: A typed key that never changes; the randomness of a step comes from ``fold_in(key,
        step)``.
      step: int32 ``[]``, updates made so far.
      data_cursor: Where the prompt order stands: Python integers, which stay on the host.
    """

    params: ArrayTree
    opt_state: ArrayTree
    algo_state: ArrayTree
    key: Array
    step: Array
    data_cursor: Any = ()


def init_state(
    params: ArrayTree,
    optimizer: optax.GradientTransformation,
    recipe,
    *,
    key: Array,
    data_cursor: Any = (),
    mesh=None,
    copy: bool = True,
) -> TrainState:
    """The state before the first step.

    The optimizer's state takes the sharding of the parameters, leaf by leaf.

    Args:
      params: Parameters of the model, already placed on the mesh if there is one.
      optimizer: Any optax transformation.
      recipe: A :class:`~jaxrl_llm.recipes.Recipe`, for its own state.
      key: A typed key, ``jax.random.key(seed)``.
      data_cursor: Where the prompt order starts, integers only.
      mesh: The mesh; small leaves are replicated over it.
      copy: Copy the parameters, since a step gives away (donates) those of its state; False spares
        the memory where nobody else keeps them.

    Returns:
      The state of step 0.

    Raises:
      TypeError: If ``key`` is not a typed key.
    """
    if not jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
        raise TypeError("init_state: key must be a typed key, made by jax.random.key(seed).")
    rest = (recipe.init(), key, jnp.zeros((), jnp.int32))
    opt_state = optimizer.init(params)
    if mesh is not None:
        whole = replicated(mesh)

        def place(x):
            on_mesh = isinstance(x.sharding, jax.sharding.NamedSharding)
            return x if on_mesh else jax.device_put(x, whole)

        opt_state, rest = jax.tree.map(place, (opt_state, rest))
    algo_state, key, step = rest
    params = jax.tree.map(jnp.copy, params) if copy else params
    return TrainState(params, opt_state, algo_state, key, step, data_cursor)
