"""The algorithm of a recipe, policy gradients or evolution; only this file tells them apart."""

from collections.abc import Callable
from typing import Any

import optax

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import EvolutionRecipe, Recipe
from jaxrl_llm.train.algorithm import Algorithm
from jaxrl_llm.train.evolution import check_population, make_evolution
from jaxrl_llm.train.policy_gradient import StepOptions, make_policy_gradient
from jaxrl_llm.train.update.part import Teacher


def algorithm_of(
    recipe: Recipe | EvolutionRecipe,
    model: Model,
    optimizer: optax.GradientTransformation,
    sampler: Callable,
    *,
    options: StepOptions,
    critic_optimizer: optax.GradientTransformation | None = None,
    reference: ArrayTree | None = None,
    teacher: Teacher | None = None,
) -> Algorithm:
    """The algorithm that trains a recipe.

    Args:
      recipe: The method.
      model, optimizer, sampler, options: See :func:`make_policy_gradient`; evolution reads the mesh
        of the options alone.
      critic_optimizer, reference, teacher: See the same; evolution has none of them.
    """
    if isinstance(recipe, EvolutionRecipe):
        return make_evolution(recipe, optimizer, sampler, mesh=options.mesh)
    return make_policy_gradient(
        model,
        recipe,
        optimizer,
        sampler,
        options=options,
        critic_optimizer=critic_optimizer,
        reference=reference,
        teacher=teacher,
    )


def check_algorithm(config: Any, recipe: Recipe | EvolutionRecipe) -> None:
    """Raises ValueError for options of a run that the algorithm of its recipe does not use."""
    if isinstance(recipe, EvolutionRecipe):
        check_population(config, recipe)
