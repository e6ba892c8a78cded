"""IcePop: tokens whose sampler and trainer disagree push nothing."""

from jaxrl_llm import advantages, aggregate, corrections, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def icepop(
    *, lower: float = 0.5, upper: float = 5.0, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """A clipped ratio, weighted by the mismatch where that is small and by zero elsewhere.

        w = old / behavior where that is within [lower, upper], else 0; a constant
        token loss = -w min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss; what has weight 0 counts in the mean

    The advantages are GRPO's and there is no KL term.

    Args:
      lower: Least ratio of a token that counts, at most 1.
      upper: Greatest ratio of a token that counts, at least 1.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe; its batches hold ``behavior_logp``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.icepop(upper=2.0).correction
      rollout_correction(weights=masked_importance_weights(lower=0.5, upper=2.0))

    References:
      Ling team, Every Step Evolves (arXiv:2510.18855), NOTES reading; the range is theirs. verl has
      the weights as the threshold "0.5_5.0", TRL as ``token_mask``.
    """
    weights = bind(corrections.masked_importance_weights, lower=lower, upper=upper)
    recipe = Recipe(
        name="icepop",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        correction=bind(corrections.rollout_correction, weights=weights),
        paper="arXiv:2510.18855",
    )
    return validate(recipe)
