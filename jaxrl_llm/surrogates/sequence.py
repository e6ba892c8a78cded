"""One ratio or weight a sequence: GSPO and its token form, LUSPO, SAPO, GMPO, VESPO."""

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs

# verl's cap: a sequence ratio above e^10 counts as e^10 and has no gradient.
_LOG_CAP = 10.0


def sequence_ratio(logp: Array, old_logp: Array | None, mask: Array) -> Array:
    """Geometric mean of the token ratios of each sequence.

        s = exp(sum_t mask[t] (logp[t] - old_logp[t]) / max(sum_t mask[t], 1))

    An empty sequence has s = 1.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy, a constant; None for the policy being
        trained.
      mask: bool ``[..., T]``, True = keep.

    Returns:
      ``[...]`` float32, at most e^10.

    Raises:
      ValueError: If shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([0.2, -0.1, 0.05]) - 1.0, jnp.ones(3, bool)
      >>> print(f"{jr.surrogates.sequence_ratio(logp, jnp.full(3, -1.0), mask):.4f}")
      1.0513

    References:
      Zheng et al., GSPO (arXiv:2507.18071). The mean log ratio is capped at 10 as in verl; the
      token differences in it are not clamped.
    """
    difference = _inputs.log_ratio("sequence_ratio", logp, old_logp, mask)
    return jnp.exp(_capped(_mean(difference, mask)))


@traits(level="sequence")
def gspo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Array:
    """One importance ratio a sequence, clipped once a sequence.

        s = exp(sum_t mask[t] (logp[t] - old_logp[t]) / sum_t mask[t])
        loss[t] = max(-A s, -A clip(s, 1 - eps_low, 1 + eps_high))      the same at every token
        dual clip, where A < 0 only:  loss[t] = min(loss[t], -A dual_clip)

    The value is repeated over the tokens, so it belongs with ``aggregate.sequence_mean``: the loss
    is then the mean over sequences, with unclipped gradient ``-A s / length`` at each token. A
    sequence of one token is :func:`ppo_clip`.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained.
      advantages: ``[...]``, one value a sequence. For one a token see :func:`gspo_token`.
      mask: bool ``[..., T]``, True = keep.
      eps_low: The sequence ratio is clipped below at ``1 - eps_low``.
      eps_high: The sequence ratio is clipped above at ``1 + eps_high``.
      dual_clip: Greatest sequence ratio that counts where the advantage is negative, above 1; None
        for none.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ, ``advantages`` has a token axis, an epsilon is negative, or
        ``dual_clip`` is not above 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([0.2, -0.1, 0.05]), jnp.array([True, True, False])
      >>> loss = jr.surrogates.gspo(logp, jnp.zeros(3), jnp.array(-1.0), mask)
      >>> [round(x, 4) for x in loss.tolist()]
      [1.0513, 1.0513, 0.0]
      >>> far = jr.surrogates.gspo(logp + 1.0, jnp.zeros(3), jnp.array(-1.0), mask, dual_clip=2.0)
      >>> far.tolist()  # the ratio is 2.8577
      [2.0, 2.0, 0.0]

    References:
      Zheng et al., GSPO (arXiv:2507.18071). The mean log ratio is capped at 10 as in verl. The dual
      clip is the ``delta`` of TRL at its sequence level. An empty sequence is 0 and left out of the
      mean over sequences; TRL divides by all rows.
    """
    hint = " For one value a token use gspo_token."
    _inputs.check_sequence_advantages("gspo", logp, advantages, hint)
    checks.check_non_negative("gspo", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("gspo", logp, old_logp, advantages, mask)
    loss = _clipped(x, eps_low, eps_high)
    return x.finish(_inputs.dual_clipped("gspo", loss, x.advantages, dual_clip))


@traits(level="sequence", token_advantages=True)
def gspo_token(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Array:
    """The sequence ratio in value, the token's log-probability in gradient.

        s[t] = stop_gradient(s) * exp(logp[t] - stop_gradient(logp[t]))
        loss[t] = max(-A[t] s[t], -A[t] clip(s[t], 1 - eps_low, 1 + eps_high))
        dual clip, where A[t] < 0 only:  loss[t] = min(loss[t], -A[t] dual_clip)

    It allows another advantage for each token. With equal advantages and
    ``aggregate.sequence_mean``, the only weighting it is defined for, value and gradient are those
    of :func:`gspo`.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained.
      advantages: ``[..., T]``, or ``[...]`` for one value a sequence.
      mask: bool ``[..., T]``, True = keep.
      eps_low: The sequence ratio is clipped below at ``1 - eps_low``.
      eps_high: The sequence ratio is clipped above at ``1 + eps_high``.
      dual_clip: Greatest sequence ratio that counts where the advantage is negative, above 1; None
        for none.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ, an epsilon is negative, or ``dual_clip`` is not above 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([-1.0, -2.0]), jnp.ones(2, bool)
      >>> jr.surrogates.gspo_token(logp, None, jnp.array([1.0, -1.0]), mask)
      Array([-1.,  1.], dtype=float32)

    References:
      Zheng et al., GSPO (arXiv:2507.18071), the token variant. verl implements GSPO in this form
      and from version 0.9 lets the aggregation be configured.
    """
    checks.check_non_negative("gspo_token", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("gspo_token", logp, old_logp, advantages, mask)
    log_s = jax.lax.stop_gradient(_mean(x.log_ratio, mask))
    zero = x.logp - jax.lax.stop_gradient(x.logp)  # 0 in value, the gradient of logp
    ratio = jnp.exp(_capped(log_s[..., None] + zero))
    loss = _inputs.clipped_loss(ratio, x.advantages, eps_low, eps_high)
    return x.finish(_inputs.dual_clipped("gspo_token", loss, x.advantages, dual_clip))


@traits(policy_gradient=False, level="sequence")
def luspo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 2e-3,
    eps_high: float = 2.5e-3,
) -> Array:
    """GSPO times the length of the sequence, so that long answers are not learned more slowly.

        s = exp(sum_t mask[t] (logp[t] - old_logp[t]) / length)
        loss[t] = length * max(-A s, -A clip(s, 1 - eps_low, 1 + eps_high))  the same at every token

    With ``aggregate.sequence_mean``, the weighting it belongs to, each token has the unclipped
    gradient ``-A s`` whatever the length: at s = 1 that of :func:`reinforce` under
    ``aggregate.sequence_sum``. Where all sequences have one length it is that many times
    :func:`gspo`.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained.
      advantages: ``[...]``, one value a sequence.
      mask: bool ``[..., T]``, True = keep.
      eps_low: The sequence ratio is clipped below at ``1 - eps_low``.
      eps_high: The sequence ratio is clipped above at ``1 + eps_high``.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ, ``advantages`` has a token axis, or an epsilon is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([[-1.0, -2.0, 0.0, 0.0]]), jnp.array([[True, True, False, False]])
      >>> jr.surrogates.luspo(logp, None, jnp.ones(1), mask).tolist()
      [[-2.0, -2.0, 0.0, 0.0]]

    References:
      LUSPO (arXiv:2602.05261); the epsilons are those that TRL lists for the paper. The mean log
      ratio is capped at 10, as in :func:`gspo`. An empty sequence is 0 and left out of the mean
      over sequences; TRL divides by all rows.
    """
    _inputs.check_sequence_advantages("luspo", logp, advantages)
    checks.check_non_negative("luspo", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("luspo", logp, old_logp, advantages, mask)
    return x.finish(masking.lengths(mask)[..., None] * _clipped(x, eps_low, eps_high))


@traits(level="sequence")
def sapo_sequence(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Array:
    """The sigmoid gate of :func:`sapo` on one ratio a sequence.

        s = exp(sum_t mask[t] (logp[t] - old_logp[t]) / length)
        tau = tau_pos if A > 0 else tau_neg
        loss[t] = -A (4 / tau) sigmoid(tau (s - 1))                the same at every token

    It belongs with ``aggregate.sequence_mean``, and there starts from the gradient of :func:`gspo`.
    A sequence of one token is :func:`sapo`.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained.
      advantages: ``[...]``, one value a sequence.
      mask: bool ``[..., T]``, True = keep.
      tau_pos: Sharpness of the gate where the advantage is positive.
      tau_neg: Sharpness elsewhere.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked. At s = 1 it is ``-2 A / tau``, not ``-A``.

    Raises:
      ValueError: If shapes differ, ``advantages`` has a token axis, or a tau is not above 0 and
        finite.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([2.0, 1.125])), jnp.ones(2, bool)  # their ratio: 1.5
      >>> loss = lambda x: jr.surrogates.sapo_sequence(x, jnp.zeros(2), jnp.array(1.0), mask).mean()
      >>> [round(x, 4) for x in [float(loss(logp)), *jax.grad(loss)(logp).tolist()]]
      [-2.4898, -0.705, -0.705]

    References:
      Soft Adaptive Policy Optimization (arXiv:2511.20347) at the sequence level that TRL offers for
      it (``importance_sampling_level="sequence"``). The mean log ratio is capped at 10.
    """
    _inputs.check_sequence_advantages("sapo_sequence", logp, advantages, " Use sapo for those.")
    checks.check_positive("sapo_sequence", tau_pos=tau_pos, tau_neg=tau_neg)
    _inputs.check_finite("sapo_sequence", tau_pos=tau_pos, tau_neg=tau_neg)
    x = _inputs.prepare("sapo_sequence", logp, old_logp, advantages, mask)
    ratio = jnp.exp(_capped(_mean(x.log_ratio, mask)))[..., None]
    return x.finish(_inputs.gated_loss(ratio, x.advantages, tau_pos, tau_neg))


def _clipped(x: _inputs.Inputs, eps_low, eps_high) -> Array:
    """The clipped loss of the sequence ratio, at every token."""
    ratio = jnp.exp(_capped(_mean(x.log_ratio, x.mask)))[..., None]
    return _inputs.clipped_loss(ratio, x.advantages, eps_low, eps_high)


def _mean(log_ratio: Array, mask: Array) -> Array:
    """Mean log ratio of each sequence, 0 for an empty one."""
    return masking.row_sum(log_ratio) / jnp.maximum(masking.lengths(mask), 1.0)


def _capped(log_s: Array) -> Array:
    return jnp.minimum(log_s, _LOG_CAP)


@traits(level="sequence")
def gmpo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 0.4,
    eps_high: float = 0.4,
) -> Array:
    """The geometric mean of the token ratios, each clipped by itself in log space.

        d[t] = logp[t] - old_logp[t],  c[t] = clip(d[t], -eps_low, eps_high)
        z[t] = min(d[t], c[t]) if A > 0,  max(d[t], c[t]) if A < 0
        loss[t] = -A exp(sum_t mask[t] z[t] / length)                 the same at every token

    The bounds are bounds of the log ratio: 0.4 lets the ratio range from 0.67 to 1.49. A clipped
    token stops the gradient of that token alone, where :func:`gspo` clips the sequence; without
    bounds the two are one. It belongs with ``aggregate.sequence_mean``: unclipped, each token then
    has the gradient ``-A q / length``, with q the mean.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained.
      advantages: ``[...]``, one value a sequence.
      mask: bool ``[..., T]``, True = keep.
      eps_low: The log ratio is clipped below at ``-eps_low``, in nats.
      eps_high: The log ratio is clipped above at ``eps_high``, in nats.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ, ``advantages`` has a token axis, or an epsilon is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([0.6, -0.1, 0.2]), jnp.ones(3, bool)
      >>> loss = jr.surrogates.gmpo(logp, jnp.zeros(3), jnp.array(1.0), mask)
      >>> [round(x, 4) for x in loss.tolist()]
      [-1.1814, -1.1814, -1.1814]

    References:
      Zhao et al., GMPO (arXiv:2507.20673). As in verl (``geo_mean``) and TRL nothing but the clip
      bounds the mean, so a log ratio far above 0 counts in full where A < 0. Both of them divide by
      all rows; under ``aggregate.sequence_mean`` an empty sequence does not count. On a bound
      itself the gradient is the unclipped one.
    """
    _inputs.check_sequence_advantages("gmpo", logp, advantages)
    checks.check_non_negative("gmpo", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("gmpo", logp, old_logp, advantages, mask)
    clipped = _inputs.pessimistic(x.log_ratio, x.advantages, -eps_low, eps_high)
    # Nothing would bound the mean of a sequence whose advantage is 0, and 0 times infinity is NaN.
    clipped = jnp.where(x.advantages == 0, 0.0, clipped)
    length = jnp.maximum(masking.lengths(mask), 1.0)
    mean = jnp.exp(masking.row_sum(clipped) / length)[..., None]
    return x.finish(-x.advantages * mean)


# The weight of a sequence counts in [1e-8, e^20], as in the released code.
_LOG_LEAST = math.log(1e-8)


def vespo_weights(
    logp: Array,
    behavior_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Array:
    """Sequence weights that rise with the ratio and die out where it is large.

        W = exp(clip(sum over the sequence of logp - behavior_logp, log 1e-8, 20))
        phi[t] = W^k exp(lambda (1 - W))
        k, lambda = k_pos, lambda_pos where A[t] >= 0, else k_neg, lambda_neg

    phi is 1 at W = 1 and greatest at W = k / lambda. It needs neither a cap nor a length
    normalization, which a product of ratios otherwise does.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      behavior_logp: ``[..., T]`` under what sampled the tokens.
      advantages: ``[..., T]``, or ``[...]`` for one value a sequence; only the sign is used.
      mask: bool ``[..., T]``, True = keep.
      k_pos: Power for advantages that are not negative, itself not negative.
      lambda_pos: Rate for advantages that are not negative, above 0.
      k_neg: Power for negative advantages, not negative.
      lambda_neg: Rate for negative advantages, above 0.

    Returns:
      Weights ``[..., T]``, float32, 0 where masked; no gradient flows through them.

    Raises:
      ValueError: If shapes differ or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([[0.5], [2.0]])), jnp.ones((2, 1), bool)
      >>> phi = jr.surrogates.vespo_weights(logp, jnp.zeros((2, 1)), jnp.array([1.0, -1.0]), mask)
      >>> [round(x, 4) for x in phi[:, 0].tolist()]
      [1.1204, 1.0827]

    References:
      VESPO (arXiv:2602.10693), by way of TRL's ``get_gamma_weights``, CODE reading. TRL clamps each
      token's log ratio to +-20 before it adds; here, as everywhere, only the sum is.
    """
    checks.check_non_negative("vespo_weights", k_pos=k_pos, k_neg=k_neg)
    checks.check_positive("vespo_weights", lambda_pos=lambda_pos, lambda_neg=lambda_neg)
    x = _inputs.prepare("vespo_weights", logp, behavior_logp, advantages, mask)
    total = masking.row_sum(x.log_ratio, keepdims=True)
    log_weight = jnp.clip(total, _LOG_LEAST, masking.LOG_RATIO_CLAMP)
    good = x.advantages >= 0
    k = jnp.where(good, k_pos, k_neg)
    rate = jnp.where(good, lambda_pos, lambda_neg)
    phi = jnp.exp(k * log_weight - rate * jnp.expm1(log_weight))
    return jax.lax.stop_gradient(masking.zero_masked(phi, mask))


def vespo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    behavior_logp: Array | None = None,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Array:
    """Policy gradient with a soft weight of the sequence in place of a clip.

        loss[t] = -phi[t] * A[t] * logp[t]        phi of :func:`vespo_weights`

    The ratio is that of the policy being trained to what sampled, so it corrects a mismatch of the
    sampler and stale data in one, and no other correction should be added. On policy it is
    :func:`reinforce`.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy, used where ``behavior_logp`` is None; None
        for the policy being trained.
      advantages: ``[..., T]``, or ``[...]`` for one value a sequence.
      mask: bool ``[..., T]``, True = keep.
      behavior_logp: ``[..., T]`` under what sampled the tokens; None for ``old_logp``.
      k_pos: Power for advantages that are not negative, itself not negative.
      lambda_pos: Rate for advantages that are not negative, above 0.
      k_neg: Power for negative advantages, not negative.
      lambda_neg: Rate for negative advantages, above 0.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([-1.0, -2.0]), jnp.ones(2, bool)
      >>> jr.surrogates.vespo(logp, logp, jnp.array(1.0), mask)
      Array([1., 2.], dtype=float32)

    References:
      VESPO (arXiv:2602.10693), by way of TRL's loss type of that name, CODE reading. TRL averages
      it over tokens.
    """
    checks.check_same_shape("vespo", logp=logp, behavior_logp=behavior_logp)
    x = _inputs.prepare("vespo", logp, old_logp, advantages, mask)
    behavior_logp = old_logp if behavior_logp is None else behavior_logp
    phi = vespo_weights(
        logp,
        behavior_logp,
        advantages,
        mask,
        k_pos=k_pos,
        lambda_pos=lambda_pos,
        k_neg=k_neg,
        lambda_neg=lambda_neg,
    )
    return x.finish(-phi * x.advantages * x.logp)
