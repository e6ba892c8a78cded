"""HiPER: credit of actions, of subgoals, and of the choice between keeping and switching one.

Each turn says whether it switches the subgoal, then the subgoal, then an action. A segment is the
turns of one subgoal: it begins at the first turn and at every turn that switches.

A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages.returns import errors_back, next_unmasked, recur_back
from jaxrl_llm.advantages.turns import turns_to_tokens
from jaxrl_llm.core import Array, checks, masking

# What a token is a part of: nothing that trains, the action, the subgoal, the switch.
ACTION, SUBGOAL, SWITCH = 1, 2, 3


class Hierarchy(NamedTuple):
    """Advantages of turns and what their critics are trained to predict; ``[..., K]`` each.

    Attributes:
      action: Advantages within segments.
      subgoal: Advantages across segments, at the turns where they begin; 0 elsewhere.
      switch: Return within the segment minus the value, of all turns.
      action_returns: For the critic after the subgoal.
      subgoal_returns: For the critic of segments, where they begin; 0 elsewhere.
      switch_returns: For the critic of the switch.
      begins: bool, turns at which a segment begins.
    """

    action: Array
    subgoal: Array
    switch: Array
    action_returns: Array
    subgoal_returns: Array
    switch_returns: Array
    begins: Array


def hae(
    turn_rewards: Array,
    action_values: Array,
    subgoal_values: Array,
    switch_values: Array,
    switches: Array,
    *,
    turn_where: Array | None = None,
    truncated: Array | None = None,
    gamma: float = 1.0,
    action_lam: float = 1.0,
    subgoal_lam: float = 0.95,
) -> Hierarchy:
    """Hierarchical advantage estimation: GAE within segments and across them.

        within:  delta = r + gamma v' - v,   A = delta + gamma action_lam A' up to the segment's end
                 v' = v of the next turn, at the end the subgoal's value of the next segment
        across:  R = discounted reward of a segment of d turns
                 delta = R + gamma^d w' - w,   A = delta + gamma^d subgoal_lam A'
        switch:  return within the segment, ended by w', minus its value

    After the last turn v' and w' are 0; where it was cut off, v and w of that turn and segment.
    Without a switch the first is plain GAE over turns.

    Args:
      turn_rewards: ``[..., K]``, floating point.
      action_values: v, ``[..., K]``, floating point: value after the subgoal is written.
      subgoal_values: w, ``[..., K]``, floating point: value at the first token of a turn; read
        where segments begin.
      switch_values: ``[..., K]``, floating point: value at the first token, of the switch.
      switches: bool ``[..., K]``, True where a turn begins another subgoal.
      turn_where: bool ``[..., K]``, True for turns that happened; None for all.
      truncated: bool ``[...]``, True for rollouts that were cut off and have not ended, whose last
        value stands for what follows; None for none.
      gamma: Discount for a turn, in [0, 1].
      action_lam, subgoal_lam: How far estimates trust rewards over values, in [0, 1].

    Returns:
      :class:`Hierarchy`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, values = jnp.array([[0.0, 1.0]]), jnp.array([[0.5, 0.25]])
      >>> switches = jnp.array([[True, True]])
      >>> out = jr.advantages.hae(rewards, values, values, values, switches)
      >>> out.action.tolist(), out.subgoal.round(4).tolist()
      ([[-0.25, 0.75]], [[0.46..., 0.75]])

    References:
      HiPER (arXiv:2602.16165), the released code.
    """
    name = "hae"
    arrays = {
        "turn_rewards": turn_rewards,
        "action_values": action_values,
        "subgoal_values": subgoal_values,
        "switch_values": switch_values,
    }
    checks.check_bool(name, switches=switches, turn_where=turn_where, truncated=truncated)
    taken = jnp.ones(jnp.shape(switches), bool) if turn_where is None else turn_where
    checks.check_arrays(name, arrays, switches=switches, turn_where=taken)
    checks.check_share(name, gamma=gamma, action_lam=action_lam, subgoal_lam=subgoal_lam)
    r, v, w, u = (masking.zero_masked(x, taken) for x in arrays.values())
    begins = taken & (switches | masking.last_token(taken[..., ::-1])[..., ::-1])
    # Whether the next turn is of the same segment.
    last = masking.last_token(taken)
    goes_on = (next_unmasked(begins.astype(jnp.float32), taken) == 0) & taken & ~last
    inside = jnp.where(goes_on, 1.0, 0.0)
    w_next = next_unmasked(jnp.where(begins, w, 0.0), begins)
    v_next = jnp.where(goes_on, next_unmasked(v, taken), w_next)
    if truncated is not None:
        checks.check_shape(name, "truncated", truncated, jnp.shape(taken)[:-1])
        cut = last & jnp.asarray(truncated)[..., None]
        v_next = jnp.where(cut, v, v_next)
        # The value of the segment that the last turn is in, and of its begin.
        at_begin, outside = jnp.where(begins, w, 0.0), jnp.where(begins, 0.0, 1.0)
        begin_value = recur_back(outside[..., ::-1], at_begin[..., ::-1])[..., ::-1]
        of_last = jnp.sum(jnp.where(cut, begin_value, 0.0), axis=-1, keepdims=True)
        final = next_unmasked(jnp.where(begins, 1.0, 0.0), begins) == 0
        w_next = jnp.where(final & jnp.asarray(truncated)[..., None], of_last, w_next)
    action = errors_back(r, v, v_next, taken, gamma=gamma, trace=action_lam * inside)
    # Of each turn, up to the end of its segment: rewards, and turns.
    factors = jnp.where(taken, gamma * inside, 1.0)
    rewards = recur_back(factors, r)
    turns = recur_back(jnp.where(taken, inside, 1.0), jnp.where(taken, 1.0, 0.0))
    w = jnp.where(begins, w, 0.0)
    subgoal = errors_back(
        rewards, w, w_next, begins, gamma=jnp.float32(gamma) ** turns, trace=subgoal_lam
    )
    ended = masking.zero_masked(r + gamma * (1.0 - inside) * w_next, taken)
    switch_returns = masking.zero_masked(recur_back(factors, ended), taken)
    return Hierarchy(
        action, subgoal, switch_returns - u, action + v, subgoal + w, switch_returns, begins
    )


class TokenCredit(NamedTuple):
    """Of tokens.

    Attributes:
      advantages: float32 ``[..., T]``.
      keep: bool ``[..., T]``, the tokens that train.
    """

    advantages: Array
    keep: Array


def hae_tokens(
    credit: Hierarchy,
    mask: Array,
    *,
    turn_ids: Array,
    roles: Array,
    normalize: bool = True,
    eps: float = 1e-8,
) -> TokenCredit:
    """The three advantages of :func:`hae` on the tokens of action, subgoal and switch.

        action tokens: the first;  subgoal tokens where a segment begins: the second
        switch tokens: the third;  all others do not train

    Args:
      credit: Of :func:`hae`, ``[..., K]``.
      mask: bool ``[..., T]``.
      turn_ids: integers ``[..., T]``, the turn of each token; negative for none.
      roles: integers ``[..., T]``: 1 for tokens of the action, 2 of the subgoal, 3 of the switch, 0
        for all others.
      normalize: Whether each of the three is shifted and scaled (dividing by n) over the turns that
        have one of its tokens.
      eps: Added to the deviation, above 0.

    Returns:
      :class:`TokenCredit`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> x = jnp.array([[0.5, 1.0]])
      >>> credit = jr.advantages.hae(x, x, x, x, jnp.array([[True, False]]))
      >>> out = jr.advantages.hae_tokens(credit, jnp.ones((1, 4), bool), normalize=False,
      ...     turn_ids=jnp.array([[0, 0, 1, 1]]), roles=jnp.array([[2, 1, 2, 1]]))
      >>> out.advantages.tolist(), out.keep.tolist()
      ([[1.0, 1.0, 0.0, 0.0]], [[True, True, False, True]])

    References:
      HiPER (arXiv:2602.16165), the released code.
    """
    name = "hae_tokens"
    checks.check_mask(name, mask)
    checks.check_integer(name, turn_ids=turn_ids, roles=roles)
    checks.check_same_shape(name, mask=mask, turn_ids=turn_ids, roles=roles)
    checks.check_positive(name, finite=True, eps=eps)
    known, roles = mask & (jnp.asarray(turn_ids) >= 0), jnp.asarray(roles)
    begins = turns_to_tokens(credit.begins.astype(jnp.float32), known, turn_ids=turn_ids) > 0
    advantages, keep = jnp.zeros(jnp.shape(mask), jnp.float32), jnp.zeros(jnp.shape(mask), bool)
    turns = jnp.arange(jnp.shape(credit.begins)[-1])
    for role, value in (
        (ACTION, credit.action),
        (SUBGOAL, credit.subgoal),
        (SWITCH, credit.switch),
    ):
        here = known & (roles == role) & (begins | (role != SUBGOAL))
        if normalize:
            of_turn = here[..., None] & (jnp.asarray(turn_ids)[..., None] == turns)
            there = jnp.any(of_turn, axis=-2)
            centered = value - masking.masked_mean(value, there)
            value = centered / (masking.masked_std(value, there) + eps)
        spread = turns_to_tokens(value, here, turn_ids=turn_ids)
        advantages, keep = advantages + spread, keep | here
    return TokenCredit(advantages, keep)
