"""Ratios of the policy being trained to the policy before the update.

- ``logp``, ``old_logp``: ``[..., T]`` log-probabilities (nats) of the policy and the proximal one.
- ``advantages``: ``[..., T]``, or ``[...]`` for one per sequence.
- ``mask``: bool ``[..., T]``, True = keep.
- Results are float32 scalars; shares are 0 if everything is masked.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import numbers
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, kl, masking


class RatioRange(NamedTuple):
    """Ratios of the unmasked tokens, float32 scalars; all 1 if everything is masked."""

    mean: Array
    least: Array
    greatest: Array


def clip_fraction(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    level: Literal["token", "sequence"] = "token",
) -> Array:
    """Share of tokens or sequences whose gradient a clipped surrogate removes.

        clipped = [A > 0 and r > 1 + eps_high] or [A < 0 and r < 1 - eps_low]
        level="token":     mean over unmasked tokens,      r = exp(logp - old_logp)
        level="sequence":  mean over sequences of the mean over their unmasked tokens,
                           r = exp(mean over unmasked tokens of logp - old_logp)

    The options are those of the surrogate; "sequence" is the level of GSPO: with one advantage per
    sequence it is the share of clipped non-empty sequences. For a dual clip see
    :func:`dual_clip_fraction`.

    Args:
      logp, old_logp, advantages, mask: See the module.
      eps_low: Distance of the lower bound from 1, not negative.
      eps_high: Distance of the upper bound from 1, not negative.
      level: Unit of a ratio: "token" or "sequence".

    Returns:
      A share in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp = jnp.log(jnp.array([0.9, 0.5])), jnp.log(jnp.array([0.5, 0.5]))
      >>> mask = jnp.array([True, True])
      >>> float(jr.diagnostics.clip_fraction(logp, old_logp, jnp.array(1.0), mask))
      0.5

    References:
      Schulman et al., PPO (arXiv:1707.06347). The ``pg_clipfrac`` of verl. At the sequence level
      verl still counts every token, so a long sequence counts more.
    """
    checks.check_non_negative("clip_fraction", eps_low=eps_low, eps_high=eps_high)
    ratio = _ratio("clip_fraction", logp, old_logp, mask, level)
    advantages = masking.spread("clip_fraction", "advantages", advantages, mask)
    clipped = (advantages > 0) & (ratio > 1.0 + eps_high)
    clipped |= (advantages < 0) & (ratio < 1.0 - eps_low)
    return _share(clipped, mask, level)


def dual_clip_fraction(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    dual_clip: float,
    level: Literal["token", "sequence"] = "token",
) -> Array:
    """Share of tokens or sequences whose gradient a dual clip removes.

        clipped = [A < 0 and r > dual_clip]       ratio and mean as in :func:`clip_fraction`

    For these tokens the loss of PPO would be above ``-A * dual_clip``. No token counts both here
    and in :func:`clip_fraction`, which counts small ratios for negative advantages.

    Args:
      logp, old_logp, advantages, mask: See the module.
      dual_clip: Upper bound of the ratio where the advantage is negative, above 1.
      level: Unit of a ratio: "token" or "sequence".

    Returns:
      A share in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([4.0, 2.0])), jnp.array([True, True])
      >>> bad = jnp.array(-1.0)
      >>> float(jr.diagnostics.dual_clip_fraction(logp, jnp.zeros(2), bad, mask, dual_clip=3.0))
      0.5

    References:
      Ye et al., dual clip (arXiv:1912.09729). The ``pg_clipfrac_lower`` of verl.
    """
    if isinstance(dual_clip, numbers.Real) and not float(dual_clip) > 1:
        raise ValueError(f"dual_clip_fraction: dual_clip must be above 1; got {dual_clip:g}.")
    ratio = _ratio("dual_clip_fraction", logp, old_logp, mask, level)
    advantages = masking.spread("dual_clip_fraction", "advantages", advantages, mask)
    return _share((advantages < 0) & (ratio > dual_clip), mask, level)


def approx_kl(
    logp: Array, old_logp: Array, mask: Array, *, estimator: Literal["k1", "k2", "k3"] = "k1"
) -> Array:
    """KL(old || new) per token, estimated on tokens sampled by the old policy.

        k1 = mean(-d)    k2 = mean(d^2) / 2    k3 = mean(exp(d) - 1 - d)    d = logp - old_logp

    k1 is unbiased and may be negative; k3 is unbiased, never negative, and has less variance while
    the policies are close; k2 is biased and never negative. The metric
    ``approx_kl`` in metrics.jsonl is k3. For a penalty see :mod:`jaxrl_llm.regularizers`.

    Args:
      logp, old_logp, mask: See the module.
      estimator: "k1", "k2" or "k3".

    Returns:
      Nats per token; 0 if everything is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
      >>> float(jr.diagnostics.approx_kl(logp, old_logp, jnp.array([True, True])))
      0.25

    References:
      Schulman, Approximating KL Divergence (joschu.net/blog/kl-approx.html). verl has k1.
    """
    checks.check_option("approx_kl", "estimator", estimator, ("k1", "k2", "k3"))
    d = _log_ratio("approx_kl", logp, old_logp, mask)
    return masking.masked_mean(kl.estimate(-d, estimator), mask)


def ratio_range(logp: Array, old_logp: Array, mask: Array) -> RatioRange:
    """Mean, smallest and largest ratio of the unmasked tokens.

        r = exp(logp - old_logp)

    Before the first update on a batch all three are 1; a larger deviation than rounding then
    indicates an error in scoring, such as another temperature, another truncation or other tokens.

    Args:
      logp, old_logp, mask: See the module.

    Returns:
      ``RatioRange(mean, least, greatest)``; all 1 if everything is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> same = jr.diagnostics.ratio_range(jnp.zeros(3), jnp.zeros(3), jnp.ones(3, bool))
      >>> float(same.mean), float(same.least), float(same.greatest)
      (1.0, 1.0, 1.0)

    References:
      Schulman et al., PPO (arXiv:1707.06347), for the ratio.
    """
    ratio = jnp.exp(_log_ratio("ratio_range", logp, old_logp, mask))
    some = jnp.any(mask)
    return RatioRange(
        mean=jnp.where(some, masking.masked_mean(ratio, mask), 1.0),
        least=jnp.where(some, jnp.min(ratio, where=mask, initial=jnp.inf), 1.0),
        greatest=jnp.where(some, jnp.max(ratio, where=mask, initial=0.0), 1.0),
    )


def _ratio(function: str, logp: Array, old_logp: Array, mask: Array, level: str) -> Array:
    """The ratio of each token ``[..., T]``, or of each sequence ``[..., 1]``."""
    checks.check_option(function, "level", level, ("token", "sequence"))
    if level == "token":
        return jnp.exp(_log_ratio(function, logp, old_logp, mask))
    masking.check_tokens(function, mask, logp=logp, old_logp=old_logp)
    checks.check_min_rank(function, 1, mask=mask)
    difference = masking.safe_log_ratio(logp, old_logp, mask)
    return jnp.exp(masking.masked_mean(difference, mask, axis=-1, keepdims=True))


def _share(clipped: Array, mask: Array, level: str) -> Array:
    """The mean over tokens, or over sequences of the mean over their tokens."""
    if level == "token":
        return masking.masked_mean(clipped, mask)
    return masking.masked_mean(masking.masked_mean(clipped, mask, axis=-1), jnp.any(mask, axis=-1))


def _log_ratio(function: str, logp: Array, old_logp: Array, mask: Array) -> Array:
    """``logp - old_logp``, checked, clamped, 0 where masked."""
    masking.check_tokens(function, mask, logp=logp, old_logp=old_logp)
    return masking.safe_log_ratio(logp, old_logp, mask, clamp=masking.LOG_RATIO_CLAMP)
