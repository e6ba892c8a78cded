"""Regression of the ratio to a bound: BPO and its group form.

All but :func:`gbpo` work on groups along the last axis: ``values`` or ``rewards`` ``[..., G]``,
floating point, one an action or rollout; ``where`` bool ``[..., G]``, True for entries to include,
None for all. Other shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

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
    """Moves the ratio toward the bound that the advantage favors, and back to it from beyond.

        target[t] = 1 + eps_high if M[t] > 0,  1 - eps_low if M[t] < 0,  1 if M[t] = 0
        loss[t] = |A[t]| |r[t] - target[t]|

    M is the reward relative to the median of its group and decides the direction; A is relative to
    the mean and decides the weight. Inside the band, where A and M have the same sign, the gradient
    is that of ``-A * r``; beyond the bound, where PPO has no gradient, it points back to the bound.
    Where the signs differ the token moves in the direction of M. The gradient is discontinuous at
    the target, so where M = 0 even a ratio that differs from 1 by rounding has the full gradient.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high: See the package.
      median_advantages: ``[..., T]`` or ``[...]``, relative to a median; only the sign counts. See
        :func:`median_advantage`.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked; never negative.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, advantages = jnp.ones(3, bool), jnp.full(3, 2.0)
      >>> loss = lambda x: jr.surrogates.gbpo(
      ...     x, jnp.zeros(3), advantages, mask, median_advantages=jnp.ones(3)).sum()
      >>> print(jax.grad(loss)(jnp.log(jnp.array([1.0, 1.19, 1.5]))))
      [-2.   -2.38  3.  ]

    References:
      Bounded Ratio Reinforcement Learning (arXiv:2604.18578), PAPER reading; the weighting for
      groups (``aggregate.sequence_mean``, as in GRPO) is our choice.
    """
    checks.check_non_negative("gbpo", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("gbpo", logp, old_logp, advantages, mask)
    median = masking.spread("gbpo", "median_advantages", median_advantages, mask)
    median = jax.lax.stop_gradient(median)
    target = 1.0 + jnp.where(median > 0, eps_high, jnp.where(median < 0, -eps_low, 0.0))
    return x.finish(jnp.abs(x.advantages) * masking.distance(x.ratio - target))


def median_advantage(rewards: Array, *, where: Array | None = None) -> Array:
    """Rewards minus the median of their group, divided by its deviation.

        M_i = (r_i - median(r)) / std(r)            population deviation; an even group has the mean
                                                    of its two middle rewards as median

    It is the ``median_advantages`` of :func:`gbpo`. Rewards equal to the median, which may be half
    the group or more, get exactly 0; so does a group that is empty or whose unmasked rewards are
    all equal.

    Args:
      rewards, where: See the module. Masked entries count in no statistic and get 0.

    Returns:
      ``[..., G]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.median_advantage(jnp.array([1.0, 1.0, 1.0, 0.0, 0.0])).round(3).tolist()
      [0.0, 0.0, 0.0, -2.04..., -2.04...]

    References:
      BPO (arXiv:2604.18578), PAPER reading.
    """
    stats.check_group("median_advantage", rewards, where)
    rewards = masking.zero_masked(rewards, where)
    constant = stats.group_is_constant(rewards, where)
    std = stats.group_std(rewards, where, ddof=0)
    # The squares of very small rewards underflow.
    std = jnp.where(constant | (std == 0), 1.0, std)
    median = stats.group_median(rewards, where, kind="midpoint")
    return masking.zero_masked(jnp.where(constant, 0.0, (rewards - median) / std), where)


def bpo_soft_target(
    values: Array, center: Array, *, eps: float = 0.2, temperature: float = 1e-2
) -> Array:
    """Target of the ratio with a smooth sign of the advantage, set by a temperature.

        target = 1 + eps tanh((Q - center) / (2 temperature))

    As the temperature goes to 0 it is ``1 + eps sign(Q - center)``. With the center of
    :func:`bpo_center` the targets of a group average to 1, as ratios must.

    Args:
      values: See the module.
      center: ``[..., 1]``, or any shape that broadcasts.
      eps: Largest distance of the target from 1, not negative.
      temperature: In units of value, above 0.

    Returns:
      ``[..., G]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values = jnp.array([0.0, 1.0, 3.0])
      >>> jr.surrogates.bpo_soft_target(values, 1.0, temperature=1.0).round(4).tolist()
      [0.907..., 1.0, 1.152...]

    References:
      BPO (arXiv:2604.18578), PAPER reading; the hyperbolic form is ours, equal to the logistic one.
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
    ``mean |Q - center| / 2``, and the minimizer the median. Use it for a learned center;
    :func:`bpo_center` solves for the center of a group.

    Args:
      values, where: See the module.
      center: ``[..., 1]``, one per group.
      temperature: In units of value, above 0.

    Returns:
      ``[...]`` float32, 0 for an empty group.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values = jnp.array([0.0, 1.0, 5.0])
      >>> loss = lambda mu: jr.surrogates.bpo_mu_loss(values, mu, temperature=1e-3)[()]
      >>> print(jax.grad(loss)(jnp.array([2.0])), loss(jnp.array([1.0])))
      [0.166...] 0.833...

    References:
      BPO (arXiv:2604.18578), PAPER reading; the algebra of this form is ours.
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
    relative to the spread, near the mean where it is large. It is computed by bisection over the
    range of the group.

    Args:
      values, where: See the module.
      temperature: In units of value, above 0.

    Returns:
      ``[..., 1]`` float32, a constant; 0 for an empty group. The solution may not be unique.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> print(jr.surrogates.bpo_center(jnp.array([0.0, 0.1, 0.9, 1.2, 3.0])))
      [0.9...]

    References:
      BPO (arXiv:2604.18578), PAPER reading.
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
