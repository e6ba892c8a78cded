"""From scores of members to shaped fitness: the weight of each member in the update.

``scores`` are floating point, higher is better, with members along the last axis: ``[..., N]``.
Leading axes are groups of members that share a prompt: ``[P, G]``, whose shaped values, flattened,
are the fitness of the population. Functions of several questions take ``[Q, N]``, question by
member. Shaped fitness is float32; if all scores of a group are equal, its members get exactly 0.

``where``, bool of the shape of ``scores``, is True for scores that count: by :func:`graded`. None
counts all, which must be finite. A score that does not count is never read: the statistics and
ranks are those of the others, and its fitness is 0.

Scores that are not floating point raise TypeError, except for :func:`pair_sign`, and so does a
``where`` that is not bool; a wrong shape or number of members, and an option out of its range,
ValueError.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks, masking, stats
from jaxrl_llm.evolution import _inputs


def _scores(function: str, scores: Array, where: Array | None = None) -> Array:
    stats.check_group(function, scores, where, name="scores")
    return masking.zero_masked(scores, where)


def graded(scores: Array, *, where: Array | None = None, pairs: bool = True) -> Array:
    """The scores that count: those of members that were graded, with their partners.

        a score counts     if where is True and it is finite, of both sides of its pair

    A pair contributes the difference of its two sides, so a side whose grading failed leaves no
    difference to read. The other sides' scores are a population of fewer members.

    Args:
      scores: ``[..., N]``, floating point.
      where: bool ``[..., N]``, True for members that were scored. None takes the finite ones.
      pairs: Whether members 2k and 2k+1 are a pair.

    Returns:
      bool ``[..., N]``, the ``where`` of the functions that shape fitness.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores = jnp.array([1.0, 0.5, jnp.nan, 0.25])
      >>> jr.evolution.graded(scores).tolist()
      [True, True, False, False]

    References:
      Ours. The integer code of EGGROLL (arXiv:2511.16652) sets missing scores to 100 below the
      worst, so a failed call gives its pair the greatest weight.
    """
    stats.check_group("graded", scores, where, name="scores")
    valid = jnp.isfinite(scores) if where is None else where & jnp.isfinite(scores)
    if not pairs:
        return valid
    _check_even("graded", scores)
    sides = valid.reshape(*valid.shape[:-1], -1, 2)
    return jnp.broadcast_to(jnp.all(sides, axis=-1, keepdims=True), sides.shape).reshape(
        valid.shape
    )


def _check_even(function: str, scores: Array) -> None:
    if scores.shape[-1] % 2:
        raise ValueError(
            f"{function}: scores must be of an even number of members; got {scores.shape[-1]}."
        )


def zscore(
    scores: Array,
    *,
    where: Array | None = None,
    deviation: Literal["all", "group"] = "all",
    eps: float = 1e-5,
) -> Array:
    """Scores minus the mean of their group, over a standard deviation.

        F = (f - mean_group(f)) / sqrt(var(f) + eps)             population variance

    A single group is the plain z-score. Invariant to ``f -> c f + d`` for c > 0, up to ``eps``; the
    values of a group add up to 0.

    Args:
      scores, where: See the module.
      deviation: Standard deviation of "all" scores, or of each "group"; the same for ``[N]``.
      eps: Added to the variance, in squared units of score; not negative.

    Returns:
      float32 ``[..., N]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.evolution.zscore(jnp.array([1.0, 3.0, 2.0, 6.0])).round(4).tolist()
      [-1.069..., 0.0, -0.534..., 1.603...]

    References:
      EGGROLL (arXiv:2511.16652). Its code computes the deviation over all scores even if the mean
      is over a group; this is ``deviation="all"``. ``eps=0`` is safe.
    """
    scores = _scores("zscore", scores, where)
    checks.check_option("zscore", "deviation", deviation, ("all", "group"))
    checks.check_non_negative("zscore", eps=eps)
    axis = -1 if deviation == "group" else None
    variance = masking.masked_var(scores, where, axis=axis, keepdims=True) + eps
    centered = masking.zero_masked(scores - stats.group_mean(scores, where), where)
    flat = stats.group_is_constant(scores, where) | (variance == 0)
    return jnp.where(flat, 0.0, centered * jax.lax.rsqrt(jnp.where(variance > 0, variance, 1.0)))


def question_fitness(scores: Array, *, where: Array | None = None) -> Array:
    """One fitness per member from its scores on several questions.

        F_n = mean_q (S[q, n] - mean_n S[q, n]) / std(S)          std over all of S, population form

    A score that does not count adds 0 to the mean over questions.

    Args:
      scores, where: See the module.

    Returns:
      float32 ``[N]``; all 0 if all scores are equal.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores = jnp.array([[1.0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]])
      >>> jr.evolution.question_fitness(scores).round(4).tolist()
      [0.507..., -0.16..., -0.16..., -0.16...]

    References:
      EGGROLL (arXiv:2511.16652), as in the paper for language models. Its script sums the scores
      over questions and computes one z-score, which has the same direction.
    """
    checks.check_rank("question_fitness", 2, scores=scores)
    scores = _scores("question_fitness", scores, where)
    return jnp.mean(zscore(scores, where=where, eps=0.0), axis=0)


def mean_fitness(
    scores: Array, *, where: Array | None = None, shape: Callable[..., Array] = zscore
) -> Array:
    """One fitness per member from the mean of its scores on several questions.

        F = shape(mean_q S[q, n])

    Means that differ by no more than rounding, 1e-6 of the greatest score, become equal. A score
    that does not count is replaced by the mean of its question, so a member gains nothing from a
    question on which it was not graded, easy or hard; a member without any score does not count.

    Args:
      scores, where: See the module.
      shape: Shapes the means ``[N]``: any function of this module that keeps their number. With
        ``where`` it is called as ``shape(means, where=)``.

    Returns:
      float32 ``[N]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores = jnp.array([[1.0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]])
      >>> jr.evolution.mean_fitness(scores).round(3).tolist()
      [1.732..., -0.577..., -0.577..., -0.577...]
      >>> jr.evolution.mean_fitness(scores, shape=jr.evolution.centered_ranks).round(3).tolist()
      [0.5, -0.5, -0.16..., 0.16...]

    References:
      EGGROLL (arXiv:2511.16652), the script for several devices, which uses the sum; with a z-score
      the two differ only by ``eps``.
    """
    checks.check_rank("mean_fitness", 2, scores=scores)
    scores = _scores("mean_fitness", scores, where)
    counted = None if where is None else jnp.any(where, axis=0)
    if counted is not None:
        shape = functools.partial(shape, where=counted)
        scores = jnp.where(where, scores, stats.group_mean(scores, where))
    if scores.shape[0] == 1:
        return shape(scores[0])
    # Sorted, so that a mean does not depend on the order of the questions.
    means = jnp.mean(jnp.sort(scores, axis=0), axis=0)
    if counted is not None:
        means = jnp.where(counted, means, jnp.inf)  # last, where it ties with no other
    return shape(_tied(means, 1e-6 * jnp.max(jnp.abs(scores))))


def _tied(means: Array, tolerance: Array) -> Array:
    """Means ``[N]``; those that differ only by rounding get the least of them."""

    def least_of(least: Array, mean: Array) -> tuple[Array, Array]:
        least = jnp.where(mean - least > tolerance, mean, least)
        return least, least

    order, ranks = stats.order_and_ranks(means)
    ordered = means[order]
    return jax.lax.scan(least_of, ordered[0], ordered)[1][ranks]


def centered_ranks(
    scores: Array, *, where: Array | None = None, ties: Literal["index", "mean"] = "index"
) -> Array:
    """Ranks of the members, from -1/2 for the worst to 1/2 for the best.

        F = rank / (N - 1) - 1/2             rank from 0, ascending, of the N that count

    A group with equal scores, or with one member, gets 0.

    Args:
      scores, where: See the module.
      ties: For equal scores, "index" gives the earlier member the lower rank; "mean" gives all
        members the mean of their ranks. With few distinct scores only "mean" treats the two sides
        of a pair equally.

    Returns:
      float32 ``[..., N]``, adding up to 0 over a group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.evolution.centered_ranks(jnp.array([1.0, 3.0, 2.0, 6.0])).round(4).tolist()
      [-0.5, 0.166..., -0.166..., 0.5]
      >>> jr.evolution.centered_ranks(jnp.array([0.0, 1.0, 1.0]), ties="mean").tolist()
      [-0.5, 0.25, 0.25]

    References:
      OpenAI-ES (arXiv:1703.03864); EGGROLL (arXiv:2511.16652), experiment on trading. Both break
      ties by the sort order, even if all scores are equal.
    """
    scores = _scores("centered_ranks", scores, where)
    checks.check_option("centered_ranks", "ties", ties, ("index", "mean"))
    # Scores that do not count come last, where they change no rank of the others.
    ranked = scores if where is None else jnp.where(where, scores, jnp.inf)
    if ties == "index":
        ranks = stats.order_and_ranks(ranked)[1].astype(jnp.float32)
    else:

        @jax.vmap
        def mean_ranks(row: Array) -> Array:
            ordered = jnp.sort(row)
            below = jnp.searchsorted(ordered, row, side="left")
            return (below + jnp.searchsorted(ordered, row, side="right") - 1) / 2.0

        ranks = mean_ranks(ranked.reshape(-1, scores.shape[-1])).reshape(scores.shape)
    ranks = ranks / jnp.maximum(stats.group_count(scores, where) - 1, 1) - 0.5
    return jnp.where(stats.group_is_constant(scores, where), 0.0, masking.zero_masked(ranks, where))


def pair_sign(scores: Array, *, where: Array | None = None) -> Array:
    """Which side of each antithetic pair is better: one value per pair.

        F_k = sign(f_2k - f_2k+1)            in {-1, 0, 1}

    A pair counts as a tie, which has no vote, if either of its scores does not count or is NaN.

    Args:
      scores: ``[..., N]``, floating point or integer; members 2k and 2k+1 are a pair.
      where: See the module.

    Returns:
      int8 ``[..., N / 2]``. :func:`pair_fitness` converts it to the fitness of members.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.evolution.pair_sign(jnp.array([3.0, 1.0, 2.0, 2.0, 0.0, 4.0])).tolist()
      [1, 0, -1]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G.
    """
    checks.check_min_rank("pair_sign", 1, scores=scores)
    checks.check_bool("pair_sign", where=where)
    checks.check_same_shape("pair_sign", scores=scores, where=where)
    _check_even("pair_sign", scores)
    up, down = scores[..., ::2], scores[..., 1::2]
    # Unsigned or narrow integers would wrap in a difference.
    sign = (up > down).astype(jnp.int8) - (up < down).astype(jnp.int8)
    return sign if where is None else jnp.where(where[..., ::2] & where[..., 1::2], sign, 0)


def pair_fitness(values: Array) -> Array:
    """Fitness of the members from the difference over each pair.

        F_2k = d_k / 2,  F_2k+1 = -d_k / 2

    Args:
      values: ``[..., K]``, one per pair: from :func:`pair_sign`, or any difference.

    Returns:
      float32 ``[..., 2 K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.evolution.pair_fitness(jnp.array([1, -1])).tolist()
      [0.5, -0.5, -0.5, 0.5]

    References:
      EGGROLL (arXiv:2511.16652): an update depends on the fitness only through the differences of
      pairs.
    """
    checks.check_min_rank("pair_fitness", 1, values=values)
    half = jnp.asarray(values, jnp.float32) / 2
    return jnp.stack([half, -half], axis=-1).reshape(*half.shape[:-1], -1)


def best_of(scores: Array, *, k: int | None = None) -> Array:
    """Fitness of a member that has several tries: pass@k, or the expected best of k.

        f = sum_i C(i - 1, k - 1) / C(S, k) s_(i)         s_(1) <= ... <= s_(S)

    The mean, over all subsets of k of the S tries, of the best try. For scores 0 and 1 it is the
    unbiased estimate of pass@k. Fitness may be any function of the outputs of a member, so
    evolution can optimize pass@k itself.

    Args:
      scores: ``[..., S]``, floating point and finite: the tries of a member along the last axis.
      k: Number of tries, at most S; None uses all of them: the maximum.

    Returns:
      float32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> tries = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
      >>> jr.evolution.best_of(tries).tolist(), jr.evolution.best_of(tries, k=2).round(4).tolist()
      ([1.0, 0.0], [0.666..., 0.0])

    References:
      EGGROLL (arXiv:2511.16652) takes the maximum of k tries. For k below S, the estimator of
      pass@k of Chen et al. (arXiv:2107.03374), for any scores.
    """
    scores = _scores("best_of", scores)
    tries = scores.shape[-1]
    k = tries if k is None else k
    _inputs.check_at_least("best_of", 1, k=k)
    if k > tries:
        raise ValueError(f"best_of: k must be at most the number of tries, {tries}; got {k}.")
    ways = [math.comb(i, k - 1) / math.comb(tries, k) for i in range(tries)]
    return jnp.sum(jnp.sort(scores, axis=-1) * np.array(ways, np.float32), axis=-1)
