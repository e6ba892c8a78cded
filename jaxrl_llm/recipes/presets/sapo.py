"""SAPO: a sigmoid gate in place of the clip."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Recipe:
    """Soft adaptive policy optimization (Qwen).

        tau = tau_pos where A > 0, else tau_neg
        loss = mean over sequences of the mean over tokens of -(4 / tau) sigmoid(tau (ratio - 1)) A

    The advantages are GRPO's; no KL term. On policy the gradient is that of the plain policy
    gradient.

    Args:
      tau_pos: Sharpness of the gate for A > 0.
      tau_neg: Sharpness for the others; larger, so that tokens pushed down are let go sooner.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.sapo().surrogate
      sapo(tau_neg=1.05, tau_pos=1.0)

    References:
      Gao et al. (arXiv:2511.20347). The formula and defaults are those of verl and TRL, which
      agree.
    """
    recipe = Recipe(
        name="sapo",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.sapo, tau_pos=tau_pos, tau_neg=tau_neg),
        weights=aggregate.sequence_mean,
        paper="arXiv:2511.20347",
    )
    return validate(recipe)
