"""ReMax: REINFORCE with the greedy response for a baseline."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import chain, checks, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def remax(*, kl_coef: float = 0.0) -> Recipe:
    """Policy gradient with the reward of the most likely response to the same prompt taken out.

        A[t] = r - r_greedy - kl_coef (sum over s >= t of log(old / reference))
        loss = mean over sequences of the sum over tokens of -A logp

    One sampled response a prompt is enough; the greedy one is graded and not trained on. There is
    no ratio and no clip, so every batch serves one update.

    Args:
      kl_coef: Penalty in the reward for a nat of divergence from the reference (k1). 0 leaves it
        out, and with it the reference model.

    Returns:
      A Recipe; its batches hold ``greedy_rewards``, which a training loop brings.

    Raises:
      ValueError: If ``kl_coef`` is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.remax().required_fields), jr.recipes.remax().group_relative
      (['greedy_rewards'], False)

    References:
      Li et al., ReMax (arXiv:2310.10505). verl's ``remax`` is the advantage alone and trains with
      the clipped ratio and the configured aggregation.
    """
    checks.check_non_negative("remax", kl_coef=kl_coef)
    advantage = stateless(advantages.remax)
    if kl_coef:
        shaped = stateless(advantages.kl_shaped_rewards, kl_coef=kl_coef)
        advantage = chain(shaped, stateless(advantages.remax_token))
    recipe = Recipe(
        name="remax",
        advantage=advantage,
        surrogate=surrogates.reinforce,
        weights=aggregate.sequence_sum,
        paper="arXiv:2310.10505",
        group_relative=False,
    )
    return validate(recipe)
