"""OPO: exact on-policy training with the length-weighted baseline."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def opo() -> Recipe:
    """On-policy policy gradient with the baseline of least variance, if gradients grow with length.

        A_i = r_i - sum_j len_j r_j / sum_j len_j       over the group
        loss = mean over tokens of -A logp

    No ratio, no clip, no KL term, no entropy bonus: every batch serves one update, and the whole
    batch is that update.

    Returns:
      A Recipe.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.opo().uses_ratio
      False

    References:
      Hao et al., OPO (arXiv:2505.23585). verl reaches it with its ``opo`` advantage and a minibatch
      as large as the batch, where the clipped ratio is 1; the mean over tokens is verl's default.
    """
    recipe = Recipe(
        name="opo",
        advantage=stateless(advantages.opo),
        surrogate=surrogates.reinforce,
        weights=aggregate.token_mean,
        paper="arXiv:2505.23585",
    )
    return validate(recipe)
