"""Entropy of the next-token distribution, and a bonus for it.

Shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.regularizers`.
"""

import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.regularizers import _inputs


def entropy_from_logits(logits: Array, targets: Array | None = None) -> Array:
    """Entropy of the softmax of each row of logits.

        H = logsumexp(logits) - sum_v softmax(logits)[v] * logits[v]
        dH/dlogits[v] = -p[v] * (log p[v] + H)

    A token with a logit of -inf cannot be sampled and is ignored. For a large vocabulary use the
    entropy that ``logprobs`` returns, which never stores all logits.

    Args:
      logits: ``[..., V]``.
      targets: ``[...]``. Not used: a Recipe passes them to all statistics of the logits.

    Returns:
      ``[...]`` float32, in nats, between 0 and log V.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.entropy_from_logits(jnp.zeros((1, 4))).round(4)  # log 4
      Array([1.3863], dtype=float32)

    References:
      Shannon entropy; verl and TRL compute the same form with logsumexp.
    """
    checks.check_min_rank("entropy_from_logits", 1, logits=logits)
    checks.check_float("entropy_from_logits", logits=logits)
    logits = jnp.asarray(logits, jnp.float32)
    # Relative to the greatest: with an offset of 1e4 the two terms above would cancel to noise.
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    possible = shifted > -jnp.inf
    shifted = jnp.where(possible, shifted, 0.0)
    mass = jnp.where(possible, jnp.exp(shifted), 0.0)
    total = jnp.sum(mass, axis=-1)
    return jnp.log(total) - jnp.sum(mass * shifted, axis=-1) / total


class EntropyControl(NamedTuple):
    """Result of :func:`entropy_controller`, float32 ``[]``.

    Attributes:
      coef: The coefficient after this measurement, for the next call.
      applied: The coefficient of the bonus at this step, 0 while the bonus is off.
    """

    coef: Array
    applied: Array


def entropy_controller(
    coef: float | Array,
    entropy: float | Array,
    *,
    target: float = 0.2,
    delta: float = 0.005,
    low: float = 0.0,
    high: float = 1.0,
) -> EntropyControl:
    """The coefficient of an entropy bonus, moved toward a target entropy by constant steps.

        applied = coef if entropy <= target else 0
        coef    = clip(coef + delta if entropy <= target else coef - delta, low, high)

    The function has no state: the caller passes ``coef``, in float32, from step to step.
    ``applied`` uses the coefficient before the change.

    Args:
      coef: ``[]``, in units of the policy loss per nat; from the last call, or the initial value.
      entropy: ``[]``, mean entropy of the policy on the global batch, in nats per token.
      target: The entropy, in nats per token, up to which the bonus is on and grows, not negative.
      delta: Change of the coefficient per call, above 0.
      low: Smallest coefficient, not negative.
      high: Largest coefficient, not below ``low``.

    Returns:
      ``EntropyControl(coef, applied)``.

    Example:
      >>> import jaxrl_llm as jr
      >>> control = jr.regularizers.entropy_controller(0.01, 0.1, target=0.2, delta=0.005)
      >>> control.coef.round(3).item(), control.applied.round(3).item()
      (0.015..., 0.01...)

    References:
      He et al., Skywork-OR1 (arXiv:2505.22312). The rule and the defaults are TRL's, which turns
      the bonus on and off by the entropy of the previous step.
    """
    name = "entropy_controller"
    checks.check_rank(name, 0, coef=coef, entropy=entropy)
    checks.check_non_negative(name, finite=True, target=target, low=low)
    checks.check_positive(name, finite=True, delta=delta)
    if isinstance(low, numbers.Real) and isinstance(high, numbers.Real) and not low <= high:
        raise ValueError(f"{name}: low must not be above high; got {low:g} and {high:g}.")
    coef, on = jnp.asarray(coef, jnp.float32), jnp.asarray(entropy, jnp.float32) <= target
    moved = jnp.clip(jnp.where(on, coef + delta, coef - delta), low, high)
    return EntropyControl(coef=moved, applied=jnp.where(on, coef, 0.0))


def entropy_bonus(
    entropy: Array, mask: Array, *, coef: float = 1e-3, cap: float | None = None
) -> Array:
    """A bonus for the entropy of the next-token distribution.

        loss[t] = -coef * min(entropy[t], cap)

    Without a cap, the bonus grows with the entropy. Where the policy gradient is weak, as on
    prompts that the policy hardly ever solves, it may raise the entropy of every token without end.
    A token above the cap gets no gradient from the bonus.

    Args:
      entropy: ``[..., T]`` entropy (nats) of the distribution each token was drawn from, under the
        policy being trained.
      mask, coef: See the package.
      cap: The entropy, in nats and above 0, up to which a token earns a bonus; None for no limit.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.array([True, True, False])
      >>> jr.regularizers.entropy_bonus(jnp.array([2.0, 4.0, 9.0]), mask, coef=0.5, cap=3.0)
      Array([-1. , -1.5,  0. ], dtype=float32)

    References:
      Williams and Peng, Function optimization using connectionist reinforcement learning algorithms
      (Connection Science 3, 1991). verl also adds ``-coef * aggregated entropy``. The cap is ours.
    """
    checks.check_non_negative("entropy_bonus", finite=True, coef=coef)
    checks.check_positive("entropy_bonus", finite=True, cap=cap)
    checks.check_mask("entropy_bonus", mask)
    _inputs.check_tokens("entropy_bonus", mask, entropy=entropy)
    if cap is not None:
        entropy = jnp.minimum(entropy, cap)
    return masking.zero_masked(_inputs.scaled(-coef, entropy), mask)
