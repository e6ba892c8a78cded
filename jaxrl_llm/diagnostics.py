"""What to watch during training: functions of their own, so that a loss returns one array.

They take the same arrays as a surrogate, repeat its cheap arithmetic (a compiler folds it into one)
and return float32 scalars. Give them the global batch: a share or a maximum over parts is not the
mean over the parts. ``mask`` is bool ``[..., T]``, True = keep; masked cells are never read.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import checks, masking, stats
from jaxrl_llm.core.axes import Array


class RatioRange(NamedTuple):
    """Ratios of the kept tokens, float32 scalars; all 1 where nothing is kept."""

    mean: Array
    least: Array
    greatest: Array


class Mismatch(NamedTuple):
    """Distance of two sets of log-probabilities, in nats a token, float32 scalars."""

    mean_abs: Array
    max_abs: Array
    kl: Array


class GroupSpread(NamedTuple):
    """How much the groups of a batch can teach, float32 scalars."""

    informative: Array
    mean_std: Array


def _log_ratio(function: str, mask: Array, **pair: Array) -> Array:
    """Checks two log-probabilities and a mask; the first minus the second, 0 where masked."""
    checks.check_bool(function, mask=mask)
    checks.check_float(function, **pair)
    checks.check_same_shape(function, **pair, mask=mask)
    first, second = pair.values()
    return masking.safe_log_ratio(first, second, mask)


def clip_fraction(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Array:
    """Share of kept tokens that a clipped surrogate takes out of the gradient.

        mean over kept tokens of [A > 0 and r > 1 + eps_high] or [A < 0 and r < 1 - eps_low]
        r = exp(logp - old_logp)

    Give it the options of the surrogate. The upper bound of a dual clip is not counted.

    Args:
      logp: Log-probabilities of the policy being trained, ``[..., T]``, nats.
      old_logp: The same tokens under the proximal policy, ``[..., T]``, nats.
      advantages: ``[..., T]``, or ``[...]`` for one a sequence.
      mask: bool ``[..., T]``, True = keep.
      eps_low: How far below 1 the ratio may go, not negative.
      eps_high: How far above 1 the ratio may go, not negative.

    Returns:
      A share in 0 to 1, float32 scalar; 0 where nothing is kept.

    Raises:
      TypeError: If ``mask`` is not bool or another array not floating point.
      ValueError: If shapes do not match or an eps is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp = jnp.log(jnp.array([0.9, 0.5])), jnp.log(jnp.array([0.5, 0.5]))
      >>> mask = jnp.array([True, True])
      >>> float(jr.diagnostics.clip_fraction(logp, old_logp, jnp.array(1.0), mask))
      0.5

    References:
      Schulman et al., PPO (arXiv:1707.06347). The ``pg_clipfrac`` of verl.
    """
    checks.check_non_negative("clip_fraction", eps_low=eps_low, eps_high=eps_high)
    ratio = jnp.exp(_log_ratio("clip_fraction", mask, logp=logp, old_logp=old_logp))
    advantages = masking.spread("clip_fraction", "advantages", advantages, mask)
    above = (advantages > 0) & (ratio > 1.0 + eps_high)
    below = (advantages < 0) & (ratio < 1.0 - eps_low)
    return masking.masked_mean(above | below, mask)


def approx_kl(
    logp: Array, old_logp: Array, mask: Array, *, estimator: Literal["k1", "k2", "k3"] = "k1"
) -> Array:
    """How far the policy moved: KL(old || new) a token, estimated on tokens that old sampled.

        k1 = mean(-d)    k2 = mean(d^2) / 2    k3 = mean(exp(d) - 1 - d)    d = logp - old_logp

    k1 is unbiased and may be negative; k3 is unbiased too, never negative, and has less variance
    while the policies are close; k2 is never negative and biased. It is a measurement and not a
    penalty: for that see :mod:`jaxrl_llm.regularizers`.

    Args:
      logp: Log-probabilities of the policy being trained, ``[..., T]``, nats.
      old_logp: The same tokens under the policy that sampled them, ``[..., T]``, nats.
      mask: bool ``[..., T]``, True = keep.
      estimator: "k1", "k2" or "k3".

    Returns:
      Nats a token, float32 scalar; 0 where nothing is kept.

    Raises:
      TypeError: If ``mask`` is not bool or another array not floating point.
      ValueError: If shapes differ or ``estimator`` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
      >>> float(jr.diagnostics.approx_kl(logp, old_logp, jnp.array([True, True])))
      0.25

    References:
      Schulman, Approximating KL Divergence (joschu.net/blog/kl-approx.html). verl's ``ppo_kl`` is
      k1.
    """
    checks.check_option("approx_kl", "estimator", estimator, ("k1", "k2", "k3"))
    d = _log_ratio("approx_kl", mask, logp=logp, old_logp=old_logp)
    terms = {"k1": lambda: -d, "k2": lambda: d**2 / 2.0, "k3": lambda: jnp.expm1(d) - d}
    return masking.masked_mean(terms[estimator](), mask)


def ratio_range(logp: Array, old_logp: Array, mask: Array) -> RatioRange:
    """Mean, least and greatest ratio of the kept tokens.

        r = exp(logp - old_logp)

    Before the first update on a batch all three are 1; what is off by more than rounding then is a
    mistake in scoring, as other temperature, truncation or tokens.

    Args:
      logp: Log-probabilities of the policy being trained, ``[..., T]``, nats.
      old_logp: The same tokens under the proximal policy, ``[..., T]``, nats.
      mask: bool ``[..., T]``, True = keep.

    Returns:
      ``RatioRange(mean, least, greatest)``, float32 scalars; all 1 where nothing is kept.

    Raises:
      TypeError: If ``mask`` is not bool or another array not floating point.
      ValueError: If shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> same = jr.diagnostics.ratio_range(jnp.zeros(3), jnp.zeros(3), jnp.ones(3, bool))
      >>> float(same.mean), float(same.least), float(same.greatest)
      (1.0, 1.0, 1.0)
    """
    ratio = jnp.exp(_log_ratio("ratio_range", mask, logp=logp, old_logp=old_logp))
    some = jnp.any(mask)
    return RatioRange(
        mean=jnp.where(some, masking.masked_mean(ratio, mask), 1.0),
        least=jnp.where(some, jnp.min(ratio, where=mask, initial=jnp.inf), 1.0),
        greatest=jnp.where(some, jnp.max(ratio, where=mask, initial=0.0), 1.0),
    )


def effective_sample_size(
    logp: Array,
    behavior_logp: Array,
    mask: Array,
    *,
    level: Literal["token", "sequence"] = "sequence",
) -> Array:
    """Share of the samples that are worth anything after importance weighting (Kish).

        (sum w)^2 / (n * sum w^2)
        level="sequence":  w = exp(sum over tokens of logp - behavior_logp), n non-empty sequences
        level="token":     w = exp(logp - behavior_logp), n kept tokens

    1 says that all weights are equal, 1 / n that one sample has all the weight. The weights are
    scaled by the greatest one before they are squared, so long sequences do not overflow.

    Args:
      logp: Log-probabilities of the policy that the estimate is for, ``[..., T]``, nats.
      behavior_logp: The same tokens under what sampled them, ``[..., T]``, nats.
      mask: bool ``[..., T]``, True = keep.
      level: What a sample is: "sequence" or "token".

    Returns:
      A share in 0 to 1, float32 scalar; 0 where nothing is kept.

    Raises:
      TypeError: If ``mask`` is not bool or another array not floating point.
      ValueError: If shapes differ or ``level`` is unknown.

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
    log_weight = _log_ratio("effective_sample_size", mask, logp=logp, behavior_logp=behavior_logp)
    kept = mask
    if level == "sequence":
        checks.check_min_rank("effective_sample_size", 1, mask=mask)
        log_weight, kept = jnp.sum(log_weight, axis=-1), jnp.any(mask, axis=-1)
    greatest = jnp.max(log_weight, where=kept, initial=-jnp.inf)
    greatest = jnp.where(jnp.isfinite(greatest), greatest, 0.0)
    weight = masking.zero_masked(jnp.exp(masking.zero_masked(log_weight - greatest, kept)), kept)
    count = jnp.sum(kept, dtype=jnp.float32)
    total, squares = jnp.sum(weight), jnp.sum(weight**2)
    return total**2 / jnp.maximum(count * squares, 1.0)


def mismatch(logp: Array, behavior_logp: Array, mask: Array) -> Mismatch:
    """How far what sampled the tokens is from what scores them, on the same weights or older ones.

        mean |d|,  max |d|,  mean(-d)    d = logp - behavior_logp

    ``kl`` estimates KL(behavior || policy). A sampler of other precision shows in ``mean_abs``; one
    wrong token, or a truncation that was left out of the log-probability, in ``max_abs``.

    Args:
      logp: Log-probabilities under the policy that scores, ``[..., T]``, nats.
      behavior_logp: The same tokens under what sampled them, ``[..., T]``, nats.
      mask: bool ``[..., T]``, True = keep.

    Returns:
      ``Mismatch(mean_abs, max_abs, kl)``, float32 scalars; all 0 where nothing is kept.

    Raises:
      TypeError: If ``mask`` is not bool or another array not floating point.
      ValueError: If shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, behavior_logp = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
      >>> off = jr.diagnostics.mismatch(logp, behavior_logp, jnp.array([True, True]))
      >>> float(off.mean_abs), float(off.max_abs), float(off.kl)
      (0.75, 1.0, 0.25)
    """
    d = _log_ratio("mismatch", mask, logp=logp, behavior_logp=behavior_logp)
    return Mismatch(
        mean_abs=masking.masked_mean(jnp.abs(d), mask),
        max_abs=jnp.max(jnp.abs(d), initial=0.0),
        kl=masking.masked_mean(-d, mask),
    )


def group_spread(rewards: Array, *, where: Array | None = None) -> GroupSpread:
    """How many groups have rewards that differ, and by how much.

        informative = share of non-empty groups with max(r) > min(r)
        mean_std    = mean over non-empty groups of std(r), dividing by n - 1

    A group without a difference has advantage 0 in every group-relative method: it costs sampling
    and teaches nothing.

    Args:
      rewards: ``[..., G]``, floating point; a group lies along the last axis.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all.

    Returns:
      ``GroupSpread(informative, mean_std)``, float32 scalars, the second in units of reward; both 0
      where nothing is kept.

    Raises:
      TypeError: If ``rewards`` is not floating point or ``where`` is not bool.
      ValueError: If the shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.0], [1.0, 1.0]])
      >>> float(jr.diagnostics.group_spread(rewards).informative)
      0.5
    """
    stats.check_group("group_spread", rewards, where)
    constant = stats.group_is_constant(rewards, where)
    non_empty = stats.group_count(rewards, where) > 0
    std = jnp.where(constant, 0.0, stats.group_std(rewards, where, ddof=1))
    return GroupSpread(
        informative=masking.masked_mean(~constant, non_empty),
        mean_std=masking.masked_mean(std, non_empty),
    )


def mean_entropy(entropy: Array, mask: Array) -> Array:
    """Entropy of the policy, averaged over the kept tokens.

        mean over kept tokens of H[t]

    Args:
      entropy: Entropy of the next-token distribution at each token, ``[..., T]``, nats.
      mask: bool ``[..., T]``, True = keep.

    Returns:
      Nats a token, float32 scalar; 0 where nothing is kept.

    Raises:
      TypeError: If ``mask`` is not bool or ``entropy`` not floating point.
      ValueError: If shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> entropy, mask = jnp.array([2.0, 1.0, jnp.nan]), jnp.array([True, True, False])
      >>> float(jr.diagnostics.mean_entropy(entropy, mask))
      1.5
    """
    checks.check_bool("mean_entropy", mask=mask)
    checks.check_float("mean_entropy", entropy=entropy)
    checks.check_same_shape("mean_entropy", entropy=entropy, mask=mask)
    return masking.masked_mean(entropy, mask)
