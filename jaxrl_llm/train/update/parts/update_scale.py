"""``update_scale``: a number that multiplies the optimizer's update; with 0 no step is made."""

import jax.numpy as jnp

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.wiring import UPDATE_SCALE
from jaxrl_llm.train.update.part import At, Gradients, Objective, Part, Setup


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe that computes the scale."""
    del setup
    scaled = UPDATE_SCALE in recipe.computed_from("batch", "update")
    return Part("update_scale", wrap=_wrap) if scaled else None


def _wrap(objective: Objective, at: At) -> Objective:
    recipe = at.recipe
    measured = UPDATE_SCALE in recipe.computed_from("update")
    # A scale that is always 0 needs no gradient.
    inner = objective.gradient if recipe.trains_weights else objective.value

    def gradient(params: ArrayTree, batch: Batch) -> Gradients:
        found = inner(params, batch)
        batch = recipe.measure(batch, found.logp) if measured else batch
        scale = batch.extras[UPDATE_SCALE][0, 0, 0]
        if found.scale is not None:  # 0 withholds the update whatever the scale
            scale = jnp.where(found.scale == 0, 0.0, scale)
        return found._replace(scale=scale)

    return objective._replace(gradient=gradient)
