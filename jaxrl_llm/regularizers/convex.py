"""A penalty between two anchors, and the schedule of their shares: ReMix."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks
from jaxrl_llm.regularizers import _inputs, kl


def kl_convex(
    logp: Array,
    old_logp: Array | None,
    ref_logp: Array,
    mask: Array,
    *,
    share: float | Array = 1.0,
    coef: float | Array = 1e-3,
    estimator: str = "k3",
) -> Array:
    """A penalty for leaving the base policy and the last one, in shares that add up to 1.

        loss[t] = coef * (share * KL[t](policy || base) + (1 - share) * KL[t](policy || last))

    The base is ``ref_logp``, the last policy ``old_logp``. With a share of 1 it is
    :func:`kl_to_reference`. ReMix begins there and lets the base go step by step
    (:func:`remix_lambda`).

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the policy at the start of the update, a constant; None for the
        policy being trained, from which the divergence is 0.
      ref_logp: ``[..., T]`` under the base policy, a constant.
      mask: bool ``[..., T]``, True = keep.
      share: Weight of the base, between 0 and 1; a number, or an array that broadcasts to
        ``[..., T]``; a constant.
      coef: Penalty for a nat of divergence, in units of the policy loss. 0 switches it off.
      estimator: As in :func:`kl_token`, of both divergences.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ, ``ref_logp`` is None, ``estimator`` is unknown, ``coef`` is
        negative, or ``share`` is not between 0 and 1.
      TypeError: If ``mask`` is not bool or another array is not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([-1.0]), jnp.array([True])
      >>> jr.regularizers.kl_convex(
      ...     logp, logp - 2.0, logp - 1.0, mask, share=0.75, coef=1.0, estimator="k2")
      Array([0.875], dtype=float32)

    References:
      ReMix (arXiv:2507.06892), PAPER reading. Which estimator and coefficient it uses was not in
      what we read; ours are those of :func:`kl_to_reference`.
    """
    checks.check_non_negative("kl_convex", coef=coef)
    checks.check_share("kl_convex", share=share)
    checks.check_mask("kl_convex", mask)
    _inputs.check_tokens("kl_convex", mask, logp=logp, ref_logp=ref_logp)
    old_logp = logp if old_logp is None else old_logp
    _inputs.check_tokens("kl_convex", mask, logp=logp, old_logp=old_logp)
    base = kl.checked_estimate("kl_convex", logp, ref_logp, mask, estimator, None)
    last = kl.checked_estimate("kl_convex", logp, old_logp, mask, estimator, None)
    share = jax.lax.stop_gradient(jnp.asarray(share, jnp.float32))
    return _inputs.scaled(coef, share * base + (1.0 - share) * last)


def remix_lambda(step: int | Array) -> Array:
    """Share of the base policy in :func:`kl_convex` at a step, counted from 1.

        share = max(1 - 0.1 * ceil(max(step - 50, 0) / 10), 0.5)

    Args:
      step: ``[...]`` integers, number of the update.

    Returns:
      ``[...]`` float32, from 1 down to 0.5.

    Raises:
      TypeError: If ``step`` does not hold integers.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> print(jr.regularizers.remix_lambda(jnp.array([1, 50, 51, 60, 61, 100])))
      [1.  1.  0.9 0.9 0.8 0.5]

    References:
      ReMix (arXiv:2507.06892), PAPER reading.
    """
    checks.check_integer("remix_lambda", step=step)
    past = jnp.maximum(jnp.asarray(step) - 50, 0)
    tens = (past + 9) // 10
    return jnp.maximum(1.0 - 0.1 * tens.astype(jnp.float32), 0.5)


class RemixState(NamedTuple):
    """State of :func:`remix_schedule`.

    Attributes:
      step: ``[]`` int32, how many updates have begun.
    """

    step: Array


def remix_schedule() -> Transform:
    """:func:`remix_lambda` as a controller of a recipe: it counts the updates.

        step = step + 1,   share = remix_lambda(step)

    Returns:
      A Transform ``rewards -> share``; its state is a :class:`RemixState`.

    Example:
      >>> import jaxrl_llm as jr
      >>> schedule = jr.regularizers.remix_schedule()
      >>> share, state = schedule.update(None, schedule.init())
      >>> float(share), int(state.step)
      (1.0, 1)

    References:
      ReMix (arXiv:2507.06892), PAPER reading.
    """
    return Transform(_remix_init, _remix_update)


def _remix_init() -> RemixState:
    return RemixState(step=jnp.zeros((), jnp.int32))


def _remix_update(rewards, state: RemixState, **context) -> tuple[Array, RemixState]:
    del rewards, context
    step = state.step + 1
    return remix_lambda(step), RemixState(step)
