"""ACE: wrong rollouts that the policy has come to favor over its reference weigh more."""

from jaxrl_llm import advantages, aggregate, surrogates
from jaxrl_llm.core import bind, chain, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def ace(
    *,
    alpha: float = 1.0,
    length_normalize: bool = False,
    c_max: float | None = 10.0,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
) -> Recipe:
    """DAPO's loss with the asymmetric confidence-aware error penalty.

        A = (r - mean_group r) / (std_group r + 1e-6)
        A' = A (1 + alpha softplus(min(c, c_max)))          where A < 0
        c = sum over tokens of the log-ratio of policy and reference
        token loss = -min(ratio A', clip(ratio, 1 - eps_low, 1 + eps_high) A')
        dual clip, where A' < 0:  token loss = min(token loss, -dual_clip A')
        loss = mean over tokens of token loss

    The reference enters through the advantages only; there is no KL term.

    Args:
      alpha: Strength of the penalty; 0 for none.
      length_normalize: Whether c is the mean over the tokens.
      c_max: Greatest c that counts, in nats; None for no bound.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.

    Returns:
      A Recipe that needs ``ref_logp``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.ace().required_fields)
      ['old_logp', 'ref_logp']

    References:
      Xu et al., ACE (arXiv:2602.21420), ABSTRACT reading, as ACE-DAPO: the paper also pairs it with
      GRPO.
    """
    penalty = stateless(advantages.ace, alpha=alpha, length_normalize=length_normalize, c_max=c_max)
    recipe = Recipe(
        name="ace",
        advantage=chain(stateless(advantages.grpo), penalty),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.token_mean,
        paper="arXiv:2602.21420",
    )
    return validate(recipe)
