"""Decoupled losses: the sampling policy, the proximal policy of the clip, the trained policy.

``behavior_logp`` is ``[..., T]`` under the policy that sampled, a constant; None raises ValueError.
Log ratios are clamped to +-20. Other shared arguments, TypeError and ValueError: see
:mod:`jaxrl_llm.surrogates`.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs


@traits(clip="ratio")
def decoupled_ppo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    behavior_logp: Array,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    cap: float | None = None,
    beyond_cap: Literal["clamp", "mask"] | None = None,
) -> Array:
    """PPO's clip around a recent policy, with importance weights for an older sampler.

        w[t] = stop_gradient(exp(old_logp[t] - behavior_logp[t]))
        r[t] = exp(logp[t] - old_logp[t])
        loss[t] = w[t] * max(-A[t] r[t], -A[t] clip(r[t], 1 - eps_low, 1 + eps_high))

    ``old_logp`` is recomputed at the start of the update; ``behavior_logp`` was recorded when the
    token was sampled, under the version that sampled it. Where the two agree it is
    :func:`ppo_clip`; with ``old_logp=None`` the gradient is w times that of :func:`reinforce`. The
    weight replaces a recipe's correction, so a recipe must not also correct the same gap.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high, dual_clip: See the package.
      behavior_logp: See the module.
      cap: Largest weight, above 0; None for no cap.
      beyond_cap: Treatment of a token whose weight is above the cap: "clamp" (also None) gives it
        the weight ``cap``, "mask" a loss of 0. It still counts in the denominator.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp, behavior_logp = jnp.log(jnp.array([[0.3], [0.2], [0.25]]))
      >>> loss = jr.surrogates.decoupled_ppo(
      ...     logp, old_logp, jnp.ones(1), jnp.ones(1, bool), behavior_logp=behavior_logp)
      >>> print(loss.round(4))
      [-0.96]

    References:
      Fu et al., AReaL (arXiv:2505.24298); Hilton et al., Batch size-invariance for policy
      optimization (arXiv:2110.00641). As in AReaL, the denominator counts the tokens beyond the
      cap; verl excludes rejected tokens, which in a recipe is a correction's ``keep``.
    """
    checks.check_non_negative("decoupled_ppo", eps_low=eps_low, eps_high=eps_high)
    checks.check_positive("decoupled_ppo", cap=cap)
    if beyond_cap is not None:
        checks.check_option("decoupled_ppo", "beyond_cap", beyond_cap, ("clamp", "mask"))
        if cap is None:
            raise ValueError(
                f"decoupled_ppo: beyond_cap={beyond_cap!r} has no effect without a cap."
            )
    x = _inputs.prepare("decoupled_ppo", logp, old_logp, advantages, mask)
    loss = _inputs.clipped_loss(x.ratio, x.advantages, eps_low, eps_high)
    loss = _inputs.dual_clipped("decoupled_ppo", loss, x.advantages, dual_clip)
    weight = jnp.exp(_behind("decoupled_ppo", logp, old_logp, behavior_logp, mask))
    if cap is not None:
        beyond = 0.0 if beyond_cap == "mask" else cap
        weight = jnp.where(weight > cap, beyond, weight)
    return x.finish(weight * loss)


def mix_ppg(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    behavior_logp: Array,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Array:
    """The ratio to the sampler, clipped around the ratio of the last policy to the sampler.

        q[t] = exp(logp[t] - behavior_logp[t])
        c[t] = stop_gradient(exp(old_logp[t] - behavior_logp[t]))
        loss[t] = max(-A[t] q[t], -A[t] clip(q[t], c[t] - eps_low, c[t] + eps_high))

    It is for data sampled by a mixture of the last few policies: the ratio corrects for the
    sampler, while the clip measures the step from the policy at the start of the update,
    ``old_logp``. Where the two policies are equal it is :func:`ppo_clip`; at the old policy the
    gradient is c times that of :func:`reinforce`. The other half of the method is a KL term to two
    references, :func:`jaxrl_llm.regularizers.kl_convex`.

    Args:
      logp, old_logp, advantages, mask: See the package.
      behavior_logp: See the module.
      eps_low: Distance of the lower bound from the center, in units of q, not negative.
      eps_high: Distance of the upper bound from the center, not negative.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp, behavior_logp = jnp.log(jnp.array([[0.3], [0.2], [0.25]]))
      >>> loss = jr.surrogates.mix_ppg(  # q = 1.2, the band is 0.8 +- 0.2
      ...     logp, old_logp, jnp.ones(1), jnp.ones(1, bool), behavior_logp=behavior_logp)
      >>> print(loss.round(4))
      [-1.]

    References:
      ReMix (arXiv:2507.06892), PAPER reading.
    """
    checks.check_non_negative("mix_ppg", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("mix_ppg", logp, old_logp, advantages, mask)
    center = jnp.exp(_behind("mix_ppg", logp, old_logp, behavior_logp, mask))
    to_sampler = _inputs.log_ratio("mix_ppg", logp, behavior_logp, mask)
    ratio = x._replace(log_ratio=to_sampler).ratio
    loss = _inputs.bounded_loss(ratio, x.advantages, center - eps_low, center + eps_high)
    return x.finish(loss)


def _behind(function: str, logp: Array, old_logp: Array | None, behavior_logp, mask) -> Array:
    """``old_logp - behavior_logp``, clamped, 0 where masked; a constant."""
    if behavior_logp is None:
        raise ValueError(f"{function}: behavior_logp is None; this loss compares with the sampler.")
    checks.check_float(function, behavior_logp=behavior_logp)
    checks.check_same_shape(function, logp=logp, behavior_logp=behavior_logp)
    newer = logp if old_logp is None else old_logp
    log_ratio = masking.safe_log_ratio(newer, behavior_logp, mask, clamp=masking.LOG_RATIO_CLAMP)
    return jax.lax.stop_gradient(log_ratio)
