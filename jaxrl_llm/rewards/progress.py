"""Rewards of failed rollouts by their similarity to the successful rollouts of the group."""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats


def progress_rewards(
    rewards: Array,
    *,
    embeddings: Array,
    where: Array | None = None,
    threshold: float = 0.5,
    cap: float = 0.6,
    steepness: float = 10.0,
    offset: float = 0.5,
    radius: float | None = 0.5,
) -> Array:
    """1 for a success; less for a failure, by the distance of its embedding from the successes.

        d_i = min over centers c of |e_i - c|        n_i = (d_i - min d) / (max d - min d)
        r_i = cap sigmoid(steepness (offset - n_i))

    min and max are over the failures of the group, and n_i is 0.5 where they are within 1e-6. The
    centers are the means of clusters of the successes: successes linked by steps of at most
    ``radius``, in units of the deviation of each coordinate over the successes (DBSCAN with core
    points of at least two); a success without a neighbor is noise. Without clusters, or without a
    ``radius``, there is one center, the mean of the successes. A group without a success gets 0,
    and so does a rollout whose embedding is all 0, which counts in no statistic. With one center,
    scaling or shifting all embeddings changes nothing.

    Args:
      rewards: ``[..., G]``, floating point.
      embeddings: ``[..., G, D]``, floating point, embedding of each rollout by a frozen encoder.
      where: bool ``[..., G]``, True for the rollouts that take part; None for all. The others are
        not read and get 0.
      threshold: A reward above it is a success.
      cap: Bound of a failure's reward, not negative; below 1, successes score above failures.
      steepness: Steepness of the sigmoid, not negative.
      offset: The n at which a failure gets half of ``cap``.
      radius: Largest step within a cluster, above 0; None for one center.

    Returns:
      ``[..., G]`` float32 in [0, 1].

    Raises:
      TypeError: If an argument has a wrong dtype.
      ValueError: If a shape is wrong or an option out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([1.0, 0.0, 0.0, 0.0])
      >>> embeddings = jnp.array([[1.0], [2.0], [3.0], [4.0]])
      >>> jr.rewards.progress_rewards(rewards, embeddings=embeddings).round(3).tolist()
      [1.0, 0.59..., 0.30..., 0.00...]

    References:
      Fei et al., self-referential policy optimization (SRPO) for robots (arXiv:2511.15605), the
      released code (siiRL), with embeddings of videos; for texts use any frozen encoder. The
      statistics are over all rollouts of a task in a batch there, and over a group here.
    """
    function = "progress_rewards"
    stats.check_group(function, rewards, where)
    checks.check_float(function, embeddings=embeddings)
    shape = jnp.shape(rewards)
    if jnp.ndim(embeddings) != len(shape) + 1 or jnp.shape(embeddings)[:-1] != shape:
        raise ValueError(
            f"{function}: embeddings must have the shape of rewards {shape} and an axis more; got "
            f"{jnp.shape(embeddings)}."
        )
    checks.check_non_negative(function, finite=True, cap=cap, steepness=steepness)
    checks.check_positive(function, finite=True, radius=radius)
    valid = jnp.ones(shape, bool) if where is None else jnp.asarray(where)
    e = masking.zero_masked(embeddings, valid[..., None])
    valid &= jnp.any(e != 0, axis=-1)
    success = valid & (masking.zero_masked(rewards, where) > threshold)
    failure = valid & ~success
    linked = _clusters(e, success, radius)
    # A center for each success in a cluster; without one, their mean for each success.
    count = jnp.sum(linked, axis=-1, keepdims=True)
    centers = jnp.sum(jnp.where(linked[..., None], e[..., None, :, :], 0.0), axis=-2)
    centers /= jnp.maximum(count, 1)
    distances = jnp.sqrt(jnp.sum((e[..., :, None, :] - centers[..., None, :, :]) ** 2, axis=-1))
    nearest = jnp.min(jnp.where(count[..., None, :, 0] > 0, distances, jnp.inf), axis=-1)
    shaped = failure & jnp.any(success, axis=-1, keepdims=True)
    least = jnp.min(jnp.where(shaped, nearest, jnp.inf), axis=-1, keepdims=True)
    most = jnp.max(jnp.where(shaped, nearest, -jnp.inf), axis=-1, keepdims=True)
    spread = most - least
    flat = spread < 1e-6
    n = jnp.where(flat, 0.5, (nearest - least) / jnp.where(flat, 1.0, spread))
    n = jnp.where(shaped, n, 0.0)
    shown = cap / (1.0 + jnp.exp(-steepness * (offset - n)))
    return jnp.where(success, 1.0, jnp.where(shaped, shown, 0.0))


def _clusters(e: Array, success: Array, radius: float | None) -> Array:
    """Which successes are in the cluster of each, bool ``[..., G, G]``; all where none has one."""
    both = success[..., :, None] & success[..., None, :]
    if radius is None:
        return both
    keep = success[..., None]
    mean = masking.masked_mean(e, jnp.broadcast_to(keep, e.shape), axis=-2, keepdims=True)
    std = masking.masked_std(e, jnp.broadcast_to(keep, e.shape), axis=-2, keepdims=True)
    x = (e - mean) / jnp.where(std > 0, std, 1.0)
    distances = jnp.sum((x[..., :, None, :] - x[..., None, :, :]) ** 2, axis=-1)
    near = both & (distances <= radius**2)
    linked = near
    for _ in range(max(e.shape[-2] - 1, 0).bit_length()):
        linked |= jnp.any(linked[..., :, :, None] & linked[..., None, :, :], axis=-2)
    linked &= jnp.sum(near, axis=-1, keepdims=True) > 1
    return jnp.where(jnp.any(linked, axis=(-1, -2), keepdims=True), linked, both)
