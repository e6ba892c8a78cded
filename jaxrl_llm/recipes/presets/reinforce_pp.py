"""REINFORCE++: no critic and no group; returns whitened over the batch, the ratio clipped."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def reinforce_pp(
    *,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Recipe:
    """Token returns with the KL penalty inside, whitened over all tokens of the batch.

        G[t] = sum over s >= t of gamma^(s - t) (1[s is last] r - kl_coef log(old[s] / ref[s]))
        A = (G - mean) / std                     over all tokens of the batch
        token loss = -min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    One response a prompt is enough.

    Args:
      kl_coef: Penalty in the reward for a nat of divergence from the reference. 0 leaves it out,
        and with it the reference model.
      gamma: Discount for a token, in [0, 1].
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> [sorted(jr.recipes.reinforce_pp(kl_coef=c).required_fields) for c in (0.01, 0.0)]
      [['old_logp', 'ref_logp'], []]

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262). The defaults of the penalty and the clip are ours;
      verl trains its ``reinforce_plus_plus`` advantage with the configured loss.
    """
    options = {"kl_coef": kl_coef, "gamma": gamma}
    if kl_coef == 0:
        options |= {"old_logp": None, "ref_logp": None}
    recipe = Recipe(
        name="reinforce_pp",
        advantage=stateless(advantages.reinforce_pp, **options),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        paper="arXiv:2501.03262",
        group_relative=False,
    )
    return validate(recipe)
