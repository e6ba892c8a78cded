"""Importance weights of the proximal policy relative to the sampler: truncated or masked.

``level`` is the unit of a weight: "token", "sequence" or "geometric". ``normalize`` divides by the
mean weight of the batch as the last step, unless that mean is not above 1e-8. Other shared
arguments, TypeError and ValueError: see :mod:`jaxrl_llm.corrections`.
"""

import numbers
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.corrections import _inputs

Level = Literal["token", "sequence", "geometric"]
LEVELS = ("token", "sequence", "geometric")


def importance_weights(
    old_logp: Array,
    behavior_logp: Array,
    mask: Array,
    *,
    level: Level = "token",
    cap: float | None = 2.0,
    floor: float | None = None,
    normalize: bool = False,
) -> Array:
    """Truncated importance weights (TIS).

        d[t] = old_logp[t] - behavior_logp[t]
        level="token":      w[t] = min(exp(d[t]), cap)
        level="sequence":   w[t] = min(exp(sum of d over the sequence), cap)     at every token
        level="geometric":  w[t] = min(exp(mean of d over the sequence), cap)    at every token
        floor:              w[t] = max(w[t], floor)
        normalize:          w[t] = w[t] / mean(w), over unmasked tokens or non-empty sequences

    The token level is biased and has low variance; the sequence level is the exact correction
    except for the cap; the geometric level is the ratio of perplexities and varies little. An
    exponent is clamped to +-20; the terms of a sum or mean are not clamped separately.

    Args:
      old_logp, behavior_logp, mask: See the package.
      level, normalize: See the module.
      cap: Largest weight, above 0; None for no cap. 1.5 to 5 for tokens and 2 to 10 for sequences
        are common. A cap below 1 is also the weight of every token of an unchanged policy.
      floor: Smallest weight, in [0, 1] and not above the cap, so that a token that is improbable
        under the proximal policy retains some gradient; None for no floor.

    Returns:
      Weights ``[..., T]``, float32, 0 where masked; no gradient flows through them.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.array([0.1, -0.3, 0.9, 0.0]), jnp.ones(4, bool)
      >>> jr.corrections.importance_weights(old_logp, jnp.zeros(4), mask, floor=0.9).tolist()
      [1.105..., 0.899..., 2.0, 1.0]

    References:
      Yao et al., Your efficient RL framework secretly brings you off-policy RL training
      (fengyao.notion.site/off-policy-rl). Token and sequence level, cap and normalization as in
      verl 0.9 (``rollout_is``). TRL's ``token_truncate`` and ``sequence_truncate`` do not clamp the
      exponent; their ``clip_min`` is ``floor``. AReaL's sequence weight is the geometric. NeMo RL's
      "tis" sets an infinite or undefined weight to 0; here infinity is capped and NaN stays.
    """
    weight = _raw("importance_weights", old_logp, behavior_logp, mask, level)
    checks.check_positive("importance_weights", cap=cap)
    checks.check_share("importance_weights", floor=floor)
    if isinstance(cap, numbers.Real) and isinstance(floor, numbers.Real) and floor > cap:
        raise ValueError(
            f"importance_weights: floor must not be above cap; got {floor:g} and {cap:g}."
        )
    weight = weight if cap is None else jnp.minimum(weight, cap)
    weight = weight if floor is None else jnp.maximum(weight, floor)
    return _finish(weight, mask, level, normalize)


def masked_importance_weights(
    old_logp: Array,
    behavior_logp: Array,
    mask: Array,
    *,
    level: Level = "token",
    lower: float = 0.5,
    upper: float = 2.0,
    normalize: bool = False,
) -> Array:
    """Importance weights that are zero outside a range (MIS, IcePop).

        w[t] = rho[t] if lower <= rho[t] <= upper, else 0
        rho as the weights of :func:`importance_weights` without a cap

    Truncation retains the gradient of a token with an unreliable ratio; this function removes it.
    The token stays in the mask and so in the denominator; :func:`rejection_mask` removes it from
    both.

    Args:
      old_logp, behavior_logp, mask: See the package.
      level, normalize: See the module.
      lower: Smallest ratio to keep, at most 1.
      upper: Largest ratio to keep, at least 1.

    Returns:
      Weights ``[..., T]``, float32, 0 where masked; no gradient flows through them.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.array([0.1, -0.3, 0.9, 0.0]), jnp.ones(4, bool)
      >>> jr.corrections.masked_importance_weights(old_logp, jnp.zeros(4), mask).tolist()
      [1.105..., 0.740..., 0.0, 1.0]

    References:
      Ling team, Every Step Evolves (arXiv:2510.18855), IcePop, NOTES reading: range [0.5, 5]. The
      "lower_upper" threshold of verl 0.9; ``token_mask`` and ``sequence_mask`` of TRL.
    """
    _inputs.check_around_one("masked_importance_weights", lower=lower, upper=upper)
    weight = _raw("masked_importance_weights", old_logp, behavior_logp, mask, level)
    weight = jnp.where((weight >= lower) & (weight <= upper), weight, 0.0)
    return _finish(weight, mask, level, normalize)


def _raw(function: str, old_logp: Array, behavior_logp: Array, mask: Array, level: Level) -> Array:
    """Ratios, ``[..., T]`` or ``[..., 1]``, neither capped nor masked."""
    checks.check_option(function, "level", level, LEVELS)
    log_weight = _inputs.log_ratio(function, old_logp, behavior_logp, mask)
    if level == "sequence":
        log_weight = _inputs.sum_over_tokens(log_weight)
    elif level == "geometric":
        log_weight = _inputs.mean_over_tokens(log_weight, mask)
    return jnp.exp(_inputs.clamped(log_weight))


def _finish(weight: Array, mask: Array, level: Level, normalize: bool) -> Array:
    if normalize:
        valid = mask if level == "token" else jnp.any(mask, axis=-1, keepdims=True)
        mean = masking.masked_mean(weight, valid)
        weight = weight / jnp.where(mean > 1e-8, mean, 1.0)
    return masking.zero_masked(weight, mask)
