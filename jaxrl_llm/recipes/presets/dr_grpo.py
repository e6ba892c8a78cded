"""Dr. GRPO: GRPO without the two divisions that bias it."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def dr_grpo(*, length: float, eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """GRPO "done right": the group mean alone, and a constant in place of the response length.

        A = r - mean_group r
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = sum over tokens of token loss / (B length)

    B counts every rollout of the batch, also those that are masked out. No KL term.

    Args:
      length: The constant, in tokens: the generation budget (the sampler's ``max_new_tokens``). It
        has no default: the width of a batch would be one, but it changes with padding.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.dr_grpo(length=16).weights
      fixed_length(length=16)

    References:
      Liu et al., Understanding R1-Zero-Like Training (arXiv:2503.20783). TRL divides by the rows of
      a microbatch times its ``max_completion_length``; verl's ``seq-mean-token-sum-norm`` divides
      by the number of non-empty sequences from 0.9 on and by none up to 0.8.
    """
    recipe = Recipe(
        name="dr_grpo",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=bind(aggregate.fixed_length, length=length),
        paper="arXiv:2503.20783",
    )
    return validate(recipe)
