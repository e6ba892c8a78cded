"""Advantages from a critic's values."""

import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs, returns
from jaxrl_llm.core import Array, checks, masking, traits


@traits(token_values=True)
def gae(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    gamma: float | Array = 1.0,
    lam: float | Array = 0.95,
    bootstrap_value: Array | None = None,
) -> Array:
    """Generalized advantage estimation over the tokens of a response.

        delta[t] = R[t] + gamma V[next] - V[t]
        A[t] = delta[t] + gamma lam A[next]       next: the next kept token

    After the last kept token ``V[next]`` is the bootstrap value and ``A[next]`` is 0. ``lam=1``
    gives the return minus the value, ``lam=0`` the one-step error. Masked tokens are stepped over:
    their values are not read and they cost no discount.

    PPO is a chain: :func:`terminal_rewards` or :func:`kl_shaped_rewards`, ``gae``, :func:`whiten`
    and :func:`clip`.

    Args:
      token_rewards: ``[..., T]``, floating point.
      values: ``[..., T]``, floating point: the critic's value of the state before each token, in
        units of reward.
      mask: bool ``[..., T]``, True for the response tokens that are trained.
      gamma: Discount for a kept token, in [0, 1]: a number, or an array with the mask's axes, each
        whole or 1.
      lam: How far the estimate trusts rewards over values, in [0, 1], as ``gamma``.
      bootstrap_value: ``[...]``, floating point: the value of the state after the last kept token,
        for responses that were cut off. None means 0, the value of an end.

    Returns:
      Advantages ``[..., T]``, float32, 0 where masked.

    Raises:
      TypeError: If ``mask`` is not bool or another array is not floating point.
      ValueError: If the shapes do not match, ``values`` is None or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.25]])
      >>> mask = jnp.ones((1, 2), bool)
      >>> jr.advantages.gae(rewards, values, mask, lam=0.5).tolist()
      [[0.125, 0.75]]
      >>> jr.advantages.gae(rewards, values, mask, lam=0.5, bootstrap_value=jnp.ones(1)).tolist()
      [[0.625, 1.75]]

    References:
      Schulman et al., GAE (arXiv:1506.02438). verl's always whitens. Zheng et al., PPO-max
      (arXiv:2307.04964) clips to 0.5; MOSS-RLHF has both off in its scripts and whitens minibatches
      with the population variance.
    """
    return _estimate("gae", token_rewards, values, mask, gamma, lam, bootstrap_value)


@traits(token_values=True)
def gae_returns(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    gamma: float | Array = 1.0,
    lam: float | Array = 0.95,
    bootstrap_value: Array | None = None,
) -> Array:
    """What a critic is trained to predict: the advantages of :func:`gae` plus the values.

        returns[t] = A[t] + V[t]

    ``lam=1`` gives the discounted return of the rewards.

    Args:
      token_rewards: As in :func:`gae`.
      values: As in :func:`gae`.
      mask: As in :func:`gae`.
      gamma: As in :func:`gae`.
      lam: As in :func:`gae`.
      bootstrap_value: As in :func:`gae`.

    Returns:
      ``[..., T]`` float32, in units of reward, 0 where masked.

    Raises:
      TypeError: If ``mask`` is not bool or another array is not floating point.
      ValueError: If the shapes do not match, ``values`` is None or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.25]])
      >>> jr.advantages.gae_returns(rewards, values, jnp.ones((1, 2), bool), lam=0.5).tolist()
      [[0.625, 1.0]]

    References:
      Schulman et al., GAE (arXiv:1506.02438). As in verl.
    """
    advantages = _estimate("gae_returns", token_rewards, values, mask, gamma, lam, bootstrap_value)
    return advantages + masking.zero_masked(values, mask)


def _estimate(function, token_rewards, values, mask, gamma, lam, bootstrap_value) -> Array:
    if values is None:
        raise ValueError(f"{function}: values is None; it takes a critic's value of each token.")
    _inputs.check_token_rewards(function, token_rewards, mask, None, values=values)
    checks.check_share(function, gamma=gamma, lam=lam)
    _inputs.check_coefficients(function, mask, gamma=gamma, lam=lam)
    values = masking.zero_masked(values, mask)
    # The value at a token or, where it is masked, at the next kept one.
    at_or_after = returns.recur_back(jnp.where(mask, 0.0, 1.0), values)
    end = jnp.zeros((*jnp.shape(values)[:-1], 1), jnp.float32)
    following = jnp.concatenate([at_or_after[..., 1:], end], axis=-1)[..., : values.shape[-1]]
    if bootstrap_value is not None:
        checks.check_float(function, bootstrap_value=bootstrap_value)
        checks.check_shape(function, "bootstrap_value", bootstrap_value, jnp.shape(mask)[:-1])
        after = jnp.asarray(bootstrap_value, jnp.float32)[..., None]
        following = jnp.where(masking.last_token(mask), after, following)
    rewards = masking.zero_masked(token_rewards, mask)
    delta = masking.zero_masked(rewards + gamma * following - values, mask)
    factors = jnp.where(mask, jnp.asarray(gamma * lam, jnp.float32), 1.0)
    return masking.zero_masked(returns.recur_back(factors, delta), mask)
