"""The spread of rewards within groups of a batch, and the entropy of the policy on it.

A wrong dtype raises TypeError; shapes that differ raise ValueError.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, masking, stats


class GroupSpread(NamedTuple):
    """The spread of rewards within the groups of a batch, float32 scalars."""

    informative: Array
    mean_std: Array


def group_spread(rewards: Array, *, where: Array | None = None) -> GroupSpread:
    """The share of groups whose rewards differ, and the mean deviation within groups.

        informative = share of non-empty groups with max(r) > min(r)
        mean_std    = mean over non-empty groups of std(r), dividing by n - 1

    A group of equal rewards has advantages of 0 in every group-relative method.

    Args:
      rewards: ``[..., G]``, floating point; a group lies along the last axis.
      where: bool ``[..., G]``, True for rollouts that take part; None for all.

    Returns:
      ``GroupSpread(informative, mean_std)``, float32 scalars; both 0 where nothing is unmasked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.0], [1.0, 1.0]])
      >>> float(jr.diagnostics.group_spread(rewards).informative)
      0.5

    References:
      Yu et al., DAPO (arXiv:2503.14476), which replaces groups of equal rewards by new samples.
    """
    stats.check_group("group_spread", rewards, where)
    constant = stats.group_is_constant(rewards, where)
    non_empty = stats.group_count(rewards, where) > 0
    std = jnp.where(constant, 0.0, stats.group_std(rewards, where, ddof=1))
    return GroupSpread(
        informative=masking.masked_mean(~constant, non_empty),
        mean_std=masking.masked_mean(std, non_empty),
    )


def mean_entropy(entropy: Array, mask: Array) -> Array:
    """Entropy of the policy, averaged over the unmasked tokens.

        mean over unmasked tokens of H[t]

    Args:
      entropy: Entropy of the next-token distribution at each token, ``[..., T]``, nats.
      mask: bool ``[..., T]``, True = keep.

    Returns:
      Nats per token, float32 scalar; 0 if everything is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> entropy, mask = jnp.array([2.0, 1.0, jnp.nan]), jnp.array([True, True, False])
      >>> float(jr.diagnostics.mean_entropy(entropy, mask))
      1.5

    References:
      None; verl's ``actor/entropy`` is averaged like its loss, which need not be over tokens.
    """
    masking.check_tokens("mean_entropy", mask, entropy=entropy)
    return masking.masked_mean(entropy, mask)
