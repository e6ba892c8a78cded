"""DCPO: a clip by the token's probability, advantages over all visits to a prompt."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def dcpo_dynamic_clip(
    *,
    num_prompts: int,
    eps_low: float = 0.16,
    eps_high: float = 0.2,
    r_max: float = 10.0,
    dual_clip: float | None = 10.0,
) -> Recipe:
    """Dynamic clipping and smooth advantage standardization.

        A = rewards standardized over this visit and over all visits to the prompt, blended
        (low, high) = surrogates.dcpo_bounds(old_logp), wider for rare tokens
        token loss = -min(ratio A, clip(ratio, low, high) A)
        dual clip, where A < 0:  token loss = min(token loss, -dual_clip A)
        loss = mean over sequences of the mean over tokens of token loss

    A group whose rewards agree still trains if the prompt's earlier rewards were others. No KL
    term.

    Args:
      num_prompts: How many prompts the data set has; each is remembered.
      eps_low: Width of the band below 1.
      eps_high: Width of the band above 1.
      r_max: Greatest upper bound.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.

    Returns:
      A Recipe; its batches hold ``prompt_ids``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.dcpo_dynamic_clip(num_prompts=100).required_fields)
      ['prompt_ids']

    References:
      Yang et al., DCPO (arXiv:2509.02333), whose released script has epsilons of 0.2 and 0.28.
    """
    recipe = Recipe(
        name="dcpo_dynamic_clip",
        advantage=advantages.smooth_standardization(num_prompts=num_prompts),
        surrogate=bind(
            surrogates.dcpo_dynamic_clip,
            eps_low=eps_low,
            eps_high=eps_high,
            r_max=r_max,
            dual_clip=dual_clip,
        ),
        weights=aggregate.sequence_mean,
        paper="arXiv:2509.02333",
    )
    return validate(recipe)
