"""Regression of the ratio to a bound: BPO and its form for groups."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats, traits
from jaxrl_llm.surrogates import _inputs

# Halvings of the bracket that hold the center; more than float32 has bits.
_HALVINGS = 40


@traits(policy_gradient=False)
def gbpo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    median_advantages: Array,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Array:
    """Moves the ratio to the bound on the good side, and back to it from beyond.

        target[t] = 1 + eps_high if M[t] > 0,  1 - eps_low if M[t] < 0,  1 if M[t] = 0
        loss[t] = |A[t]| |r[t] - target[t]|

    M is the reward relative to the median of its group and decides the direction; A is relative to
    the mean and decides the weight. Unlike PPO's clip it has a gradient beyond the bound, which
    leads back. Inside the band, where A and M have one sign, the gradient is that of ``-A * r``.
    Where they differ in sign it is not: such a token is moved to the side of M. The gradient jumps
    at the target, so where M = 0 a ratio that differs from 1 by rounding has all of it.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained.
      advantages: ``[..., T]``, or ``[...]`` for one value a sequence; relative to a mean.
      mask: bool ``[..., T]``, True = keep.
      median_advantages: Of either shape, relative to a median; only its sign counts. See
        :func:`median_advantage`.
      eps_low: Distance of the lower bound from 1.
      eps_high: Distance of the upper bound from 1.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked; never negative.

    Raises:
      ValueError: If shapes differ or an epsilon is negative.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, advantages = jnp.ones(3, bool), jnp.full(3, 2.0)
      >>> loss = lambda x: jr.surrogates.gbpo(
      ...     x, jnp.zeros(3), advantages, mask, median_advantages=jnp.ones(3)).sum()
      >>> print(jax.grad(loss)(jnp.log(jnp.array([1.0, 1.19, 1.5]))))
      [-2.   -2.38  3.  ]

    References:
      Bounded Ratio Reinforcement Learning (arXiv:2604.18578), PAPER reading; which weighting goes
      with groups (``aggregate.sequence_mean``, as in GRPO) is our reading.
    """
    checks.check_non_negative("gbpo", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("gbpo", logp, old_logp, advantages, mask)
    median = masking.spread("gbpo", "median_advantages", median_advantages, mask)
    median = jax.lax.stop_gradient(median)
    target = 1.0 + jnp.where(median > 0, eps_high, jnp.where(median < 0, -eps_low, 0.0))
    return x.finish(jnp.abs(x.advantages) * masking.distance(x.ratio - target))


def median_advantage(rewards: Array, *, where: Array | None = None) -> Array:
    """Rewards relative to the median of their group, over its deviation.

        M_i = (r_i - median(r)) / std(r)            population deviation; an even group has the mean
                                                    of its two middle rewards as median

    It is what :func:`gbpo` takes as ``median_advantages``. Half the group or more may sit on the
    median and get exactly 0. A group whose unmasked rewards are all equal, or an empty one, gets
    exactly 0.

    Args:
      rewards: ``[..., G]``, floating point, one a rollout; a group lies along the last axis.
      where: bool ``[..., G]``, True for rollouts to include. None for all. The rest count in
        no statistic, get 0 and may hold anything.

    Returns:
      ``[..., G]``, float32.

    Raises:
      TypeError: If ``rewards`` is not floating point or ``where`` is not bool.
      ValueError: If the shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.median_advantage(jnp.array([1.0, 1.0, 1.0, 0.0, 0.0])).round(3).tolist()
      [0.0, 0.0, 0.0, -2.04..., -2.04...]

    References:
      Bounded Ratio Reinforcement Learning (arXiv:2604.18578), PAPER reading.
    """
    stats.check_group("median_advantage", rewards, where)
    rewards = masking.zero_masked(rewards, where)
    constant = stats.group_is_constant(rewards, where)
    std = jnp.where(constant, 1.0, stats.group_std(rewards, where, ddof=0))
    median = stats.group_median(rewards, where, kind="midpoint")
    return masking.zero_masked(jnp.where(constant, 0.0, (rewards - median) / std), where)


def bpo_soft_target(
    values: Array, center: Array, *, eps: float = 0.2, temperature: float = 1e-2
) -> Array:
    """Target of the ratio that leaves the sign of the advantage to a temperature.

        target = 1 + eps tanh((Q - center) / (2 temperature))

    As the temperature goes to 0 it is ``1 + eps sign(Q - center)``. With the center of
    :func:`bpo_center` the targets of a group average to 1, as ratios must.

    Args:
      values: ``[..., G]``, the value of each action or rollout.
      center: ``[..., 1]`` or whatever broadcasts.
      eps: Greatest distance of the target from 1.
      temperature: In units of value, above 0.

    Returns:
      ``[..., G]`` float32.

    Raises:
      ValueError: If shapes do not broadcast, ``eps`` is negative or ``temperature`` is not above 0.
      TypeError: If an array is not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> target = jr.surrogates.bpo_soft_target(jnp.array([0.0, 1.0, 3.0]), 1.0, temperature=1.0)
      >>> [round(x, 4) for x in target.tolist()]
      [0.9076, 1.0, 1.1523]

    References:
      Bounded Ratio Reinforcement Learning (arXiv:2604.18578), PAPER reading: the hyperbolic form is
      ours, equal to the paper's logistic one.
    """
    checks.check_non_negative("bpo_soft_target", eps=eps)
    checks.check_positive("bpo_soft_target", temperature=temperature)
    checks.check_float("bpo_soft_target", values=values, center=center)
    distance = jnp.asarray(values, jnp.float32) - jnp.asarray(center, jnp.float32)
    return 1.0 + eps * jnp.tanh(distance / (2.0 * temperature))


def bpo_mu_loss(
    values: Array, center: Array, *, where: Array | None = None, temperature: float = 1e-2
) -> Array:
    """Convex loss whose minimizer in ``center`` makes the soft targets average to 1.

        loss = temperature mean_G(softplus(x) - x / 2),   x = (Q - center) / temperature

    Its derivative in the center is ``-mean(tanh(x / 2)) / 2``. As the temperature goes to 0 it is
    ``mean |Q - center| / 2``, and the minimizer the median. It serves a center that is learned;
    for one of a group that is at hand see :func:`bpo_center`.

    Args:
      values: ``[..., G]``, the value of each action or rollout.
      center: ``[..., 1]``, one a group.
      where: bool ``[..., G]``, True for entries to include. None for all.
      temperature: In units of value, above 0.

    Returns:
      ``[...]`` float32, 0 for an empty group.

    Raises:
      ValueError: If shapes differ or ``temperature`` is not above 0.
      TypeError: If ``where`` is not bool or another array is not floating point.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values = jnp.array([0.0, 1.0, 5.0])
      >>> loss = lambda mu: jr.surrogates.bpo_mu_loss(values, mu, temperature=1e-3)[()]
      >>> print(jax.grad(loss)(jnp.array([2.0])), loss(jnp.array([1.0])))
      [0.166...] 0.833...

    References:
      Bounded Ratio Reinforcement Learning (arXiv:2604.18578), PAPER reading; the algebra of this
      form is ours.
    """
    values = _group("bpo_mu_loss", values, where, temperature)
    checks.check_float("bpo_mu_loss", center=center)
    checks.check_shape("bpo_mu_loss", "center", center, (*values.shape[:-1], 1))
    x = masking.zero_masked(values - jnp.asarray(center, jnp.float32), where) / temperature
    return temperature * masking.masked_mean(jax.nn.softplus(x) - 0.5 * x, where, axis=-1)


def bpo_center(values: Array, *, where: Array | None = None, temperature: float = 1e-2) -> Array:
    """The center of each group at which its soft targets average to 1.

        mean_G tanh((Q - center) / (2 temperature)) = 0

    It is the minimizer of :func:`bpo_mu_loss`: near the median where the temperature is small
    against the spread, the mean where it is large. Found by halving the range of the group.

    Args:
      values: ``[..., G]``, the value of each action or rollout.
      where: bool ``[..., G]``, True for entries to include. None for all.
      temperature: In units of value, above 0.

    Returns:
      ``[..., 1]`` float32, a constant; 0 for an empty group. Where all of an interval solves the
      equation to float32, some point of it.

    Raises:
      ValueError: If shapes differ or ``temperature`` is not above 0.
      TypeError: If ``where`` is not bool or ``values`` is not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values = jnp.array([0.0, 0.1, 0.9, 1.2, 3.0])
      >>> print(jr.surrogates.bpo_center(values),
      ...       jr.surrogates.bpo_center(values, temperature=1.0))
      [0.9...] [0.96...]

    References:
      Bounded Ratio Reinforcement Learning (arXiv:2604.18578), PAPER reading.
    """
    values = jax.lax.stop_gradient(_group("bpo_center", values, where, temperature))
    valid = True if where is None else where
    least = jnp.min(values, axis=-1, keepdims=True, where=valid, initial=jnp.inf)
    greatest = jnp.max(values, axis=-1, keepdims=True, where=valid, initial=-jnp.inf)
    empty = stats.group_count(values, where) == 0
    bracket = jnp.where(empty, 0.0, least), jnp.where(empty, 0.0, greatest)

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        slope = stats.group_mean(jnp.tanh((values - middle) / (2.0 * temperature)), where)
        # A slope of exactly 0 closes the bracket: between two far values the middle is the answer.
        return jnp.where(slope >= 0, middle, low), jnp.where(slope <= 0, middle, high)

    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, bracket)
    return 0.5 * (low + high)


def _group(function: str, values: Array, where: Array | None, temperature) -> Array:
    checks.check_positive(function, temperature=temperature)
    checks.check_min_rank(function, 1, values=values)
    checks.check_float(function, values=values)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, values=values, where=where)
    return masking.zero_masked(values, where)
