"""Losses of a critic, and a pessimistic combination of several critics.

TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking

_EPS = 0.2


def value_loss(
    values: Array,
    old_values: Array | None,
    returns: Array,
    mask: Array,
    *,
    eps: float = _EPS,
    huber: float | None = None,
    combine: Literal["max", "mean"] = "max",
) -> Array:
    """Squared error of a critic with clipped changes: the larger of the plain and clipped errors.

        vc[t] = old_values[t] + clip(values[t] - old_values[t], -eps, eps)
        loss[t] = max(h(values[t] - returns[t]), h(vc[t] - returns[t])),   h(d) = d^2 / 2

    With ``huber`` errors beyond that distance are linear: h(d) = huber (|d| - huber / 2). With
    ``combine="mean"`` the two errors are averaged: clipping halves the gradient but never removes
    it.

    Args:
      values: ``[..., T]`` values under the critic being trained.
      old_values: ``[..., T]`` under the critic at the start of the step, a constant; None for no
        clip, and then ``eps`` and ``combine`` keep their defaults.
      returns: ``[..., T]``, or ``[...]`` for one return per sequence; constants.
      mask: See the package.
      eps: Largest change of a value before clipping, above 0, in units of return.
      huber: Distance beyond which errors are linear, above 0; None for squared errors.
      combine: How the two errors are combined: "max" or "mean".

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, old_values, returns = jnp.array([[1.5], [1.0], [2.0]])
      >>> jr.surrogates.value_loss(values, old_values, returns, jnp.ones(1, bool)).round(4)
      Array([0.32], dtype=float32)

    References:
      Schulman et al., PPO (arXiv:1707.06347), in the form of verl, whose critic has eps 0.5 by
      default. The Huber distance of 0.5 with ``combine="mean"`` is that of SAFE.
    """
    name = "value_loss"
    masking.check_tokens(name, mask, values=values, old_values=old_values)
    checks.check_positive(name, eps=eps, huber=huber)
    checks.check_option(name, "combine", combine, ("max", "mean"))
    values = masking.zero_masked(values, mask)
    returns = jax.lax.stop_gradient(masking.spread(name, "returns", returns, mask))
    free = _error(values - returns, huber)
    if old_values is None:
        for option, value, default in (("combine", combine, "max"), ("eps", eps, _EPS)):
            if value != default:
                raise ValueError(f"{name}: {option}={value!r} has no effect without old_values.")
        return masking.zero_masked(free, mask)
    old = jax.lax.stop_gradient(masking.zero_masked(old_values, mask))
    bounded = _error(old + jnp.clip(values - old, -eps, eps) - returns, huber)
    if combine == "mean":
        return masking.zero_masked(0.5 * (free + bounded), mask)
    # Not jnp.maximum, which halves the gradient of a tie: within the bounds the two are equal.
    return masking.zero_masked(jnp.where(free >= bounded, free, bounded), mask)


def soft_min(values: Array, *, alpha: float = 0.3) -> Array:
    """A pessimistic value of several critics: between their minimum and their mean.

        v = -alpha log(mean_c exp(-values[c] / alpha))

    Equal values are returned unchanged. A small alpha gives the minimum, a large one the mean.

    Args:
      values: ``[..., C]``, one per critic.
      alpha: Temperature, above 0 and finite, in units of value.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.soft_min(jnp.array([[1.0, 2.0], [1.0, 1.0]])).round(4)
      Array([1.1974, 1.    ], dtype=float32)

    References:
      Maity, SAFE (arXiv:2602.04651), and its released code, for two critics.
    """
    checks.check_min_rank("soft_min", 1, values=values)
    checks.check_float("soft_min", values=values)
    checks.check_positive("soft_min", finite=True, alpha=alpha)
    values = jnp.asarray(values, jnp.float32)
    mean, least = (jnp.mean(values, -1), jnp.min(values, -1))
    below = (mean[..., None] - values) / alpha
    close = jnp.max(jnp.abs(below), -1) < 1.0
    # About the mean where the values are close: elsewhere two large numbers cancel, or overflow.
    flat = jnp.log1p(jnp.mean(jnp.expm1(jnp.where(close[..., None], below, 0.0)), -1))
    steep = jnp.log(jnp.mean(jnp.exp((least[..., None] - values) / alpha), -1))
    return jnp.where(close, mean - alpha * flat, least - alpha * steep)


def _error(difference: Array, huber: float | None) -> Array:
    """Half the square; linear beyond ``huber`` if set."""
    if huber is None:
        return 0.5 * difference**2
    size = jnp.abs(difference)
    # Not a choice between two forms: that of an infinite distance is infinite, its gradient NaN.
    within = jnp.minimum(size, huber)
    return within * (size - 0.5 * within)
