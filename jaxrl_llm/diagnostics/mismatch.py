"""Mismatch between the policy that sampled tokens and the policy that scores them.

- ``logp``: ``[..., T]`` log-probabilities (nats) under the policy that scores, the target of an
  estimate; ``behavior_logp``: of the same tokens under the policy that sampled them.
- ``mask``: bool ``[..., T]``, True = keep.
- Results are float32 scalars, 0 if everything is masked.
- A wrong dtype raises TypeError; shapes that differ, and an unknown option, raise ValueError.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, kl, masking


class Mismatch(NamedTuple):
    """Distance of two sets of log-probabilities, in nats per token, float32 scalars."""

    mean_abs: Array
    max_abs: Array
    kl: Array


def effective_sample_size(
    logp: Array,
    behavior_logp: Array,
    mask: Array,
    *,
    level: Literal["token", "sequence"] = "sequence",
) -> Array:
    """Effective share of the samples after importance weighting (Kish).

        (sum w)^2 / (n * sum w^2)
        level="sequence":  w = exp(sum over tokens of logp - behavior_logp), n non-empty sequences
        level="token":     w = exp(logp - behavior_logp), n unmasked tokens

    1 means that all weights are equal, 1 / n that one sample has all the weight. The weights are
    divided by the largest before they are squared, so long sequences do not overflow.

    Args:
      logp, behavior_logp, mask: See the module.
      level: Unit of a sample: "sequence" or "token".

    Returns:
      A share in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.log(jnp.array([[1.0], [2.0], [0.5], [4.0]]))
      >>> mask = jnp.ones((4, 1), bool)
      >>> share = jr.diagnostics.effective_sample_size(logp, jnp.zeros((4, 1)), mask)
      >>> round(float(share), 4)
      0.6618

    References:
      Kish, Survey Sampling (1965). verl reports 1 / mean((w / mean w)^2), which is the same number.
    """
    checks.check_option("effective_sample_size", "level", level, ("token", "sequence"))
    masking.check_tokens("effective_sample_size", mask, logp=logp, behavior_logp=behavior_logp)
    log_weight = masking.safe_log_ratio(logp, behavior_logp, mask)
    valid = mask
    if level == "sequence":
        log_weight, valid = jnp.sum(log_weight, axis=-1), jnp.any(mask, axis=-1)
    greatest = jnp.max(log_weight, where=valid, initial=-jnp.inf)
    greatest = jnp.where(jnp.isfinite(greatest), greatest, 0.0)
    weight = masking.zero_masked(jnp.exp(masking.zero_masked(log_weight - greatest, valid)), valid)
    count = jnp.sum(valid, dtype=jnp.float32)
    total, squares = jnp.sum(weight), jnp.sum(weight**2)
    return total**2 / jnp.maximum(count * squares, 1.0)


def mismatch(logp: Array, behavior_logp: Array, mask: Array) -> Mismatch:
    """Distance of the sampling policy from the scoring policy, with equal or older weights.

        mean |d|,  max |d|,  mean(-d)    d = logp - behavior_logp

    ``kl`` estimates KL(behavior || policy). A sampler of another precision is visible in
    ``mean_abs``; a single wrong token, or a truncation that is missing from the log-probability, in
    ``max_abs``.

    Args:
      logp, behavior_logp, mask: See the module.

    Returns:
      ``Mismatch(mean_abs, max_abs, kl)``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, behavior_logp = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
      >>> off = jr.diagnostics.mismatch(logp, behavior_logp, jnp.array([True, True]))
      >>> float(off.mean_abs), float(off.max_abs), float(off.kl)
      (0.75, 1.0, 0.25)

    References:
      ``kl`` is that of verl 0.9 (``rollout_corr_helper``); the other two are ours.
    """
    masking.check_tokens("mismatch", mask, logp=logp, behavior_logp=behavior_logp)
    d = masking.safe_log_ratio(logp, behavior_logp, mask)
    return Mismatch(
        mean_abs=masking.masked_mean(jnp.abs(d), mask),
        max_abs=jnp.max(jnp.abs(d), initial=0.0),
        kl=masking.masked_mean(-d, mask),
    )


class MismatchMetrics(NamedTuple):
    """Divergences of the policy from the sampler, float32 scalars; see ``mismatch_metrics``."""

    kl: Array
    k3: Array
    log_perplexity_gap: Array
    perplexity_ratio: Array
    chi2_token: Array
    chi2_sequence: Array
    ess_token: Array
    ess_sequence: Array


class WeightMetrics(NamedTuple):
    """Statistics of importance weights, float32 scalars; see ``weight_metrics``."""

    mean: Array
    std: Array
    least: Array
    greatest: Array
    ess: Array
    zeroed: Array


def mismatch_metrics(logp: Array, behavior_logp: Array, mask: Array) -> MismatchMetrics:
    """Divergences of the policy from the policy that sampled the tokens.

        d = logp - behavior_logp,   D = sum of d over a sequence,   m = mean of d over a sequence
        kl = mean(-d)        k3 = mean(exp(d) - 1 - d)              over unmasked tokens
        log_perplexity_gap = mean(-m)    perplexity_ratio = mean(exp(-m))    over sequences
        chi2_token = mean(exp(d)^2) - 1      chi2_sequence = mean(exp(D)^2) - 1
        ess_token, ess_sequence: effective share of the samples, each from 0 to 1

    kl and k3 estimate KL(behavior || policy). A perplexity ratio above 1 means that the sampler was
    more certain of its tokens than the policy is. chi2 is the variance of the weights, so 1 / (1 +
    chi2) is about the effective share. Ratios are capped at e^20.

    Args:
      logp, behavior_logp, mask: See the module.

    Returns:
      ``MismatchMetrics``; kl, k3 and the gap are nats per token. Without tokens the ratio is 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([[0.1, -0.3, 0.9, 0.0]]), jnp.ones((1, 4), bool)
      >>> off = jr.diagnostics.mismatch_metrics(logp, jnp.zeros((1, 4)), mask)
      >>> round(float(off.k3), 4), round(float(off.perplexity_ratio), 4)
      (0.1514, 0.8395)

    References:
      The metrics of verl 0.9 (``rollout_corr_helper``): kl, k3_kl, log_ppl_diff, ppl_ratio,
      chi2_token and chi2_seq, which also count empty sequences.
    """
    function = "mismatch_metrics"
    checks.check_min_rank(function, 1, mask=mask)
    masking.check_tokens(function, mask, logp=logp, behavior_logp=behavior_logp)
    raw = masking.safe_log_ratio(logp, behavior_logp, mask)
    d, total = _clamped(raw), _clamped(jnp.sum(raw, axis=-1))
    gap, valid = masking.masked_mean(-raw, mask, axis=-1), jnp.any(mask, axis=-1)

    def chi2(log_weight: Array, valid: Array) -> Array:
        # expm1, since the square of a weight near 1 minus 1 is lost to rounding.
        return masking.masked_mean(jnp.expm1(2.0 * log_weight), valid)

    some = jnp.any(mask)
    return MismatchMetrics(
        kl=masking.masked_mean(-raw, mask),
        k3=masking.masked_mean(kl.k3(-d), mask),
        log_perplexity_gap=masking.masked_mean(gap, valid),
        perplexity_ratio=jnp.where(some, masking.masked_mean(jnp.exp(_clamped(gap)), valid), 1.0),
        chi2_token=chi2(d, mask),
        chi2_sequence=chi2(total, valid),
        ess_token=effective_sample_size(logp, behavior_logp, mask, level="token"),
        ess_sequence=effective_sample_size(logp, behavior_logp, mask, level="sequence"),
    )


def weight_metrics(weights: Array, mask: Array) -> WeightMetrics:
    """Statistics of the weights of a correction, over the unmasked tokens.

        mean, std (dividing by n), least, greatest
        ess = (sum w)^2 / (n sum w^2) = 1 / mean((w / mean w)^2)
        zeroed = share of tokens with w = 0

    Args:
      mask: See the module.
      weights: ``[..., T]``, floating point, not negative, as a correction returns them.

    Returns:
      ``WeightMetrics``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> seen = jr.diagnostics.weight_metrics(jnp.array([1.0, 2.0, 0.0, 1.0]), jnp.ones(4, bool))
      >>> float(seen.mean), round(float(seen.ess), 4), float(seen.zeroed)
      (1.0, 0.6667, 0.25)

    References:
      verl 0.9's ``rollout_is_mean``, ``_std``, ``_min``, ``_max`` and ``_eff_sample_size``.
    """
    masking.check_tokens("weight_metrics", mask, weights=weights)
    weights, some = masking.zero_masked(weights, mask), jnp.any(mask)
    greatest = jnp.max(weights, initial=0.0)
    scaled = weights / jnp.where(greatest > 0, greatest, 1.0)
    squares = masking.masked_mean(scaled**2, mask)
    least = jnp.min(weights, where=mask, initial=jnp.inf)
    return WeightMetrics(
        mean=masking.masked_mean(weights, mask),
        std=masking.masked_std(weights, mask),
        least=jnp.where(some, least, 0.0),
        greatest=greatest,
        ess=masking.masked_mean(scaled, mask) ** 2 / jnp.where(squares > 0, squares, 1.0),
        zeroed=masking.masked_mean(weights == 0, mask),
    )


def _clamped(log_ratio: Array) -> Array:
    return jnp.clip(log_ratio, -masking.LOG_RATIO_CLAMP, masking.LOG_RATIO_CLAMP)


class RejectionMetrics(NamedTuple):
    """Shares rejected by each rule, in [0, 1], float32."""

    tokens: Array  # [R], of the unmasked tokens, by each rule alone
    sequences: Array  # [R], of the non-empty sequences, by each rule alone
    any_tokens: Array  # [], by at least one rule
    any_sequences: Array  # []


def rejection_metrics(
    old_logp: Array,
    behavior_logp: Array,
    mask: Array,
    *,
    rules: tuple[Callable, ...],
) -> RejectionMetrics:
    """The shares of tokens and sequences that each rule of a correction rejects.

        rejected[r, t] = mask[t] and not rules[r](old_logp, behavior_logp, mask)[t]
        tokens[r]      = mean over tokens of rejected[r]
        sequences[r]   = share of the sequences with a rejected token

    The rules are those of ``corrections.rollout_correction``, in its order.

    Args:
      behavior_logp, mask: See the module.
      old_logp: ``[..., T]`` log-probabilities (nats) under the proximal policy.
      rules: Functions ``(old_logp, behavior_logp, mask) -> keep [..., T]``, options bound.

    Returns:
      :class:`RejectionMetrics`.

    Raises:
      TypeError: If ``rules`` is not a tuple of functions that return bool arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rules = (jr.bind(jr.corrections.veto_mask, threshold=0.1),
      ...          jr.bind(jr.corrections.rejection_mask, statistic="k1", level="token", upper=2.0))
      >>> old_logp = jnp.log(jnp.array([[1.5, 3.0], [1.0, 0.05]]))
      >>> zeros, mask = jnp.zeros((2, 2)), jnp.ones((2, 2), bool)
      >>> rejected = jr.diagnostics.rejection_metrics(old_logp, zeros, mask, rules=rules)
      >>> rejected.tokens.tolist(), rejected.sequences.tolist(), float(rejected.any_tokens)
      ([0.5, 0.5], [0.5, 1.0], 0.75)

    References:
      verl 0.9 reports both shares of every rule (``rollout_rs_*_masked_fraction``).
    """
    function = "rejection_metrics"
    masking.check_tokens(function, mask, old_logp=old_logp, behavior_logp=behavior_logp)
    if not isinstance(rules, tuple) or not all(map(callable, rules)):
        raise TypeError(f"{function}: rules must be a tuple of functions; got {rules!r}.")
    if not rules:
        raise ValueError(f"{function}: rules is empty; there is nothing to measure.")
    rejected = []
    for rule in rules:
        keep = rule(old_logp, behavior_logp, mask)
        checks.check_bool(f"{function}, rule {rule!r}", keep=keep)
        checks.check_shape(f"{function}, rule {rule!r}", "keep", keep, jnp.shape(mask))
        rejected.append(mask & ~keep)
    rejected.append(functools.reduce(jnp.logical_or, rejected))
    of_sequences = jnp.any(mask, axis=-1)
    tokens = jnp.stack([masking.masked_mean(x, mask) for x in rejected])
    sequences = jnp.stack([masking.masked_mean(jnp.any(x, -1), of_sequences) for x in rejected])
    return RejectionMetrics(tokens[:-1], sequences[:-1], tokens[-1], sequences[-1])
