"""DISPO: clipped importance weights with other bounds for good and for bad answers."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def dispo(
    *,
    eps_pos: tuple[float, float] = (0.2, 10.0),
    eps_neg: tuple[float, float] = (1.0, 100.0),
) -> Recipe:
    """Importance-weighted policy gradient with four bounds.

        (low, high) = eps_pos where A > 0, else eps_neg
        w = stop_gradient(clip(ratio, 1 - low, 1 + high))
        loss = mean over tokens of -w A logp

    The advantages are GRPO's; no KL term. The paper also leaves out groups whose rewards agree,
    which belongs to the ``curation`` slot; here they count in the denominator.

    Args:
      eps_pos: Distances of the lower and of the upper bound from 1 where A > 0.
      eps_neg: The same elsewhere.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.dispo().surrogate
      dispo(eps_neg=(1.0, 100.0), eps_pos=(0.2, 10.0))

    References:
      DISPO (arXiv:2602.00983), PAPER reading.
    """
    recipe = Recipe(
        name="dispo",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.dispo, eps_pos=eps_pos, eps_neg=eps_neg),
        weights=aggregate.token_mean,
        paper="arXiv:2602.00983",
    )
    return validate(recipe)
