"""Advantages from the number of right answers: pass@k, maximum reward, maximum likelihood.

- ``rewards``: floating point ``[..., G]``, one per rollout; a group lies along the last axis.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. The others count in
  no statistic, get 0 and may hold anything.
- ``k``: number of attempts of pass@k, at least 1.
- ``threshold``: rewards above it count as right, in units of reward.
- Below, c of the n rollouts of a group are right, each with probability p.
- Advantages are float32 ``[..., G]``.
- A wrong dtype, and a ``k`` or ``order`` that is not an integer, raise TypeError; shapes that do
  not match, and an option that is unknown, out of its range or without effect, raise ValueError.
"""

import math
import numbers
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats, traits

__all__ = [
    "grpo_passk",
    "log_comb",
    "maclaurin",
    "maclaurin_weights",
    "maxrl",
    "passk_training",
    "pkpo",
]


class _Counts(NamedTuple):
    """Which rollouts are right, and how many of each group are wrong, and in all."""

    right: Array  # [..., G], 1, 0, or NaN where an unmasked reward is NaN; 0 where dropped
    wrong: Array  # [..., 1]
    total: Array  # [..., 1]


def _check_whole(function: str, name: str, value: int) -> None:
    """Raises unless the value is a Python integer and at least 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be an integer; got {value!r}.")
    if value < 1:
        raise ValueError(f"{function}: {name} must be at least 1; got {value}.")


def _count(function: str, rewards: Array, where: Array | None, threshold: float) -> _Counts:
    """Checks the arguments of ``function`` and counts the answers of each group."""
    stats.check_group(function, rewards, where)
    if isinstance(threshold, numbers.Real) and not math.isfinite(threshold):
        raise ValueError(f"{function}: threshold must be finite; got {threshold:g}.")
    rewards = masking.zero_masked(rewards, where)
    right = (rewards > threshold).astype(jnp.float32)
    # A NaN is not above the threshold; as a wrong answer it would be hidden.
    right = masking.zero_masked(jnp.where(jnp.isnan(rewards), jnp.nan, right), where)
    total = stats.group_count(rewards, where)
    return _Counts(right, total - jnp.sum(right, axis=-1, keepdims=True), total)


def _comb_ratio(a: Array, n: Array, k: int) -> Array:
    """``C(a, k) / C(n, k)``: the chance that k drawn of n all come from the a chosen ones.

    A product of fractions, which neither overflows nor loses digits as factorials do. ``a`` and
    ``n`` are ``[..., 1]``; a below 0 counts as 0, k above n as n.
    """
    j = jnp.arange(k, dtype=jnp.float32)
    fractions = jnp.maximum(a - j, 0.0) / jnp.maximum(n - j, 1.0)
    return jnp.prod(jnp.where(j < n, fractions, 1.0), axis=-1, keepdims=True)


def log_comb(n: Array, k: Array) -> Array:
    """Logarithm of the binomial coefficient: the number of ways to choose k of n.

        log C(n, k) = log n! - log k! - log (n - k)!        -inf where k < 0 or k > n

    Args:
      n: Whole numbers of any shape, integer or floating point.
      k: Whole numbers of a shape that broadcasts with ``n``.

    Returns:
      float32 of the broadcast shape. The error grows with n: about 2e-5 at 64, 3e-3 at 4096.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jnp.exp(jr.advantages.log_comb(jnp.array([4, 4, 4]), jnp.array([2, 4, 5]))).round(3)
      Array([6..., 1..., 0...], dtype=float32)

    References:
      The Gamma function. The estimators of this module use products of fractions instead, which are
      accurate to a few units in the last place.
    """
    checks.check_min_rank("log_comb", 0, n=n, k=k)
    n, k = jnp.broadcast_arrays(jnp.asarray(n, jnp.float32), jnp.asarray(k, jnp.float32))
    valid = (k >= 0) & (k <= n)
    # lgamma has poles where the difference is negative, and so has its gradient.
    n, k = jnp.where(valid, n, 0.0), jnp.where(valid, k, 0.0)
    gammaln = jax.scipy.special.gammaln
    return jnp.where(valid, gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1), -jnp.inf)


def grpo_passk(
    rewards: Array,
    *,
    where: Array | None = None,
    scale: Literal["group", "none"] = "group",
    ddof: int | None = None,
    eps: float | None = None,
) -> Array:
    """Trains only the best rollout of a group, by its lead over the second best.

        A_best = (r_best - r_second) / (std(r) + eps)        all others 0

    Without the division, the sum over a group of ``A_i grad log pi_i`` is an unbiased estimate of
    the gradient of the expected best reward of the group. With right and wrong answers, only groups
    with exactly one right answer train. A tie at the top, one rollout, or none, gives exactly 0.
    The advantages of a group do not add up to 0.

    Args:
      rewards, where: See the module.
      scale: "group" divides by the deviation of the group's rewards, "none" does not.
      ddof: Delta degrees of freedom of the deviation, 1 (None means 1) or 0.
      eps: Added to the deviation, above 0, in units of reward. None means 1e-6.

    Returns:
      Advantages ``[..., G]``, not negative; at most one a group is not 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.grpo_passk(jnp.array([0.875, 0.5, 0.125]), scale="none").tolist()
      [0.375, 0.0, 0.0]

    References:
      Tang et al. (arXiv:2503.19595), as verl's ``grpo_passk``, which raises for a group of one.
    """
    stats.check_group("grpo_passk", rewards, where)
    checks.check_option("grpo_passk", "scale", scale, ("group", "none"))
    if scale == "none":
        checks.check_no_effect("grpo_passk", "with scale='none'", ddof=ddof, eps=eps)
    rewards = masking.zero_masked(rewards, where)
    if rewards.shape[-1] < 2:
        return jnp.zeros_like(rewards)
    present = jnp.ones(rewards.shape, bool) if where is None else where
    ordered = jnp.sort(jnp.where(present, rewards, -jnp.inf), axis=-1)
    best, second = ordered[..., -1:], ordered[..., -2:-1]
    two = stats.group_count(rewards, where) >= 2
    lead = jnp.where(two, best, 0.0) - jnp.where(two, second, 0.0)
    if scale == "group":
        ddof = 1 if ddof is None else ddof
        eps = 1e-6 if eps is None else eps
        checks.check_option("grpo_passk", "ddof", ddof, (0, 1))
        checks.check_positive("grpo_passk", finite=True, eps=eps)
        lead = lead / (stats.group_std(rewards, where, ddof=ddof) + eps)
    # With a tie at the top the lead is exactly 0, so that which of them is best does not matter.
    first = jnp.argmax(jnp.where(present, rewards, -jnp.inf), axis=-1, keepdims=True)
    return jnp.where(present & (jnp.arange(rewards.shape[-1]) == first), lead, 0.0)


def passk_training(
    rewards: Array,
    *,
    where: Array | None = None,
    k: int = 4,
    threshold: float = 0.5,
    eps: float = 1e-6,
) -> Array:
    """Advantages of the pass@k reward, averaged over all groups of k that the rollouts can form.

        rho = 1 - C(n - c, k) / C(n, k)          sigma = sqrt(rho (1 - rho))
        right:  A = (1 - rho) / (sigma + eps)
        wrong:  A = (1 - rho - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / (sigma + eps)

    A group of k passes if one of its members is right; a wrong rollout is penalized only for the
    groups of k in which all are wrong. The harder the prompt, the more its right answers count.
    ``k=1`` is :func:`grpo` with ``ddof=0``. Where every group of k passes (n - c < k), or none does
    (c = 0), all rollouts get exactly 0. For a group smaller than k, k is its size.

    Args:
      rewards, where, k, threshold: See the module.
      eps: Added to the deviation, above 0.

    Returns:
      Advantages ``[..., G]``; they add up to 0 over a group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.passk_training(jnp.array([1.0, 0.0, 0.0, 0.0]), k=2).round(4).tolist()
      [1.0, -0.333..., -0.333..., -0.333...]

    References:
      Pass@k training (arXiv:2508.10751), as in the authors' code, where a reward of exactly 1 is
      right, 0 is wrong, other values stay as they are, and ``k`` has no default.
    """
    checks.check_positive("passk_training", finite=True, eps=eps)
    _check_whole("passk_training", "k", k)
    x = _count("passk_training", rewards, where, threshold)
    fails = _comb_ratio(x.wrong, x.total, k)  # of the groups of k, 1 - rho
    blamed = _comb_ratio(x.wrong - 1, x.total - 1, k - 1)
    sigma = masking.safe_sqrt(fails * (1.0 - fails))
    advantages = (fails - jnp.where(x.right > 0, 0.0, blamed)) / (sigma + eps)
    # Neither holds for a NaN, which stays.
    advantages = jnp.where((fails == 0) | (fails == 1), 0.0, advantages)
    return masking.zero_masked(advantages, where)


def pkpo(
    rewards: Array,
    *,
    where: Array | None = None,
    k: int = 4,
    loo: bool = False,
    threshold: float | None = 0.5,
) -> Array:
    """Weighs each answer by its mean lead over the best of k - 1 others.

        A_i = mean over sets J of k - 1 others of  max(0, r_i - max of r over J)
        right or wrong:  A_i = right_i C(n - c, k - 1) / C(n - 1, k - 1)
        loo=True:        A_i - mean of A over the others

    The mean over the group of ``A_i grad log pi_i`` is an unbiased estimate of the gradient of the
    expected maximum of k rewards (pass@k for rewards of 0 and 1), divided by k. An answer counts
    only where it improves the group, so it needs no baseline. With ``loo`` the advantages add up to
    0, but the estimate is biased for k above 1, since the weights of the others also depend on
    rollout i. ``k=1`` with ``loo`` is :func:`rloo`.

    For a group smaller than k, k is its size; where k is 1, A_i is the reward. With right and wrong
    answers, a group with no right answer, or with fewer than k - 1 wrong ones, gets 0.

    Args:
      rewards, where, k: See the module.
      loo: Whether the mean weight of the others is subtracted.
      threshold: See the module; None takes rewards as they are, of any size.

    Returns:
      Advantages ``[..., G]``; with a threshold in [0, 1], or [-1, 1] with ``loo``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.pkpo(jnp.array([1.0, 1.0, 0.0, 0.0]), k=2).round(4).tolist()
      [0.666..., 0.666..., 0.0, 0.0]
      >>> jr.advantages.pkpo(jnp.array([0.0, 0.5, 2.0]), k=2, threshold=None).tolist()
      [0.0, 0.25, 1.75]

    References:
      PKPO (arXiv:2505.15201): n / k times the estimator that it recommends, with a baseline of k -
      1 samples. ``loo=True`` is the ``pkpo`` of the authors of MaxRL (arXiv:2602.02710).
    """
    _check_whole("pkpo", "k", k)
    checks.check_option("pkpo", "loo", loo, (False, True))
    if threshold is None:
        stats.check_group("pkpo", rewards, where)
        total = stats.group_count(rewards, where)
        valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
        rewards = jnp.asarray(masking.zero_masked(rewards, where), jnp.float32)
        # The mean over sets J of k - 1 others of max(0, r_i - max of r over J): a step from one
        # reward to the next counts by the chance that J lies below it.
        order = jnp.argsort(jnp.where(valid, rewards, jnp.inf), axis=-1)
        ascending = jnp.take_along_axis(rewards, order, axis=-1)
        below = jnp.arange(1, rewards.shape[-1], dtype=jnp.float32)
        chance = _comb_ratio(below[..., None], total[..., None, :] - 1, k - 1)[..., 0]
        steps = jnp.diff(ascending, axis=-1) * jnp.where(below < total, chance, 0.0)
        above = jnp.cumsum(jnp.pad(steps, [(0, 0)] * (steps.ndim - 1) + [(1, 0)]), axis=-1)
        above = jnp.take_along_axis(above, jnp.argsort(order, axis=-1), axis=-1)
        weights = jnp.where((total <= 1) | (k == 1), rewards, above)
        weights = masking.zero_masked(weights, where)
    else:
        x = _count("pkpo", rewards, where, threshold)
        total = x.total
        weights = x.right * _comb_ratio(x.wrong, total - 1, k - 1)
    if loo:
        others = jnp.sum(weights, axis=-1, keepdims=True) - weights
        weights = weights - others / jnp.maximum(total - 1, 1.0)
    return masking.zero_masked(weights, where)


@traits(reward_range=(0.0, math.inf))
def maxrl(
    rewards: Array,
    *,
    where: Array | None = None,
    scale: Literal["mean", "root"] = "mean",
    eps: float = 1e-6,
) -> Array:
    """Rewards minus their group mean, divided by the mean: hard prompts count more.

        A_i = (r_i - mean(r)) / (mean(r) + eps)              scale="mean", MaxRL
        A_i = (r_i - mean(r)) / (sqrt(mean(r)) + eps)        scale="root", one-sided

    With right (1) and wrong (0) answers, the mean over the group of ``A_i grad log pi_i`` has the
    expectation ``sum_{j < n-1} (1-p)^j grad p``: with many rollouts ``grad p / p``, the gradient of
    log p. :func:`maclaurin` has this expectation for any number of terms. It equals :func:`dr_grpo`
    divided by the success rate, and :func:`grpo` (``ddof=0``) times ``sqrt((1 - mean) / mean)``. A
    group of equal rewards, or with fewer than two rollouts, gets exactly 0; in any other group
    every wrong answer gets -1.

    Args:
      where: See the module.
      rewards: As in the module, and not negative.
      scale: "mean", or "root" for its square root, which lies between this and no division.
      eps: Added to the divisor, above 0.

    Returns:
      Advantages ``[..., G]``; they add up to 0 over a group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.maxrl(jnp.array([1.0, 0.0, 0.0, 0.0])).round(3).tolist()
      [3.0..., -1.0, -1.0, -1.0]

    References:
      MaxRL (arXiv:2602.02710), as in the authors' code, which divides the reward of a group of one
      by eps. "root" is their ``one_sided_grpo``.
    """
    stats.check_group("maxrl", rewards, where)
    checks.check_option("maxrl", "scale", scale, ("mean", "root"))
    checks.check_positive("maxrl", finite=True, eps=eps)
    rewards = masking.zero_masked(rewards, where)
    mean = stats.group_mean(rewards, where)
    divisor = masking.safe_sqrt(mean) if scale == "root" else mean
    # The mean of three float32 rewards of 0.1 is not 0.1.
    constant = stats.group_is_constant(rewards, where)
    advantages = jnp.where(constant, 0.0, rewards - mean) / (divisor + eps)
    return masking.zero_masked(advantages, where)


def maclaurin_weights(right: Array, total: Array, *, order: int) -> tuple[Array, Array]:
    """Weights of right and wrong answers for a truncated series of the log-probability.

        w_right = 1 / n
        w_wrong = -(1 / n) sum_{j=2..order} C(n - c - 1, j - 1) / C(n - 1, j - 1)

    ``-log p = sum_j (1 - p)^j / j``; the first ``order`` terms have the gradient ``-sum_{j < order}
    (1-p)^j grad p``. The sum over the group (not the mean) of the weights times ``grad log pi_i``
    is an unbiased estimate of minus that gradient, for every order up to n; terms beyond n are left
    out. Order 1 is the plain policy gradient without a baseline.

    Args:
      right: Whole numbers c of any shape.
      total: Whole numbers n of the same shape.
      order: How many terms, at least 1.

    Returns:
      Weights of a right and of a wrong answer, float32 of ``right``'s shape; 0 without answers.

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
    _check_whole("maclaurin_weights", "order", order)
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

    The advantages are n times :func:`maclaurin_weights`, since the loss is a mean over rollouts.
    The larger the order, the more hard prompts count. The advantages do not add up to 0: in a group
    of only wrong answers each gets ``1 - min(order, n)``, which lowers their probability.

    Args:
      rewards, where, threshold: See the module.
      order: How many terms, at least 1; those beyond the size of a group are left out.

    Returns:
      Advantages ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.maclaurin(jnp.array([1.0, 0.0, 0.0, 0.0]), order=2).round(4).tolist()
      [1.0, -0.666..., -0.666..., -0.666...]

    References:
      MaxRL (arXiv:2602.02710); in the authors' code the aggregation applies the factor n.
    """
    _check_whole("maclaurin", "order", order)
    x = _count("maclaurin", rewards, where, threshold)
    order = min(order, max(jnp.shape(rewards)[-1], 1))
    _, wrong = maclaurin_weights((x.total - x.wrong)[..., 0], x.total[..., 0], order=order)
    # A NaN takes neither side, and stays.
    advantages = x.right + (1.0 - x.right) * (wrong[..., None] * x.total)
    return masking.zero_masked(advantages, where)
