"""DARS: more rollouts for hard prompts, one baseline over all of them."""

from jaxrl_llm import advantages, aggregate, curation, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def dars(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Recipe:
    """Policy optimization on groups that are the larger the harder the prompt.

        A = r - mean_group r, over the first and the extra rollouts of a prompt
        groups that are all right or all wrong take no part
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    How many extra rollouts a prompt gets is :func:`jaxrl_llm.curation.dars_extra_rollouts`, asked
    between two rounds of sampling; groups are padded to the largest with ``where=False``. The form
    with breadth (DARS-B) is a large batch with several updates, each on all of it.

    Args:
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.dars().surrogate
      ppo_clip(eps_high=0.2, eps_low=0.2)

    References:
      DARS (arXiv:2508.13755) and its released trainer.
    """
    recipe = Recipe(
        name="dars",
        advantage=stateless(advantages.dr_grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        curation=stateless(curation.informative_groups),
        paper="arXiv:2508.13755",
    )
    return validate(recipe)
