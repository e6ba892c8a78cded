"""Budgets: the number of rollouts of each prompt.

- ``accuracy``: floating point ``[...]``, u in [0, 1], the share of right ones among ``rollouts``.
- ``rollouts``: N, above 0, the (first) rollouts of a prompt.
- ``scaled``: whether the advantages are divided by their deviation.
- ``total``: rollouts of all prompts together.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks, stats, traits

__all__ = [
    "best_allocate",
    "cumulative_advantage",
    "dars_extra_rollouts",
    "dars_keep",
    "greedy_allocate",
    "grpo_signal_utility",
    "rollout_priority",
    "round_to_budget",
    "sqrt_allocation",
    "v0_extra_rollouts",
    "xrpo_extra_rollouts",
]

# A count that is an integer in exact arithmetic may come out just above it in float32.
_CEIL_SLACK = 1e-4


def _signal(accuracy: Array, scaled: bool) -> Array:
    """Sum of |advantage| a rollout, at this share of right ones."""
    spread = accuracy * (1.0 - accuracy)
    return 2.0 * (jnp.sqrt(jnp.maximum(spread, 0.0)) if scaled else spread)


def _check_accuracy(function: str, accuracy: Array) -> Array:
    checks.check_min_rank(function, 0, accuracy=accuracy)
    checks.check_float(function, accuracy=accuracy)
    return jnp.asarray(accuracy, jnp.float32)


def cumulative_advantage(accuracy: Array, *, rollouts: int, scaled: bool = False) -> Array:
    """Sum of |advantage| over a group with rewards 0 and 1.

        N 2 u (1 - u)            advantages r - mean
        N 2 sqrt(u (1 - u))      advantages (r - mean) / std, dividing by N

    It is largest at an accuracy of 1/2: hard prompts have little weight in a GRPO batch.

    Args:
      accuracy, rollouts, scaled: See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.cumulative_advantage(jnp.array([0.0, 0.25, 0.5]), rollouts=8).tolist()
      [0.0, 3.0, 4.0]

    References:
      DARS (arXiv:2508.13755); its released trainer.
    """
    accuracy = _check_accuracy("cumulative_advantage", accuracy)
    checks.check_positive("cumulative_advantage", finite=True, rollouts=rollouts)
    return rollouts * _signal(accuracy, scaled)


@traits(binary_rewards=True)
def dars_extra_rollouts(
    accuracy: Array,
    *,
    rollouts: int,
    max_rollouts: int,
    schedule: Literal["equal", "hardness"] = "equal",
    scaled: bool = False,
) -> Array:
    """The number of extra rollouts of a hard prompt after its first ones.

        target = peak                     schedule "equal", peak = cumulative_advantage at u = 1/2
        target = 2 (1 - u) peak           schedule "hardness"
        extra  = min(ceil((target - N S) / S), max_rollouts - N),   N S = cumulative_advantage at u
        extra  = 0 for u >= 1/2;   u = 0 counts as half a success, 1 / (2 N)

    The advantage is taken over all of a prompt's rollouts (``advantages.dr_grpo``); prompts that
    stay all right or all wrong are dropped (:func:`informative_groups`).

    Args:
      accuracy, rollouts, scaled: See the module.
      max_rollouts: Maximum in total, at least N. Released: 32 for "equal", 64 for "hardness".
      schedule: "equal" (equal treatment) or "hardness" (hardness weighted).

    Returns:
      ``[...]`` int32, in 0 .. max_rollouts - N.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> accuracy = jnp.array([0.0, 0.125, 0.25, 0.5])
      >>> jr.curation.dars_extra_rollouts(accuracy, rollouts=8, max_rollouts=32).tolist()
      [24, 11, 3, 0]

    References:
      DARS (arXiv:2508.13755); its released trainer. Counts that exact arithmetic makes integers
      are not rounded up by the error of float32.
    """
    function = "dars_extra_rollouts"
    accuracy = _check_accuracy(function, accuracy)
    checks.check_positive(function, finite=True, rollouts=rollouts)
    checks.check_option(function, "schedule", schedule, ("equal", "hardness"))
    if max_rollouts < rollouts:
        raise ValueError(
            f"{function}: max_rollouts must be at least rollouts; got {max_rollouts} and "
            f"{rollouts}."
        )
    hard = accuracy < 0.5
    u = jnp.where(accuracy <= 1e-6, 0.5 / rollouts, jnp.where(hard, accuracy, 0.25))
    signal = _signal(u, scaled)
    peak = _signal(jnp.float32(0.5), scaled)
    target = peak if schedule == "equal" else 2.0 * (1.0 - u) * peak
    # Divided by the first rollouts' number, so that the slack is one of counts.
    extra = jnp.ceil(rollouts * (target / signal - 1.0) - _CEIL_SLACK)
    extra = jnp.clip(extra, 0, max_rollouts - rollouts)
    return jnp.where(hard, extra, 0).astype(jnp.int32)


@traits(binary_rewards=True)
def dars_keep(rewards: Array, *, where: Array | None = None, upper: float = 1.0) -> Array:
    """The groups that train after the second stage: neither all wrong nor too easy.

        keep_g = 0 < mean of the rewards of g, over both stages < upper

    Args:
      rewards: ``[..., G]``, floating point, 0 or 1: of the first rollouts and the extra ones.
      where: bool ``[..., G]``, True for rollouts that exist; the rest may hold anything.
      upper: Share of right rollouts from which a group is dropped, in (0, 1].

    Returns:
      bool ``[..., G]``: ``where`` without the dropped groups.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
      >>> jr.curation.dars_keep(rewards)[:, 0].tolist()
      [False, True, False]

    References:
      DARS (arXiv:2508.13755); its released trainer.
    """
    stats.check_group("dars_keep", rewards, where)
    checks.check_share("dars_keep", zero=False, upper=upper)
    mean = stats.group_mean(rewards, where)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    return valid & (mean > 0) & (mean < upper)


def grpo_signal_utility(count: Array, success: Array) -> Array:
    """Expected number of wrong rollouts in a group that also has a right one.

        U(b, p) = b (1 - p) [1 - (1 - p)^(b - 1)]

    It approximates the expected sum of |advantage| of a group of b rollouts. As b grows it tends to
    b (1 - p), so without a cap the hardest prompts would get all rollouts.

    Args:
      count: b, ``[...]``, rollouts of the group, 0 or more.
      success: p, ``[...]`` (shapes broadcast), floating point, predicted share of right rollouts.

    Returns:
      float32, of the two shapes broadcast.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.grpo_signal_utility(jnp.array([1, 2, 4, 8]), jnp.float32(0.5)).tolist()
      [0.0, 0.5, 1.75, 3.96875]

    References:
      V0 (arXiv:2602.03584). PAPER reading, second-hand at the level of equations.
    """
    checks.check_float("grpo_signal_utility", success=success)
    count = jnp.asarray(count, jnp.float32)
    failure = 1.0 - jnp.asarray(success, jnp.float32)
    return count * failure * (1.0 - failure ** jnp.maximum(count - 1.0, 0.0))


def greedy_allocate(gains: Array, *, total: int, start: int | Array = 0) -> Array:
    """Allocates rollouts one by one, each to the prompt with the largest gain.

        b = start;  while sum(b) < total:  b_i += 1 for i = argmax_i gains[i, b_i]

    Ties go to the first prompt; a prompt at the end of its row gets no more. If the gains of each
    row decrease, this is the optimal allocation; if they increase, as those of
    :func:`grpo_signal_utility` do for small p, it may not be.

    Args:
      gains: ``[P, B]``, floating point: gain of prompt i by its (b + 1)-th rollout when it has b,
        so B is the maximum per prompt.
      total: Total rollouts, including those of ``start``.
      start: Rollouts that a prompt already has: an int, or integers ``[P]``.

    Returns:
      int32 ``[P]``; they add up to ``total`` unless all rows are full.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> p = jnp.array([0.25, 0.5, 0.75])
      >>> utility = jr.curation.grpo_signal_utility(jnp.arange(9), p[:, None])
      >>> jr.curation.greedy_allocate(jnp.diff(utility), total=12, start=2).tolist()
      [6, 4, 2]

    References:
      V0 (arXiv:2602.03584) and XRPO (arXiv:2510.06672). PAPER reading of both.
    """
    function = "greedy_allocate"
    checks.check_rank(function, 2, gains=gains)
    checks.check_float(function, gains=gains)
    checks.check_integer(function, start=start)
    checks.check_non_negative(function, finite=True, total=total)
    prompts, most = jnp.shape(gains)
    if isinstance(start, int | np.integer):
        if not 0 <= start <= most or start * prompts > total:
            raise ValueError(
                f"{function}: start={start} for each of {prompts} prompts must be within the "
                f"{most} of gains and total={total}."
            )
        start = np.full(prompts, start)
    checks.check_shape(function, "start", start, (prompts,))
    gains = jnp.asarray(gains, jnp.float32)

    counts = jnp.asarray(start, jnp.int32)
    if most == 0 or prompts == 0:
        return counts
    return _hand_out(gains, counts, total - jnp.sum(counts))


@jax.jit  # a loop of its own for each call would be compiled for each call
def _hand_out(gains: Array, counts: Array, rounds: Array) -> Array:
    """One rollout in each round, to the prompt that gains most by it."""
    most = gains.shape[-1]

    def give(_, counts):
        full = counts >= most
        gain = jnp.take_along_axis(gains, jnp.minimum(counts, most - 1)[:, None], axis=1)[:, 0]
        # argmax would give a NaN the rollout.
        gain = jnp.where(full | jnp.isnan(gain), -jnp.inf, gain)
        lucky = jnp.argmax(gain)
        return counts.at[lucky].add(jnp.where(gain[lucky] > -jnp.inf, 1, 0))

    return jax.lax.fori_loop(0, rounds, give, counts)


def best_allocate(utility: Array, *, total: int, low: int = 0) -> np.ndarray:
    """The allocation of the largest utility, by dynamic programming.

        argmax of sum over i of utility[i, b_i]   with  sum over i of b_i <= total,  low <= b_i <= B

    Exact even if gains increase, as those of :func:`grpo_signal_utility` do for hard prompts, which
    :func:`greedy_allocate` starves. Runs on the host, in time P total B.

    Args:
      utility: ``[P, B + 1]``, floating point: of 0 .. B rollouts; -inf or NaN forbids a number.
      total: See the module.
      low: Minimum rollouts of a prompt, from 0 to B.

    Returns:
      int32 ``[P]``; among equal utilities the fewest rollouts, from the last prompt on.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> p = jnp.array([0.25, 0.5, 0.75])
      >>> utility = jr.curation.grpo_signal_utility(jnp.arange(9), p[:, None])
      >>> jr.curation.best_allocate(utility, total=12, low=2).tolist()
      [8, 2, 2]

    References:
      V0 (arXiv:2602.03584) allocates greedily; the exact solution is ours.
    """
    function = "best_allocate"
    checks.check_rank(function, 2, utility=utility)
    checks.check_float(function, utility=utility)
    values = np.asarray(utility, np.float64)
    values = np.where(np.isnan(values), -np.inf, values)
    prompts, most = len(values), values.shape[1] - 1
    if not 0 <= low <= most or low * prompts > total:
        raise ValueError(
            f"{function}: low={low} for each of {prompts} prompts must be within the {most} of "
            f"utility and total={total}."
        )
    # best[t]: of the prompts so far, with t rollouts beyond low for each.
    free = total - low * prompts
    best, tables = np.zeros(free + 1), np.zeros((prompts, free + 1), np.int32)
    for i in range(prompts):
        value = np.full(free + 1, -np.inf)
        for more in range(min(most - low, free) + 1):
            other = best[: free + 1 - more] + values[i, low + more]
            better = other > value[more:]
            value[more:][better] = other[better]
            tables[i, more:][better] = more
        best = value
    if best[free] == -np.inf:
        raise ValueError(f"{function}: no allocation of total={total} has a finite utility.")
    counts, left = np.zeros(prompts, np.int32), free
    for i in reversed(range(prompts)):
        counts[i] = low + tables[i, left]
        left -= int(tables[i, left])
    return counts


@traits(spends_budget=True)
def v0_extra_rollouts(
    rates: Array, *, counts: Array, budget: int, max_rollouts: int, exact: bool = False
) -> np.ndarray:
    """Extra rollouts for the groups whose expected signal increases most.

        greedy_allocate (or best_allocate) of grpo_signal_utility, beyond the rollouts so far

    Runs on the host.

    Args:
      rates: ``[P]``, floating point: predicted share of right rollouts.
      counts: int ``[P]``, rollouts so far, the same for all prompts.
      budget: Rollouts to allocate, 0 or more.
      max_rollouts: Maximum rollouts of a prompt, including those so far.
      exact: Whether to use the optimal allocation, by dynamic programming; the greedy allocation
        starves hard prompts.

    Returns:
      int32 ``[P]``; they add up to ``budget`` unless every prompt has ``max_rollouts``.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> rates, counts = jnp.array([0.25, 0.5, 0.75]), np.full(3, 2)
      >>> options = {"counts": counts, "budget": 6, "max_rollouts": 8}
      >>> jr.curation.v0_extra_rollouts(rates, **options).tolist()
      [4, 2, 0]
      >>> jr.curation.v0_extra_rollouts(rates, exact=True, **options).tolist()
      [6, 0, 0]

    References:
      V0 (arXiv:2602.03584), where a value model predicts the rates and 2 to 128 rollouts go to a
      prompt. PAPER reading; the exact allocation is ours.
    """
    function = "v0_extra_rollouts"
    checks.check_rank(function, 1, rates=rates, counts=counts)
    checks.check_integer(function, counts=counts)
    checks.check_same_shape(function, rates=rates, counts=counts)
    checks.check_non_negative(function, finite=True, budget=budget)
    counts = np.asarray(counts)
    if len(set(counts.tolist())) > 1:
        raise ValueError(f"{function}: counts must be equal; got {counts.tolist()}.")
    low = int(counts[0]) if len(counts) else 0
    utility = grpo_signal_utility(np.arange(max_rollouts + 1), jnp.asarray(rates)[:, None])
    total = min(int(counts.sum()) + budget, max_rollouts * len(counts))
    if exact:
        return best_allocate(utility, total=total, low=low) - counts.astype(np.int32)
    gains = jnp.diff(utility, axis=-1)
    return np.asarray(greedy_allocate(gains, total=total, start=low)) - counts.astype(np.int32)


def sqrt_allocation(share: Array, variance: Array, *, mean_rollouts: float) -> Array:
    """Rollouts in proportion to the square root of the variance.

        n_b = mean_rollouts sqrt(v_b) / sum over j of share_j sqrt(v_j)

    Minimizes ``sum share v / n``, the variance of a mean over the batch, with
    ``sum share n = mean_rollouts``.

    Args:
      share: ``[..., Nb]``, floating point: the share of each bin (or prompt) in the batch, adding
        up to 1.
      variance: ``[..., Nb]``, floating point, not negative: p (1 - p) for rewards of 0 and 1.
      mean_rollouts: Mean rollouts per prompt, above 0.

    Returns:
      ``[..., Nb]`` float32, for :func:`round_to_budget`; ``mean_rollouts`` where no variance is
      above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> share, variance = jnp.array([0.5, 0.5]), jnp.array([0.09, 0.01])
      >>> jr.curation.sqrt_allocation(share, variance, mean_rollouts=4.0).round(2).tolist()
      [6.0, 2.0]

    References:
      The analysis of Rollout-GDRO (arXiv:2601.19280), PAPER reading; the proof is ours.
    """
    function = "sqrt_allocation"
    checks.check_min_rank(function, 1, share=share, variance=variance)
    checks.check_float(function, share=share, variance=variance)
    checks.check_same_shape(function, share=share, variance=variance)
    checks.check_positive(function, finite=True, mean_rollouts=mean_rollouts)
    spread = jnp.sqrt(jnp.maximum(jnp.asarray(variance, jnp.float32), 0.0))
    mean = jnp.sum(jnp.asarray(share, jnp.float32) * spread, axis=-1, keepdims=True)
    return jnp.where(
        mean > 0, mean_rollouts * spread / jnp.where(mean > 0, mean, 1.0), mean_rollouts
    )


def round_to_budget(
    rollouts: Array, *, total: int, low: int, high: int, counts: Array | None = None
) -> np.ndarray:
    """Integers within bounds and a budget, by the method of largest remainders.

        first:  n_b = floor(rollouts_b), clipped to [low, high]
        below the total:  n_b += 1 for the largest  rollouts_b - n_b  within bounds and total
        above the total:  n_b -= 1 for the smallest rollouts_b - n_b  within bounds

    With counts above 1 the total may not be reachable; the result is then below it. Runs on the
    host.

    Args:
      rollouts: ``[Nb]``, floating point: the target rollouts of each bin (or prompt).
      total: See the module; the bound on ``sum counts n``.
      low: Smallest number, 0 or more.
      high: Largest number, not below ``low``.
      counts: int ``[Nb]``, prompts of each bin; None for 1.

    Returns:
      int32 ``[Nb]``; a bin without prompts keeps its clipped floor.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> wanted = jnp.array([1.48, 5.93, 7.41])
      >>> jr.curation.round_to_budget(wanted, total=15, low=2, high=8).tolist()
      [2, 6, 7]

    References:
      Hamilton's method, for the fixed mean of Rollout-GDRO (arXiv:2601.19280).
    """
    function = "round_to_budget"
    checks.check_rank(function, 1, rollouts=rollouts)
    checks.check_float(function, rollouts=rollouts)
    checks.check_integer(function, counts=counts)
    wanted = np.asarray(rollouts, np.float64)
    prompts = np.ones(len(wanted), np.int64) if counts is None else np.asarray(counts, np.int64)
    checks.check_shape(function, "counts", prompts, wanted.shape)
    if not 0 <= low <= high:
        raise ValueError(f"{function}: low must be from 0 to high; got {low} and {high}.")
    if np.any(prompts < 0) or not np.all(np.isfinite(wanted)):
        raise ValueError(f"{function}: counts must not be negative and rollouts must be finite.")
    if low * int(prompts.sum()) > total:
        raise ValueError(
            f"{function}: low={low} for each of {int(prompts.sum())} prompts exceeds total={total}."
        )
    numbers = np.clip(np.floor(wanted + 1e-9), low, high).astype(np.int64)
    left = total - int(np.sum(prompts * numbers))
    while left < 0:
        able = (numbers > low) & (prompts > 0)
        b = int(np.argmin(np.where(able, wanted - numbers, np.inf)))
        numbers[b], left = numbers[b] - 1, left + int(prompts[b])
    while np.any(able := (numbers < high) & (prompts > 0) & (prompts <= left)):
        b = int(np.argmax(np.where(able, wanted - numbers, -np.inf)))
        numbers[b], left = numbers[b] + 1, left - int(prompts[b])
    return numbers.astype(np.int32)


@functools.lru_cache(maxsize=16)
def student_t_quantiles(level: float, size: int) -> np.ndarray:
    """Quantile ``1 - level / 2`` of Student's t with 1 .. size degrees of freedom, float32."""
    from scipy import special  # jax depends on it

    return special.stdtrit(np.arange(1, size + 1), 1.0 - level / 2).astype(np.float32)


def rollout_priority(
    std: Array,
    count: Array,
    total: int | Array,
    *,
    level: float = 0.05,
    bonus: float = 1.0,
    max_count: int = 1024,
) -> Array:
    """Priority of a prompt for the next rollout: the reduction of uncertainty of its mean reward.

        h(n)     = t_{1 - level/2, n - 1} s / sqrt(n)        half width of the interval
        priority = h(n) - h(n + 1) + bonus sqrt(log(1 + total) / n)

    A prompt with fewer than two rollouts has infinite priority. Where all rewards agree (s = 0)
    only the bonus acts. :func:`greedy_allocate` spends the budget of a round by the table of all
    counts::

        rollout_priority(std[:, None], jnp.arange(max_n), total)

    Args:
      std: ``[...]``, floating point, deviation of the prompt's rewards, dividing by n - 1.
      count: ``[...]``, n, integers (shapes broadcast), rollouts of the prompt so far.
      total: Rollouts of all prompts so far.
      level: 1 minus the confidence of the interval, in (0, 1).
      bonus: Weight of the exploration bonus, 0 or above.
      max_count: Length of the table of quantiles. The last one serves beyond it: with 1024 at the
        level 0.05, 0.13% too large at most.

    Returns:
      float32, of the two shapes broadcast.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> std, count = jnp.array([0.57735, 0.5, 0.0]), jnp.array([4, 4, 4])
      >>> jr.curation.rollout_priority(std, count, 12, bonus=0.0).round(4).tolist()
      [0.20..., 0.17..., 0.0]

    References:
      XRPO (arXiv:2510.06672). PAPER reading; the form of the bonus is a NOTES reading of two
      outlines by others: one has the root, as here, the other ``bonus log(1 + total) / n``.
    """
    function = "rollout_priority"
    checks.check_float(function, std=std)
    checks.check_integer(function, count=count)
    checks.check_non_negative(function, finite=True, bonus=bonus)
    if not 0 < level < 1:
        raise ValueError(f"{function}: level must be in (0, 1); got {level:g}.")
    table = student_t_quantiles(float(level), int(max_count))
    count = jnp.asarray(count, jnp.int32)
    n = jnp.maximum(count, 2)

    def half_width(n):
        quantile = jnp.asarray(table)[jnp.clip(n - 2, 0, max_count - 1)]
        return quantile * jnp.asarray(std, jnp.float32) / jnp.sqrt(n.astype(jnp.float32))

    explore = bonus * jnp.sqrt(jnp.log1p(jnp.asarray(total, jnp.float32)) / n)
    priority = half_width(n) - half_width(n + 1) + explore
    return jnp.where(count < 2, jnp.inf, priority)


@traits(spends_budget=True)
def xrpo_extra_rollouts(
    rewards: Array,
    *,
    budget: int,
    max_rollouts: int,
    where: Array | None = None,
    counts: Array | None = None,
    level: float = 0.05,
    bonus: float = 1.0,
) -> Array:
    """A round of XRPO: the next rollouts go to the prompts of the highest priority.

        one by one to the largest rollout_priority, with the deviations and the total before
        the round

    Before it every prompt has the same number of rollouts, 2 or more. XRPO has three rounds in all,
    and puts solved examples (:func:`nearest_solved`) before prompts that have only failed.

    Args:
      rewards: ``[P, G]``, floating point, of the rollouts so far.
      budget: Rollouts of this round, 0 or more.
      max_rollouts: Most rollouts of a prompt, including those so far.
      where: bool ``[P, G]``, True for rollouts that exist; the rest may hold anything.
      counts: int32 ``[P]``, rollouts so far, with those that have no reward; None for those of
        ``where``.
      level: As in :func:`rollout_priority`.
      bonus: As in :func:`rollout_priority`.

    Returns:
      int32 ``[P]``; they add up to ``budget`` unless every prompt has ``max_rollouts``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
      >>> jr.curation.xrpo_extra_rollouts(
      ...     rewards, budget=3, max_rollouts=16, bonus=0.0).tolist()
      [3, 0]

    References:
      XRPO (arXiv:2510.06672). PAPER reading; the bonus as in :func:`rollout_priority`.
    """
    function = "xrpo_extra_rollouts"
    checks.check_rank(function, 2, rewards=rewards)
    stats.check_group(function, rewards, where)
    checks.check_non_negative(function, finite=True, budget=budget)
    checks.check_count(function, max_rollouts=max_rollouts)
    count = stats.group_count(rewards, where)[:, 0].astype(jnp.int32)
    if counts is not None:
        checks.check_shape(function, "counts", counts, count.shape)
        count = jnp.asarray(counts, jnp.int32)
    std = stats.group_std(rewards, where)
    total = jnp.sum(count)
    table = rollout_priority(
        jnp.where(stats.group_is_constant(rewards, where), 0.0, std),
        jnp.arange(max_rollouts),
        total,
        level=level,
        bonus=bonus,
    )
    return greedy_allocate(table, total=total + budget, start=count) - count
