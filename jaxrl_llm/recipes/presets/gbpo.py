"""GBPO: the ratio goes to a bound, and the median of the group says to which."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import Array, bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def gbpo(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """Group bounded policy optimization.

        A = (r - mean r) / (std r + 1e-6),   M = (r - median r) / std r      over the group
        target = 1 + eps_high where M > 0,  1 - eps_low where M < 0,  1 where M = 0
        loss = mean over sequences of the mean over tokens of |A| |ratio - target|

    The deviations divide by n. Where most rollouts of a group agree, those are the median: they are
    held where they are, and only the others move. No KL term.

    Args:
      eps_low: Distance of the lower bound from 1.
      eps_high: Distance of the upper bound from 1.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.gbpo().surrogate
      gbpo(eps_high=0.2, eps_low=0.2)

    References:
      Bounded Ratio Reinforcement Learning (arXiv:2604.18578), PAPER reading; the weighting is our
      reading.
    """
    recipe = Recipe(
        name="gbpo",
        advantage=stateless(advantages.grpo, ddof=0),
        computed=(Computed("median_advantages", _median_advantages, "batch"),),
        surrogate=bind(surrogates.gbpo, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2604.18578",
    )
    return validate(recipe)


def _median_advantages(advantages: Array, *, rewards: Array, where: Array) -> Array:
    del advantages  # which every entry computed from the batch gets
    return surrogates.median_advantage(rewards, where=where)
