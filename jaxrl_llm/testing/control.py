"""Gymnasium control tasks as black boxes: a small network, and its return in an episode.

:func:`evolve` draws the population and solves CartPole in seconds::

    params = jr.testing.mlp_init(jax.random.key(0), (4, 8, 2))
    params, history = jr.testing.evolve(
        params, jax.random.key(1), jr.testing.control_returns, steps=20, population=128, sigma=0.5,
        optimizer=optax.adam(optax.linear_schedule(0.4, 0.1, 20)))
"""

import importlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, ArrayTree, checks
from jaxrl_llm.evolution import _inputs


def mlp_init(key: Array, sizes: Sequence[int]) -> ArrayTree:
    """Parameters of a small network: zero biases, normal kernels divided by the root of the fan-in.

    Args:
      key: A typed key.
      sizes: Width of the input, of each hidden layer, and of the output.

    Returns:
      ``{"0": {"kernel": [in, out], "bias": [out]}, "1": ...}``, float32.

    Raises:
      TypeError: If ``key`` is not one typed key or a size is not an integer.
      ValueError: If there are fewer than two sizes or one is below 1.
    """
    checks.check_key("mlp_init", key)
    if len(sizes) < 2:
        raise ValueError(f"mlp_init: sizes must be of input and output at least; got {sizes}.")
    for size in sizes:
        _inputs.check_at_least("mlp_init", 1, sizes=size)

    def layer(key: Array, inputs: int, outputs: int) -> dict:
        kernel = jax.random.normal(key, (inputs, outputs)) / math.sqrt(inputs)
        return {"kernel": kernel, "bias": jnp.zeros(outputs)}

    keys = jax.random.split(key, len(sizes) - 1)
    return {str(i): layer(keys[i], sizes[i], sizes[i + 1]) for i in range(len(sizes) - 1)}


def mlp(params: ArrayTree, x: Array) -> Array:
    """The network of :func:`mlp_init`, with tanh between its layers.

    Args:
      params: Parameters of one network, or of a population with a leading axis N on every leaf.
      x: ``[..., in]``; for a population ``[N, in]``, one input for each member.

    Returns:
      ``[..., out]``.

    Raises:
      TypeError: If ``x`` is not floating point.
      ValueError: If ``x`` does not match the first layer.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = jr.testing.mlp_init(jax.random.key(0), (4, 16, 2))
      >>> jr.testing.mlp(params, jnp.ones((3, 4))).shape
      (3, 2)
    """
    checks.check_min_rank("mlp", 1, x=x)
    checks.check_float("mlp", x=x)
    kernel = params["0"]["kernel"]
    if x.shape[-1] != kernel.shape[-2]:
        raise ValueError(f"mlp: x {x.shape} does not match the first kernel {kernel.shape}.")
    for i in range(len(params)):
        x = jnp.tanh(x) if i else x
        layer = params[str(i)]
        x = jnp.matmul(x[..., None, :], layer["kernel"])[..., 0, :] + layer["bias"]
    return x


def control_returns(params: ArrayTree, seed: int, *, name: str = "CartPole-v1") -> np.ndarray:
    """The return of each network of a population in one episode of a control task.

    The environments run side by side on the host. Each member chooses the action with the largest
    output; one compiled call per step serves all members.

    Args:
      params: From :func:`mlp_init`, with a leading population axis N on every leaf.
      seed: Seed of the initial states, not negative; each member has a different initial state.
      name: Name of a gymnasium environment with numeric observations and discrete actions.

    Returns:
      float32 ``[N]``, the sum of the rewards.

    Raises:
      ImportError: If gymnasium is not installed.
      ValueError: If the environment's actions are not discrete, or the network does not match it.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> init = lambda key: jr.testing.mlp_init(key, (4, 8, 2))
      >>> population = jax.vmap(init)(jax.random.split(jax.random.key(0), 6))
      >>> jr.testing.control_returns(population, 0).shape
      (6,)

    References:
      Gymnasium (arXiv:2407.17032).
    """
    try:
        gymnasium: Any = importlib.import_module("gymnasium")
    except ImportError as error:
        raise ImportError(
            "control_returns needs the package gymnasium: pip install 'jaxrl_llm[envs]'."
        ) from error
    count = params["0"]["kernel"].shape[0]
    environments = gymnasium.make_vec(name, num_envs=count)
    try:
        actions = getattr(environments.single_action_space, "n", None)
        if actions is None:
            raise ValueError(
                f"control_returns: name must be of a task with discrete actions; {name!r} has "
                f"{environments.single_action_space}."
            )
        inputs = params["0"]["kernel"].shape[-2]
        outputs = params[str(len(params) - 1)]["bias"].shape[-1]
        shape = environments.single_observation_space.shape
        if (inputs,) != shape or outputs != actions:
            raise ValueError(
                f"control_returns: a network for {name!r} reads {shape} and has {actions} outputs; "
                f"got one of {inputs} and {outputs}."
            )
        observations, _ = environments.reset(seed=seed)
        outputs_of = jax.jit(mlp)
        total, running = np.zeros(count, np.float32), np.ones(count, bool)
        while running.any():
            outputs = outputs_of(params, np.asarray(observations, np.float32))
            actions = np.argmax(np.asarray(outputs), axis=-1)
            observations, rewards, terminated, truncated, _ = environments.step(actions)
            # An environment restarts when it ends; the later rewards do not count.
            total += np.where(running, rewards, 0.0).astype(np.float32)
            running &= ~(terminated | truncated)
    finally:
        environments.close()
    return total
