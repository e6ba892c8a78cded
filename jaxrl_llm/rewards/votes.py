"""Rewards without labels: agreement with the most common answer of a question's rollouts.

Shared arguments:
  ``answer_ids``: ``[..., G]`` integers: equal numbers for answers that are equivalent, within a
    group; below 0 where no answer was extracted, which does not vote.
  ``where``: bool ``[..., G]``, True for the rollouts that take part; the others are not read.
  ``weights``: ``[..., G]``, floating point, not negative: the weight of each vote, such as the
    score of a quality head. None for 1 each.

All raise TypeError for a wrong dtype and ValueError for a wrong shape.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


class Majority(NamedTuple):
    """Result of :func:`majority_label`.

    Attributes:
      label: ``[...]`` integers, the id of the most common answer; -1 where nobody voted.
      share: float32 ``[...]``, its votes divided by those of all rollouts that take part, including
        those without an answer.
    """

    label: Array
    share: Array


def majority_label(
    answer_ids: Array, *, where: Array | None = None, weights: Array | None = None
) -> Majority:
    """The most common answer of a group.

        label = argmax over answers c of  sum of weights_i [answer_i = c]

    Among answers with equal votes, the first one in the group wins.

    Args:
      answer_ids, where, weights: See the module.

    Returns:
      :class:`Majority`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> vote = jr.rewards.majority_label(jnp.array([3, 3, 5, 7]))
      >>> int(vote.label), float(vote.share)
      (3, 0.5)

    References:
      TTRL (arXiv:2504.16084); its released code lets the text of an unparsable answer win. Weighted
      votes: ARRoL (arXiv:2603.24840), ABSTRACT reading.
    """
    function = "majority_label"
    valid = _check(function, answer_ids, where, weights)
    answer_ids = jnp.asarray(answer_ids)
    counts = jnp.ones(jnp.shape(answer_ids)) if weights is None else weights
    counts = masking.zero_masked(counts, valid)
    voted = valid & (answer_ids >= 0)
    same = (answer_ids[..., :, None] == answer_ids[..., None, :]) & voted[..., None, :]
    votes = jnp.sum(jnp.where(same, counts[..., None, :], 0.0), axis=-1)
    if jnp.shape(answer_ids)[-1] == 0:
        empty = jnp.shape(answer_ids)[:-1]
        return Majority(jnp.full(empty, -1, answer_ids.dtype), jnp.zeros(empty, jnp.float32))
    first = jnp.argmax(jnp.where(voted, votes, -1.0), axis=-1, keepdims=True)
    any_vote = jnp.any(voted, axis=-1)
    label = jnp.take_along_axis(answer_ids, first, axis=-1)[..., 0]
    most = jnp.take_along_axis(votes, first, axis=-1)[..., 0]
    total = jnp.sum(counts, axis=-1)
    share = jnp.where(any_vote & (total > 0), most / jnp.where(total > 0, total, 1.0), 0.0)
    return Majority(jnp.where(any_vote, label, -1), share)


def majority_rewards(
    rewards: Array,
    *,
    answer_ids: Array,
    where: Array | None = None,
    weights: Array | None = None,
) -> Array:
    """1 for the answer of the majority, else 0; the form for a chain.

        r_i = [answer_i = label]

    A rollout without an answer gets 0. A unanimous group has equal rewards, and no advantage.

    Args:
      rewards: ``[..., G]``, floating point; not read, but passed by every chain.
      answer_ids, where, weights: See the module.

    Returns:
      Rewards ``[..., G]``, float32; 0 for rollouts that take no part.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> answers = jnp.array([3, 3, 5, -1])
      >>> jr.rewards.majority_rewards(jnp.zeros(4), answer_ids=answers).tolist()
      [1.0, 1.0, 0.0, 0.0]

    References:
      TTRL (arXiv:2504.16084): 64 rollouts vote and 32 of them train: ``recipes.ttrl_majority``.
    """
    checks.check_min_rank("majority_rewards", 1, rewards=rewards)
    valid = _check("majority_rewards", answer_ids, where, weights)
    checks.check_shape("majority_rewards", "rewards", rewards, jnp.shape(answer_ids))
    label = majority_label(answer_ids, where=where, weights=weights).label[..., None]
    return (valid & (label >= 0) & (jnp.asarray(answer_ids) == label)).astype(jnp.float32)


def _check(function: str, answer_ids: Array, where: Array | None, weights: Array | None) -> Array:
    """Checks the shared arguments; returns which rollouts take part."""
    checks.check_min_rank(function, 1, answer_ids=answer_ids)
    checks.check_integer(function, answer_ids=answer_ids)
    checks.check_bool(function, where=where)
    checks.check_float(function, weights=weights)
    checks.check_same_shape(function, answer_ids=answer_ids, where=where, weights=weights)
    return jnp.ones(jnp.shape(answer_ids), bool) if where is None else where
