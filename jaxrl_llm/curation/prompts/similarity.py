"""Rules on embeddings of prompts: predicted success rates, and similar solved problems.

Embeddings come from a frozen encoder, one vector a prompt. ``reference_rates`` ``[R]`` are the mean
rewards, in [0, 1], of the few reference prompts that are rolled out each round; ``where`` (bool,
True = takes part) excludes some of them; excluded entries may hold anything.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking

__all__ = [
    "RateCalibration",
    "attention_rates",
    "calibrate_rates",
    "linear_recalibration",
    "nearest_solved",
]


def attention_rates(
    queries: Array,
    references: Array,
    reference_rates: Array,
    *,
    temperature: float = 1.0,
    top: int | None = None,
    where: Array | None = None,
) -> Array:
    """Success rates by attention to the references: similar prompts are about equally hard.

        p_i = sum over j of softmax_j(<q_i, k_j> / (sqrt(H) temperature)) rate_j

    Args:
      queries: ``[..., H]``, floating point: projected embeddings of the prompts.
      references: ``[R, H]``, floating point: projected embeddings of the references.
      reference_rates: ``[R]``. See the module.
      temperature: Above 0.
      top: Number of references that a prompt attends to, by the largest products; None for all.
      where: ``[R]``. See the module.

    Returns:
      ``[...]`` float32; 0 without a reference.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> query, references = jnp.array([1.0, 0.0]), jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
      >>> rate = jr.curation.attention_rates(query, references, jnp.array([0.2, 0.8, 0.5]))
      >>> round(float(rate), 3)
      0.439

    References:
      DOTS (arXiv:2506.05316), and its released code; the projections and their training are the
      caller's.
    """
    name = "attention_rates"
    checks.check_min_rank(name, 1, queries=queries)
    checks.check_rank(name, 2, references=references)
    checks.check_float(name, queries=queries, references=references)
    count, width = jnp.shape(references)
    if jnp.shape(queries)[-1] != width:
        raise ValueError(
            f"{name}: queries and references must have vectors of one length; got "
            f"{jnp.shape(queries)} and {jnp.shape(references)}."
        )
    valid = _check_references(name, reference_rates, where, count)
    checks.check_positive(name, finite=True, temperature=temperature)
    if top is not None:
        checks.check_count(name, most=count, top=top)
    keys = masking.zero_masked(references, valid[:, None])
    scores = jnp.asarray(queries, jnp.float32) @ keys.T / (math.sqrt(width) * temperature)
    scores = jnp.where(valid, scores, -jnp.inf)
    if top is not None and top < count:
        _, nearest = jax.lax.top_k(scores, top)
        attended = jax.nn.one_hot(nearest, count, dtype=bool).any(axis=-2)
        scores = jnp.where(attended, scores, -jnp.inf)
    # Without a reference all scores are -inf, and the softmax NaN.
    weights = jnp.where(jnp.any(valid), jax.nn.softmax(scores, axis=-1), 0.0)
    return weights @ masking.zero_masked(reference_rates, valid)


class RateCalibration(NamedTuple):
    """Weights of a small network that maps mean and deviation of the references to a correction.

    Attributes:
      hidden: ``[2, M]``.
      hidden_bias: ``[M]``.
      out: ``[M, 2]``.
      out_bias: ``[2]``.
    """

    hidden: Array
    hidden_bias: Array
    out: Array
    out_bias: Array


def calibrate_rates(
    rates: Array,
    reference_rates: Array,
    params: RateCalibration,
    *,
    where: Array | None = None,
) -> Array:
    """Predicted rates, with a temperature and a shift computed from the round's references.

        t, b = relu([mean, std] hidden + hidden_bias) out + out_bias
        sigmoid(logit(clip(p, 1e-4, 1 - 1e-4)) / clip(softplus(t), 0.01, 10) + tanh(b))

    Args:
      rates: ``[...]``, floating point, in [0, 1].
      reference_rates: ``[R]``. See the module. Their deviation divides by R - 1.
      params: :class:`RateCalibration`; DOTS has M = 10.
      where: ``[R]``. See the module.

    Returns:
      ``[...]`` float32, in (0, 1).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = jr.curation.RateCalibration(*map(jnp.zeros, ((2, 10), 10, (10, 2), 2)))
      >>> jr.curation.calibrate_rates(jnp.array([0.5, 0.9]), jnp.array([0.4, 0.6]), params).round(4)
      Array([0.5  , 0.9597], dtype=float32)

    References:
      DOTS (arXiv:2506.05316), "group_logit_temp" of its released code.
    """
    name = "calibrate_rates"
    checks.check_min_rank(name, 0, rates=rates)
    checks.check_float(name, rates=rates)
    valid = _check_references(name, reference_rates, where, None)
    for field, x in params._asdict().items():
        checks.check_rank(name, 1 if "bias" in field else 2, **{f"params.{field}": x})
    mean = masking.masked_mean(reference_rates, valid, axis=-1)
    std = masking.masked_std(reference_rates, valid, axis=-1, ddof=1)
    hidden = jax.nn.relu(jnp.stack([mean, std]) @ params.hidden + params.hidden_bias)
    temperature, shift = hidden @ params.out + params.out_bias
    temperature = jnp.clip(jax.nn.softplus(temperature), 1e-2, 10.0)
    rates = jnp.clip(jnp.asarray(rates, jnp.float32), 1e-4, 1.0 - 1e-4)
    return jax.nn.sigmoid(jax.scipy.special.logit(rates) / temperature + jnp.tanh(shift))


def linear_recalibration(
    rates: Array, reference_ids: Array, reference_rates: Array, *, where: Array | None = None
) -> Array:
    """Predictions corrected by a least-squares line through the references of the round.

        u p + v,   (u, v) = argmin of sum over j of (u p[id_j] + v - rate_j)^2

    The result may leave [0, 1]. If all references have the same prediction, u is 0.

    Args:
      rates: ``[N]``, floating point: the predictions for all prompts.
      reference_ids: integer ``[R]``, in [0, N): which prompts the references are.
      reference_rates: ``[R]``. See the module.
      where: ``[R]``. See the module.

    Returns:
      ``[N]`` float32; ``rates`` without a reference.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rates, ids = jnp.array([0.2, 0.4, 0.6]), jnp.array([0, 1])
      >>> [round(x, 3) for x in jr.curation.linear_recalibration(
      ...     rates, ids, jnp.array([0.25, 0.75])).tolist()]
      [0.25, 0.75, 1.25]

    References:
      DOTS (arXiv:2506.05316), and its released code.
    """
    name = "linear_recalibration"
    checks.check_rank(name, 1, rates=rates, reference_ids=reference_ids)
    checks.check_float(name, rates=rates)
    checks.check_integer(name, reference_ids=reference_ids)
    valid = _check_references(name, reference_rates, where, jnp.shape(reference_ids)[0])
    rates = jnp.asarray(rates, jnp.float32)
    size = rates.shape[0]
    valid = valid & (reference_ids >= 0) & (reference_ids < size)
    at = rates[jnp.clip(reference_ids, 0, size - 1)]
    mean_at, mean_rate = (masking.masked_mean(x, valid, axis=-1) for x in (at, reference_rates))
    at = masking.zero_masked(at - mean_at, valid)
    target = masking.zero_masked(reference_rates - mean_rate, valid)
    spread = jnp.sum(at**2)
    level = masking.is_constant(at, valid)
    slope = jnp.where(level, 0.0, jnp.sum(at * target) / jnp.where(level, 1.0, spread))
    return jnp.where(jnp.any(valid), slope * (rates - mean_at) + mean_rate, rates)


def nearest_solved(
    queries: Array,
    corpus: Array,
    *,
    count: int,
    where: Array | None = None,
    threshold: float | None = None,
) -> Array:
    """The solved problems most similar to a prompt, for in-context seeding.

        the count greatest of  cos(q, c_j)

    XRPO puts the K = 2 nearest solved problems before a prompt whose rollouts have all failed. The
    corpus of solved problems grows during training. The corpus may be the items of a
    :class:`ReplayBuffer`.

    Args:
      queries: ``[..., D]``, floating point: embeddings of the prompts.
      corpus: ``[C, D]``, floating point: embeddings of solved problems.
      count: Number of problems per prompt, from 1 to C.
      where: bool ``[C]``, True for entries of the corpus that hold a solved problem; the rest may
        hold anything.
      threshold: Smallest cosine, in [-1, 1]; None for no threshold.

    Returns:
      Entries of the corpus, nearest first, int32 ``[..., count]``; -1 where there is none.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> corpus = jnp.array([[0.0, 1.0], [3.0, 0.0], [1.0, 1.0]])
      >>> query = jnp.array([1.0, 0.1])
      >>> jr.curation.nearest_solved(query, corpus, count=2, threshold=0.9).tolist()
      [1, -1]

    References:
      XRPO (arXiv:2510.06672). PAPER reading; the threshold is ours.
    """
    name = "nearest_solved"
    checks.check_min_rank(name, 1, queries=queries)
    checks.check_rank(name, 2, corpus=corpus)
    checks.check_float(name, queries=queries, corpus=corpus)
    checks.check_bool(name, where=where)
    size, width = jnp.shape(corpus)
    if jnp.shape(queries)[-1] != width:
        raise ValueError(
            f"{name}: queries and corpus must have vectors of one length; got "
            f"{jnp.shape(queries)} and {jnp.shape(corpus)}."
        )
    checks.check_count(name, most=size, count=count)
    if threshold is not None and not -1 <= threshold <= 1:
        raise ValueError(f"{name}: threshold must be in [-1, 1]; got {threshold!r}.")
    valid = jnp.ones(size, bool)
    if where is not None:
        checks.check_shape(name, "where", where, (size,))
        valid = where
    corpus = masking.zero_masked(corpus, valid[:, None])

    def unit(x: Array) -> Array:
        x = jnp.asarray(x, jnp.float32)
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)

    cosines = jnp.where(valid, unit(queries) @ unit(corpus).T, -jnp.inf)
    best, ids = jax.lax.top_k(cosines, count)
    least = -jnp.inf if threshold is None else threshold
    return jnp.where((best > -jnp.inf) & (best >= least), ids, -1).astype(jnp.int32)


def _check_references(function: str, rates: Array, where: Array | None, count: int | None) -> Array:
    """Which references take part, bool ``[R]``."""
    checks.check_rank(function, 1, reference_rates=rates)
    checks.check_float(function, reference_rates=rates)
    checks.check_bool(function, where=where)
    if count is not None:
        checks.check_shape(function, "reference_rates", rates, (count,))
    checks.check_same_shape(function, reference_rates=rates, where=where)
    return jnp.ones(jnp.shape(rates), bool) if where is None else jnp.asarray(where)
