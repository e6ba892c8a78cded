"""Advantages shaped by the entropy of tokens.

- HAPO: :func:`entropy_signal` for ``surrogates.hapo`` and :func:`signal_temperature`, and
  :func:`token_grpo`, whose mean counts tokens.
- ETTRL: :func:`entropy_reshaping`, less advantage for uncertain answers.

Shared arguments:
  ``mask``: bool ``[..., T]``, True for the response tokens that are trained.
  ``where``: bool ``[..., G]``, True for the rollouts that take part; the others are not read.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "EntropySignal",
    "EntropyStats",
    "entropy_reshaping",
    "entropy_signal",
    "signal_temperature",
    "token_grpo",
]

_FLOOR = 1e-8


class EntropyStats(NamedTuple):
    """Statistics that normalize log-entropies; float32 ``[]``.

    Attributes:
      pivot: The log-entropy whose signal is 0.
      scale: Root mean square of the distance to the pivot.
      high: Largest distance above the pivot, in units of the scale; 0 before the first batch.
      low: Largest distance below the pivot, not negative, in the same units.
    """

    pivot: Array
    scale: Array
    high: Array
    low: Array


class EntropySignal(NamedTuple):
    """Result of :func:`entropy_signal`.

    Attributes:
      signal: float32 of the shape of the entropies, in [-1, 1], 0 where masked.
      stats: :class:`EntropyStats` of the batch.
    """

    signal: Array
    stats: EntropyStats


def entropy_signal(old_entropy: Array, mask: Array, *, quantile: float = 0.8) -> EntropySignal:
    """How uncertain each token is relative to all tokens of the batch, between -1 and 1.

        l = log max(H, 1e-8),   q = the quantile of l (nearest),   s = sqrt(mean (l - q)^2)
        z = (l - q) / s,        h = z / max z above 0,  z / |min z| below

    Multiplying all entropies by a number changes nothing. Statistics are over all axes.

    Args:
      old_entropy: ``[..., T]`` entropy (nats) of the policy that sampled, floating point.
      mask: See the module.
      quantile: Share of tokens below the pivot, in [0, 1].

    Returns:
      :class:`EntropySignal`; all 0 without a token.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> entropy = jnp.array([0.1, 0.2, 0.4, 0.8, 1.6])
      >>> jr.advantages.entropy_signal(entropy, jnp.ones(5, bool)).signal.round(3).tolist()
      [-1.0, -0.66..., -0.33..., 0.0, 1.0]

    References:
      HAPO (arXiv:2509.16591), the released code but for the sign below the pivot: its values there
      are positive, so that no token would ever count as certain.
    """
    function = "entropy_signal"
    masking.check_tokens(function, mask, old_entropy=old_entropy)
    checks.check_share(function, quantile=quantile)
    level = jnp.log(jnp.maximum(masking.zero_masked(old_entropy, mask), _FLOOR))
    ordered = jnp.sort(jnp.where(mask, level, jnp.inf), axis=None)
    count = jnp.sum(mask, dtype=jnp.int32)
    place = jnp.round(quantile * jnp.maximum(count - 1, 0)).astype(jnp.int32)
    pivot = jnp.where(count > 0, ordered[place] if ordered.size else 0.0, 0.0)
    away = masking.zero_masked(level - pivot, mask)
    scale = jnp.sqrt(jnp.maximum(masking.masked_mean(away**2, mask), _FLOOR))
    z = away / scale
    high = jnp.max(z, initial=0.0)
    low = jnp.max(-z, initial=0.0)
    span = jnp.where(z > 0, jnp.maximum(high, _FLOOR), jnp.maximum(low, _FLOOR))
    return EntropySignal(z / span, EntropyStats(pivot, scale, high, low))


def signal_temperature(
    entropy: Array, stats: EntropyStats, *, base: float = 1.0, tau: float = 0.05
) -> Array:
    """The sampling temperature of the next token, higher where the policy is uncertain.

        T = base (1 + tau h),   h as in entropy_signal with the statistics of the last batch

    Args:
      entropy: ``[...]`` entropy (nats) of the next-token distribution at temperature 1.
      stats: :class:`EntropyStats` of the last step; all zeros before the first, and then T = base.
      base: Temperature of a token at the pivot, above 0.
      tau: Strength, in [0, 1).

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> batch = jnp.array([0.1, 0.2, 0.4, 0.8, 1.6])
      >>> stats = jr.advantages.entropy_signal(batch, jnp.ones(5, bool)).stats
      >>> jr.advantages.signal_temperature(jnp.array([0.8, 9.0]), stats).round(3).tolist()
      [1.0, 1.0...]

    References:
      HAPO (arXiv:2509.16591): ``tau`` is 0.05 in the released code and 0.1 in the paper.
    """
    function = "signal_temperature"
    checks.check_float(function, entropy=entropy)
    checks.check_positive(function, finite=True, base=base)
    checks.check_share(function, one=False, tau=tau)
    level = jnp.log(jnp.maximum(jnp.asarray(entropy, jnp.float32), _FLOOR))
    known = stats.scale > 0
    z = jnp.where(known, (level - stats.pivot) / jnp.where(known, stats.scale, 1.0), 0.0)
    span = jnp.where(z > 0, jnp.maximum(stats.high, _FLOOR), jnp.maximum(stats.low, _FLOOR))
    return base * (1.0 + tau * jnp.clip(z / span, -1.0, 1.0))


def token_grpo(
    rewards: Array,
    mask: Array,
    *,
    where: Array | None = None,
    eps: float = 1e-6,
    limit: float = 5.0,
) -> Array:
    """GRPO whose mean and deviation count every token of the group once.

        mean = sum n_i r_i / sum n_i,   std^2 = sum n_i (r_i - mean)^2 / sum n_i,   n_i tokens of i
        A_i  = (r_i - mean) / (std + eps)
        where any |A| of the group >= limit: plain GRPO (ddof 1) for all of the group

    The sum of A over tokens is 0, so ``aggregate.token_mean`` introduces no length bias.

    Args:
      rewards: ``[..., G]``, floating point.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      where: See the module.
      eps: Added to the deviation, above 0.
      limit: If any advantage of a group reaches this magnitude, the group uses plain GRPO; above 0.

    Returns:
      Advantages ``[..., G]``, float32; 0 where all rewards agree, for rollouts without tokens and
      for those that take no part.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.arange(6) < jnp.array([[2], [6]])
      >>> jr.advantages.token_grpo(jnp.array([1.0, 0.0]), mask).round(3).tolist()
      [1.73..., -0.57...]

    References:
      HAPO (arXiv:2509.16591); the released code.
    """
    function = "token_grpo"
    stats.check_group(function, rewards, where)
    checks.check_mask(function, mask)
    checks.check_shape(function, "mask", mask, (*jnp.shape(rewards), jnp.shape(mask)[-1]))
    checks.check_positive(function, finite=True, eps=eps, limit=limit)
    rewards = masking.zero_masked(rewards, where)
    lengths = masking.zero_masked(masking.lengths(mask), where)
    total = jnp.maximum(jnp.sum(lengths, axis=-1, keepdims=True), 1.0)
    centered = rewards - jnp.sum(lengths * rewards, axis=-1, keepdims=True) / total
    std = masking.safe_sqrt(jnp.sum(lengths * centered**2, axis=-1, keepdims=True) / total)
    by_token = centered / (std + eps)
    spoken = lengths > 0
    plain = rewards - stats.group_mean(rewards, where)
    plain = plain / (stats.group_std(rewards, where, ddof=1) + eps)
    large = jnp.any(spoken & (jnp.abs(by_token) >= limit), axis=-1, keepdims=True)
    advantages = jnp.where(large, plain, by_token)
    advantages = jnp.where(stats.group_is_constant(rewards, spoken), 0.0, advantages)
    return masking.zero_masked(advantages, spoken)


def entropy_reshaping(
    advantages: Array,
    mask: Array,
    *,
    old_entropy: Array,
    where: Array | None = None,
    floor: float | None = 0.0,
) -> Array:
    """More advantage for responses that are more certain than their group, less for the others.

        A'_i = A_i (2 - H_i / mean H),   H_i = mean entropy of the tokens of i

    The mean over a group is of its responses that have an unmasked token; one without has the
    factor 1. The factors of the others have the mean 1 unless the floor raises one of them. They
    are 1 where the mean entropy is 0.

    Args:
      advantages: ``[..., G]``, floating point, one per rollout.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      old_entropy: ``[..., G, T]`` entropy (nats) of the policy that sampled, not negative.
      where: See the module.
      floor: Smallest factor; None for the literal formula, which flips the sign of the advantage of
        a response with more than twice the mean entropy.

    Returns:
      Advantages ``[..., G]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> entropy, mask = jnp.array([[0.2], [0.4], [0.6]]), jnp.ones((3, 1), bool)
      >>> jr.advantages.entropy_reshaping(
      ...     jnp.array([2.0, -0.5, -0.5]), mask, old_entropy=entropy).round(4).tolist()
      [3.0, -0.5, -0.25]

    References:
      ETTRL (arXiv:2508.11356), NOTES reading of three notes that agree; the floor is ours. The
      paper's alternative is ``advantages.clip`` at 2.
    """
    function = "entropy_reshaping"
    masking.check_tokens(function, mask, old_entropy=old_entropy)
    sequences = jnp.shape(mask)[:-1]
    checks.check_float(function, advantages=advantages)
    checks.check_shape(function, "advantages", advantages, sequences)
    checks.check_bool(function, where=where)
    tokens = mask
    if where is not None:
        checks.check_shape(function, "where", where, sequences)
        tokens = mask & where[..., None]
    certainty = masking.masked_mean(masking.zero_masked(old_entropy, tokens), tokens, axis=-1)
    spoken = jnp.any(tokens, axis=-1)
    mean = stats.group_mean(certainty, spoken)
    known = spoken & (mean > _FLOOR)
    factor = jnp.where(known, 2.0 - certainty / jnp.where(mean > _FLOOR, mean, 1.0), 1.0)
    if floor is not None:
        factor = jnp.maximum(factor, floor)
    return masking.zero_masked(masking.zero_masked(advantages, where) * factor, where)
