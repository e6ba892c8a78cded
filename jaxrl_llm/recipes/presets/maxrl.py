"""MaxRL: the success rate in place of the deviation."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def maxrl(*, scale: str = "mean", eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """Policy gradient of the log-probability of a right answer, with many rollouts.

        A = (r - mean_group r) / (mean_group r + 1e-6)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    Rewards must not be negative. The fewer answers of a prompt are right, the more each counts. No
    KL term.

    Args:
      scale: "mean", or "root" to divide by the square root of the mean.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.maxrl().advantage.update.function
      maxrl(scale='mean')

    References:
      MaxRL (arXiv:2602.02710); clip and mean as in the authors' scripts.
    """
    recipe = Recipe(
        name="maxrl",
        advantage=stateless(advantages.maxrl, scale=scale),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2602.02710",
    )
    return validate(recipe)
