"""Baselines that shrink the mean of a group toward a prior.

- ``rewards``: floating point ``[..., G]``, in [0, 1]; a group lies along the last axis.
- ``prior``: floating point ``[...]``, the reward expected of each prompt.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. The others count in
  no statistic, get 0 and may hold anything.
- ``var``: where the variance comes from: "prior", "sample", "max" or "bound"; see
  :func:`shrinkage_baseline`.
- A wrong dtype raises TypeError; shapes that do not match, and an option that is unknown, out of
  its range or without effect, raise ValueError.
"""

import numbers
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.core import checks, masking, stats, traits
from jaxrl_llm.core.axes import Array

__all__ = ["osla_continue", "positive_part", "shrinkage_baseline", "v05_baseline"]

Variance = Literal["prior", "sample", "max", "bound"]

# A prior of exactly 0 or 1 has no variance: its weight would never change.
_LEAST_PRIOR = 1e-3


def positive_part(distance_sq: Array, error_sq: Array) -> Array:
    """The weight of an estimate that is shrunk toward a target.

        w = max(0, 1 - error_sq / distance_sq)        0 where the distance is 0

    This is the positive-part James-Stein rule: an estimate within its standard error of the target
    has weight 0, and an estimate far from it about 1. With the bias estimate ``D = max(distance_sq
    - error_sq, 0)`` it is ``D / (D + error_sq)``, the weight of least mean squared error.

    Args:
      distance_sq: Squared distance of the estimate from the target, of any shape.
      error_sq: Squared standard error of the estimate, not negative, of a shape that broadcasts.

    Returns:
      Weights in [0, 1], float32 of the broadcast shape.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.positive_part(jnp.array([0.0, 0.25, 1.0]), jnp.array(0.25)).tolist()
      [0.0, 0.0, 0.75]

    References:
      James and Stein (1961); Baranchik's positive part (1964).
    """
    checks.check_float("positive_part", distance_sq=distance_sq, error_sq=error_sq)
    distance_sq = jnp.asarray(distance_sq, jnp.float32)
    # Only NaN and positive numbers are divided by; a NaN is to be seen.
    apart = ~(distance_sq <= 0)
    ratio = jnp.asarray(error_sq, jnp.float32) / jnp.where(apart, distance_sq, 1.0)
    return jnp.where(apart, jnp.maximum(1.0 - ratio, 0.0), 0.0)


@traits(reward_range=(0.0, 1.0))
def shrinkage_baseline(
    rewards: Array, *, prior: Array, where: Array | None = None, var: Variance = "prior"
) -> tuple[Array, Array]:
    """The mean of a group, shrunk toward a prior by how uncertain the mean is.

        s2 = q (1 - q),  q the prior in [0.001, 0.999]
        w = max(0, 1 - (s2 / n) / (mean(r) - q)^2)
        b = w mean(r) + (1 - w) q

    If the prior agrees with the mean reward within its standard error, the baseline is the prior;
    the more the rollouts contradict it, the less it weighs. The variance s2 is that of right (1)
    and wrong (0) answers if the prior is true. ``var="sample"`` uses ``mean (1 - mean)`` instead,
    which is 0 in a group of equal rewards: the baseline is then the mean, and the advantages of
    that group vanish. ``"max"`` uses the larger of the two, and ``"bound"`` 1/4, the largest
    variance of rewards in [0, 1].

    Args:
      rewards, prior, where, var: See the module.

    Returns:
      Baseline and weight of the mean, both ``[...]`` float32; the prior and 0 for an empty group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
      >>> baseline, weight = jr.advantages.shrinkage_baseline(rewards, prior=jnp.array([0.7, 0.7]))
      >>> baseline.round(4).tolist(), weight.round(4).tolist()
      ([0.699..., 0.074...], [0.0, 0.892...])

    References:
      V_0.5 (arXiv:2603.10848), NOTES reading: another author's outline has these equations with the
      bound, 1 for rewards of -1 and 1, which is ``var="bound"`` here. The other variances are ours.
    """
    mean, count, prior = _prepare("shrinkage_baseline", rewards, prior, where)
    error_sq = _variance("shrinkage_baseline", mean, prior, var) / jnp.maximum(count, 1.0)
    weight = jnp.where(count > 0, positive_part((mean - prior) ** 2, error_sq), 0.0)
    return weight * mean + (1.0 - weight) * prior, weight


@traits(reward_range=(0.0, 1.0))
def v05_baseline(
    rewards: Array,
    *,
    prior: Array,
    where: Array | None = None,
    var: Variance = "prior",
    scale: Literal["none", "group"] = "none",
    ddof: int | None = None,
    eps: float | None = None,
) -> Array:
    """Rewards minus a baseline that fuses a value prior with the group mean.

        A_i = r_i - b        b from :func:`shrinkage_baseline`
        scale="group":  A_i = (r_i - b) / (std(r) + eps)

    A group of equal rewards still trains where the prior differs; with ``scale="group"`` it gets
    exactly 0, since its deviation is 0. A single rollout is compared with the prior.

    Args:
      rewards, prior, where, var: See the module.
      scale: "none", or "group" for a division by the group's deviation.
      ddof: Delta degrees of freedom of the deviation, 1 (None means 1) or 0.
      eps: Added to the deviation, above 0, in units of reward. None means 1e-6.

    Returns:
      Advantages ``[..., G]``, float32; they do not add up to 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.v05_baseline(jnp.ones((1, 4)), prior=jnp.array([0.5])).tolist()
      [[0.125, 0.125, 0.125, 0.125]]

    References:
      V_0.5 (arXiv:2603.10848). ABSTRACT reading, see :func:`shrinkage_baseline`.
    """
    checks.check_option("v05_baseline", "scale", scale, ("none", "group"))
    if scale == "none":
        checks.check_no_effect("v05_baseline", "with scale='none'", ddof=ddof, eps=eps)
    mean, count, prior = _prepare("v05_baseline", rewards, prior, where)
    error_sq = _variance("v05_baseline", mean, prior, var) / jnp.maximum(count, 1.0)
    weight = positive_part((mean - prior) ** 2, error_sq)
    rewards = masking.zero_masked(rewards, where)
    advantages = rewards - (weight * mean + (1.0 - weight) * prior)[..., None]
    if scale == "group":
        ddof = 1 if ddof is None else ddof
        eps = 1e-6 if eps is None else eps
        checks.check_option("v05_baseline", "ddof", ddof, (0, 1))
        checks.check_positive("v05_baseline", finite=True, eps=eps)
        advantages = advantages / (stats.group_std(rewards, where, ddof=ddof) + eps)
        advantages = jnp.where(stats.group_is_constant(rewards, where), 0.0, advantages)
    return masking.zero_masked(advantages, where)


def osla_continue(
    mean: Array,
    count: Array,
    *,
    prior: Array,
    cost: float = 1e-3,
    least: int = 4,
    most: int = 16,
    var: Variance = "prior",
) -> Array:
    """Whether one more rollout of a prompt is worth its cost, by one-step lookahead.

        mse(n) = e(n) D / (e(n) + D),   e(n) = s2 / n,   D = max((mean - q)^2 - e(count), 0)
        continue  =  count < least  or  (count < most and mse(count) - mse(count + 1) > cost)

    mse is the mean squared error of :func:`shrinkage_baseline` with the current estimate D of the
    prior's squared bias. Where the rewards agree with the prior, D is 0 and another rollout gains
    nothing.

    Args:
      prior, var: See the module.
      mean: ``[...]``, floating point, the mean reward of the rollouts so far, in [0, 1].
      count: ``[...]``, number of rollouts so far, integer or floating point.
      cost: Price of a rollout, in squared units of reward, not negative.
      least: Minimum rollouts of a prompt.
      most: Maximum rollouts of a prompt, at least ``least``.

    Returns:
      bool ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mean, count = jnp.array([0.75, 0.0]), jnp.array([4, 4])
      >>> jr.advantages.osla_continue(mean, count, prior=jnp.array([0.7, 0.7])).tolist()
      [False, True]

    References:
      V_0.5 (arXiv:2603.10848), NOTES reading: 4 to 16 rollouts, ``var="bound"`` and a cost of
      0.0039 for rewards of -1 and 1, which is 1/1024 for 0 and 1. With that cost, sampling stops at
      16 even if the prior is far off. The default of ``var`` is ours.
    """
    checks.check_float("osla_continue", mean=mean, prior=prior)
    checks.check_same_shape("osla_continue", mean=mean, count=count, prior=prior)
    checks.check_non_negative("osla_continue", finite=True, cost=cost)
    if isinstance(least, numbers.Real) and isinstance(most, numbers.Real) and most < least:
        raise ValueError(
            f"osla_continue: most must not be below least; got {most:g} and {least:g}."
        )
    count = jnp.asarray(count, jnp.float32)
    # With no rollout the mean may be anything.
    mean = masking.zero_masked(mean, count > 0)
    prior = _inside(prior)
    s2 = _variance("osla_continue", mean, prior, var)
    now = s2 / jnp.maximum(count, 1.0)
    bias_sq = jnp.maximum((mean - prior) ** 2 - now, 0.0)

    def error(e: Array) -> Array:
        total = e + bias_sq
        return e * bias_sq / jnp.where(total > 0, total, 1.0)

    gain = error(now) - error(s2 / (jnp.maximum(count, 1.0) + 1.0))
    return (count < least) | ((count < most) & (gain > cost))


def _inside(prior: Array) -> Array:
    return jnp.clip(jnp.asarray(prior, jnp.float32), _LEAST_PRIOR, 1.0 - _LEAST_PRIOR)


def _prepare(
    function: str, rewards: Array, prior: Array, where: Array | None
) -> tuple[Array, Array, Array]:
    """Checks the arguments; returns mean and count of each group and its prior, all ``[...]``."""
    stats.check_group(function, rewards, where)
    checks.check_float(function, prior=prior)
    if jnp.shape(prior) != jnp.shape(rewards)[:-1]:
        raise ValueError(
            f"{function}: prior must have one value a group {jnp.shape(rewards)[:-1]}; "
            f"got {jnp.shape(prior)}."
        )
    count = stats.group_count(rewards, where)[..., 0]
    return stats.group_mean(rewards, where)[..., 0], count, _inside(prior)


def _variance(function: str, mean: Array, prior: Array, var: str) -> Array:
    """Variance of one reward, each right or wrong."""
    checks.check_option(function, "var", var, ("prior", "sample", "max", "bound"))
    if var == "bound":
        return jnp.full_like(mean, 0.25)
    sample = jnp.maximum(mean * (1.0 - mean), 0.0)
    if var == "sample":
        return sample
    expected = prior * (1.0 - prior)
    return expected if var == "prior" else jnp.maximum(expected, sample)
