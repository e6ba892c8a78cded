"""Rewards of predictions about a policy's rollouts, and of rollouts under constraints.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats


class Prediction(NamedTuple):
    """Predictions of K rollouts about the solutions of their prompt.

    Attributes:
      length: ``[..., K]``, numbers, tokens of a right solution; NaN or below 0 if missing.
      rate: ``[..., K]``, floating point, the pass rate in [0, 1]; NaN if missing.
      notions: ``[..., K, N]`` integers, for each predicted notion the number of right solutions
        that have it minus that of wrong ones.
      notion_where: bool ``[..., K, N]``, True for the notions that were predicted, are distinct and
        do not occur in the problem.
    """

    length: Array
    rate: Array
    notions: Array
    notion_where: Array


def meta_rewards(
    prediction: Prediction,
    rewards: Array,
    lengths: Array,
    *,
    where: Array | None = None,
    base: float = 0.01,
    inclusive: bool = False,
) -> Array:
    """How well predictions match the solutions: their length, their pass rate and their notions.

        length = [shortest right < predicted < longest right],  0 without a right solution
        rate   = base^|predicted - mean reward|
        notion = share of the predicted notions that right solutions have more often than wrong ones
        reward = (length + rate + notion) / 3

    A missing prediction scores 0, and the divisor remains 3. The predicting rollouts form a
    separate group and train with the same loss.

    Args:
      prediction: :class:`Prediction`.
      rewards: ``[..., G]``, floating point, 0 or 1, of the solutions.
      lengths: ``[..., G]``, numbers, tokens of the solutions.
      where: bool ``[..., G]``, True for solutions that take part; the others are not read.
      base: In (0, 1): the reward of a pass rate that is off by 1.
      inclusive: Whether the shortest and longest length themselves count.

    Returns:
      ``[..., K]`` float32 in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> prediction = jr.rewards.Prediction(
      ...     jnp.array([150]), jnp.array([0.5]), jnp.array([[1, -1]]), jnp.ones((1, 2), bool))
      >>> reward = jr.rewards.meta_rewards(
      ...     prediction, jnp.array([1.0, 1.0, 0.0, 0.0]), jnp.array([100, 200, 50, 60]))
      >>> reward.round(4).tolist()  # (1 + 1 + 1/2) / 3
      [0.833...]

    References:
      MASA (arXiv:2510.03259), the released code; the paper includes the ends of the length range.
    """
    function = "meta_rewards"
    stats.check_group(function, rewards, where)
    checks.check_same_shape(function, rewards=rewards, lengths=lengths)
    checks.check_float(function, rate=prediction.rate)
    checks.check_bool(function, notion_where=prediction.notion_where)
    checks.check_same_shape(function, length=prediction.length, rate=prediction.rate)
    checks.check_same_shape(
        function, notions=prediction.notions, notion_where=prediction.notion_where
    )
    checks.check_share(function, zero=False, one=False, base=base)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    right = valid & (masking.zero_masked(rewards, where) > 0)
    lengths = masking.zero_masked(lengths, right)
    least = jnp.min(jnp.where(right, lengths, jnp.inf), axis=-1, keepdims=True, initial=jnp.inf)
    most = jnp.max(jnp.where(right, lengths, -jnp.inf), axis=-1, keepdims=True, initial=-jnp.inf)
    guess = jnp.asarray(prediction.length, jnp.float32)
    inside = (guess >= least) & (guess <= most)
    if not inclusive:
        inside &= (guess != least) & (guess != most)
    inside &= guess >= 0
    mean = stats.group_mean(masking.zero_masked(rewards, where), where)
    known = ~jnp.isnan(prediction.rate)
    error = jnp.abs(jnp.where(known, prediction.rate, 0.0) - mean)
    rate = jnp.where(known & jnp.any(valid, -1, keepdims=True), base**error, 0.0)
    telling = (jnp.asarray(prediction.notions) > 0).astype(jnp.float32)
    notion = masking.masked_mean(telling, prediction.notion_where, axis=-1)
    return (inside.astype(jnp.float32) + rate + notion) / 3.0


def calibrated_rewards(rewards: Array, *, baseline: Array, where: Array | None = None) -> Array:
    """A reward model's score as the probability of beating a reference answer.

        r_i = sigmoid(rewards_i - baseline)

    Adding a constant to both changes nothing, so prompts are comparable.

    Args:
      rewards: ``[..., G]``, floating point.
      baseline: ``[...]``, floating point, the score of the reference answer of each prompt.
      where: bool ``[..., G]``, True for rollouts that take part; the others get 0.

    Returns:
      Rewards ``[..., G]``, float32, in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.rewards.calibrated_rewards(jnp.array([2.0, 1.0]), baseline=jnp.array(1.0))[1]
      Array(0.5, dtype=float32)

    References:
      CGPO (arXiv:2409.20370).
    """
    function = "calibrated_rewards"
    stats.check_group(function, rewards, where)
    checks.check_float(function, baseline=baseline)
    checks.check_shape(function, "baseline", baseline, jnp.shape(rewards)[:-1])
    margin = masking.zero_masked(rewards, where) - jnp.asarray(baseline, jnp.float32)[..., None]
    return masking.zero_masked(jax.nn.sigmoid(margin), where)


def constrained_rewards(
    rewards: Array,
    *,
    satisfied: Array,
    log_ratio: Array,
    budget: float,
    soft: bool = True,
    where: Array | None = None,
) -> Array:
    """Rewards of rollouts that satisfy all judges and stay near the reference.

        soft:  [satisfied] r max(0, 1 - d / budget)
        hard:  [satisfied] r [d <= budget],    d = log pi(y) - log pi_ref(y), summed over tokens

    A negative d, a rollout that is likelier under the reference, makes the factor exceed 1.

    Args:
      rewards: ``[..., G]``, floating point: :func:`calibrated_rewards`.
      satisfied: bool ``[..., G]``, True where all judges agree.
      log_ratio: ``[..., G]``, floating point, d in nats.
      budget: Above 0.
      soft: Whether the reward decreases toward the budget (CRPG) or is cut at it (CRRAFT).
      where: bool ``[..., G]``, True for rollouts that take part; the others get 0.

    Returns:
      Rewards ``[..., G]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.rewards.constrained_rewards(
      ...     jnp.array([0.8, 0.8, 0.8]), satisfied=jnp.array([True, False, True]),
      ...     log_ratio=jnp.array([1.0, 0.0, 6.0]), budget=5.0).round(2).tolist()
      [0.6..., 0.0, 0.0]

    References:
      CGPO (arXiv:2409.20370), from third-party code that cites its equations. CRPG is REINFORCE on
      the soft form minus its mean over the batch.
    """
    function = "constrained_rewards"
    stats.check_group(function, rewards, where)
    checks.check_bool(function, satisfied=satisfied)
    checks.check_float(function, log_ratio=log_ratio)
    checks.check_same_shape(function, rewards=rewards, satisfied=satisfied, log_ratio=log_ratio)
    checks.check_positive(function, finite=True, budget=budget)
    distance = masking.zero_masked(log_ratio, where)
    near = jnp.maximum(1.0 - distance / budget, 0.0) if soft else distance <= budget
    return masking.zero_masked(rewards, where) * jnp.where(satisfied, near, 0.0)


def crpg_rewards(
    rewards: Array,
    *,
    satisfied: Array,
    old_logp: Array,
    ref_logp: Array,
    mask: Array,
    budget: float,
    baseline: Array | None = None,
    reference: Array | None = None,
    soft: bool = True,
    where: Array | None = None,
) -> Array:
    """Calibrated rewards of rollouts that satisfy all judges, within a KL budget.

        r_i = [satisfied_i] sigmoid(rewards_i - baseline) max(0, 1 - d_i / budget)
        d_i = sum over t of old_logp[i, t] - ref_logp[i, t]
        soft=False:  [d_i <= budget] in place of max(0, 1 - d_i / budget)

    It is :func:`constrained_rewards` of :func:`calibrated_rewards`.

    Args:
      rewards: ``[..., G]``, floating point.
      satisfied: bool ``[..., G]``, True where all judges agree.
      old_logp: ``[..., G, T]``, floating point, log-probabilities (nats) under the policy.
      ref_logp: ``[..., G, T]``, floating point, under the reference.
      mask: bool ``[..., G, T]``, True for the tokens of the response.
      budget: In nats, above 0.
      baseline: ``[...]``, floating point, the reward of a reference answer of each prompt.
      reference: bool ``[..., G]`` in place of ``baseline``, True for reference answers of the
        prompt, whose mean reward is the baseline. A group without one gets 0.
      soft: Whether the reward decreases toward the budget (CRPG) or is cut at it (CRRAFT).
      where: bool ``[..., G]``, True for rollouts that take part; the others get 0.

    Returns:
      Rewards ``[..., G]``, float32.

    Raises:
      ValueError: Also unless one of ``baseline`` and ``reference`` is set.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.zeros((2, 1)), jnp.ones((2, 1), bool)
      >>> jr.rewards.crpg_rewards(
      ...     jnp.array([2.0, 2.0]), satisfied=jnp.array([True, False]), baseline=jnp.array(2.0),
      ...     old_logp=logp, ref_logp=logp, mask=mask, budget=5.0).tolist()
      [0.5, 0.0]

    References:
      CGPO (arXiv:2409.20370), CRPG and CRRAFT, from third-party code that cites its equations.
    """
    function = "crpg_rewards"
    checks.check_mask(function, mask)
    checks.check_float(function, old_logp=old_logp, ref_logp=ref_logp)
    checks.check_same_shape(function, old_logp=old_logp, ref_logp=ref_logp, mask=mask)
    if (baseline is None) == (reference is None):
        raise ValueError(f"{function}: pass either baseline or reference.")
    if baseline is None:
        stats.check_group(function, rewards, where)
        checks.check_bool(function, reference=reference)
        checks.check_same_shape(function, rewards=rewards, reference=reference)
        answers = jnp.asarray(reference) if where is None else where & reference
        baseline = masking.masked_mean(rewards, answers, axis=-1)
        answered = jnp.any(answers, axis=-1, keepdims=True)
        where = answered if where is None else where & answered
        where = jnp.broadcast_to(where, jnp.shape(rewards))
    gap = masking.zero_masked(old_logp, mask) - masking.zero_masked(ref_logp, mask)
    return constrained_rewards(
        calibrated_rewards(rewards, baseline=baseline, where=where),
        satisfied=satisfied,
        log_ratio=jnp.sum(gap, axis=-1),
        budget=budget,
        soft=soft,
        where=where,
    )
