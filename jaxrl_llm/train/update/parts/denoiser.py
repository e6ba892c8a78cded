"""Another set of masks in each pass over a batch, for a denoising model."""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.core.compose import bind
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.batches import run_passes
from jaxrl_llm.train.models.denoising import draws_of_pass
from jaxrl_llm.train.update.part import At, Part, Setup
from jaxrl_llm.train.update.step import weighed


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe whose likelihood draws masks for several passes."""
    del setup
    several = recipe.likelihood is not None and recipe.likelihood.passes > 1
    return Part("denoiser", passes=_passes) if several else None


def _passes(update: Callable, carry: Any, batch: Batch, at: At) -> Any:
    of_pass = bind(draws_of_pass, likelihood=at.recipe.likelihood)
    return run_passes(at.setup.passes, weighed(update, at), carry, batch, of_pass=of_pass)
