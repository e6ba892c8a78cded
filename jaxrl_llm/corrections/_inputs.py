"""Shared preparation of a correction's arrays: checks, masks and stopped gradients."""

import math
import numbers

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


def log_ratio(function: str, old_logp: Array, behavior_logp: Array, mask: Array) -> Array:
    """``old_logp - behavior_logp`` of each token, checked: a constant, raw, 0 where masked."""
    masking.check_tokens(function, mask, old_logp=old_logp, behavior_logp=behavior_logp)
    return jax.lax.stop_gradient(masking.safe_log_ratio(old_logp, behavior_logp, mask))


def clamped(log_ratio: Array) -> Array:
    """Within +-20, so that neither the exponential nor its square overflows."""
    return jnp.clip(log_ratio, -masking.LOG_RATIO_CLAMP, masking.LOG_RATIO_CLAMP)


def sum_over_tokens(x: Array) -> Array:
    """Sum over the tokens of a sequence, ``[..., 1]``; ``x`` is 0 where masked."""
    return masking.row_sum(x, keepdims=True)


def mean_over_tokens(x: Array, mask: Array) -> Array:
    """Mean over the unmasked tokens of a sequence, ``[..., 1]``; 0 for an empty one."""
    return sum_over_tokens(x) / jnp.maximum(masking.lengths(mask), 1.0)[..., None]


def check_around_one(function: str, **bounds) -> None:
    """Raises ValueError unless the bounds of a ratio include 1, the ratio of an unchanged policy.

    Otherwise a correction would change on-policy data.
    """
    (low_name, low), (high_name, high) = bounds.items()
    checks.check_non_negative(function, **{low_name: low})
    checks.check_positive(function, **{high_name: high})
    low_bad = isinstance(low, numbers.Real) and float(low) > 1
    high_bad = isinstance(high, numbers.Real) and float(high) < 1
    if low_bad or high_bad:
        raise ValueError(
            f"{function}: {low_name} and {high_name} must have 1 between them, the ratio of an "
            f"unchanged policy; got {low:g} and {high:g}."
        )


def log(bound) -> Array | float:
    """Logarithm of a bound that may be 0 or infinite."""
    if isinstance(bound, numbers.Real):
        return -math.inf if bound == 0 else math.log(bound)
    return jnp.log(jnp.asarray(bound, jnp.float32))
