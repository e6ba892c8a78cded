"""Pass@k training: pass@k as the reward of every group of k."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def passk_training(
    *, k: int = 4, threshold: float = 0.5, eps_low: float = 0.2, eps_high: float = 0.2
) -> Recipe:
    """GRPO on the pass@k reward, in closed form over all groups of k.

        rho = 1 - C(n - c, k) / C(n, k)        c right of n rollouts
        A_right = (1 - rho) / (sqrt(rho (1 - rho)) + 1e-6)
        A_wrong = (1 - rho - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / (the same)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    Groups in which every k rollouts pass, or none, have advantage 0 and count in the mean. No KL
    term.

    Args:
      k: How many answers a prompt may have, at least 1, and below the group's size to mean
        anything.
      threshold: A reward above it is right, in units of reward.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.passk_training(k=2).advantage.update.function
      passk_training(k=2, threshold=0.5)

    References:
      Pass@k training (arXiv:2508.10751) for the advantage, after the authors' code, which has no
      default of k. The clip and the mean are verl's defaults.
    """
    recipe = Recipe(
        name="passk_training",
        advantage=stateless(advantages.passk_training, k=k, threshold=threshold),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2508.10751",
    )
    return validate(recipe)
