"""VESPO: a soft weight of the whole sequence, without a clip or a length normalization."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def vespo(
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Recipe:
    """Policy gradient, weighted by a bump around a sequence ratio of about 1.

        W = probability of the response under the policy over that when it was sampled
        phi = W^k exp(lambda (1 - W)), a constant; other k, lambda where A < 0
        loss = mean over tokens of -phi A logp

    The advantages are GRPO's and there is no KL term.

    Args:
      k_pos: Power where the advantage is not negative.
      lambda_pos: Rate where the advantage is not negative.
      k_neg: Power where the advantage is negative.
      lambda_neg: Rate where the advantage is negative.

    Returns:
      A Recipe; its batches hold ``behavior_logp``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.vespo(k_neg=2.0).surrogate
      vespo(k_neg=2.0, k_pos=2.0, lambda_neg=2.0, lambda_pos=3.0)

    References:
      VESPO (arXiv:2602.10693), by way of TRL's loss type of that name, CODE reading.
    """
    recipe = Recipe(
        name="vespo",
        advantage=stateless(advantages.grpo),
        surrogate=bind(
            surrogates.vespo,
            k_pos=k_pos,
            lambda_pos=lambda_pos,
            k_neg=k_neg,
            lambda_neg=lambda_neg,
        ),
        weights=aggregate.token_mean,
        paper="arXiv:2602.10693",
    )
    return validate(recipe)
