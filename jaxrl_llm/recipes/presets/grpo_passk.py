"""Best minus second: the policy gradient of the best of a group."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def grpo_passk(*, scale: str = "group", eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """Only the best rollout of a group trains, by its lead over the second.

        A_best = (r_best - r_second) / (std_group r + 1e-6)        all others 0
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    With right and wrong answers only a group with exactly one right answer trains. Rollouts without
    an advantage count in the mean. No KL term.

    Args:
      scale: "group" divides by the deviation of the group's rewards, "none" does not.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.grpo_passk().surrogate
      ppo_clip(eps_high=0.2, eps_low=0.2)

    References:
      Tang et al. (arXiv:2503.19595); advantage, clip and mean as verl has them by default.
    """
    recipe = Recipe(
        name="grpo_passk",
        advantage=stateless(advantages.grpo_passk, scale=scale),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2503.19595",
    )
    return validate(recipe)
