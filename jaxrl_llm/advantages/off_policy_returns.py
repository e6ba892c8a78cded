"""Returns and advantages from a critic where another policy sampled, and n-step returns.

    rho[t] = exp(old_logp[t] - behavior_logp[t])

The functions take tokens or turns. For turns, the last axis is the turn axis, ``mask`` is
``turn_where``, and the log-probabilities are those of turns, from :func:`turn_sums`.

- ``token_rewards``, ``mask``, ``gamma``: as in :mod:`jaxrl_llm.advantages.returns`: masked tokens
  are skipped, not read, and cost no discount.
- ``values``: ``[..., T]``, floating point: the critic's value of the state before each token.
- ``old_logp``, ``behavior_logp``: ``[..., T]`` log-probabilities (nats) under the policy to
  evaluate and under the policy that sampled. Their difference is clamped to +-20.
- ``lam``: how much the estimate relies on rewards over values, in [0, 1]; shaped as ``gamma``.
- ``bootstrap_value``: ``[...]``, floating point: value of the state after the last unmasked token,
  for truncated rollouts; None means 0, the value of a terminal state.
- ``clip_rho``: upper bound of the rho that multiplies an error; it changes the fixed point. None
  for no bound.
- ``clip_trace``: upper bound of rho in the products over later steps; it only reduces variance.
  None for no bound.
- Results are float32 in the mask's shape, 0 where masked. Estimators differentiate through values;
  a critic's loss holds its targets constant.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs
from jaxrl_llm.advantages.returns import check_values, errors_back, next_unmasked
from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.core.scans import recur_back

__all__ = ["corrected_td_errors", "n_step_returns", "retrace_returns", "vtrace", "vtrace_returns"]


@traits(token_values=True)
def vtrace_returns(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    old_logp: Array,
    behavior_logp: Array,
    gamma: float | Array = 1.0,
    lam: float | Array = 1.0,
    clip_rho: float | None = 1.0,
    clip_trace: float | None = 1.0,
    bootstrap_value: Array | None = None,
) -> Array:
    """V-trace: targets of a critic from samples of another policy.

        e[t]  = min(rho[t], clip_rho) delta[t] + gamma lam min(rho[t], clip_trace) e[next]
        vs[t] = V[t] + e[t],   delta[t] = R[t] + gamma V[next] - V[t]

    On policy it is :func:`gae_returns`.

    Args:
      token_rewards, values, mask, old_logp, behavior_logp, gamma, lam: See the module.
      clip_rho, clip_trace, bootstrap_value: See the module.

    Returns:
      ``[..., T]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.25]])
      >>> old_logp, behavior_logp = jnp.log(jnp.array([[[0.25, 0.5]], [[0.5, 0.5]]]))
      >>> jr.advantages.vtrace_returns(rewards, values, jnp.ones((1, 2), bool),
      ...     old_logp=old_logp, behavior_logp=behavior_logp).tolist()
      [[0.75, 1.0]]

    References:
      Espeholt et al., IMPALA (arXiv:1802.01561), whose traces have no lambda; lambda as in rlax.
    """
    name = "vtrace_returns"
    values, following, rho = _weighed(
        name, token_rewards, values, mask, old_logp, behavior_logp, bootstrap_value,
        gamma=gamma, lam=lam,
    )  # fmt: skip
    rewards = masking.zero_masked(token_rewards, mask)
    return _targets(
        name, rewards, values, following, rho, mask,
        gamma=gamma, lam=lam, clip_rho=clip_rho, clip_trace=clip_trace,
    )  # fmt: skip


@traits(token_values=True)
def vtrace(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    old_logp: Array,
    behavior_logp: Array,
    gamma: float | Array = 1.0,
    lam: float | Array = 1.0,
    clip_rho: float | None = 1.0,
    clip_trace: float | None = 1.0,
    clip_advantage: float | None = 1.0,
    bootstrap_value: Array | None = None,
) -> Array:
    """V-trace: advantages for the policy gradient, multiplied by the ratio of each token.

        q[t] = R[t] + gamma (lam vs[next] + (1 - lam) V[next]);   V[next] = bootstrap at the end
        A[t] = min(rho[t], clip_advantage) (q[t] - V[t])

    ``vs`` are those of :func:`vtrace_returns`. The ratio is part of the advantage, so use a
    surrogate without a ratio and no correction.

    Args:
      token_rewards, values, mask, old_logp, behavior_logp, gamma, lam: See the module.
      clip_rho, clip_trace, bootstrap_value: See the module.
      clip_advantage: Upper bound of the rho that multiplies the advantage, above 0; None for none.

    Returns:
      Advantages ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.25]])
      >>> old_logp, behavior_logp = jnp.log(jnp.array([[[0.25, 0.5]], [[0.5, 0.5]]]))
      >>> jr.advantages.vtrace(rewards, values, jnp.ones((1, 2), bool),
      ...     old_logp=old_logp, behavior_logp=behavior_logp).tolist()
      [[0.25, 0.75]]

    References:
      Espeholt et al., IMPALA (arXiv:1802.01561). The use of lambda in q is that of rlax.
    """
    name = "vtrace"
    checks.check_positive(name, clip_advantage=clip_advantage)
    values, following, rho = _weighed(
        name, token_rewards, values, mask, old_logp, behavior_logp, bootstrap_value,
        gamma=gamma, lam=lam,
    )  # fmt: skip
    rewards = masking.zero_masked(token_rewards, mask)
    targets = _targets(
        name, rewards, values, following, rho, mask,
        gamma=gamma, lam=lam, clip_rho=clip_rho, clip_trace=clip_trace,
    )  # fmt: skip
    later = masking.zero_masked(next_unmasked(targets, mask, bootstrap_value), mask)
    q = rewards + gamma * (lam * later + (1.0 - lam) * following)
    return masking.zero_masked(_at_most(rho, clip_advantage) * (q - values), mask)


@traits(token_values=True)
def retrace_returns(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    action_values: Array,
    old_logp: Array,
    behavior_logp: Array,
    gamma: float | Array = 1.0,
    lam: float | Array = 1.0,
    clip_trace: float | None = 1.0,
    bootstrap_value: Array | None = None,
) -> Array:
    """Retrace: targets of an action-value critic from samples of another policy.

        G[t] = R[t] + gamma (V[next] + c[next] (G[next] - Q[next])),   c = lam min(rho, clip_trace)

    ``lam=0`` is the expected one-step target, ``clip_trace=None`` importance sampling. With Q = V
    and on policy it is :func:`gae_returns`.

    Args:
      token_rewards, values, mask, old_logp, behavior_logp, gamma, lam: See the module.
      clip_trace, bootstrap_value: See the module.
      action_values: ``[..., T]``, floating point: Q, the critic's value of each token in its state;
        ``values`` are the means of Q under the policy.

    Returns:
      ``[..., T]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.25]])
      >>> old_logp, behavior_logp = jnp.log(jnp.array([[[0.5, 0.25]], [[0.5, 0.5]]]))
      >>> jr.advantages.retrace_returns(rewards, values, jnp.ones((1, 2), bool),
      ...     action_values=jnp.array([[0.5, 0.5]]), old_logp=old_logp,
      ...     behavior_logp=behavior_logp).tolist()
      [[0.5, 1.0]]

    References:
      Munos et al., Retrace (arXiv:1606.02647), as in rlax.
    """
    name = "retrace_returns"
    _, following, rho = _weighed(
        name, token_rewards, values, mask, old_logp, behavior_logp, bootstrap_value,
        gamma=gamma, lam=lam,
    )  # fmt: skip
    checks.check_arrays(name, {"action_values": action_values}, mask=mask)
    checks.check_positive(name, clip_trace=clip_trace)
    trace = masking.zero_masked(lam * _at_most(rho, clip_trace), mask)
    corrected = trace * masking.zero_masked(action_values, mask)
    # Of the next unmasked token, which after the last one is none.
    terms = masking.zero_masked(token_rewards, mask) + gamma * (
        following - next_unmasked(corrected, mask)
    )
    factors = jnp.where(mask, gamma * next_unmasked(trace, mask), 1.0)
    return masking.zero_masked(recur_back(factors, masking.zero_masked(terms, mask)), mask)


@traits(token_values=True)
def corrected_td_errors(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    old_logp: Array,
    behavior_logp: Array,
    gamma: float | Array = 1.0,
    lam: float | Array = 1.0,
    bootstrap_value: Array | None = None,
) -> Array:
    """Multi-step temporal-difference errors, each weighted by the product of the ratios up to it.

        e[t] = rho[t] (delta[t] + gamma lam e[next]),   delta[t] = R[t] + gamma V[next] - V[t]

    V-trace without bounds on the ratios. On policy they are the advantages of :func:`gae`.

    Args:
      token_rewards, values, mask, old_logp, behavior_logp, gamma, lam, bootstrap_value: See the
        module.

    Returns:
      ``[..., T]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.25]])
      >>> old_logp, behavior_logp = jnp.log(jnp.array([[[0.5, 0.5]], [[0.5, 0.25]]]))
      >>> jr.advantages.corrected_td_errors(rewards, values, jnp.ones((1, 2), bool),
      ...     old_logp=old_logp, behavior_logp=behavior_logp).tolist()
      [[1.25, 1.5]]

    References:
      Precup, Sutton and Dasgupta, Off-policy temporal-difference learning (2001); Sutton et al.,
      True online TD (2014), as in rlax.
    """
    values, following, rho = _weighed(
        "corrected_td_errors", token_rewards, values, mask, old_logp, behavior_logp,
        bootstrap_value, gamma=gamma, lam=lam,
    )  # fmt: skip
    rewards = masking.zero_masked(token_rewards, mask)
    return errors_back(rewards, values, following, mask, gamma=gamma, trace=lam * rho, weight=rho)


@traits(token_values=True)
def n_step_returns(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    n: int,
    gamma: float | Array = 1.0,
    lam: float | Array = 1.0,
    bootstrap_value: Array | None = None,
) -> Array:
    """The rewards of the next n unmasked tokens, and the value after them.

        G_0[t] = V[t],   G_m[t] = R[t] + gamma ((1 - lam) V[next] + lam G_(m-1)[next]),   G = G_n

    Where fewer than n tokens are left, the bootstrap value follows the last token. ``lam`` below 1
    mixes the returns of 1 to n steps. The cost is O(n T).

    Args:
      token_rewards, values, mask, gamma, lam, bootstrap_value: See the module.
      n: Steps, at least 1.

    Returns:
      ``[..., T]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0, 1.0]]), jnp.array([[0.5, 0.25, 0.75]])
      >>> mask = jnp.ones((1, 3), bool)
      >>> jr.advantages.n_step_returns(rewards, values, mask, n=2, gamma=0.5).tolist()
      [[0.6875, 1.5, 1.0]]

    References:
      Sutton and Barto, Reinforcement Learning, chapter 7; as in rlax.
    """
    name = "n_step_returns"
    checks.check_count(name, n=n)
    returns, following = check_values(
        name, token_rewards, values, mask, bootstrap_value, gamma=gamma, lam=lam
    )
    rewards = masking.zero_masked(token_rewards, mask)
    for _ in range(n):
        later = next_unmasked(returns, mask, bootstrap_value)
        returns = rewards + gamma * ((1.0 - lam) * following + lam * later)
        returns = masking.zero_masked(returns, mask)
    return returns


def _targets(
    function, rewards, values, following, rho, mask, *, gamma, lam, clip_rho, clip_trace
) -> Array:
    """The targets of :func:`vtrace_returns`."""
    checks.check_positive(function, clip_rho=clip_rho, clip_trace=clip_trace)
    trace, weight = lam * _at_most(rho, clip_trace), _at_most(rho, clip_rho)
    errors = errors_back(rewards, values, following, mask, gamma=gamma, trace=trace, weight=weight)
    return errors + values


def _weighed(
    function, token_rewards, values, mask, old_logp, behavior_logp, bootstrap_value, *, gamma, lam
) -> tuple[Array, Array, Array]:
    """The values, those that follow, and the ratio of each token, 1 where masked."""
    values, following = check_values(
        function, token_rewards, values, mask, bootstrap_value, gamma=gamma, lam=lam
    )
    for name, value in {"old_logp": old_logp, "behavior_logp": behavior_logp}.items():
        if value is None:
            raise ValueError(f"{function}: {name} is None; the ratio requires it.")
    _inputs.check_token_rewards(
        function, token_rewards, mask, None, old_logp=old_logp, behavior_logp=behavior_logp
    )
    log_ratio = masking.safe_log_ratio(old_logp, behavior_logp, mask, clamp=masking.LOG_RATIO_CLAMP)
    return values, following, jnp.exp(log_ratio)


def _at_most(ratio: Array, bound: float | None) -> Array:
    return ratio if bound is None else jnp.minimum(ratio, bound)
