"""Bins of prompts by difficulty: an adversary sets their weights, a bandit their rollouts.

Prompts are sorted into Nb bins by the share of their latest groups that had a right answer. Bins
are int32; -1 means none. Statistics of bins are ``[Nb]``: ``scores`` (recent difficulty),
``present`` (bool, whether the batch has prompts of the bin) and ``seen`` (bool, whether any batch
had). ``where`` (bool, True = takes part) excludes entries, which may hold anything.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, Transform, checks, masking, stats


class PassHistory(NamedTuple):
    """Whether the last H groups of each prompt had a right answer.

    Attributes:
      hits: bool ``[N, H]``, a ring.
      count: int32 ``[N]``, groups so far.
    """

    hits: Array
    count: Array


def pass_history_init(num_prompts: int, window: int) -> PassHistory:
    """The history before training.

    Args:
      num_prompts: N, above 0.
      window: H, how many groups are remembered, above 0.

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
    """The share of the remembered groups that had a right answer.

    Args:
      history: :class:`PassHistory`.

    Returns:
      ``[N]`` float32; 0 for a prompt never seen.

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
      extremes: Whether rates of exactly 0 or 1 have a bin; where not, theirs is -1.

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
      Prompt-GDRO (arXiv:2601.19280). In the released code a fall over two bins or more is held
      against the edge of the new bin, and with bins of equal width a fall never gets through.
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
    """Moving averages of the bins of a batch; the others stay.

        score <- mean at first sight, then (1 - rate) score + rate mean

    Args:
      state: :class:`BinScores`.
      means: ``[Nb]``, floating point, as :func:`bin_means` gives them.
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
    """Weights of an adversary, which grow with the scores.

        q_b = (1 - explore) exp(eta s_b) / sum exp(eta s) + explore / count    over present bins

    ``explore = 0`` is the distribution that maximizes ``sum q s + entropy(q) / eta``.

    Args:
      scores: ``[..., Nb]``, floating point.
      eta: Sharpness, not negative; 0 for equal weights.
      explore: Share that is uniform, in [0, 1].
      present: bool ``[..., Nb]``; None for all. See the module.
      bound: Scores are clipped to [-bound, bound], above 0; None for no bound.
      standardize: Whether the scores are first taken less the mean of all ``seen`` bins, over
        their deviation (of the population, at least 0.001), and clipped to [-3, 3].
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
    softmax = jax.nn.softmax(jnp.where(valid | ~some, eta * scores, -jnp.inf), axis=-1)
    even = 1.0 / jnp.maximum(jnp.sum(valid, axis=-1, keepdims=True), 1)
    return jnp.where(valid, (1.0 - explore) * softmax + explore * even, 0.0)


def bin_advantage_weights(
    weights: Array, bins: Array, *, most: float = 15.0, where: Array | None = None
) -> Array:
    """Factors of the advantages of each sequence: the weight of its bin, with mean 1.

        w_j = min(q[bin_j] / mean of q[bin] over the batch, most)

    Args:
      weights: ``[Nb]``, floating point, as :func:`exponential_weights` gives them.
      bins: int ``[...]``, of prompts or of sequences. Entries without a bin (-1) get 1 and are
        not in the mean.
      most: Greatest factor, above 0.
      where: ``[...]``. See the module.

    Returns:
      ``[...]`` float32; 1 where excluded.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> weights, bins = jnp.array([0.25, 0.75]), jnp.array([0, 0, 1, 1, -1])
      >>> jr.curation.bin_advantage_weights(weights, bins).tolist()
      [0.5, 0.5, 1.5, 1.5, 1.0]

    References:
      Prompt-GDRO (arXiv:2601.19280), and its released code; the paper multiplies by
      ``min(exp(eta s), most)``, of the same ratios between bins but for the exploration. In the
      released code the prompts without a bin are another bin.
    """
    name = "bin_advantage_weights"
    checks.check_rank(name, 1, weights=weights)
    checks.check_float(name, weights=weights)
    checks.check_integer(name, bins=bins)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, bins=bins, where=where)
    checks.check_positive(name, most=most)
    size = jnp.shape(weights)[0]
    valid = (bins >= 0) & (bins < size)
    if where is not None:
        valid &= where
    each = jnp.asarray(weights, jnp.float32)[jnp.clip(bins, 0, size - 1)]
    mean = masking.masked_mean(each, valid)
    scaled = jnp.minimum(each / jnp.where(mean > 0, mean, 1.0), most)
    return jnp.where(valid & (mean > 0), scaled, 1.0)


class PromptGdroState(NamedTuple):
    """State of :func:`prompt_gdro`.

    Attributes:
      history: :class:`PassHistory` over the N prompts.
      bins: int32 ``[N]``, the bin of each prompt at its last visit; -1 before.
      adversary: :class:`BinScores`.
    """

    history: PassHistory
    bins: Array
    adversary: BinScores


@dataclasses.dataclass(frozen=True)
class _GdroInit:
    num_prompts: int
    window: int
    num_bins: int

    def __call__(self) -> PromptGdroState:
        return PromptGdroState(
            pass_history_init(self.num_prompts, self.window),
            jnp.full(self.num_prompts, -1, jnp.int32),
            BinScores(jnp.zeros(self.num_bins, jnp.float32), jnp.zeros(self.num_bins, bool)),
        )


@dataclasses.dataclass(frozen=True)
class _GdroUpdate:
    edges: tuple[float, ...]
    hysteresis: float
    extremes: bool
    eta: float
    explore: float
    rate: float
    most: float
    correct: float

    def __call__(self, advantages, state, *, prompt_ids, rewards, where=None, **context):
        name = "prompt_gdro"
        stats.check_group(name, rewards, where)
        checks.check_rank(name, 2, rewards=rewards)
        checks.check_integer(name, prompt_ids=prompt_ids)
        checks.check_shape(name, "prompt_ids", prompt_ids, jnp.shape(rewards)[:1])
        size = state.bins.shape[0]
        known = (prompt_ids >= 0) & (prompt_ids < size)
        at = jnp.where(known, prompt_ids, 0)
        bins = difficulty_bins(
            pass_history_rate(state.history)[at],
            edges=self.edges,
            last=state.bins[at],
            hysteresis=self.hysteresis,
            extremes=self.extremes,
        )
        valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
        visited = known & jnp.any(valid, axis=-1)
        bins = jnp.where(visited, bins, -1)
        each = jnp.broadcast_to(bins[:, None], rewards.shape)
        failure, present = bin_means(
            1.0 - masking.zero_masked(rewards, valid),
            each,
            num_bins=len(self.edges) + 1,
            by_share=True,
            where=valid,
        )
        weights = exponential_weights(
            state.adversary.scores, eta=self.eta, explore=self.explore, present=present
        )
        factor = bin_advantage_weights(weights, each, most=self.most, where=valid)
        # One value a sequence, or one a token.
        factor = factor.reshape(factor.shape + (1,) * (jnp.ndim(advantages) - 2))
        hit = jnp.any((masking.zero_masked(rewards, valid) > self.correct) & valid, axis=-1)
        next_state = PromptGdroState(
            pass_history_update(state.history, prompt_ids, hit, where=visited),
            state.bins.at[jnp.where(bins >= 0, at, size)].set(bins, mode="drop"),
            bin_scores_update(state.adversary, failure, present, rate=self.rate),
        )
        return advantages * factor, next_state


def prompt_gdro(
    *,
    num_prompts: int,
    edges: tuple[float, ...] = (0.4, 0.75),
    window: int = 50,
    hysteresis: float = 0.03,
    extremes: bool = False,
    eta: float = 0.65,
    explore: float = 0.01,
    rate: float = 0.12,
    most: float = 15.0,
    correct: float = 0.5,
) -> Transform:
    """Advantages with weights of an adversary, which raises the bins that fail most.

        bin of a prompt       difficulty_bins of its last `window` groups
        weight of the batch   exponential_weights of the bins' scores, of mean 1, up to `most`
        afterwards            score <- moving average of the bin's mean 1 - reward, over its share

    A batch has the weights of the state before it. Reads ``prompt_ids [P]``, ``rewards [P, G]`` and
    ``where`` from the batch; put it after an advantage with :func:`jaxrl_llm.chain`.

    Args:
      num_prompts: N, the prompts of the dataset.
      edges: As in :func:`difficulty_bins`.
      window: Groups of a prompt that are remembered.
      hysteresis: As in :func:`difficulty_bins`.
      extremes: Whether prompts of rate 0 or 1 have a bin; where not, their weight is 1.
      eta: As in :func:`exponential_weights`.
      explore: As in :func:`exponential_weights`.
      rate: As in :func:`bin_scores_update`.
      most: As in :func:`bin_advantage_weights`.
      correct: A reward above it counts as a right answer.

    Returns:
      A Transform ``advantages [P, G] or [P, G, T] -> the same`` with :class:`PromptGdroState`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> robust = jr.curation.prompt_gdro(num_prompts=4, extremes=True)
      >>> rewards, ids = jnp.array([[1.0, 0.0]]), jnp.array([2])
      >>> out, state = robust.update(
      ...     jnp.array([[0.5, -0.5]]), robust.init(), prompt_ids=ids, rewards=rewards)
      >>> out.tolist(), state.adversary.scores.tolist()
      ([[0.5, -0.5]], [0.5, 0.0, 0.0])

    References:
      Prompt-GDRO (arXiv:2601.19280). The paper's score is the mean clipped loss of the bin, which
      with centered advantages is close to 0 at a ratio of 1; the failure rate instead is ours.
      :func:`bin_means` and :func:`bin_scores_update` take losses as well.
    """
    name = "prompt_gdro"
    pass_history_init(num_prompts, window)
    difficulty_bins(jnp.zeros(1), edges=edges, last=jnp.zeros(1, jnp.int32), hysteresis=hysteresis)
    checks.check_non_negative(name, finite=True, eta=eta)
    checks.check_share(name, explore=explore)
    checks.check_share(name, zero=False, rate=rate)
    checks.check_positive(name, most=most)
    return Transform(
        _GdroInit(num_prompts, window, len(edges) + 1),
        _GdroUpdate(edges, hysteresis, extremes, eta, explore, rate, most, correct),
    )


def choose_arms(
    log_probs: Array, counts: Array, *, arms: tuple[int, ...], total: int
) -> np.ndarray:
    """The number of rollouts of each bin's prompts, within the budget of the batch.

        argmax of sum over b of log_probs[b, arm_b]
        with      sum over b of counts_b arms[arm_b] = total

    If no choice has the total, the nearest sum is taken, and of two the more probable. Runs on the
    host, by dynamic programming over the sums.

    Args:
      log_probs: ``[Nb, M]``, floating point: the logarithm of :func:`exponential_weights` of the
        arm scores of each bin.
      counts: int ``[Nb]``, prompts of each bin in the batch.
      arms: M numbers of rollouts, each above 0, in ascending order.
      total: Rollouts of the batch, above 0.

    Returns:
      int32 ``[Nb]``, the index of the chosen arm; -1 for a bin without prompts.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> likes = jnp.log(jnp.array([[0.1, 0.2, 0.7], [0.3, 0.4, 0.3]]))
      >>> jr.curation.choose_arms(likes, jnp.array([2, 2]), arms=(2, 4, 6), total=16).tolist()
      [2, 0]

    References:
      Rollout-GDRO (arXiv:2601.19280), and its released code.
    """
    name = "choose_arms"
    checks.check_rank(name, 2, log_probs=log_probs)
    checks.check_float(name, log_probs=log_probs)
    checks.check_integer(name, counts=counts)
    likes, prompts = np.asarray(log_probs, np.float64), np.asarray(counts)
    checks.check_shape(name, "counts", prompts, likes.shape[:1])
    if len(arms) != likes.shape[1] or any(a < 1 for a in arms) or list(arms) != sorted(set(arms)):
        raise ValueError(
            f"{name}: arms must be {likes.shape[1]} integers above 0 in ascending order; "
            f"got {arms!r}."
        )
    checks.check_positive(name, finite=True, total=total)
    if np.any(prompts < 0) or np.any(np.isnan(likes)):
        raise ValueError(f"{name}: counts must not be negative and log_probs must not be NaN.")
    bins = np.flatnonzero(prompts)
    chosen = np.full(len(prompts), -1, np.int32)
    if not len(bins):
        return chosen
    size = int(prompts.sum()) * arms[-1] + 1
    best, tables = np.full(size, -np.inf), []
    best[0] = 0.0
    for b in bins:
        options = np.full((len(arms), size), -np.inf)
        for i, arm in enumerate(arms):
            step = int(prompts[b]) * arm
            options[i, step:] = best[: size - step] + max(likes[b, i], -1e6)
        tables.append(np.argmax(options, axis=0))
        best = np.max(options, axis=0)
    sums = np.flatnonzero(best > -np.inf)
    at = int(min(sums, key=lambda s: (abs(s - total), -best[s])))
    for b, table in zip(bins[::-1], tables[::-1], strict=True):
        chosen[b] = table[at]
        at -= int(prompts[b]) * arms[chosen[b]]
    return chosen


def arm_scores_update(
    scores: Array,
    chosen: Array,
    means: Array,
    *,
    arms: tuple[int, ...],
    price: float | Array,
    mean_rollouts: float,
) -> Array:
    """Scores of the arms after a batch: the loss of the bin, less the price of its rollouts.

        scores[b, chosen_b] += means_b - price (arms[chosen_b] - mean_rollouts)

    Args:
      scores: ``[Nb, M]``, floating point, 0 at first.
      chosen: int ``[Nb]``, as :func:`choose_arms` gives it; a bin with -1 learns nothing.
      means: ``[Nb]``, floating point, the mean loss of each bin, or its rate of failure.
      arms: M numbers of rollouts.
      price: Of a rollout, as :func:`shadow_price` moves it.
      mean_rollouts: The target of the mean rollouts a prompt.

    Returns:
      ``[Nb, M]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.arm_scores_update(
      ...     jnp.zeros((1, 2)), jnp.array([1]), jnp.array([0.5]), arms=(2, 6), price=0.125,
      ...     mean_rollouts=4.0).tolist()
      [[0.0, 0.25]]

    References:
      Rollout-GDRO (arXiv:2601.19280), the sign of the released code, which moves rollouts to hard
      bins; the paper's bandit loss has the other.
    """
    name = "arm_scores_update"
    checks.check_rank(name, 2, scores=scores)
    checks.check_float(name, scores=scores, means=means)
    checks.check_integer(name, chosen=chosen)
    size, choices = jnp.shape(scores)
    checks.check_shape(name, "chosen", chosen, (size,))
    checks.check_shape(name, "means", means, (size,))
    if len(arms) != choices:
        raise ValueError(f"{name}: arms must be {choices} numbers; got {arms!r}.")
    had = (chosen >= 0) & (chosen < choices)
    at = jnp.where(had, chosen, 0)
    cost = price * (jnp.array(arms, jnp.float32)[at] - mean_rollouts)
    gain = jnp.where(had, masking.zero_masked(means, had) - cost, 0.0)
    return jnp.asarray(scores, jnp.float32).at[jnp.arange(size), at].add(gain)


def shadow_price(
    price: float | Array, realized: float | Array, *, mean_rollouts: float, rate: float = 0.05
) -> Array:
    """The price of a rollout, which rises while the mean number of rollouts is above its target.

        price + rate (realized - mean_rollouts)

    Args:
      price: The price before, 0 at first. It may fall below 0.
      realized: Mean rollouts a prompt of the batch.
      mean_rollouts: Their target.
      rate: Above 0.

    Returns:
      Float32 scalar.

    Example:
      >>> import jaxrl_llm as jr
      >>> round(float(jr.curation.shadow_price(0.0, 4.5, mean_rollouts=4.0, rate=0.1)), 4)
      0.05

    References:
      Rollout-GDRO (arXiv:2601.19280), and its released code.
    """
    checks.check_positive("shadow_price", finite=True, rate=rate)
    return jnp.asarray(price, jnp.float32) + rate * (realized - mean_rollouts)
