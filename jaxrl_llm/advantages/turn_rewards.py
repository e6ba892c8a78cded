"""Rewards of turns, from the outcome, the environment's rewards or information gain.

- ``rewards``: floating point ``[..., G]``, the outcome of each rollout.
- ``turn_rewards``: floating point ``[..., G, K]``, one per turn.
- ``turn_where``: bool ``[..., G, K]``, True for turns that happened; None for all.
- Results are float32. Turns that did not happen earn 0 and are not read.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import turns
from jaxrl_llm.advantages.reward_components import Components
from jaxrl_llm.core import Array, checks, masking, segments, traits

__all__ = [
    "gate_turn_rewards",
    "gated_rewards",
    "geometric_rewards",
    "info_gain_rewards",
    "place_turn_rewards",
    "token_totals",
]


def geometric_rewards(rewards: Array, *, turn_where: Array, gamma: float = 0.99) -> Array:
    """The outcome at every turn, discounted by the number of turns after it.

        r[i, k] = gamma^(turns of i after k) R_i

    The last turn gets the outcome; the shorter of two successes has the larger first reward.

    Args:
      rewards: See the module.
      turn_where: bool ``[..., G, K]``, True for turns that happened.
      gamma: Discount for a turn, in [0, 1].

    Returns:
      ``[..., G, K]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> turn_where = jnp.array([[True, True, True], [True, True, False]])
      >>> jr.advantages.geometric_rewards(jnp.ones(2), turn_where=turn_where, gamma=0.5).tolist()
      [[0.25, 0.5, 1.0], [0.5, 1.0, 0.0]]

    References:
      EAPO, IterResearch (arXiv:2511.07327), ABSTRACT reading.
    """
    _check_outcome("geometric_rewards", rewards, turn_where)
    checks.check_bool("geometric_rewards", turn_where=turn_where)
    checks.check_share("geometric_rewards", gamma=gamma)
    after = jnp.cumsum(turn_where[..., ::-1], axis=-1)[..., ::-1] - 1
    # The power of a traced discount of 0 must be 1 at the last turn.
    share = jnp.where(after > 0, jnp.asarray(gamma, jnp.float32) ** jnp.maximum(after, 1), 1.0)
    return masking.zero_masked(jnp.asarray(rewards, jnp.float32)[..., None] * share, turn_where)


def info_gain_rewards(
    rewards: Array, *, answer_logp: Array, turn_where: Array | None = None
) -> Array:
    """The increase in the reference answer's probability at each turn; the outcome at the last.

        P_k = exp(answer_logp_k);   r_k = P_k - P_(k-1)   for turns before the last;   r_last = R

    The rewards of all turns but the last add up to P of the second-to-last turn minus P_0. A single
    turn gets only the outcome.

    Args:
      rewards, turn_where: See the module.
      answer_logp: ``[..., G, K + 1]``, floating point: the mean log-probability (nats) of the
        tokens of the reference answer under the old policy, after the question alone and after
        each turn. The tokens of the answer exclude those of its format.

    Returns:
      ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> answer_logp = jnp.log(jnp.array([[0.25, 0.5, 0.5, 0.75]]))
      >>> jr.advantages.info_gain_rewards(jnp.array([1.0]), answer_logp=answer_logp).tolist()
      [[0.25, 0.0, 1.0]]

    References:
      IGPO (arXiv:2510.14967), the released code.
    """
    function = "info_gain_rewards"
    checks.check_min_rank(function, 2, answer_logp=answer_logp)
    checks.check_float(function, rewards=rewards, answer_logp=answer_logp)
    shape = (*jnp.shape(rewards), jnp.shape(answer_logp)[-1] - 1)
    checks.check_shape(function, "answer_logp", answer_logp, (*jnp.shape(rewards), shape[-1] + 1))
    valid = jnp.ones(shape, bool) if turn_where is None else turn_where
    checks.check_bool(function, turn_where=turn_where)
    checks.check_shape(function, "turn_where", valid, shape)
    known = jnp.concatenate([jnp.any(valid, -1, keepdims=True), valid], axis=-1)
    share = jnp.exp(masking.zero_masked(answer_logp, known))
    last = masking.last_token(valid)
    gain = jnp.where(last, jnp.asarray(rewards, jnp.float32)[..., None], jnp.diff(share, axis=-1))
    return masking.zero_masked(gain, valid)


def gated_rewards(
    rewards: Components,
    *,
    order: tuple[str, ...],
    thresholds: tuple[float, ...],
    weights: tuple[float, ...] | None = None,
    where: Array | None = None,
) -> Array:
    """A reward counts only where all more important rewards passed their thresholds.

        R = sum over i of w_i r_i prod over j > i of 1[r_j > d_j]

    The last, most important reward always counts. With thresholds of -inf all rewards count.

    Args:
      rewards: Names to ``[..., G]``, floating point.
      order: Names from the least to the most important; the others are not read.
      thresholds: d of each reward but the first, in that order.
      weights: w of each reward; None for 1.
      where: bool ``[..., G]``, True for rollouts that take part; the others get 0.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = {"format": jnp.array([0.25, 0.25]), "solved": jnp.array([0.0, 1.0])}
      >>> jr.advantages.gated_rewards(
      ...     rewards, order=("format", "solved"), thresholds=(0.0,)).tolist()
      [0.0, 1.25]

    References:
      G-RA (arXiv:2508.10548), PAPER. :func:`gate_rewards` has one gate, which is open at its
      threshold.
    """
    function = "gated_rewards"
    weights = (1.0,) * len(order) if weights is None else weights
    if len(thresholds) != len(order) - 1 or len(weights) != len(order):
        raise ValueError(
            f"{function}: {len(order)} rewards take {max(len(order) - 1, 0)} thresholds and "
            f"{len(order)} weights; got {len(thresholds)} and {len(weights)}."
        )
    for name in order:
        checks.check_option(function, "order", name, sorted(rewards))
    checks.check_float(function, **{name: rewards[name] for name in order})
    checks.check_same_shape(function, **{name: rewards[name] for name in order})
    checks.check_bool(function, where=where)
    total, is_open = jnp.zeros(jnp.shape(rewards[order[-1]])), True
    bounds = (-jnp.inf, *thresholds)
    for name, bound, weight in zip(order[::-1], bounds[::-1], weights[::-1], strict=True):
        reward = masking.zero_masked(rewards[name], where)
        total = total + weight * jnp.where(is_open, reward, 0.0)
        is_open = is_open & (reward > bound)
    return masking.zero_masked(total, where)


def gate_turn_rewards(
    rewards: Array,
    *,
    step_rewards: Array,
    turn_rewards: Array | None = None,
    turn_where: Array | None = None,
    threshold: float = 0.0,
    weight: float = 1.0,
) -> Array:
    """Step rewards that count only if the outcome of the rollout passed a threshold.

        r[i, k] = turn_rewards[i, k] + weight 1[R_i > threshold] step_rewards[i, k]

    A failed rollout gets only its outcome.

    Args:
      rewards, turn_where: See the module.
      step_rewards: ``[..., G, K]``, floating point: for the format or the tools of a turn.
      turn_rewards: As in the module: the outcome, at the turns that earned it. None for 0.
      threshold: Outcomes up to this value do not pass. With -inf all rewards are added up.
      weight: Of the step rewards, not negative.

    Returns:
      ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.gate_turn_rewards(
      ...     jnp.array([0.0, 1.0]), step_rewards=jnp.full((2, 2), 0.25)).tolist()
      [[0.0, 0.0], [0.25, 0.25]]

    References:
      G-RA (arXiv:2508.10548), PAPER; ``threshold=-inf`` is its direct accumulation, D-RA.
    """
    function = "gate_turn_rewards"
    _check_outcome(function, rewards, step_rewards)
    checks.check_float(function, step_rewards=step_rewards, turn_rewards=turn_rewards)
    checks.check_bool(function, turn_where=turn_where)
    checks.check_same_shape(
        function, step_rewards=step_rewards, turn_rewards=turn_rewards, turn_where=turn_where
    )
    checks.check_non_negative(function, finite=True, weight=weight)
    passed = (jnp.asarray(rewards, jnp.float32) > threshold)[..., None]
    earned = 0.0 if turn_rewards is None else jnp.asarray(turn_rewards, jnp.float32)
    steps = jnp.where(passed, jnp.asarray(step_rewards, jnp.float32), 0.0)
    return masking.zero_masked(earned + weight * steps, turn_where)


@traits(token_values=True)
def place_turn_rewards(
    rewards: Array,
    mask: Array,
    *,
    turn_ids: Array,
    turn_rewards: Array | None = None,
    turn_where: Array | None = None,
    won: Array | None = None,
    mode: Literal["dense", "single"] = "dense",
    max_total: float | Array | None = None,
) -> Array:
    """Token rewards: normalized turn rewards at the last token of each turn, or the outcome.

        mode="dense":   r at the end of turn k = turn_rewards_k / N
                        N = max(1, how many turn rewards are above 0)  if the episode is won,
                            max(1, max_total)                          if not
        mode="single":  r at the end of the last turn = R

    With turn rewards of 1, a won episode adds up to 1 and a lost one to its share of the available
    rewards. The reward of a turn without tokens counts in N and is dropped.

    Args:
      rewards: See the module; with "dense" read only without ``won``.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      turn_ids: integers ``[..., G, T]``, the turn of each token, from 0; below 0 for none.
      turn_rewards: As in the module; only with "dense".
      turn_where: As in the module. With "single" the last turn earns nothing if it has no token.
      won: bool ``[..., G, K]``, True at a turn that won; only with "dense". None means that an
        episode with a reward above 0 is won.
      mode: "dense" or "single".
      max_total: How many rewards an episode can earn, a number or ``[..., G]``; only with "dense".
        None means 1.

    Returns:
      ``[..., G, T]``, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> turn_ids, mask = jnp.array([[0, 0, 1, 2]]), jnp.ones((1, 4), bool)
      >>> jr.advantages.place_turn_rewards(
      ...     jnp.array([1.0]), mask, turn_ids=turn_ids,
      ...     turn_rewards=jnp.array([[0.0, 1.0, 1.0]])).tolist()
      [[0.0, 0.0, 0.5, 0.5]]

    References:
      A Practitioner's Guide to multi-turn agentic RL (arXiv:2510.01132), the released code.
    """
    function = "place_turn_rewards"
    checks.check_option(function, "mode", mode, ("dense", "single"))
    checks.check_mask(function, mask)
    checks.check_integer(function, turn_ids=turn_ids)
    checks.check_same_shape(function, mask=mask, turn_ids=turn_ids)
    checks.check_float(function, rewards=rewards)
    checks.check_shape(function, "rewards", rewards, jnp.shape(mask)[:-1])
    known = mask & (turn_ids >= 0)
    if mode == "single":
        because = "with mode='single'"
        checks.check_no_effect(
            function, because, turn_rewards=turn_rewards, won=won, max_total=max_total
        )
        last = masking.last_token(known)
        if turn_where is not None:
            _check_outcome(function, rewards, turn_where)
            checks.check_bool(function, turn_where=turn_where)
            number = jnp.arange(jnp.shape(turn_where)[-1])
            final = jnp.max(jnp.where(turn_where, number, -1), axis=-1, initial=-1)
            last &= turn_ids == final[..., None]
        return masking.zero_masked(jnp.asarray(rewards, jnp.float32)[..., None], last)
    if turn_rewards is None:
        raise ValueError(f"{function}: turn_rewards is None; mode='dense' requires it.")
    checks.check_float(function, turn_rewards=turn_rewards)
    checks.check_bool(function, won=won, turn_where=turn_where)
    checks.check_same_shape(function, turn_rewards=turn_rewards, won=won, turn_where=turn_where)
    _check_outcome(function, rewards, turn_rewards)
    earned = masking.zero_masked(turn_rewards, turn_where)
    success = jnp.asarray(rewards) > 0
    if won is not None:
        success = jnp.any(won if turn_where is None else won & turn_where, axis=-1)
    hits = jnp.sum(earned > 0, axis=-1, dtype=jnp.float32)
    if jnp.ndim(max_total if max_total is not None else 1.0):
        checks.check_shape(function, "max_total", max_total, jnp.shape(rewards))
    most = jnp.asarray(1.0 if max_total is None else max_total, jnp.float32)
    share = earned / jnp.maximum(jnp.where(success, hits, most), 1.0)[..., None]
    places = jnp.broadcast_to(jnp.arange(jnp.shape(mask)[-1]), jnp.shape(mask))
    labels = segments.dense_labels((turn_ids,), known)
    ends = known & (segments.over_label(places, labels, "max") == places)
    return turns.turns_to_tokens(share, ends, turn_ids=turn_ids)


def turn_totals(
    rewards: Array,
    *,
    turn_ids: Array,
    turn_rewards: Array | None = None,
    turn_where: Array | None = None,
    won: Array | None = None,
    mode: Literal["dense", "single"] = "dense",
    max_total: float | Array | None = None,
) -> Array:
    """The sum ``[..., G]`` of the rewards that :func:`place_turn_rewards` places on an episode.

        R = sum over turns k of turn_rewards_k / N,   N as in place_turn_rewards

    Turns earn them whether their tokens train or not, so that a rollout that a correction rejects
    counts in the baseline of its group with what it earned.
    """
    placed = place_turn_rewards(
        rewards,
        jnp.asarray(turn_ids) >= 0,
        turn_ids=turn_ids,
        turn_rewards=turn_rewards,
        turn_where=turn_where,
        won=won,
        mode=mode,
        max_total=max_total,
    )
    return jnp.sum(placed, axis=-1)


def token_totals(token_rewards: Array, mask: Array) -> Array:
    """The sum of the rewards of the tokens of each rollout.

        R = sum over unmasked t of r[t]

    Args:
      token_rewards: ``[..., T]``, floating point.
      mask: bool ``[..., T]``.

    Returns:
      ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.token_totals(jnp.array([1.0, 2.0]), jnp.array([True, False]))
      Array(1., dtype=float32)

    References:
      None: with token rewards, these sums are the rewards that GRPO and RLOO compare.
    """
    masking.check_tokens("token_totals", mask, token_rewards=token_rewards)
    return masking.masked_sum(token_rewards, mask, axis=-1)


def _check_outcome(function: str, rewards: Array, of_turns: Array) -> None:
    """Raises unless ``rewards [..., G]`` are floating and ``of_turns`` has one axis more."""
    checks.check_float(function, rewards=rewards)
    checks.check_min_rank(function, 1, rewards=rewards)
    if jnp.ndim(of_turns) == 0 or jnp.shape(of_turns)[:-1] != jnp.shape(rewards):
        raise ValueError(
            f"{function}: there must be turns for each of the rewards {jnp.shape(rewards)}; got "
            f"turns of shape {jnp.shape(of_turns)}."
        )
