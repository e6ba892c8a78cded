"""GSPO: one length-normalized ratio per sequence."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def gspo(*, eps_low: float = 3e-4, eps_high: float = 4e-4) -> Recipe:
    """Group sequence policy optimization.

        s = exp(mean over tokens of (logp - old_logp))
        loss = mean over sequences of -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)

    The advantages are GRPO's; no KL term. The loss is a statement about sequences, so the Recipe
    admits only weightings that keep it one.

    Args:
      eps_low: The ratio is clipped at ``1 - eps_low``; s is a mean, so the range is narrow.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.gspo().surrogate
      gspo(eps_high=0.0004, eps_low=0.0003)

    References:
      Zheng et al. (arXiv:2507.18071). TRL averages over all rows, the empty ones too; in verl from
      0.9 on the aggregation is a setting, and token-mean there is another loss.
    """
    recipe = Recipe(
        name="gspo",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.gspo, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2507.18071",
    )
    return validate(recipe)
