"""Token-level critics that are read at turns, and turn rewards placed on tokens.

- ``turn_rewards``: floating point ``[..., K]``, one per turn; ``turn_where``: bool ``[..., K]``,
  True for turns that happened; None for all.
- ``mask``: bool ``[..., T]``, True for the tokens that the policy wrote and that are trained.
- ``turn_ids``: integers ``[..., T]``, the turn of each token, from 0 and not decreasing; negative
  on tokens of no turn.
- ``values``: floating point ``[..., T]``, the critic's value of the state before each token.
- ``gamma``, ``lam``: numbers in [0, 1].
- ``unfinished``: bool ``[...]``, True for rollouts that were cut off before their end.
- A turn without an unmasked token does not count, and its reward is lost.
- A turn id of K or more is an error: a result per token is NaN at its tokens, a result per turn
  leaves them out. The steps of :mod:`jaxrl_llm.preferences` have the same rule.
- Results are float32, 0 where masked.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import math
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.returns import (
    check_values,
    gae,
    gae_returns,
    next_unmasked,
)
from jaxrl_llm.advantages.turns import turns_to_tokens
from jaxrl_llm.core import Array, checks, masking, traits

__all__ = [
    "egae",
    "pdppo",
    "pdppo_returns",
    "poad",
    "poad_returns",
    "turn_borders",
    "turn_end_rewards",
    "turn_ends",
    "turn_gae",
    "turn_gae_returns",
    "turn_starts",
    "turn_sums",
]


def turn_starts(mask: Array, *, turn_ids: Array) -> Array:
    """The first unmasked token of each turn.

    Args:
      mask, turn_ids: See the module.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, turn_ids = jnp.array([[True, True, False, True]]), jnp.array([[0, 0, -1, 1]])
      >>> jr.advantages.turn_starts(mask, turn_ids=turn_ids).tolist()
      [[True, False, False, True]]

    References:
      None: the tokens at which a turn-level critic is read and trained.
    """
    taken = _turn_tokens("turn_starts", mask, turn_ids)
    return taken & (_before(turn_ids, taken) != turn_ids)


def turn_ends(mask: Array, *, turn_ids: Array) -> Array:
    """The last unmasked token of each turn.

    Args:
      mask, turn_ids: See the module.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, turn_ids = jnp.array([[True, True, False, True]]), jnp.array([[0, 0, -1, 1]])
      >>> jr.advantages.turn_ends(mask, turn_ids=turn_ids).tolist()
      [[False, True, False, True]]

    References:
      None: the tokens on which :func:`turn_end_rewards` places the rewards.
    """
    taken = _turn_tokens("turn_ends", mask, turn_ids)
    back = _before(turn_ids[..., ::-1], taken[..., ::-1])[..., ::-1]
    return taken & (back != turn_ids)


def _turn_tokens(function: str, mask: Array, turn_ids: Array) -> Array:
    checks.check_mask(function, mask)
    checks.check_min_rank(function, 1, mask=mask)
    checks.check_integer(function, turn_ids=turn_ids)
    checks.check_same_shape(function, mask=mask, turn_ids=turn_ids)
    return mask & (jnp.asarray(turn_ids) >= 0)


def _before(x: Array, mask: Array) -> Array:
    """Integers at the last unmasked place before each; -1 where there is none."""
    last = masking.previous_token(mask)
    x = jnp.take_along_axis(jnp.asarray(x), jnp.maximum(last, 0), axis=-1)
    return jnp.where(last >= 0, x, -1)


def turn_sums(x: Array, mask: Array, *, turn_ids: Array, turns: int) -> Array:
    """Sums of token values over each turn.

        y_k = sum of x[t] over the unmasked tokens t of turn k

    Of token log-probabilities, these are the log-probabilities of turns.

    Args:
      x: ``[..., T]``, floating point.
      mask, turn_ids: See the module. Tokens of turns K and later are left out.
      turns: K.

    Returns:
      ``[..., K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, turn_ids = jnp.ones((1, 4), bool), jnp.array([[0, 0, -1, 1]])
      >>> x = jnp.array([[1.0, 2.0, 9.0, 4.0]])
      >>> jr.advantages.turn_sums(x, mask, turn_ids=turn_ids, turns=3).tolist()
      [[3.0, 4.0, 0.0]]

    References:
      None: the inverse of :func:`turns_to_tokens` for one token per turn.
    """
    name = "turn_sums"
    checks.check_arrays(name, {"x": x}, mask=mask)
    taken = _turn_tokens(name, mask, turn_ids) & (jnp.asarray(turn_ids) < turns)
    checks.check_count(name, turns=turns)
    lead = jnp.shape(mask)[:-1]
    rows = math.prod(lead)
    first = jnp.arange(rows).reshape((*lead, 1)) * turns
    places = jnp.where(taken, first + turn_ids, rows * turns).reshape(-1)
    sums = jnp.zeros(rows * turns, jnp.float32)
    sums = sums.at[places].add(masking.zero_masked(x, taken).reshape(-1), mode="drop")
    return sums.reshape((*lead, turns))


@traits(token_values=True)
def turn_end_rewards(
    turn_rewards: Array, mask: Array, *, turn_ids: Array, turn_where: Array | None = None
) -> Array:
    """The reward of each turn on the last token that the policy wrote in it.

        R[t] = r_k where t is the last unmasked token of turn k, else 0

    Token-level estimators skip the tokens of an environment, so a reward placed there would be
    lost.

    Args:
      turn_rewards, mask, turn_ids, turn_where: See the module.

    Returns:
      Token rewards ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, turn_ids = jnp.array([[True, True, False, True]]), jnp.array([[0, 0, -1, 1]])
      >>> jr.advantages.turn_end_rewards(
      ...     jnp.array([[0.5, 1.0]]), mask, turn_ids=turn_ids).tolist()
      [[0.0, 0.5, 0.0, 1.0]]

    References:
      As in the released code of arXiv:2510.01132, whose GAE skips observations.
    """
    name = "turn_end_rewards"
    _check_turn_rewards(name, turn_rewards, mask, turn_where)
    rewards = masking.zero_masked(turn_rewards, turn_where)
    return turns_to_tokens(rewards, turn_ends(mask, turn_ids=turn_ids), turn_ids=turn_ids)


def _check_turn_rewards(function: str, turn_rewards: Array, mask: Array, turn_where) -> None:
    checks.check_min_rank(function, 1, turn_rewards=turn_rewards)
    checks.check_float(function, turn_rewards=turn_rewards)
    checks.check_mask(function, mask)
    checks.check_bool(function, turn_where=turn_where)
    checks.check_same_shape(function, turn_rewards=turn_rewards, turn_where=turn_where)
    if jnp.shape(turn_rewards)[:-1] != jnp.shape(mask)[:-1] or not jnp.shape(turn_rewards)[-1]:
        raise ValueError(
            f"{function}: turn_rewards must hold at least one turn for each rollout of mask "
            f"{jnp.shape(mask)}; got {jnp.shape(turn_rewards)}."
        )


def _at_turns(function, turn_rewards, values, mask, turn_ids, turn_where, places):
    """The values at one token of each turn ``[..., K]``, and which turns happened."""
    _check_turn_rewards(function, turn_rewards, mask, turn_where)
    checks.check_arrays(function, {"values": values}, mask=mask)
    turns = jnp.shape(turn_rewards)[-1]
    here = places(mask, turn_ids=turn_ids)
    at = turn_sums(values, here, turn_ids=turn_ids, turns=turns)
    ones = jnp.ones(jnp.shape(mask), jnp.float32)
    taken = turn_sums(ones, here, turn_ids=turn_ids, turns=turns) > 0
    return at, taken if turn_where is None else taken & turn_where


def turn_gae(
    turn_rewards: Array,
    values: Array,
    mask: Array,
    *,
    turn_ids: Array,
    turn_where: Array | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Array:
    """Generalized advantage estimation over turns, with the value at the first token of each.

        delta_k = r_k + gamma V_(k+1) - V_k
        A_k = delta_k + gamma lam A_(k+1)

    With one token a turn it is :func:`gae`. Follow it with :func:`turns_to_tokens`.

    Args:
      turn_rewards, values, mask, turn_ids, turn_where, gamma, lam: See the module.

    Returns:
      Advantages ``[..., K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, turn_ids = jnp.array([[True, True, False, True]]), jnp.array([[0, 0, -1, 1]])
      >>> values = jnp.array([[0.5, 9.0, 9.0, 0.25]])
      >>> jr.advantages.turn_gae(
      ...     jnp.array([[0.0, 1.0]]), values, mask, turn_ids=turn_ids, lam=0.5).tolist()
      [[0.125, 0.75]]

    References:
      Schulman et al., GAE (arXiv:1506.02438), a step of which is a turn.
    """
    checks.check_share("turn_gae", gamma=gamma, lam=lam)
    at, taken = _at_turns("turn_gae", turn_rewards, values, mask, turn_ids, turn_where, turn_starts)
    return gae(turn_rewards, at, taken, gamma=gamma, lam=lam)


@traits(token_values=True)
def turn_gae_returns(
    turn_rewards: Array,
    values: Array,
    mask: Array,
    *,
    turn_ids: Array,
    turn_where: Array | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Array:
    """Targets of a critic at the first token of each turn: advantage plus value.

    Other tokens get 0; train the critic at the tokens of :func:`turn_starts`.

    Args:
      turn_rewards, values, mask, turn_ids, turn_where, gamma, lam: See the module.

    Returns:
      ``[..., T]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, turn_ids = jnp.array([[True, True, False, True]]), jnp.array([[0, 0, -1, 1]])
      >>> values = jnp.array([[0.5, 9.0, 9.0, 0.25]])
      >>> jr.advantages.turn_gae_returns(
      ...     jnp.array([[0.0, 1.0]]), values, mask, turn_ids=turn_ids, lam=0.5).tolist()
      [[0.625, 0.0, 0.0, 1.0]]

    References:
      Schulman et al., GAE (arXiv:1506.02438), a step of which is a turn.
    """
    checks.check_share("turn_gae_returns", gamma=gamma, lam=lam)
    at, taken = _at_turns(
        "turn_gae_returns", turn_rewards, values, mask, turn_ids, turn_where, turn_starts
    )
    returns = gae_returns(turn_rewards, at, taken, gamma=gamma, lam=lam)
    return turns_to_tokens(returns, turn_starts(mask, turn_ids=turn_ids), turn_ids=turn_ids)


@traits(token_values=True)
def poad(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    turn_ids: Array,
    gamma: float = 0.95,
    intra_gamma: float = 1.0,
    lam: float = 0.95,
) -> Array:
    """Policy optimization with action decomposition: a discount between turns, none within one.

        g[t] = gamma at the last token of a turn, else intra_gamma
        A = gae with the discount g[t] of each token

    The return of an action then does not depend on its number of tokens. With ``intra_gamma=gamma``
    it is plain :func:`gae` (the paper's NTPO); with one token per turn it is :func:`turn_gae`.

    Args:
      token_rewards: ``[..., T]``, from :func:`turn_end_rewards`.
      values, mask, turn_ids, gamma, lam: See the module.
      intra_gamma: Discount within a turn, in [0, 1].

    Returns:
      Advantages ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values = jnp.array([[0.1, 0.2, 0.4, 0.7]])
      >>> rewards, turn_ids = jnp.array([[0.0, 0.0, 0.0, 1.0]]), jnp.array([[0, 0, 1, 1]])
      >>> mask = jnp.ones((1, 4), bool)
      >>> out = jr.advantages.poad(rewards, values, mask, turn_ids=turn_ids, gamma=0.9)
      >>> out.round(3).tolist()
      [[0.72..., 0.66..., 0.58..., 0.3...]]

    References:
      POAD (arXiv:2405.15821), the released code, which standardizes over non-zero entries.
    """
    discounts = _discounts("poad", mask, turn_ids, gamma, intra_gamma, lam)
    return gae(token_rewards, values, mask, gamma=discounts, lam=lam)


@traits(token_values=True)
def poad_returns(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    turn_ids: Array,
    gamma: float = 0.95,
    intra_gamma: float = 1.0,
    lam: float = 0.95,
) -> Array:
    """Targets of a critic: the advantages of :func:`poad` plus the values.

    Args:
      token_rewards, values, mask, turn_ids, gamma, intra_gamma, lam: As in :func:`poad`.

    Returns:
      ``[..., T]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.25]])
      >>> turn_ids, mask = jnp.array([[0, 1]]), jnp.ones((1, 2), bool)
      >>> jr.advantages.poad_returns(
      ...     rewards, values, mask, turn_ids=turn_ids, gamma=0.5, lam=1.0).tolist()
      [[0.5, 1.0]]

    References:
      POAD (arXiv:2405.15821), the released code.
    """
    discounts = _discounts("poad_returns", mask, turn_ids, gamma, intra_gamma, lam)
    return gae_returns(token_rewards, values, mask, gamma=discounts, lam=lam)


def _discounts(function, mask, turn_ids, gamma, intra_gamma, lam) -> Array:
    """The discount of each token; checks the options too."""
    checks.check_share(function, gamma=gamma, intra_gamma=intra_gamma, lam=lam)
    _turn_tokens(function, mask, turn_ids)
    ends = turn_ends(mask, turn_ids=turn_ids)
    return jnp.where(ends, jnp.float32(gamma), jnp.float32(intra_gamma))


@traits(token_values=True)
def egae(
    token_rewards: Array,
    values: Array,
    mask: Array,
    *,
    unfinished: Array,
    gamma: float | Array = 1.0,
    lam: float | Array = 0.95,
) -> Array:
    """Extended GAE: the bootstrap value of an unfinished response is the value at its last token.

        V[after the last token] = V[last token] where unfinished, else 0;   then gae

    With ``gamma=1`` and no reward, the last error of an unfinished response is 0, and adding a
    constant to its values changes nothing.

    Args:
      token_rewards, mask, gamma, lam: As in :func:`gae`.
      values, unfinished: See the module.

    Returns:
      Advantages ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, mask = jnp.array([[0.25, 0.5]]), jnp.ones((1, 2), bool)
      >>> jr.advantages.egae(
      ...     jnp.zeros((1, 2)), values, mask, unfinished=jnp.array([True]), lam=0.5).tolist()
      [[0.25, 0.0]]

    References:
      T-PPO (arXiv:2506.15050), PAPER, read through a note.
    """
    name = "egae"
    values, _ = check_values(name, token_rewards, values, mask, gamma=gamma, lam=lam)
    checks.check_bool(name, unfinished=unfinished)
    checks.check_shape(name, "unfinished", unfinished, jnp.shape(mask)[:-1])
    last = jnp.sum(jnp.where(masking.last_token(mask), values, 0.0), axis=-1)
    after = jnp.where(unfinished, last, 0.0)
    return gae(token_rewards, values, mask, gamma=gamma, lam=lam, bootstrap_value=after)


Combine = Literal["max", "mean", "before"]


def pdppo(
    turn_rewards: Array,
    values: Array,
    mask: Array,
    *,
    turn_ids: Array,
    turn_where: Array | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    combine: Combine = "max",
) -> Array:
    """Two advantages of a turn: before its action, and between the action and the observation.

        before:  A_k = turn_gae(r, V),   V_k at the first token of the turn
        after:   A_k = r_k + W_k - V_k,   W_k at its last token, 0 in the last turn
        A = the greater of both, their mean, or the first alone

    Follow it with :func:`turns_to_tokens`.

    Args:
      turn_rewards, values, mask, turn_ids, turn_where, gamma, lam: See the module.
      combine: "max", "mean" or "before".

    Returns:
      Advantages ``[..., K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, turn_ids = jnp.ones((1, 4), bool), jnp.array([[0, 0, 1, 1]])
      >>> values = jnp.array([[0.5, 0.75, 0.5, 0.0]])
      >>> jr.advantages.pdppo(
      ...     jnp.array([[0.0, 1.0]]), values, mask, turn_ids=turn_ids, gamma=1.0, lam=0.0).tolist()
      [[0.25, 0.5]]

    References:
      PDPPO (arXiv:2504.05150), ABSTRACT; not a method for language models. Here one critic gives
      both values, and the value "after" is the value before the last token of the action. The
      maximum of the two is from memory of the paper.
    """
    name = "pdppo"
    checks.check_option(name, "combine", combine, ("max", "mean", "before"))
    before, taken = _at_turns(name, turn_rewards, values, mask, turn_ids, turn_where, turn_starts)
    plain = gae(turn_rewards, before, taken, gamma=gamma, lam=lam)
    if combine == "before":
        return plain
    after, _ = _at_turns(name, turn_rewards, values, mask, turn_ids, turn_where, turn_ends)
    after = jnp.where(masking.last_token(taken), 0.0, after)
    one_step = masking.zero_masked(turn_rewards, taken) + after - before
    one_step = masking.zero_masked(one_step, taken)
    return jnp.maximum(plain, one_step) if combine == "max" else (plain + one_step) / 2


@traits(token_values=True)
def pdppo_returns(
    turn_rewards: Array,
    values: Array,
    mask: Array,
    *,
    turn_ids: Array,
    turn_where: Array | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> Array:
    """Targets of the critic of :func:`pdppo` at the first and last token of each turn.

        first token:  y_k = A_k + V_k of turn_gae
        last token:   gamma y_(k+1), 0 in the last turn

    Other tokens get 0; train the critic at the tokens of :func:`turn_borders`. A turn of one token
    gets the first target.

    Args:
      turn_rewards, values, mask, turn_ids, turn_where, gamma, lam: See the module.

    Returns:
      ``[..., T]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, turn_ids = jnp.ones((1, 4), bool), jnp.array([[0, 0, 1, 1]])
      >>> values = jnp.array([[0.5, 0.75, 0.5, 0.0]])
      >>> jr.advantages.pdppo_returns(
      ...     jnp.array([[0.0, 1.0]]), values, mask, turn_ids=turn_ids, gamma=1.0, lam=1.0).tolist()
      [[1.0, 1.0, 1.0, 0.0]]

    References:
      PDPPO (arXiv:2504.05150), ABSTRACT.
    """
    name = "pdppo_returns"
    at, taken = _at_turns(name, turn_rewards, values, mask, turn_ids, turn_where, turn_starts)
    y = gae_returns(turn_rewards, at, taken, gamma=gamma, lam=lam)
    later = masking.zero_masked(gamma * next_unmasked(y, taken), taken)
    starts, ends = turn_starts(mask, turn_ids=turn_ids), turn_ends(mask, turn_ids=turn_ids)
    first = turns_to_tokens(y, starts, turn_ids=turn_ids)
    return first + turns_to_tokens(later, ends & ~starts, turn_ids=turn_ids)


def turn_borders(mask: Array, *, turn_ids: Array) -> Array:
    """The first and the last unmasked token of each turn.

    Args:
      mask, turn_ids: See the module.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, turn_ids = jnp.ones((1, 4), bool), jnp.array([[0, 0, 0, 1]])
      >>> jr.advantages.turn_borders(mask, turn_ids=turn_ids).tolist()
      [[True, False, True, True]]

    References:
      None: the tokens at which the critic of :func:`pdppo` is read and trained.
    """
    return turn_starts(mask, turn_ids=turn_ids) | turn_ends(mask, turn_ids=turn_ids)
