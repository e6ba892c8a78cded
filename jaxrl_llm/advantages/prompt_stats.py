"""DCPO (dynamic clipping): advantages standardized smoothly over all visits to a prompt.

- ``num_prompts``: Q, the prompts of the dataset, at least 1.
- ``rewards``: floating point ``[P, G]``, one per rollout.
- ``where``: bool ``[P, G]``, True for rollouts that take part; None for all. The others count in no
  statistic, get 0 and may hold anything.
- A wrong dtype raises TypeError; shapes that do not match, and an option out of its range, raise
  ValueError. A Transform checks its arrays on update.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.advantages import tracker
from jaxrl_llm.core import Array, Transform, checks, masking, prints_as_call, stats

__all__ = [
    "PromptStats",
    "prompt_stats_init",
    "prompt_stats_update",
    "smooth_advantage",
    "smooth_standardization",
]


class PromptStats(NamedTuple):
    """Moments of the rewards of each prompt of the dataset over all its visits.

    Attributes:
      mean: ``[Q]`` float32.
      var: ``[Q]`` float32: mean variance within a visit plus variance of the visits' means.
      count: ``[Q]`` int32, number of visits.
      least: ``[Q]`` float32, smallest reward so far; 0 before the first visit, like the others.
      greatest: ``[Q]`` float32, largest reward so far.
    """

    mean: Array
    var: Array
    count: Array
    least: Array
    greatest: Array


def prompt_stats_init(num_prompts: int) -> PromptStats:
    """The statistics before any visit.

    Args:
      num_prompts: See the module.

    Returns:
      ``PromptStats`` with arrays ``[Q]``.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.advantages.prompt_stats_init(2).count.tolist()
      [0, 0]

    References:
      DCPO (arXiv:2509.02333).
    """
    tracker.check_num_prompts("prompt_stats_init", num_prompts)
    # A separate array for each field, so that a train step can donate it.
    mean, var, least, greatest = (jnp.zeros(num_prompts, jnp.float32) for _ in range(4))
    count = jnp.zeros(num_prompts, jnp.int32)
    return PromptStats(count=count, mean=mean, var=var, least=least, greatest=greatest)


def prompt_stats_update(
    state: PromptStats, prompt_ids: Array, rewards: Array, *, where: Array | None = None
) -> PromptStats:
    """The statistics after the prompts of a batch were visited.

        mean <- (n mean + m) / (n + 1)
        var  <- (n var + s^2 + n / (n + 1) (m - mean)^2) / (n + 1)

    m and s^2 are the mean and the unbiased variance (0 for one rollout) of a row's unmasked
    rewards, and n is the number of earlier visits. Each row with an unmasked rollout is a visit;
    the order of several rows of one prompt does not matter.

    Args:
      rewards, where: See the module.
      state: ``PromptStats`` over Q prompts.
      prompt_ids: integer ``[P]``, in [0, Q); a row with another id changes nothing.

    Returns:
      The next ``PromptStats``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> state = jr.advantages.prompt_stats_init(1)
      >>> for row in ([1.0, 0.0], [1.0, 1.0]):
      ...     state = jr.advantages.prompt_stats_update(state, jnp.array([0]), jnp.array([row]))
      >>> state.mean.tolist(), state.var.tolist(), state.count.tolist()
      ([0.75], [0.3125], [2])

    References:
      DCPO (arXiv:2509.02333), and its released code, which uses only the last of several rows.
    """
    tracker.check_rows("prompt_stats_update", prompt_ids, rewards, where)
    size = state.mean.shape[0]
    mean, var, least, greatest, visited = _moments(rewards, where)
    row = tracker.rows_of(prompt_ids, size, visited)

    def added(x):
        return jnp.zeros(size, jnp.float32).at[row].add(x, mode="drop")

    def at_row(x):
        return x[jnp.minimum(row, size - 1)]

    # Moments of the batch's visits to each prompt in two passes, then merged with the state.
    new = added(jnp.ones_like(mean))
    new_mean = added(mean) / jnp.maximum(new, 1.0)
    new_sum = added(var + (mean - at_row(new_mean)) ** 2)
    mean, var = _merge(
        state.mean, state.var, state.count.astype(jnp.float32), new_mean, new_sum, new
    )
    seen, old = new > 0, _before_any(state)
    return PromptStats(
        mean=jnp.where(seen, mean, state.mean),
        var=jnp.where(seen, var, state.var),
        count=state.count + new.astype(jnp.int32),
        least=jnp.where(seen, old.least.at[row].min(least, mode="drop"), state.least),
        greatest=jnp.where(seen, old.greatest.at[row].max(greatest, mode="drop"), state.greatest),
    )


def _before_any(state: PromptStats) -> PromptStats:
    """The statistics with extremes that give way to any reward where there was no visit yet."""
    none = state.count == 0
    return state._replace(
        least=jnp.where(none, jnp.inf, state.least),
        greatest=jnp.where(none, -jnp.inf, state.greatest),
    )


def _moments(rewards: Array, where: Array | None):
    """Mean, unbiased variance, least, greatest of each row's unmasked rewards; whether any is."""
    valid = True if where is None else where
    rewards = masking.zero_masked(rewards, where)
    return (
        masking.masked_mean(rewards, where, axis=-1),
        masking.masked_var(rewards, where, axis=-1, ddof=1),
        jnp.min(rewards, axis=-1, where=valid, initial=jnp.inf),
        jnp.max(rewards, axis=-1, where=valid, initial=-jnp.inf),
        stats.group_count(rewards, where)[..., 0] > 0,
    )


def _merge(mean, var, n, new_mean, new_sum, new):
    """Mean and variance of n visits and ``new`` more, whose variances add up to ``new_sum``."""
    total = jnp.maximum(n + new, 1.0)
    share = new / total
    merged = (n * var + new_sum + n * share * (new_mean - mean) ** 2) / total
    return mean + share * (new_mean - mean), merged


def smooth_advantage(current: Array, total: Array, visits: Array) -> Array:
    """The smaller of two blends of this visit's advantage and the advantage over all visits.

        S1 = ((i - 1) A_now + A_all) / i,   S2 = (A_now + (i - 1) A_all) / i
        A = S1 where |S1| < |S2|, else S2

    At the first visit (i = 1) the two advantages are equal.

    Args:
      current: ``[...]``, floating point: the advantage by the statistics of this visit.
      total: ``[...]``, floating point: the advantage by the statistics over all visits.
      visits: Number of visits, including this one; broadcasts to ``[...]``.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.smooth_advantage(jnp.float32(0.8), jnp.float32(0.2), 4).round(4)
      Array(0.35, dtype=float32)

    References:
      DCPO (arXiv:2509.02333), and its released code.
    """
    checks.check_float("smooth_advantage", current=current, total=total)
    checks.check_same_shape("smooth_advantage", current=current, total=total)
    current, total = jnp.asarray(current, jnp.float32), jnp.asarray(total, jnp.float32)
    share = 1.0 / jnp.asarray(visits, jnp.float32)
    first = (1.0 - share) * current + share * total
    second = share * current + (1.0 - share) * total
    return jnp.where(jnp.abs(first) < jnp.abs(second), first, second)


@dataclasses.dataclass(frozen=True)
class _VisitsInit:
    num_prompts: int

    def __call__(self) -> PromptStats:
        return prompt_stats_init(self.num_prompts)


@dataclasses.dataclass(frozen=True)
class _VisitsUpdate:
    def __call__(self, rewards, state, *, prompt_ids, where=None, **context):
        tracker.check_rows("smooth_standardization", prompt_ids, rewards, where)
        mean, var, least, greatest, visited = _moments(rewards, where)
        arrays = (x.astype(jnp.float32) for x in _before_any(state))
        old = PromptStats(*(tracker.gather(x, prompt_ids) for x in arrays))
        all_mean, all_var = _merge(old.mean, old.var, old.count, mean, var, 1.0)
        varies = jnp.minimum(old.least, least) < jnp.maximum(old.greatest, greatest)
        valid_rewards = masking.zero_masked(rewards, where)
        now = _standardized(valid_rewards, mean, var, least < greatest)
        overall = _standardized(valid_rewards, all_mean, all_var, varies)
        advantages = smooth_advantage(now, overall, old.count[..., None] + 1.0)
        next_state = prompt_stats_update(state, prompt_ids, rewards, where=where)
        return masking.zero_masked(advantages, where), next_state


def _standardized(rewards: Array, mean: Array, var: Array, varies: Array) -> Array:
    """Rewards minus a mean over a deviation, one of each a row; 0 where they do not vary."""
    # A NaN compares as not varying; an unmasked one has to be seen.
    varies = ((varies | jnp.isnan(mean)) & ~(var <= 0))[..., None]
    std = jnp.sqrt(jnp.where(varies, var[..., None], 1.0))
    return jnp.where(varies, (rewards - mean[..., None]) / std, 0.0)


@prints_as_call
def smooth_standardization(*, num_prompts: int) -> Transform:
    """DCPO's advantages: standardized over this visit and over all visits, and blended.

        A_now = (r - m) / s         mean and unbiased deviation of this visit's rewards
        A_all = (r - M) / S         the same over all visits, this one included
        A = smooth_advantage(A_now, A_all, i) at the i-th visit

    A term whose deviation is 0 is 0, without an eps. A group of equal rewards therefore still gets
    an advantage if the prompt's earlier rewards were different, and a single rollout is compared
    with the earlier visits. The transform reads ``prompt_ids [P]`` from the batch; an id outside
    [0, num_prompts) gives NaN to its unmasked rollouts and changes no entry of the state. If a
    batch has several rows of one prompt, each counts the visits before the batch and its own row.

    Args:
      num_prompts: See the module.

    Returns:
      A Transform ``rewards [P, G] -> advantages [P, G]`` whose state is :class:`PromptStats`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> smooth = jr.advantages.smooth_standardization(num_prompts=1)
      >>> ids, state = jnp.array([0]), smooth.init()
      >>> first, state = smooth.update(jnp.array([[1.0, 0.0]]), state, prompt_ids=ids)
      >>> second, state = smooth.update(jnp.array([[1.0, 1.0]]), state, prompt_ids=ids)
      >>> first.round(4), second.round(4)
      (Array([[ 0.7071, -0.7071]], dtype=float32), Array([[0.2236, 0.2236]], dtype=float32))

    References:
      DCPO (arXiv:2509.02333), and its released code. Constant rewards are detected by the smallest
      and largest reward, since the deviation of equal float32 numbers need not be 0.
    """
    tracker.check_num_prompts("smooth_standardization", num_prompts)
    return Transform(_VisitsInit(num_prompts), _VisitsUpdate())
