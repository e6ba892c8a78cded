"""Advantages of turns: a rollout has several turns, each with its reward.

- ``rewards``: floating point ``[..., G, K]``, one per turn, unless said otherwise.
- ``turn_where``: bool in the shape of ``rewards``, True for turns that happened; None for all.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. Dropped entries
  count in no mean, get 0 and may hold anything.
- ``gamma``: discount for a turn, in [0, 1].
- ``scale``: "group" divides by the sample deviation plus ``eps``, "none" does not divide.
- ``eps``: above 0, in units of reward; only with ``scale="group"``. None means 1e-6.
- Results are float32.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group
from jaxrl_llm.core import Array, checks, masking, segments, traits
from jaxrl_llm.core.scans import recur_back

__all__ = [
    "equal_turns",
    "mc_turns",
    "trloo",
    "turn_grpo",
    "turn_returns",
    "turns_to_tokens",
    "ui_s1",
]


def turn_returns(
    rewards: Array,
    *,
    turn_where: Array | None = None,
    gamma: float = 1.0,
    matches: Array | None = None,
) -> Array:
    """The discounted sum of the rewards from each turn on, while the turns match an expert's.

        R_k = sum over j >= k of gamma^(j - k) r_j
        with matches:  R_k = r_k + gamma R_(k+1)  if turns k and k + 1 match, else r_k

    Turns that did not happen earn nothing; between other turns they still cost a discount. The
    return of a turn that deviates from the expert is its reward alone, and the returns of the turns
    before it include neither that reward nor later ones.

    Args:
      turn_where, gamma: See the module.
      rewards: ``[..., K]``, floating point, one per turn.
      matches: bool ``[..., K]``, True for turns that match the expert's; None for all.

    Returns:
      ``[..., K]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.turn_returns(jnp.array([0.0, 1.0, 1.0]), gamma=0.5).tolist()
      [0.75, 1.5, 1.0]

    References:
      Dr. Kernel (arXiv:2602.05885), and its released code; with ``matches`` that of UI-S1
      (arXiv:2509.11543).
    """
    name = "turn_returns"
    checks.check_min_rank(name, 1, rewards=rewards)
    checks.check_float(name, rewards=rewards)
    checks.check_bool(name, turn_where=turn_where, matches=matches)
    checks.check_same_shape(name, rewards=rewards, turn_where=turn_where, matches=matches)
    checks.check_share(name, gamma=gamma)
    rewards = masking.zero_masked(rewards, turn_where)
    discounts = jnp.broadcast_to(jnp.asarray(gamma, jnp.float32), rewards.shape)
    if matches is not None:
        # What did not happen deviates from nothing.
        matches = matches if turn_where is None else matches | ~turn_where
        later = jnp.concatenate([matches[..., 1:], jnp.ones_like(matches[..., :1])], axis=-1)
        discounts = jnp.where(matches & later, discounts, 0.0)
    return masking.zero_masked(recur_back(discounts, rewards), turn_where)


def trloo(
    rewards: Array,
    *,
    turn_where: Array | None = None,
    where: Array | None = None,
    gamma: float = 1.0,
    singleton: Literal["zero", "raw"] = "raw",
) -> Array:
    """Leave-one-out for each turn: returns minus the mean return of the others at the same turn.

        A[i, k] = n / (n - 1) (R[i, k] - mean over rollouts of R[., k])

    R is :func:`turn_returns`, and n is the number of unmasked rollouts of the prompt that have a
    turn k. A rollout that stopped early does not count in the mean of later turns. With one turn
    this is :func:`rloo`. Follow it with :func:`turns_to_tokens`.

    Args:
      turn_where, where, gamma: See the module.
      rewards: ``[..., G, K]``, floating point, one per turn.
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
    checks.check_share("trloo", gamma=gamma)
    to_come = turn_returns(rewards, turn_where=taken, gamma=gamma)
    across = None if taken is None else jnp.swapaxes(taken, -1, -2)
    advantages = group.rloo(jnp.swapaxes(to_come, -1, -2), where=across, singleton=singleton)
    return jnp.swapaxes(advantages, -1, -2)


def mc_turns(
    rewards: Array,
    *,
    turn_where: Array | None = None,
    where: Array | None = None,
    gamma: float = 1.0,
    baseline: Literal["turn", "group", "none"] = "turn",
) -> Array:
    """Monte-Carlo returns of turns minus a baseline.

        A[i, k] = R[i, k] - b
        baseline="turn":   b = mean over rollouts of R[., k], of those that have a turn k
        baseline="group":  b = mean over all turns of the group
        baseline="none":   b = 0

    R is :func:`turn_returns`. :func:`trloo` excludes the rollout from its own baseline. With a
    baseline, a turn without others to compare with gets 0. With one turn this is :func:`dr_grpo`.
    Follow it with :func:`turns_to_tokens`.

    Args:
      rewards, turn_where, where, gamma: See the module.
      baseline: What is subtracted: "turn", "group" or "none".

    Returns:
      Advantages ``[..., G, K]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.mc_turns(jnp.array([[0.0, 3.0], [0.0, 1.0], [3.0, 2.0]])).tolist()
      [[0.0, 1.0], [-2.0, -1.0], [2.0, 0.0]]

    References:
      Sutton and Barto, Reinforcement Learning, chapter 13.4.
    """
    taken = check_turns("mc_turns", rewards, turn_where, where)
    checks.check_option("mc_turns", "baseline", baseline, ("turn", "group", "none"))
    checks.check_share("mc_turns", gamma=gamma)
    to_come = turn_returns(rewards, turn_where=taken, gamma=gamma)
    if baseline == "none":
        return to_come
    if baseline == "group":
        return _over_group(to_come, taken, "none", None)
    return _over_rollouts(to_come, taken, "none", None)


def turn_grpo(
    rewards: Array,
    *,
    turn_where: Array | None = None,
    where: Array | None = None,
    gamma: float = 1.0,
    scale: Literal["group", "none"] = "group",
    eps: float | None = None,
) -> Array:
    """Turn rewards, standardized over all turns of the group, then summed from each turn on.

        a[i, k] = (r[i, k] - mean) / (std + eps)       over every turn of every rollout, ddof 1
        A[i, k] = sum over j >= k of gamma^(j - k) a[i, j]

    A long rollout counts more in the mean than a short one. ``gamma=0`` leaves ``a``; with one turn
    it is :func:`grpo`. A group with a single turn, or with equal rewards of all turns, gets 0.

    Args:
      rewards, turn_where, where, gamma, scale, eps: See the module.

    Returns:
      Advantages ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[0.2, 0.3, 1.0], [0.1, -0.1, 0.0]])
      >>> jr.advantages.turn_grpo(rewards).round(3).tolist()
      [[1.90..., 2.03..., 1.90...], [-1.90..., -1.52..., -0.63...]]

    References:
      IGPO (arXiv:2510.14967), PAPER. The released code sums first, subtracts the mean at each token
      position and does not divide. With ``gamma=0`` after :func:`geometric_rewards` it is our
      reading of EAPO (arXiv:2511.07327).
    """
    taken = check_turns("turn_grpo", rewards, turn_where, where)
    check_scale("turn_grpo", scale, eps)
    checks.check_share("turn_grpo", gamma=gamma)
    return turn_returns(_over_group(rewards, taken, scale, eps), turn_where=taken, gamma=gamma)


def ui_s1(
    rewards: Array,
    *,
    matches: Array,
    turn_where: Array | None = None,
    where: Array | None = None,
    gamma: float = 0.5,
    step_weight: float = 1.0,
    episode_weight: float = 1.0,
    scale: Literal["group", "none"] = "group",
    eps: float | None = None,
    episode: Literal["turns", "rollouts"] = "turns",
    singleton: Literal["zero", "raw"] = "zero",
) -> Array:
    """Returns that end where the policy deviates from an expert, plus an episode term.

        step[i, k] = (R[i, k] - mean over rollouts of R[., k]) / (std + eps)
        episode[i, k] = (x - mean) / (std + eps)
            episode="turns":     x = r[i, k], over all turns of the group
            episode="rollouts":  x = sum over turns of r[i], over the rollouts
        A = episode_weight episode + step_weight step

    R is :func:`turn_returns` with ``matches``. Turns are compared by position, since rollouts
    follow one recorded path. A turn that only one rollout reached has step 0.

    Args:
      rewards, turn_where, where, gamma, scale, eps: See the module.
      matches: bool ``[..., G, K]``, True for turns that match the expert's.
      step_weight: Weight of the step term, not negative.
      episode_weight: Weight of the episode term, not negative.
      episode: What the episode term compares: "turns" or "rollouts".
      singleton: Episode term where there is nothing to compare with: "zero" for 0, "raw" for x.

    Returns:
      Advantages ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 1.0], [1.0, 0.1]])
      >>> matches = jnp.array([[True, True], [True, False]])
      >>> jr.advantages.ui_s1(rewards, matches=matches, scale="none").round(3).tolist()
      [[0.475..., 0.675...], [-0.025..., -1.125]]

    References:
      UI-S1 (arXiv:2509.11543), the released code, whose episode score is the reward of each step
      ("turns") and whose singleton is "raw"; "rollouts" is from the abstract.
    """
    function = "ui_s1"
    taken = check_turns(function, rewards, turn_where, where)
    checks.check_bool(function, matches=matches)
    checks.check_same_shape(function, rewards=rewards, matches=matches)
    check_scale(function, scale, eps)
    checks.check_share(function, gamma=gamma)
    checks.check_option(function, "episode", episode, ("turns", "rollouts"))
    checks.check_option(function, "singleton", singleton, ("zero", "raw"))
    checks.check_non_negative(
        function, finite=True, step_weight=step_weight, episode_weight=episode_weight
    )
    to_come = turn_returns(rewards, turn_where=taken, gamma=gamma, matches=matches)
    step = _over_rollouts(to_come, taken, scale, eps)
    if episode == "turns":
        credit = _over_group(rewards, taken, scale, eps, singleton)
    else:
        total = masking.masked_sum(rewards, taken, axis=-1)
        credit = group.grpo(total, where=where, scale=scale, eps=eps, singleton=singleton)
        credit = masking.zero_masked(jnp.broadcast_to(credit[..., None], step.shape), taken)
    return episode_weight * credit + step_weight * step


@traits(token_values=True)
def turns_to_tokens(advantages: Array, mask: Array, *, turn_ids: Array) -> Array:
    """One value per turn, spread over the tokens of that turn.

        A[i, t] = A[i, turn of t]

    A token with a negative turn id belongs to no turn and gets 0. An id of K or more is an error
    and gives NaN where the token is unmasked.

    Args:
      advantages: ``[..., G, K]``, floating point, one per turn.
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
      Dr. Kernel (arXiv:2602.05885), where each turn is a row of the batch instead.
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


@traits(token_values=True)
def equal_turns(advantages: Array, mask: Array, *, turn_ids: Array) -> Array:
    """Token advantages divided by the length of their turn, so that every turn counts once.

        A'[i, t] = A[i, t] n / (m n_t)

    n_t is the number of tokens in the turn of t; n and m are the numbers of unmasked tokens, those
    of no turn too, and of turns in the full batch. Under ``aggregate.token_mean`` the loss is then
    the mean over turns of their mean over tokens, as if each turn were a sequence.

    Args:
      advantages: ``[..., G, T]``, floating point.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      turn_ids: integer ``[..., G, T]``, the turn of each token, from 0; below 0 for none.

    Returns:
      Advantages ``[..., G, T]``; 0 where masked and for tokens of no turn.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> turn_ids, mask = jnp.array([[0, 0, 0, 1]]), jnp.ones((1, 4), bool)
      >>> jr.advantages.equal_turns(jnp.ones((1, 4)), mask, turn_ids=turn_ids).round(2).tolist()
      [[0.66..., 0.66..., 0.66..., 2.0]]

    References:
      EAPO (arXiv:2511.07327), where each round of an agent is a sample.
    """
    function = "equal_turns"
    masking.check_tokens(function, mask, advantages=advantages)
    checks.check_integer(function, turn_ids=turn_ids)
    checks.check_same_shape(function, mask=mask, turn_ids=turn_ids)
    known = mask & (turn_ids >= 0)
    labels = segments.dense_labels((turn_ids,), known)
    length = jnp.maximum(segments.over_label(known.astype(jnp.float32), labels), 1.0)
    share = masking.zero_masked(1.0 / length, known)
    tokens, turns = jnp.sum(mask, dtype=jnp.float32), jnp.sum(share)
    scale = share * tokens / jnp.maximum(turns, 1.0)
    return masking.zero_masked(advantages, known) * scale


def _over_group(
    x: Array, taken: Array | None, scale, eps, singleton: Literal["zero", "raw"] = "zero"
) -> Array:
    """:func:`grpo` over all turns of each group."""
    joint = (*jnp.shape(x)[:-2], jnp.shape(x)[-2] * jnp.shape(x)[-1])
    valid = None if taken is None else jnp.reshape(taken, joint)
    values = jnp.reshape(x, joint)
    values = group.grpo(values, where=valid, scale=scale, eps=eps, singleton=singleton)
    return jnp.reshape(values, jnp.shape(x))


def _over_rollouts(x: Array, taken: Array | None, scale, eps) -> Array:
    """:func:`grpo` over the rollouts that have a turn, turn by turn."""
    valid = None if taken is None else jnp.swapaxes(taken, -1, -2)
    values = group.grpo(jnp.swapaxes(x, -1, -2), where=valid, scale=scale, eps=eps)
    return jnp.swapaxes(values, -1, -2)


def check_scale(function: str, scale: str, eps: float | None) -> None:
    """Raises unless the options of :func:`grpo` over turns are valid."""
    checks.check_option(function, "scale", scale, ("group", "none"))
    if scale == "none":
        checks.check_no_effect(function, "with scale='none'", eps=eps)
    checks.check_positive(function, finite=True, eps=eps)


def check_turns(
    function: str, rewards: Array, turn_where, where, *, name: str = "rewards"
) -> Array | None:
    """Checks arrays ``[..., G, K]`` and ``where [..., G]``; returns the unmasked turns, or None.

    ``name`` is the function's argument that has the rewards of turns.
    """
    checks.check_min_rank(function, 2, **{name: rewards})
    checks.check_float(function, **{name: rewards})
    checks.check_bool(function, turn_where=turn_where, where=where)
    checks.check_same_shape(function, **{name: rewards, "turn_where": turn_where})
    if where is None:
        return turn_where
    checks.check_shape(function, "where", where, jnp.shape(rewards)[:-1])
    valid = jnp.broadcast_to(where[..., None], jnp.shape(rewards))
    return valid if turn_where is None else valid & turn_where
