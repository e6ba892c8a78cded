"""A smooth gate in place of the clip."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks
from jaxrl_llm.surrogates import _inputs


def sapo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Array:
    """A sigmoid gate on the ratio: far from the old policy the gradient fades and is never cut.

        tau[t] = tau_pos if A[t] > 0 else tau_neg
        loss[t] = -A[t] * (4 / tau[t]) * sigmoid(tau[t] * (r[t] - 1))

    The gradient in logp is ``-A * r`` times ``4 p (1 - p)`` with p the sigmoid. That factor is 1 at
    r = 1, falls to 0 as r grows, and down to ``1 / cosh(tau / 2)^2`` as r goes to 0 (0.79 for a tau
    of 1). The product still grows at first, to 1.41 at r = 1.5, before the gate wins. With a small
    tau the gradient tends to that of ``-A * r``; the value does not, since its offset is ``-2 A /
    tau``. The paper pairs it with ``aggregate.sequence_mean``.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained.
      advantages: ``[..., T]``, or ``[...]`` for one value a sequence.
      mask: bool ``[..., T]``, True = keep.
      tau_pos: Sharpness of the gate where the advantage is positive.
      tau_neg: Sharpness elsewhere; the paper takes it larger, as pushing tokens down is less
        stable.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked. At r = 1 it is ``-2 A / tau``, not ``-A``.

    Raises:
      ValueError: If shapes differ, or a tau is not above 0 and finite.
      TypeError: If ``mask`` is not bool or another array is not floating point.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.zeros(3), jnp.ones(3, bool)
      >>> loss = lambda logp: jr.surrogates.sapo(logp, old_logp, jnp.ones(3), mask).sum()
      >>> gradient = jax.grad(loss)(jnp.log(jnp.array([1.0, 1.5, 3.0])))
      >>> [round(x, 2) for x in gradient.tolist()]
      [-1.0, -1.41, -1.26]

    References:
      Soft Adaptive Policy Optimization (arXiv:2511.20347). The factor ``4 / tau`` makes the slope
      at r = 1 equal to 1 for every tau; verl and TRL have it, and some descriptions leave it out.
    """
    checks.check_positive("sapo", tau_pos=tau_pos, tau_neg=tau_neg)
    _inputs.check_finite("sapo", tau_pos=tau_pos, tau_neg=tau_neg)
    x = _inputs.prepare("sapo", logp, old_logp, advantages, mask)
    tau = jnp.where(x.advantages > 0, tau_pos, tau_neg)
    return x.finish(-x.advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (x.ratio - 1.0)))
