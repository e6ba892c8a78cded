"""Advantages of groups in which some rollouts were sampled with a hint (ADHint).

``hint_mask`` is bool ``[..., G, T]``, True for the tokens of a hint inside the response. All raise
TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats, traits

__all__ = ["adhint", "grpo_imitating", "hint_consistency", "hint_preservation"]


def adhint(
    rewards: Array,
    *,
    hinted: Array,
    where: Array | None = None,
    kappa: float = 1.0,
    eps: float = 1e-6,
) -> Array:
    """The group's standardized rewards, weighed by how much the hint helped.

        A0_i = (r_i - mean) / (std + eps)     over all rollouts, plain and hinted; ddof 1
        D    = mean of hinted rewards - mean of plain rewards
        A_i  = A0_i exp(+kappa D)     plain and A0 > 0,  or hinted and A0 < 0
        A_i  = A0_i exp(-kappa D)     plain and A0 < 0,  or hinted and A0 > 0

    Where the hint made a difference, right answers without it and failures in spite of it count
    more. A group with only hinted or only plain rollouts has D = 0, and equal rewards give A = 0.

    Args:
      rewards: ``[..., G]``, floating point, in [0, 1].
      hinted: bool ``[..., G]``, True for rollouts sampled with a hint.
      where: bool ``[..., G]``, True for rollouts that take part; None keeps all.
      kappa: Strength, not negative; 0 is the advantage of GRPO.
      eps: Added to the deviation, above 0.

    Returns:
      Advantages ``[..., G]``, float32; 0 for rollouts that take no part.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, hinted = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([False, False, True, True])
      >>> jr.advantages.adhint(rewards, hinted=hinted).round(3).tolist()  # D = 1/2
      [0.82..., -0.9..., 0.30..., 0.30...]

    References:
      ADHint (arXiv:2512.13095), ABSTRACT reading: which rollouts weigh more is from the paper; the
      form of the factor and its default are ours.
    """
    function = "adhint"
    stats.check_group(function, rewards, where)
    checks.check_min_rank(function, 1, hinted=hinted)
    checks.check_bool(function, hinted=hinted)
    checks.check_same_shape(function, rewards=rewards, hinted=hinted)
    checks.check_non_negative(function, finite=True, kappa=kappa)
    checks.check_positive(function, finite=True, eps=eps)
    rewards = masking.zero_masked(rewards, where)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    centered = rewards - stats.group_mean(rewards, where)
    base = centered / (stats.group_std(rewards, where, ddof=1) + eps)
    base = jnp.where(stats.group_is_constant(rewards, where), 0.0, base)
    with_hint, without = valid & hinted, valid & ~hinted
    helped = stats.group_mean(rewards, with_hint) - stats.group_mean(rewards, without)
    both = jnp.any(with_hint, -1, keepdims=True) & jnp.any(without, -1, keepdims=True)
    sign = jnp.where(hinted, -1.0, 1.0) * jnp.sign(base)
    factor = jnp.exp(kappa * jnp.where(both, helped, 0.0) * sign)
    return masking.zero_masked(base * factor, where)


def grpo_imitating(rewards: Array, *, imitated: Array, where: Array | None = None) -> Array:
    """:func:`~jaxrl_llm.advantages.grpo` among the rollouts that are not imitated; 0 for the rest.

    Args:
      rewards: ``[..., G]``, floating point.
      imitated: bool ``[..., G]``, True for responses whose likelihood is raised by another term
        (:func:`~jaxrl_llm.regularizers.imitation`).
      where: bool ``[..., G]``, True for rollouts that take part; None keeps all.

    Returns:
      Advantages ``[..., G]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, imitated = jnp.array([1.0, 0.0, 1.0]), jnp.array([False, False, True])
      >>> jr.advantages.grpo_imitating(rewards, imitated=imitated).round(3).tolist()
      [0.707..., -0.707..., 0.0]

    References:
      Cog-Rethinker (arXiv:2510.15979), ABSTRACT reading.
    """
    function = "grpo_imitating"
    stats.check_group(function, rewards, where)
    checks.check_min_rank(function, 1, imitated=imitated)
    checks.check_bool(function, imitated=imitated)
    checks.check_same_shape(function, rewards=rewards, imitated=imitated)
    sampled = ~imitated if where is None else where & ~imitated
    rewards = masking.zero_masked(rewards, sampled)
    centered = rewards - stats.group_mean(rewards, sampled)
    scaled = centered / (stats.group_std(rewards, sampled, ddof=1) + 1e-6)
    scaled = jnp.where(stats.group_is_constant(rewards, sampled), 0.0, scaled)
    return masking.zero_masked(scaled, sampled)


@traits(token_values=True)
def hint_consistency(
    advantages: Array, mask: Array, *, hint_mask: Array, old_entropy: Array
) -> Array:
    """Less advantage for hint tokens whose entropy differs from that of the response.

        c[t] = min(H[t], Hbar) / max(H[t], Hbar, 1e-6)    on tokens of the hint, else 1
        A'[t] = c[t] A[t],   Hbar = mean entropy of the tokens after the hint

    Args:
      advantages: ``[..., G]`` spread over the tokens, or ``[..., G, T]``; floating point.
      mask: bool ``[..., G, T]``, True for the tokens that are trained.
      hint_mask: See the module.
      old_entropy: ``[..., G, T]`` entropy (nats) of the policy that sampled, not negative.

    Returns:
      Advantages ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, hint = jnp.ones((1, 2), bool), jnp.array([[True, False]])
      >>> entropy = jnp.array([[1.2, 0.4]])
      >>> jr.advantages.hint_consistency(
      ...     jnp.array([3.0]), mask, hint_mask=hint, old_entropy=entropy).round(4).tolist()
      [[1.0, 3.0]]

    References:
      ADHint (arXiv:2512.13095), ABSTRACT reading: the comparison of the two entropies is from the
      paper, the ratio is ours.
    """
    function = "hint_consistency"
    masking.check_tokens(function, mask, old_entropy=old_entropy)
    checks.check_bool(function, hint_mask=hint_mask)
    checks.check_same_shape(function, mask=mask, hint_mask=hint_mask)
    advantages = masking.spread(function, "advantages", advantages, mask)
    entropy = masking.zero_masked(old_entropy, mask)
    after = masking.masked_mean(entropy, mask & ~hint_mask, axis=-1, keepdims=True)
    ratio = jnp.minimum(entropy, after) / jnp.maximum(jnp.maximum(entropy, after), 1e-6)
    return advantages * jnp.where(hint_mask, ratio, 1.0)


@traits(token_values=True)
def hint_preservation(advantages: Array, mask: Array, *, hint_mask: Array) -> Array:
    """Sets negative advantages of hint tokens to 0.

        A'[t] = 0 on tokens of the hint where A < 0, else A[t]

    The tokens still count in the mean of the loss if this is the last advantage of a chain.

    Args:
      advantages: ``[..., G]`` spread over the tokens, or ``[..., G, T]``; floating point.
      mask: bool ``[..., G, T]``, True for the tokens that are trained.
      hint_mask: See the module.

    Returns:
      Advantages ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, hint = jnp.ones((2, 2), bool), jnp.array([[True, False]] * 2)
      >>> jr.advantages.hint_preservation(jnp.array([1.0, -1.0]), mask, hint_mask=hint).tolist()
      [[1.0, 1.0], [0.0, -1.0]]

    References:
      ADHint (arXiv:2512.13095), PAPER reading through a note.
    """
    function = "hint_preservation"
    checks.check_mask(function, mask)
    checks.check_bool(function, hint_mask=hint_mask)
    checks.check_same_shape(function, mask=mask, hint_mask=hint_mask)
    advantages = masking.spread(function, "advantages", advantages, mask)
    return jnp.where(hint_mask & (advantages < 0), 0.0, advantages)
