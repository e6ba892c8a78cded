"""Credit of the turns of episodes that fork: mean outcomes, compared among siblings.

- ``rewards``: floating point ``[..., G]``, the outcome of each rollout of a group.
- ``steps``: integers ``[..., G, K]``, ids of the turns: equal at one k for rollouts that share the
  turn. Rollouts that share turn k share all turns before it.
- ``turn_where``: bool ``[..., G, K]``, True for turns that happened.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. Dropped entries
  count in no mean, get 0 and may hold anything.
- Results are float32.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group
from jaxrl_llm.advantages.turns import check_turns
from jaxrl_llm.core import Array, checks, masking, stats

__all__ = ["fork_advantages", "portool", "step_rewards", "turn_nodes"]


def turn_nodes(node_ids: Array, mask: Array, turn_ids: Array, *, turns: int) -> Array:
    """The rollout that sampled the end of each turn: equal for rollouts that share the turn.

    Args:
      node_ids: integers ``[..., T]``, the rollout that sampled each token; below 0 for none.
      mask: bool ``[..., T]``, True for sampled tokens.
      turn_ids: integers ``[..., T]``, the turn of each token, from 0.
      turns: K.

    Returns:
      int32 ``[..., K]``; -1 where a turn has no token.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ids, turn_ids = jnp.array([[4, 4, 4, 7]]), jnp.array([[0, 0, 1, 1]])
      >>> jr.advantages.turn_nodes(ids, jnp.ones((1, 4), bool), turn_ids, turns=3).tolist()
      [[4, 7, -1]]

    References:
      None: trees of rollouts as this library stores them.
    """
    function = "turn_nodes"
    checks.check_mask(function, mask)
    checks.check_integer(function, node_ids=node_ids, turn_ids=turn_ids)
    checks.check_same_shape(function, node_ids=node_ids, mask=mask, turn_ids=turn_ids)
    checks.check_count(function, turns=turns)
    T = jnp.shape(mask)[-1]
    at = (jnp.asarray(turn_ids)[..., None, :] == jnp.arange(turns)[:, None]) & mask[..., None, :]
    last = jnp.max(jnp.where(at, jnp.arange(T), -1), axis=-1, initial=-1)
    nodes = jnp.take_along_axis(jnp.asarray(node_ids), jnp.maximum(last, 0), axis=-1)
    return jnp.where(last >= 0, nodes, -1).astype(jnp.int32)


def step_rewards(
    rewards: Array,
    steps: Array,
    *,
    turn_where: Array,
    where: Array | None = None,
    turn_formats: Array | None = None,
    gamma: float = 0.95,
) -> Array:
    """The reward of each turn of a tree: the mean outcome of the rollouts that have it.

        R(s) = mean over rollouts i with s of gamma^(T_i - t) outcome_i + format(s)

    t is the number of the turn and T_i the last turn of the rollout, so an earlier success counts
    more.

    Args:
      rewards, steps, turn_where, where: See the module.
      turn_formats: ``[..., G, K]``, floating point, format reward of each turn; None for 0.
      gamma: In [0, 1].

    Returns:
      ``[..., G, K]``, equal for all rollouts that share a turn.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> steps, there = jnp.array([[0, 2], [0, 3], [1, 4]]), jnp.ones((3, 2), bool)
      >>> jr.advantages.step_rewards(
      ...     jnp.array([1.0, 0.0, 0.0]), steps, turn_where=there, gamma=0.5).tolist()
      [[0.25, 1.0], [0.25, 0.0], [0.0, 0.0]]

    References:
      PORTool (arXiv:2510.26020), ABSTRACT reading of the reward of a step.
    """
    function = "step_rewards"
    taken, same = _same(function, rewards, steps, turn_where, where, turn_formats=turn_formats)
    checks.check_share(function, gamma=gamma)
    K = jnp.shape(steps)[-1]
    last = jnp.max(jnp.where(taken, jnp.arange(K), 0), axis=-1, keepdims=True)
    to_come = jnp.asarray(gamma, jnp.float32) ** jnp.maximum(last - jnp.arange(K), 0)
    outcome = masking.zero_masked(rewards, where)[..., None] * to_come
    total = jnp.sum(jnp.where(same, outcome[..., None, :, :], 0.0), axis=-2)
    mean = total / jnp.maximum(jnp.sum(same, axis=-2), 1)
    if turn_formats is not None:
        mean += masking.zero_masked(turn_formats, taken)
    return masking.zero_masked(mean, taken)


def fork_advantages(
    values: Array,
    steps: Array,
    *,
    turn_where: Array,
    where: Array | None = None,
    scale: Literal["std"] | None = None,
    eps: float | None = None,
) -> Array:
    """Values of turns minus their mean over the turns that follow from the same turn.

        A(s) = R(s) - mean over siblings of R;   scale="std":  A / (std + eps),  ddof 1
        A(s) = 0   for an only child, or if all siblings are equal

    Siblings are equal if they differ by at most 1e-6 of the greatest (or of 1). Each sibling counts
    once, however many rollouts share it. First turns are siblings.

    Args:
      values: ``[..., G, K]``, floating point: those of :func:`step_rewards`.
      steps, turn_where, where: See the module.
      scale: "std" for the deviation of the siblings, None for no division.
      eps: Added to it, above 0; None means 1e-6.

    Returns:
      ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> steps, there = jnp.array([[0, 2], [0, 3], [1, 4]]), jnp.ones((3, 2), bool)
      >>> values = jnp.array([[0.25, 1.0], [0.25, 0.0], [0.0, 0.0]])
      >>> jr.advantages.fork_advantages(values, steps, turn_where=there).tolist()
      [[0.125, 0.5], [0.125, -0.5], [-0.125, 0.0]]

    References:
      PORTool (arXiv:2510.26020), ABSTRACT reading. :func:`sibling_advantages` is the same for a
      table of nodes, if with ``scale="std"`` it has ``ddof=1, eps=1e-6``.
    """
    function = "fork_advantages"
    outcome = jnp.zeros(jnp.shape(steps)[:-1], jnp.float32)
    taken, same = _same(function, outcome, steps, turn_where, where, values=values)
    checks.check_option(function, "scale", scale, ("std", None))
    if scale is None:
        checks.check_no_effect(function, "without scale", eps=eps)
    checks.check_positive(function, finite=True, eps=eps)
    G = jnp.shape(steps)[-2]
    values = masking.zero_masked(values, taken)
    # siblings[g, h, k]: whether turn k of row h follows from the turn before turn k of row g.
    pairs = taken[..., :, None, :] & taken[..., None, :, :]
    siblings = jnp.concatenate([pairs[..., :1], same[..., :-1] & pairs[..., 1:]], axis=-1)
    earlier = jnp.tril(jnp.ones((G, G), bool), -1)[:, :, None]
    lead = taken & ~jnp.any(same & earlier, axis=-2)
    counted = siblings & lead[..., None, :, :]
    theirs = values[..., None, :, :]
    mean = masking.masked_mean(jnp.broadcast_to(theirs, counted.shape), counted, axis=-2)
    centered = values - mean
    if scale == "std":
        std = masking.masked_std(jnp.broadcast_to(theirs, counted.shape), counted, axis=-2, ddof=1)
        centered = centered / (std + (1e-6 if eps is None else eps))
    least = jnp.min(jnp.where(counted, theirs, jnp.inf), axis=-2)
    most = jnp.max(jnp.where(counted, theirs, -jnp.inf), axis=-2)
    return jnp.where(taken & stats.beyond_rounding(most, least), centered, 0.0)


def portool(
    rewards: Array,
    *,
    node_ids: Array,
    mask: Array,
    turn_ids: Array,
    turn_where: Array,
    where: Array | None = None,
    turn_formats: Array | None = None,
    gamma: float = 0.95,
    trajectory_weight: float = 1.0,
    fork_weight: float = 1.0,
    scale: Literal["std"] | None = None,
) -> Array:
    """The advantage of the rollout plus that of each turn among its siblings.

        A[i, k] = trajectory_weight grpo(outcome)_i + fork_weight A_fork(turn k of i)

    A_fork is :func:`fork_advantages` of :func:`step_rewards`. If nothing forks, only first turns
    are compared. With ``fork_weight=0`` it is :func:`grpo`. Follow it with :func:`turns_to_tokens`.

    Args:
      rewards, turn_where, where: See the module.
      node_ids, mask, turn_ids: ``[..., G, T]``, see :func:`turn_nodes`.
      turn_formats, gamma: See :func:`step_rewards`.
      trajectory_weight, fork_weight: Not negative.
      scale: See :func:`fork_advantages`.

    Returns:
      ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ids, mask = jnp.array([[0, 2], [0, 3], [1, 4]]), jnp.ones((3, 2), bool)
      >>> turn_ids = jnp.array([[0, 1]] * 3)
      >>> jr.advantages.portool(
      ...     jnp.array([1.0, 0.0, 0.0]), node_ids=ids, mask=mask, turn_ids=turn_ids,
      ...     turn_where=mask, gamma=0.5, trajectory_weight=0.0).tolist()
      [[0.125, 0.5], [0.125, -0.5], [-0.125, 0.0]]

    References:
      PORTool (arXiv:2510.26020), ABSTRACT reading: gamma 0.95, both weights 1.
    """
    checks.check_non_negative(
        "portool", finite=True, trajectory_weight=trajectory_weight, fork_weight=fork_weight
    )
    checks.check_share("portool", gamma=gamma)
    checks.check_option("portool", "scale", scale, ("std", None))
    steps = turn_nodes(node_ids, mask, turn_ids, turns=jnp.shape(turn_where)[-1])
    values = step_rewards(
        rewards,
        steps,
        turn_where=turn_where,
        where=where,
        turn_formats=turn_formats,
        gamma=gamma,
    )
    forks = fork_advantages(values, steps, turn_where=turn_where, where=where, scale=scale)
    taken = turn_where if where is None else turn_where & where[..., None]
    outcome = masking.zero_masked(group.grpo(rewards, where=where)[..., None], taken)
    return trajectory_weight * outcome + fork_weight * forks


def _same(function: str, rewards: Array, steps: Array, turn_where: Array, where, **of_turns):
    """Turns that take part ``[..., G, K]``; if turn k of two rows is one, ``[..., G, G, K]``."""
    checks.check_integer(function, steps=steps)
    checks.check_bool(function, turn_where=turn_where)
    checks.check_float(function, rewards=rewards, **of_turns)
    checks.check_same_shape(function, steps=steps, turn_where=turn_where, **of_turns)
    checks.check_min_rank(function, 2, steps=steps)
    checks.check_shape(function, "rewards", rewards, jnp.shape(steps)[:-1])
    check_turns(function, jnp.zeros(jnp.shape(steps)), turn_where, where)
    taken = jnp.asarray(turn_where) if where is None else turn_where & where[..., None]
    steps = jnp.asarray(steps)
    G = steps.shape[-2]
    same = (steps[..., :, None, :] == steps[..., None, :, :]) & (steps[..., :, None, :] >= 0)
    same |= jnp.eye(G, dtype=bool)[:, :, None]
    return taken, same & taken[..., :, None, :] & taken[..., None, :, :]
