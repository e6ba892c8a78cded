"""Rollout correction: a clipped ratio, weighted by what the sampler did differently."""

from collections.abc import Callable
from typing import Literal

from jaxrl_llm import advantages, aggregate, corrections, surrogates
from jaxrl_llm.core import bind, stateless
from jaxrl_llm.recipes.recipe import Recipe
from jaxrl_llm.recipes.wiring import validate


def rollout_correction(
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    cap: float | None = 2.0,
    normalize: bool = False,
    reject: tuple[Callable, ...] = (),
    keep_denominator: bool = False,
    off_policy_threshold: float | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Recipe:
    """Three policies: what sampled, the proximal one, the one being trained (TIS).

        w = min(old / behavior, cap), a constant
        token loss = -w min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)
        loss = mean over tokens of token loss

    The advantages are GRPO's and there is no KL term. With ``off_policy_threshold``, rollouts with
    A < 0 that are farther than that from what sampled them are left out (DeepSeek-V3.2).

    Args:
      level: What has one weight: "token", "sequence" or "geometric".
      cap: Greatest weight; None for none.
      normalize: Whether the weights are divided by their mean over the batch.
      reject: Rules for tokens and sequences that are left out, such as
        ``bind(corrections.veto_mask, threshold=1e-4)``.
      keep_denominator: Whether what a rule leaves out still counts in the mean over tokens.
      off_policy_threshold: Nats a token, or None.
      eps_low: The ratio is clipped at ``1 - eps_low``.
      eps_high: The ratio is clipped at ``1 + eps_high``.

    Returns:
      A Recipe; its batches hold ``behavior_logp``.

    Raises:
      ValueError: If an option is out of its range or has no effect.

    Example:
      >>> import jaxrl_llm as jr
      >>> sorted(jr.recipes.rollout_correction(cap=3.0).required_fields)
      ['behavior_logp', 'old_logp']

    References:
      The decoupled mode of verl 0.9's rollout correction, CODE reading; DeepSeek-V3.2
      (arXiv:2512.02556), NOTES reading. verl's own clip is the same on both sides by default; 0.28
      above is DAPO's.
    """
    weights = bind(corrections.importance_weights, level=level, cap=cap, normalize=normalize)
    selection = None
    if off_policy_threshold is not None:
        selection = bind(corrections.off_policy_sequence_mask, threshold=off_policy_threshold)
    recipe = Recipe(
        name="rollout_correction",
        advantage=stateless(advantages.grpo),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps_low, eps_high=eps_high),
        weights=aggregate.token_mean,
        correction=bind(
            corrections.rollout_correction,
            weights=weights,
            reject=reject,
            keep_denominator=keep_denominator,
        ),
        selection=selection,
    )
    return validate(recipe)
