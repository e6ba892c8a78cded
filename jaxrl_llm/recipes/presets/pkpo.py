"""PKPO: the gradient of pass@k, without bias."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def pkpo(
    *,
    k: int = 4,
    loo: bool = False,
    threshold: float = 0.5,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Policy gradient of the probability that one of k answers is right.

        A = right C(n - c, k - 1) / C(n - 1, k - 1)        c right of n rollouts
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over sequences of the sum over tokens of token loss

    On the policy that sampled, the gradient has exactly that of -pass@k, over k, as its
    expectation. Only right answers train, unless ``loo`` is set. No KL term.

    Args:
      k: How many answers a prompt may have, at least 1.
      loo: Whether the mean weight of the others is subtracted, which is biased for k above 1.
      threshold: A reward above it is right, in units of reward.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.pkpo(k=2).advantage.update.function
      pkpo(k=2, loo=False, threshold=0.5)

    References:
      PKPO (arXiv:2505.15201) for right and wrong answers. The sum over tokens is what makes the
      estimate unbiased; the implementation by the authors of MaxRL has ``loo=True`` and verl's mean
      over tokens.
    """
    recipe = Recipe(
        name="pkpo",
        advantage=stateless(advantages.pkpo, k=k, loo=loo, threshold=threshold),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.sequence_sum,
        paper="arXiv:2505.15201",
    )
    return validate(recipe)
