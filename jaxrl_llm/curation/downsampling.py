"""Selection of training rollouts from a larger group: extremes, clean ones, pairs.

Shared arguments:
  ``rewards``: ``[..., G]``, floating point, of the rollouts of a group.
  ``where``: bool ``[..., G]``, True for the rollouts that take part; the others are not read and
    never chosen. None keeps all.

Ties are broken by position. All raise TypeError for a wrong dtype and ValueError for a wrong shape
or an option out of range.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "Pairs",
    "best_constrained",
    "constrained_pairs",
    "contrasts",
    "filtration_weights",
    "first_rollouts",
    "r_squared",
    "resample_groups",
    "resample_on_correct",
    "resample_rollouts",
    "select_extremes",
    "trace_penalty",
]


def first_rollouts(where: Array, *, count: int) -> Array:
    """The first rollouts of each group that take part.

        keep_i = where_i  and  fewer than count before it

    Args:
      where: bool ``[..., G]``.
      count: Number of rollouts, not negative.

    Returns:
      bool ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.first_rollouts(jnp.array([False, True, True, True]), count=2).tolist()
      [False, True, True, False]

    References:
      TTRL (arXiv:2504.16084) votes with 64 rollouts and trains on the first 32 of them.
    """
    checks.check_min_rank("first_rollouts", 1, where=where)
    checks.check_bool("first_rollouts", where=where)
    checks.check_non_negative("first_rollouts", finite=True, count=count)
    return jnp.asarray(where) & (jnp.cumsum(where, axis=-1) <= count)


def select_extremes(rewards: Array, *, best: int, worst: int, where: Array | None = None) -> Array:
    """The rollouts with the highest rewards, and those with the lowest among the rest.

        keep = best of the greatest  +  worst of the least

    Among equal rewards the earlier rollout comes first, at both ends. A group of no more than
    ``best + worst`` is unchanged. The advantage is computed over the selected rollouts.

    Args:
      rewards, where: See the module.
      best: Number of rollouts with the highest rewards, not negative.
      worst: Number of rollouts with the lowest rewards, not negative.

    Returns:
      bool ``[..., G]``, for the slot ``curation``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([5.0, 1.0, 3.0, 2.0, 4.0, 0.0])
      >>> jr.curation.select_extremes(rewards, best=2, worst=2).tolist()
      [True, True, False, False, True, True]

    References:
      Sol-RL (arXiv:2604.06916), CODE reading: 12 best and 12 worst of 96 candidates that a
      low-precision policy samples; they are generated again and trained in full precision.
    """
    function = "select_extremes"
    stats.check_group(function, rewards, where)
    checks.check_non_negative(function, finite=True, best=best, worst=worst)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    rewards = masking.zero_masked(rewards, where)
    # A NaN comes first, so that it is seen.
    falling = jnp.where(jnp.isnan(rewards), -jnp.inf, -rewards)
    _, from_top = stats.order_and_ranks(jnp.where(valid, falling, jnp.inf))
    top = valid & (from_top < best)
    rest = valid & ~top
    _, from_bottom = stats.order_and_ranks(jnp.where(rest, rewards, jnp.inf))
    return top | (rest & (from_bottom < worst))


def filtration_weights(
    rewards: Array,
    *,
    rule: Literal["best", "best_random", "best_worst", "power"] = "best_worst",
    where: Array | None = None,
    power: float | None = None,
) -> Array:
    """Sampling weights of rollouts: larger where the reward is more reliable.

        "best"          1 for the best
        "best_random"   0.4 for the best, 0.1 for every other one
        "best_worst"    1 for the best and the worst
        "power"         |reward|^power

    A reward model is most reliable at its extremes. Use :func:`r_squared` on rollouts of known
    quality to choose a rule. Among equal rewards the last is the best and the first the worst.

    Args:
      rewards, where: See the module.
      rule: As above.
      power: Exponent, not negative; only with "power". None means 2.

    Returns:
      ``[..., G]`` float32, not negative, 0 where dropped; for :func:`resample_rollouts`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([0.0, 1.0, 2.0, 3.0])
      >>> jr.curation.filtration_weights(rewards).tolist()
      [1.0, 0.0, 0.0, 1.0]

    References:
      PF-PPO (arXiv:2409.06957); ties as in the released code, which sorts. verl takes all
      rollouts that equal the extremes of the batch, not of the group.
    """
    function = "filtration_weights"
    stats.check_group(function, rewards, where)
    checks.check_option(function, "rule", rule, ("best", "best_random", "best_worst", "power"))
    if rule != "power":
        checks.check_no_effect(function, f"with rule={rule!r}", power=power)
    checks.check_non_negative(function, finite=True, power=power)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    rewards = masking.zero_masked(rewards, where)
    if rule == "power":
        return masking.zero_masked(jnp.abs(rewards) ** (2.0 if power is None else power), where)
    _, rank = stats.order_and_ranks(jnp.where(valid, rewards, jnp.inf))
    best = valid & (rank == jnp.sum(valid, axis=-1, keepdims=True) - 1)
    if rule == "best":
        return best.astype(jnp.float32)
    if rule == "best_worst":
        return (best | (valid & (rank == 0))).astype(jnp.float32)
    return jnp.where(best, 0.4, jnp.where(valid, 0.1, 0.0)).astype(jnp.float32)


def resample_rollouts(key: Array, weights: Array, *, count: int) -> Array:
    """Draws rollouts of a batch with replacement.

        P(i) = weights_i / sum of weights

    Args:
      key: Typed PRNG key.
      weights: ``[...]``, floating point, not negative, such as :func:`filtration_weights`. If
        all are 0, the draw is uniform.
      count: Number of draws, at least 1; the released code draws as many as there are rollouts.

    Returns:
      int32 ``[count]``, indices into the flattened ``weights``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.resample_rollouts(
      ...     jax.random.key(0), jnp.array([[0.0, 0.0], [0.0, 2.0]]), count=3).tolist()
      [3, 3, 3]

    References:
      PF-PPO (arXiv:2409.06957).
    """
    function = "resample_rollouts"
    checks.check_min_rank(function, 1, weights=weights)
    checks.check_float(function, weights=weights)
    checks.check_positive(function, finite=True, count=count)
    weights = jnp.ravel(jnp.asarray(weights, jnp.float32))
    weights = jnp.where(jnp.any(weights > 0), weights, 1.0)
    drawn = jax.random.categorical(key, jnp.log(weights), shape=(count,))
    return drawn.astype(jnp.int32)


def resample_groups(
    key: Array,
    rewards: Array,
    *,
    count: int,
    rule: Literal["best", "best_random", "best_worst", "power"] = "best_worst",
    where: Array | None = None,
    power: float | None = None,
) -> Array:
    """Number of times that each rollout of a group trains, drawn by the reliability of its reward.

        times ~ multinomial(count, weights / sum of weights),   weights: filtration_weights

    A group whose weights are all 0 is drawn uniformly; a group without rollouts is not drawn.

    Args:
      key: Typed PRNG key.
      rewards, where: See the module.
      count: Draws of each group, at least 1.
      rule, power: As in :func:`filtration_weights`.

    Returns:
      int32 ``[..., G]``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([0.0, 1.0, 2.0, 3.0])
      >>> times = jr.curation.resample_groups(jax.random.key(0), rewards, count=6)
      >>> int(times.sum()), times[1:3].tolist()
      (6, [0, 0])

    References:
      PF-PPO (arXiv:2409.06957), which draws over the batch; here each group has as many draws.
    """
    function = "resample_groups"
    checks.check_positive(function, finite=True, count=count)
    weights = filtration_weights(rewards, rule=rule, where=where, power=power)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    some = jnp.any(weights > 0, axis=-1, keepdims=True)
    weights = jnp.where(some, weights, jnp.where(valid, 1.0, 0.0))
    there = jnp.any(valid, axis=-1, keepdims=True)
    logits = jnp.where(there, jnp.log(weights), 0.0)
    size = jnp.shape(rewards)[-1]
    drawn = jax.random.categorical(key, logits, shape=(count, *jnp.shape(rewards)[:-1]))
    times = jnp.sum(jax.nn.one_hot(drawn, size, dtype=jnp.int32), axis=0)
    return jnp.where(there, times, 0)


def contrasts(rewards: Array, *, count: int, where: Array | None = None) -> Array:
    """Half of the training rollouts from the top of a group, the other half from its bottom.

        select_extremes(rewards, best=floor(count / 2), worst=ceil(count / 2))

    Args:
      rewards, where: See the module.
      count: Number of rollouts of a group that train, at least 1.

    Returns:
      bool ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([0.3, 0.9, 0.1, 0.5, 0.7, 0.2, 0.8, 0.4])
      >>> jnp.flatnonzero(jr.curation.contrasts(rewards, count=4)).tolist()
      [1, 2, 5, 6]

    References:
      Sol-RL (arXiv:2604.06916), CODE reading, where a tied rollout may be in both halves.
    """
    checks.check_positive("contrasts", finite=True, count=count)
    return select_extremes(rewards, best=count // 2, worst=count - count // 2, where=where)


def r_squared(rewards: Array, quality: Array, *, weights: Array | None = None) -> Array:
    """Share of the variance of the true quality that a linear function of the reward explains.

        R^2 = cov(r, y)^2 / (var(r) var(y)),   over all entries, weighted

    Use the rule of :func:`filtration_weights` with the largest value on a probe set.

    Args:
      rewards: ``[...]``, floating point.
      quality: ``[...]``, floating point, the true scores.
      weights: ``[...]``, floating point, not negative; entries of weight 0 are not read. None
        for equal ones.

    Returns:
      float32 ``[]`` in [0, 1]; 0 where either does not vary.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, quality = jnp.arange(4.0), jnp.array([0.0, 1.0, 0.0, 1.0])
      >>> round(float(jr.curation.r_squared(rewards, quality)), 4)
      0.2

    References:
      PF-PPO (arXiv:2409.06957), the choice of its rule.
    """
    function = "r_squared"
    checks.check_min_rank(function, 1, rewards=rewards, quality=quality)
    checks.check_float(function, rewards=rewards, quality=quality, weights=weights)
    checks.check_same_shape(function, rewards=rewards, quality=quality, weights=weights)
    w = jnp.ones(jnp.shape(rewards)) if weights is None else jnp.asarray(weights, jnp.float32)
    used = w > 0
    x, y = masking.zero_masked(rewards, used), masking.zero_masked(quality, used)
    total = jnp.maximum(jnp.sum(w), jnp.finfo(jnp.float32).tiny)
    x, y = x - jnp.sum(w * x) / total, y - jnp.sum(w * y) / total
    var_x, var_y, cov = jnp.sum(w * x * x), jnp.sum(w * y * y), jnp.sum(w * x * y)
    varies = (var_x > 0) & (var_y > 0)
    # One deviation at a time: the product of two small variances would vanish.
    safe_x, safe_y = jnp.where(varies, var_x, 1.0), jnp.where(varies, var_y, 1.0)
    r = (cov / jnp.sqrt(safe_x)) / jnp.sqrt(safe_y)
    return jnp.where(varies, jnp.minimum(r * r, 1.0), 0.0)


def trace_penalty(
    tool_errors: Array,
    tool_calls: Array,
    *,
    answers: Array,
    opened: Array,
    closed: Array,
    turns: Array,
) -> Array:
    """A penalty for tool errors and format errors in the trace of an agent.

        tools  = tool_errors / tool_calls,  1/2 without a call
        format = 1                              no tag, opened or closed != answers, or no turn
                 min((answers - 1) / turns, 1)  else
        penalty = tools + format

    Args:
      tool_errors: ``[...]`` integers, number of failed calls.
      tool_calls: ``[...]`` integers.
      answers: ``[...]`` integers, pairs of answer tags.
      opened: ``[...]`` integers, opening answer tags.
      closed: ``[...]`` integers, closing answer tags.
      turns: ``[...]`` integers, turns of the assistant.

    Returns:
      ``[...]`` float32 in [0, 2], for :func:`resample_on_correct`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> one = jnp.array([1, 1])
      >>> jr.curation.trace_penalty(
      ...     jnp.array([1, 0]), jnp.array([4, 0]), answers=one, opened=one, closed=one,
      ...     turns=one).tolist()
      [0.25, 0.5]

    References:
      rStar2-Agent (arXiv:2508.20722), GRPO-RoC; the released code.
    """
    function = "trace_penalty"
    checks.check_integer(function, tool_errors=tool_errors, tool_calls=tool_calls, answers=answers)
    checks.check_integer(function, opened=opened, closed=closed, turns=turns)
    checks.check_same_shape(
        function,
        tool_errors=tool_errors,
        tool_calls=tool_calls,
        answers=answers,
        opened=opened,
        closed=closed,
        turns=turns,
    )
    calls = jnp.asarray(tool_calls, jnp.float32)
    tools = jnp.where(calls > 0, jnp.asarray(tool_errors) / jnp.maximum(calls, 1.0), 0.5)
    opened, closed, answers = jnp.asarray(opened), jnp.asarray(closed), jnp.asarray(answers)
    broken = (opened == 0) | (closed == 0) | (opened != answers) | (closed != answers)
    repeated = jnp.minimum((answers - 1) / jnp.maximum(turns, 1), 1.0)
    form = jnp.where(broken | (jnp.asarray(turns) == 0), 1.0, repeated)
    return (tools + form).astype(jnp.float32)


def resample_on_correct(
    rewards: Array,
    *,
    count: int,
    penalty: Array | None = None,
    min_wrong: int = 2,
    min_right: int = 2,
    where: Array | None = None,
) -> Array:
    """Clean correct traces and the first wrong ones, in the proportions of the group.

        a = round(count wrong / N), half to even;   b = count - a
        a = min(min_wrong, wrong) where a is not above that, and b = count - a
        b = min(min_right, right) where b is not above that, and a = count - b
        keep the b right ones of the lowest penalty and the first a wrong ones

    A rollout is correct if its reward is above 0. A group of fewer than ``count`` rollouts is
    dropped, and a group of exactly ``count`` is unchanged. Drop groups with equal rewards before,
    with :func:`informative_groups`.

    Args:
      rewards, where: See the module.
      count: Number of rollouts of a group that train, at least 1.
      penalty: ``[..., G]``, floating point, such as :func:`trace_penalty`; None for equal
        penalties, which keep the first rollouts.
      min_wrong: Minimum number of wrong rollouts, if the group has so many; not negative.
      min_right: Minimum number of correct rollouts; with ``min_wrong`` at most ``count``.

    Returns:
      bool ``[..., G]``, for the slot ``curation``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
      >>> penalty = jnp.array([0.5, 0.0, 1.0, 0.0, 0.0, 0.0])
      >>> jr.curation.resample_on_correct(
      ...     rewards, penalty=penalty, count=4, min_wrong=1, min_right=1).tolist()
      [True, True, False, True, True, False]

    References:
      rStar2-Agent (arXiv:2508.20722), GRPO-RoC, 16 of 32. The released code, which rounds both
      shares and fails where they do not add up to ``count``; the paper draws right traces at random
      by the inverse of their penalty.
    """
    function = "resample_on_correct"
    stats.check_group(function, rewards, where)
    penalty = jnp.zeros(jnp.shape(rewards)) if penalty is None else penalty
    checks.check_min_rank(function, 1, penalty=penalty)
    checks.check_float(function, penalty=penalty)
    checks.check_same_shape(function, rewards=rewards, penalty=penalty)
    checks.check_positive(function, finite=True, count=count)
    checks.check_non_negative(function, finite=True, min_wrong=min_wrong, min_right=min_right)
    if min_wrong + min_right > count:
        raise ValueError(
            f"{function}: min_wrong + min_right must be at most count={count}; got "
            f"{min_wrong} + {min_right}."
        )
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    right = valid & (masking.zero_masked(rewards, where) > 0)
    wrong = valid & ~right
    size, rights, wrongs = (
        jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.int32) for x in (valid, right, wrong)
    )
    # Integers, so that a half is exactly one.
    some = jnp.maximum(size, 1)
    floor, rest = wrongs * count // some, wrongs * count % some
    a = floor + ((2 * rest > some) | ((2 * rest == some) & (floor % 2 == 1)))
    b = count - a
    least = jnp.minimum(min_wrong, wrongs)
    a, b = jnp.where(a <= least, least, a), jnp.where(a <= least, count - least, b)
    least = jnp.minimum(min_right, rights)
    a, b = jnp.where(b <= least, count - least, a), jnp.where(b <= least, least, b)
    tidy = jnp.where(right, masking.zero_masked(penalty, right), jnp.inf)
    _, rank = stats.order_and_ranks(tidy)
    chosen = (right & (rank < b)) | (wrong & (jnp.cumsum(wrong, axis=-1) <= a))
    return jnp.where(size > count, chosen, valid & (size == count))


class Pairs(NamedTuple):
    """A better and a worse rollout of each group.

    Attributes:
      chosen: int32 ``[...]``, an index in the group; -1 where there is no pair.
      rejected: int32 ``[...]``, likewise.
      where: bool ``[...]``, True where there is a pair.
    """

    chosen: Array
    rejected: Array
    where: Array


def constrained_pairs(rewards: Array, *, satisfied: Array, where: Array | None = None) -> Pairs:
    """The best rollout that satisfies all constraints, against the worst that violates one.

        chosen   = argmax of rewards among the satisfied
        rejected = argmin of rewards among the violating, or among all where none violates

    A group without a satisfied rollout has no pair, and neither has a group whose chosen and
    rejected rollout are the same.

    Args:
      rewards, where: See the module.
      satisfied: bool ``[..., G]``, True where all judges agree.

    Returns:
      :class:`Pairs`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> pairs = jr.curation.constrained_pairs(
      ...     jnp.array([1.0, 2.0, -1.0]), satisfied=jnp.array([True, False, True]))
      >>> int(pairs.chosen), int(pairs.rejected), bool(pairs.where)
      (0, 1, True)

    References:
      CGPO (arXiv:2409.20370), its CODPO. The code that we read multiplies rewards by the verdict,
      which chooses a violating response if rewards are negative; here it cannot be chosen.
    """
    function = "constrained_pairs"
    stats.check_group(function, rewards, where)
    checks.check_min_rank(function, 1, satisfied=satisfied)
    checks.check_bool(function, satisfied=satisfied)
    checks.check_same_shape(function, rewards=rewards, satisfied=satisfied)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    rewards = masking.zero_masked(rewards, where)
    good, bad = valid & satisfied, valid & ~jnp.asarray(satisfied)
    bad = jnp.where(jnp.any(bad, axis=-1, keepdims=True), bad, valid)
    chosen = jnp.argmax(jnp.where(good, rewards, -jnp.inf), axis=-1)
    rejected = jnp.argmin(jnp.where(bad, rewards, jnp.inf), axis=-1)
    use = jnp.any(good, axis=-1) & (chosen != rejected)
    chosen, rejected = (jnp.where(use, x, -1).astype(jnp.int32) for x in (chosen, rejected))
    return Pairs(chosen, rejected, use)


def best_constrained(
    rewards: Array,
    *,
    order: Array | None = None,
    reference: Array | None = None,
    ties: Literal["first", "all"] = "first",
    where: Array | None = None,
) -> Array:
    """The reward of the best rollout of each group, 0 for the others; an advantage for imitation.

        A_i = rewards_i    i = argmax of order among those with rewards above 0
        A_i = rewards_i    the best of the reference answers, if no other one is above 0

    Args:
      rewards, where: See the module; ``rewards.constrained_rewards(soft=False)``.
      order: ``[..., G]``, floating point, what decides which is the best, such as the rewards
        before they were calibrated: in float32 those of 18 and 30 above the baseline are both
        calibrated to 1. None for ``rewards``.
      reference: bool ``[..., G]``, True for reference answers of the dataset; their calibrated
        reward is 1/2. None for none.
      ties: Which of several best rollouts get their reward.

    Returns:
      ``[..., G]`` float32, not negative.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[0.7, 0.2, 0.5], [0.0, 0.0, 0.5]])
      >>> reference = jnp.array([[False, False, True]] * 2)
      >>> jr.curation.best_constrained(rewards, reference=reference).round(1).tolist()[1]
      [0.0, 0.0, 0.5]

    References:
      CGPO (arXiv:2409.20370), its CRRAFT; a third party's code that cites its equations.
    """
    function = "best_constrained"
    stats.check_group(function, rewards, where)
    checks.check_float(function, order=order)
    checks.check_bool(function, reference=reference)
    checks.check_same_shape(function, rewards=rewards, order=order, reference=reference)
    checks.check_option(function, "ties", ties, ("first", "all"))
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    rewards = masking.zero_masked(rewards, where)
    order = rewards if order is None else masking.zero_masked(order, where)
    aside = jnp.zeros(jnp.shape(rewards), bool) if reference is None else jnp.asarray(reference)
    positive = valid & (rewards > 0)
    first = positive & ~aside
    eligible = jnp.where(jnp.any(first, axis=-1, keepdims=True), first, positive)
    order = jnp.where(eligible, order, -jnp.inf)
    if ties == "all":
        best = order == jnp.max(order, axis=-1, keepdims=True)
    else:
        best = jnp.arange(jnp.shape(order)[-1]) == jnp.argmax(order, axis=-1)[..., None]
    return jnp.where(eligible & best, rewards, 0.0)
