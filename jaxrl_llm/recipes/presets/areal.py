"""AReaL: PPO around a recent policy on data of older ones."""

from jaxrl_llm import advantages, aggregate, corrections, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def areal(
    *,
    cap: float = 5.0,
    m2_threshold: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Recipe:
    """Decoupled PPO: one policy sampled, another is what the clip is around.

        w = old / behavior where that is at most cap, else 0; a constant
        token loss = -w min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss; what has weight 0 counts in the mean

    Each token keeps the log-probability of the version of the weights that drew it, so a response
    that was interrupted by an update is nothing special. The advantages are GRPO's. How old the
    data may be is decided where it is sampled, see ``corrections.staleness_capacity``.

    Args:
      cap: Greatest weight that counts, at least 1.
      m2_threshold: Tokens are left out, those farthest from what sampled them first, until the mean
        square of ``log(old / behavior)`` is below it (M2PO); None for none.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      dual_clip: Upper bound of the loss where A < 0, as a multiple of ``-A``; None for none.

    Returns:
      A Recipe; its batches hold ``behavior_logp``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.areal(m2_threshold=0.04).required_fields)
      ['behavior_logp', 'old_logp']

    References:
      Fu et al., AReaL (arXiv:2505.24298), CODE reading: a weight above the cap of 5 takes a token
      out of the loss and not out of its denominator. The paper trains with a critic. M2PO is
      arXiv:2510.01161.
    """
    reject = ()
    if m2_threshold is not None:
        reject = (bind(corrections.m2_mask, threshold=m2_threshold),)
    recipe = Recipe(
        name="areal",
        advantage=stateless(advantages.grpo),
        surrogate=bind(
            surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
        ),
        weights=aggregate.token_mean,
        correction=bind(
            corrections.rollout_correction,
            weights=bind(corrections.masked_importance_weights, lower=0.0, upper=cap),
            reject=reject,
        ),
        paper="arXiv:2505.24298",
    )
    return validate(recipe)
