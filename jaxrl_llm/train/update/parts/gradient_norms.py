"""``grad_sq_norms``: the squared gradient norm of each response, of the policy before the step."""

import jax.numpy as jnp

from jaxrl_llm.core import stats
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.wiring import moot_if_equal
from jaxrl_llm.train.models.score_norms import score_sq_norms
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import At, Part, Setup

_NORMS = "grad_sq_norms"


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe that reads the norms."""
    del setup
    if _NORMS not in recipe.required_fields:
        return None
    cost = "a backward pass of the policy for each response"
    return Part("gradient_norms", amend=_amend, cost=cost)


def _amend(state: TrainState, batch: Batch, at: At) -> tuple[TrainState, Batch]:
    if _NORMS in batch.extras:
        return state, batch
    measured = _measured(batch, at.recipe)
    norms = score_sq_norms(at.setup.scorer, state.params, measured, base=state.base)
    return state, batch.with_extras({_NORMS: norms})


def _measured(batch: Batch, recipe: Recipe) -> Batch:
    """The batch with the responses whose gradient norms make a difference."""
    batch = recipe.responses(batch)
    if not moot_if_equal(recipe, _NORMS):
        return batch
    rewards = jnp.asarray(batch.rewards, jnp.float32)  # as the advantage reads them
    return batch.replace(where=batch.where & ~stats.group_is_constant(rewards, batch.where))
