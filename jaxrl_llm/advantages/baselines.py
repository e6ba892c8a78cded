"""Baselines that are not the mean of the group: greedy reward, median, weights, other prompts.

- ``rewards``: floating point ``[..., G]``, one per rollout; a group lies along the last axis.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. The others count in
  no statistic, get 0 and may hold anything.
- ``mask``: bool ``[..., G, T]``, True for the response tokens that are trained.
- Advantages are float32 ``[..., G]`` or ``[..., G, T]``, 0 where masked.
- A wrong dtype raises TypeError; shapes that do not match, and an option that is unknown, out of
  its range or without effect, raise ValueError.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs
from jaxrl_llm.advantages.group import Singleton
from jaxrl_llm.core import Array, checks, masking, stats, traits

__all__ = [
    "jspo",
    "mc_grpo",
    "mc_grpo_keep",
    "mc_grpo_pivot",
    "opo",
    "opob",
    "remax",
    "remax_token",
    "vcpo_advantage",
]


def _check_greedy(function: str, greedy_rewards: Array, shape: tuple[int, ...]) -> None:
    checks.check_float(function, greedy_rewards=greedy_rewards)
    checks.check_shape(function, "greedy_rewards", greedy_rewards, shape)


def remax(rewards: Array, *, greedy_rewards: Array, where: Array | None = None) -> Array:
    """Rewards minus the reward of the greedy response to the same prompt.

        A_i = r_i - r_greedy

    The baseline depends only on the prompt, so the policy gradient is unbiased, even with one
    response per prompt. A group of equal rewards still trains, unless the greedy response earned
    the same reward.

    Args:
      rewards, where: See the module.
      greedy_rewards: ``[...]``, floating point, rewards of the (untrained) responses at temperature
        0.

    Returns:
      Advantages ``[..., G]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, greedy = jnp.array([[1.0, 0.0]]), jnp.array([0.5])
      >>> jr.advantages.remax(rewards, greedy_rewards=greedy).tolist()
      [[0.5, -0.5]]

    References:
      Li et al., ReMax (arXiv:2310.10505). As in verl.
    """
    stats.check_group("remax", rewards, where)
    _check_greedy("remax", greedy_rewards, jnp.shape(rewards)[:-1])
    greedy = jnp.asarray(greedy_rewards, jnp.float32)[..., None]
    return masking.zero_masked(jnp.asarray(rewards, jnp.float32) - greedy, where)


@traits(token_values=True)
def remax_token(
    token_rewards: Array, mask: Array, *, greedy_rewards: Array, where: Array | None = None
) -> Array:
    """The reward to go of each token, minus the full reward of the greedy response.

        A[i, t] = sum over s >= t of R[i, s]  -  r_greedy

    The baseline is the greedy response's total reward at every token, not its reward to go. In a
    chain this function follows :func:`terminal_rewards` or, for a KL penalty,
    :func:`kl_shaped_rewards`.

    Args:
      mask, where: See the module.
      token_rewards: ``[..., G, T]``, floating point.
      greedy_rewards: ``[...]``, floating point, reward of the response at temperature 0.

    Returns:
      Advantages ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> token_rewards, mask = jnp.array([[[-0.25, 1.0]]]), jnp.ones((1, 1, 2), bool)
      >>> jr.advantages.remax_token(token_rewards, mask, greedy_rewards=jnp.array([0.5])).tolist()
      [[[0.25, 0.5]]]

    References:
      Li et al., ReMax (arXiv:2310.10505). As in verl, where masked tokens get the return without a
      baseline.
    """
    checks.check_min_rank("remax_token", 2, token_rewards=token_rewards)
    tokens = _inputs.check_token_rewards("remax_token", token_rewards, mask, where)
    _check_greedy("remax_token", greedy_rewards, jnp.shape(mask)[:-2])
    greedy = jnp.asarray(greedy_rewards, jnp.float32)[..., None, None]
    to_go = masking.zero_masked(token_rewards, tokens)[..., ::-1].cumsum(-1)[..., ::-1]
    return masking.zero_masked(to_go - greedy, tokens)


def opo(
    rewards: Array,
    mask: Array,
    *,
    where: Array | None = None,
    singleton: Singleton = "zero",
    response_mask: Array | None = None,
) -> Array:
    """Rewards minus their length-weighted mean, the baseline of least variance.

        A_i = r_i - sum_j len_j r_j / sum_j len_j

    The baseline is optimal where the squared norm of a rollout's score is proportional to its
    length; with equal lengths it is :func:`dr_grpo`. A group of equal rewards, or an empty one,
    gets exactly 0. A group without tokens uses the plain mean.

    Args:
      rewards, where: See the module.
      mask: As in the module; the lengths count its tokens.
      singleton: What the only unmasked rollout of a group gets: "zero" for 0, "raw" for its reward.
      response_mask: The mask before a correction rejected tokens of it, whose tokens the lengths
        count instead; None for ``mask``.

    Returns:
      Advantages ``[..., G]``; weighted by length they add up to 0 over a group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.arange(4) < jnp.array([[1], [2], [3], [4]])
      >>> jr.advantages.opo(jnp.array([5.0, 0.0, 5.0, 0.0]), mask).tolist()
      [3.0, -2.0, 3.0, -2.0]

    References:
      Hao et al., OPO (arXiv:2505.23585), meant for exact on-policy training without a KL term. verl
      leaves a group of one its reward ("raw").
    """
    mask = masking.response_tokens("opo", mask, response_mask)
    _inputs.check_tokens("opo", rewards, mask, where)
    rewards = _inputs.group_rewards("opo", rewards, where, singleton)
    mean, moved = _weighted_mean(rewards, masking.lengths(mask), where)
    return _inputs.settle_group(rewards - mean - moved, rewards, rewards, where, singleton)


def _weighted_mean(rewards: Array, weights: Array, where: Array | None) -> tuple[Array, Array]:
    """The mean of each group, and how far the weighted mean lies from it; both ``[..., 1]``.

    Two numbers, since the reward minus the first is exact where a large reward is common to all.
    The second is 0 where the weights add up to 0.
    """
    mean = stats.group_mean(rewards, where)
    weights = masking.zero_masked(weights, where)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    moved = jnp.sum(weights * (rewards - mean), axis=-1, keepdims=True)
    return mean, jnp.where(total > 0, moved / jnp.where(total > 0, total, 1.0), 0.0)


def opob(
    rewards: Array, log_weights: Array, grad_sq_norms: Array, *, where: Array | None = None
) -> Array:
    """The baseline of least variance for rollouts of another policy, one per group.

        b = sum_i w_i^2 n_i r_i / sum_i w_i^2 n_i,   w_i = exp(log_weights_i)

    With equal ``w`` and equal ``n`` it is the group mean; with equal ``w`` and ``n`` the length, it
    is the baseline of :func:`opo`. Weights are relative to the group's largest, so none overflows.

    Args:
      rewards, where: See the module.
      log_weights: ``[..., G]``, floating point: log of the ratio of the full rollout's probability
        under the policy to that under the behavior policy, not truncated.
      grad_sq_norms: ``[..., G]``, floating point, not negative: squared norm of the gradient of the
        rollout's log-probability (summed over its tokens). Any common scale.

    Returns:
      Baselines ``[...]``, float32; the mean reward where all norms are 0, and 0 for an empty group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, norms = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([1.0, 4.0, 1.0, 2.0])
      >>> weights = jnp.array([1.0, 2.0, 0.5, 4.0])
      >>> round(float(jr.advantages.opob(rewards, jnp.log(weights), norms)), 4)
      0.6751

    References:
      Huang et al., VCPO (arXiv:2602.17616). The released code adds 1e-8 to the denominator, and
      measures the gradient with the truncated weight inside: its weight is ``min(w, C)^2 w^2 n``.
    """
    stats.check_group("opob", rewards, where)
    checks.check_min_rank("opob", 1, log_weights=log_weights, grad_sq_norms=grad_sq_norms)
    checks.check_float("opob", log_weights=log_weights, grad_sq_norms=grad_sq_norms)
    checks.check_same_shape(
        "opob", rewards=rewards, log_weights=log_weights, grad_sq_norms=grad_sq_norms
    )
    mean, moved = _off_policy_mean(
        masking.zero_masked(rewards, where), log_weights, grad_sq_norms, where
    )
    return (mean + moved)[..., 0]


def _off_policy_mean(rewards, log_weights, grad_sq_norms, where) -> tuple[Array, Array]:
    """As :func:`_weighted_mean`, with the weights of :func:`opob`."""
    log_weights, norms = (masking.zero_masked(x, where) for x in (log_weights, grad_sq_norms))
    # The greatest of those that count: one without a gradient would push the others below float32.
    counts = norms > 0 if where is None else where & (norms > 0)
    greatest = jnp.max(log_weights, axis=-1, keepdims=True, where=counts, initial=-jnp.inf)
    relative = jnp.where(counts, log_weights - jnp.where(counts, greatest, 0.0), 0.0)
    return _weighted_mean(rewards, jnp.exp(2.0 * relative) * norms, where)


@traits(zero_if_equal=True)
def vcpo_advantage(
    rewards: Array,
    *,
    old_logp: Array,
    behavior_logp: Array,
    mask: Array,
    grad_sq_norms: Array | None,
    where: Array | None = None,
    scale: Literal["group", "none"] = "group",
    response_mask: Array | None = None,
) -> Array:
    """Rewards minus the off-policy optimal baseline, over the deviation of the group.

        A_i = (r_i - b) / std(r),   b from :func:`opob`, log w_i = sum_t (old_logp - behavior_logp)

    VCPO also truncates the weight of the full rollout and scales the step size with the effective
    sample size. A group of equal rewards, or with fewer than two rollouts, gets exactly 0.

    Args:
      rewards, mask, where: See the module.
      old_logp: ``[..., G, T]`` log-probabilities (nats) under the policy before the update.
      behavior_logp: ``[..., G, T]`` under the policy that sampled.
      grad_sq_norms: ``[..., G]``, as in :func:`opob`, which the train step computes for a recipe;
        None uses the lengths instead, a proxy of ours that costs nothing.
      scale: "group" divides by the population deviation where that is above 1e-8, "none" does not.
      response_mask: The mask before a correction rejected tokens of it, ``[..., G, T]``: weights
        and lengths are of full rollouts; None for ``mask``.

    Returns:
      Advantages ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
      >>> jr.advantages.vcpo_advantage(jnp.array([1.0, 0.0]), old_logp=old_logp,
      ...     behavior_logp=old_logp, mask=mask, grad_sq_norms=jnp.array([1.0, 3.0]),
      ...     scale="none").tolist()
      [0.75, -0.25]

    References:
      Huang et al., VCPO (arXiv:2602.17616).
    """
    name = "vcpo_advantage"
    checks.check_min_rank(name, 1, old_logp=old_logp, behavior_logp=behavior_logp)
    mask = masking.response_tokens(name, mask, response_mask)
    tokens = _inputs.check_tokens(
        name, rewards, mask, where, old_logp=old_logp, behavior_logp=behavior_logp
    )
    checks.check_option(name, "scale", scale, ("group", "none"))
    log_weights = jnp.sum(masking.safe_log_ratio(old_logp, behavior_logp, tokens), axis=-1)
    if grad_sq_norms is None:
        grad_sq_norms = masking.lengths(tokens)
    checks.check_float(name, grad_sq_norms=grad_sq_norms)
    checks.check_shape(name, "grad_sq_norms", grad_sq_norms, jnp.shape(rewards))
    rewards = _inputs.group_rewards(name, rewards, where, "zero")
    mean, moved = _off_policy_mean(rewards, log_weights, grad_sq_norms, where)
    centered = rewards - mean - moved
    if scale == "group":
        std = stats.group_std(rewards, where, ddof=0)
        centered = centered / jnp.where(std > 1e-8, std, 1.0)
    return _inputs.settle_group(centered, rewards, rewards, where, "zero")


# An advantage this small counts as zero when the others make up for it.
_ZERO = 1e-6


def mc_grpo(
    rewards: Array,
    *,
    where: Array | None = None,
    scale: Literal["mad", "std", "none"] = "mad",
    eps: float | None = None,
    rescale_nonzero: bool = False,
) -> Array:
    """Rewards minus their group median, over the median deviation from it.

        A_i = (r_i - med(r)) / (mad(r) + eps)        mad(r) = med(|r - med(r)|)
        scale="std":   A_i = (r_i - med(r)) / (std(r) + eps)
        scale="none":  A_i = r_i - med(r)
        rescale_nonzero: times n / #(|A| > 1e-6), n rollouts in the group

    In a group of even size the median is the lower of the two middle values, so it is always the
    reward of one rollout (:func:`mc_grpo_pivot`), which does not train. A few outliers do not move
    the median, so in small groups fewer advantages change sign than with the mean.

    Where more than half of a group has the same reward, as in most groups of right and wrong
    answers, mad is 0 and the advantages are scaled by ``1 / eps``: 1000 by default, as in the
    released code. ``scale="std"`` avoids this. A group of equal rewards, or with fewer than two
    rollouts, gets exactly 0.

    Args:
      rewards, where: See the module.
      scale: What the advantage is divided by: "mad", "std" (around the mean, over n - 1) or "none".
      eps: Added to the divisor, above 0, in units of reward. None means 1e-3.
      rescale_nonzero: Whether to make up for the rollouts whose reward is the median.

    Returns:
      Advantages ``[..., G]``; at least half of a group is at most 0 and at least half at least 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.mc_grpo(jnp.array([0.0, 0.5, 1.0])).round(3).tolist()
      [-0.998..., 0.0, 0.998...]

    References:
      MC-GRPO (arXiv:2601.22582), as in the authors' trainers: the one for GSM8K rescales as
      ``rescale_nonzero`` does, the one for MATH does not. "std" and "none" are ours.
    """
    stats.check_group("mc_grpo", rewards, where)
    checks.check_option("mc_grpo", "scale", scale, ("mad", "std", "none"))
    if scale == "none":
        checks.check_no_effect("mc_grpo", "with scale='none'", eps=eps)
    eps = 1e-3 if eps is None else eps
    checks.check_positive("mc_grpo", finite=True, eps=eps)
    rewards = masking.zero_masked(rewards, where)
    advantages = rewards - stats.group_median(rewards, where)
    if scale == "mad":
        advantages = advantages / (stats.group_median(jnp.abs(advantages), where) + eps)
    elif scale == "std":
        advantages = advantages / (stats.group_std(rewards, where, ddof=1) + eps)
    advantages = masking.zero_masked(advantages, where)
    if rescale_nonzero:
        nonzero = jnp.sum(jnp.abs(advantages) > _ZERO, axis=-1, keepdims=True)
        advantages = advantages * (stats.group_count(rewards, where) / jnp.maximum(nonzero, 1))
    return advantages


def mc_grpo_pivot(rewards: Array, *, where: Array | None = None, key: Array | None = None) -> Array:
    """The rollout of each group whose reward is the median, which does not train.

    Its advantage is 0: sample one extra rollout and drop this one with :func:`mc_grpo_keep`.

    Args:
      rewards, where: See the module.
      key: A typed key, for a random choice among rollouts tied at the median. None takes the first,
        so the result depends on the order of the group.

    Returns:
      bool ``[..., G]``, True at exactly one rollout of each group that is not empty.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.mc_grpo_pivot(jnp.array([[0.0, 0.5, 1.0], [1.0, 0.0, 0.0]])).tolist()
      [[False, True, False], [False, True, False]]

    References:
      MC-GRPO (arXiv:2601.22582). The released code takes the index of ``torch.median``, which is
      not defined where rewards are equal.
    """
    stats.check_group("mc_grpo_pivot", rewards, where)
    rewards = masking.zero_masked(rewards, where)
    at_median = rewards == stats.group_median(rewards, where)
    if where is not None:
        at_median = at_median & where
    size = jnp.shape(rewards)[-1]
    if size == 0:
        return at_median
    rank = -jnp.arange(size, dtype=jnp.float32)
    if key is not None:
        rank = jax.random.uniform(key, jnp.shape(rewards))
    chosen = jnp.argmax(jnp.where(at_median, rank, -jnp.inf), axis=-1, keepdims=True)
    return at_median & (jnp.arange(size) == chosen)


def mc_grpo_keep(
    advantages: Array,
    mask: Array,
    *,
    rewards: Array,
    where: Array | None = None,
    key: Array | None = None,
) -> Array:
    """The mask without the median rollout of each group; for a Recipe's ``selection``.

    Args:
      rewards, mask, where: See the module.
      advantages: Not read; every selection rule receives them.
      key: As in :func:`mc_grpo_pivot`.

    Returns:
      bool ``[..., G, T]``, False on the rollout of :func:`mc_grpo_pivot` and where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, mask = jnp.array([0.0, 0.5, 1.0]), jnp.ones((3, 2), bool)
      >>> advantages = jr.advantages.mc_grpo(rewards)
      >>> jr.advantages.mc_grpo_keep(advantages, mask, rewards=rewards)[:, 0].tolist()
      [True, False, True]

    References:
      MC-GRPO (arXiv:2601.22582).
    """
    del advantages
    _inputs.check_tokens("mc_grpo_keep", rewards, mask, where)
    return mask & ~mc_grpo_pivot(rewards, where=where, key=key)[..., None]


def jspo(rewards: Array, *, where: Array | None = None, eps: float = 1e-6) -> Array:
    """Rewards minus a baseline between the others of the group and the other groups.

        b_i = (1 - l) mean(others of the group) + l mean(rollouts of the other groups)
        l = v / (v + s + eps)
        v = mean over the other groups of var(r) / n
        s = mean over the other groups of (mean(r) - mean of those means)^2

    The noisier the group means are (v) compared with the spread between prompts (s), the larger the
    share l of the batch's mean. Nothing in the baseline depends on rollout i, so the policy
    gradient is unbiased. With l = 0 it is :func:`rloo`. A group of equal rewards still trains where
    its reward differs from the batch's mean.

    It must see the global batch: all groups of all leading axes form one pool. The only rollout of
    a group is compared with the other groups alone (l = 1) and does not count in v. If no other
    group has rollouts, the result is :func:`rloo`.

    Args:
      rewards, where: See the module.
      eps: Added to the divisor, above 0, in squared units of reward.

    Returns:
      Advantages ``[..., G]``, in units of reward; they do not add up to 0 over a group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
      >>> jr.advantages.jspo(rewards).round(3).tolist()
      [[0.5, 0.5], [-1.0, 1.0], [-0.5, -0.5]]

    References:
      Zeng et al., Shrinkage baselines (arXiv:2511.03710), ``jspo`` of the authors' code; groups of
      different sizes and of one rollout are our extension. Their ``jspo_plus_plus`` also pools the
      group itself and smooths the share over steps.
    """
    stats.check_group("jspo", rewards, where)
    checks.check_positive("jspo", finite=True, eps=eps)
    rewards = masking.zero_masked(rewards, where)
    count = stats.group_count(rewards, where)
    total = jnp.sum(rewards, axis=-1, keepdims=True)
    mean = stats.group_mean(rewards, where)
    constant = stats.group_is_constant(rewards, where)
    # The means of equal rewards are not exactly equal to them, which would show as noise.
    noise = masking.masked_var(rewards, where, axis=-1, keepdims=True, ddof=1)
    noise = jnp.where(constant, 0.0, noise) / jnp.maximum(count, 1.0)

    groups = _others((count > 0).astype(jnp.float32))
    v = _others(noise) / jnp.maximum(_others((count > 1).astype(jnp.float32)), 1.0)
    # Around the mean of all, so that the difference of the two terms keeps its digits.
    centered = jnp.where(count > 0, mean - masking.masked_mean(mean, count > 0), 0.0)
    others = jnp.maximum(groups, 1.0)
    s = jnp.maximum(_others(centered**2) / others - (_others(centered) / others) ** 2, 0.0)
    share = jnp.maximum(v, 0.0) / (jnp.maximum(v, 0.0) + s + eps)
    share = jnp.where(groups > 0, jnp.where(count == 1, 1.0, share), 0.0)

    within = jnp.where(constant, 0.0, (rewards - mean) * (count / jnp.maximum(count - 1.0, 1.0)))
    pooled = rewards - _others(total) / jnp.maximum(_others(count), 1.0)
    return masking.zero_masked((1.0 - share) * within + share * pooled, where)


def _others(x: Array) -> Array:
    """The sum over all other groups, of one value per group ``[..., 1]``."""
    return jnp.sum(x) - x
