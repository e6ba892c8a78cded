"""REINFORCE++ with a baseline: the group mean, then normalization over the batch."""

from typing import Literal

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def reinforce_pp_baseline(
    *,
    norm: Literal["token", "sequence"] = "token",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Rewards minus their group mean, scaled by one deviation for the whole batch.

        a = r - mean_group r;  A = (a - mean a) / std a
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    A group that agrees does not get its own tiny deviation; with ``norm="token"`` it gets a small
    advantage where lengths differ.

    Args:
      norm: What mean and deviation count: all tokens, or all rollouts.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.reinforce_pp_baseline(norm="sequence").surrogate
      ppo_clip(eps_high=0.2, eps_low=0.2)

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262). ``norm="token"`` is verl's
      ``reinforce_plus_plus_baseline``, "sequence" the form of ProRL and BroRL.
    """
    recipe = Recipe(
        name="reinforce_pp_baseline",
        advantage=stateless(advantages.reinforce_pp_baseline, norm=norm),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2501.03262",
    )
    return validate(recipe)
