"""Advantages relative to the group: each rollout against the others of its prompt.

- ``rewards``: floating point ``[..., G]``, one per rollout; a group lies along the last axis.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. The others count in
  no statistic, get 0 and may hold anything.
- ``singleton``: what the only unmasked rollout of a group gets: "zero" for 0, "raw" for its reward.
- Advantages are float32 ``[..., G]``. Where they add up to 0 over a group, a "raw" singleton is the
  exception. A group of equal unmasked rewards (max == min), or an empty one, gets exactly 0, unless
  a function's page says otherwise.
- A wrong dtype raises TypeError; shapes that do not match, and an option that is unknown, out of
  its range or without effect, raise ValueError.
"""

import warnings
from typing import Literal, get_args

import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs
from jaxrl_llm.core import Array, checks, curves, masking, stats

__all__ = [
    "asymre",
    "dr_grpo",
    "gpg",
    "grpo",
    "grpo_from_baseline",
    "grpo_split",
    "hbpo",
    "informative_share",
    "rloo",
]

Singleton = Literal["zero", "raw"]
Baseline = Literal["batch", "leave_one_out", "batch_leave_one_out", "zero"]


def grpo(
    rewards: Array,
    *,
    where: Array | None = None,
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int | None = None,
    eps: float | None = None,
    singleton: Singleton = "zero",
    baseline: Literal["group"] | Baseline | None = None,
) -> Array:
    """Rewards minus their group mean, over a standard deviation.

        A_i = (r_i - mean(r)) / (std(r) + eps)

    The deviation is over the group with ``scale="group"`` (GRPO), or over the raw, uncentered
    rewards of the full batch with ``"batch"``; ``"none"`` does not divide (:func:`dr_grpo`).
    ``"batch"`` must see the global batch and needs communication if the batch is sharded over
    prompts. :func:`grpo_from_baseline` subtracts another baseline.

    Args:
      rewards, where: See the module.
      scale: What the deviation is taken over: "group", "batch" or "none".
      ddof: Delta degrees of freedom of the deviation: 1 (None means 1) divides by n - 1, 0 by n.
      eps: Added to the deviation, above 0, in units of reward. None means 1e-6.
      singleton: As in the module; "raw" is the reward as if the mean were 0 and the deviation 1
        (also the batch's, where that is 0).
      baseline: Deprecated: use :func:`grpo_from_baseline`, or omit "group".

    Returns:
      Advantages ``[..., G]``; they add up to 0 over a group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
      >>> jr.advantages.grpo(rewards).round(3).tolist()
      [[0.866..., -0.866..., -0.866..., 0.866...], [0.0, 0.0, 0.0, 0.0]]

    References:
      Shao et al., DeepSeekMath (arXiv:2402.03300). verl, TRL and tunix use ``ddof=1``; verl and
      tunix add 1e-6, TRL 1e-4. TRL's batch scaling is ``scale="batch"``. verl treats a group of one
      as "raw"; our default of 0, and the exact 0 of equal rewards, are ours. Up to 0.8, verl's
      vectorized form bounds the deviation below by 1e-3.
    """
    if baseline is not None:
        warnings.warn(
            "grpo: baseline is deprecated; call grpo_from_baseline, or omit baseline='group'.",
            DeprecationWarning,
            stacklevel=2,
        )
        if baseline != "group":
            if scale == "none":
                raise ValueError(f"grpo: baseline={baseline!r} has no scale='none'. See rloo.")
            return grpo_from_baseline(
                rewards,
                baseline=baseline,
                where=where,
                scale=scale,
                ddof=1 if ddof is None else ddof,
                eps=1e-6 if eps is None else eps,
                singleton=singleton,
            )
    rewards = _inputs.group_rewards("grpo", rewards, where, singleton)
    checks.check_option("grpo", "scale", scale, ("group", "batch", "none"))
    centered = rewards - stats.group_mean(rewards, where)
    if scale == "none":
        checks.check_no_effect("grpo", "with scale='none'", ddof=ddof, eps=eps)
        return _inputs.settle_group(centered, rewards, rewards, where, singleton)
    ddof = 1 if ddof is None else ddof
    eps = 1e-6 if eps is None else eps
    checks.check_option("grpo", "ddof", ddof, (0, 1))
    checks.check_positive("grpo", finite=True, eps=eps)
    if scale == "group":
        std = stats.group_std(rewards, where, ddof=ddof)
        alone = rewards / (1.0 + eps)
    else:
        std = masking.masked_std(rewards, where, ddof=ddof)
        # Only singletons are left to scale in a batch without spread; eps must not blow them up.
        alone = rewards / (jnp.where(masking.is_constant(rewards, where), 1.0, std) + eps)
    return _inputs.settle_group(centered / (std + eps), alone, rewards, where, singleton)


def grpo_from_baseline(
    rewards: Array,
    *,
    baseline: Baseline,
    where: Array | None = None,
    scale: Literal["group", "batch"] = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Array:
    """Rewards minus a baseline, over their root mean square deviation from it.

        baseline="batch":                b = mean of the rewards of the full batch
        baseline="leave_one_out":        b_i = mean of the other rewards of the group
        baseline="batch_leave_one_out":  b_i = mean of the other rewards of the full batch
        baseline="zero":                 b = 0
        A_i = (r_i - b_i) / (sqrt(sum_j (r_j - b_j)^2 / (n - ddof)) + eps)

    The sum is over the group or, with ``scale="batch"``, over the full batch. With a baseline of
    the batch only a batch of equal rewards gets exactly 0, and with "zero" only rewards of 0 do.
    "batch", as ``scale`` or in ``baseline``, must see the global batch and needs communication if
    the batch is sharded over prompts.

    Args:
      rewards, where: See the module.
      baseline: As above. For the group mean see :func:`grpo`.
      scale: What the deviation is taken over: "group" or "batch". For no division see :func:`rloo`.
      ddof: Delta degrees of freedom of the deviation: 1 divides by n - 1, 0 by n.
      eps: Added to the deviation, above 0, in units of reward.
      singleton: As in the module; "raw" is the reward as if the baseline were 0 and the deviation
        1.

    Returns:
      Advantages ``[..., G]``; they add up to 0 over a group with "leave_one_out".

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[3.0, 4.0], [0.0, 0.0]])
      >>> jr.advantages.grpo_from_baseline(rewards, baseline="zero").round(3).tolist()
      [[0.6..., 0.8...], [0.0, 0.0]]

    References:
      AReaL's ``Normalization``: ``mean_level="batch"``, ``mean_leave1out``, both, and
      ``mean_level=None``; its ``std_level`` is ``scale`` and its ``std_unbiased=False`` is
      ``ddof=0``.
    """
    function = "grpo_from_baseline"
    rewards = _inputs.group_rewards(function, rewards, where, singleton)
    checks.check_option(function, "baseline", baseline, get_args(Baseline))
    checks.check_option(function, "scale", scale, ("group", "batch"))
    checks.check_option(function, "ddof", ddof, (0, 1))
    checks.check_positive(function, finite=True, eps=eps)
    centered = _above_baseline(rewards, where, baseline)
    count = stats.group_count(rewards, where)
    axis, sample = (-1, count) if scale == "group" else (None, jnp.sum(count))
    squares = masking.masked_sum(centered**2, where, axis=axis, keepdims=axis is not None)
    std = masking.safe_sqrt(squares / jnp.maximum(sample - ddof, 1.0))
    alone = 0.0 if singleton == "zero" else rewards / (1.0 + eps)
    advantages = jnp.where(count == 1, alone, centered / (std + eps))
    return masking.zero_masked(advantages, where)


def _above_baseline(rewards: Array, where: Array | None, baseline: Baseline) -> Array:
    """Rewards ``[..., G]`` minus a baseline of :func:`grpo_from_baseline`."""
    if baseline == "leave_one_out":
        return rloo(rewards, where=where)
    if baseline == "zero":
        return masking.zero_masked(rewards, where)
    centered = rewards - masking.masked_mean(rewards, where)
    if baseline == "batch_leave_one_out":
        count = jnp.sum(stats.group_count(rewards, where))
        centered = centered * (count / jnp.maximum(count - 1.0, 1.0))
    return jnp.where(masking.is_constant(rewards, where), 0.0, centered)


def dr_grpo(rewards: Array, *, where: Array | None = None, singleton: Singleton = "zero") -> Array:
    """Rewards minus their group mean, without a division.

        A_i = r_i - mean(r)

    This is the advantage of Dr. GRPO; its loss divides by a constant length,
    :func:`jaxrl_llm.aggregate.fixed_length`. It equals (n - 1) / n times :func:`rloo` for a group
    of n, and :func:`grpo` with ``scale="none"``.

    Args:
      rewards, where, singleton: See the module.

    Returns:
      Advantages ``[..., G]``, in units of reward; they add up to 0 over a group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.dr_grpo(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist()
      [0.75, -0.25, -0.25, -0.25]

    References:
      Liu et al., Understanding R1-Zero-Like Training (arXiv:2503.20783). verl's option is
      ``norm_adv_by_std_in_grpo=False``; verl gives a group of one its reward ("raw").
    """
    rewards = _inputs.group_rewards("dr_grpo", rewards, where, singleton)
    centered = rewards - stats.group_mean(rewards, where)
    return _inputs.settle_group(centered, rewards, rewards, where, singleton)


def asymre(rewards: Array, *, where: Array | None = None, shift: float = -0.1) -> Array:
    """Rewards minus a baseline that lies a constant below their group mean.

        A_i = r_i - (mean(r) + shift)

    On samples of the policy itself a constant changes no expected gradient. On those of another
    policy a lower baseline adds, to the gradient of :func:`dr_grpo`, ``-shift`` times that of the
    likelihood of all samples: it gives more weight to good responses than to bad ones and holds the
    policy near the one that sampled.

    Args:
      rewards, where: See the module. A group of one, or of equal rewards, gets ``-shift``.
      shift: Of the baseline, in units of reward; below 0 for a baseline below the mean. 0 is
        :func:`dr_grpo`.

    Returns:
      Advantages ``[..., G]``, in units of reward; over a group they add up to ``-shift`` times its
      rollouts.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.asymre(jnp.array([1.0, 0.0, 0.0, 0.0]), shift=-0.25).tolist()
      [1.0, 0.0, 0.0, 0.0]

    References:
      Arnal et al., Asymmetric REINFORCE (arXiv:2506.20520), whose ``delta V`` is ``shift``, NOTES
      reading. Trinity-RFT's ``asymre`` gives a group of one its reward.
    """
    rewards = _inputs.group_rewards("asymre", rewards, where, "zero")
    checks.check_real("asymre", finite=True, shift=shift)
    centered = rewards - stats.group_mean(rewards, where)
    centered = _inputs.settle_group(centered, rewards, rewards, where, "zero")
    return masking.zero_masked(centered - shift, where)


def rloo(rewards: Array, *, where: Array | None = None, singleton: Singleton = "zero") -> Array:
    """Rewards minus the mean reward of the other rollouts of the group (leave one out).

        A_i = r_i - (sum(r) - r_i) / (n - 1)  =  n / (n - 1) * (r_i - mean(r))

    The baseline of a rollout does not depend on that rollout, so the policy gradient with it is
    unbiased for every group size n; it tends to :func:`dr_grpo` as n grows.

    Args:
      rewards, where, singleton: See the module.

    Returns:
      Advantages ``[..., G]``, in units of reward; they add up to 0 over a group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.rloo(jnp.array([3.0, 0.0, 0.0, 0.0])).tolist()
      [3.0, -1.0, -1.0, -1.0]

    References:
      Ahmadian et al., Back to Basics (arXiv:2402.14740). For a group of one, verl's ``rloo`` gives
      the reward ("raw") and its ``rloo_vectorized`` gives 0, as we do by default.
    """
    rewards = _inputs.group_rewards("rloo", rewards, where, singleton)
    count = stats.group_count(rewards, where)
    centered = rewards - stats.group_mean(rewards, where)
    leave_one_out = centered * (count / jnp.maximum(count - 1.0, 1.0))
    return _inputs.settle_group(leave_one_out, rewards, rewards, where, singleton)


# A spread below this counts as none, in units of reward; also added to the share.
_SPREAD = 1e-5


def gpg(
    rewards: Array,
    *,
    where: Array | None = None,
    scale: Literal["none", "group"] = "none",
    mode: Literal["informative", "nonzero_reward"] = "informative",
    eps: float | None = None,
    singleton: Singleton = "zero",
) -> Array:
    """Rewards minus their group mean, times a factor that makes up for groups without a signal.

        A_i = alpha (r_i - mean(r)) / F
        mode="informative":     alpha = 1 / (informative_share(r) + 1e-5)
        mode="nonzero_reward":  alpha = rollouts / max(rollouts with a reward that is not 0, 1)
        F = 1, or std(r) + eps with scale="group"

    The factor is one number for the full batch, so with ``surrogates.reinforce`` and
    ``aggregate.token_mean`` the loss is the paper's: with equal lengths, about the loss of the
    informative groups alone. If all groups are informative, it is the loss of :func:`dr_grpo`.

    Args:
      rewards, where: See the module.
      scale: "none", or "group" to divide by the sample deviation of the group.
      mode: What the factor counts: "informative" for the share of groups with a spread, or
        "nonzero_reward" for the share of rollouts with a reward, which is verl's.
      eps: Added to the deviation, above 0, in units of reward. None means 1e-4.
      singleton: As in the module; "raw" is alpha times the reward, and requires
        ``mode="nonzero_reward"``: the other mode treats a group of one as without a signal.

    Returns:
      Advantages ``[..., G]``; they add up to 0 over a group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.0], [1.0, 1.0]])
      >>> jr.advantages.gpg(rewards).round(3).tolist()
      [[1.0, -1.0], [0.0, 0.0]]

    References:
      Chu et al., GPG (arXiv:2504.02546). verl's ``gpg`` is ``mode="nonzero_reward"``, a different
      quantity (4/3 in the example), with "raw". The released loop continues to sample while the
      share is below 0.4 (0.5 in some versions); a collector does that here.
    """
    rewards = _inputs.group_rewards("gpg", rewards, where, singleton)
    checks.check_option("gpg", "scale", scale, ("none", "group"))
    checks.check_option("gpg", "mode", mode, ("informative", "nonzero_reward"))
    if scale == "none":
        checks.check_no_effect("gpg", "with scale='none'", eps=eps)
    if singleton == "raw" and mode == "informative":
        raise ValueError(
            "gpg: singleton='raw' needs mode='nonzero_reward'; with mode='informative' a group of "
            "one counts as no signal, and the factor would blow up its reward."
        )
    eps = 1e-4 if eps is None else eps
    checks.check_positive("gpg", finite=True, eps=eps)
    if mode == "informative":
        alpha = 1.0 / (informative_share(rewards, where=where) + _SPREAD)
    else:
        count = jnp.sum(stats.group_count(rewards, where))
        alpha = count / jnp.maximum(jnp.sum(rewards != 0, dtype=jnp.float32), 1.0)
    centered = rewards - stats.group_mean(rewards, where)
    if scale == "group":
        centered = centered / (stats.group_std(rewards, where) + eps)
    return _inputs.settle_group(alpha * centered, alpha * rewards, rewards, where, singleton)


def informative_share(rewards: Array, *, where: Array | None = None) -> Array:
    """The share of groups whose rewards differ, among the groups with a rollout.

        phi = groups with std(r) > 1e-5 / groups with an unmasked rollout

    A group of one has no spread. The share is the inverse of GPG's factor alpha.

    Args:
      rewards, where: See the module.

    Returns:
      A float32 scalar; 0 for a batch without a rollout.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.informative_share(jnp.array([[1.0, 0.0], [1.0, 1.0]]))
      Array(0.5, dtype=float32)

    References:
      Chu et al., GPG (arXiv:2504.02546). Some versions of the released code test std == 0.
    """
    stats.check_group("informative_share", rewards, where)
    rewards = masking.zero_masked(rewards, where)
    spread = stats.group_std(rewards, where) > _SPREAD
    informative = spread & ~stats.group_is_constant(rewards, where)
    groups = jnp.sum(stats.group_count(rewards, where) > 0, dtype=jnp.float32)
    return jnp.sum(informative, dtype=jnp.float32) / jnp.maximum(groups, 1.0)


def grpo_split(rewards: Array, *, steered: Array, where: Array | None = None) -> Array:
    """Rewards minus the mean over the policy's own rollouts, for the full group.

        A_i = r_i - mean over the rollouts that are not steered of r

    A guide's rollouts do not raise the baseline of the policy's rollouts. Where all of the policy's
    rollouts fail they get exactly 0, and a teacher's answer gets its reward. Without a rollout of
    the policy the mean is 0.

    Args:
      rewards, where: See the module.
      steered: bool ``[..., G]``, True for the rollouts of a guide.

    Returns:
      Advantages ``[..., G]``, in units of reward; those of the policy's rollouts add up to 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> steered = jnp.array([False, False, True])
      >>> jr.advantages.grpo_split(jnp.array([0.0, 0.0, 1.0]), steered=steered).tolist()
      [0.0, 0.0, 1.0]

    References:
      Yuan et al., AMPO (arXiv:2510.02227), whose released code has versions with and without a
      division. There the mean is 0 if the policy has a single rollout.
    """
    stats.check_group("grpo_split", rewards, where)
    checks.check_min_rank("grpo_split", 1, steered=steered)
    checks.check_bool("grpo_split", steered=steered)
    checks.check_same_shape("grpo_split", rewards=rewards, steered=steered)
    unsteered = ~steered if where is None else where & ~steered
    rewards = masking.zero_masked(rewards, where)
    advantages = rewards - stats.group_mean(rewards, unsteered)
    # The mean of three float32 rewards of 0.1 is not 0.1.
    settled = stats.group_is_constant(rewards, unsteered) & unsteered
    any_own = jnp.any(unsteered, axis=-1, keepdims=True)
    settled |= stats.group_is_constant(rewards, where) & any_own
    return masking.zero_masked(jnp.where(settled, 0.0, advantages), where)


def hbpo(
    rewards: Array,
    *,
    budgets: Array,
    where: Array | None = None,
    intra_weight: float = 1.0,
    max_length: float = 4096.0,
    scale: float = 4.0,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Literal["zero", "raw"] = "zero",
) -> Array:
    """A z-score over the group, plus the mean reward of the same budget minus its ideal reward.

        ideal(b) = scale cos(pi b / (2 max_length)), 0 from max_length on
        A_i = (r_i - mean(r)) / (std(r) + eps)
              + intra_weight (mean of r over the rollouts of budget b_i - ideal(b_i))

    When all rewards are equal the first term vanishes, but the second need not. A right answer can
    get a negative advantage if rollouts of its budget mostly fail. A group of one gets no second
    term. Budgets are compared for all pairs of a group, so the work grows with G squared.

    Args:
      where: See the module.
      rewards: As in the module; the reward half is ``rewards.hbpo_rewards``.
      budgets: ``[..., G]``, floating point, the tokens each rollout was told it may use.
      intra_weight: Weight of the second term, not negative: 1 is the paper, 2 the released code.
      max_length: Length whose ideal reward is 0, and the budget of rollouts without one; above 0.
      scale: Reward of a right answer of length 0.
      ddof: Delta degrees of freedom of the deviation, 1 or 0.
      eps: Added to the deviation, above 0, in units of reward.
      singleton: As in the module; "raw" is the reward over 1 + eps.

    Returns:
      Advantages ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([3.9231, 0.0, 2.8284, 2.8284])
      >>> budgets = jnp.array([512.0, 512.0, 2048.0, 2048.0])
      >>> [round(x, 3) for x in jr.advantages.hbpo(rewards, budgets=budgets).tolist()]
      [-1.051, -3.389, 0.258, 0.258]

    References:
      HBPO (arXiv:2507.15844). The released code adds the second term twice (``intra_weight=2``),
      which reads like a slip, takes 3.1416 for pi, and gives a group of one its reward ("raw").
    """
    name = "hbpo"
    stats.check_group(name, rewards, where)
    checks.check_min_rank(name, 1, budgets=budgets)
    checks.check_float(name, budgets=budgets)
    checks.check_same_shape(name, rewards=rewards, budgets=budgets)
    checks.check_non_negative(name, finite=True, intra_weight=intra_weight)
    checks.check_positive(name, finite=True, max_length=max_length, eps=eps)
    checks.check_option(name, "ddof", ddof, (0, 1))
    checks.check_option(name, "singleton", singleton, ("zero", "raw"))
    inter = grpo(rewards, where=where, ddof=ddof, eps=eps, singleton=singleton)
    budgets = masking.zero_masked(budgets, where)
    same = budgets[..., :, None] == budgets[..., None, :]
    same = same if where is None else same & where[..., None, :]
    rewards = masking.zero_masked(rewards, where)
    mean = masking.masked_mean(jnp.broadcast_to(rewards[..., None, :], same.shape), same, axis=-1)
    ideal = curves.quarter_cosine(budgets, end=max_length, scale=scale)
    several = stats.group_count(rewards, where) > 1
    intra = masking.zero_masked(jnp.where(several, mean - ideal, 0.0), where)
    return inter + intra_weight * intra
