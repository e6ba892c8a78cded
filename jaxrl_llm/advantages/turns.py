"""Advantages of turns: several answers of one rollout, each with its reward.

- ``turn_where``: bool in the shape of ``rewards``, True for turns that happened; None for all.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. What is dropped
  counts in no mean, gets 0 and may hold anything.
- ``gamma``: discount for a turn, in [0, 1].
- Results are float32.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group, returns
from jaxrl_llm.core import Array, checks, masking, traits


def turn_returns(rewards: Array, *, turn_where: Array | None = None, gamma: float = 1.0) -> Array:
    """The discounted sum of the rewards from each turn on.

        R_k = sum over j >= k of gamma^(j - k) r_j

    Turns that did not happen earn nothing; in between others they still cost a discount.

    Args:
      turn_where, gamma: See the module.
      rewards: ``[..., K]``, floating point, one a turn.

    Returns:
      ``[..., K]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.turn_returns(jnp.array([0.0, 1.0, 1.0]), gamma=0.5).tolist()
      [0.75, 1.5, 1.0]

    References:
      Dr. Kernel (arXiv:2602.05885), and its released code.
    """
    name = "turn_returns"
    checks.check_min_rank(name, 1, rewards=rewards)
    checks.check_float(name, rewards=rewards)
    checks.check_bool(name, turn_where=turn_where)
    checks.check_same_shape(name, rewards=rewards, turn_where=turn_where)
    checks.check_share(name, gamma=gamma)
    rewards = masking.zero_masked(rewards, turn_where)
    discounts = jnp.broadcast_to(jnp.asarray(gamma, jnp.float32), rewards.shape)
    return masking.zero_masked(returns.recur_back(discounts, rewards), turn_where)


def trloo(
    rewards: Array,
    *,
    turn_where: Array | None = None,
    where: Array | None = None,
    gamma: float = 1.0,
    singleton: Literal["zero", "raw"] = "raw",
) -> Array:
    """Leave one out for each turn: returns minus the mean return of the others at the same turn.

        A[i, k] = n / (n - 1) (R[i, k] - mean over rollouts of R[., k])

    R is :func:`turn_returns`, n how many unmasked rollouts of the prompt have a turn k. A rollout
    that stopped early does not enter the mean of later turns. With one turn it is :func:`rloo`.
    Follow it with :func:`turns_to_tokens`.

    Args:
      turn_where, where, gamma: See the module.
      rewards: ``[..., G, K]``, floating point, one a turn.
      singleton: What the only rollout that has a turn k gets: "raw" for its return, "zero" for 0.

    Returns:
      Advantages ``[..., G, K]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.trloo(jnp.array([[0.0, 3.0], [0.0, 1.0], [3.0, 2.0]])).tolist()
      [[0.0, 1.5], [-3.0, -1.5], [3.0, 0.0]]

    References:
      Dr. Kernel (arXiv:2602.05885), and its released code, whose singleton is "raw".
    """
    taken = check_turns("trloo", rewards, turn_where, where)
    checks.check_option("trloo", "singleton", singleton, ("zero", "raw"))
    to_come = turn_returns(rewards, turn_where=taken, gamma=gamma)
    across = None if taken is None else jnp.swapaxes(taken, -1, -2)
    advantages = group.rloo(jnp.swapaxes(to_come, -1, -2), where=across, singleton=singleton)
    return jnp.swapaxes(advantages, -1, -2)


@traits(token_values=True)
def turns_to_tokens(advantages: Array, mask: Array, *, turn_ids: Array) -> Array:
    """One value a turn, spread over the tokens of that turn.

        A[i, t] = A[i, turn of t]

    A negative turn id marks a token of no turn, which gets 0. An id of K or more is a mistake and
    gives NaN where the token is unmasked.

    Args:
      advantages: ``[..., G, K]``, floating point, one a turn.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      turn_ids: integer ``[..., G, T]``, the turn of each token, from 0.

    Returns:
      Advantages ``[..., G, T]``, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> turn_ids, mask = jnp.array([[0, 0, -1, 1]]), jnp.ones((1, 4), bool)
      >>> advantages = jnp.array([[0.5, -1.0]])
      >>> jr.advantages.turns_to_tokens(advantages, mask, turn_ids=turn_ids).tolist()
      [[0.5, 0.5, 0.0, -1.0]]

    References:
      Dr. Kernel (arXiv:2602.05885), whose turns are rows of the batch instead.
    """
    name = "turns_to_tokens"
    checks.check_mask(name, mask)
    checks.check_min_rank(name, 1, mask=mask, advantages=advantages)
    checks.check_float(name, advantages=advantages)
    checks.check_integer(name, turn_ids=turn_ids)
    checks.check_same_shape(name, mask=mask, turn_ids=turn_ids)
    if jnp.shape(advantages)[:-1] != jnp.shape(mask)[:-1] or not jnp.shape(advantages)[-1]:
        raise ValueError(
            f"{name}: advantages must hold at least one turn for each rollout of mask "
            f"{jnp.shape(mask)}; got {jnp.shape(advantages)}."
        )
    advantages = jnp.asarray(advantages, jnp.float32)
    turns = advantages.shape[-1]
    # Masked tokens may carry any id; they and those of no turn read turn 0 and are zeroed.
    known = mask & (turn_ids >= 0) & (turn_ids < turns)
    spread = jnp.take_along_axis(advantages, jnp.where(known, turn_ids, 0), axis=-1)
    return jnp.where(mask & (turn_ids >= turns), jnp.nan, masking.zero_masked(spread, known))


def check_turns(function: str, rewards: Array, turn_where, where) -> Array | None:
    """Checks arrays ``[..., G, K]`` and ``where [..., G]``; which turns take part, or None."""
    checks.check_min_rank(function, 2, rewards=rewards)
    checks.check_float(function, rewards=rewards)
    checks.check_bool(function, turn_where=turn_where, where=where)
    checks.check_same_shape(function, rewards=rewards, turn_where=turn_where)
    if where is None:
        return turn_where
    checks.check_shape(function, "where", where, jnp.shape(rewards)[:-1])
    valid = jnp.broadcast_to(where[..., None], jnp.shape(rewards))
    return valid if turn_where is None else valid & turn_where
