"""How many rollouts each prompt gets.

- ``accuracy``: floating point ``[...]``, u in [0, 1], the share of right ones among ``rollouts``.
- ``rollouts``: N, above 0, the (first) rollouts of a prompt.
- ``scaled``: whether the advantages are divided by their deviation.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks

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

    Greatest at an accuracy of 1/2: hard prompts weigh little in a GRPO batch.

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


def dars_extra_rollouts(
    accuracy: Array,
    *,
    rollouts: int,
    max_rollouts: int,
    schedule: Literal["equal", "hardness"] = "equal",
    scaled: bool = False,
) -> Array:
    """How many more rollouts a hard prompt gets after its first ones.

        target = peak                     schedule "equal", peak = cumulative_advantage at u = 1/2
        target = 2 (1 - u) peak           schedule "hardness"
        extra  = min(ceil((target - N S) / S), max_rollouts - N),   N S = cumulative_advantage at u
        extra  = 0 for u >= 1/2;   u = 0 counts as half a success, 1 / (2 N)

    The advantage is taken over all of a prompt's rollouts (``advantages.dr_grpo``); prompts that
    stay all right or all wrong are dropped (:func:`informative_groups`).

    Args:
      accuracy, rollouts, scaled: See the module.
      max_rollouts: Greatest number in all, at least N. Released: 32 for "equal", 64 for "hardness".
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


def grpo_signal_utility(count: Array, success: Array) -> Array:
    """Expected number of wrong rollouts in a group that also has a right one.

        U(b, p) = b (1 - p) [1 - (1 - p)^(b - 1)]

    It stands for the expected sum of |advantage| of a group of b rollouts. As b grows it tends to
    b (1 - p), so without a cap the hardest prompts would take every rollout.

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
    """Hands out rollouts one by one, each to the prompt that gains most by it.

        b = start;  while sum(b) < total:  b_i += 1 for i = argmax_i gains[i, b_i]

    Ties go to the first prompt; a prompt at the end of its row gets no more. Where the gains of
    each row fall, this is the best allocation; where they rise, as those of
    :func:`grpo_signal_utility` do for small p, it need not be.

    Args:
      gains: ``[P, B]``, floating point: what prompt i gains by its (b + 1)-th rollout when it has
        b, so B is the most a prompt can have.
      total: Rollouts in all, those of ``start`` among them.
      start: Rollouts that a prompt has beforehand: an int, or integers ``[P]``.

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

    def give(_, counts):
        full = counts >= most
        gain = jnp.take_along_axis(gains, jnp.minimum(counts, most - 1)[:, None], axis=1)[:, 0]
        # argmax would give a NaN the rollout.
        gain = jnp.where(full | jnp.isnan(gain), -jnp.inf, gain)
        lucky = jnp.argmax(gain)
        return counts.at[lucky].add(jnp.where(gain[lucky] > -jnp.inf, 1, 0))

    counts = jnp.asarray(start, jnp.int32)
    if most == 0 or prompts == 0:
        return counts
    return jax.lax.fori_loop(0, total - jnp.sum(counts), give, counts)


@functools.lru_cache(maxsize=16)
def _t_quantiles(level: float, size: int) -> np.ndarray:
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
    """Which prompt should get the next rollout: the one whose mean reward becomes better known.

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
      XRPO (arXiv:2510.06672). ABSTRACT reading of the bonus (its arguments; the form is the usual
      one), PAPER reading of the interval and the sum.
    """
    function = "rollout_priority"
    checks.check_float(function, std=std)
    checks.check_integer(function, count=count)
    checks.check_non_negative(function, finite=True, bonus=bonus)
    if not 0 < level < 1:
        raise ValueError(f"{function}: level must be in (0, 1); got {level:g}.")
    table = _t_quantiles(float(level), int(max_count))
    count = jnp.asarray(count, jnp.int32)
    n = jnp.maximum(count, 2)

    def half_width(n):
        quantile = jnp.asarray(table)[jnp.clip(n - 2, 0, max_count - 1)]
        return quantile * jnp.asarray(std, jnp.float32) / jnp.sqrt(n.astype(jnp.float32))

    explore = bonus * jnp.sqrt(jnp.log1p(jnp.asarray(total, jnp.float32)) / n)
    priority = half_width(n) - half_width(n + 1) + explore
    return jnp.where(count < 2, jnp.inf, priority)
