"""A critic's warmup: in its first steps the critic trains alone, and the policy waits.

State that tracks the policy starts after the warmup; a KL controller would decay while the KL is 0.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import At, Done, Gradients, Objective, Part, Setup


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe whose critic has a warmup."""
    del recipe
    return Part("warmup", wrap=_wrap, after=_after) if setup.starts else None


def _wrap(objective: Objective, at: At) -> Objective:
    """The loss whose gradient is computed, and its update made, only after the warmup."""
    waits = at.waits

    def gradient(params: ArrayTree, batch: Batch) -> Gradients:
        found = jax.lax.cond(waits, objective.value, objective.gradient, params, batch)
        return found._replace(scale=jnp.where(waits, 0.0, 1.0))

    return objective._replace(gradient=gradient)


def _after(state: TrainState, done: Done, at: At) -> tuple[TrainState, dict[str, Array]]:
    old = at.state.algo_state
    held = {name: old.controllers[name] for name in at.recipe.policy_controllers}
    waiting = done.algo_state._replace(
        controllers=done.algo_state.controllers | held, rules=old.rules
    )
    return state._replace(algo_state=at.once_it_trains(state.algo_state, waiting)), {}
