"""JSPO: a baseline that shares what the other prompts of the batch say."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def jspo(*, eps_low: float = 0.2, eps_high: float = 0.28) -> Recipe:
    """Clipped policy gradient with the James-Stein baseline.

        A_i = r_i - (1 - l) mean(others of the group) - l mean(rollouts of the other groups)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    The share l is the larger the noisier the group means are, compared with how far prompts lie
    apart; the gradient stays unbiased on the policy that sampled. No division by a deviation, no KL
    term. A batch needs several prompts.

    Args:
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.jspo().surrogate
      ppo_clip(eps_high=0.28, eps_low=0.2)

    References:
      Zeng et al., Shrinkage baselines (arXiv:2511.03710); advantage, clip and mean as in the
      authors' code and its script for mathematics.
    """
    recipe = Recipe(
        name="jspo",
        advantage=stateless(advantages.jspo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2511.03710",
    )
    return validate(recipe)
