"""Priorities of replayed items: scores of groups, and sampling probabilities from scores.

``versions`` and ``version`` are versions of the weights that sampled the items. Priorities have
shape ``[C]``, one per place. ``where`` (bool, True = takes part) excludes entries, which may hold
anything.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "SelectiveSample",
    "advantage_sizes",
    "fading_probs",
    "recency_weights",
    "replay_importance",
    "replay_priorities",
    "replay_scores",
    "ssb_sample",
]


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
    """Sampling probabilities in proportion to a power of the scores.

        p_i = score_i^power / sum of score^power

    Args:
      scores: ``[C]``, floating point, not negative.
      power: Not negative; 0 draws uniformly.
      where: ``[C]``. See the module.

    Returns:
      ``[C]`` float32, adding up to 1; all 0 if all scores are 0.

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
    """Importance weights that correct for sampling by priority; the largest is 1.

        (n p_i)^(-power) / max over j of (n p_j)^(-power),   n items that take part

    Args:
      probs: ``[C]``, floating point, as :func:`replay_priorities` returns them.
      power: 1 for a full correction, 0 for none.
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
    """Factors of scores that decrease with the age of the item.

        exp(-(version - versions_i) / scale)

    Args:
      versions: int ``[C]``.
      version: Version of the weights being trained.
      scale: Number of versions after which the factor is 1/e, above 0.
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
    """Sampling probabilities by age alone; the oldest item has probability 0.

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


class SelectiveSample(NamedTuple):
    """The source of each item of a batch.

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

    As a policy improves, fewer of its groups have rollouts that differ, and stored rollouts
    replace them. Store E afterwards (:func:`~jaxrl_llm.curation.replay_add` with "oldest").

    Args:
      key: Typed PRNG key.
      advantages: ``[B]``, floating point, of the fresh rollouts.
      stored_advantages: ``[C]``, floating point.
      count: k, the size of the batch, above 0.
      power: Not negative; 0 draws uniformly.
      floor: Smallest weight of a stored rollout, not negative.
      where: ``[B]``. See the module.
      stored_where: bool ``[C]``, the same for the stored ones.

    Returns:
      :class:`SelectiveSample`; -1 where neither source has a non-zero advantage.

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
      (arXiv:2504.08837), whose batch is half of the fresh rollouts. It stores the fresh ones before
      it draws from the store, and of more than fit the batch it draws from a random half; the right
      ones without an advantage that it adds have a weight of 0.
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
