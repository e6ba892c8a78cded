"""Replay of rollouts: a buffer of fixed size, its eviction, and draws by priority.

The buffer is a pytree of arrays with C places, part of the train state. An item is a group, with
tokens, masks, rewards and ``behavior_logp`` (never recomputed, so that ``surrogates.decoupled_ppo``
can correct for the stale sampler), or one rollout. ``versions`` and ``version`` are those of the
weights that sampled. Priorities of places are ``[C]``; ``where`` (bool, True = takes part) excludes
entries, which may hold anything.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree, checks, masking, stats


class ReplayBuffer(NamedTuple):
    """Stored items, in no order of places.

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
      item: One item: arrays, or their shapes and dtypes, without the axis of places.
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
      items: Arrays ``[B, ...]``, of the structure of the buffer's.
      prompt_ids: int ``[B]``.
      version: An integer, or ``[B]``: of the weights that sampled.
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
      "oldest" and ``unique``: DOTS (arXiv:2506.05316). Its released code drops the older items of
      a prompt when it draws, after it has cut the buffer, and so may hold fewer. "lowest": TRL's
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
    filled = order >= 0
    rank = jnp.cumsum(new) - 1
    count = jnp.sum(new)
    if evict == "oldest":
        places = jnp.argsort(order, stable=True)
        spare = jnp.maximum(count - capacity, 0)
        taken = new & (rank >= spare)
        place = places[jnp.clip(rank - spare, 0, capacity - 1)]
    else:
        held = jnp.where(filled, buffer.scores, -jnp.inf)
        places = jnp.lexsort((order, held))
        best = jnp.argsort(jnp.where(new, -scores, jnp.inf), stable=True)
        standing = jnp.zeros(size, jnp.int32).at[best].set(jnp.arange(size, dtype=jnp.int32))
        place = places[jnp.minimum(standing, capacity - 1)]
        taken = new & (standing < capacity) & (scores > held[place])
    place = jnp.where(taken, place, capacity)

    def put(old: Array, values: Array) -> Array:
        return jnp.asarray(old).at[place].set(jnp.asarray(values).astype(old.dtype), mode="drop")

    return ReplayBuffer(
        items=jax.tree.map(put, buffer.items, items),
        prompt_ids=put(buffer.prompt_ids, prompt_ids),
        versions=put(buffer.versions, jnp.broadcast_to(version, (size,))),
        scores=put(buffer.scores, scores),
        order=put(order, buffer.added + rank),
        added=buffer.added + count.astype(jnp.int32),
    )


def replay_fresh(
    buffer: ReplayBuffer, *, version: int | Array, max_lag: int | None = None
) -> Array:
    """The places whose items are within a bound on their age.

        version - versions_i <= max_lag

    Args:
      buffer: :class:`ReplayBuffer`.
      version: Of the weights being trained.
      max_lag: Greatest age in versions, not negative; None for no bound. 0 is on-policy data.

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
      count: k, how many to draw, above 0; without replacement at most C.
      weights: ``[C]``, floating point, not negative: such as :func:`replay_priorities` or
        :func:`fading_probs`. None draws uniformly. A weight of 0 or NaN is never drawn.
      where: ``[C]``, such as :func:`replay_fresh`. Empty places are left out anyway.
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


def replay_scores(advantages: Array, rewards: Array, *, where: Array | None = None) -> Array:
    """Scores of groups by their advantages and the spread of their rewards.

        sum over i of |A_i|, times the deviation of the rewards (dividing by n - 1)

    A group with equal rewards scores exactly 0; TRL does not store it.

    Args:
      advantages: ``[..., G]``, floating point.
      rewards: ``[..., G]``, floating point.
      where: ``[..., G]``. See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> advantages = jnp.array([1.0, -1.0, 1.0, -1.0])
      >>> rewards = jnp.array([1.0, 0.0, 1.0, 0.0])
      >>> round(float(jr.curation.replay_scores(advantages, rewards)), 4)
      2.3094

    References:
      TRL's GRPO with a replay buffer. CODE reading.
    """
    name = "replay_scores"
    stats.check_group(name, rewards, where)
    checks.check_float(name, advantages=advantages)
    checks.check_same_shape(name, advantages=advantages, rewards=rewards)
    signal = jnp.sum(jnp.abs(masking.zero_masked(advantages, where)), axis=-1)
    rewards = masking.zero_masked(rewards, where)
    std = stats.group_std(rewards, where)
    std = jnp.where(stats.group_is_constant(rewards, where), 0.0, std)
    return signal * std[..., 0]


def advantage_sizes(advantages: Array, *, where: Array | None = None) -> Array:
    """Scores of groups by the sizes of their advantages.

        mean over i of |A_i|

    Args:
      advantages: ``[..., G]``, floating point.
      where: ``[..., G]``. See the module.

    Returns:
      ``[...]`` float32, 0 for a group without a rollout.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.advantage_sizes(jnp.array([0.5, -1.5, 0.0, 2.0])).tolist()
      1.0

    References:
      Skywork R1V2 (arXiv:2504.16656), selective sample buffer, ABSTRACT reading, for groups.
    """
    checks.check_min_rank("advantage_sizes", 1, advantages=advantages)
    checks.check_float("advantage_sizes", advantages=advantages)
    checks.check_bool("advantage_sizes", where=where)
    checks.check_same_shape("advantage_sizes", advantages=advantages, where=where)
    return masking.masked_mean(jnp.abs(masking.zero_masked(advantages, where)), where, axis=-1)


def replay_priorities(scores: Array, *, power: float = 1.0, where: Array | None = None) -> Array:
    """Probabilities of a draw by score.

        p_i = score_i^power / sum of score^power

    Args:
      scores: ``[C]``, floating point, not negative.
      power: Not negative; 0 draws uniformly.
      where: ``[C]``. See the module.

    Returns:
      ``[C]`` float32, adding up to 1; all 0 where nothing scores.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.replay_priorities(jnp.array([1.0, 3.0, 0.0])).tolist()
      [0.25, 0.75, 0.0]

    References:
      Schaul et al., prioritized experience replay (arXiv:1511.05952).
    """
    name = "replay_priorities"
    checks.check_rank(name, 1, scores=scores)
    checks.check_float(name, scores=scores)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, scores=scores, where=where)
    checks.check_non_negative(name, finite=True, power=power)
    scores = masking.zero_masked(scores, where)
    valid = scores >= 0 if where is None else where
    # Scaled first, so that a power of large scores is finite.
    largest = jnp.max(scores, initial=0.0)
    scaled = scores / jnp.where(largest > 0, largest, 1.0)
    weights = jnp.where(valid, jnp.ones_like(scaled) if power == 0 else scaled**power, 0.0)
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1.0)


def replay_importance(probs: Array, *, power: float = 1.0, where: Array | None = None) -> Array:
    """Importance weights that undo a draw by priority; the greatest is 1.

        (n p_i)^(-power) / max over j of (n p_j)^(-power),   n items that take part

    Args:
      probs: ``[C]``, floating point, as :func:`replay_priorities` gives them.
      power: 1 undoes the draw, 0 leaves it.
      where: ``[C]``. See the module.

    Returns:
      ``[C]`` float32, 0 where an item is never drawn.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.replay_importance(jnp.array([0.25, 0.5])).tolist()
      [1.0, 0.5]

    References:
      Schaul et al., prioritized experience replay (arXiv:1511.05952).
    """
    name = "replay_importance"
    checks.check_rank(name, 1, probs=probs)
    checks.check_float(name, probs=probs)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, probs=probs, where=where)
    checks.check_share(name, power=power)
    probs = masking.zero_masked(probs, where)
    drawn = probs > 0
    least = jnp.min(jnp.where(drawn, probs, jnp.inf))
    return jnp.where(drawn, (least / jnp.where(drawn, probs, 1.0)) ** power, 0.0)


def recency_weights(
    versions: Array, *, version: int | Array, scale: float, where: Array | None = None
) -> Array:
    """Factors of scores that fall with the age of the item.

        exp(-(version - versions_i) / scale)

    Args:
      versions: int ``[C]``.
      version: Of the weights being trained.
      scale: Versions after which 37% are left, above 0.
      where: ``[C]``. See the module.

    Returns:
      ``[C]`` float32, 0 where excluded.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> [round(x, 3) for x in jr.curation.recency_weights(
      ...     jnp.array([4, 2]), version=4, scale=2.0).tolist()]
      [1.0, 0.368]

    References:
      None; ours.
    """
    name = "recency_weights"
    checks.check_integer(name, versions=versions, version=version)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, versions=versions, where=where)
    checks.check_positive(name, scale=scale)
    age = jnp.maximum(version - jnp.asarray(versions), 0).astype(jnp.float32)
    return masking.zero_masked(jnp.exp(-age / scale), where)


def fading_probs(
    order: Array, *, factor: float = 7.0, form: Literal["smooth", "sharp"] = "smooth"
) -> Array:
    """Probabilities of a draw by age alone; the oldest item has probability 0.

        x_i = i / L for the i-th oldest of L items, from 0
        "smooth":  p_i proportional to tanh(factor x_i^2)
        "sharp":   p_i proportional to tanh(70 x_i^30 + 0.02 x_i^2)

    With a factor of 1 the probabilities are almost quadratic in x; with 100 the newest 70% are
    almost equal. "sharp" favors the very latest and gives all others a little.

    Args:
      order: int ``[C]``, serial numbers such as a buffer's ``order``; negative for empty places.
      factor: Above 0; for "smooth" only.
      form: "smooth" or "sharp".

    Returns:
      ``[C]`` float32, adding up to 1 unless all places are empty. A single item has 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> [round(x, 3) for x in jr.curation.fading_probs(jnp.array([4, -1, 3, 8])).tolist()]
      [0.395, 0.0, 0.0, 0.605]

    References:
      Symphony (arXiv:2512.10477), versions 2.1 and 1.0 of its released code, where a single
      item divides by 0.
    """
    name = "fading_probs"
    checks.check_rank(name, 1, order=order)
    checks.check_integer(name, order=order)
    checks.check_option(name, "form", form, ("smooth", "sharp"))
    checks.check_positive(name, finite=True, factor=factor)
    filled = jnp.asarray(order) >= 0
    length = jnp.sum(filled)
    rank = jnp.argsort(jnp.argsort(jnp.where(filled, order, jnp.iinfo(jnp.int32).max)))
    x = rank / jnp.maximum(length, 1).astype(jnp.float32)
    steep = factor * x**2 if form == "smooth" else 70.0 * x**30 + 0.02 * x**2
    weights = jnp.where(filled, jnp.where(length == 1, 1.0, jnp.tanh(steep)), 0.0)
    return weights / jnp.maximum(jnp.sum(weights), 1e-30)


def replacements(keep: Array, available: int | Array) -> Array:
    """The replayed groups that take the places of uninformative ones.

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
      TRL's GRPO with a replay buffer, where the replayed groups bring their advantages.
    """
    checks.check_rank("replacements", 1, keep=keep)
    checks.check_bool("replacements", keep=keep)
    checks.check_integer("replacements", available=available)
    number = jnp.cumsum(~jnp.asarray(keep)) - 1
    return jnp.where(~keep & (number < available), number, -1).astype(jnp.int32)


class SelectiveSample(NamedTuple):
    """The origin of each item of a batch.

    Attributes:
      index: int32 ``[k]``, the item among the fresh or the stored ones; -1 for none.
      stored: bool ``[k]``, True for a stored one.
    """

    index: Array
    stored: Array


def ssb_sample(
    key: Array,
    advantages: Array,
    stored_advantages: Array,
    *,
    count: int,
    power: float = 1.0,
    floor: float = 1e-4,
    where: Array | None = None,
    stored_where: Array | None = None,
) -> SelectiveSample:
    """A batch of rollouts with non-zero advantages: fresh ones, then stored ones.

        E = fresh rollouts with A != 0
        min(|E|, count) of E, with replacement, in proportion to |A|^power
        the rest of what is stored, with replacement, in proportion to |A|^power + floor

    As a policy improves, fewer of its groups have rollouts that differ, and stored rollouts take
    their places. Store E afterwards (:func:`replay_add` with "oldest").

    Args:
      key: Typed PRNG key.
      advantages: ``[B]``, floating point, of the fresh rollouts.
      stored_advantages: ``[C]``, floating point.
      count: k, the size of the batch, above 0.
      power: Not negative; 0 draws uniformly.
      floor: Least weight of a stored rollout, not negative.
      where: ``[B]``. See the module.
      stored_where: bool ``[C]``, the same for the stored ones.

    Returns:
      :class:`SelectiveSample`; -1 where neither has an advantage.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> sample = jr.curation.ssb_sample(
      ...     jax.random.key(0), jnp.array([0.0, 2.0, 0.0]), jnp.array([1.0]), count=3)
      >>> sample.index.tolist(), sample.stored.tolist()
      ([1, 0, 0], [False, True, True])

    References:
      Skywork R1V2 (arXiv:2504.16656), selective sample buffer, ABSTRACT reading: it stores
      non-zero advantages and draws by priority. The draw is that of VL-Rethinker's released code
      (arXiv:2504.08837), whose batch is half of the fresh rollouts, with up to 10% of right ones
      without an advantage.
    """
    name = "ssb_sample"
    checks.check_count(name, count=count)
    checks.check_non_negative(name, finite=True, power=power, floor=floor)
    pools = (
        ("advantages", advantages, where),
        ("stored_advantages", stored_advantages, stored_where),
    )
    drawn, effective = [], []
    for (option, values, valid), pool_key in zip(pools, jax.random.split(key), strict=True):
        checks.check_rank(name, 1, **{option: values})
        checks.check_float(name, **{option: values})
        checks.check_bool(name, where=valid)
        checks.check_same_shape(name, **{option: values}, where=valid)
        size = jnp.abs(masking.zero_masked(values, valid))
        able = size > 0
        least = floor if option == "stored_advantages" else 0.0
        weights = jnp.where(able, jnp.where(able, size, 1.0) ** power + least, 0.0)
        some = jnp.any(able)
        logits = jnp.where(able, jnp.log(jnp.where(able, weights, 1.0)), -jnp.inf)
        logits = jnp.where(some, logits, 0.0)
        index = jax.random.categorical(pool_key, logits, shape=(count,))
        drawn.append(jnp.where(some, index, -1))
        effective.append(jnp.sum(able))
    fresh = jnp.arange(count) < effective[0]
    stored = ~fresh & (effective[1] > 0)
    return SelectiveSample(
        jnp.where(fresh, drawn[0], jnp.where(stored, drawn[1], -1)).astype(jnp.int32), stored
    )


class Window(NamedTuple):
    """The latest numbers of a series, such as lengths of finished responses.

    Attributes:
      values: ``[H]``, a ring.
      count: int32 ``[]``, numbers so far; the first ``min(count, H)`` places are filled.
    """

    values: Array
    count: Array


def window_push(window: Window, values: Array, *, where: Array | None = None) -> Window:
    """The window after more numbers, in their order.

    Args:
      window: :class:`Window` of H places; ``Window(jnp.zeros(H, dtype), jnp.int32(0))`` is empty.
      values: ``[B]``, of the dtype of the window.
      where: ``[B]``. See the module.

    Returns:
      The next :class:`Window`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> window = jr.curation.Window(jnp.zeros(3, jnp.int32), jnp.int32(0))
      >>> window = jr.curation.window_push(window, jnp.array([5, 6, 7, 8]))
      >>> window.values.tolist(), int(window.count)
      ([8, 6, 7], 4)

    References:
      Past-Future scheduler (arXiv:2507.10150): ``rollout.predict_remaining`` reads the lengths of
      the latest rows.
    """
    name = "window_push"
    checks.check_rank(name, 1, values=values)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, values=values, where=where)
    if jnp.result_type(values) != window.values.dtype:
        raise TypeError(
            f"{name}: values must be {window.values.dtype} as the window; "
            f"got {jnp.result_type(values)}."
        )
    (size,) = window.values.shape
    new = jnp.ones(jnp.shape(values), bool) if where is None else where
    rank, total = jnp.cumsum(new) - 1, jnp.sum(new, dtype=jnp.int32)
    # Of more than H numbers only the last H are written: no place is written twice.
    place = jnp.where(new & (total - rank <= size), (window.count + rank) % size, size)
    return Window(window.values.at[place].set(values, mode="drop"), window.count + total)


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
