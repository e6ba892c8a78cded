"""Environments in JAX: the pure step of one episode gives ``step`` and ``step_batch``."""

import functools
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, trees
from jaxrl_llm.data.messages import Parsed, ToolSpec
from jaxrl_llm.environments import text
from jaxrl_llm.environments.protocol import Observation

S = TypeVar("S")


class ArrayEnv(Generic[S]):
    """The base of environments whose states are NamedTuples of arrays; a ``BatchEnv``.

    A subclass is a frozen dataclass with its options as fields. It has a state with a bool
    ``ended``, and

        init(task, seed) -> state                     on the host
        transition(state, action) -> (state, reward)  pure JAX, of one episode
        observe(state) -> array                       pure JAX: the information for the policy
        parse(reply) -> action                        an integer
        describe(observation, start) -> (text, name of the state)
    """

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """None."""
        return ()

    def init(self, task: Mapping[str, Any], seed: int) -> S:
        """The first state; its leaves are NumPy arrays."""
        raise NotImplementedError

    def transition(self, state: S, action: Array) -> tuple[S, Array]:
        """The state after an action, and the reward of it."""
        raise NotImplementedError

    def observe(self, state: S) -> Array:
        """The part of a state that the policy may see."""
        raise NotImplementedError

    def parse(self, reply: str) -> int:
        """The action that a reply names; -1 for none."""
        raise NotImplementedError

    def describe(self, observation: np.ndarray, start: bool) -> tuple[str, str]:
        """The text of an observation, at the start or later, and a name for the state."""
        raise NotImplementedError

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[S, Observation]:
        """The first state of an episode."""
        state = self.init(task, seed)
        words, name = self.describe(np.asarray(_observe(self, state)), True)
        return state, Observation(text.user(words), state=name)

    def step(self, state: Any, action: Parsed) -> tuple[Any, Observation]:
        """The state after a reply. Raises ValueError if the episode has ended."""
        if state.ended:
            raise ValueError(f"{type(self).__name__}.step: the episode has ended.")
        taken = np.int32(self.parse(action.text))
        state, seen, reward = jax.device_get(_step(self, state, taken))
        words, name = self.describe(seen, False)
        done = bool(state.ended)
        return state, Observation(text.user(words), float(reward), done, state=name)

    def step_batch(self, states: Any, actions: Array, active: Array) -> tuple[Any, Any, Any, Any]:
        """Steps many episodes at once; pure, to be called inside ``jax.jit``.

        Args:
          states: The states, with a leading axis ``[B]`` on every leaf.
          actions: int32 ``[B]``, as ``parse`` returns them.
          active: bool ``[B]``; other episodes, and those that have ended, do not change.

        Returns:
          ``(states, observations, rewards, done)`` with a leading axis ``[B]``: the rewards of this
          step, and whether each episode has ended by now.
        """
        moving = active & ~states.ended
        after, rewards = jax.vmap(self.transition)(states, actions)

        def pick(new, old):
            return jnp.where(moving.reshape(moving.shape + (1,) * (new.ndim - 1)), new, old)

        states = jax.tree.map(pick, after, states)
        rewards = jnp.where(moving, rewards, 0.0)
        return states, jax.vmap(self.observe)(states), rewards, states.ended


def stack(states: list[Any]) -> Any:
    """States of single episodes as those of a batch, for ``step_batch``.

    Args:
      states: B states of one environment, from ``init``, ``reset`` or ``step``.

    Returns:
      A state whose leaves are NumPy arrays ``[B, ...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> env = jr.environments.MemoryBandit(arms=2, turns=2)
      >>> states = jr.environments.stack([env.init({"best": arm}, 0) for arm in "ab"])
      >>> states.best.tolist(), states.pulled.shape
      ([0, 1], (2, 2))
      >>> states, _, rewards, done = env.step_batch(states, jnp.array([0, 0]), jnp.ones(2, bool))
      >>> rewards.tolist(), done.tolist()
      ([1.0, 0.0], [False, False])
    """
    return trees.zip_leaves(np.stack, states)


@functools.partial(jax.jit, static_argnums=0)
def _observe(env: ArrayEnv, state: Any) -> Array:
    return env.observe(state)


@functools.partial(jax.jit, static_argnums=0)
def _step(env: ArrayEnv, state: Any, action: Array) -> tuple[Any, Array, Array]:
    state, reward = env.transition(state, action)
    return state, env.observe(state), reward
