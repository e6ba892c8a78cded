"""RLOO: REINFORCE with the mean of the other rollouts for a baseline."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def rloo() -> Recipe:
    """REINFORCE leave-one-out: the unbiased gradient of the expected reward.

        A_i = r_i - mean of the other rewards of the group
        loss = mean over sequences of the sum over tokens of -A logp

    There is no ratio and no clip, so every batch serves one update. The paper's KL penalty belongs
    in the reward; it is not part of this preset.

    Returns:
      A Recipe.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.rloo().surrogate is jr.surrogates.reinforce
      True

    References:
      Ahmadian et al., Back to Basics (arXiv:2402.14740). verl's ``rloo`` is the advantage alone and
      trains with the clipped ratio and the configured aggregation; TRL's RLOOTrainer clips the
      ratio of whole sequences and may normalize the advantages.
    """
    recipe = Recipe(
        name="rloo",
        advantage=stateless(advantages.rloo),
        surrogate=surrogates.reinforce,
        weights=aggregate.sequence_sum,
        paper="arXiv:2402.14740",
    )
    return validate(recipe)
