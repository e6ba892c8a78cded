"""Advantages normalized over the whole batch; they must be given the global batch."""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs, returns
from jaxrl_llm.core import Array, checks, masking, stats, traits


@traits(token_values=True)
def whiten(x: Array, mask: Array, *, eps: float = 1e-8, shift_mean: bool = True) -> Array:
    """Shifts and scales values so that over the kept tokens they have mean 0 and variance 1.

        y = (x - m) / sqrt(v + eps)         m, v over all kept tokens, v with n - 1
        shift_mean=False:  y + m

    One value a rollout counts once for each of its tokens, which is what sets this apart from
    :func:`batch_normalize`. Fewer than two tokens, or all of one value, give exactly 0 (``m`` with
    ``shift_mean=False``).

    Args:
      x: ``[..., T]`` or one value a sequence ``[...]``, floating point.
      mask: bool ``[..., T]``, True = keep. The rest are never read.
      eps: Above 0; added to the variance.
      shift_mean: Whether the mean is taken out; if not, it is added back after the scaling.

    Returns:
      ``[..., T]`` float32, 0 where masked.

    Raises:
      TypeError: If ``mask`` is not bool or ``x`` is not floating point.
      ValueError: If the shapes do not match or ``eps`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.array([[True, False, False], [True, True, True]])
      >>> jr.advantages.whiten(jnp.array([1.0, 0.0]), mask).round(4).tolist()
      [[1.5, 0.0, 0.0], [-0.5, -0.5, -0.5]]

    References:
      verl's ``masked_whiten``. MOSS-RLHF divides the variance by n and adds 1e-6.
    """
    checks.check_mask("whiten", mask)
    checks.check_min_rank("whiten", 1, mask=mask)
    checks.check_positive("whiten", eps=eps)
    x = masking.spread("whiten", "x", x, mask)
    mean = masking.masked_mean(x, mask)
    scaled = (x - mean) / jnp.sqrt(masking.masked_var(x, mask, ddof=1) + eps)
    scaled = jnp.where(masking.is_constant(x, mask), 0.0, scaled)
    return masking.zero_masked(scaled if shift_mean else scaled + mean, mask)


def clip(x: Array, *, bound: float) -> Array:
    """Advantages with their size bounded; in a chain it stands last.

        y = min(max(x, -bound), bound)

    Args:
      x: ``[...]``, floating point.
      bound: Greatest size, above 0.

    Returns:
      Float32 of the same shape.

    Raises:
      TypeError: If ``x`` is not floating point.
      ValueError: If ``bound`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.clip(jnp.array([0.25, -3.0]), bound=0.5).tolist()
      [0.25, -0.5]

    References:
      Zheng et al., PPO-max (arXiv:2307.04964), with a bound of 0.5.
    """
    checks.check_float("clip", x=x)
    checks.check_positive("clip", bound=bound)
    return jnp.clip(jnp.asarray(x, jnp.float32), -bound, bound)


def batch_normalize(x: Array, *, where: Array | None = None, eps: float = 1e-8) -> Array:
    """Shifts and scales one value a rollout to mean 0 and deviation 1 over the batch.

        y = (x - mean(x)) / (std(x) + eps)         over all kept rollouts, std with n - 1

    A rollout counts once, however long; :func:`whiten` counts tokens. Fewer than two rollouts, or
    all of one value, give exactly 0. In a chain it normalizes what another advantage returned.

    Args:
      x: ``[...]``, floating point, such as advantages ``[P, G]``.
      where: bool of the same shape, True for entries that take part. None keeps all. The rest count
        in no statistic, get 0 and may hold anything.
      eps: Above 0; added to the deviation, in units of ``x``.

    Returns:
      Float32 of the same shape.

    Raises:
      TypeError: If ``x`` is not floating point or ``where`` is not bool.
      ValueError: If the shapes differ or ``eps`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.batch_normalize(jnp.array([[1.0, 0.0, 0.5]])).tolist()
      [[1.0, -1.0, 0.0]]

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262); dividing by n - 1 is our choice.
    """
    checks.check_float("batch_normalize", x=x)
    checks.check_bool("batch_normalize", where=where)
    checks.check_same_shape("batch_normalize", x=x, where=where)
    checks.check_positive("batch_normalize", eps=eps)
    x = masking.zero_masked(x, where)
    shifted = x - masking.masked_mean(x, where)
    scaled = shifted / (masking.masked_std(x, where, ddof=1) + eps)
    scaled = jnp.where(masking.is_constant(x, where), 0.0, scaled)
    return masking.zero_masked(scaled, where)


@traits(token_values=True)
def reinforce_pp_baseline(
    rewards: Array,
    mask: Array,
    *,
    where: Array | None = None,
    norm: Literal["token", "sequence"] = "token",
    eps: float = 1e-8,
) -> Array:
    """Rewards minus their group mean, then normalized over the batch, one value a token.

        a_i = r_i - mean_group(r)
        norm="token":     A[i, t] = (a_i - m) / sqrt(v + eps)      m, v over all kept tokens
        norm="sequence":  A[i, t] = (a_i - m) / (sqrt(v) + eps)    m, v over all kept rollouts

    Both variances divide by n - 1. The token form counts a rollout once for each of its tokens, so
    its mean is not 0 when lengths differ, and a group of equal rewards then gets an advantage that
    is not 0. With equal lengths the two differ only in n - 1 and eps. A group of one keeps its
    reward, ``a_i = r_i``, before the normalization. Fewer than two entries to normalize over, or
    all of them equal, give exactly 0.

    Args:
      rewards: ``[..., G]``, floating point, one a rollout; a group lies along the last axis.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all. The rest, and
        their tokens, count in no statistic, get 0 and may hold anything.
      norm: What the normalization counts: "token" or "sequence". A kept rollout without a token
        counts in the second only.
      eps: Above 0; added to the variance (in squared units of reward) for "token", to the deviation
        for "sequence".

    Returns:
      Advantages ``[..., G, T]``, float32, 0 where masked.

    Raises:
      TypeError: If ``rewards`` is not floating point, or ``mask`` or ``where`` is not bool.
      ValueError: If the shapes do not match, ``norm`` is unknown or ``eps`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.0], [1.0, 1.0]])
      >>> mask = jnp.arange(3) < jnp.array([[1, 3], [2, 2]])[..., None]
      >>> jr.advantages.reinforce_pp_baseline(rewards, mask)[..., 0].round(4).tolist()
      [[1.767..., -1.060...], [0.353..., 0.353...]]

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262). ``norm="token"`` is verl's
      ``reinforce_plus_plus_baseline``; ``norm="sequence"`` is the form that BroRL and ProRL state,
      where dividing by n - 1 is our choice. verl raises where fewer than two tokens are left.
    """
    tokens = _inputs.check_tokens("reinforce_pp_baseline", rewards, mask, where)
    checks.check_option("reinforce_pp_baseline", "norm", norm, ("token", "sequence"))
    checks.check_positive("reinforce_pp_baseline", eps=eps)
    rewards = masking.zero_masked(rewards, where)
    centered = jnp.where(
        stats.group_is_constant(rewards, where), 0.0, rewards - stats.group_mean(rewards, where)
    )
    centered = jnp.where(stats.group_count(rewards, where) == 1, rewards, centered)
    if norm == "token":
        return whiten(centered, tokens, eps=eps)
    normalized = batch_normalize(centered, where=where, eps=eps)
    return masking.spread("reinforce_pp_baseline", "advantages", normalized, tokens)


@traits(token_values=True)
def reinforce_pp(
    rewards: Array,
    mask: Array,
    *,
    where: Array | None = None,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    kl_coef: float | Array = 0.0,
    gamma: float | Array = 1.0,
    eps: float = 1e-8,
) -> Array:
    """Returns of tokens, whitened over the batch; no group and no critic.

        R[i, t] = 1[t is last] r_i - kl_coef (old_logp[i, t] - ref_logp[i, t])
        G[i, t] = R[i, t] + gamma G[i, next kept token]
        A = (G - m) / sqrt(v + eps)         m, v over all kept tokens of the batch, v with n - 1

    It is :func:`kl_shaped_rewards`, :func:`reward_to_go` and :func:`whiten` one after the other;
    a chain of those takes another estimator of the KL divergence. Long rollouts weigh more in the
    statistics. Fewer than two tokens, or returns that are all equal, give exactly 0.

    Args:
      rewards: ``[..., G]``, floating point, one a rollout.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all. The rest, and
        their tokens, count in no statistic, get 0 and may hold anything.
      old_logp: ``[..., G, T]`` log-probabilities (nats) under the policy that sampled; not needed
        without a penalty.
      ref_logp: ``[..., G, T]`` under the reference; not needed without a penalty.
      kl_coef: Penalty for a nat, in units of reward: a number, or an array with the mask's axes,
        each whole or 1, such as ``[P, 1, 1]`` from a controller. The number 0 leaves the penalty
        out.
      gamma: Discount for a kept token, in [0, 1].
      eps: Above 0; added to the variance.

    Returns:
      Advantages ``[..., G, T]``, float32, 0 where masked.

    Raises:
      TypeError: If ``mask`` or ``where`` is not bool or another array is not floating point.
      ValueError: If the shapes do not match, an option is out of its range, or ``kl_coef`` is not 0
        and a log-probability is None.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.arange(3) < jnp.array([[1], [3]])
      >>> jr.advantages.reinforce_pp(jnp.array([1.0, 0.0]), mask).round(4).tolist()
      [[1.5, 0.0, 0.0], [-0.5, -0.5, -0.5]]

    References:
      Hu et al., REINFORCE++ (arXiv:2501.03262), as verl's ``reinforce_plus_plus`` computes it from
      0.9 on (see :func:`reward_to_go`). Which estimator the paper's penalty uses was not checked;
      verl's default is k1. verl raises where fewer than two tokens are left.
    """
    name = "reinforce_pp"
    tokens = _inputs.check_tokens(name, rewards, mask, where, old_logp=old_logp, ref_logp=ref_logp)
    checks.check_share(name, gamma=gamma)
    _inputs.check_coefficients(name, mask, gamma=gamma)
    checks.check_positive(name, eps=eps)
    token_rewards = returns.shaped(name, rewards, tokens, old_logp, ref_logp, kl_coef)
    return whiten(returns.reward_to_go(token_rewards, tokens, gamma=gamma), tokens, eps=eps)
