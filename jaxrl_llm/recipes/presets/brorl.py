"""BroRL: hundreds of rollouts a prompt."""

from jaxrl_llm import advantages, aggregate, corrections, curation, regularizers, surrogates
from jaxrl_llm.core import bind, checks, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def brorl(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    cap: float = 2.0,
    kl_coef: float = 1e-4,
    reset_every: int | None = 500,
) -> Recipe:
    """The recipe that BroRL scales in the number of rollouts.

        a = r - mean_group r;  A = (a - mean a) / std a, over rollouts
        groups whose rewards agree take no part
        token loss = -w min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
                     + kl_coef KL(policy || reference)
        w = min(old / behavior, cap), a constant;  loss = mean over tokens of token loss

    What is new is outside of the loss: 512 rollouts of 128 prompts a step in place of 16 of 512,
    the learning rate times the root of the batch ratio (:func:`jaxrl_llm.curation.sqrt_lr`), the
    same number of updates a step. Why it helps: :func:`jaxrl_llm.diagnostics.mass_balance`.

    Args:
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.
      cap: Greatest importance weight of a token.
      kl_coef: Weight of the divergence from the reference. 0 leaves it out, and with it the
        reference and its resets.
      reset_every: Steps after which the reference becomes the policy, again and again; None keeps
        it.

    Returns:
      A Recipe; its batches hold ``behavior_logp``, and ``ref_logp`` unless ``kl_coef`` is 0.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.recipes.brorl(cap=3.0).correction
      rollout_correction(weights=importance_weights(cap=3.0))

    References:
      BroRL (arXiv:2510.01180), PAPER reading; the cap, the weight of the divergence and the period
      of the reset are ours.
    """
    checks.check_positive("brorl", reset_every=reset_every)
    checks.check_non_negative("brorl", kl_coef=kl_coef)
    reset = None
    if kl_coef and reset_every is not None:
        reset = bind(regularizers.reset_reference, every=reset_every)
    weights = bind(corrections.importance_weights, cap=cap)
    recipe = Recipe(
        name="brorl",
        advantage=stateless(advantages.reinforce_pp_baseline, norm="sequence"),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        regularizers=(bind(regularizers.kl_to_reference, coef=kl_coef),) if kl_coef else (),
        correction=bind(corrections.rollout_correction, weights=weights),
        curation=stateless(curation.informative_groups),
        reference=reset,
        paper="arXiv:2510.01180",
    )
    return validate(recipe)
