"""Advantages from a critic's values."""

import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs, batch, returns
from jaxrl_llm.core import Array, checks, masking, traits


@traits(token_values=True)
def gae(
    rewards: Array,
    mask: Array,
    *,
    values: Array,
    where: Array | None = None,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    kl_coef: float | Array = 0.0,
    gamma: float | Array = 1.0,
    lam: float | Array = 0.95,
    whiten: bool = True,
    clip: float | None = None,
) -> Array:
    """Generalized advantage estimation over the tokens of a response.

        delta[t] = R[t] + gamma V[next] - V[t]
        A[t] = delta[t] + gamma lam A[next]       next: the next kept token; 0 after the last
        then whitened over the batch, then clipped to [-clip, clip]

    ``R`` is the reward on the last token minus ``kl_coef (old_logp - ref_logp)`` on every one
    (:func:`kl_shaped_rewards`). ``lam=1`` gives the return minus the value, ``lam=0`` the one-step
    error. Masked tokens are stepped over: their values are not read and they cost no discount.

    Args:
      rewards: ``[..., G]``, floating point, one a rollout.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      values: ``[..., G, T]``, floating point: the critic's value of the state before each token, in
        units of reward.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all. The rest, and
        their tokens, count in no statistic, get 0 and may hold anything.
      old_logp: ``[..., G, T]`` log-probabilities (nats) under the policy that sampled; not needed
        without a penalty.
      ref_logp: ``[..., G, T]`` under the reference; not needed without a penalty.
      kl_coef: Penalty for a nat, in units of reward: a number, or an array with the mask's axes,
        each whole or 1. The number 0 leaves the penalty out.
      gamma: Discount for a kept token, in [0, 1].
      lam: How far the estimate trusts rewards over values, in [0, 1].
      whiten: Whether to shift and scale over all kept tokens (:func:`jaxrl_llm.advantages.whiten`).
      clip: Greatest size of an advantage, above 0; None for none.

    Returns:
      Advantages ``[..., G, T]``, float32, 0 where masked.

    Raises:
      TypeError: If ``mask`` or ``where`` is not bool or another array is not floating point.
      ValueError: If the shapes do not match, an option is out of its range, or ``kl_coef`` is not 0
        and a log-probability is None.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, mask = jnp.array([[0.5, 0.25]]), jnp.ones((1, 2), bool)
      >>> jr.advantages.gae(
      ...     jnp.array([1.0]), mask, values=values, lam=0.5, whiten=False).tolist()
      [[0.125, 0.75]]

    References:
      Schulman et al., GAE (arXiv:1506.02438). As in verl, which always whitens. Zheng et al.,
      PPO-max (arXiv:2307.04964) clips to 0.5; MOSS-RLHF has both off in its scripts and whitens
      minibatches with the population variance.
    """
    checks.check_positive("gae", clip=clip)
    advantages, _, tokens = _estimate(
        "gae", rewards, mask, values, where, old_logp, ref_logp, kl_coef, gamma, lam
    )
    if whiten:
        advantages = batch.whiten(advantages, tokens)
    return advantages if clip is None else jnp.clip(advantages, -clip, clip)


@traits(token_values=True)
def gae_returns(
    rewards: Array,
    mask: Array,
    *,
    values: Array,
    where: Array | None = None,
    old_logp: Array | None = None,
    ref_logp: Array | None = None,
    kl_coef: float | Array = 0.0,
    gamma: float | Array = 1.0,
    lam: float | Array = 0.95,
) -> Array:
    """What a critic is trained to predict: the plain advantages of :func:`gae` plus the values.

        returns[t] = A[t] + V[t]         A neither whitened nor clipped

    ``lam=1`` gives the discounted return of the rewards.

    Args:
      rewards: ``[..., G]``, floating point, one a rollout.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      values: ``[..., G, T]``, floating point: the critic's value of the state before each token.
      where: bool ``[..., G]``, True for rollouts that take part. None keeps all.
      old_logp: As in :func:`gae`.
      ref_logp: As in :func:`gae`.
      kl_coef: As in :func:`gae`.
      gamma: Discount for a kept token, in [0, 1].
      lam: How far the estimate trusts rewards over values, in [0, 1].

    Returns:
      ``[..., G, T]`` float32, in units of reward, 0 where masked.

    Raises:
      TypeError: If ``mask`` or ``where`` is not bool or another array is not floating point.
      ValueError: If the shapes do not match, an option is out of its range, or ``kl_coef`` is not 0
        and a log-probability is None.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, mask = jnp.array([[0.5, 0.25]]), jnp.ones((1, 2), bool)
      >>> jr.advantages.gae_returns(jnp.array([1.0]), mask, values=values, lam=0.5).tolist()
      [[0.625, 1.0]]

    References:
      Schulman et al., GAE (arXiv:1506.02438). As in verl.
    """
    advantages, values, _ = _estimate(
        "gae_returns", rewards, mask, values, where, old_logp, ref_logp, kl_coef, gamma, lam
    )
    return advantages + values


def _estimate(
    function, rewards, mask, values, where, old_logp, ref_logp, kl_coef, gamma, lam
) -> tuple[Array, Array, Array]:
    """Advantages and values, zero where masked, and the tokens that take part."""
    arrays = {"values": values, "old_logp": old_logp, "ref_logp": ref_logp}
    tokens = _inputs.check_tokens(function, rewards, mask, where, **arrays)
    if values is None:
        raise ValueError(f"{function}: values is None; it takes a critic's value of each token.")
    checks.check_share(function, gamma=gamma, lam=lam)
    _inputs.check_coefficients(function, mask, gamma=gamma, lam=lam)
    token_rewards = returns.shaped(function, rewards, tokens, old_logp, ref_logp, kl_coef)
    values = masking.zero_masked(values, tokens)
    # The value at a token or, where it is masked, at the next kept one.
    ahead = returns.recur_back(jnp.where(tokens, 0.0, 1.0), values)
    end = jnp.zeros((*jnp.shape(values)[:-1], 1), jnp.float32)
    following = jnp.concatenate([ahead[..., 1:], end], axis=-1)[..., : jnp.shape(values)[-1]]
    delta = masking.zero_masked(token_rewards + gamma * following - values, tokens)
    factors = jnp.where(tokens, jnp.asarray(gamma * lam, jnp.float32), 1.0)
    return masking.zero_masked(returns.recur_back(factors, delta), tokens), values, tokens
