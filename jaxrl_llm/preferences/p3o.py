"""Pairwise policy gradients: the differences of the rewards of one prompt's responses.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


def p3o(
    logp: Array,
    old_logp: Array,
    rewards: Array,
    *,
    ref_logp: Array | None = None,
    kl_coef: float = 0.0,
    clip: Literal["separate", "joint"] = "joint",
    eps: float = 0.2,
    max_ratio: float = 10.0,
    pairs: Literal["all", "adjacent"] = "all",
    where: Array | None = None,
) -> Array:
    """Pairwise PPO: makes the better of two responses likelier than the other, with clipping.

        R = exp(logp - old_logp)  of a response,   q = r - kl_coef (logp - ref_logp)
        "separate" (V1):  loss = sum over i in {1, 2} of max(c_i R_i, c_i clip(R_i)) / 2
                          c_i = -(q_i - q_j) bound(R_j),  clip to [1 - eps, 1 + eps]
        "joint" (V2):     loss = max(c d, c clip(d)) / 2
                          d = (logp_1 - logp_2) - (old_logp_1 - old_logp_2),  clip to [-eps, eps]
                          c = -(q_1 - q_2) bound(R_1 R_2)

    bound clips to [1 / max_ratio, max_ratio], and no gradient flows into c. Inside both clip
    ranges both forms have the gradient ``-(q_1 - q_2) R_1 R_2 grad(logp_1 - logp_2) / 2``. The loss
    of a group is the mean over its pairs. Before the first update its gradient equals that of
    :func:`jaxrl_llm.advantages.rloo`, averaged over the group. Adding a constant to all rewards of
    a prompt changes nothing, and equal rewards have loss 0 without a penalty.

    Args:
      logp: ``[..., G]``, floating point, log-probability (nats) of each response under the policy
        being trained, summed over its tokens.
      old_logp: ``[..., G]``, the same under the policy that sampled.
      rewards: ``[..., G]``, floating point, r.
      ref_logp: ``[..., G]``, under the reference; only for ``kl_coef``.
      kl_coef: Penalty for each nat of divergence of a response from the reference, not negative.
      clip: "separate" clips each ratio, "joint" the difference of the log-ratios.
      eps: Half the width of the clip range, above 0.
      max_ratio: Bound of the ratios in the weight of a pair, at least 1.
      pairs: "all" pairs of a group, or only pairs of "adjacent" responses.
      where: bool ``[..., G]``, True for valid responses; the others are ignored. None for
        all.

    Returns:
      ``[...]`` float32, one value per group; 0 without a pair.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, rewards = jnp.log(jnp.array([1.3, 0.9])), jnp.array([2.0, 1.0])
      >>> [round(float(jr.preferences.p3o(logp, jnp.zeros(2), rewards, clip=clip)), 4)
      ...  for clip in ("separate", "joint")]
      [0.045, -0.117]

    References:
      Wu et al., Pairwise Proximal Policy Optimization (arXiv:2310.00212), and the first author's
      code: "separate" in its repository rlhf_sac, "joint" in its fork of trlx, both with eps 0.2
      and ``max_ratio`` 10, ``kl_coef`` 0.05 or 0.01, two responses per prompt. Its joint loss
      differs by a constant. We also clamp log-ratios to +-20.
    """
    function = "p3o"
    named = {"logp": logp, "old_logp": old_logp, "ref_logp": ref_logp, "rewards": rewards}
    checks.check_arrays(function, named, where=where)
    checks.check_bool(function, where=where)
    checks.check_option(function, "clip", clip, ("separate", "joint"))
    checks.check_option(function, "pairs", pairs, ("all", "adjacent"))
    checks.check_positive(function, finite=True, eps=eps)
    checks.check_non_negative(function, finite=True, kl_coef=kl_coef)
    if isinstance(max_ratio, (int, float)) and not max_ratio >= 1:
        raise ValueError(f"{function}: max_ratio must be at least 1; got {max_ratio:g}.")
    if ref_logp is None and not (isinstance(kl_coef, (int, float)) and kl_coef == 0):
        raise ValueError(f"{function}: kl_coef={kl_coef} needs ref_logp; got None.")
    valid = jnp.ones(jnp.shape(logp), bool) if where is None else jnp.asarray(where)
    change = masking.safe_log_ratio(
        logp, jax.lax.stop_gradient(old_logp), valid, clamp=masking.LOG_RATIO_CLAMP
    )
    ratio = jnp.exp(change)
    rewards = masking.zero_masked(rewards, valid)
    if ref_logp is not None:
        rewards = rewards - kl_coef * masking.safe_log_ratio(logp, ref_logp, valid)
    rewards, fixed = jax.lax.stop_gradient((rewards, ratio))

    def bound(x: Array) -> Array:
        return jnp.clip(x, 1.0 / max_ratio, max_ratio)

    gap = rewards[..., :, None] - rewards[..., None, :]
    if clip == "separate":
        c, x = -gap * bound(fixed)[..., None, :], ratio[..., :, None]
        terms = jnp.maximum(c * x, c * jnp.clip(x, 1.0 - eps, 1.0 + eps))
        losses = (terms + jnp.swapaxes(terms, -1, -2)) / 2
    else:
        c = -gap * bound(fixed[..., :, None] * fixed[..., None, :])
        x = change[..., :, None] - change[..., None, :]
        losses = jnp.maximum(c * x, c * jnp.clip(x, -eps, eps)) / 2
    size = gap.shape[-1]
    apart = jnp.arange(size)[None, :] - jnp.arange(size)[:, None]
    chosen = (apart == 1) if pairs == "adjacent" else (apart > 0)
    chosen = chosen & valid[..., :, None] & valid[..., None, :]
    return masking.masked_mean(losses, chosen, axis=(-1, -2))
