"""GPG: plain policy gradient on centered rewards, made up for groups that say nothing."""

from typing import Literal

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def gpg(
    *,
    scale: Literal["none", "group"] = "none",
    mode: Literal["informative", "nonzero_reward"] = "informative",
) -> Recipe:
    """Group policy gradient: no ratio, no clip, no KL term, no critic.

        A = alpha (r - mean_group r)             alpha = 1 / share of groups with a spread
        loss = mean over tokens of -A logp

    Every batch serves one update.

    Args:
      scale: "group" also divides by the deviation of the group.
      mode: What alpha counts, see :func:`jaxrl_llm.advantages.gpg`; "nonzero_reward" is verl's.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is unknown.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.gpg().surrogate is jr.surrogates.reinforce
      True

    References:
      Chu et al., GPG (arXiv:2504.02546). The released loop also samples on until enough groups are
      informative, which belongs to the sampling of prompts.
    """
    recipe = Recipe(
        name="gpg",
        advantage=stateless(advantages.gpg, scale=scale, mode=mode),
        surrogate=surrogates.reinforce,
        weights=aggregate.token_mean,
        paper="arXiv:2504.02546",
    )
    return validate(recipe)
