"""ReMix: data of the last few policies, a clip around the last one, two anchors, and a rebirth."""

from jaxrl_llm import advantages, aggregate, regularizers, surrogates
from jaxrl_llm.core import bind, checks, given, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import Computed, validate


def remix(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    kl_coef: float = 1e-3,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    reset_every: int | None = None,
) -> Recipe:
    """Off-policy PPO that ends as on-policy PPO.

        q = exp(logp - behavior_logp),   c = exp(old_logp - behavior_logp)
        token loss = -min(q A, clip(q, c - eps_low, c + eps_high) A)
                     + kl_coef (share KL(policy || base) + (1 - share) KL(policy || old))
                     - entropy_coef entropy
        loss = mean over tokens of token loss;   share from 1 to 0.5, see regularizers.remix_lambda

    The base is the reference model. The advantages are GRPO's. Which rollouts come from a stored
    past policy is decided where data are gathered, see ``curation.mix_source_mask``. In its second
    half the method resets the base to the policy and goes on with fresh data alone: ``reset_every``
    does the first, and with fresh data, whose sampler is the old policy, the loss is PPO's.

    Args:
      eps_low: Distance of the lower bound from c.
      eps_high: Distance of the upper bound from c.
      kl_coef: Weight of the two divergences.
      kl_estimator: How they are estimated, see :func:`jaxrl_llm.regularizers.kl_token`.
      entropy_coef: Weight of an entropy bonus; 0 leaves it out.
      reset_every: Steps after which the base becomes the policy, and again after as many; None
        keeps it. The paper resets it once, after 50 or 100 steps.

    Returns:
      A Recipe; its batches hold ``behavior_logp`` and ``ref_logp``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.remix().required_fields)
      ['behavior_logp', 'ref_logp']

    References:
      ReMix (arXiv:2507.06892), PAPER reading; the coefficients and the estimator are ours.
    """
    penalty = bind(regularizers.kl_convex, coef=kl_coef, estimator=kl_estimator)
    bonus = (bind(regularizers.entropy_bonus, coef=entropy_coef),) if entropy_coef else ()
    reset = None
    if reset_every is not None:
        checks.check_positive("remix", reset_every=reset_every)
        reset = bind(regularizers.reset_reference, every=reset_every)
    recipe = Recipe(
        name="remix",
        advantage=stateless(advantages.grpo),
        computed=(Computed("kl_share", regularizers.remix_schedule(), "controller"),),
        surrogate=bind(surrogates.mix_ppg, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        regularizers=(given(penalty, share="kl_share"), *bonus),
        reference=reset,
        paper="arXiv:2507.06892",
    )
    return validate(recipe)
