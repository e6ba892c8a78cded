"""LUSPO: GSPO whose gradient does not shrink with the length of the answer."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def luspo(*, eps_low: float = 2e-3, eps_high: float = 2.5e-3) -> Recipe:
    """Length-unbiased sequence policy optimization.

        s = exp(mean over tokens of (logp - old_logp))
        loss = mean over sequences of -length min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)

    The advantages are GRPO's; no KL term.

    Args:
      eps_low: The ratio is clipped at ``1 - eps_low``; s is a mean, so the range is narrow.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.luspo().surrogate
      luspo(eps_high=0.0025, eps_low=0.002)

    References:
      LUSPO (arXiv:2602.05261); formula and epsilons as TRL has them. TRL averages over all rows,
      the empty ones too.
    """
    recipe = Recipe(
        name="luspo",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.luspo, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2602.05261",
    )
    return validate(recipe)
