"""Rollout-GDRO: a bandit for each bin of prompts chooses how many rollouts they get.

Bins are those of :mod:`jaxrl_llm.curation.prompts.bins`, Nb of them, int32; -1 means none. ``arms``
are M numbers of rollouts, each above 0, in ascending order.

Every function raises TypeError for an array of the wrong dtype, and ValueError for shapes that do
not match or an option out of its range.
"""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.curation.prompts.bins import exponential_weights

__all__ = ["arm_scores_update", "choose_arms", "gdro_extra_rollouts", "shadow_price"]


def choose_arms(
    log_probs: Array, counts: Array, *, arms: tuple[int, ...], total: int
) -> np.ndarray:
    """The number of rollouts of each bin's prompts, within the budget of the batch.

        argmax of sum over b of log_probs[b, arm_b]
        with      sum over b of counts_b arms[arm_b] = total

    If no choice has exactly the total, the nearest sum is used, and of two equally near sums the
    more probable one. Runs on the host, by dynamic programming over the sums.

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
    """Scores of the arms after a batch: the loss of the bin minus the price of its rollouts.

        scores[b, chosen_b] += means_b - price (arms[chosen_b] - mean_rollouts)

    Args:
      scores: ``[Nb, M]``, floating point, 0 at first.
      chosen: int ``[Nb]``, as :func:`choose_arms` returns it; a bin with -1 is not updated.
      means: ``[Nb]``, floating point, the mean loss of each bin, or its rate of failure.
      arms: M numbers of rollouts.
      price: Price of a rollout, as :func:`shadow_price` updates it.
      mean_rollouts: Target of the mean number of rollouts per prompt.

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
    """The price of a rollout; it rises while the mean number of rollouts exceeds its target.

        price + rate (realized - mean_rollouts)

    Args:
      price: The previous price, 0 at first. It may fall below 0.
      realized: Mean number of rollouts per prompt of the batch.
      mean_rollouts: Target of this mean.
      rate: Step size, above 0.

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


@traits(spends_budget=True)
def gdro_extra_rollouts(
    bins: Array,
    arm_scores: Array,
    *,
    counts: Array,
    budget: int,
    arms: tuple[int, ...],
    eta: float = 0.65,
    explore: float = 0.01,
) -> np.ndarray:
    """The further rollouts of each prompt by the arms of all bins.

        choose_arms by the logarithm of exponential_weights(scores of the arms), total = all

    A prompt without a bin gets the mean number. Runs on the host.

    Args:
      bins: int ``[P]``, bins of the prompts.
      arm_scores: ``[Nb, M]``, floating point.
      counts: int ``[P]``, rollouts so far, at most the first arm.
      budget: Number of rollouts to distribute, 0 or more.
      arms: See the module.
      eta: As in :func:`exponential_weights`.
      explore: As in :func:`exponential_weights`.

    Returns:
      int32 ``[P]``, not negative; they add up to ``budget`` where the arms allow it.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores = jnp.array([[0.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
      >>> bins, counts = jnp.array([0, 1]), jnp.array([2, 2])
      >>> jr.curation.gdro_extra_rollouts(
      ...     bins, scores, counts=counts, budget=4, arms=(2, 4, 6)).tolist()
      [4, 0]

    References:
      Rollout-GDRO (arXiv:2601.19280), and its released code.
    """
    name = "gdro_extra_rollouts"
    checks.check_rank(name, 1, bins=bins, counts=counts)
    checks.check_integer(name, bins=bins, counts=counts)
    checks.check_same_shape(name, bins=bins, counts=counts)
    bins, counts = np.asarray(bins), np.asarray(counts)
    if counts.size and counts.max() > arms[0]:
        raise ValueError(
            f"{name}: counts must be at most the first arm {arms[0]}; got {int(counts.max())}."
        )
    size, valid = jnp.shape(arm_scores)[0], bins >= 0
    mean = (int(counts.sum()) + budget) / max(len(bins), 1)
    likes = jnp.log(exponential_weights(arm_scores, eta=eta, explore=explore))
    rest = max(round(mean * int(valid.sum())), 1)
    per_bin = np.bincount(bins[valid], minlength=size)
    chosen = choose_arms(likes, per_bin, arms=arms, total=rest)
    wanted = np.where(valid, np.asarray(arms)[chosen[np.maximum(bins, 0)]], int(mean))
    return np.maximum(wanted - counts, 0).astype(np.int32)
