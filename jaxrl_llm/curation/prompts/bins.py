"""Bins of prompts by difficulty, their statistics in a batch, and weights of an adversary.

Prompts are sorted into Nb bins by the share of their latest groups that had a correct answer. Bins
are int32; -1 means none. Statistics of bins are ``[Nb]``: ``scores`` (recent difficulty),
``present`` (bool, whether the batch has prompts of the bin) and ``seen`` (bool, whether any batch
had). ``where`` (bool, True = takes part) excludes entries, which may hold anything.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking

__all__ = [
    "BinScores",
    "PassHistory",
    "bin_means",
    "bin_scores_update",
    "difficulty_bins",
    "exponential_weights",
    "pass_history_init",
    "pass_history_rate",
    "pass_history_update",
]


class PassHistory(NamedTuple):
    """Whether the last H groups of each prompt had a correct answer.

    Attributes:
      hits: bool ``[N, H]``, a ring buffer.
      count: int32 ``[N]``, number of groups so far.
    """

    hits: Array
    count: Array


def pass_history_init(num_prompts: int, window: int) -> PassHistory:
    """The history before training.

    Args:
      num_prompts: N, above 0.
      window: H, number of groups that are remembered, above 0.

    Returns:
      :class:`PassHistory`.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.pass_history_init(2, 50).hits.shape
      (2, 50)

    References:
      Prompt-GDRO (arXiv:2601.19280).
    """
    name = "pass_history_init"
    checks.check_count(name, num_prompts=num_prompts, window=window)
    return PassHistory(jnp.zeros((num_prompts, window), bool), jnp.zeros(num_prompts, jnp.int32))


def pass_history_update(
    history: PassHistory, prompt_ids: Array, hit: Array, *, where: Array | None = None
) -> PassHistory:
    """The history after a batch; several rows of one prompt count in their order.

    Args:
      history: :class:`PassHistory` over N prompts.
      prompt_ids: integer ``[P]``; a row with an id outside [0, N) changes nothing.
      hit: bool ``[P]``, whether the group had a right answer: pass@k of k rollouts.
      where: bool ``[P]``. See the module.

    Returns:
      The next :class:`PassHistory`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> history = jr.curation.pass_history_init(2, 3)
      >>> ids, hit = jnp.array([1, 1]), jnp.array([True, False])
      >>> history = jr.curation.pass_history_update(history, ids, hit)
      >>> jr.curation.pass_history_rate(history).tolist()
      [0.0, 0.5]

    References:
      Prompt-GDRO (arXiv:2601.19280), and its released code.
    """
    name = "pass_history_update"
    checks.check_rank(name, 1, prompt_ids=prompt_ids, hit=hit)
    checks.check_integer(name, prompt_ids=prompt_ids)
    checks.check_bool(name, hit=hit, where=where)
    checks.check_same_shape(name, prompt_ids=prompt_ids, hit=hit, where=where)
    size, window = history.hits.shape
    valid = (prompt_ids >= 0) & (prompt_ids < size)
    if where is not None:
        valid &= where
    row = jnp.where(valid, prompt_ids, size)
    same = (row[:, None] == row) & valid
    earlier = jnp.sum(jnp.tril(same, -1), axis=-1)
    left = jnp.sum(same, axis=-1) - earlier
    # Of more than H rows of one prompt only the last H are written: no place is written twice.
    row = jnp.where(left <= window, row, size)
    place = (history.count[jnp.minimum(row, size - 1)] + earlier) % window
    return PassHistory(
        hits=history.hits.at[row, place].set(hit, mode="drop"),
        count=history.count.at[jnp.where(valid, prompt_ids, size)].add(1, mode="drop"),
    )


def pass_history_rate(history: PassHistory) -> Array:
    """The share of the remembered groups that had a correct answer.

    Args:
      history: :class:`PassHistory`.

    Returns:
      ``[N]`` float32; 0 for a prompt without groups.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> history = jr.curation.PassHistory(jnp.array([[True, True, False]]), jnp.array([2]))
      >>> jr.curation.pass_history_rate(history).tolist()
      [1.0]

    References:
      Prompt-GDRO (arXiv:2601.19280).
    """
    window = history.hits.shape[-1]
    filled = jnp.arange(window) < history.count[..., None]
    hits = jnp.sum(history.hits & filled, axis=-1, dtype=jnp.float32)
    return hits / jnp.clip(history.count, 1, window)


def difficulty_bins(
    rates: Array,
    *,
    edges: tuple[float, ...],
    last: Array | None = None,
    hysteresis: float = 0.0,
    extremes: bool = True,
) -> Array:
    """The bin of each prompt by its rate, with hysteresis at the borders.

        raw = number of edges that are at most the rate
        raw > last:   raw if rate >= edges[last] + hysteresis,      else last
        raw < last:   raw if rate <= edges[last - 1] - hysteresis,  else last

    Args:
      rates: ``[...]``, floating point, in [0, 1]: such as :func:`pass_history_rate`.
      edges: Inner borders in ascending order, within (0, 1); Nb is one more than they are.
      last: int ``[...]``, the bins before; negative for none. None for no hysteresis.
      hysteresis: Distance past a border at which a prompt changes its bin, not negative.
      extremes: Whether rates of exactly 0 or 1 have a bin; if not, their bin is -1.

    Returns:
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rates, last = jnp.array([0.39, 0.42, 0.44]), jnp.array([0, 0, 0])
      >>> bins = jr.curation.difficulty_bins(
      ...     rates, edges=(0.4, 0.75), last=last, hysteresis=0.03)
      >>> bins.tolist()
      [0, 0, 1]

    References:
      Prompt-GDRO (arXiv:2601.19280). In the released code a fall over two bins or more is
      compared with the edge of the new bin, and with bins of equal width it never succeeds.
    """
    name = "difficulty_bins"
    checks.check_min_rank(name, 0, rates=rates)
    checks.check_float(name, rates=rates)
    checks.check_non_negative(name, finite=True, hysteresis=hysteresis)
    rising = isinstance(edges, tuple) and all(a < b for a, b in itertools.pairwise(edges))
    if not rising or not edges or not (edges[0] > 0 and edges[-1] < 1):
        raise ValueError(
            f"{name}: edges must be a tuple of numbers within (0, 1) in ascending order; "
            f"got {edges!r}."
        )
    rates = jnp.asarray(rates, jnp.float32)
    borders = jnp.array(edges, jnp.float32)
    bins = jnp.sum(rates[..., None] >= borders, axis=-1, dtype=jnp.int32)
    if last is None:
        checks.check_no_effect(name, "without last", hysteresis=hysteresis or None)
    else:
        checks.check_integer(name, last=last)
        checks.check_same_shape(name, rates=rates, last=last)
        last = jnp.minimum(jnp.asarray(last, jnp.int32), len(edges))
        above = borders[jnp.clip(last, 0, len(edges) - 1)] + hysteresis
        below = borders[jnp.clip(last - 1, 0, len(edges) - 1)] - hysteresis
        stays = ((bins > last) & (rates < above)) | ((bins < last) & (rates > below))
        bins = jnp.where((last >= 0) & stays, last, bins)
    if not extremes:
        bins = jnp.where((rates <= 0) | (rates >= 1), -1, bins)
    return bins


def bin_means(
    values: Array,
    bins: Array,
    *,
    num_bins: int,
    by_share: bool = False,
    where: Array | None = None,
) -> tuple[Array, Array]:
    """Mean of each bin's values in a batch.

        mean_b = sum of values in b / count_b,        by_share: divided by count_b / count

    Args:
      values: ``[...]``, floating point: losses of sequences, or ``1 - reward``.
      bins: int ``[...]``, of the same shape; -1 for values of no bin.
      num_bins: Nb, above 0.
      by_share: Whether the mean is divided by the bin's share of the batch, which raises rare
        bins, as the released runs do.
      where: ``[...]``. See the module.

    Returns:
      The means ``[Nb]`` float32, 0 for an empty bin, and ``present`` ``[Nb]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, bins = jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 2, 2])
      >>> means, present = jr.curation.bin_means(values, bins, num_bins=3)
      >>> means.tolist(), present.tolist()
      ([1.0, 0.0, 3.0], [True, False, True])

    References:
      Prompt-GDRO (arXiv:2601.19280), and its released code.
    """
    name = "bin_means"
    checks.check_min_rank(name, 0, values=values)
    checks.check_float(name, values=values)
    checks.check_integer(name, bins=bins)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, values=values, bins=bins, where=where)
    checks.check_count(name, num_bins=num_bins)
    inside = (bins >= 0) & (bins < num_bins)
    valid = inside if where is None else inside & where
    row = jnp.where(valid, bins, num_bins).ravel()

    def added(x: Array) -> Array:
        return jnp.zeros(num_bins, jnp.float32).at[row].add(x.ravel(), mode="drop")

    count = added(jnp.ones(jnp.shape(values)))
    means = added(masking.zero_masked(values, valid)) / jnp.maximum(count, 1.0)
    if by_share:
        means = means * jnp.sum(count) / jnp.maximum(count, 1.0)
    return means, count > 0


class BinScores(NamedTuple):
    """State of the adversary.

    Attributes:
      scores: ``[Nb]`` float32, moving average of the bin's means; 0 before the first.
      seen: bool ``[Nb]``, whether there was one.
    """

    scores: Array
    seen: Array


def bin_scores_update(
    state: BinScores, means: Array, present: Array, *, rate: float = 0.12
) -> BinScores:
    """Updates the moving averages of the bins of a batch; the others are unchanged.

        score <- mean at first sight, then (1 - rate) score + rate mean

    Args:
      state: :class:`BinScores`.
      means: ``[Nb]``, floating point, as :func:`bin_means` returns them.
      present: bool ``[Nb]``. See the module.
      rate: Share of the new mean, in (0, 1].

    Returns:
      The next :class:`BinScores`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.curation.BinScores(jnp.array([0.0, 1.0]), jnp.array([False, True]))
      >>> state = jr.curation.bin_scores_update(
      ...     state, jnp.array([3.0, 3.0]), jnp.array([True, True]), rate=0.5)
      >>> state.scores.tolist()
      [3.0, 2.0]

    References:
      Prompt-GDRO (arXiv:2601.19280), and its released code.
    """
    name = "bin_scores_update"
    checks.check_rank(name, 1, means=means, present=present)
    checks.check_float(name, means=means)
    checks.check_bool(name, present=present)
    checks.check_same_shape(name, scores=state.scores, means=means, present=present)
    checks.check_share(name, zero=False, rate=rate)
    means = masking.zero_masked(means, present)
    moved = jnp.where(state.seen, (1.0 - rate) * state.scores + rate * means, means)
    return BinScores(jnp.where(present, moved, state.scores), state.seen | present)


def exponential_weights(
    scores: Array,
    *,
    eta: float = 0.65,
    explore: float = 0.01,
    present: Array | None = None,
    bound: float | None = None,
    standardize: bool = False,
    seen: Array | None = None,
) -> Array:
    """Weights of an adversary, which increase with the scores.

        q_b = (1 - explore) exp(eta s_b) / sum exp(eta s) + explore / count    over present bins

    ``explore = 0`` is the distribution that maximizes ``sum q s + entropy(q) / eta``.

    Args:
      scores: ``[..., Nb]``, floating point.
      eta: Sharpness, not negative; 0 for equal weights.
      explore: Share of the uniform distribution, in [0, 1].
      present: bool ``[..., Nb]``; None for all. See the module.
      bound: Scores are clipped to [-bound, bound], above 0; None for no bound.
      standardize: Whether to first subtract the mean of all ``seen`` bins, divide by their
        deviation (of the population, at least 0.001), and clip to [-3, 3].
      seen: bool ``[..., Nb]``, for ``standardize`` only; None for all. See the module.

    Returns:
      ``[..., Nb]`` float32, 0 where absent, adding up to 1 unless no bin is present.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores = jnp.array([0.2, 0.6, -0.1])
      >>> jr.curation.exponential_weights(scores, eta=1.0, explore=0.1).round(2)
      Array([0.31, 0.45, 0.24], dtype=float32)

    References:
      Prompt-GDRO (arXiv:2601.19280), and its released code, which has no bound.
    """
    name = "exponential_weights"
    checks.check_min_rank(name, 1, scores=scores)
    checks.check_float(name, scores=scores)
    checks.check_bool(name, present=present, seen=seen)
    checks.check_same_shape(name, scores=scores, present=present, seen=seen)
    checks.check_non_negative(name, finite=True, eta=eta)
    checks.check_share(name, explore=explore)
    checks.check_positive(name, finite=True, bound=bound)
    valid = jnp.ones(jnp.shape(scores), bool) if present is None else jnp.asarray(present)
    if standardize:
        mean = masking.masked_mean(scores, seen, axis=-1, keepdims=True)
        std = masking.masked_std(scores, seen, axis=-1, keepdims=True)
        scores = jnp.clip((scores - mean) / jnp.maximum(std, 1e-3), -3.0, 3.0)
    else:
        checks.check_no_effect(name, "without standardize", seen=seen)
    if bound is not None:
        scores = jnp.clip(scores, -bound, bound)
    scores = masking.zero_masked(scores, valid)
    some = jnp.any(valid, axis=-1, keepdims=True)
    # Before the product: one instruction may multiply and subtract, and then the largest score
    # would differ from itself by the rounding of the product.
    best = jnp.max(scores, axis=-1, keepdims=True, where=valid | ~some, initial=-jnp.inf)
    softmax = jax.nn.softmax(jnp.where(valid | ~some, eta * (scores - best), -jnp.inf), axis=-1)
    even = 1.0 / jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True), 1)
    return jnp.where(valid, (1.0 - explore) * softmax + explore * even, 0.0)
