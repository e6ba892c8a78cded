"""OSPO: many homogeneous agents that act at the same time; the agents of one time are a group.

- ``rewards``: floating point ``[..., time, agents]``.
- ``where``: bool ``[..., time, agents]``, True where an agent had a task; None for everywhere. The
  other entries earn nothing, get 0 and may hold anything.
- Advantages are float32 ``[..., time, agents]``.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group, turns
from jaxrl_llm.core import Array, checks, masking, stats

__all__ = ["fleet_fairness", "fleet_grpo", "ospo"]


def ospo(
    rewards: Array,
    *,
    where: Array | None = None,
    fairness: float = 1.0,
    eps: float = 1e-8,
) -> Array:
    """The reward of each agent, standardized over the agents at the same time.

        A[t, i] = (r[t, i] - mean over agents) / (std over agents + eps) + fairness f_t

    Means are over the agents that had a task at time t, with the population deviation, so with
    ``fairness=0`` it is :func:`grpo` with ``ddof=0``. f is :func:`fleet_fairness`. There is no
    return to go and no critic. An agent that is alone at its time gets only the fairness term.

    Args:
      rewards, where: See the module.
      fairness: Weight of the fairness term, not negative.
      eps: Added to the deviation, above 0, in units of reward.

    Returns:
      Advantages ``[..., time, agents]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.ospo(jnp.array([[1.0, 2.0, 3.0]]), fairness=0.0).round(4)
      Array([[-1.2247,  0.    ,  1.2247]], dtype=float32)

    References:
      OSPO (arXiv:2507.15351), and its released code, which adds the fairness term with weight 1.
    """
    checks.check_min_rank("ospo", 2, rewards=rewards)
    stats.check_group("ospo", rewards, where)
    checks.check_non_negative("ospo", finite=True, fairness=fairness)
    advantages = group.grpo(rewards, where=where, ddof=0, eps=eps)
    fair = fairness * fleet_fairness(rewards, where=where)[..., None]
    return advantages + masking.zero_masked(jnp.broadcast_to(fair, advantages.shape), where)


def fleet_fairness(rewards: Array, *, where: Array | None = None) -> Array:
    """How much more equal the agents' earnings became at each time.

        f_t = F_(t - 1) - F_t,   F_t = population std over agents of what each has earned up to t

    F is 0 before the first time, so the sum of f is minus the last F. Every agent of the axis
    counts; an agent that never had a task counts with 0, so the axis must not be padded.

    Args:
      rewards, where: See the module.

    Returns:
      ``[..., time]`` float32, in units of reward; positive where earnings became more equal.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.fleet_fairness(jnp.array([[2.0, 0.0], [0.0, 2.0]])).tolist()
      [-1.0, 1.0]

    References:
      OSPO (arXiv:2507.15351), and its released code.
    """
    checks.check_min_rank("fleet_fairness", 2, rewards=rewards)
    stats.check_group("fleet_fairness", rewards, where)
    earned = jnp.cumsum(masking.zero_masked(rewards, where), axis=-2)
    spread = stats.group_std(earned, ddof=0)[..., 0]
    # Where all agents have earned the same the spread is 0, whatever their mean rounds to.
    spread = jnp.where(stats.group_is_constant(earned)[..., 0], 0.0, spread)
    before = jnp.concatenate([jnp.zeros_like(spread[..., :1]), spread[..., :-1]], axis=-1)
    return before - spread


def fleet_grpo(
    rewards: Array,
    *,
    where: Array | None = None,
    gamma: float = 0.99,
    norm: Literal["all", "time"] = "all",
    punishment: Literal["none", "history", "to_go"] = "history",
    eps: float = 1e-8,
) -> Array:
    """The variant with returns: discounted sums of z-scored rewards, plus a fairness term.

        z = (r - mean) / (std + eps)      over all unmasked rewards, or over the agents of each time
        A[t, i] = sum over u >= t of gamma^(u - t) z[u, i] + fair_t

    fair is 0 ("none"), :func:`fleet_fairness` ("history"), or minus the population deviation, over
    the agents with a task at time t, of the raw rewards to go ("to_go"). With ``gamma=0``,
    ``norm="time"`` and "history" it is :func:`ospo`.

    Args:
      rewards, where: See the module.
      gamma: Discount for a time step, in [0, 1].
      norm: "all" needs the global batch; "time" is over the agents of one time.
      punishment: "none", "history" or "to_go".
      eps: Added to the deviation, above 0, in units of reward.

    Returns:
      Advantages ``[..., time, agents]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[2.0, 0.0], [0.0, 2.0]])
      >>> jr.advantages.fleet_grpo(rewards, gamma=0.5, punishment="none").tolist()
      [[0.5, -0.5], [-1.0, 1.0]]

    References:
      The GRPO baseline of OSPO (arXiv:2507.15351), in its released code, where the "history" term
      has the opposite sign to OSPO itself; here both have OSPO's sign. Its discount depends on the
      time until an agent's next task, which time steps without a task reproduce here.
    """
    name = "fleet_grpo"
    checks.check_min_rank(name, 2, rewards=rewards)
    stats.check_group(name, rewards, where)
    checks.check_share(name, gamma=gamma)
    checks.check_option(name, "norm", norm, ("all", "time"))
    checks.check_option(name, "punishment", punishment, ("none", "history", "to_go"))
    checks.check_positive(name, finite=True, eps=eps)
    rewards = masking.zero_masked(rewards, where)
    if norm == "time":
        scaled = group.grpo(rewards, where=where, ddof=0, eps=eps)
    else:
        scaled = rewards - masking.masked_mean(rewards, where)
        scaled = scaled / (masking.masked_std(rewards, where) + eps)
        scaled = jnp.where(masking.is_constant(rewards, where), 0.0, scaled)
    advantages = _to_go(scaled, where, gamma)
    if punishment == "history":
        advantages = advantages + fleet_fairness(rewards, where=where)[..., None]
    elif punishment == "to_go":
        advantages = advantages - stats.group_std(_to_go(rewards, where, gamma), where, ddof=0)
    return masking.zero_masked(advantages, where)


def _to_go(rewards: Array, where: Array | None, gamma: float) -> Array:
    """Discounted sums along the time axis, the one before the last."""
    where = None if where is None else jnp.swapaxes(where, -1, -2)
    to_go = turns.turn_returns(jnp.swapaxes(rewards, -1, -2), turn_where=where, gamma=gamma)
    return jnp.swapaxes(to_go, -1, -2)
