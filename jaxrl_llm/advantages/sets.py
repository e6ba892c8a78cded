"""Advantages of sets of rollouts that are scored together, by reward and by diversity.

- ``rewards``: floating point ``[..., G]``, not negative: the score of a set is a product.
- ``answer_ids``: integers ``[..., G]``, the strategy or answer of each rollout: within a group,
  equal ids for equal answers; below 0 for no answer, which adds no diversity.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. The others are not
  read.
- ``sets``: integers ``[M, n]`` or ``[..., M, n]``, the members of M sets as indices into the group.
- Results are float32.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = ["polychromic", "set_advantages", "set_scores"]


def set_scores(
    rewards: Array, answer_ids: Array, sets: Array, *, where: Array | None = None
) -> Array:
    """The mean reward of each set times its share of distinct answers.

        f(set) = mean of R * (distinct answers / n);   0 with fewer than two members

    Members that take no part are removed from their sets.

    Args:
      rewards, answer_ids, sets, where: See the module.

    Returns:
      ``[..., M]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, ids = jnp.array([1.0, 1.0, 0.0, 1.0]), jnp.array([0, 0, 1, 2])
      >>> jr.advantages.set_scores(rewards, ids, jnp.array([[0, 1], [2, 3]])).tolist()
      [0.5, 0.5]

    References:
      Polychromic objectives (arXiv:2509.25424), PAPER; the unofficial implementation that we read
      clips the mean reward to [0, 1].
    """
    function = "set_scores"
    _check(function, rewards, answer_ids, where)
    sets = _sets(function, sets, jnp.shape(rewards))
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else jnp.asarray(where)
    R = _members(masking.zero_masked(rewards, where), sets)
    ids, there = _members(jnp.asarray(answer_ids), sets), _members(valid, sets)
    known = there & (ids >= 0)
    same = (ids[..., :, None] == ids[..., None, :]) & known[..., None, :]
    earlier = jnp.tril(jnp.ones(same.shape[-2:], bool), -1)
    distinct = jnp.sum(known & ~jnp.any(same & earlier, axis=-1), axis=-1)
    n = jnp.sum(there, axis=-1)
    score = jnp.sum(jnp.where(there, R, 0.0), axis=-1) * distinct / jnp.maximum(n, 1) ** 2
    return jnp.where(n > 1, score, 0.0)


def set_advantages(
    scores: Array, sets: Array, *, group_size: int, set_where: Array | None = None
) -> Array:
    """Scores of sets minus their mean, averaged for each rollout over the sets that contain it.

        A_i = mean over sets m with i of (f_m - mean f);   0 in no set

    Args:
      scores: ``[..., M]``, floating point: those of :func:`set_scores`.
      sets: See the module.
      group_size: G.
      set_where: bool ``[..., M]``, True for sets that count; None for all.

    Returns:
      ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> sets = jnp.array([[0, 1], [2, 3]])
      >>> jr.advantages.set_advantages(jnp.array([1.0, 0.0]), sets, group_size=4).tolist()
      [0.5, 0.5, -0.5, -0.5]

    References:
      Polychromic objectives (arXiv:2509.25424), PAPER; an unofficial implementation.
    """
    function = "set_advantages"
    stats.check_group(function, scores, set_where, name="scores", where_name="set_where")
    checks.check_count(function, group_size=group_size)
    sets = _sets(function, sets, (*jnp.shape(scores)[:-1], group_size))
    if sets.shape[-2] != jnp.shape(scores)[-1]:
        raise ValueError(
            f"{function}: sets must have one set for each of scores {jnp.shape(scores)}; got "
            f"{sets.shape}."
        )
    scores = masking.zero_masked(scores, set_where)
    centered = masking.zero_masked(scores - stats.group_mean(scores, set_where), set_where)
    has = jnp.any(sets[..., None] == jnp.arange(group_size), axis=-2)  # [..., M, G]
    if set_where is not None:
        has &= jnp.asarray(set_where)[..., None]
    total = jnp.sum(jnp.where(has, centered[..., None], 0.0), axis=-2)
    return total / jnp.maximum(jnp.sum(has, axis=-2), 1)


def polychromic(
    rewards: Array,
    *,
    answer_ids: Array,
    where: Array | None = None,
    size: int = 4,
    sets: Literal["all", "disjoint"] = "all",
) -> Array:
    """Scores sets of rollouts by reward and diversity; a rollout gets the mean score of its sets.

        f(set) = mean of R * (distinct answers / n)
        "all":       A_i = mean of f over all sets with i - mean of f over all sets
        "disjoint":  A_i = f(set of i) - mean of f, of G // n sets of neighbors

    The mean over all sets has a closed form. With disjoint sets, rollouts beyond the last full set
    get 0. For a group with fewer than n rollouts, n is its size. With n rollouts or fewer, "all"
    gives 0, since there is only one set.

    Args:
      rewards, answer_ids, where: See the module.
      size: n, members of a set, at least 2.
      sets: "all" or "disjoint"; only with "all" are they independent of the order of the group.

    Returns:
      Advantages ``[..., G]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, ids = jnp.array([1.0, 1.0, 0.0, 0.0]), jnp.arange(4)
      >>> jr.advantages.polychromic(
      ...     rewards, answer_ids=ids, size=2, sets="disjoint").tolist()
      [0.5, 0.5, -0.5, -0.5]

    References:
      Polychromic objectives (arXiv:2509.25424), PAPER: sets of "vines" from one state; here that
      state is the prompt. Disjoint sets of 4 of 8 are those of an unofficial implementation; the
      mean over all sets is the marginal form of the authors' page.
    """
    function = "polychromic"
    _check(function, rewards, answer_ids, where)
    checks.check_option(function, "sets", sets, ("all", "disjoint"))
    checks.check_count(function, size=size)
    if size < 2:
        raise ValueError(f"{function}: size must be at least 2; got {size}.")
    G = jnp.shape(rewards)[-1]
    if sets == "disjoint":
        n = min(size, G)
        places = jnp.arange(G // n * n).reshape(-1, n)
        scores = set_scores(rewards, answer_ids, places, where=where)
        enough = None
        if where is not None:
            enough = jnp.sum(_members(where, _sets(function, places, where.shape)), axis=-1) > 1
        advantages = set_advantages(scores, places, group_size=G, set_where=enough)
        return masking.zero_masked(advantages, where)

    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else jnp.asarray(where)
    R, ids = masking.zero_masked(rewards, where), jnp.asarray(answer_ids)
    total = jnp.sum(R, axis=-1, keepdims=True)
    N = jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True, dtype=jnp.float32), 1.0)
    n = jnp.minimum(N, float(size))
    known = valid & (ids >= 0)
    same = (ids[..., :, None] == ids[..., None, :]) & known[..., :, None] & known[..., None, :]
    # One member for each answer c: how many have it, and their rewards.
    lead = known & ~jnp.any(same & jnp.tril(jnp.ones((G, G), bool), -1), axis=-1)
    m = jnp.sum(same, axis=-1, dtype=jnp.float32)
    R_c = jnp.sum(jnp.where(same, R[..., None, :], 0.0), axis=-1)

    def without(others: Array, n: Array, m: Array) -> Array:
        """The probability that n draws from ``others`` include none of m of them."""
        k = jnp.arange(size, dtype=jnp.float32)
        left = jnp.maximum(others - m, 0.0)[..., None]
        factor = jnp.maximum(left - k, 0.0) / jnp.maximum(others[..., None] - k, 1.0)
        return jnp.prod(jnp.where(k < n[..., None], factor, 1.0), axis=-1)

    # Sums over the answers of the expected reward of sets that have them: of all sets, and of all
    # sets with i.
    none = without(N, n, m) * n / jnp.maximum(N - m, 1.0) * (total - R_c)
    every = jnp.sum(jnp.where(lead, n / N * total - none, 0.0), axis=-1, keepdims=True)
    N1, n1 = jnp.maximum(N - 1, 1.0), n - 1
    mine = R + n1 / N1 * (total - R)
    N1, n1, m_c = N1[..., None], n1[..., None], m[..., None, :]
    rest = total[..., None] - R[..., :, None] - R_c[..., None, :]
    none = without(N1, n1, m_c) * (R[..., :, None] + n1 / jnp.maximum(N1 - m_c, 1.0) * rest)
    has = mine[..., :, None] - jnp.where(same, 0.0, none)
    with_i = jnp.sum(jnp.where(lead[..., None, :], has, 0.0), axis=-1)
    alike = stats.group_is_constant(R, where)
    unknown = jnp.any(valid & ~known, axis=-1, keepdims=True)
    alike &= jnp.sum(lead, axis=-1, keepdims=True) + unknown <= 1  # one answer, or none is known
    advantages = jnp.where((n < N) & ~alike, (with_i - every) / n**2, 0.0)
    return masking.zero_masked(advantages, where)


def _check(function: str, rewards: Array, answer_ids: Array, where: Array | None) -> None:
    stats.check_group(function, rewards, where)
    checks.check_integer(function, answer_ids=answer_ids)
    checks.check_same_shape(function, rewards=rewards, answer_ids=answer_ids)


def _sets(function: str, sets: Array, shape: tuple[int, ...]) -> Array:
    """Sets with the leading axes of groups ``[..., G]`` of this shape."""
    checks.check_min_rank(function, 2, sets=sets)
    checks.check_integer(function, sets=sets)
    lead = jnp.shape(sets)[:-2]
    if lead not in ((), tuple(shape[:-1])):
        raise ValueError(
            f"{function}: sets must have shape [M, n], or the leading axes {tuple(shape[:-1])} "
            f"before; got {jnp.shape(sets)}."
        )
    return jnp.broadcast_to(jnp.asarray(sets), (*shape[:-1], *jnp.shape(sets)[-2:]))


def _members(x: Array, sets: Array) -> Array:
    """Values of rollouts ``[..., G]`` as of the members of sets ``[..., M, n]``."""
    flat = sets.reshape(*sets.shape[:-2], -1)
    return jnp.take_along_axis(x, flat, axis=-1).reshape(sets.shape)
