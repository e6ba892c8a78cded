"""Rewards of tokens, rewards to go, and advantages from a critic.

- ``rewards``: floating point ``[..., G]``, one per rollout; ``token_rewards``: ``[..., T]``.
- ``mask``: bool, with the token axis last, True for the response tokens that are trained. Masked
  tokens (a tool's output, padding) are skipped: they are not read and cost no discount.
- ``old_logp``, ``ref_logp``: ``[..., G, T]`` log-probabilities (nats) of sampler and reference.
- ``gamma``: discount for an unmasked token, in [0, 1]: a number, or an array with the mask's axes,
  each full or 1.
- Turns are an axis like tokens: with turn rewards, turn values and ``turn_where``, :func:`gae` is
  GAE over turns.
- Results are float32 in the mask's shape, 0 where masked.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import numbers
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs
from jaxrl_llm.core import Array, checks, kl, masking, traits
from jaxrl_llm.core.scans import recur_back

__all__ = [
    "gae",
    "gae_returns",
    "kl_shaped_rewards",
    "length_adaptive_gae",
    "reward_to_go",
    "terminal_rewards",
]

Estimator = Literal["k1", "k2", "k3", "abs"]


@traits(token_values=True)
def terminal_rewards(rewards: Array, mask: Array) -> Array:
    """The reward of a rollout, placed on its last token.

        R[i, t] = r_i where t is the last unmasked token of rollout i, else 0

    A rollout without an unmasked token loses its reward, which then may hold anything.

    Args:
      rewards, mask: See the module.

    Returns:
      Token rewards ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.array([[True, True, False], [True, True, True]])
      >>> jr.advantages.terminal_rewards(jnp.array([1.0, 0.5]), mask).tolist()
      [[0.0, 1.0, 0.0], [0.0, 0.0, 0.5]]

    References:
      Ouyang et al., InstructGPT (arXiv:2203.02155), with the penalty of :func:`kl_shaped_rewards`.
    """
    mask = _inputs.check_tokens("terminal_rewards", rewards, mask, None)
    rewards = jnp.asarray(rewards, jnp.float32)[..., None]
    return masking.zero_masked(rewards, masking.last_token(mask))


@traits(token_values=True)
def kl_shaped_rewards(
    rewards: Array,
    mask: Array,
    *,
    old_logp: Array,
    ref_logp: Array,
    kl_coef: float | Array,
    estimator: Estimator = "k1",
) -> Array:
    """Token rewards minus a penalty for divergence from the reference: the KL term in the reward.

        R[i, t] = 1[t is last] r_i - kl_coef k(old_logp[i, t] - ref_logp[i, t])
        k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d      abs = |d|

    Unlike a penalty in the loss, a penalty in the reward is credited to the tokens before it. With
    k1 the rewards of a rollout add up to ``r_i - kl_coef log(old / reference)`` of the full
    rollout. In a chain it comes before :func:`reward_to_go`, :func:`remax_token` or
    :func:`otb_token`. Token rewards, such as those of :func:`turn_end_rewards`, stay at their
    tokens.

    Args:
      rewards: ``[..., G]``, one per rollout, or ``[..., G, T]``, one per token.
      mask, old_logp, ref_logp: See the module.
      kl_coef: Penalty for a nat, in units of reward: a number, or an array with the mask's axes,
        each full or 1, such as ``[P, 1, 1]`` from a controller.
      estimator: "k1", "k2", "k3" or "abs". The difference is clamped to +-20 first.

    Returns:
      Token rewards ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, ref_logp = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -1.0]])
      >>> mask = jnp.ones((1, 2), bool)
      >>> jr.advantages.kl_shaped_rewards(
      ...     jnp.array([1.0]), mask, old_logp=old_logp, ref_logp=ref_logp, kl_coef=0.5).tolist()
      [[-0.25, 1.5]]

    References:
      Ziegler et al. (arXiv:1909.08593); Zheng et al., PPO-max (arXiv:2307.04964). verl clamps only
      in k3, and MOSS-RLHF (k1) does not clamp.
    """
    of_tokens = jnp.ndim(rewards) == jnp.ndim(mask) > 0
    check = _inputs.check_token_rewards if of_tokens else _inputs.check_tokens
    check("kl_shaped_rewards", rewards, mask, None, old_logp=old_logp, ref_logp=ref_logp)
    checks.check_option("kl_shaped_rewards", "estimator", estimator, kl.ESTIMATORS)
    return _shaped("kl_shaped_rewards", rewards, mask, old_logp, ref_logp, kl_coef, estimator)


@traits(token_values=True)
def reward_to_go(token_rewards: Array, mask: Array, *, gamma: float | Array = 1.0) -> Array:
    """The discounted sum of the rewards from each token on.

        G[t] = R[t] + gamma G[next unmasked token after t]

    O(T) work in O(log T) steps.

    Args:
      token_rewards, mask, gamma: See the module.

    Returns:
      ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.array([True, False, True])
      >>> jr.advantages.reward_to_go(jnp.array([0.0, 9.0, 1.0]), mask, gamma=0.5).tolist()
      [0.5, 0.0, 1.0]

    References:
      Sutton and Barto, Reinforcement Learning, chapter 3. As in verl from 0.9 on; up to 0.8 a
      masked token resets the sum, so a reward does not reach the tokens before a tool's answer.
    """
    _inputs.check_token_rewards("reward_to_go", token_rewards, mask, None)
    checks.check_share("reward_to_go", gamma=gamma)
    checks.check_coefficients("reward_to_go", "mask", jnp.shape(mask), gamma=gamma)
    factors = jnp.where(mask, jnp.asarray(gamma, jnp.float32), 1.0)
    return masking.zero_masked(recur_back(factors, masking.zero_masked(token_rewards, mask)), mask)


def shaped(
    function: str,
    rewards: Array,
    mask: Array,
    old_logp: Array | None,
    ref_logp: Array | None,
    kl_coef: float | Array,
) -> Array:
    """Token rewards with the k1 penalty, or without a penalty if ``kl_coef`` is the number 0."""
    if isinstance(kl_coef, numbers.Real) and kl_coef == 0:
        return terminal_rewards(rewards, mask)
    return _shaped(function, rewards, mask, old_logp, ref_logp, kl_coef, "k1")


def _shaped(function, rewards, mask, old_logp, ref_logp, kl_coef, estimator) -> Array:
    """The rewards on the last tokens minus the penalty; all but ``kl_coef`` has been checked."""
    checks.check_non_negative(function, finite=True, kl_coef=kl_coef)
    for name, value in (("old_logp", old_logp), ("ref_logp", ref_logp)):
        if value is None:
            raise ValueError(f"{function}: {name} is None; the KL penalty requires it.")
    checks.check_coefficients(function, "mask", jnp.shape(mask), kl_coef=kl_coef)
    coef = jnp.asarray(kl_coef, jnp.float32)
    d = masking.safe_log_ratio(old_logp, ref_logp, mask, clamp=masking.LOG_RATIO_CLAMP)
    penalty = coef * kl.estimate(d, estimator)
    of_tokens = jnp.ndim(rewards) == jnp.ndim(mask)
    placed = masking.zero_masked(rewards, mask) if of_tokens else terminal_rewards(rewards, mask)
    return placed - masking.zero_masked(penalty, mask)


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
        A[t] = delta[t] + gamma lam A[next]       next: the next unmasked token

    After the last unmasked token ``V[next]`` is the bootstrap value and ``A[next]`` is 0. ``lam=1``
    gives the return minus the value, ``lam=0`` the one-step error. PPO is a chain:
    :func:`terminal_rewards` or :func:`kl_shaped_rewards`, ``gae``, :func:`whiten` and :func:`clip`.

    Args:
      token_rewards, mask, gamma: See the module.
      values: ``[..., T]``, floating point: the critic's value of the state before each token.
      lam: How much the estimate relies on rewards over values, in [0, 1]; shaped as ``gamma``.
      bootstrap_value: ``[...]``, floating point: the value of the state after the last unmasked
        token, for truncated responses. None means 0, the value of a terminal state.

    Returns:
      Advantages ``[..., T]``.

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
      Schulman et al., GAE (arXiv:1506.02438). verl's GAE always whitens. PPO-max (arXiv:2307.04964)
      clips to 0.5; MOSS-RLHF's scripts do neither, and its whitening is over minibatches and
      divides by n.
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
    """Targets of a critic: the advantages of :func:`gae` plus the values.

        returns[t] = A[t] + V[t]

    ``lam=1`` gives the discounted return of the rewards.

    Args:
      token_rewards, values, mask, gamma, lam, bootstrap_value: As in :func:`gae`.

    Returns:
      ``[..., T]``, in units of reward.

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


@traits(token_values=True)
def length_adaptive_gae(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    gamma: float | Array = 1.0,
    alpha: float = 0.05,
    bootstrap_value: Array | None = None,
    response_mask: Array | None = None,
) -> Array:
    """:func:`gae` with a lambda that grows with the length of the response.

        lam = max(0, 1 - 1 / (alpha l)),    l the number of tokens of the response

    Without a discount the weights ``lam^k`` of a long response's errors add up to about ``alpha l``
    tokens, the same share of every response. With a constant 0.95 they add up to 20 tokens, so the
    reward at the end of a long response does not reach its beginning.

    Args:
      token_rewards, values, mask, gamma, bootstrap_value: As in :func:`gae`.
      alpha: Share of a response over which errors are added up, above 0.
      response_mask: The mask before a correction rejected tokens of it, ``[..., T]``, which l
        counts; None for ``mask``.

    Returns:
      Advantages ``[..., T]``.

    Raises:
      ValueError: If ``alpha`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.25]])
      >>> mask = jnp.ones((1, 2), bool)
      >>> jr.advantages.length_adaptive_gae(rewards, values, mask, alpha=1.0).tolist()
      [[0.125, 0.75]]

    References:
      Yue et al., VAPO (arXiv:2504.05118). The formula is negative for responses of fewer than
      ``1 / alpha`` tokens; 0, their one-step error, is ours.
    """
    name = "length_adaptive_gae"
    checks.check_positive(name, finite=True, alpha=alpha)
    response = masking.response_tokens(name, mask, response_mask)
    lengths = jnp.sum(response, axis=-1, keepdims=True)
    lam = jnp.maximum(1.0 - 1.0 / (alpha * jnp.maximum(lengths, 1)), 0.0)
    return _estimate(name, token_rewards, values, mask, gamma, lam, bootstrap_value)


def _estimate(function, token_rewards, values, mask, gamma, lam, bootstrap_value) -> Array:
    values, following = check_values(
        function, token_rewards, values, mask, bootstrap_value, gamma=gamma, lam=lam
    )
    rewards = masking.zero_masked(token_rewards, mask)
    return errors_back(rewards, values, following, mask, gamma=gamma, trace=lam)


def check_values(
    function: str,
    token_rewards: Array,
    values: Array,
    mask: Array,
    bootstrap_value: Array | None = None,
    *,
    gamma: float | Array,
    lam: float | Array,
) -> tuple[Array, Array]:
    """Checks the arguments of a value recursion; returns the masked values and the next ones.

    ``gamma`` and ``lam`` are numbers in [0, 1], or arrays of them with the mask's axes.
    """
    if values is None:
        raise ValueError(f"{function}: values is None; it takes a critic's value of each token.")
    _inputs.check_token_rewards(function, token_rewards, mask, None, values=values)
    checks.check_share(function, gamma=gamma, lam=lam)
    checks.check_coefficients(function, "mask", jnp.shape(mask), gamma=gamma, lam=lam)
    if bootstrap_value is not None:
        checks.check_float(function, bootstrap_value=bootstrap_value)
        checks.check_shape(function, "bootstrap_value", bootstrap_value, jnp.shape(mask)[:-1])
    values = masking.zero_masked(values, mask)
    return values, next_unmasked(values, mask, bootstrap_value)


def next_unmasked(x: Array, mask: Array, last: Array | None = None) -> Array:
    """``x`` at the next unmasked token; after the last token ``last [...]``, or 0.

    ``x`` is 0 where masked.
    """
    at_or_after = recur_back(jnp.where(mask, 0.0, 1.0), x)
    end = jnp.zeros((*jnp.shape(x)[:-1], 1), jnp.float32)
    following = jnp.concatenate([at_or_after[..., 1:], end], axis=-1)[..., : x.shape[-1]]
    if last is None:
        return following
    after = jnp.asarray(last, jnp.float32)[..., None]
    return jnp.where(masking.last_token(mask), after, following)


def errors_back(
    rewards: Array,
    values: Array,
    following: Array,
    mask: Array,
    *,
    gamma: float | Array,
    trace: float | Array,
    weight: float | Array = 1.0,
) -> Array:
    """The backward recursion shared by all estimates from values.

        e[t] = weight[t] (R[t] + gamma[t] following[t] - V[t]) + gamma[t] trace[t] e[next]

    Rewards and values are 0 where masked, and so is the result.
    """
    delta = masking.zero_masked(weight * (rewards + gamma * following - values), mask)
    factors = jnp.where(mask, jnp.asarray(gamma * trace, jnp.float32), 1.0)
    return masking.zero_masked(recur_back(factors, delta), mask)
