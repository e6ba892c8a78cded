"""XRPO: right answers that the policy finds unlikely count more."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, chain, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def xrpo(
    *, bonus: float = 2.5, cap: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """The training half of XRPO: GRPO with novelty-guided sharpening of the advantages.

        A = (r - mean_group r) / (std_group r + 1e-6)
        A+ = A + min(max(bonus (1 - eta), 0), cap A)        where A > 0
        eta = exp(mean logp of the rollout - the group's mean of that)
        token loss = -min(ratio A+, clip(ratio, 1 - eps_low, 1 + eps_high) A+)
        loss = mean over sequences of the mean over tokens of token loss

    The other half decides which prompts get more rollouts. No KL term.

    Args:
      bonus: Advantage for a right rollout of vanishing probability.
      cap: Greatest bonus, as a share of the advantage.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.xrpo().required_fields)
      ['old_logp']

    References:
      XRPO (arXiv:2510.06672), PAPER reading; clip and weighting are GRPO's.
    """
    sharpen = stateless(advantages.novelty_sharpening, bonus=bonus, cap=cap)
    recipe = Recipe(
        name="xrpo",
        advantage=chain(stateless(advantages.grpo), sharpen),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2510.06672",
    )
    return validate(recipe)
