"""One ratio or weight per sequence: GSPO and its token form, LUSPO, SAPO, GMPO, VESPO.

With the geometric mean of the token ratios of a sequence as its ratio::

    s = exp(sum_t mask[t] (logp[t] - old_logp[t]) / max(sum_t mask[t], 1))

most of these losses are one number per sequence, repeated at every token, for
``aggregate.sequence_mean``, which averages it over sequences. For those, ``advantages`` is
``[...]``, one value per sequence; one per token raises ValueError. The mean log ratio is capped at
10, as in verl, except in :func:`gmpo`, which clips those of tokens. An empty sequence has loss 0
and does not count in the mean over sequences; TRL divides by all rows.

In a recipe, a selection of tokens leaves the ratio as it is: it is of the sequence, and so are the
weights of a loss that is one number per sequence. The tokens that the selection drops have weight
0, so a sequence counts by the share of its tokens that train.

- ``k_pos``, ``lambda_pos``: Power, not negative, and rate, above 0, of :func:`vespo_weights` where
  the advantage is not negative; ``k_neg``, ``lambda_neg``: the same elsewhere.

Other shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, segments, traits
from jaxrl_llm.surrogates import _inputs

# verl's cap: a sequence ratio above e^10 counts as e^10 and has no gradient.
_LOG_CAP = 10.0


def sequence_ratio(logp: Array, old_logp: Array | None, mask: Array) -> Array:
    """Geometric mean of the token ratios of each sequence.

        s = exp(sum_t mask[t] (logp[t] - old_logp[t]) / max(sum_t mask[t], 1))

    An empty sequence has s = 1.

    Args:
      logp, old_logp, mask: See the package.

    Returns:
      ``[...]`` float32, at most e^10.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([0.2, -0.1, 0.05]) - 1.0, jnp.ones(3, bool)
      >>> print(f"{jr.surrogates.sequence_ratio(logp, jnp.full(3, -1.0), mask):.4f}")
      1.0513

    References:
      Zheng et al., GSPO (arXiv:2507.18071). The token differences are not clamped.
    """
    difference = _inputs.log_ratio("sequence_ratio", logp, old_logp, mask)
    return jnp.exp(_capped(_mean(difference, mask)))


@traits(level="sequence", reads_sequence=True, clip="ratio")
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
    """One importance ratio per sequence, clipped once per sequence.

        loss[t] = max(-A s, -A clip(s, 1 - eps_low, 1 + eps_high))      the same at every token
        dual clip, where A < 0 only:  loss[t] = min(loss[t], -A dual_clip)

    Under ``aggregate.sequence_mean`` the unclipped gradient is ``-A s / length`` at each token. For
    a sequence of one token it is :func:`ppo_clip`.

    Args:
      logp, old_logp, mask, eps_low, eps_high, dual_clip: See the package.
      advantages: See the module. For one per token see :func:`gspo_token`.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([0.2, -0.1, 0.05]), jnp.array([True, True, False])
      >>> jr.surrogates.gspo(logp, jnp.zeros(3), jnp.array(-1.0), mask).tolist()
      [1.051..., 1.051..., 0.0]

    References:
      Zheng et al., GSPO (arXiv:2507.18071). The dual clip is TRL's ``delta`` at its sequence level.
    """
    hint = " For one value a token use gspo_token."
    _inputs.check_sequence_advantages("gspo", logp, advantages, hint)
    checks.check_non_negative("gspo", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("gspo", logp, old_logp, advantages, mask)
    loss = _inputs.clipped_loss(_ratio(x), x.advantages, eps_low, eps_high)
    return x.finish(_inputs.dual_clipped("gspo", loss, x.advantages, dual_clip))


@traits(level="sequence", reads_sequence=True, token_advantages=True, clip="ratio")
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
    """The value of the sequence ratio with the gradient of the token's log-probability.

        s[t] = stop_gradient(s) * exp(logp[t] - stop_gradient(logp[t]))
        loss[t] = max(-A[t] s[t], -A[t] clip(s[t], 1 - eps_low, 1 + eps_high))
        dual clip, where A[t] < 0 only:  loss[t] = min(loss[t], -A[t] dual_clip)

    It allows a different advantage for each token. With equal advantages and
    ``aggregate.sequence_mean``, the only weighting that it is defined for, value and gradient are
    those of :func:`gspo`.

    Args:
      logp, old_logp, mask, eps_low, eps_high, dual_clip: See the package.
      advantages: ``[..., T]``, or ``[...]`` for one value per sequence.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([-1.0, -2.0]), jnp.ones(2, bool)
      >>> jr.surrogates.gspo_token(logp, None, jnp.array([1.0, -1.0]), mask)
      Array([-1.,  1.], dtype=float32)

    References:
      Zheng et al., GSPO (arXiv:2507.18071), the token variant. verl implements GSPO in this form
      and makes the aggregation configurable from version 0.9.
    """
    checks.check_non_negative("gspo_token", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("gspo_token", logp, old_logp, advantages, mask)
    log_s = jax.lax.stop_gradient(_mean(x.log_ratio, mask))
    ratio = jnp.exp(_capped(log_s[..., None] + _zero(x.logp)))
    loss = _inputs.clipped_loss(ratio, x.advantages, eps_low, eps_high)
    return x.finish(_inputs.dual_clipped("gspo_token", loss, x.advantages, dual_clip))


@traits(reads_sequence=True)
def gspo_turns(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    turn_ids: Array,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    dual_clip: float | None = None,
) -> Array:
    """The value of the turn's ratio with the gradient of the token's log-probability.

        s_k = exp(mean over the tokens of turn k of logp - old_logp)
        s[t] = stop_gradient(s_k) * exp(logp[t] - stop_gradient(logp[t]))          k the turn of t
        loss[t] = max(-A[t] s[t], -A[t] clip(s[t], 1 - eps_low, 1 + eps_high))
        dual clip, where A[t] < 0 only:  loss[t] = min(loss[t], -A[t] dual_clip)

    With one advantage per turn, and equal weights of its tokens, value and gradient are those of
    :func:`gspo` with turns as sequences. A weighting by tokens weighs a turn by its length;
    ``advantages.equal_turns`` compensates for that. For a rollout of one turn it is
    :func:`gspo_token`.

    Args:
      logp, old_logp, mask, eps_low, eps_high, dual_clip: See the package.
      advantages: ``[..., T]``, or ``[...]`` for one value per sequence.
      turn_ids: integers ``[..., T]``, the turn of each token, from 0; tokens below 0 belong to no
        turn and have loss 0.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([0.2, -0.1, 0.05]), jnp.ones(3, bool)
      >>> jr.surrogates.gspo_turns(
      ...     logp, jnp.zeros(3), jnp.array(-1.0), mask, turn_ids=jnp.array([0, 0, 1])).tolist()
      [1.051..., 1.051..., 1.051...]

    References:
      EAPO, IterResearch (arXiv:2511.07327), whose rounds are separate samples, with the ratio of
      GSPO (arXiv:2507.18071).
    """
    checks.check_non_negative("gspo_turns", eps_low=eps_low, eps_high=eps_high)
    checks.check_integer("gspo_turns", turn_ids=turn_ids)
    checks.check_same_shape("gspo_turns", mask=mask, turn_ids=turn_ids)
    x = _inputs.prepare("gspo_turns", logp, old_logp, advantages, mask)
    known = mask & (turn_ids >= 0)
    labels = segments.dense_labels((turn_ids,), known)
    length = segments.over_label(known.astype(jnp.float32), labels)
    log_s = segments.over_label(x.log_ratio, labels) / jnp.maximum(length, 1.0)
    ratio = jnp.exp(_capped(jax.lax.stop_gradient(log_s) + _zero(x.logp)))
    loss = _inputs.clipped_loss(ratio, x.advantages, eps_low, eps_high)
    loss = _inputs.dual_clipped("gspo_turns", loss, x.advantages, dual_clip)
    return x.finish(masking.zero_masked(loss, known))


@traits(policy_gradient=False, level="sequence", reads_sequence=True, clip="ratio")
def luspo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 2e-3,
    eps_high: float = 2.5e-3,
) -> Array:
    """GSPO times the length of the sequence, which removes the smaller step for long answers.

        loss[t] = length * max(-A s, -A clip(s, 1 - eps_low, 1 + eps_high))  the same at every token

    Under ``aggregate.sequence_mean`` each token has the unclipped gradient ``-A s`` at any length:
    at s = 1 the gradient of :func:`reinforce` under ``aggregate.sequence_sum``. If all sequences
    have the same length it is :func:`gspo` times that length.

    Args:
      logp, old_logp, mask, eps_low, eps_high: See the package.
      advantages: See the module.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([[-1.0, -2.0, 0.0, 0.0]]), jnp.array([[True, True, False, False]])
      >>> jr.surrogates.luspo(logp, None, jnp.ones(1), mask).tolist()
      [[-2.0, -2.0, 0.0, 0.0]]

    References:
      LUSPO (arXiv:2602.05261); the epsilons are those that TRL lists for the paper.
    """
    _inputs.check_sequence_advantages("luspo", logp, advantages)
    checks.check_non_negative("luspo", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("luspo", logp, old_logp, advantages, mask)
    loss = _inputs.clipped_loss(_ratio(x), x.advantages, eps_low, eps_high)
    return x.finish(masking.lengths(mask)[..., None] * loss)


@traits(level="sequence", reads_sequence=True)
def sapo_sequence(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Array:
    """The sigmoid gate of :func:`sapo` on one ratio per sequence.

        tau = tau_pos if A > 0 else tau_neg
        loss[t] = -A (4 / tau) sigmoid(tau (s - 1))                the same at every token

    At s = 1 it has the gradient of :func:`gspo`. For a sequence of one token it is :func:`sapo`.

    Args:
      logp, old_logp, mask: See the package.
      advantages: See the module.
      tau_pos: Sharpness of the gate where the advantage is positive, above 0 and finite.
      tau_neg: Sharpness elsewhere, above 0 and finite.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked. At s = 1 it is ``-2 A / tau``, not ``-A``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([2.0, 1.125])), jnp.ones(2, bool)  # their ratio: 1.5
      >>> loss = lambda x: jr.surrogates.sapo_sequence(x, jnp.zeros(2), jnp.array(1.0), mask).mean()
      >>> [round(x, 4) for x in [float(loss(logp)), *jax.grad(loss)(logp).tolist()]]
      [-2.4898, -0.705, -0.705]

    References:
      Soft Adaptive Policy Optimization (arXiv:2511.20347) at the sequence level that TRL offers for
      it (``importance_sampling_level="sequence"``).
    """
    _inputs.check_sequence_advantages("sapo_sequence", logp, advantages, " Use sapo for those.")
    checks.check_positive("sapo_sequence", finite=True, tau_pos=tau_pos, tau_neg=tau_neg)
    x = _inputs.prepare("sapo_sequence", logp, old_logp, advantages, mask)
    return x.finish(_inputs.gated_loss(_ratio(x), x.advantages, tau_pos, tau_neg))


def _ratio(x: _inputs.Inputs) -> Array:
    """The ratio of each sequence, ``[..., 1]``."""
    return jnp.exp(_capped(_mean(x.log_ratio, x.mask)))[..., None]


def _mean(log_ratio: Array, mask: Array) -> Array:
    """Mean over each sequence, 0 for an empty one."""
    return masking.row_sum(log_ratio) / jnp.maximum(masking.lengths(mask), 1.0)


def _zero(logp: Array) -> Array:
    """0 in value, with the gradient of logp; constant at -inf, whose difference would be NaN."""
    logp = jnp.where(logp == -jnp.inf, 0.0, logp)
    return logp - jax.lax.stop_gradient(logp)


def _capped(log_s: Array) -> Array:
    return jnp.minimum(log_s, _LOG_CAP)


@traits(level="sequence", reads_sequence=True, clip="log_ratio")
def gmpo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 0.4,
    eps_high: float = 0.4,
) -> Array:
    """The geometric mean of the token ratios, each clipped separately in log space.

        d[t] = logp[t] - old_logp[t],  c[t] = clip(d[t], -eps_low, eps_high)
        z[t] = min(d[t], c[t]) if A > 0,  max(d[t], c[t]) if A < 0
        loss[t] = -A exp(sum_t mask[t] z[t] / length)                 the same at every token

    The bounds apply to the log ratio: 0.4 allows ratios from 0.67 to 1.49. Clipping stops the
    gradient of that token only, while :func:`gspo` clips the full sequence; without bounds the two
    are equal. Unclipped, each token has the gradient ``-A q / length`` under
    ``aggregate.sequence_mean``, where q is the geometric mean.

    Args:
      logp, old_logp, mask: See the package.
      advantages: See the module.
      eps_low: The log ratio is clipped below at ``-eps_low``, in nats; not negative.
      eps_high: The log ratio is clipped above at ``eps_high``, in nats; not negative.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([0.6, -0.1, 0.2]), jnp.ones(3, bool)
      >>> jr.surrogates.gmpo(logp, jnp.zeros(3), jnp.array(1.0), mask).round(4)
      Array([-1.1814, -1.1814, -1.1814], dtype=float32)

    References:
      Zhao et al., GMPO (arXiv:2507.20673). As in verl (``geo_mean``) and TRL, only the clip bounds
      the mean, so a log ratio far above 0 counts fully where A < 0. verl also divides by all rows.
      Exactly on a bound the gradient is the unclipped one.
    """
    _inputs.check_sequence_advantages("gmpo", logp, advantages)
    checks.check_non_negative("gmpo", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("gmpo", logp, old_logp, advantages, mask)
    clipped = _inputs.pessimistic(x.log_ratio, x.advantages, -eps_low, eps_high)
    # Nothing would bound the mean of a sequence whose advantage is 0, and 0 times infinity is NaN.
    clipped = jnp.where(x.advantages == 0, 0.0, clipped)
    return x.finish(-x.advantages * jnp.exp(_mean(clipped, mask))[..., None])


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
    """Sequence weights that increase with the ratio and decay where it is large.

        W = exp(clip(sum over the sequence of logp - behavior_logp, log 1e-8, 20))
        phi[t] = W^k exp(lambda (1 - W))
        k, lambda = k_pos, lambda_pos where A[t] >= 0, else k_neg, lambda_neg

    phi is 1 at W = 1 and largest at W = k / lambda. Unlike a product of ratios it needs neither a
    cap nor a length normalization.

    Args:
      logp, mask: See the package.
      behavior_logp: ``[..., T]`` under the policy that sampled the tokens.
      advantages: ``[..., T]``, or ``[...]`` for one value per sequence.
      k_pos, lambda_pos, k_neg, lambda_neg: See the module.

    Returns:
      Weights ``[..., T]``, float32, 0 where masked; no gradient flows through them.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([[0.5], [2.0]])), jnp.ones((2, 1), bool)
      >>> phi = jr.surrogates.vespo_weights(logp, jnp.zeros((2, 1)), jnp.array([1.0, -1.0]), mask)
      >>> phi[:, 0].round(4)
      Array([1.1204, 1.0827], dtype=float32)

    References:
      VESPO (arXiv:2602.10693), through TRL's ``get_gamma_weights``, CODE reading. TRL clamps each
      token's log ratio to +-20 before the sum; here, as elsewhere in the package, only the sum is
      clamped.
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


@traits(reads_sequence=True)
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
    """Policy gradient with a soft sequence weight in place of a clip.

        loss[t] = -phi[t] * A[t] * logp[t]        phi of :func:`vespo_weights`

    The ratio is between the policy being trained and the policy that sampled, so it corrects both
    sampler mismatch and stale data; add no other correction. On policy it is :func:`reinforce`.

    Args:
      logp, mask: See the package.
      old_logp: ``[..., T]`` under the proximal policy, for ``behavior_logp=None``; None for the
        trained policy.
      advantages: ``[..., T]``, or ``[...]`` for one value per sequence.
      behavior_logp: ``[..., T]`` under the policy that sampled the tokens; None for ``old_logp``.
      k_pos, lambda_pos, k_neg, lambda_neg: See the module.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([-1.0, -2.0]), jnp.ones(2, bool)
      >>> jr.surrogates.vespo(logp, logp, jnp.array(1.0), mask)
      Array([1., 2.], dtype=float32)

    References:
      VESPO (arXiv:2602.10693), through TRL's loss type of that name, CODE reading. TRL averages it
      over tokens.
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
    return x.finish(masking.product(-phi * x.advantages, x.logp))
