"""The base recipe of all policy-gradient presets; see the package's docstring."""

from typing import Any

from jaxrl_llm import advantages, aggregate, curation, surrogates
from jaxrl_llm.core import stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.records import replace_fields
from jaxrl_llm.recipes.wiring import validate

BASE = Recipe(
    name="base",
    advantage=stateless(advantages.grpo),
    surrogate=surrogates.ppo_clip,
    weights=aggregate.token_mean,
)


def from_base(**changes: Any) -> Recipe:
    """``BASE`` with these slots changed, after a dry run that checks their options."""
    return validate(replace_fields(BASE, changes))


def refilled(recipe: Recipe, enabled: bool = True) -> Recipe:
    """The recipe, where each group of equal rewards is replaced by another if ``enabled``."""
    if not enabled:
        return recipe
    return recipe.replace(collector=curation.refill(curation.informative_groups))
