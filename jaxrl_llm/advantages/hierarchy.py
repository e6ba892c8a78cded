"""HiPER: credit of actions, of subgoals, and of the choice between keeping and switching one.

In each turn the policy writes whether it switches the subgoal, then the subgoal, then an action. A
segment is the turns of one subgoal: it begins at the first turn and at every turn that switches.

A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages.returns import errors_back, next_unmasked
from jaxrl_llm.advantages.turn_critics import turn_starts, turn_sums
from jaxrl_llm.advantages.turns import turns_to_tokens
from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.core.scans import recur_back

__all__ = [
    "ACTION",
    "Hierarchy",
    "SUBGOAL",
    "SWITCH",
    "TokenCredit",
    "hae",
    "hae_tokens",
    "hiper",
    "hiper_places",
    "hiper_returns",
    "hiper_rewards",
    "hiper_tokens",
]

# What a token is a part of: nothing that trains, the action, the subgoal, the switch.
ACTION, SUBGOAL, SWITCH = 1, 2, 3


class Hierarchy(NamedTuple):
    """Advantages of turns and the targets of their critics; ``[..., K]`` each.

    Attributes:
      action: Advantages within segments.
      subgoal: Advantages across segments, at the turns where they begin; 0 elsewhere.
      switch: Return within the segment minus the switch critic's value, at every turn.
      action_returns: Targets of the action critic, read after the subgoal.
      subgoal_returns: Targets of the subgoal critic, where segments begin; 0 elsewhere.
      switch_returns: Targets of the switch critic.
      begins: bool, True for turns at which a segment begins.
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

    After the last turn v' and w' are 0; in a truncated rollout they are v and w of the last turn
    and segment. Without a switch the action advantage is plain GAE over turns.

    Args:
      turn_rewards: ``[..., K]``, floating point.
      action_values: v, ``[..., K]``, floating point: value after the subgoal is written.
      subgoal_values: w, ``[..., K]``, floating point: value at the first token of a turn; read
        where segments begin.
      switch_values: ``[..., K]``, floating point: value at the first token, of the switch.
      switches: bool ``[..., K]``, True where a turn begins another subgoal.
      turn_where: bool ``[..., K]``, True for turns that happened; None for all.
      truncated: bool ``[...]``, True for rollouts that were cut off before their end, which
        bootstrap from their last value; None for none.
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
    begins = _begins(switches, taken)
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


def _begins(switches: Array, taken: Array) -> Array:
    """The turns at which a segment begins: the first one, and those that switch."""
    first = masking.last_token(taken[..., ::-1])[..., ::-1]
    return taken & (switches | first)


class TokenCredit(NamedTuple):
    """Advantages of tokens and the tokens that train.

    Attributes:
      advantages: float32 ``[..., T]``.
      keep: bool ``[..., T]``, True for the tokens that train.
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
    """The three advantages of :func:`hae`, placed on the tokens of action, subgoal and switch.

        action tokens: action;  subgoal tokens where a segment begins: subgoal
        switch tokens: switch;  all others do not train

    Args:
      credit: Of :func:`hae`, ``[..., K]``.
      mask: bool ``[..., T]``.
      turn_ids: integers ``[..., T]``, the turn of each token; negative for none.
      roles: integers ``[..., T]``: 1 for tokens of the action, 2 of the subgoal, 3 of the switch, 0
        for all others.
      normalize: Whether each of the three is shifted and scaled (dividing by n) over the turns that
        have one of its tokens; it is 0 where they are all equal.
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
    advantages, keep = jnp.zeros(jnp.shape(mask), jnp.float32), jnp.zeros(jnp.shape(mask), bool)
    turns = jnp.arange(jnp.shape(credit.begins)[-1])
    values = (credit.action, credit.subgoal, credit.switch)
    for value, here in zip(
        values, _trained(credit.begins, mask, turn_ids, jnp.asarray(roles)), strict=True
    ):
        if normalize:
            of_turn = here[..., None] & (jnp.asarray(turn_ids)[..., None] == turns)
            there = jnp.any(of_turn, axis=-2)
            centered = value - masking.masked_mean(value, there)
            scaled = centered / (masking.masked_std(value, there) + eps)
            value = jnp.where(masking.is_constant(value, there), 0.0, scaled)
        spread = turns_to_tokens(value, here, turn_ids=turn_ids)
        advantages, keep = advantages + spread, keep | here
    return TokenCredit(advantages, keep)


def _trained(begins: Array, mask: Array, turn_ids: Array, roles: Array) -> tuple[Array, ...]:
    """The tokens of actions, of subgoals where a segment begins, and of switches."""
    known = mask & (jnp.asarray(turn_ids) >= 0)
    at_begin = turns_to_tokens(begins.astype(jnp.float32), known, turn_ids=turn_ids) > 0
    masks = (roles == ACTION, (roles == SUBGOAL) & at_begin, roles == SWITCH)
    return tuple(known & x for x in masks)


def hiper_rewards(
    turn_rewards: Array,
    *,
    switches: Array,
    subgoal_ids: Array,
    turn_where: Array | None = None,
    keep_penalty: float = 0.3,
    per: Literal["rollout", "turn"] = "rollout",
    change_penalty: float = 0.3,
) -> Array:
    """Rewards of turns minus a penalty for keeping or changing the subgoal.

        r_k - price             where turn k keeps
            - change_penalty    where it keeps and writes another subgoal than the turn before
        per="rollout":  price = keep_penalty / K, of K turns; 0 where K is 1
        per="turn":     price = keep_penalty

    Args:
      turn_rewards: ``[..., K]``, floating point.
      switches: bool ``[..., K]``, True where a turn writes that it begins another subgoal.
      subgoal_ids: integers ``[..., K]``, equal for equal subgoals, negative for none. A turn
        without one, or after one without, pays no ``change_penalty``.
      turn_where: bool ``[..., K]``, True for turns that happened; None for all.
      keep_penalty: Not negative, in units of reward.
      per: Whether ``keep_penalty`` is divided by the turns of a "rollout", or paid per "turn".
      change_penalty: Not negative, in units of reward.

    Returns:
      ``[..., K]`` float32, 0 where no turn happened.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> out = jr.advantages.hiper_rewards(
      ...     jnp.array([0.0, 0.0, 1.0]), switches=jnp.array([True, False, False]),
      ...     subgoal_ids=jnp.array([0, 0, 1]), keep_penalty=0.75, change_penalty=0.5)
      >>> out.tolist()
      [0.0, -0.25, 0.25]

    References:
      HiPER (arXiv:2602.16165), the released code with the numbers of its scripts.
    """
    name = "hiper_rewards"
    checks.check_bool(name, switches=switches, turn_where=turn_where)
    checks.check_integer(name, subgoal_ids=subgoal_ids)
    checks.check_arrays(name, {"turn_rewards": turn_rewards}, switches=switches)
    checks.check_same_shape(name, switches=switches, subgoal_ids=subgoal_ids, turn_where=turn_where)
    checks.check_non_negative(
        name, finite=True, keep_penalty=keep_penalty, change_penalty=change_penalty
    )
    checks.check_option(name, "per", per, ("rollout", "turn"))
    taken = jnp.ones(jnp.shape(switches), bool) if turn_where is None else turn_where
    ids = jnp.asarray(subgoal_ids)
    keeps, before = taken & ~switches, masking.previous_token(taken)
    last = jnp.take_along_axis(ids, jnp.maximum(before, 0), axis=-1)
    changed = keeps & (before >= 0) & (ids >= 0) & (last >= 0) & (ids != last)
    price = jnp.float32(keep_penalty)
    if per == "rollout":
        turns = jnp.sum(taken, axis=-1, keepdims=True)
        price = jnp.where(turns > 1, price / jnp.maximum(turns, 1), 0.0)
    paid = jnp.where(keeps, price, 0.0) + jnp.where(changed, change_penalty, 0.0)
    return masking.zero_masked(turn_rewards, taken) - paid


def hiper_places(
    mask: Array, *, turn_ids: Array, token_roles: Array, switches: Array, turn_where: Array
) -> Array:
    """The tokens at which the three critics are read and trained.

        action:   the first token behind the subgoal, else behind the switch, else the first one
        subgoal:  the first token of a turn at which a segment begins
        switch:   the first token of each turn

    Args:
      mask: bool ``[..., T]``.
      turn_ids: integers ``[..., T]``, the turn of each token; negative for none.
      token_roles: integers ``[..., T]``, the ``roles`` of :func:`hae_tokens`.
      switches: bool ``[..., K]``, True where a turn begins another subgoal.
      turn_where: bool ``[..., K]``, True for turns that happened.

    Returns:
      bool ``[..., T, 3]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> yes = jnp.ones((1, 2), bool)
      >>> out = jr.advantages.hiper_places(jnp.ones((1, 5), bool), switches=~yes, turn_where=yes,
      ...     turn_ids=jnp.array([[0, 0, 0, 1, 1]]), token_roles=jnp.array([[3, 2, 1, 1, 1]]))
      >>> jnp.moveaxis(out, -1, 0).astype(int).tolist()
      [[[0, 0, 1, 1, 0]], [[1, 0, 0, 0, 0]], [[1, 0, 0, 1, 0]]]

    References:
      HiPER (arXiv:2602.16165), the released code.
    """
    taken, starts = _turns("hiper_places", mask, turn_ids, token_roles, switches, turn_where)
    roles, turns = jnp.asarray(token_roles), jnp.shape(switches)[-1]
    known = mask & (jnp.asarray(turn_ids) >= 0)
    before = jnp.maximum(masking.previous_token(known), 0)

    def behind(role: int) -> Array:
        """The first token of each turn that comes after a token of a role."""
        follows = jnp.take_along_axis(roles == role, before, axis=-1) & (roles != role)
        return turn_starts(known & ~starts & follows, turn_ids=turn_ids)

    def has(places: Array) -> Array:
        """The tokens of the turns that contain one of these tokens."""
        ones = jnp.ones(jnp.shape(mask), jnp.float32)
        count = turn_sums(ones, places, turn_ids=turn_ids, turns=turns)
        return turns_to_tokens(count, known, turn_ids=turn_ids) > 0

    action = starts
    for role in (SWITCH, SUBGOAL):  # a later one wins
        place = behind(role)
        action = jnp.where(has(place), place, action)
    begins = _begins(switches, taken).astype(jnp.float32)
    subgoal = turns_to_tokens(begins, starts, turn_ids=turn_ids) > 0
    there = turns_to_tokens(taken.astype(jnp.float32), known, turn_ids=turn_ids) > 0
    return jnp.stack([action & there, subgoal, starts & there], axis=-1)


def _turns(
    name: str, mask: Array, turn_ids: Array, token_roles: Array, switches: Array, turn_where: Array
) -> tuple[Array, Array]:
    """The turns that happened and have a token ``[..., K]``, and their first tokens."""
    checks.check_integer(name, token_roles=token_roles)
    checks.check_same_shape(name, mask=mask, token_roles=token_roles)
    checks.check_bool(name, switches=switches, turn_where=turn_where)
    checks.check_same_shape(name, switches=switches, turn_where=turn_where)
    checks.check_shape(name, "switches", switches, (*jnp.shape(mask)[:-1], jnp.shape(switches)[-1]))
    starts = turn_starts(mask, turn_ids=turn_ids)
    ones, turns = jnp.ones(jnp.shape(mask), jnp.float32), jnp.shape(switches)[-1]
    return turn_where & (turn_sums(ones, starts, turn_ids=turn_ids, turns=turns) > 0), starts


def hiper_tokens(
    mask: Array, *, turn_ids: Array, token_roles: Array, switches: Array, turn_where: Array
) -> Array:
    """The tokens that train: actions, switches, and subgoals where a segment begins.

    Args:
      mask, turn_ids, token_roles, switches, turn_where: As in :func:`hiper_places`.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> yes = jnp.ones((1, 2), bool)
      >>> jr.advantages.hiper_tokens(jnp.ones((1, 5), bool), switches=~yes, turn_where=yes,
      ...     turn_ids=jnp.array([[0, 0, 1, 1, 1]]), token_roles=jnp.array([[2, 1, 2, 0, 3]])
      ... ).tolist()
      [[True, True, False, False, True]]

    References:
      HiPER (arXiv:2602.16165), the released code.
    """
    taken, _ = _turns("hiper_tokens", mask, turn_ids, token_roles, switches, turn_where)
    roles = jnp.asarray(token_roles)
    action, subgoal, switch = _trained(_begins(switches, taken), mask, turn_ids, roles)
    return action | subgoal | switch


@traits(token_values=True)
def hiper(
    turn_rewards: Array,
    old_values: Array,
    mask: Array,
    *,
    turn_ids: Array,
    token_roles: Array,
    switches: Array,
    turn_where: Array,
    truncated: Array | None = None,
    gamma: float = 1.0,
    action_lam: float = 1.0,
    subgoal_lam: float = 0.95,
    normalize: bool = True,
) -> Array:
    """:func:`hae` with the values of three critics at tokens, on the tokens of :func:`hae_tokens`.

    Args:
      turn_rewards: ``[..., K]``, floating point, such as of :func:`hiper_rewards`.
      old_values: ``[..., T, 3]``, of the action, the subgoal and the switch, each read at the
        tokens of :func:`hiper_places`.
      mask, turn_ids, token_roles, switches, turn_where: As in :func:`hiper_places`.
      truncated, gamma, action_lam, subgoal_lam: As in :func:`hae`.
      normalize: As in :func:`hae_tokens`.

    Returns:
      Advantages ``[..., T]``, 0 except at the tokens of :func:`hiper_tokens`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> yes = jnp.ones((1, 2), bool)
      >>> jr.advantages.hiper(jnp.array([[0.0, 1.0]]), jnp.full((1, 4, 3), 0.5),
      ...     jnp.ones((1, 4), bool), turn_ids=jnp.array([[0, 0, 1, 1]]), switches=yes,
      ...     token_roles=jnp.array([[2, 1, 2, 1]]), turn_where=yes, normalize=False).tolist()
      [[0.47..., 0.0, 0.5, 0.5]]

    References:
      HiPER (arXiv:2602.16165), the released code.
    """
    _, taken, (v, w, u) = _read(
        "hiper", old_values, mask, turn_ids, token_roles, switches, turn_where
    )
    credit = hae(
        turn_rewards,
        v,
        w,
        u,
        switches,
        turn_where=taken,
        truncated=truncated,
        gamma=gamma,
        action_lam=action_lam,
        subgoal_lam=subgoal_lam,
    )
    out = hae_tokens(credit, mask, turn_ids=turn_ids, roles=token_roles, normalize=normalize)
    return out.advantages


@traits(token_values=True)
def hiper_returns(
    turn_rewards: Array,
    old_values: Array,
    mask: Array,
    *,
    turn_ids: Array,
    token_roles: Array,
    switches: Array,
    turn_where: Array,
    truncated: Array | None = None,
    gamma: float = 1.0,
    action_lam: float = 1.0,
    subgoal_lam: float = 0.95,
) -> Array:
    """Targets of the critics of :func:`hiper`, at their tokens of :func:`hiper_places`.

    Args:
      turn_rewards, old_values, mask: As in :func:`hiper`.
      turn_ids, token_roles, switches, turn_where, truncated: As in :func:`hiper`.
      gamma, action_lam, subgoal_lam: As in :func:`hae`.

    Returns:
      ``[..., T, 3]``, of the action, the subgoal and the switch; 0 elsewhere.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> yes = jnp.ones((1, 1), bool)
      >>> out = jr.advantages.hiper_returns(jnp.array([[1.0]]), jnp.zeros((1, 2, 3)),
      ...     jnp.ones((1, 2), bool), turn_ids=jnp.array([[0, 0]]), switches=yes,
      ...     token_roles=jnp.array([[2, 1]]), turn_where=yes)
      >>> jnp.moveaxis(out, -1, 0).tolist()
      [[[0.0, 1.0]], [[1.0, 0.0]], [[1.0, 0.0]]]

    References:
      HiPER (arXiv:2602.16165), the released code.
    """
    places, taken, (v, w, u) = _read(
        "hiper_returns", old_values, mask, turn_ids, token_roles, switches, turn_where
    )
    credit = hae(
        turn_rewards,
        v,
        w,
        u,
        switches,
        turn_where=taken,
        truncated=truncated,
        gamma=gamma,
        action_lam=action_lam,
        subgoal_lam=subgoal_lam,
    )
    returns = (credit.action_returns, credit.subgoal_returns, credit.switch_returns)
    tokens = [turns_to_tokens(x, places[..., c], turn_ids=turn_ids) for c, x in enumerate(returns)]
    return jnp.stack(tokens, axis=-1)


def _read(
    name: str,
    old_values: Array,
    mask: Array,
    turn_ids: Array,
    token_roles: Array,
    switches: Array,
    turn_where: Array,
) -> tuple[Array, Array, list[Array]]:
    """Where the critics are read, the turns that happened, and the three values of each."""
    checks.check_float(name, old_values=old_values)
    checks.check_shape(name, "old_values", old_values, (*jnp.shape(mask), 3))
    taken, _ = _turns(name, mask, turn_ids, token_roles, switches, turn_where)
    places = hiper_places(
        mask, turn_ids=turn_ids, token_roles=token_roles, switches=switches, turn_where=turn_where
    )
    turns = jnp.shape(switches)[-1]
    values = [
        turn_sums(old_values[..., c], places[..., c], turn_ids=turn_ids, turns=turns)
        for c in range(3)
    ]
    return places, taken, values
