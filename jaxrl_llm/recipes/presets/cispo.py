"""CISPO: the importance weight is clipped, the update is not."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def cispo(*, w_min: float = 0.0, w_max: float = 5.0) -> Recipe:
    """Clipped importance-weighted policy gradient: every token keeps a gradient.

        w = stop_gradient(clip(ratio, w_min, w_max))
        loss = mean over tokens of -w A logp

    The advantages are GRPO's; no KL term.

    Args:
      w_min: Least weight, absolute (1 - eps in verl's terms).
      w_max: Greatest weight, absolute (1 + eps in verl's terms).

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.cispo(w_max=3.0).surrogate
      cispo(w_max=3.0, w_min=0.0)

    References:
      MiniMax-M1 (arXiv:2506.13585). The bounds are those of TRL and ScaleRL: a cap of 5, no lower
      bound. verl's setting of that name is an eps around 1 and defaults to 0.2.
    """
    recipe = Recipe(
        name="cispo",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.cispo, w_min=w_min, w_max=w_max),
        weights=aggregate.token_mean,
        paper="arXiv:2506.13585",
    )
    return validate(recipe)
