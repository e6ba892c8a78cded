"""Early stopping of rollouts: by a quality score of the partial rollout, or by predictions.

ARRoL: a head reads the hidden state of a rollout at a fixed token and predicts whether the rollout
will be correct. :class:`ScoreBins` turns its score into a rate, and about half of the group
continues, chosen so that correct and wrong rollouts are balanced. MASA: rollouts that predict the
pass rate and the length of a solution decide which prompts to skip and where to stop.

``where`` is bool of the shape of the first array, True for the entries that take part; the others
are not read. None keeps all. All raise TypeError for a wrong dtype and ValueError for a wrong shape
or an option out of range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "ScoreBins",
    "length_cutoff",
    "predictive_gate",
    "quality_loss",
    "score_bins_init",
    "score_bins_update",
    "score_rates",
    "survival_rates",
    "systematic_survivors",
]


def quality_loss(logits: Array, rewards: Array, *, where: Array | None = None) -> Array:
    """Cross entropy of a quality head, which predicts whether a partial rollout will be correct.

        loss = mean of softplus(x) - [r > 0] x

    Args:
      logits: ``[...]``, floating point, the head's output before the sigmoid.
      rewards: ``[...]``, floating point, of the finished rollouts; above 0 for a right one.
      where: See the module.

    Returns:
      float32 ``[]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> round(float(jr.curation.quality_loss(jnp.zeros(2), jnp.array([1.0, 0.0]))), 4)
      0.6931

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading: a small head, trained online.
    """
    function = "quality_loss"
    checks.check_float(function, logits=logits, rewards=rewards)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, logits=logits, rewards=rewards, where=where)
    x = masking.zero_masked(logits, where)
    right = masking.zero_masked(rewards, where) > 0
    return masking.masked_mean(jax.nn.softplus(x) - jnp.where(right, x, 0.0), where)


class ScoreBins(NamedTuple):
    """Outcomes by the score of the head, in bins of equal width over [0, 1].

    Attributes:
      count: float32 ``[B]``, number of rollouts in each bin.
      right: float32 ``[B]``, number of correct rollouts in each bin.
    """

    count: Array
    right: Array


def score_bins_init(*, bins: int = 20) -> ScoreBins:
    """Bins before the first observation.

    Args:
      bins: B, at least 1.

    Returns:
      :class:`ScoreBins` of zeros, which give the rate 1/2.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.score_bins_init(bins=2).count.tolist()
      [0.0, 0.0]

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading; 20 bins by a reproduction.
    """
    checks.check_positive("score_bins_init", finite=True, bins=bins)
    return ScoreBins(jnp.zeros(bins, jnp.float32), jnp.zeros(bins, jnp.float32))


def _bin(state: ScoreBins, scores: Array) -> Array:
    size = state.count.shape[0]
    return jnp.clip(jnp.floor(scores * size), 0, size - 1).astype(jnp.int32)


def score_bins_update(
    state: ScoreBins,
    scores: Array,
    rewards: Array,
    *,
    where: Array | None = None,
    decay: float = 1.0,
) -> ScoreBins:
    """Bins after a batch of finished rollouts.

        count = decay count + rollouts,   right = decay right + right rollouts

    Args:
      state: The bins before.
      scores: ``[...]``, floating point, in [0, 1].
      rewards: ``[...]``, floating point, above 0 for a right rollout.
      where: See the module.
      decay: Share of the past counts that remains, in [0, 1].

    Returns:
      :class:`ScoreBins`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.curation.score_bins_init(bins=2)
      >>> state = jr.curation.score_bins_update(
      ...     state, jnp.array([0.2, 0.3, 0.9]), jnp.array([0.0, 1.0, 1.0]))
      >>> state.count.tolist(), state.right.tolist()
      ([2.0, 1.0], [1.0, 1.0])

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading; the decay is ours.
    """
    function = "score_bins_update"
    checks.check_float(function, scores=scores, rewards=rewards)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, scores=scores, rewards=rewards, where=where)
    checks.check_share(function, decay=decay)
    valid = jnp.ones(jnp.shape(scores), bool) if where is None else jnp.asarray(where)
    place = _bin(state, masking.zero_masked(scores, where)).reshape(-1)
    right = valid & (masking.zero_masked(rewards, where) > 0)
    one, two = (x.reshape(-1).astype(jnp.float32) for x in (valid, right))
    count, good = decay * jnp.asarray(state.count), decay * jnp.asarray(state.right)
    return ScoreBins(count.at[place].add(one), good.at[place].add(two))


def score_rates(state: ScoreBins, scores: Array) -> Array:
    """The probability of being correct for each score.

        q = (right + 1) / (count + 2)    of the bin of the score

    Args:
      state: :class:`ScoreBins`.
      scores: ``[...]``, floating point, in [0, 1].

    Returns:
      ``[...]`` float32, inside (0, 1).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.curation.ScoreBins(jnp.array([8.0, 0.0]), jnp.array([1.0, 0.0]))
      >>> jr.curation.score_rates(state, jnp.array([0.1, 0.9])).round(3).tolist()
      [0.2..., 0.5]

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading; the uniform prior is ours.
    """
    checks.check_float("score_rates", scores=scores)
    place = _bin(state, jnp.asarray(scores, jnp.float32))
    return (jnp.asarray(state.right)[place] + 1.0) / (jnp.asarray(state.count)[place] + 2.0)


def survival_rates(
    rates: Array, *, keep: float = 0.5, balance: float = 0.5, where: Array | None = None
) -> Array:
    """Survival probability of each rollout, which balances correct and wrong survivors.

        m    = mean rate of the group, cut to [0.02, 0.98]
        rate = clip(keep (q balance / m + (1 - q) (1 - balance) / (1 - m)), 0, 1)

    Without clipping, the rates add up to ``keep`` times the group size.

    Args:
      rates: ``[..., G]``, floating point, in [0, 1]: :func:`score_rates`.
      keep: Share of the group that continues, in (0, 1].
      balance: Share of correct rollouts among the survivors, in [0, 1].
      where: See the module.

    Returns:
      ``[..., G]`` float32; 0 where an entry takes no part.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.survival_rates(jnp.array([0.9, 0.9, 0.9, 0.1])).round(3).tolist()
      [0.40..., 0.40..., 0.40..., 0.78...]

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading: the shares 0.5 and 0.5, a score that is calibrated
      in bins, no pruning in the first 20 steps and detection at token 512 are known; the formula is
      ours.
    """
    function = "survival_rates"
    stats.check_group(function, rates, where, name="rates")
    checks.check_share(function, zero=False, keep=keep)
    checks.check_share(function, balance=balance)
    q = masking.zero_masked(rates, where)
    m = jnp.clip(stats.group_mean(q, where), 0.02, 0.98)
    rate = keep * (q * balance / m + (1.0 - q) * (1.0 - balance) / (1.0 - m))
    return masking.zero_masked(jnp.clip(rate, 0.0, 1.0), where)


def systematic_survivors(
    key: Array, rates: Array, *, count: int, where: Array | None = None
) -> Array:
    """A fixed number of survivors of each group, each with about its rate.

        rates are scaled to add up to count, those above 1 cut and the others raised
        i survives iff a point u, u + 1, u + 2, ... lies in its piece of the running sum

    u is uniform in [0, 1). A rollout that finishes before it is scored has rate 1.

    Args:
      key: Typed PRNG key.
      rates: ``[..., G]``, floating point, not negative: :func:`survival_rates`.
      count: Number of survivors per group, at least 1. A group of at most ``count`` is unchanged.
      where: See the module.

    Returns:
      bool ``[..., G]``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rates = jnp.array([1.0, 0.0, 0.5, 0.5])
      >>> keep = jr.curation.systematic_survivors(jax.random.key(0), rates, count=2)
      >>> int(keep.sum()), bool(keep[0]), bool(keep[1])
      (2, True, False)

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading; systematic sampling is ours.
    """
    function = "systematic_survivors"
    stats.check_group(function, rates, where, name="rates")
    checks.check_positive(function, finite=True, count=count)
    valid = jnp.ones(jnp.shape(rates), bool) if where is None else jnp.asarray(where)
    # Zero rates may still be needed to fill a group.
    rates = jnp.where(valid, jnp.maximum(masking.zero_masked(rates, where), 1e-6), 0.0)
    size = jnp.sum(valid, axis=-1, keepdims=True)
    full = jnp.zeros(jnp.shape(rates), bool)

    def cut(_, full):
        left = count - jnp.sum(full, axis=-1, keepdims=True)
        total = jnp.sum(jnp.where(full, 0.0, rates), axis=-1, keepdims=True)
        return full | (rates * left >= total * (1.0 - 1e-6)) & valid & (left > 0)

    full = jax.lax.fori_loop(0, min(count, jnp.shape(rates)[-1]), cut, full)
    left = count - jnp.sum(full, axis=-1, keepdims=True)
    rest = jnp.where(full | ~valid, 0.0, rates)
    total = jnp.sum(rest, axis=-1, keepdims=True)
    edges = jnp.cumsum(rest, axis=-1) / jnp.where(total > 0, total, 1.0) * left
    # The last edge is the number itself, whatever the rounding.
    last = jnp.cumsum(rest > 0, axis=-1) == jnp.sum(rest > 0, axis=-1, keepdims=True)
    edges = jnp.where(last, left, jnp.minimum(edges, left))
    start = jnp.concatenate([jnp.zeros_like(edges[..., :1]), edges[..., :-1]], axis=-1)
    u = jax.random.uniform(key, (*jnp.shape(rates)[:-1], 1))
    drawn = (jnp.ceil(edges - u) - jnp.ceil(start - u) > 0) & (rest > 0)
    return jnp.where(size <= count, valid, full | drawn)


def predictive_gate(
    predicted: Array,
    *,
    where: Array | None = None,
    max_std: float = 0.1,
    low: float = 0.0,
    high: float = 1.0,
) -> Array:
    """Prompts to roll out, by predictions of their pass rate.

        dropped = std of the predictions < max_std  and  (mean <= low or mean >= high)

    A prompt without a prediction is rolled out.

    Args:
      predicted: ``[..., K]``, floating point, in [0, 1], of K predicting rollouts.
      where: See the module.
      max_std: Standard deviation (dividing by n) below which the predictions agree, not negative.
      low: Mean at which a prompt counts as hopeless.
      high: Mean at which it counts as mastered.

    Returns:
      bool ``[...]``, True to roll out.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.predictive_gate(jnp.array([[1.0, 1.0], [0.0, 1.0], [0.5, 0.5]])).tolist()
      [False, True, True]

    References:
      MASA (arXiv:2510.03259), NOTES reading of its efficient form; the released code has only the
      reward.
    """
    function = "predictive_gate"
    stats.check_group(function, predicted, where, name="predicted")
    checks.check_non_negative(function, finite=True, max_std=max_std)
    values = masking.zero_masked(predicted, where)
    mean = stats.group_mean(values, where)[..., 0]
    agree = stats.group_std(values, where, ddof=0)[..., 0] < max_std
    known = stats.group_count(values, where)[..., 0] > 0
    # Rates are multiples of 1/8 or the like; their mean may miss an end by a rounding.
    sure = (mean <= low + 1e-6) | (mean >= high - 1e-6)
    return ~(known & agree & sure)


def length_cutoff(
    predicted: Array, *, max_length: int, where: Array | None = None, factor: float = 2.0
) -> Array:
    """The length at which rollouts stop, by predictions of the length of a solution.

        min(ceil(factor * mean prediction), max_length);   max_length without a prediction

    Args:
      predicted: ``[..., K]``, integers or floating point, tokens; of K predicting rollouts.
      max_length: Maximum length of a rollout, at least 1.
      where: See the module.
      factor: Above 0.

    Returns:
      int32 ``[...]``, at least 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.length_cutoff(jnp.array([[100, 200], [900, 900]]), max_length=1024).tolist()
      [300, 1024]

    References:
      MASA (arXiv:2510.03259), NOTES reading; doubling the mean is ours.
    """
    function = "length_cutoff"
    checks.check_min_rank(function, 1, predicted=predicted)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, predicted=predicted, where=where)
    checks.check_positive(function, finite=True, max_length=max_length, factor=factor)
    values = masking.zero_masked(predicted, where)
    known = stats.group_count(values, where)[..., 0] > 0
    stop = jnp.ceil(factor * stats.group_mean(values, where)[..., 0] - 1e-4)
    return jnp.where(known, jnp.clip(stop, 1, max_length), max_length).astype(jnp.int32)
