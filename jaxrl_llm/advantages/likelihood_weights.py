"""Advantages whose gradient tends to that of the log-probability of a right answer."""

import math
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import _counting
from jaxrl_llm.core import checks, masking, stats, traits
from jaxrl_llm.core.axes import Array


@traits(reward_range=(0.0, math.inf))
def maxrl(
    rewards: Array,
    *,
    where: Array | None = None,
    scale: Literal["mean", "root"] = "mean",
    eps: float = 1e-6,
) -> Array:
    """Rewards minus their group mean, over the mean itself: hard prompts count more.

        A_i = (r_i - mean(r)) / (mean(r) + eps)              scale="mean", MaxRL
        A_i = (r_i - mean(r)) / (sqrt(mean(r)) + eps)        scale="root", one-sided

    With right (1) and wrong (0) answers of probability p of being right, the mean over the group of
    ``A_i grad log pi_i`` has the expectation ``sum_{j < n-1} (1-p)^j grad p`` for n rollouts: with
    many it is ``grad p / p``, the gradient of log p. :func:`maclaurin` has the same for any number
    of terms. It is :func:`dr_grpo` over the success rate, and :func:`grpo` (``ddof=0``) times
    ``sqrt((1 - mean) / mean)``. A group whose kept rewards are all equal, one of a single rollout,
    and an empty one get exactly 0; every wrong answer next to a right one gets -1.

    Args:
      rewards: ``[..., G]``, floating point, not negative; a group lies along the last axis.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all. The rest count in
        no statistic, get 0 and may hold anything.
      scale: "mean", or "root" for its square root, which lies between this and no division.
      eps: Added to the divisor, above 0.

    Returns:
      Advantages ``[..., G]``, float32; they add up to 0 over a group.

    Raises:
      TypeError: If ``rewards`` is not floating point or ``where`` is not bool.
      ValueError: If the shapes differ, ``scale`` is unknown or ``eps`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.maxrl(jnp.array([1.0, 0.0, 0.0, 0.0])).round(3).tolist()
      [3.0..., -1.0, -1.0, -1.0]

    References:
      MaxRL (arXiv:2602.02710) as in the authors' code, which divides the reward of a group of one
      by eps. "root" is their ``one_sided_grpo``.
    """
    stats.check_group("maxrl", rewards, where)
    checks.check_option("maxrl", "scale", scale, ("mean", "root"))
    checks.check_positive("maxrl", eps=eps)
    rewards = masking.zero_masked(rewards, where)
    mean = stats.group_mean(rewards, where)
    divisor = mean
    if scale == "root":
        # The gradient of a square root at zero is infinite.
        divisor = jnp.where(mean > 0, jnp.sqrt(jnp.where(mean > 0, mean, 1.0)), 0.0)
    # The mean of three float32 rewards of 0.1 is not 0.1.
    constant = stats.group_is_constant(rewards, where)
    advantages = jnp.where(constant, 0.0, rewards - mean) / (divisor + eps)
    return masking.zero_masked(advantages, where)


def maclaurin_weights(right: Array, total: Array, *, order: int) -> tuple[Array, Array]:
    """Weights of right and wrong answers for a truncated series of the log-probability.

        w_right = 1 / n
        w_wrong = -(1 / n) sum_{j=2..order} C(n - c - 1, j - 1) / C(n - 1, j - 1)

    ``-log p = sum_j (1 - p)^j / j``; the first ``order`` terms have the gradient
    ``-sum_{j < order} (1-p)^j grad p``, and this is an unbiased estimate of its opposite, for every
    order up to n: the sum over the group (not the mean) of the weights times ``grad log pi_i``.
    Order 1 is the plain policy gradient without a baseline. Terms beyond n have no estimate and are
    left out.

    Args:
      right: Whole numbers c of any shape: right answers of each group.
      total: Whole numbers n of the same shape: answers of each group.
      order: How many terms, at least 1.

    Returns:
      The weight of a right and that of a wrong answer, float32 of the shape of ``right``; both 0
      for an empty group.

    Raises:
      TypeError: If ``order`` is not a whole number.
      ValueError: If the shapes differ or ``order`` is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> right, total = jnp.array([1, 0]), jnp.array([4, 4])
      >>> jr.advantages.maclaurin_weights(right, total, order=4)
      (Array([0.25, 0.25], dtype=float32), Array([-0.25, -0.75], dtype=float32))

    References:
      MaxRL (arXiv:2602.02710), ``maclaurin_weights`` of the authors' code.
    """
    checks.check_min_rank("maclaurin_weights", 0, right=right, total=total)
    checks.check_same_shape("maclaurin_weights", right=right, total=total)
    _counting.check_whole("maclaurin_weights", order=order)
    n = jnp.asarray(total, jnp.float32)[..., None]
    wrong = n - jnp.asarray(right, jnp.float32)[..., None]
    each = jnp.where(n > 0, 1.0 / jnp.maximum(n, 1.0), 0.0)
    j = jnp.arange(1, order, dtype=jnp.float32)
    # C(f - 1, j) / C(n - 1, j) for f wrong answers, one j after the other; 0 from j = f on.
    terms = jnp.cumprod(jnp.maximum(wrong - j, 0.0) / jnp.maximum(n - j, 1.0), axis=-1)
    return each[..., 0], -each[..., 0] * jnp.sum(terms, axis=-1)


def maclaurin(
    rewards: Array, *, where: Array | None = None, order: int = 4, threshold: float = 0.5
) -> Array:
    """Advantages for a truncated series of the log-probability of a right answer.

        right:  A = 1
        wrong:  A = -sum_{j=2..order} C(n - c - 1, j - 1) / C(n - 1, j - 1)

    n times :func:`maclaurin_weights`, since the loss is a mean over rollouts. c of the n rollouts
    of a group are right, each with probability p. The mean over the group of ``A_i grad log pi_i``
    has the expectation ``sum_{j < order} (1-p)^j grad p`` for every order up to n; the larger the
    order, the more hard prompts count. The advantages do not add up to 0, and a group of wrong
    answers alone gets ``1 - min(order, n)``, which pushes all of them down.

    Args:
      rewards: ``[..., G]``, floating point, one a rollout; a group lies along the last axis.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all. The rest count in
        no statistic, get 0 and may hold anything.
      order: How many terms, at least 1; those beyond the size of a group are left out.
      threshold: A reward above it is right, in units of reward.

    Returns:
      Advantages ``[..., G]``, float32.

    Raises:
      TypeError: If ``rewards`` is not floating point, ``where`` is not bool, or ``order`` is not a
        whole number.
      ValueError: If the shapes differ or ``order`` is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.maclaurin(jnp.array([1.0, 0.0, 0.0, 0.0]), order=2).round(4).tolist()
      [1.0, -0.666..., -0.666..., -0.666...]

    References:
      MaxRL (arXiv:2602.02710); the authors' code leaves the factor n to the aggregation.
    """
    x = _counting.count("maclaurin", rewards, where, threshold, order=order)
    order = min(order, max(jnp.shape(rewards)[-1], 1))
    _, wrong = maclaurin_weights((x.total - x.wrong)[..., 0], x.total[..., 0], order=order)
    # A NaN takes neither side, and stays.
    advantages = x.right + (1.0 - x.right) * (wrong[..., None] * x.total)
    return masking.zero_masked(advantages, where)
