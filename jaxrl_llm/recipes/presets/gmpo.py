"""GMPO: the geometric mean of token ratios that are clipped one by one."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def gmpo(*, eps_low: float = 0.4, eps_high: float = 0.4) -> Recipe:
    """Geometric-mean policy optimization.

        z = the pessimistic one of d and clip(d, -eps_low, eps_high),   d = logp - old_logp
        loss = mean over sequences of -A exp(mean over tokens of z)

    The advantages are GRPO's; no KL term.

    Args:
      eps_low: The log ratio is clipped at ``-eps_low``, in nats.
      eps_high: The log ratio is clipped at ``eps_high``, in nats.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.gmpo(eps_high=0.5).surrogate
      gmpo(eps_high=0.5, eps_low=0.4)

    References:
      Zhao et al., GMPO (arXiv:2507.20673). verl (``geo_mean``) and TRL average over all rows, the
      empty ones too.
    """
    recipe = Recipe(
        name="gmpo",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.gmpo, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_mean,
        paper="arXiv:2507.20673",
    )
    return validate(recipe)
