"""Log-likelihood times a constant weight: REINFORCE, DFT, CISPO, DISPO, TOPR, MinPRO, DPPO.

- ``w_min``: Smallest weight, not negative and not above ``w_max``. 0 means no lower bound.
- ``w_max``: Largest weight, above 0. It is absolute, not an epsilon: see :func:`cispo_bounds`.
- ``cap_one``: Whether to cap the prefix ratio at 1, so that it can only reduce a weight.

Other shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`. The papers pair
these losses with ``aggregate.token_mean``.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.core.scans import minimum_before
from jaxrl_llm.surrogates import _inputs


@traits(has_ratio=False)
def reinforce(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    weight: Array | None = None,
) -> Array:
    """The plain policy gradient: minus the advantage times the log-probability.

        loss[t] = -weight[t] * A[t] * logp[t]          (weight 1 by default)

    With ``aggregate.sequence_sum`` this is the gradient of the expected return (REINFORCE). With an
    importance weight it is the off-policy form that retains a gradient at every token.

    Args:
      logp, old_logp, advantages, mask, weight: See the package. There is no ratio; ``old_logp`` is
        checked and not used: every surrogate receives it.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.ones(2, bool)
      >>> jr.surrogates.reinforce(jnp.array([-1.0, -2.0]), None, jnp.array([2.0, -1.0]), mask)
      Array([ 2., -2.], dtype=float32)

    References:
      Williams, Simple statistical gradient-following algorithms (Machine Learning 8, 1992). The
      value of this loss does not measure progress; TRL's form ``-A * exp(logp -
      stop_gradient(logp))`` has the same gradient and the value ``-A``. verl averages with whatever
      aggregation is configured.
    """
    x = _inputs.prepare("reinforce", logp, old_logp, advantages, mask, weight)
    return x.finish(masking.product(-x.advantages, x.logp))


@traits(takes_correction=False, policy_gradient=False, has_ratio=False)
def dft(logp: Array, old_logp: Array | None, advantages: Array, mask: Array) -> Array:
    """The likelihood of data, in which a token counts by its probability: dynamic fine-tuning.

        loss[t] = -stop_gradient(exp(logp[t])) * A[t] * logp[t]

    The gradient is that of ``-A * exp(logp)``, so improbable tokens, which dominate that of the
    likelihood, hardly move the policy. The advantages of demonstrations are 1.

    Args:
      logp, old_logp, advantages, mask: See the package. There is no ratio; ``old_logp`` is checked
        and not used: every surrogate receives it.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([0.5, 0.25])), jnp.ones(2, bool)
      >>> loss = lambda logp: jr.surrogates.dft(logp, None, jnp.ones(2), mask).sum()
      >>> jax.grad(loss)(logp).round(3).tolist()
      [-0.5, -0.25]

    References:
      Wu et al., On the Generalization of SFT (arXiv:2508.05629), as TRL 1.16 (``loss_type="dft"``)
      and ms-swift 4.6 (``enable_dft_loss``) compute it. :func:`otr_exact` with ``beta=0`` and
      ``tau=1`` is the same loss from the logits of all tokens.
    """
    x = _inputs.prepare("dft", logp, old_logp, advantages, mask)
    weight = jax.lax.stop_gradient(jnp.exp(x.logp))
    return x.finish(masking.product(-weight * x.advantages, x.logp))


def cispo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    w_min: float = 0.0,
    w_max: float = 5.0,
) -> Array:
    """Clipped importance weights: the update is bounded, but every token has a gradient.

        w[t] = stop_gradient(clip(r[t], w_min, w_max))
        loss[t] = -w[t] * A[t] * logp[t]

    Without bounds (``w_max=inf``) the gradient is that of ``-A * r``; with both bounds 1 the loss
    is :func:`reinforce`.

    Args:
      logp, old_logp, advantages, mask: See the package.
      w_min, w_max: See the module.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.full(1, -3.0), jnp.ones(1, bool)
      >>> loss = lambda logp: jr.surrogates.cispo(logp, old_logp, jnp.ones(1), mask).sum()
      >>> print(jax.grad(loss)(old_logp + jnp.log(8.0)))  # the ratio 8 counts as 5, not as 0
      [-5.]

    References:
      MiniMax-M1 (arXiv:2506.13585). The default cap of 5 is that of ScaleRL and TRL, which read
      ``epsilon_high`` as an absolute cap without a lower bound; verl reads it as ``1 + eps_high``.
    """
    checks.check_non_negative("cispo", w_min=w_min)
    checks.check_positive("cispo", w_max=w_max)
    _inputs.check_order("cispo", w_min=w_min, w_max=w_max)
    x = _inputs.prepare("cispo", logp, old_logp, advantages, mask)
    weight = jax.lax.stop_gradient(jnp.clip(x.ratio, w_min, w_max))
    return x.finish(masking.product(-weight * x.advantages, x.logp))


def cispo_bounds(*, eps_low: float, eps_high: float) -> dict[str, float]:
    """Weight bounds of :func:`cispo` from the epsilons that some trainers use.

        w_min = max(1 - eps_low, 0)        w_max = 1 + eps_high

    Args:
      eps_low: Distance of the lower bound from 1, not negative; 1 or more means no lower bound.
      eps_high: Distance of the upper bound from 1, not negative.

    Returns:
      The options ``w_min`` and ``w_max`` of :func:`cispo`.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.bind(jr.surrogates.cispo, **jr.surrogates.cispo_bounds(eps_low=1.0, eps_high=0.5))
      cispo(w_max=1.5, w_min=0.0)

    References:
      The convention of verl (``1 - clip_ratio_low``, ``1 + clip_ratio_high``), 0.2 both by default.
      MiniMax-M1 (arXiv:2506.13585) tunes the upper one only, which is ``eps_low=1``.
    """
    checks.check_non_negative("cispo_bounds", eps_low=eps_low, eps_high=eps_high)
    return {"w_min": max(1.0 - eps_low, 0.0), "w_max": 1.0 + eps_high}


def dispo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    eps_pos: tuple[float, float] = (0.2, 10.0),
    eps_neg: tuple[float, float] = (1.0, 100.0),
) -> Array:
    """Clipped importance weights with separate bounds for positive and negative advantages.

        (low, high) = eps_pos if A[t] > 0 else eps_neg
        w[t] = stop_gradient(clip(r[t], 1 - low, 1 + high))
        loss[t] = -w[t] * A[t] * logp[t]

    The upper bounds limit the weight of tokens that became likelier, good or bad; the lower bounds
    set the least weight of tokens that became less likely. With the same bounds for both signs it
    is :func:`cispo`.

    Args:
      logp, old_logp, advantages, mask: See the package.
      eps_pos: Distances of the lower and of the upper bound from 1 where the advantage is positive,
        a pair, not negative.
      eps_neg: The same elsewhere. A lower distance of 1 or more means no lower bound.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, advantages = jnp.ones(3, bool), jnp.array([1.0, 1.0, -1.0])
      >>> loss = lambda x: jr.surrogates.dispo(x, jnp.zeros(3), advantages, mask).sum()
      >>> print(jax.grad(loss)(jnp.log(jnp.array([20.0, 0.5, 200.0]))))
      [-11.   -0.8 101. ]

    References:
      DISPO (arXiv:2602.00983), PAPER reading; the defaults are the paper's. Ratios are clamped to
      e^+-20 before the bounds.
    """
    bounds = [*_pair("eps_pos", eps_pos), *_pair("eps_neg", eps_neg)]
    x = _inputs.prepare("dispo", logp, old_logp, advantages, mask)
    low_pos, high_pos, low_neg, high_neg = bounds
    positive = x.advantages > 0
    low = jnp.maximum(1.0 - jnp.where(positive, low_pos, low_neg), 0.0)
    high = 1.0 + jnp.where(positive, high_pos, high_neg)
    weight = jax.lax.stop_gradient(jnp.clip(x.ratio, low, high))
    return x.finish(masking.product(-weight * x.advantages, x.logp))


def _pair(name: str, pair):
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"dispo: {name} must be a pair (eps_low, eps_high); got {pair!r}.")
    low, high = pair
    checks.check_non_negative("dispo", **{f"{name}[0]": low, f"{name}[1]": high})
    return low, high


@traits(reads_sequence=True)
def topr(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    level: Literal["sequence", "token"] = "sequence",
) -> Array:
    """Off-policy policy gradient in which what the policy has unlearned fades out.

        w[t] = 1                                      where A[t] > 0
        w[t] = stop_gradient(min(R, 1)) elsewhere,    R = prod over unmasked t of r[t], or r[t]
        loss[t] = -w[t] * A[t] * logp[t]

    Good responses are imitated, however unlikely they have become; bad ones lose their weight as
    they become less likely, so their probability is not driven to 0. With ``level="token"`` it is
    :func:`dispo` with ``eps_pos=(0, 0)`` and ``eps_neg=(1, 0)``.

    Args:
      logp, old_logp, advantages, mask: See the package; the old policy is the one that sampled.
      level: Whether R is the ratio of the "sequence" or of the "token".

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.zeros((2, 2)), jnp.ones((2, 2), bool)
      >>> logp, advantages = old_logp + jnp.log(0.5), jnp.array([1.0, -1.0])
      >>> loss = lambda x: jr.surrogates.topr(x, old_logp, advantages, mask).sum()
      >>> jax.grad(loss)(logp).round(3).tolist()
      [[-1.0, -1.0], [0.25, 0.25]]

    References:
      Le Roux et al., Tapered Off-Policy REINFORCE (arXiv:2503.14286), NOTES reading: its equation
      as ROLL quotes it. ROLL computes it with ``level="token"``, and the sign of the score in
      place of that of the advantage.
    """
    checks.check_option("topr", "level", level, ("sequence", "token"))
    x = _inputs.prepare("topr", logp, old_logp, advantages, mask)
    log_ratio = jax.lax.stop_gradient(x.log_ratio)
    if level == "sequence":
        log_ratio = jnp.sum(log_ratio, axis=-1, keepdims=True)
    weight = jnp.where(x.advantages > 0, 1.0, jnp.exp(jnp.minimum(log_ratio, 0.0)))
    return x.finish(masking.product(-weight * x.advantages, x.logp))


def min_prefix_ratio(
    logp: Array, old_logp: Array | None, mask: Array, *, cap_one: bool = False
) -> Array:
    """Smallest ratio among the unmasked tokens before each token; 1 for the first token.

        m[t] = min over unmasked i < t of exp(logp[i] - old_logp[i])

    It replaces the product of those ratios, which is the exact correction for a different sampler
    but explodes or vanishes with the length of the prefix.

    Args:
      logp, old_logp, mask: See the package. Masked tokens (the output of a tool) change nothing.
      cap_one: See the module.

    Returns:
      ``[..., T]`` float32, clamped to e^+-20; 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([2.0, 0.5, 1.2])), jnp.ones(3, bool)
      >>> print(jr.surrogates.min_prefix_ratio(logp, jnp.zeros(3), mask))
      [1.  2.  0.5]

    References:
      MinPRO (arXiv:2601.22718), NOTES reading. ``cap_one`` is ours.
    """
    difference = _inputs.log_ratio("min_prefix_ratio", logp, old_logp, mask)
    clamp = masking.LOG_RATIO_CLAMP
    least = _least_before(difference, mask, cap_one)
    return masking.zero_masked(jnp.exp(jnp.clip(least, -clamp, clamp)), mask)


@traits(reads_sequence=True)
def minpro(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    w_min: float = 0.0,
    w_max: float = 5.0,
    cap_one: bool = False,
) -> Array:
    """Off-policy policy gradient with the smallest prefix ratio in place of the prefix product.

        m[t] = min over unmasked i < t of r[i], 1 for the first token     (:func:`min_prefix_ratio`)
        w[t] = stop_gradient(clip(m[t] * r[t], w_min, w_max))
        loss[t] = -w[t] * A[t] * logp[t]

    On policy it is :func:`reinforce`, and for a sequence of one token :func:`cispo`. The running
    minimum is the largest cost: on CPUs about twenty times one pass over the arrays.

    Args:
      logp, old_logp, advantages, mask: See the package; the old policy is the one that sampled.
      w_min, w_max, cap_one: See the module.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([0.5, 1.2, 2.0])), jnp.ones(3, bool)
      >>> loss = lambda x: jr.surrogates.minpro(x, jnp.zeros(3), jnp.ones(3), mask).sum()
      >>> print(jax.grad(loss)(logp))
      [-0.5 -0.6 -1. ]

    References:
      MinPRO (arXiv:2601.22718), NOTES reading: the equation as quoted in a survey, which does not
      state the bounds; the defaults are those of :func:`cispo`, and ``cap_one`` is ours.
    """
    checks.check_non_negative("minpro", w_min=w_min)
    checks.check_positive("minpro", w_max=w_max)
    _inputs.check_order("minpro", w_min=w_min, w_max=w_max)
    x = _inputs.prepare("minpro", logp, old_logp, advantages, mask)
    log_ratio = jax.lax.stop_gradient(x.log_ratio)
    log_weight = log_ratio + _least_before(log_ratio, mask, cap_one)
    clamp = masking.LOG_RATIO_CLAMP
    weight = jnp.clip(jnp.exp(jnp.clip(log_weight, -clamp, clamp)), w_min, w_max)
    return x.finish(masking.product(-weight * x.advantages, x.logp))


def _least_before(log_ratio: Array, mask: Array, cap_one: bool) -> Array:
    """Exclusive running minimum of the unmasked log ratios; 0 before the first of them."""
    before = minimum_before(jnp.where(mask, log_ratio, jnp.inf))
    before = jnp.where(jnp.isposinf(before), 0.0, before)
    return jnp.minimum(before, 0.0) if cap_one else before


def dppo_tv(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    w_max: float = 20.0,
) -> Array:
    """Off-policy policy gradient without the tokens whose probability changed too much.

        keep[t] = p[t] - q[t] <= delta_high   where A[t] > 0,    p = exp(logp), q = exp(old_logp)
                  p[t] - q[t] >= -delta_low   elsewhere
        loss[t] = -stop_gradient(min(r[t], w_max)) * A[t] * logp[t]   where keep[t], else 0

    ``|p - q|`` is the total variation of "this token or another". Unlike a bound on the ratio it
    lets a rare token increase by a large factor and stops a likely token early. On policy it is
    :func:`reinforce`. A dropped token still counts in the denominator of the weighting.

    Args:
      logp, old_logp, advantages, mask: See the package; the old policy is the one that sampled.
      delta_low: Largest decrease of probability, in [0, 1], where the advantage is not positive.
      delta_high: Largest increase of probability, in [0, 1], where the advantage is positive.
      w_max: Upper bound of the ratio, above 0.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.log(jnp.array([0.01, 0.5, 0.5])), jnp.ones(3, bool)
      >>> loss = lambda x: jr.surrogates.dppo_tv(x, old_logp, jnp.ones(3), mask).sum()
      >>> jax.grad(loss)(jnp.log(jnp.array([0.04, 0.6, 0.7]))).round(1).tolist()
      [-4.0, -1.2..., 0.0]

    References:
      Rethinking the Trust Region in LLM Reinforcement Learning (arXiv:2602.04879), DPPO-Binary-TV,
      as verl 0.9 computes it (``dppo_tv``); the bounds are those of its example script. The mask of
      prime-rl's default loss is the same with bounds of 0.2; its gradient is that of ``-A r``
      without ``w_max``, and it adds a squared log ratio.
    """

    def allowed(x: _inputs.Inputs, old: Array) -> tuple[Array, Array]:
        change = jnp.exp(x.logp) - jnp.exp(old)
        return change <= delta_high, change >= -delta_low

    checks.check_non_negative("dppo_tv", delta_low=delta_low, delta_high=delta_high)
    return _dppo("dppo_tv", logp, old_logp, advantages, mask, w_max, allowed)


def dppo_kl(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    w_max: float = 20.0,
) -> Array:
    """:func:`dppo_tv` with a bound on the token's KL divergence in place of its probability.

        p = exp(logp[t]), q = exp(old_logp[t])
        D[t] = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
        keep[t] = D[t] <= delta_high or p <= q   where A[t] > 0
                  D[t] <= delta_low or p >= q    elsewhere
        loss[t] = -stop_gradient(min(r[t], w_max)) * A[t] * logp[t]   where keep[t], else 0

    D is the KL divergence of "this token or another". Tokens that move back toward the old policy
    are never dropped.

    Args:
      logp, old_logp, advantages, mask: See the package; the old policy is the one that sampled.
      delta_low: Largest divergence (nats) of a token that decreased, for advantages not above 0.
      delta_high: Largest divergence (nats) of a token that increased, for advantages above 0.
      w_max: Upper bound of the ratio, above 0.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.log(jnp.array([0.01, 0.5, 0.5])), jnp.ones(3, bool)
      >>> loss = lambda x: jr.surrogates.dppo_kl(x, old_logp, jnp.ones(3), mask).sum()
      >>> jax.grad(loss)(jnp.log(jnp.array([0.04, 0.6, 0.7]))).round(1).tolist()
      [-4.0, -1.2..., 0.0]

    References:
      Rethinking the Trust Region in LLM Reinforcement Learning (arXiv:2602.04879), DPPO-Binary-KL,
      as verl 0.9 computes it (``dppo_kl``), with 1e-8 added to 1 - p and 1 - q; the bounds are
      those of its example script. Log ratios are clamped to +-20 in D.
    """

    def allowed(x: _inputs.Inputs, old: Array) -> tuple[Array, Array]:
        # Rounding may leave a log-probability above 0.
        rest, old_rest = (-jnp.expm1(jnp.minimum(y, 0.0)) for y in (x.logp, old))
        clamp = masking.LOG_RATIO_CLAMP
        divergence = old_rest * jnp.log((old_rest + 1e-8) / (rest + 1e-8))
        divergence -= jnp.exp(old) * jnp.clip(x.log_ratio, -clamp, clamp)
        rise = (divergence <= delta_high) | (x.logp <= old)
        return rise, (divergence <= delta_low) | (x.logp >= old)

    checks.check_non_negative("dppo_kl", delta_low=delta_low, delta_high=delta_high)
    return _dppo("dppo_kl", logp, old_logp, advantages, mask, w_max, allowed)


def _dppo(function: str, logp, old_logp, advantages, mask, w_max, allowed) -> Array:
    """Weighted likelihood of tokens that may move on; ``allowed`` returns which may rise, fall."""
    checks.check_positive(function, w_max=w_max)
    x = _inputs.prepare(function, logp, old_logp, advantages, mask)
    old = x.logp if old_logp is None else masking.zero_masked(old_logp, mask)
    rise, fall = allowed(x, old)
    keep = jnp.where(x.advantages > 0, rise, fall)
    weight = jax.lax.stop_gradient(jnp.minimum(x.ratio, w_max))
    logp = jnp.where(keep, x.logp, 0.0)
    return x.finish(masking.product(-weight * x.advantages, logp))
