"""DRPO: right answers against wrong ones, with a length preference only among right answers.

The method is DRPO (arXiv:2510.04474). ``length``, the maximum number of tokens of a response, and
``lam``, the temperature of the shares, are above 0: the smaller ``lam``, the larger the share of
the shortest answer. Other shared arguments, TypeError and ValueError: see
:mod:`jaxrl_llm.surrogates`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, kl, masking, traits
from jaxrl_llm.surrogates import _inputs


def length_softmax_weights(
    lengths: Array, where: Array, *, length: float, lam: float = 0.1
) -> Array:
    """Shares of the right answers of a group; shorter answers have larger shares.

        w_i = exp((1 - lengths_i / length) / lam) / sum_j exp((1 - lengths_j / length) / lam)

    The sums are over the entries of ``where``. Equal lengths, or an infinite ``lam``, give equal
    shares.

    Args:
      lengths: ``[..., G]``, tokens of each rollout, floating point.
      where: bool ``[..., G]``, True for the rollouts to include, usually the right ones.
      length, lam: See the module.

    Returns:
      ``[..., G]`` float32, 0 outside ``where``; they add up to 1 over a group, or to 0 for an empty
      ``where``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> lengths, right = jnp.array([2.0, 4.0, 1.0]), jnp.array([True, True, False])
      >>> jr.surrogates.length_softmax_weights(lengths, right, length=8).round(3).tolist()
      [0.924..., 0.076..., 0.0]

    References:
      DRPO (arXiv:2510.04474).
    """
    name = "length_softmax_weights"
    checks.check_min_rank(name, 1, lengths=lengths)
    checks.check_float(name, lengths=lengths)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, lengths=lengths, where=where)
    checks.check_positive(name, length=length, lam=lam)
    logits = -masking.zero_masked(lengths, where) / (length * lam)
    greatest = jnp.max(logits, axis=-1, keepdims=True, where=where, initial=-jnp.inf)
    # What does not share is cut before the exponential, which could overflow there.
    logits = jnp.where(where, logits - jnp.where(jnp.isfinite(greatest), greatest, 0.0), 0.0)
    shares = masking.zero_masked(jnp.exp(logits), where)
    total = jnp.sum(shares, axis=-1, keepdims=True)
    return shares / jnp.where(total > 0, total, 1.0)


@traits(takes_correction=False, policy_gradient=False, level="sequence", reads_sequence=True)
def drpo_len(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    length: float,
    lam: float = 0.1,
    tau: float = 10.0,
) -> Array:
    """Raises right answers, lowers wrong ones, and never lowers a right answer for its length.

        s_i = mean over tokens of logp_i
        J = sum_{i right} w_i s_i - tau log(mean_{j wrong} exp(s_j / tau))
        loss[i, t] = -J of the group                        at every token of the group

    ``w`` are the shares of :func:`length_softmax_weights`. A long right answer is raised less but
    never lowered; a length reward with a group baseline could lower it. Probable wrong answers are
    lowered most; an infinite ``tau`` lowers all wrong answers equally. The coefficients of the
    right answers add up to 1, those of the wrong answers to -1. A group without both kinds has J =
    0 and counts in the mean.

    An answer is right if its advantage is above 0 and wrong if it is below; at 0, or without
    tokens, it is neither. :func:`jaxrl_llm.advantages.dr_grpo` of a 0-1 reward gives such
    advantages, as does any baseline between the two rewards. Under ``aggregate.group_mean`` the
    loss is the mean of -J over the groups; ``aggregate.sequence_mean`` is equivalent where all
    groups have equally many answers. The objective is defined on samples of the old policy;
    :func:`kl_from_old` keeps the new policy near it.

    Args:
      logp, old_logp, mask: See the package; here ``[..., G, T]``. J has no ratio, so ``old_logp``
        is checked and not used.
      length, lam: See the module.
      advantages: ``[..., G]``, one value per sequence, of which the sign counts.
      tau: Temperature of the wrong answers, above 0, in nats per token.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-0.5, -0.5], [-0.25, -0.25], [-0.75, -0.75]])
      >>> mask, advantages = jnp.ones((3, 2), bool), jnp.array([1.0, 1.0, -1.0])
      >>> loss = jr.surrogates.drpo_len(logp, None, advantages, mask, length=8)
      >>> loss[:, 0].tolist()  # -(mean(-0.5, -0.25) + 0.75)
      [-0.375, -0.375, -0.375]

    References:
      DRPO (arXiv:2510.04474). The authors' code has the same gradient but another value: it
      replaces the logarithm by a sum divided by its detached value. It takes ``length`` from the
      padding.
    """
    checks.check_min_rank("drpo_len", 2, logp=logp)
    hint = " It depends on whether an answer is right, not a token."
    _inputs.check_sequence_advantages("drpo_len", logp, advantages, hint)
    checks.check_positive("drpo_len", length=length, lam=lam, tau=tau)
    x = _inputs.prepare("drpo_len", logp, old_logp, advantages, mask)
    lengths = masking.lengths(mask)
    score = masking.row_sum(x.logp) / jnp.maximum(lengths, 1.0)
    # Of sequences, as they came: spread over tokens they would cost as much as all the rest.
    sides = jax.lax.stop_gradient(masking.zero_masked(advantages, lengths > 0))
    right, wrong = sides > 0, sides < 0
    shares = length_softmax_weights(lengths, right, length=length, lam=lam)
    raised = jnp.sum(masking.product(shares, score), axis=-1, keepdims=True)
    lowered = _tempered_mean(score, wrong, tau)
    both = jnp.any(right, axis=-1, keepdims=True) & jnp.any(wrong, axis=-1, keepdims=True)
    objective = jnp.where(both, raised - lowered, 0.0)
    # A NaN advantage has no side and must reach the loss.
    unknown = jnp.any(jnp.isnan(sides), axis=-1, keepdims=True)
    objective = jnp.where(unknown, jnp.nan, objective)
    return x.finish(-jnp.broadcast_to(objective[..., None], jnp.shape(mask)))


def kl_from_old(
    logp: Array, old_logp: Array, mask: Array, *, coef: float | Array = 1.0, estimator: str = "k1"
) -> Array:
    """A penalty for divergence from the sampling policy, in the direction KL(old || policy).

        d = logp - old_logp
        estimator="k1":  loss[t] = -coef * d[t]
        estimator="k3":  loss[t] = coef * (exp(d[t]) - 1 - d[t])

    Averaged over tokens of the old policy, both are unbiased estimates of the divergence, and their
    gradients of its gradient. "k1" raises every sampled token equally; "k3" has less variance, is
    never negative, and has no gradient where the policies agree.

    Args:
      logp, old_logp, mask: See the package; ``old_logp`` is not None.
      coef: Penalty per nat of divergence, not negative, a constant: a number, or an array that
        broadcasts with ``logp``, such as the value of :func:`kl_barrier`.
      estimator: "k1" or "k3".

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked. Inside k3 the difference is clamped to +-20.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -2.0])
      >>> jr.surrogates.kl_from_old(logp, old_logp, jnp.ones(2, bool), coef=2.0).tolist()
      [-1.0, -0.0]

    References:
      DRPO (arXiv:2510.04474), where the term is averaged over all tokens: in a Recipe, by the
      coefficient of :func:`drpo_kl_coef`. For the other direction see
      :func:`jaxrl_llm.regularizers.kl_to_reference`.
    """
    checks.check_option("kl_from_old", "estimator", estimator, ("k1", "k3"))
    checks.check_non_negative("kl_from_old", coef=coef)
    difference = _inputs.log_ratio("kl_from_old", logp, old_logp, mask)
    if estimator == "k3":
        bound = masking.LOG_RATIO_CLAMP
        difference = jnp.clip(difference, -bound, bound)
    coef = jax.lax.stop_gradient(jnp.asarray(coef, jnp.float32))
    return masking.zero_masked(masking.product(coef, kl.estimate(-difference, estimator)), mask)


def kl_barrier(kl: Array, *, beta: float = 1e3, delta: float = 1e-4) -> Array:
    """Coefficient of a KL term: 0 up to a bound, then linear in the excess.

        coef = max(beta (kl - delta), 0)

    Multiplied by the divergence it is a squared hinge with one factor constant: the constraint ``kl
    <= delta`` as a penalty.

    Args:
      kl: Measured divergence, in nats per token, floating point, of any shape.
      beta: Increase of the coefficient per nat of excess, not negative.
      delta: Divergence without a penalty, in nats per token, not negative.

    Returns:
      float32 of the shape of ``kl``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.kl_barrier(jnp.array([0.0, 0.0011])).round(3).tolist()
      [0.0, 1.0]

    References:
      DRPO (arXiv:2510.04474), at every update from the divergence of its minibatch.
    """
    checks.check_float("kl_barrier", kl=kl)
    checks.check_non_negative("kl_barrier", beta=beta, delta=delta)
    return jnp.maximum(beta * (jnp.asarray(kl, jnp.float32) - delta), 0.0)


def drpo_kl_coef(
    logp: Array,
    old_logp: Array,
    mask: Array,
    *,
    beta: float = 1e3,
    delta: float = 1e-4,
    estimator: str = "k1",
) -> Array:
    """DRPO's coefficient of :func:`kl_from_old`, computed at every optimizer step from its rows.

        kl = mean over all tokens of the estimate
        coef_i = kl_barrier(kl) groups members_i tokens_i / all tokens

    The second factor turns the weighting of ``aggregate.group_mean`` into a mean over tokens;
    ``members`` is the number of responses in the group of i. At the first step kl is 0, and so is
    the coefficient.

    Args:
      logp, old_logp, mask: See the package; here ``[P, G, T]``.
      beta: As in :func:`kl_barrier`.
      delta: As in :func:`kl_barrier`.
      estimator: As in :func:`kl_from_old`.

    Returns:
      ``[P, G, 1]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = -jnp.ones((1, 2, 2)), jnp.array([[[True, True], [True, False]]])
      >>> jr.surrogates.drpo_kl_coef(old_logp - 0.0011, old_logp, mask)[0, :, 0].round(3).tolist()
      [1.33..., 0.66...]

    References:
      DRPO (arXiv:2510.04474), and the authors' code.
    """
    checks.check_rank("drpo_kl_coef", 3, logp=logp, old_logp=old_logp, mask=mask)
    each = kl_from_old(logp, old_logp, mask, estimator=estimator)
    lengths = masking.lengths(mask)
    total = jnp.maximum(jnp.sum(lengths), 1.0)
    members = jnp.sum(lengths > 0, axis=-1, keepdims=True)
    groups = jnp.sum(members > 0)
    coef = kl_barrier(jnp.sum(each) / total, beta=beta, delta=delta)
    return (coef * groups * members * lengths / total)[..., None]


def _tempered_mean(x: Array, where: Array, tau) -> Array:
    """``tau log(mean(exp(x / tau)))`` over the entries of ``where``, their mean if tau is infinite.

    Along the last axis, which stays; 0 for no entries.
    """
    finite = jnp.isfinite(tau)
    tau = jnp.where(finite, tau, 1.0)
    mean = masking.masked_mean(x, where, axis=-1, keepdims=True)
    # An entry of -inf is no center for the others; where all are, their mean is the result.
    possible = where & (x != -jnp.inf)
    some = jnp.any(possible, axis=-1, keepdims=True)
    center = jnp.where(some, masking.masked_mean(x, possible, axis=-1, keepdims=True), mean)
    away = masking.zero_masked(x - center, where & some) / tau
    close = jnp.max(jnp.abs(away), axis=-1, keepdims=True, initial=0.0) < 1.0
    # The logarithm of a mean near 1 would lose the digits that a large tau magnifies.
    flat = masking.masked_mean(jnp.expm1(jnp.where(close, away, 0.0)), where, -1, keepdims=True)
    beyond = jnp.where(close, jnp.log1p(flat), log_mean_exp(away, where))
    return jnp.where(finite, center + tau * beyond, mean)


def log_mean_exp(x: Array, where: Array) -> Array:
    """``log(mean(exp(x)))`` over the entries of ``where`` along the last axis; 0 for no entries."""
    some = jnp.any(where, axis=-1, keepdims=True)
    count = jnp.sum(where, axis=-1, keepdims=True, dtype=jnp.float32)
    # All entries stand in for none: the logarithm of an empty sum has no gradient.
    total = jax.nn.logsumexp(x, axis=-1, keepdims=True, where=where | ~some)
    return jnp.where(some, total - jnp.log(jnp.maximum(count, 1.0)), 0.0)
