"""GRPO with LLDS: right and neutral responses may not lose likelihood."""

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def llds(
    *,
    coef: float = 0.1,
    level: str = "action",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl_coef: float = 1e-3,
) -> Recipe:
    """GRPO and a penalty for likelihood lost where the advantage is not negative.

        A = (r - mean_group r) / (std_group r + 1e-6)
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A) + kl_coef KL
                     + coef max(0, old_logp - logp) where A >= 0 and the action lost in total
        loss = mean over tokens of token loss

    The penalty is 0 until the policy has moved: train several updates a batch. Actions are the
    contiguous runs of the mask, or the extra ``chunk_ids`` if the batch brings it.

    Args:
      coef: Weight of the penalty.
      level: What must have lost likelihood in total: each "action" or the whole "response".
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      kl_coef: Weight of the KL term (k3); 0 leaves it out, and with it the reference model.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.llds(level="response", kl_coef=0.0).regularizers
      (llds(chunk_ids=None, coef=0.1, level='response'),)

    References:
      Deng et al. (arXiv:2512.04220); the code's coefficient is 0.2.
    """
    options = {"coef": coef, "level": level} | ({"chunk_ids": None} if level == "response" else {})
    penalty = bind(regularizers.kl_to_reference, estimator="k3", coef=kl_coef)
    recipe = Recipe(
        name="llds",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        regularizers=(
            bind(regularizers.llds, **options),
            *((penalty,) if kl_coef else ()),
        ),
        paper="arXiv:2512.04220",
    )
    return validate(recipe)
