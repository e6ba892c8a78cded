"""OTB: a baseline for every position of a group."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def otb(
    *,
    zero_tail: bool = False,
    compact: bool = False,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """The optimal token baseline: rewards are averaged by the gradient that came before a token.

        A[i, t] = r_i - sum_j r_j W[j, t] / sum_j W[j, t]
        W[j, t] = sum over s <= t of |onehot - pi|^2 at token s of rollout j
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    The sum of squared probabilities that ``W`` takes is computed with the old log-probabilities.

    Args:
      zero_tail: Whether the one longest rollout of a group has no baseline where it is alone.
      compact: Whether positions are counted among trained tokens only, for several turns.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.otb().required_fields - jr.recipes.otb().step_fields)
      []

    References:
      Li et al., The Optimal Token Baseline (arXiv:2602.07078), trained on policy there. The clip is
      verl's default loss and is idle in the first update on a batch.
    """
    recipe = Recipe(
        name="otb",
        advantage=stateless(advantages.otb, zero_tail=zero_tail, compact=compact),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        computed=(Computed("sum_pi_sq", advantages.sum_pi_squared, "old_policy"),),
        paper="arXiv:2602.07078",
    )
    return validate(recipe)
