"""Rejection of tokens and sequences that are too far from the policy that sampled them.

Each returns which tokens to keep. Shared arguments, TypeError and ValueError: see
:mod:`jaxrl_llm.corrections`.
"""

import numbers
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, kl, masking, traits
from jaxrl_llm.corrections import _inputs

Statistic = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_max")


def rejection_mask(
    old_logp: Array,
    behavior_logp: Array,
    mask: Array,
    *,
    statistic: Statistic,
    level: Level,
    upper: float,
    lower: float | None = None,
    invert: bool = False,
) -> Array:
    """Keeps tokens or sequences whose log-ratio statistic is within bounds.

        g[t] = clip(old_logp[t] - behavior_logp[t], -20, 20)
        k1 = g        keep if log(lower) <= s <= log(upper)
        k2 = g^2 / 2  keep if s <= upper
        k3 = exp(g) - 1 - g   keep if s <= upper
        s: the statistic of the token, or its sum or mean over the sequence, for all its tokens;
        level="sequence_max": keep a sequence if each of its tokens passes

    The bounds of k1 are ratios ``old / behavior``: of tokens, of sequences (sum), or of their
    geometric mean (mean). Those of k2 and k3 are nats.

    Args:
      old_logp, behavior_logp, mask: See the package.
      statistic: "k1", "k2" or "k3".
      level: "token", "sequence_sum", "sequence_mean" or "sequence_max".
      upper: Largest value to keep: a ratio, at least 1, for k1; nats, above 0, for the others.
      lower: Smallest ratio to keep, for k1 only; None for ``1 / upper``, 0 for no bound.
      invert: For k1 only: the bounds are on ``behavior / old``.

    Returns:
      Keep ``[..., T]``, bool, False where masked. An unmasked NaN is rejected.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.array([0.1, -0.3, 0.9, 0.0]), jnp.ones(4, bool)
      >>> reject = jr.bind(jr.corrections.rejection_mask, statistic="k2", upper=0.2)
      >>> reject(old_logp, jnp.zeros(4), mask, level="token").tolist()
      [True, True, False, True]

    References:
      The rejection rules of verl 0.9 (``rollout_rs``), CODE reading. verl tests ``-g`` against the
      bounds of k1, although its text says ``old / behavior``: ``invert=True`` computes the same;
      for symmetric bounds (``lower=None``) the two agree. verl has no "sequence_max" of k1.
    """
    function = "rejection_mask"
    checks.check_option(function, "statistic", statistic, ("k1", "k2", "k3"))
    checks.check_option(function, "level", level, LEVELS)
    checks.check_positive(function, upper=upper)
    if statistic == "k1":
        lower = 1.0 / upper if lower is None else lower
        _inputs.check_around_one(function, lower=lower, upper=upper)
        lower, upper = _inputs.log(lower), _inputs.log(upper)
    else:
        for name, is_set in (("lower", lower is not None), ("invert", invert)):
            if is_set:
                raise ValueError(
                    f"{function}: {name} has no effect with statistic={statistic!r}; leave it out."
                )
        lower = -jnp.inf
    log_ratio = _inputs.clamped(_inputs.log_ratio(function, old_logp, behavior_logp, mask))
    if statistic == "k1":
        value = -log_ratio if invert else log_ratio
    else:
        value = kl.estimate(-log_ratio, statistic)
    if level == "sequence_sum":
        value = _inputs.sum_over_tokens(value)
    elif level == "sequence_mean":
        value = _inputs.mean_over_tokens(value, mask)
    inside = (value >= lower) & (value <= upper)
    if level == "sequence_max":
        inside = jnp.all(inside | ~mask, axis=-1, keepdims=True)
    return mask & inside


@traits(level="sequence")
def veto_mask(
    old_logp: Array, behavior_logp: Array, mask: Array, *, threshold: float = 1e-4
) -> Array:
    """Drops sequences with a token that is very unlikely under the proximal policy.

        keep a sequence if old / behavior >= threshold at each of its tokens

    One such token shows that the sequence came from another policy, even if its share in a sum or a
    mean is small.

    Args:
      old_logp, behavior_logp, mask: See the package.
      threshold: Smallest ratio of a token, above 0 and at most 1.

    Returns:
      Keep ``[..., T]``, bool, False where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> log_ratio, mask = jnp.array([[0.0, -11.0], [0.0, -1.0]]), jnp.ones((2, 2), bool)
      >>> jr.corrections.veto_mask(log_ratio, jnp.zeros((2, 2)), mask).tolist()
      [[False, False], [True, True]]

    References:
      verl before 0.7 (``rollout_is_veto_threshold``) and the VCPO fork, CODE reading; later verl
      uses "sequence_max" of k2 in its place. The ratio is not clamped here, so that any threshold
      has an effect.
    """
    checks.check_positive("veto_mask", threshold=threshold)
    if isinstance(threshold, numbers.Real) and float(threshold) > 1:
        raise ValueError(
            "veto_mask: threshold must not be above 1, the ratio of an unchanged policy; "
            f"got {threshold:g}."
        )
    log_ratio = _inputs.log_ratio("veto_mask", old_logp, behavior_logp, mask)
    fine = (log_ratio >= _inputs.log(threshold)) | ~mask
    return mask & jnp.all(fine, axis=-1, keepdims=True)


def m2_mask(
    old_logp: Array, behavior_logp: Array, mask: Array, *, threshold: float = 0.04
) -> Array:
    """Drops the tokens with the largest log ratios until the rest is close on average (M2PO).

        keep the n tokens with the smallest d^2, with the largest n such that mean d^2 < threshold
        d = old_logp - behavior_logp; at least one token is kept

    The second moment bounds the variance of the weights of the batch, while a bound per token
    judges each token separately, so this rule drops few tokens even of very old data. Among equal
    tokens, earlier tokens are kept. All tokens of the batch are sorted, O(N log N), and
    all-gathered on a mesh: use it where the full batch is prepared.

    Args:
      old_logp, behavior_logp, mask: See the package.
      threshold: Strict upper bound of the mean squared log ratio, above 0.

    Returns:
      Keep ``[..., T]``, bool, False where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp = jnp.array([0.1, -0.4, 0.2, 1.0])
      >>> jr.corrections.m2_mask(old_logp, jnp.zeros(4), jnp.ones(4, bool), threshold=0.1).tolist()
      [True, True, True, False]

    References:
      Zheng et al., Prosperity before Collapse (arXiv:2510.01161), NOTES reading: threshold 0.04.
      The rule is AReaL's (``m2_threshold``), CODE reading.
    """
    checks.check_positive("m2_mask", threshold=threshold)
    square = _inputs.log_ratio("m2_mask", old_logp, behavior_logp, mask) ** 2
    square = jnp.where(mask, square, jnp.inf).reshape(-1)
    index = jnp.arange(square.size)
    in_order, index = jax.lax.sort((square, index), num_keys=1, is_stable=True)
    # Means of growing sets of ever larger values only grow: how many are below is where to stop.
    mean = jnp.cumsum(in_order) / (jnp.arange(square.size) + 1.0)
    count = jnp.maximum(jnp.sum(mean < threshold), 1)
    keep = jnp.zeros(square.size, bool).at[index].set(jnp.arange(square.size) < count)
    return mask & keep.reshape(jnp.shape(mask))


def off_policy_sequence_mask(
    advantages: Array, mask: Array, *, old_logp: Array, behavior_logp: Array, threshold: float = 0.5
) -> Array:
    """Drops sequences with negative advantage that have become unlikely under the policy.

        drop where A < 0 and mean over the sequence of behavior_logp - old_logp > threshold

    Penalizing answers of another policy teaches little and is unstable; good answers are kept,
    whichever policy sampled them. The rule needs advantages, so it belongs in the ``selection``
    slot of a Recipe: dropped rollouts still count in the baseline of their group.

    Args:
      advantages: ``[...]``, one per sequence; or ``[..., T]``, then tokens with A < 0 are dropped.
      mask, old_logp, behavior_logp: See the package; the old policy starts the update.
      threshold: In nats per token, not negative.

    Returns:
      Keep ``[..., T]``, bool, False where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, behavior_logp = jnp.full((3, 1), -2.0), jnp.array([[-1.0], [-1.0], [-2.0]])
      >>> jr.corrections.off_policy_sequence_mask(
      ...     jnp.array([-1.0, 1.0, -1.0]), jnp.ones((3, 1), bool),
      ...     old_logp=old_logp, behavior_logp=behavior_logp)[:, 0].tolist()
      [False, True, True]

    References:
      DeepSeek-V3.2 (arXiv:2512.02556), NOTES reading. TRL's ``off_policy_mask_threshold`` compares
      with the policy being trained, during the update; here the mask is known before the batch is
      divided.
    """
    checks.check_non_negative("off_policy_sequence_mask", threshold=threshold)
    log_ratio = _inputs.log_ratio("off_policy_sequence_mask", old_logp, behavior_logp, mask)
    gap = -_inputs.mean_over_tokens(log_ratio, mask)
    advantages = jax.lax.stop_gradient(
        masking.spread("off_policy_sequence_mask", "advantages", advantages, mask)
    )
    return mask & ~((advantages < 0) & (gap > threshold))
