"""Token-level ratios: PPO's hard clip, bounds per token, a smooth gate.

Shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

import numbers

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs


@traits(clip="ratio")
def ppo_clip(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    weight: Array | None = None,
) -> Array:
    """The larger of the loss of the ratio and the loss of the clipped ratio.

        loss[t] = max(-A[t] r[t], -A[t] clip(r[t], 1 - eps_low, 1 + eps_high))
        dual clip, only where A[t] < 0:  loss[t] = min(loss[t], -A[t] dual_clip)
        weight, applied last:  loss[t] = weight[t] * loss[t]

    Equal epsilons are PPO; ``eps_high`` above ``eps_low`` is clip-higher (:func:`dapo_clip`);
    infinite ones give ``-A * r``. The dual clip bounds the loss where a bad token has become far
    more probable; verl uses 3, the DAPO scripts 10.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high, dual_clip, weight: See the package.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, advantages = jnp.log(jnp.array([1.5, 0.5, 4.0])), jnp.array([1.0, 1.0, -1.0])
      >>> mask = jnp.ones(3, bool)
      >>> jr.surrogates.ppo_clip(logp, jnp.zeros(3), advantages, mask, dual_clip=3.0)
      Array([-1.2, -0.5,  3. ], dtype=float32)

    References:
      Schulman et al., PPO (arXiv:1707.06347). Ye et al., dual clip (arXiv:1912.09729). As in verl,
      the log ratio is clamped to +-20 (gradient 0 beyond). Exactly on a bound the gradient is the
      unclipped one, where ``torch.max`` splits ties; this matters only for an epsilon of 0.
    """
    x = _inputs.prepare("ppo_clip", logp, old_logp, advantages, mask, weight)
    return _clip("ppo_clip", x, eps_low, eps_high, dual_clip)


@traits(clip="ratio")
def dapo_clip(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
    weight: Array | None = None,
) -> Array:
    """:func:`ppo_clip` with a wider upper bound, so that improbable tokens can rise.

    Only the defaults differ. The paper pairs it with ``aggregate.token_mean`` and no KL term.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high, dual_clip, weight: See the package.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([1.25, 1.3])), jnp.ones(2, bool)
      >>> jr.surrogates.dapo_clip(logp, jnp.zeros(2), jnp.ones(2), mask)
      Array([-1.25, -1.28], dtype=float32)

    References:
      Yu et al., DAPO (arXiv:2503.14476). The paper has no dual clip; the released recipe has 10.
    """
    x = _inputs.prepare("dapo_clip", logp, old_logp, advantages, mask, weight)
    return _clip("dapo_clip", x, eps_low, eps_high, dual_clip)


def _clip(function: str, x: _inputs.Inputs, eps_low, eps_high, dual_clip) -> Array:
    checks.check_non_negative(function, eps_low=eps_low, eps_high=eps_high)
    loss = _inputs.clipped_loss(x.ratio, x.advantages, eps_low, eps_high)
    return x.finish(_inputs.dual_clipped(function, loss, x.advantages, dual_clip))


@traits(policy_gradient=False, clip="dual")
def hapo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    signal: Array,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    alpha: float = 1.0,
    beta: float = 1.0,
    dual_clip: float | None = 10.0,
) -> Array:
    """Adapts the clip bounds and the advantage of each token to the policy's uncertainty.

        low[t]  = eps_low (1 - alpha h[t])   where h <= 0, else eps_low
        high[t] = eps_high (1 + alpha h[t])  where h > 0,  else eps_high
        near[t] = 1 - low[t] / 2 < r[t] < 1 + high[t] / 2
        A'[t]   = A[t] (1 + beta h[t])   where h > 0 and not near, or h <= 0 and near; else A[t]
        loss[t] = max(-A' r, -A' clip(r, 1 - low[t], 1 + high[t])), dual clip as in PPO

    Certain tokens may decrease further, and count less while they stay near the old policy;
    uncertain tokens may increase further, and count more once they have moved. With ``alpha`` and
    ``beta`` of 0 it is :func:`dapo_clip`.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained.
      advantages: ``[..., T]``, or ``[...]`` for one value per sequence.
      mask: bool ``[..., T]``, True = keep.
      signal: ``[..., T]``, floating point in [-1, 1]: ``advantages.entropy_signal``.
      eps_low: The ratio of a token at the pivot is clipped below at ``1 - eps_low``.
      eps_high: The ratio of a token at the pivot is clipped above at ``1 + eps_high``.
      alpha: How much the signal changes the bounds, not negative.
      beta: How much the signal changes the advantage, in [0, 1].
      dual_clip: As in :func:`ppo_clip`.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([1.0, 1.5])), jnp.ones(2, bool)
      >>> signal = jnp.array([-0.5, 1.0])
      >>> loss = jr.surrogates.hapo(logp, jnp.zeros(2), jnp.ones(2), mask, signal=signal)
      >>> loss.round(4).tolist()
      [-0.5, -3.0]

    References:
      HAPO (arXiv:2509.16591); the released code, whose recipe has ``eps_high=0.2`` and gives the
      signal of certain tokens the opposite sign.
    """
    name = "hapo"
    x = _inputs.prepare(name, logp, old_logp, advantages, mask)
    checks.check_non_negative(name, eps_low=eps_low, eps_high=eps_high)
    checks.check_non_negative(name, finite=True, alpha=alpha)
    checks.check_share(name, beta=beta)
    checks.check_float(name, signal=signal)
    checks.check_shape(name, "signal", signal, jnp.shape(mask))
    h = jax.lax.stop_gradient(masking.zero_masked(signal, mask))
    low = eps_low * (1.0 - alpha * jnp.minimum(h, 0.0))
    high = eps_high * (1.0 + alpha * jnp.maximum(h, 0.0))
    ratio = jax.lax.stop_gradient(x.ratio)
    near = (ratio > 1.0 - low / 2.0) & (ratio < 1.0 + high / 2.0)
    scaled = x.advantages * (1.0 + beta * h)
    values = jnp.where((h > 0) != near, scaled, x.advantages)
    loss = _inputs.clipped_loss(x.ratio, values, low, high)
    return x.finish(_inputs.dual_clipped(name, loss, values, dual_clip))


def dcpo_bounds(
    old_logp: Array,
    mask: Array | None = None,
    *,
    eps_low: float = 0.16,
    eps_high: float = 0.2,
    r_max: float = 10.0,
) -> tuple[Array, Array]:
    """Bounds of each token's ratio, wider for tokens of low probability.

        q[t] = exp(old_logp[t])
        low[t]  = 1/2 + sqrt(max(1 - 4 eps_low / q[t], 0)) / 2
        high[t] = min(1/2 + sqrt(1 + 4 eps_high / q[t]) / 2, r_max)

    The lower bound lies between 1/2 and 1. Both bounds tend to 1 as the epsilons go to 0.

    Args:
      old_logp: See the package; not None.
      mask: bool ``[..., T]``, True = keep; None for all.
      eps_low: Width of the band below 1, not negative.
      eps_high: Width of the band above 1, not negative.
      r_max: Largest upper bound, at least 1.

    Returns:
      ``(low, high)``, both ``[..., T]`` float32, constants; where masked, those of q = 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> low, high = jr.surrogates.dcpo_bounds(jnp.log(jnp.array([0.9, 0.1, 0.001])))
      >>> print(low.round(4), high.round(4))
      [0.7687 0.5    0.5   ] [ 1.1872  2.     10.    ]

    References:
      Yang et al., DCPO, dynamic clipping (arXiv:2509.02333).
    """
    checks.check_float("dcpo_bounds", old_logp=old_logp)
    checks.check_bool("dcpo_bounds", mask=mask)
    checks.check_same_shape("dcpo_bounds", old_logp=old_logp, mask=mask)
    return _bounds("dcpo_bounds", masking.zero_masked(old_logp, mask), eps_low, eps_high, r_max)


@traits(clip="dual")
def dcpo_dynamic_clip(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 0.16,
    eps_high: float = 0.2,
    r_max: float = 10.0,
    dual_clip: float | None = 10.0,
) -> Array:
    """PPO's clip with the bounds of :func:`dcpo_bounds`, so that rare tokens may move further.

        loss[t] = max(-A[t] r[t], -A[t] clip(r[t], low[t], high[t])), dual clip as in PPO

    The paper pairs it with ``aggregate.sequence_mean``. The other half of the method is
    ``advantages.smooth_standardization``.

    Args:
      logp, old_logp, advantages, mask, dual_clip: See the package.
      eps_low, eps_high, r_max: See :func:`dcpo_bounds`.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.log(jnp.array([0.9, 0.01])), jnp.ones(2, bool)
      >>> logp = old_logp + jnp.log(4.0)  # a ratio of 4 is clipped for the common token alone
      >>> jr.surrogates.dcpo_dynamic_clip(logp, old_logp, jnp.ones(2), mask).round(3)
      Array([-1.187, -4.   ], dtype=float32)

    References:
      Yang et al., DCPO, dynamic clipping (arXiv:2509.02333), whose released script widens the
      epsilons to 0.2 and 0.28.
    """
    x = _inputs.prepare("dcpo_dynamic_clip", logp, old_logp, advantages, mask)
    old_logp = masking.zero_masked(logp if old_logp is None else old_logp, mask)
    low, high = _bounds("dcpo_dynamic_clip", old_logp, eps_low, eps_high, r_max)
    loss = _inputs.bounded_loss(x.ratio, x.advantages, low, high)
    return x.finish(_inputs.dual_clipped("dcpo_dynamic_clip", loss, x.advantages, dual_clip))


def _bounds(function: str, old_logp: Array, eps_low, eps_high, r_max) -> tuple[Array, Array]:
    checks.check_non_negative(function, eps_low=eps_low, eps_high=eps_high, r_max=r_max)
    if isinstance(r_max, numbers.Real) and not float(r_max) >= 1:
        raise ValueError(f"{function}: r_max must be at least 1; got {r_max:g}.")
    # The inverse must stay finite, or an epsilon of 0 would turn it into a NaN.
    inverse = jnp.exp(jnp.minimum(-jax.lax.stop_gradient(old_logp), 80.0))
    low = 0.5 + 0.5 * jnp.sqrt(jnp.maximum(1.0 - 4.0 * eps_low * inverse, 0.0))
    high = jnp.minimum(0.5 + 0.5 * jnp.sqrt(1.0 + 4.0 * eps_high * inverse), r_max)
    return low, high


def sapo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Array:
    """A sigmoid gate on the ratio: the gradient decays far from the old policy but is never cut.

        tau[t] = tau_pos if A[t] > 0 else tau_neg
        loss[t] = -A[t] * (4 / tau[t]) * sigmoid(tau[t] * (r[t] - 1))

    The gradient in logp is ``-A * r`` times ``4 p (1 - p)`` with p the sigmoid. That factor is 1 at
    r = 1, falls to 0 as r grows, and to ``1 / cosh(tau / 2)^2`` as r goes to 0 (0.79 for a tau of
    1). The product of r and the factor first grows, to 1.41 at r = 1.5. As tau goes to 0 the
    gradient tends to that of ``-A * r``; the value does not, since its offset is ``-2 A / tau``.
    The paper pairs it with ``aggregate.sequence_mean``.

    Args:
      logp, old_logp, advantages, mask: See the package.
      tau_pos: Sharpness of the gate where the advantage is positive, above 0 and finite.
      tau_neg: Sharpness elsewhere; larger in the paper, as lowering tokens is less stable.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked. At r = 1 it is ``-2 A / tau``, not ``-A``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> loss = lambda x: jr.surrogates.sapo(x, jnp.zeros(3), jnp.ones(3), jnp.ones(3, bool)).sum()
      >>> jax.grad(loss)(jnp.log(jnp.array([1.0, 1.5, 3.0]))).round(2)
      Array([-1.  , -1.41, -1.26], dtype=float32)

    References:
      Soft Adaptive Policy Optimization (arXiv:2511.20347). The factor ``4 / tau`` makes the slope
      at r = 1 equal to 1 for every tau; verl and TRL have it, some descriptions omit it.
    """
    checks.check_positive("sapo", finite=True, tau_pos=tau_pos, tau_neg=tau_neg)
    x = _inputs.prepare("sapo", logp, old_logp, advantages, mask)
    return x.finish(_inputs.gated_loss(x.ratio, x.advantages, tau_pos, tau_neg))
