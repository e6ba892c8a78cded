"""Replay of rollouts: a buffer of fixed size, its eviction rules, and sampling from it.

The buffer is a pytree of arrays with C places, part of the train state. An item is a group, with
tokens, masks, rewards and ``behavior_logp`` (never recomputed, so that ``surrogates.decoupled_ppo``
can correct for the stale sampler), or one rollout. ``versions`` and ``version`` are versions of the
weights that sampled the items; ``where`` is bool, True = takes part.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree, checks, masking

__all__ = [
    "ReplayBuffer",
    "ReplaySample",
    "replacements",
    "replay_add",
    "replay_fresh",
    "replay_init",
    "replay_sample",
]


class ReplayBuffer(NamedTuple):
    """Stored items; their places have no order.

    Attributes:
      items: Arrays ``[C, ...]``.
      prompt_ids: int32 ``[C]``.
      versions: int32 ``[C]``.
      scores: ``[C]`` float32.
      order: int32 ``[C]``, the serial number of each item; -1 for an empty place.
      added: int32 ``[]``, the number of items added so far.
    """

    items: ArrayTree
    prompt_ids: Array
    versions: Array
    scores: Array
    order: Array
    added: Array


def replay_init(item: ArrayTree, *, capacity: int) -> ReplayBuffer:
    """An empty buffer.

    Args:
      item: One item: arrays, or their shapes and dtypes, without the leading axis of the buffer.
      capacity: C, above 0.

    Returns:
      :class:`ReplayBuffer`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> buffer = jr.curation.replay_init({"tokens": jnp.zeros((4, 16), jnp.int32)}, capacity=8)
      >>> buffer.items["tokens"].shape
      (8, 4, 16)

    References:
      DOTS (arXiv:2506.05316), rollout replay: 512 groups.
    """
    checks.check_count("replay_init", capacity=capacity)
    return ReplayBuffer(
        items=jax.tree.map(
            lambda x: jnp.zeros((capacity, *jnp.shape(x)), jnp.result_type(x)), item
        ),
        prompt_ids=jnp.full(capacity, -1, jnp.int32),
        versions=jnp.zeros(capacity, jnp.int32),
        scores=jnp.zeros(capacity, jnp.float32),
        order=jnp.full(capacity, -1, jnp.int32),
        added=jnp.zeros((), jnp.int32),
    )


def replay_add(
    buffer: ReplayBuffer,
    items: ArrayTree,
    *,
    prompt_ids: Array,
    version: int | Array,
    scores: Array | None = None,
    where: Array | None = None,
    evict: Literal["oldest", "lowest"] = "oldest",
    unique: bool = False,
) -> ReplayBuffer:
    """The buffer with new items, which fill empty places first.

        "oldest":  then replace the oldest items; the newest C stay
        "lowest":  then replace items of lower score, the lowest first; the C best stay

    Only the new items are written.

    Args:
      buffer: :class:`ReplayBuffer` with C places.
      items: Arrays ``[B, ...]``, with the structure of the buffer's items.
      prompt_ids: int ``[B]``.
      version: An integer, or ``[B]``: version of the weights that sampled.
      scores: ``[B]``, floating point; None for 0. A NaN is not added.
      where: bool ``[B]``, True for items to add, such as groups whose rewards differ.
      evict: "oldest" or "lowest".
      unique: Whether a prompt has at most one item: an older one is removed, even if the new one
        is not added for its score.

    Returns:
      The next :class:`ReplayBuffer`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> buffer = jr.curation.replay_init(jnp.zeros(()), capacity=2)
      >>> for version, x in enumerate([1.0, 2.0, 3.0]):
      ...     buffer = jr.curation.replay_add(
      ...         buffer, jnp.array([x]), prompt_ids=jnp.array([0]), version=version)
      >>> buffer.items.tolist(), buffer.versions.tolist()
      ([3.0, 2.0], [2, 1])

    References:
      "oldest" and ``unique``: DOTS (arXiv:2506.05316). Its released code drops the older items of a
      prompt when it samples, after it has cut the buffer, and so may store fewer. "lowest": TRL's
      GRPO with a replay buffer.
    """
    name = "replay_add"
    (capacity,) = buffer.order.shape
    checks.check_rank(name, 1, prompt_ids=prompt_ids)
    checks.check_integer(name, prompt_ids=prompt_ids, version=version)
    checks.check_float(name, scores=scores)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, prompt_ids=prompt_ids, scores=scores, where=where)
    checks.check_option(name, "evict", evict, ("oldest", "lowest"))
    (size,) = jnp.shape(prompt_ids)
    if jnp.ndim(version):
        checks.check_shape(name, "version", version, (size,))
    _check_items(name, buffer.items, items, size)
    if evict == "lowest" and scores is None:
        raise ValueError(f"{name}: evict='lowest' needs scores.")
    prompt_ids = jnp.asarray(prompt_ids, jnp.int32)
    new = jnp.ones(size, bool) if where is None else jnp.asarray(where)
    if scores is not None:
        new &= ~jnp.isnan(scores)
    order = buffer.order
    if unique:
        same = (prompt_ids[:, None] == prompt_ids) & new
        new &= ~jnp.any(jnp.triu(same, 1), axis=-1)
        order = jnp.where(jnp.any((buffer.prompt_ids[:, None] == prompt_ids) & new, -1), -1, order)
    scores = masking.zero_masked(jnp.zeros(size) if scores is None else scores, new)
    # The places that the new items take, empty ones first; ``capacity`` for none.
    if evict == "oldest":
        rank = jnp.cumsum(new) - 1
        spare = jnp.maximum(jnp.sum(new) - capacity, 0)
        place = jnp.argsort(order, stable=True)[jnp.clip(rank - spare, 0, capacity - 1)]
        place = jnp.where(new & (rank >= spare), place, capacity)
    else:
        held = jnp.where(order >= 0, buffer.scores, -jnp.inf)
        best = jnp.argsort(jnp.where(new, -scores, jnp.inf), stable=True)
        rank = jnp.zeros(size, jnp.int32).at[best].set(jnp.arange(size, dtype=jnp.int32))
        place = jnp.lexsort((order, held))[jnp.minimum(rank, capacity - 1)]
        place = jnp.where(new & (rank < capacity) & (scores > held[place]), place, capacity)

    def put(old: Array, values: Array) -> Array:
        return jnp.asarray(old).at[place].set(jnp.asarray(values).astype(old.dtype), mode="drop")

    return ReplayBuffer(
        items=jax.tree.map(put, buffer.items, items),
        prompt_ids=put(buffer.prompt_ids, prompt_ids),
        versions=put(buffer.versions, jnp.broadcast_to(version, (size,))),
        scores=put(buffer.scores, scores),
        order=put(order, buffer.added + jnp.cumsum(new) - 1),
        added=buffer.added + jnp.sum(new).astype(jnp.int32),
    )


def _check_items(function: str, stored: ArrayTree, items: ArrayTree, size: int) -> None:
    """Raises unless the items have the structure and shapes of those stored."""
    if jax.tree.structure(stored) != jax.tree.structure(items):
        raise ValueError(
            f"{function}: items must have the structure {jax.tree.structure(stored)}; "
            f"got {jax.tree.structure(items)}."
        )
    for old, new in zip(jax.tree.leaves(stored), jax.tree.leaves(items), strict=True):
        if jnp.shape(new) != (size, *old.shape[1:]):
            raise ValueError(
                f"{function}: items must have shape {(size, *old.shape[1:])}; got {jnp.shape(new)}."
            )


def replay_fresh(
    buffer: ReplayBuffer, *, version: int | Array, max_lag: int | None = None
) -> Array:
    """The places whose items are not older than a bound.

        version - versions_i <= max_lag

    Args:
      buffer: :class:`ReplayBuffer`.
      version: Version of the weights being trained.
      max_lag: Maximum age in versions, not negative; None for no bound. 0 is on-policy data.

    Returns:
      bool ``[C]``, False for empty places.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> buffer = jr.curation.replay_init(jnp.zeros(()), capacity=3)
      >>> ids, versions = jnp.array([0, 1]), jnp.array([2, 5])
      >>> buffer = jr.curation.replay_add(buffer, jnp.ones(2), prompt_ids=ids, version=versions)
      >>> jr.curation.replay_fresh(buffer, version=6, max_lag=2).tolist()
      [False, True, False]

    References:
      AReaL (arXiv:2505.24298) bounds the age at admission, ``corrections.staleness_capacity``.
    """
    checks.check_integer("replay_fresh", version=version)
    filled = buffer.order >= 0
    if max_lag is None:
        return filled
    checks.check_non_negative("replay_fresh", max_lag=max_lag)
    return filled & (version - buffer.versions <= max_lag)


class ReplaySample(NamedTuple):
    """Items drawn from a buffer.

    Attributes:
      items: Arrays ``[k, ...]``; filler where ``where`` is False.
      index: int32 ``[k]``, the places; -1 where no item was left.
      where: bool ``[k]``.
    """

    items: ArrayTree
    index: Array
    where: Array


def replay_sample(
    key: Array,
    buffer: ReplayBuffer,
    *,
    count: int,
    weights: Array | None = None,
    where: Array | None = None,
    replace: bool = False,
) -> ReplaySample:
    """Draws items by weight.

    Args:
      key: Typed PRNG key.
      buffer: :class:`ReplayBuffer` with C places.
      count: k, number of items to draw, above 0; without replacement at most C.
      weights: ``[C]``, floating point, not negative: such as
        :func:`~jaxrl_llm.curation.replay_priorities` or
        :func:`~jaxrl_llm.curation.fading_probs`. None draws uniformly. A weight of 0 or NaN is
        never drawn.
      where: ``[C]``, such as :func:`replay_fresh`. Empty places are always excluded.
      replace: Whether an item may be drawn twice.

    Returns:
      :class:`ReplaySample`, with the filler at the end.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> buffer = jr.curation.replay_init(jnp.zeros(()), capacity=4)
      >>> ids = jnp.array([7, 8])
      >>> buffer = jr.curation.replay_add(buffer, jnp.ones(2), prompt_ids=ids, version=0)
      >>> sample = jr.curation.replay_sample(jax.random.key(0), buffer, count=3)
      >>> sorted(sample.index.tolist()), sample.where.tolist()
      ([-1, 0, 1], [True, True, False])

    References:
      DOTS (arXiv:2506.05316) draws groups uniformly without replacement; TRL's GRPO with a replay
      buffer by score.
    """
    name = "replay_sample"
    (capacity,) = buffer.order.shape
    checks.check_float(name, weights=weights)
    checks.check_bool(name, where=where)
    for option, x in {"weights": weights, "where": where}.items():
        if x is not None:
            checks.check_shape(name, option, x, (capacity,))
    checks.check_count(name, most=None if replace else capacity, count=count)
    able = buffer.order >= 0 if where is None else (buffer.order >= 0) & where
    logits = jnp.zeros(capacity)
    if weights is not None:
        able &= weights > 0  # False for a NaN
        logits = jnp.log(jnp.where(able, weights, 1.0))
    logits = jnp.where(able, logits, -jnp.inf)
    if replace:
        index = jax.random.categorical(key, jnp.where(jnp.any(able), logits, 0.0), shape=(count,))
        drawn = jnp.broadcast_to(jnp.any(able), (count,))
    else:
        best, index = jax.lax.top_k(logits + jax.random.gumbel(key, (capacity,)), count)
        drawn = best > -jnp.inf
    index = jnp.where(drawn, index, -1).astype(jnp.int32)
    items = jax.tree.map(lambda x: x[jnp.maximum(index, 0)], buffer.items)
    return ReplaySample(items, index, drawn)


def replacements(keep: Array, available: int | Array) -> Array:
    """The replayed groups that replace uninformative ones.

    Args:
      keep: bool ``[P]``, True for groups that stay (``informative_groups``).
      available: Number of replayed groups.

    Returns:
      int32 ``[P]``: 0, 1, .. at the places that are replaced, in their order; -1 for groups that
      stay, and for places beyond the number of replayed groups.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> keep = jnp.array([True, False, False, True, False])
      >>> jr.curation.replacements(keep, 2).tolist()
      [-1, 0, 1, -1, -1]

    References:
      TRL's GRPO with a replay buffer, where the replayed groups keep their stored advantages.
    """
    checks.check_rank("replacements", 1, keep=keep)
    checks.check_bool("replacements", keep=keep)
    checks.check_integer("replacements", available=available)
    number = jnp.cumsum(~jnp.asarray(keep)) - 1
    return jnp.where(~keep & (number < available), number, -1).astype(jnp.int32)
