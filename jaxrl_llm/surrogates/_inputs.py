"""Shared preparation of a surrogate's arrays: checks, masks and stopped gradients."""

import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


class Inputs(NamedTuple):
    """Checked arrays, float32, zero where masked; all but the first two are constants."""

    logp: Array  # [..., T]
    log_ratio: Array  # [..., T], logp - old_logp, not clamped
    advantages: Array  # [..., T]
    weight: Array | None  # [..., T]
    mask: Array  # [..., T]

    @property
    def ratio(self) -> Array:
        """``exp(logp - old_logp)`` of each token; beyond the clamp it is flat, gradient 0."""
        return jnp.exp(jnp.clip(self.log_ratio, -masking.LOG_RATIO_CLAMP, masking.LOG_RATIO_CLAMP))

    def finish(self, loss: Array) -> Array:
        """The token loss times the weight if there is one, and exactly 0 where masked."""
        weighted = loss if self.weight is None else masking.product(self.weight, loss)
        return masking.zero_masked(weighted, self.mask)


def log_ratio(function: str, logp: Array, old_logp: Array | None, mask: Array) -> Array:
    """``logp - old_logp`` of each token, checked, 0 where masked; no old policy gives 0."""
    masking.check_tokens(function, mask, logp=logp, old_logp=old_logp)
    old_logp = jax.lax.stop_gradient(logp if old_logp is None else old_logp)
    return masking.safe_log_ratio(logp, old_logp, mask)


def prepare(
    function: str,
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    weight: Array | None = None,
) -> Inputs:
    """Checks and masks the arguments of the surrogate named ``function``."""
    difference = log_ratio(function, logp, old_logp, mask)

    def constant(name: str, x: Array) -> Array:
        return jax.lax.stop_gradient(masking.spread(function, name, x, mask))

    return Inputs(
        logp=masking.zero_masked(logp, mask),
        log_ratio=difference,
        advantages=constant("advantages", advantages),
        weight=None if weight is None else constant("weight", weight),
        mask=mask,
    )


def clipped_loss(ratio: Array, advantages: Array, eps_low, eps_high) -> Array:
    """``max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))``, the pessimistic of the two."""
    return bounded_loss(ratio, advantages, 1.0 - eps_low, 1.0 + eps_high)


def bounded_loss(ratio: Array, advantages: Array, low, high) -> Array:
    """``max(-A r, -A clip(r, low, high))``; the bounds may be arrays, and are constants."""
    return -advantages * pessimistic(ratio, advantages, low, high)


def pessimistic(ratio: Array, advantages: Array, low, high) -> Array:
    """The ratio, cut above where the advantage is positive and below elsewhere.

    A cut ratio has gradient 0; on a bound itself it counts as not cut, where ``jnp.clip`` and
    ``jnp.maximum`` halve the gradient.
    """
    positive = advantages > 0
    beyond = jnp.where(positive, ratio > high, ratio < low)
    return jnp.where(beyond, jnp.where(positive, high, low), ratio)


def dual_clipped(function: str, loss: Array, advantages: Array, dual_clip) -> Array:
    """``min(loss, -A dual_clip)`` where the advantage is negative; None changes nothing."""
    if dual_clip is None:
        return loss
    checks.check_non_negative(function, dual_clip=dual_clip)
    if isinstance(dual_clip, numbers.Real) and not float(dual_clip) > 1:
        raise ValueError(
            f"{function}: dual_clip must be above 1, the ratio of an unchanged policy; "
            f"got {dual_clip:g}."
        )
    negative = advantages < 0
    bound = jnp.where(negative, -advantages, 1.0) * dual_clip
    return jnp.where(negative & (loss > bound), bound, loss)


def gated_loss(ratio: Array, advantages: Array, tau_pos, tau_neg) -> Array:
    """SAPO's ``-A (4 / tau) sigmoid(tau (ratio - 1))`` with a tau for each sign of A."""
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    return -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))


def check_sequence_advantages(function: str, logp: Array, advantages: Array, hint="") -> None:
    """Raises ValueError for advantages per token where one per sequence is required."""
    if jnp.ndim(advantages) == jnp.ndim(logp):
        raise ValueError(
            f"{function}: advantages must have one value a sequence {jnp.shape(logp)[:-1]}; got "
            f"{jnp.shape(advantages)}.{hint}"
        )


def check_order(function: str, **pair) -> None:
    """Raises ValueError if the first of two Python numbers is above the second."""
    (low_name, low), (high_name, high) = pair.items()
    if isinstance(low, numbers.Real) and isinstance(high, numbers.Real) and low > high:
        raise ValueError(
            f"{function}: {low_name} must not be above {high_name}; got {low:g} and {high:g}."
        )
