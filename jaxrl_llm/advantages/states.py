"""Advantages that compare turns of a group from the same state, or with the same action there.

- ``rewards``: floating point ``[..., G]``, the return of each rollout, undiscounted.
- ``turn_rewards``: floating point ``[..., G, K]``, one per turn.
- ``state_ids``: integers ``[..., G, K]``, the state that a turn observes: equal numbers for equal
  states; below 0 for a turn that shares its state with no other.
- ``turn_where``: bool ``[..., G, K]``, True for turns that happened; None for all.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. Dropped entries
  count in no mean, get 0 and may hold anything.
- ``gamma``: discount for a turn, in [0, 1].
- ``scale``: "group" divides by a standard deviation plus ``eps``, "none" does not divide.
- ``singleton``: the episode term of a group of one: "zero" for 0, "raw" for the return.
- Advantages are float32 ``[..., G, K]``; :func:`turns_to_tokens` spreads them. States are compared
  within a group only, and ids by equality only.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import difflib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages import group, turns
from jaxrl_llm.core import Array, checks, masking, segments

__all__ = ["gigpo", "hgpo", "salt", "similar_states"]


def gigpo(
    rewards: Array,
    *,
    turn_rewards: Array,
    state_ids: Array,
    turn_where: Array | None = None,
    where: Array | None = None,
    gamma: float = 0.95,
    omega: float = 1.0,
    scale: Literal["group", "none"] = "none",
    eps: float | None = None,
    episode: Literal["rollouts", "turns"] = "rollouts",
    singleton: Literal["zero", "raw"] = "zero",
) -> Array:
    """The advantage of the episode plus that of a turn among all turns from the same state.

        R[i, k] = sum over j >= k of gamma^(j - k) r[i, j]
        step[i, k] = R[i, k] - mean of R over the turns of the group with the state of (i, k)
        A[i, k] = episode_i + omega step[i, k]

    The episode term is the return minus its group mean (``dr_grpo``); with ``scale="group"`` it is
    ``grpo``, and the step is also divided by the deviation among its turns (ddof 1). A state that
    one rollout visits twice counts twice. A state that only one turn observes has step 0: if all
    states differ, or with ``omega=0``, this is GRPO.

    Args:
      rewards, turn_rewards, state_ids, turn_where, where, gamma, scale, singleton: See the module.
      omega: Weight of the step, not negative.
      eps: Above 0; only with ``scale="group"``. None means 1e-6.
      episode: Unit of the episode's mean and deviation: "rollouts", each once, or "turns", so that
        long rollouts weigh more.

    Returns:
      Advantages ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> turn_rewards = jnp.array([[0.0, 10.0], [0.0, 0.0]])
      >>> jr.advantages.gigpo(
      ...     turn_rewards.sum(-1), turn_rewards=turn_rewards, gamma=0.5,
      ...     state_ids=jnp.array([[0, 1], [0, 2]])).tolist()
      [[7.5, 5.0], [-7.5, -5.0]]

    References:
      Feng et al., GiGPO (arXiv:2505.10978). The released code has ``episode="turns"`` and
      ``singleton="raw"``; the paper counts rollouts.
    """
    taken = _check("gigpo", "rewards", rewards, state_ids, turn_rewards, turn_where, where)
    checks.check_non_negative("gigpo", finite=True, omega=omega)
    turns.check_scale("gigpo", scale, eps)
    checks.check_share("gigpo", gamma=gamma)
    checks.check_option("gigpo", "singleton", singleton, ("zero", "raw"))
    base = _episode("gigpo", rewards, taken, where, episode, scale, eps, singleton)
    to_come = turns.turn_returns(turn_rewards, turn_where=taken, gamma=gamma)
    labels = _labels((state_ids,), taken & (state_ids >= 0))
    peers = _peers(_flat(to_come), _flat(labels), ddof=1)
    step = peers.centered
    if scale == "group":
        step = step / (peers.std + (1e-6 if eps is None else eps))
    return masking.zero_masked(base + omega * jnp.reshape(step, taken.shape), taken)


def hgpo(
    rewards: Array,
    *,
    turn_rewards: Array,
    state_ids: Array,
    turn_where: Array | None = None,
    where: Array | None = None,
    history: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    scale: Literal["group", "none"] = "group",
    eps: float = 1e-6,
    episode: Literal["turns", "rollouts"] | None = None,
    singleton: Literal["zero", "raw"] = "zero",
) -> Array:
    """Returns among turns from the same state after the same history, for several history lengths.

        level l: the turns with the same state and the same l - 1 states before, l = 1..history + 1
        a[l] = (R - mean) / (std + eps) over the level's turns, ddof 0
        A = sum over l of (l + 1)^alpha a[l] / (sum over l of (l + 1)^alpha + eps)

    Both sums are over the levels at which other turns match and ``a[l]`` is not 0; if there are
    none, A is 0. R is :func:`turn_returns`. A difference from the mean of less than 1e-6 of the
    largest return (or of 1) counts as 0. ``history=0`` is the step of :func:`gigpo`, up to ddof and
    eps.

    Args:
      rewards, turn_rewards, state_ids, turn_where, where, gamma, scale, singleton: See the module.
      history: Largest number of earlier states that are compared, not negative: the length of an
        agent's memory.
      alpha: How much more a longer history counts.
      eps: Added to deviations, with ``scale="group"``, and to the sum of the weights; above 0.
      episode: Adds a level of weight 1, the episode of :func:`gigpo` over "turns" or "rollouts";
        None for none, and then ``rewards`` are not read and ``singleton`` must be "zero".

    Returns:
      Advantages ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> turn_rewards = jnp.array([[0.0, 1.0], [0.0, 0.0], [0.0, 0.5]])
      >>> jr.advantages.hgpo(
      ...     turn_rewards.sum(-1), turn_rewards=turn_rewards, gamma=1.0, scale="none",
      ...     state_ids=jnp.array([[0, 1], [0, 1], [2, 1]])).round(3).tolist()
      [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]

    References:
      HGPO (arXiv:2602.22817), the recipe in verl-agent, which weighs a level by its length plus
      one, leaves levels of advantage 0 out of the average, and whose ``base_group`` is
      ``episode="turns"`` with ``singleton="raw"``. There a level counts as 0 only where it is
      exactly 0.
    """
    function = "hgpo"
    taken = _check(function, "rewards", rewards, state_ids, turn_rewards, turn_where, where)
    _check_history(function, history)
    checks.check_option(function, "scale", scale, ("group", "none"))
    checks.check_share(function, gamma=gamma)
    checks.check_positive(function, finite=True, eps=eps)
    checks.check_option(function, "singleton", singleton, ("zero", "raw"))
    if episode is None:
        unread = None if singleton == "zero" else singleton
        checks.check_no_effect(function, "without an episode", singleton=unread)
    to_come = _flat(turns.turn_returns(turn_rewards, turn_where=taken, gamma=gamma))
    seen = taken & (state_ids >= 0)
    total = weight = jnp.zeros(to_come.shape, jnp.float32)
    near = 1e-6 * jnp.maximum(jnp.max(jnp.abs(to_come), axis=-1, keepdims=True, initial=0.0), 1.0)
    labels = first = _labels((state_ids,), seen)
    for level in range(1, history + 2):
        if level > 1:
            before = _before(labels)
            labels = _labels((before, first), (first >= 0) & (before >= 0))
        peers = _peers(to_come, _flat(labels), ddof=0)
        counts = (jnp.abs(peers.centered) > near) & (_flat(labels) >= 0)
        credit = peers.centered / (peers.std + eps) if scale == "group" else peers.centered
        share = jnp.where(counts, (level + 1.0) ** alpha, 0.0)
        total, weight = total + share * credit, weight + share
    if episode is not None:
        added = eps if scale == "group" else None
        base = _episode(function, rewards, taken, where, episode, scale, added, singleton)
        base = _flat(masking.zero_masked(base, taken))
        size = jnp.max(jnp.abs(base), axis=-1, keepdims=True, initial=0.0)
        counts = jnp.abs(base) > 1e-6 * jnp.maximum(size, 1.0)
        total, weight = total + jnp.where(counts, base, 0.0), weight + counts
    return masking.zero_masked(jnp.reshape(total / (weight + eps), taken.shape), taken)


def salt(
    advantages: Array,
    *,
    state_ids: Array,
    action_ids: Array,
    next_state_ids: Array,
    turn_where: Array | None = None,
    where: Array | None = None,
    history: int = 1,
    include_next_state: bool = True,
    count: Literal["rollout", "turn"] = "rollout",
) -> Array:
    """The advantage of a rollout for each of its turns, averaged where rollouts share a turn.

        A[i, k] = mean of the advantages of all rollouts that have the edge of (i, k)

    An edge is a state, the action there, the next state and the ``history`` edges before it. A turn
    that good and bad rollouts share comes near 0; a turn that no other rollout has keeps its
    advantage. The result is not normalized again.

    Args:
      state_ids, turn_where, where: See the module.
      advantages: ``[..., G]``, floating point, of :func:`grpo` or :func:`rloo`.
      action_ids: integers ``[..., G, K]``, equal for equal texts of a turn; below 0 for a turn that
        shares its action with no other.
      next_state_ids: integers ``[..., G, K]``, numbered as ``state_ids``; below 0 for the end of
        the episode, which is one state.
      history: Number of earlier edges that are compared, not negative. 0 ignores how a state was
        reached; with K only common beginnings are shared. A turn with an id below 0 among them
        shares its history with no other.
      include_next_state: Whether the next state is compared.
      count: Whether a rollout that crosses an edge twice counts once ("rollout") or twice ("turn").
        With "turn" the sum over all turns of a group does not change.

    Returns:
      Advantages ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> same, then = jnp.array([[0, 1], [0, 1]]), jnp.array([[1, 2], [1, 3]])
      >>> jr.advantages.salt(jnp.array([1.0, -1.0]), state_ids=same,
      ...                    action_ids=jnp.array([[0, 1], [0, 2]]), next_state_ids=then).tolist()
      [[0.0, 1.0], [0.0, -1.0]]

    References:
      SALT (arXiv:2510.20022), ABSTRACT: the definition of an edge, and the mean, are our reading.
    """
    function = "salt"
    taken = _check(function, "advantages", advantages, state_ids, None, turn_where, where)
    checks.check_integer(function, action_ids=action_ids, next_state_ids=next_state_ids)
    checks.check_same_shape(
        function, state_ids=state_ids, action_ids=action_ids, next_state_ids=next_state_ids
    )
    _check_history(function, history)
    checks.check_option(function, "count", count, ("rollout", "turn"))
    known = taken & (state_ids >= 0) & (action_ids >= 0)
    keys = (state_ids, action_ids)
    if include_next_state:
        keys = (*keys, jnp.maximum(next_state_ids, -1))
    edges = labels = _labels(keys, known)
    begins = ~jnp.concatenate([jnp.zeros_like(taken[..., :1]), taken[..., :-1]], axis=-1)
    for _ in range(history):
        before = _before(labels)
        labels = _labels((before, edges), known & (begins | (before >= 0)))
    values = masking.zero_masked(advantages, where)
    values = _flat(jnp.broadcast_to(values[..., None], taken.shape))
    labels, counts = _flat(labels), jnp.ones(values.shape, bool)
    if count == "rollout":
        rollouts = _flat(jnp.broadcast_to(jnp.arange(taken.shape[-2])[:, None], taken.shape))
        crossings = segments.dense_labels((labels, rollouts), labels >= 0)
        places = jnp.broadcast_to(jnp.arange(values.shape[-1]), values.shape)
        counts = segments.over_label(places, crossings, "min") == places
    total = segments.over_label(masking.zero_masked(values, counts), labels)
    mean = total / jnp.maximum(segments.over_label(counts.astype(jnp.float32), labels), 1.0)
    merged = jnp.where((labels >= 0) & ~_constant(values, labels), mean, values)
    return masking.zero_masked(jnp.reshape(merged, taken.shape), taken)


def similar_states(texts: Sequence[str], *, threshold: float = 0.95) -> np.ndarray:
    """State ids by similarity of observations, for states that are never exactly equal.

        text i joins the first cluster whose first text t has ratio(t, i) >= threshold

    The ratio is that of ``difflib.SequenceMatcher``. Runs on the host; the result depends on the
    order of the texts. Call it for each group separately.

    Args:
      texts: Observations, in the order of rollouts and turns.
      threshold: Least similarity, in (0, 1).

    Returns:
      int32 ``[len(texts)]``, from 0 in the order in which the clusters begin.

    Example:
      >>> import jaxrl_llm as jr
      >>> texts = ["a door, closed, north", "a lamp", "a door, closed, south"]
      >>> jr.advantages.similar_states(texts, threshold=0.8).tolist()
      [0, 1, 0]

    References:
      GiGPO (arXiv:2505.10978), the released code, with thresholds of 0.9 to 0.95.
    """
    checks.check_share("similar_states", zero=False, one=False, threshold=threshold)
    first: list[str] = []
    ids = np.zeros(len(texts), np.int32)
    for i, text in enumerate(texts):
        alike = (
            c
            for c, start in enumerate(first)
            if difflib.SequenceMatcher(None, text, start).ratio() >= threshold
        )
        ids[i] = next(alike, len(first))
        if ids[i] == len(first):
            first.append(text)
    return ids


class _Peers(NamedTuple):
    """Statistics over the entries of one label, for each entry; 0 for entries of none."""

    centered: Array  # exactly 0 where all are equal
    std: Array


def _peers(x: Array, labels: Array, *, ddof: int) -> _Peers:
    known = labels >= 0
    count = segments.over_label(known.astype(jnp.float32), labels)
    mean = segments.over_label(masking.zero_masked(x, known), labels) / jnp.maximum(count, 1.0)
    centered = jnp.where(known & ~_constant(x, labels), x - mean, 0.0)
    squares = segments.over_label(centered**2, labels)
    variance = jnp.where(count > ddof, squares / jnp.maximum(count - ddof, 1.0), 0.0)
    return _Peers(centered, masking.safe_sqrt(variance))


def _constant(x: Array, labels: Array) -> Array:
    """Whether the entries of one label are all equal; the mean of three 0.1 is not 0.1."""
    return segments.over_label(x, labels, "max") <= segments.over_label(x, labels, "min")


def _episode(function, rewards, taken, where, episode, scale, eps, singleton) -> Array:
    """:func:`grpo` of the returns, over rollouts or over all turns of each group."""
    checks.check_option(function, "episode", episode, ("rollouts", "turns"))
    if episode == "rollouts":
        credit = group.grpo(rewards, where=where, scale=scale, eps=eps, singleton=singleton)
        return jnp.broadcast_to(credit[..., None], taken.shape)
    each = jnp.broadcast_to(jnp.asarray(rewards)[..., None], taken.shape)
    credit = group.grpo(_flat(each), where=_flat(taken), scale=scale, eps=eps, singleton=singleton)
    return jnp.reshape(credit, taken.shape)


def _flat(x: Array) -> Array:
    """``[..., G, K] -> [..., G K]``."""
    shape = jnp.shape(x)
    return jnp.reshape(x, (*shape[:-2], shape[-2] * shape[-1]))


def _labels(ids: Sequence[Array], where: Array) -> Array:
    """Labels of ids ``[..., G, K]`` within each group."""
    labels = segments.dense_labels(tuple(_flat(x) for x in ids), _flat(where))
    return jnp.reshape(labels, jnp.shape(where))


def _before(labels: Array) -> Array:
    """The label of the turn before; -1 for the first."""
    return jnp.concatenate([jnp.full_like(labels[..., :1], -1), labels[..., :-1]], axis=-1)


def _check_history(function: str, history: int) -> None:
    if isinstance(history, bool) or not isinstance(history, int) or history < 0:
        raise ValueError(f"{function}: history must be an integer from 0 on; got {history!r}.")


def _check(function, name, values, state_ids, turn_rewards, turn_where, where) -> Array:
    """Checks the arguments, ``values [..., G]`` by their name; the turns that take part."""
    checks.check_min_rank(function, 2, state_ids=state_ids)
    checks.check_integer(function, state_ids=state_ids)
    checks.check_float(function, **{name: values})
    checks.check_shape(function, name, values, jnp.shape(state_ids)[:-1])
    checks.check_same_shape(function, turn_rewards=turn_rewards, state_ids=state_ids)
    of_turns, rewards = "turn_rewards", turn_rewards
    if turn_rewards is None:
        of_turns, rewards = "state_ids", jnp.zeros(jnp.shape(state_ids))
    taken = turns.check_turns(function, rewards, turn_where, where, name=of_turns)
    return jnp.ones(jnp.shape(state_ids), bool) if taken is None else taken
