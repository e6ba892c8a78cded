"""From scores of members to shaped fitness: the weight of each member in the update.

``scores`` are floating point and finite, higher is better, with members along the last axis:
``[..., N]``. Leading axes are groups of members that share a prompt: ``[P, G]``, whose shaped
values, flattened, are the fitness of the population. Functions of several questions take ``[Q,
N]``, question by member. Shaped fitness is float32; if all scores of a group are equal, its members
get exactly 0.

Scores that are not floating point raise TypeError, except for :func:`pair_sign`; a wrong number of
axes or of members, and an option out of its range, ValueError.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks, masking, stats
from jaxrl_llm.evolution import _inputs


def _scores(function: str, scores: Array, *, rank: int = 1) -> Array:
    checks.check_min_rank(function, rank, scores=scores)
    checks.check_float(function, scores=scores)
    return jnp.asarray(scores, jnp.float32)


def fill_missing(scores: Array, *, where: Array | None = None) -> tuple[Array, Array]:
    """Gives members without a score the worst score of their group.

    A score is missing where ``where`` is False, and where it is not finite. A group without any
    score gets 0 for all members. The functions that shape fitness need finite scores; use this
    function before them.

    Args:
      scores: ``[..., N]``, floating point, higher is better.
      where: bool ``[..., N]``, True for members that were scored. None keeps all.

    Returns:
      ``(scores, missing)``: float32 ``[..., N]``, and the number of missing scores of each group,
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores, missing = jr.evolution.fill_missing(jnp.array([0.5, jnp.nan, 0.25]))
      >>> scores.tolist(), missing.item()
      ([0.5, 0.25, 0.25], 1)

    References:
      Ours. The integer code of EGGROLL (arXiv:2511.16652) sets missing scores to 100 below the
      worst, which would dominate a z-score.
    """
    stats.check_group("fill_missing", scores, where, name="scores")
    valid = jnp.isfinite(scores) if where is None else where & jnp.isfinite(scores)
    scores = masking.zero_masked(scores, valid)
    worst = jnp.min(jnp.where(valid, scores, jnp.inf), axis=-1, keepdims=True, initial=jnp.inf)
    worst = jnp.where(jnp.isfinite(worst), worst, 0.0)
    return jnp.where(valid, scores, worst), jnp.sum(~valid, axis=-1, dtype=jnp.int32)


def zscore(
    scores: Array, *, deviation: Literal["all", "group"] = "all", eps: float = 1e-5
) -> Array:
    """Scores minus the mean of their group, over a standard deviation.

        F = (f - mean_group(f)) / sqrt(var(f) + eps)             population variance

    A single group is the plain z-score. Invariant to ``f -> c f + d`` for c > 0, up to ``eps``; the
    values of a group add up to 0.

    Args:
      scores: See the module.
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
    scores = _scores("zscore", scores)
    checks.check_option("zscore", "deviation", deviation, ("all", "group"))
    checks.check_non_negative("zscore", eps=eps)
    axis = -1 if deviation == "group" else None
    variance = masking.masked_var(scores, None, axis=axis, keepdims=True) + eps
    centered = scores - stats.group_mean(scores)
    flat = stats.group_is_constant(scores) | (variance == 0)
    return jnp.where(flat, 0.0, centered * jax.lax.rsqrt(jnp.where(variance > 0, variance, 1.0)))


def question_fitness(scores: Array) -> Array:
    """One fitness per member from its scores on several questions.

        F_n = mean_q (S[q, n] - mean_n S[q, n]) / std(S)          std over all of S, population form

    Args:
      scores: See the module.

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
    return jnp.mean(zscore(_scores("question_fitness", scores), eps=0.0), axis=0)


def mean_fitness(scores: Array, *, shape: Callable[[Array], Array] = zscore) -> Array:
    """One fitness per member from the mean of its scores on several questions.

        F = shape(mean_q S[q, n])

    Means that differ by no more than rounding, 1e-6 of the greatest score, become equal.

    Args:
      scores: See the module.
      shape: Shapes the means ``[N]``: any function of this module that keeps their number.

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
    scores = _scores("mean_fitness", scores)
    if scores.shape[0] == 1:
        return shape(scores[0])
    # Sorted, so that a mean does not depend on the order of the questions.
    means = jnp.mean(jnp.sort(scores, axis=0), axis=0)
    return shape(_tied(means, 1e-6 * jnp.max(jnp.abs(scores))))


def _tied(means: Array, tolerance: Array) -> Array:
    """Means ``[N]``; those that differ only by rounding get the least of them."""

    def least_of(least: Array, mean: Array) -> tuple[Array, Array]:
        least = jnp.where(mean - least > tolerance, mean, least)
        return least, least

    order, ranks = stats.order_and_ranks(means)
    ordered = means[order]
    return jax.lax.scan(least_of, ordered[0], ordered)[1][ranks]


def centered_ranks(scores: Array, *, ties: Literal["index", "mean"] = "index") -> Array:
    """Ranks of the members, from -1/2 for the worst to 1/2 for the best.

        F = rank / (N - 1) - 1/2             rank from 0, ascending

    A group with equal scores, or with one member, gets 0.

    Args:
      scores: See the module.
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
    scores = _scores("centered_ranks", scores)
    checks.check_option("centered_ranks", "ties", ties, ("index", "mean"))
    if ties == "index":
        ranks = stats.order_and_ranks(scores)[1].astype(jnp.float32)
    else:

        @jax.vmap
        def mean_ranks(row: Array) -> Array:
            ordered = jnp.sort(row)
            below = jnp.searchsorted(ordered, row, side="left")
            return (below + jnp.searchsorted(ordered, row, side="right") - 1) / 2.0

        ranks = mean_ranks(scores.reshape(-1, scores.shape[-1])).reshape(scores.shape)
    ranks = ranks / max(scores.shape[-1] - 1, 1) - 0.5
    return jnp.where(stats.group_is_constant(scores), 0.0, ranks)


def pair_sign(scores: Array) -> Array:
    """Which side of each antithetic pair is better: one value per pair.

        F_k = sign(f_2k - f_2k+1)            in {-1, 0, 1}

    Args:
      scores: ``[..., N]``, floating point or integer; members 2k and 2k+1 are a pair.

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
    if scores.shape[-1] % 2:
        raise ValueError(
            f"pair_sign: scores must be of an even number of members; got {scores.shape[-1]}."
        )
    up, down = scores[..., ::2], scores[..., 1::2]
    # Unsigned or narrow integers would wrap in a difference.
    return (up > down).astype(jnp.int8) - (up < down).astype(jnp.int8)


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
