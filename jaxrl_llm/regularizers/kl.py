"""Estimates of KL(policy || reference) from sampled tokens, and penalties based on them.

The value and the gradient of an estimate can be biased independently: k1 and k3 have an unbiased
value and a biased gradient, k2 the reverse. Log ratios are clamped to +-20. The
estimates are those of Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html).

Shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.regularizers`. A ``coef`` is a
constant: a number, such as a controller's value, or an array with the axes of ``[..., T]``, each
full or 1, such as ``[P, 1, 1]`` for one a prompt.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks, kl, masking, prints_as_call
from jaxrl_llm.regularizers import _inputs


def k1(logp: Array, ref_logp: Array, mask: Array | None = None) -> Array:
    """The log ratio itself: unbiased, of either sign.

        k1[t] = d[t] = logp[t] - ref_logp[t]

    Its expected gradient is zero: as a loss it only adds noise. Use it in a reward.

    Args:
      logp, ref_logp, mask: See the package.

    Returns:
      ``[..., T]`` float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.k1(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0]))
      Array([ 0.5, -1. ], dtype=float32)

    References:
      Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html).
    """
    return _difference("k1", logp, ref_logp, mask)


def k2(logp: Array, ref_logp: Array, mask: Array | None = None) -> Array:
    """Half the squared log ratio: a biased value with the exact expected gradient.

        k2[t] = (logp[t] - ref_logp[t])^2 / 2

    Args:
      logp, ref_logp, mask: See the package.

    Returns:
      ``[..., T]`` float32, never negative, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.k2(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0]))
      Array([0.125, 0.5  ], dtype=float32)

    References:
      Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html).
    """
    return kl.k2(_difference("k2", logp, ref_logp, mask))


def k3(logp: Array, ref_logp: Array, mask: Array | None = None) -> Array:
    """The low-variance estimate: unbiased and never negative.

        k3[t] = exp(-d[t]) - 1 + d[t],   d = logp - ref_logp

    Its expected gradient is that of KL(reference || policy), the other direction.

    Args:
      logp, ref_logp, mask: See the package.

    Returns:
      ``[..., T]`` float32, never negative, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.k3(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])).round(4)
      Array([0.1065, 0.7183], dtype=float32)

    References:
      Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html).
    """
    return kl.k3(_difference("k3", logp, ref_logp, mask))


def kl_token(
    logp: Array,
    ref_logp: Array,
    mask: Array | None,
    *,
    estimator: str = "k3",
    cap: float | None = None,
) -> Array:
    """Estimate of the KL divergence from the reference at each token, by name.

        k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d      abs = |d|,   d = logp - ref_logp
        k1+, k3+, abs+ :  the value of k1, k3 or abs with the gradient of k2

    Where the policies agree, "abs" has gradient 0.

    Args:
      logp, ref_logp, mask: See the package.
      estimator: "k1", "k2", "k3", "abs", "k1+", "k3+" or "abs+".
      cap: Largest value of k3, above 0, with gradient 0 above it; None for no cap. Only for "k3"
        and "k3+"; the gradient of "k3+" is that of k2 with or without it.

    Returns:
      ``[..., T]`` float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> kl = lambda x: jr.regularizers.kl_token(x, jnp.array([-1.0]), None, estimator="k3+")[0]
      >>> value, gradient = jax.value_and_grad(kl)(jnp.array([-2.0]))
      >>> value.round(4), gradient
      (Array(0.7183, dtype=float32), Array([-1.], dtype=float32))

    References:
      Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html). verl clamps the
      difference only in k3 and caps its value at 10: ``cap=10.0`` here.
    """
    return checked_estimate("kl_token", logp, ref_logp, mask, estimator, cap)


def kl_to_reference(
    logp: Array,
    ref_logp: Array,
    mask: Array,
    *,
    estimator: str = "k3",
    coef: float | Array = 1e-3,
    cap: float | None = None,
) -> Array:
    """A penalty for divergence from the reference policy, added to the token loss.

        loss[t] = coef * kl_token(logp, ref_logp)[t]

    "k3" is the term of GRPO. For the exact gradient of KL(policy || reference) in expectation use
    "k2", "k1+" or "k3+" on policy, or :func:`kl_unbiased`.

    Args:
      logp, ref_logp, mask: See the package.
      coef: See the module.
      estimator: As in :func:`kl_token`. On policy the expected gradient of "k1" is zero.
      cap: Largest value of k3, as in :func:`kl_token`.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, ref_logp = jnp.array([[-1.0, -2.0], [-1.5, -1.0]])
      >>> jr.regularizers.kl_to_reference(
      ...     logp, ref_logp, jnp.array([True, False]), estimator="k2", coef=2.0)
      Array([0.25, 0.  ], dtype=float32)

    References:
      Shao et al., DeepSeekMath (arXiv:2402.03300), whose coefficient is 0.04; the recipes of
      released trainers mostly use 1e-3.
    """
    checks.check_non_negative("kl_to_reference", finite=True, coef=coef)
    checks.check_mask("kl_to_reference", mask)
    penalty = checked_estimate("kl_to_reference", logp, ref_logp, mask, estimator, cap)
    return _inputs.scaled(coef, penalty)


def kl_unbiased(
    logp: Array,
    old_logp: Array | None,
    ref_logp: Array,
    mask: Array,
    *,
    estimator: str = "k3",
    coef: float | Array = 1e-3,
    cap: float | None = None,
) -> Array:
    """A penalty for divergence from the reference, corrected for the policy that sampled.

        loss[t] = coef * r[t] * k[t],   r = exp(logp - stop_gradient(old_logp)), also differentiated
        cap:      loss[t] = coef * clip(r[t] * k[t], -cap, cap)

    The factor r makes the value unbiased for tokens sampled by the old policy, and on policy (r =
    1) it makes the expected gradient that of KL(policy || reference), for both k1 and k3. This does
    not hold for k2.

    Args:
      logp, ref_logp, mask: See the package; a ``coef`` of 1 gives the estimate itself.
      coef: See the module.
      old_logp: ``[..., T]`` under the policy that sampled; None for the policy being trained.
      estimator: "k1" or "k3".
      cap: Largest magnitude of ``r k``, above 0, with gradient 0 beyond it; None for no cap.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ref_logp, mask = jnp.array([-1.5]), jnp.array([True])
      >>> term = lambda x: jr.regularizers.kl_unbiased(x, None, ref_logp, mask, coef=1.0)[0]
      >>> jax.grad(term)(jnp.array([-1.0]))  # k3 + dk3/dlogp = d
      Array([0.5], dtype=float32)

    References:
      DeepSeek-V3.2 (arXiv:2512.02556). TRL has it as ``use_bias_correction_kl`` with k3. NeMo RL's
      ``use_on_policy_kl_approximation`` caps the product at 10: ``cap=10.0`` here.
    """
    checks.check_option("kl_unbiased", "estimator", estimator, ("k1", "k3"))
    checks.check_non_negative("kl_unbiased", finite=True, coef=coef)
    checks.check_mask("kl_unbiased", mask)
    old_logp = logp if old_logp is None else old_logp
    log_ratio = _difference("kl_unbiased", logp, old_logp, mask, name="old_logp")
    penalty = checked_estimate("kl_unbiased", logp, ref_logp, mask, estimator, None)
    penalty = jnp.exp(log_ratio) * penalty
    if cap is not None:
        checks.check_positive("kl_unbiased", finite=True, cap=cap)
        bound = jax.lax.stop_gradient(jnp.sign(penalty)) * cap
        penalty = jnp.where(jnp.abs(penalty) > cap, bound, penalty)
    return _inputs.scaled(coef, penalty)


def kl_gate(logp: Array, old_logp: Array, mask: Array, *, max_kl: float) -> Array:
    """Whether an optimizer step is made: not once the policy is too far from that of the batch.

        scale = 1[mean over tokens of exp(d) - 1 - d <= max_kl],   d = logp - old_logp

    For ``Computed("update_scale", bind(kl_gate, max_kl=0.02), "update")`` of a Recipe: the
    divergence is measured on the minibatch before its step, and a scale of 0 leaves parameters and
    optimizer unchanged. If a minibatch is the full batch, this is the early stopping of PPO, known
    as ``target_kl``: the policy stays where it is, so the steps that remain are not made either.
    Each of several minibatches has a divergence of its own, so a later one may be trained on.

    In a run whose rollouts come from older or rounded weights, ``old_logp`` is of these weights
    unless the recipe reads ``behavior_logp``. A batch that is too old is then left out; a bound
    below the divergence of the rounding leaves out every update (metric ``withheld``).

    Args:
      logp: ``[..., T]`` under the policy before the step.
      old_logp: ``[..., T]`` under the policy of the batch.
      mask: See the package.
      max_kl: The largest divergence that allows a step, in nats per token, above 0.

    Returns:
      float32 ``[]``, 1 or 0; 1 if everything is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.array([-1.0, -2.0]), jnp.array([True, True])
      >>> gate = jr.bind(jr.regularizers.kl_gate, max_kl=0.02)
      >>> float(gate(old_logp + 0.1, old_logp, mask)), float(gate(old_logp + 0.3, old_logp, mask))
      (1.0, 0.0)

    References:
      POAD (arXiv:2405.15821), whose released code leaves out an update above 0.02. Spinning Up,
      Stable-Baselines3 and CleanRL end the updates of a batch above their ``target_kl``, the first
      two above 1.5 times that number.
    """
    checks.check_positive("kl_gate", finite=True, max_kl=max_kl)
    checks.check_mask("kl_gate", mask)
    d = _difference("kl_gate", logp, old_logp, mask, name="old_logp")
    divergence = masking.masked_mean(kl.estimate(-d, "k3"), mask)
    return jnp.asarray(divergence <= max_kl, jnp.float32)


def _difference(function, logp, other, mask, *, name="ref_logp") -> Array:
    """``logp - stop_gradient(other)``, checked, clamped, 0 where masked."""
    _inputs.check_tokens(function, mask, **{"logp": logp, name: other})
    return masking.safe_log_ratio(
        logp, jax.lax.stop_gradient(other), mask, clamp=masking.LOG_RATIO_CLAMP
    )


def checked_estimate(function, logp, ref_logp, mask, estimator: str, cap: float | None) -> Array:
    """An estimate of the divergence, after the checks that all terms share."""
    checks.check_option(function, "estimator", estimator, (*kl.ESTIMATORS, *kl.STRAIGHT_THROUGH))
    checks.check_positive(function, finite=True, cap=cap)
    if cap is not None and not estimator.startswith("k3"):
        raise ValueError(
            f"{function}: cap bounds k3 and has no effect with estimator={estimator!r}."
        )
    return kl.estimate(_difference(function, logp, ref_logp, mask), estimator, cap=cap)


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
    """A penalty for divergence from the base policy and the last one, in shares that add up to 1.

        loss[t] = coef * (share * KL[t](policy || base) + (1 - share) * KL[t](policy || last))

    The base is ``ref_logp``, the last policy ``old_logp``. With a share of 1 it is
    :func:`kl_to_reference`. ReMix begins with a share of 1 and reduces it step by step
    (:func:`remix_lambda`).

    Args:
      logp, ref_logp, mask, estimator: See the package.
      coef: See the module.
      old_logp: ``[..., T]`` under the policy at the start of the update, a constant; None for the
        policy being trained, whose divergence is 0.
      share: Weight of the base, between 0 and 1, a constant: a number, or an array as ``coef``.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([-1.0]), jnp.array([True])
      >>> jr.regularizers.kl_convex(
      ...     logp, logp - 2.0, logp - 1.0, mask, share=0.75, coef=1.0, estimator="k2")
      Array([0.875], dtype=float32)

    References:
      ReMix (arXiv:2507.06892), PAPER reading. The estimator and coefficient were not in our
      reading; ours are those of :func:`kl_to_reference`.
    """
    checks.check_non_negative("kl_convex", finite=True, coef=coef)
    checks.check_share("kl_convex", share=share)
    checks.check_mask("kl_convex", mask)
    _inputs.check_tokens("kl_convex", mask, logp=logp, ref_logp=ref_logp)
    old_logp = logp if old_logp is None else old_logp
    _inputs.check_tokens("kl_convex", mask, logp=logp, old_logp=old_logp)
    base = checked_estimate("kl_convex", logp, ref_logp, mask, estimator, None)
    last = checked_estimate("kl_convex", logp, old_logp, mask, estimator, None)
    checks.check_coefficients("kl_convex", "the token loss", jnp.shape(mask), share=share)
    share = jax.lax.stop_gradient(jnp.asarray(share, jnp.float32))
    return _inputs.scaled(coef, share * base + (1.0 - share) * last)


def remix_lambda(step: int | Array) -> Array:
    """Share of the base policy in :func:`kl_convex` at each step, counted from 1.

        share = max(1 - 0.1 * ceil(max(step - 50, 0) / 10), 0.5)

    Args:
      step: ``[...]`` integers, number of the update.

    Returns:
      ``[...]`` float32, from 1 down to 0.5.

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
      step: ``[]`` int32, number of updates that have begun.
    """

    step: Array


@prints_as_call
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
