"""Reuse of rollouts: as tasks for a judge, by another trainer, as replacements of failures.

Shared arguments:
  ``key``: typed PRNG key.
  ``rewards``: ``[..., G]``, floating point, of the rollouts of a group; above 0 for a right one.
  ``where``: bool ``[..., G]``, True for the rollouts that take part; the others are not read and
    never chosen. None keeps all.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "JudgeItems",
    "PooledGroups",
    "SharedGroups",
    "adaptive_rollouts",
    "cap_items",
    "judge_items",
    "mixed_subset",
    "pooled_groups",
    "swarm_groups",
    "top_entropy_steps",
]

NONE, POINT, PAIR = 0, 1, 2


def _draw(key: Array, where: Array) -> Array:
    """One of the entries that are True, uniformly, along the last axis; -1 where there is none."""
    lots = jnp.where(where, jax.random.uniform(key, jnp.shape(where)), -1.0)
    chosen = jnp.argmax(lots, axis=-1).astype(jnp.int32)
    return jnp.where(jnp.any(where, axis=-1), chosen, -1)


class JudgeItems(NamedTuple):
    """Tasks with known answers, each made from one group; int32 ``[...]``.

    Attributes:
      kind: 0 for no task, 1 to judge one answer, 2 to compare two.
      first: The only or the first rollout that is shown; -1 for none.
      second: The rollout that is shown second; -1 for none.
      label: For one answer, 1 if it is correct, else 0; for two, the index of the correct one, 0
        or 1; -1 without a task.
      reflect: A wrong rollout to refine, whose correct answer is known; -1 for none.
    """

    kind: Array
    first: Array
    second: Array
    label: Array
    reflect: Array


def judge_items(
    key: Array,
    rewards: Array,
    *,
    answered: Array | None = None,
    where: Array | None = None,
    point: float = 0.3,
) -> JudgeItems:
    """Verified rollouts as tasks for a judge and for reflection.

        all right   one answer, the first; label 1
        all wrong   one answer, drawn; label 0
        mixed       with probability ``point`` one answer, of a class drawn evenly;
                    else a right and a wrong one, in a drawn order
        reflection  one of the wrong ones, drawn

    The same policy is rolled out on these tasks, with a rule-based reward.

    Args:
      key, rewards, where: See the module.
      answered: bool ``[..., G]``, True for rollouts whose answer could be extracted; only those
        are shown to a judge. None means all.
      point: Probability of a task with one answer, in [0, 1].

    Returns:
      :class:`JudgeItems`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> items = jr.curation.judge_items(jax.random.key(0), rewards, point=0.0)
      >>> items.kind.tolist(), items.reflect.tolist()
      ([1, 2], [-1, 1])

    References:
      SPARK (arXiv:2509.22624), the released code, which draws from a mixed group whether or not the
      answers could be extracted, and drops the task if one is missing. Its reflection tasks show
      the complete reasoning in the first half of the batch and only the answer in the second.
    """
    function = "judge_items"
    stats.check_group(function, rewards, where)
    checks.check_bool(function, answered=answered)
    checks.check_same_shape(function, rewards=rewards, answered=answered)
    checks.check_share(function, point=point)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    right = valid & (masking.zero_masked(rewards, where) > 0)
    wrong = valid & ~right
    shown = valid if answered is None else valid & answered
    keys = jax.random.split(key, 6)
    lead = jnp.shape(rewards)[:-1]
    mixed = jnp.any(right, axis=-1) & jnp.any(wrong, axis=-1)
    one_right = jnp.argmax(right & shown, axis=-1).astype(jnp.int32)
    one_right = jnp.where(jnp.any(right & shown, axis=-1), one_right, -1)
    good = jnp.where(mixed, _draw(keys[0], right & shown), one_right)
    bad = _draw(keys[1], wrong & shown)
    single = ~mixed | (jax.random.uniform(keys[2], lead) < point)
    of_right = jnp.where(mixed, jax.random.bernoulli(keys[3], 0.5, lead), jnp.any(right, axis=-1))
    swapped = jax.random.bernoulli(keys[4], 0.5, lead)
    alone = jnp.where(of_right, good, bad)
    first = jnp.where(single, alone, jnp.where(swapped, bad, good))
    second = jnp.where(single, -1, jnp.where(swapped, good, bad))
    possible = jnp.where(single, alone >= 0, (good >= 0) & (bad >= 0))
    label = jnp.where(single, of_right, swapped).astype(jnp.int32)
    kind = jnp.where(possible, jnp.where(single, POINT, PAIR), NONE).astype(jnp.int32)

    def where_possible(x: Array) -> Array:
        return jnp.where(possible, x, -1).astype(jnp.int32)

    return JudgeItems(
        kind=kind,
        first=where_possible(first),
        second=where_possible(second),
        label=where_possible(label),
        reflect=_draw(keys[5], wrong),
    )


def cap_items(key: Array, flags: Array, *, count: int) -> Array:
    """At most ``count`` of the flagged entries, drawn without replacement.

        keep = flags  and  rank of a uniform draw among the flagged < count

    Args:
      key: See the module.
      flags: bool ``[N]``.
      count: Maximum number of entries, not negative.

    Returns:
      bool ``[N]``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> keep = jr.curation.cap_items(jax.random.key(0), jnp.ones(5, bool), count=2)
      >>> int(keep.sum())
      2

    References:
      SPARK (arXiv:2509.22624): 32 judging tasks and 32 reflection tasks per step.
    """
    checks.check_min_rank("cap_items", 1, flags=flags)
    checks.check_bool("cap_items", flags=flags)
    checks.check_non_negative("cap_items", finite=True, count=count)
    lots = jnp.where(flags, jax.random.uniform(key, jnp.shape(flags)), 2.0)
    _, rank = stats.order_and_ranks(lots)
    return jnp.asarray(flags) & (rank < count)


class SharedGroups(NamedTuple):
    """Groups of several trainers, the local ones first.

    Attributes:
      index: int32 ``[local + foreign]``, places among the candidates; 0 where there is none.
      where: bool ``[local + foreign]``, False where there were too few candidates.
    """

    index: Array
    where: Array


def swarm_groups(
    key: Array, informative: Array, *, local: Array, count: int, foreign: int
) -> SharedGroups:
    """Local groups, and informative groups of other trainers.

        local    ``count`` of those that are local, drawn without replacement
        foreign  ``foreign`` of those that are not local and whose rewards differ, likewise

    All groups are scored by the local model and rewarded again: foreign rollouts are text, and
    no importance weight corrects for the policy that wrote them.

    Args:
      key: See the module.
      informative: bool ``[N]``, True for groups whose rewards differ
        (:func:`informative_groups`, where any of a group is True).
      local: bool ``[N]``, True for local groups.
      count: Number of local groups, not negative.
      foreign: Number of foreign groups, not negative.

    Returns:
      :class:`SharedGroups`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> informative = jnp.array([False, True, False, True])
      >>> shared = jr.curation.swarm_groups(
      ...     jax.random.key(0), informative, local=jnp.array([True, False, False, False]),
      ...     count=1, foreign=2)
      >>> int(shared.index[0]), sorted(shared.index[1:].tolist()), shared.where.tolist()
      (0, [1, 3], [True, True, True])

    References:
      SAPO, swarm sampling policy optimization (arXiv:2509.08721), NOTES reading; 4 and 4 is best
      there. The released code also draws uniformly, but among all groups with as many rollouts as
      its own, including those with equal rewards; before version 0.5.8 it took the groups with the
      highest accuracy.
    """
    function = "swarm_groups"
    checks.check_rank(function, 1, informative=informative, local=local)
    checks.check_bool(function, informative=informative, local=local)
    checks.check_same_shape(function, informative=informative, local=local)
    checks.check_non_negative(function, finite=True, count=count, foreign=foreign)
    here, elsewhere = jax.random.split(key)
    local = jnp.asarray(local)

    def draw(key: Array, eligible: Array, size: int) -> tuple[Array, Array]:
        (total,) = jnp.shape(eligible)
        lots = jnp.where(eligible, jax.random.uniform(key, (total,)), 2.0)
        order = jnp.argsort(lots)[:size].astype(jnp.int32)
        order = jnp.pad(order, (0, size - order.shape[0]))
        there = jnp.arange(size) < jnp.sum(eligible)
        return jnp.where(there, order, 0), there

    local_index, local_there = draw(here, local, count)
    foreign_index, foreign_there = draw(elsewhere, jnp.asarray(informative) & ~local, foreign)
    return SharedGroups(
        index=jnp.concatenate([local_index, foreign_index]),
        where=jnp.concatenate([local_there, foreign_there]),
    )


class PooledGroups(NamedTuple):
    """Decisions on the groups of a pool.

    Attributes:
      replace: int32 ``[...]``, the rollout that a stored success replaces; -1 for none.
      keep: bool ``[...]``, False for tasks that are dropped.
    """

    replace: Array
    keep: Array


def pooled_groups(
    rewards: Array,
    *,
    age: Array,
    stored: Array,
    count: int,
    where: Array | None = None,
    max_accuracy: float = 1.0,
) -> PooledGroups:
    """Adds a stored success to tasks whose rollouts all failed; drops groups without a signal.

        dropped   fewer than count rollouts, or mean reward >= max_accuracy,
                  or all failed and nothing is stored
        replace   the oldest rollout, where all failed and a success is stored

    The stored success is the newest of its task.

    Args:
      rewards, where: See the module.
      age: ``[..., G]``, numbers, larger for older rollouts; among equal ages the first is replaced.
      stored: bool ``[...]``, True where a success of the task is stored.
      count: Minimum number of rollouts of a group, at least 1.
      max_accuracy: Mean reward from which a task counts as mastered.

    Returns:
      :class:`PooledGroups`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
      >>> pooled = jr.curation.pooled_groups(
      ...     rewards, age=jnp.array([[1.0, 2.0]] * 4),
      ...     stored=jnp.array([True, False, True, True]), count=2)
      >>> pooled.replace.tolist(), pooled.keep.tolist()
      ([1, -1, -1, -1], [True, False, False, True])

    References:
      DART (arXiv:2509.23866), the released code: a group is the unused rollouts of the two newest
      policies.
    """
    function = "pooled_groups"
    stats.check_group(function, rewards, where)
    checks.check_same_shape(function, rewards=rewards, age=age)
    checks.check_bool(function, stored=stored)
    checks.check_shape(function, "stored", stored, jnp.shape(rewards)[:-1])
    checks.check_positive(function, finite=True, count=count)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    rewards = masking.zero_masked(rewards, where)
    mean = masking.masked_mean(rewards, where, axis=-1)
    enough = jnp.sum(valid, axis=-1) >= count
    failed = jnp.all((rewards <= 0) | ~valid, axis=-1)
    keep = enough & ~(mean >= max_accuracy) & (~failed | stored)
    oldest = jnp.argmax(jnp.where(valid, masking.zero_masked(age, where), -jnp.inf), axis=-1)
    return PooledGroups(jnp.where(keep & failed, oldest, -1).astype(jnp.int32), keep)


def mixed_subset(key: Array, rewards: Array, *, count: int, where: Array | None = None) -> Array:
    """A random part of a group with a correct and a wrong rollout, if the group has both.

        one right, one wrong, and count - 2 of the others, each drawn uniformly

    Args:
      key, rewards, where: See the module.
      count: Number of rollouts to keep, at least 2. A group of at most ``count`` is unchanged.

    Returns:
      bool ``[..., G]``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> keep = jr.curation.mixed_subset(
      ...     jax.random.key(0), jnp.array([0.0, 0.0, 0.0, 1.0]), count=2)
      >>> int(keep.sum()), bool(keep[3])
      (2, True)

    References:
      DART (arXiv:2509.23866), the released code.
    """
    function = "mixed_subset"
    stats.check_group(function, rewards, where)
    if count < 2:
        raise ValueError(f"{function}: count must be at least 2; got {count}.")
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    right = valid & (masking.zero_masked(rewards, where) > 0)
    lots = jax.random.uniform(key, jnp.shape(rewards))
    first = jnp.zeros(jnp.shape(rewards), bool)
    for group in (right, valid & ~right):
        least = jnp.min(jnp.where(group, lots, 2.0), axis=-1, keepdims=True)
        first |= group & (lots == least)
    # Those that must stay come before all others.
    order = jnp.where(first, lots - 1.0, jnp.where(valid, lots, 2.0))
    _, rank = stats.order_and_ranks(order)
    return valid & (rank < count)


def adaptive_rollouts(
    success: Array, *, low: int = 1, high: int = 8, threshold: float = 0.6
) -> Array:
    """Number of rollouts of a task, by its recent success rate.

        high                                     success < threshold
        max(low, min(high, int(9 / success - 7)))  else

    Continuous at the defaults: 8 at 0.6, 2 at 1.

    Args:
      success: ``[...]``, floating point, in [0, 1]: the mean over a task's latest rollouts.
      low: Smallest number of rollouts, at least 1.
      high: Largest number of rollouts, not below ``low``.
      threshold: Success rate from which a task gets fewer rollouts, above 0.

    Returns:
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.adaptive_rollouts(jnp.array([0.59, 0.61, 0.75, 0.9, 1.0])).tolist()
      [8, 7, 5, 3, 2]

    References:
      DART (arXiv:2509.23866), the released sampler; the bound above is ours.
    """
    function = "adaptive_rollouts"
    checks.check_min_rank(function, 0, success=success)
    checks.check_float(function, success=success)
    checks.check_positive(function, finite=True, low=low, threshold=threshold)
    if high < low:
        raise ValueError(f"{function}: high must not be below low; got {high} and {low}.")
    success = jnp.asarray(success, jnp.float32)
    few = jnp.floor(9.0 / jnp.maximum(success, threshold) - 7.0 + 1e-4)
    return jnp.where(success < threshold, high, jnp.clip(few, low, high)).astype(jnp.int32)


def top_entropy_steps(
    advantages: Array,
    mask: Array,
    *,
    old_entropy: Array,
    turn_ids: Array,
    turns: int,
    keep: float = 0.8,
) -> Array:
    """The tokens of the steps in which the policy was most uncertain.

        H[s]  = mean entropy of the tokens of step s of a rollout
        stays = H[s] >= the k-th greatest of the group,   k = floor(keep * steps of the group)

    Steps tied at the border are all kept, and at least one step is kept. The advantage is
    computed before, over all rollouts.

    Args:
      advantages: ``[..., G]`` or ``[..., G, T]``; not read, but passed to every selection.
      mask: bool ``[..., G, T]``, True for the tokens that are trained.
      old_entropy: ``[..., G, T]``, nats, floating point, of the policy that sampled.
      turn_ids: ``[..., G, T]`` integers, the step of each token; -1 where an environment wrote.
      turns: Maximum number of steps of a rollout, at least 1. Later ones count as one step with the
        last of these.
      keep: Share of the steps that are kept, in (0, 1].

    Returns:
      bool ``[..., G, T]``, for the slot ``selection``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> turn_ids, entropy = jnp.array([[0, 0, 1], [0, 1, 1]]), jnp.array([[1.0, 1, 3], [2, 4, 4]])
      >>> jr.curation.top_entropy_steps(
      ...     jnp.zeros(2), jnp.ones((2, 3), bool), old_entropy=entropy, turn_ids=turn_ids,
      ...     turns=2, keep=0.5).tolist()
      [[False, False, True], [False, True, True]]

    References:
      DART (arXiv:2509.23866), NOTES reading: in the released code the filter is commented out.
    """
    function = "top_entropy_steps"
    del advantages
    masking.check_tokens(function, mask, old_entropy=old_entropy)
    checks.check_min_rank(function, 2, mask=mask)
    checks.check_integer(function, turn_ids=turn_ids)
    checks.check_same_shape(function, mask=mask, turn_ids=turn_ids)
    checks.check_positive(function, finite=True, turns=turns)
    checks.check_share(function, zero=False, keep=keep)
    steps = jnp.minimum(jnp.asarray(turn_ids), turns - 1)
    member = (steps[..., None] == jnp.arange(turns)) & mask[..., None]
    tokens = jnp.sum(member, axis=-2)
    entropy = masking.zero_masked(old_entropy, mask)
    means = jnp.sum(jnp.where(member, entropy[..., None], 0.0), axis=-2) / jnp.maximum(tokens, 1)
    there = tokens > 0
    flat = (*jnp.shape(mask)[:-2], -1)
    ordered = -jnp.sort(jnp.where(there, -means, jnp.inf).reshape(flat), axis=-1)
    count = jnp.sum(there.reshape(flat), axis=-1, keepdims=True)
    place = jnp.maximum(jnp.floor(keep * count + 1e-4).astype(jnp.int32), 1) - 1
    least = jnp.take_along_axis(ordered, place, axis=-1)[..., None]
    stays = there & (means >= least)
    return jnp.any(member & stays[..., None, :], axis=-1)
