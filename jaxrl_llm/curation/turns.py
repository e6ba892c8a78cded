"""Selection of turns: by role, by number, and by an expert's corrections.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, segments

__all__ = [
    "PatchDecision",
    "ROLES",
    "downsample_mask",
    "downsample_turns",
    "patch_decision",
    "role_loss_mask",
]

ROLES = ("system", "user", "assistant", "tool", "generation_prompt")
"""Roles of the tokens of a conversation; a role id is an index into this tuple."""


def role_loss_mask(
    role_ids: Array, *, trainable: tuple[str, ...] = ("assistant",), where: Array | None = None
) -> Array:
    """The tokens that train, by the role of their author.

        mask = where  and  role in trainable

    Tokens of the assistant include its tool calls and the token that ends its turn. Messages of a
    simulated user, tool results and the header of the assistant's turn do not train.

    Args:
      role_ids: Integers ``[..., T]``, indices into ``("system", "user", "assistant", "tool",
        "generation_prompt")``.
      trainable: Names of the roles that train.
      where: bool ``[..., T]``, True for tokens that exist; None for all.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.role_loss_mask(jnp.array([1, 4, 2, 2, 3])).tolist()
      [False, False, True, True, False]

    References:
      MUA-RL (arXiv:2508.18669), the released code.
    """
    function = "role_loss_mask"
    checks.check_min_rank(function, 1, role_ids=role_ids)
    checks.check_integer(function, role_ids=role_ids)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, role_ids=role_ids, where=where)
    mask = jnp.zeros(jnp.shape(role_ids), bool)
    for role in trainable:
        checks.check_option(function, "trainable", role, ROLES)
        mask |= jnp.asarray(role_ids) == ROLES.index(role)
    return mask if where is None else mask & where


class PatchDecision(NamedTuple):
    """Decision on a rollout after a turn; both bool ``[...]``.

    Attributes:
      patch: The expert's response replaces the policy's response in the history.
      stop: The rollout ends.
    """

    patch: Array
    stop: Array


def patch_decision(matches: Array, used: Array, *, limit: int | None = 2) -> PatchDecision:
    """Whether the expert's turn replaces a deviating turn of the policy, or the rollout ends.

        patch = not matches  and  used < limit
        stop  = not matches  and  not patch

    The policy's response remains a training sample, with its reward. Runs on the host or in a
    trace.

    Args:
      matches: bool ``[...]``, whether the turn matches the expert's turn.
      used: Integers ``[...]``, number of patches so far.
      limit: Maximum number of patches, not negative; None for no limit.

    Returns:
      A :class:`PatchDecision`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> matches, used = jnp.array([True, False, False]), jnp.array([0, 1, 2])
      >>> decision = jr.curation.patch_decision(matches, used)
      >>> decision.patch.tolist(), decision.stop.tolist()
      ([False, True, False], [False, False, True])

    References:
      UI-S1 (arXiv:2509.11543), the released code, where -1 is None; 0 ends at the first deviation.
    """
    function = "patch_decision"
    checks.check_bool(function, matches=matches)
    checks.check_integer(function, used=used)
    checks.check_same_shape(function, matches=matches, used=used)
    checks.check_non_negative(function, finite=True, limit=limit)
    left = jnp.ones(jnp.shape(used), bool) if limit is None else jnp.asarray(used) < limit
    patch = ~jnp.asarray(matches) & left
    return PatchDecision(patch, ~jnp.asarray(matches) & ~left)


def downsample_mask(key: Array, where: Array, *, multiple: int) -> Array:
    """Drops samples at random until their number is a multiple of ``multiple``.

        n = multiple floor(count / multiple) of the samples that there are, uniformly

    Fewer than ``multiple`` samples are all dropped; no sample is duplicated.

    Args:
      key: A typed random key.
      where: bool ``[...]``, True for samples that exist, over all axes.
      multiple: Number of devices that share them, at least 1.

    Returns:
      bool ``[...]``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jr.curation.downsample_mask(jax.random.key(0), jnp.ones(37, bool), multiple=8)
      >>> int(mask.sum())
      32

    References:
      EAPO, IterResearch (arXiv:2511.07327), ABSTRACT: rounding down is our reading.
    """
    checks.check_min_rank("downsample_mask", 1, where=where)
    checks.check_bool("downsample_mask", where=where)
    checks.check_count("downsample_mask", multiple=multiple)
    flat = jnp.reshape(where, (-1,))
    draws = jnp.where(flat, jax.random.uniform(key, flat.shape), jnp.inf)
    rank = jnp.argsort(jnp.argsort(draws))
    count = jnp.sum(flat, dtype=jnp.int32)
    return jnp.reshape(flat & (rank < count // multiple * multiple), jnp.shape(where))


def downsample_turns(
    advantages: Array, mask: Array, *, turn_ids: Array, key: Array, multiple: int
) -> Array:
    """Drops turns at random until the number of turns of the batch is a multiple of ``multiple``.

        keep = the turn of the token is in downsample_mask(turns with a token)

    Args:
      advantages: ``[..., T]``, not read.
      mask: bool ``[..., T]``.
      turn_ids: Integers ``[..., T]``, the turn of each token; below 0 for none, which is dropped.
      key: A typed random key.
      multiple: At least 1.

    Returns:
      bool ``[..., T]``, for the slot ``selection``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> turn_ids = jnp.array([[0, 0, 1, 1, 2, 2]])
      >>> keep = jr.curation.downsample_turns(
      ...     jnp.zeros((1, 6)), jnp.ones((1, 6), bool), turn_ids=turn_ids,
      ...     key=jax.random.key(0), multiple=2)
      >>> int(keep.sum())
      4

    References:
      EAPO, IterResearch (arXiv:2511.07327), ABSTRACT reading.
    """
    del advantages
    function = "downsample_turns"
    checks.check_mask(function, mask)
    checks.check_integer(function, turn_ids=turn_ids)
    checks.check_same_shape(function, mask=mask, turn_ids=turn_ids)
    known = mask & (turn_ids >= 0)
    labels = segments.dense_labels((turn_ids,), known)
    places = jnp.broadcast_to(jnp.arange(jnp.shape(mask)[-1]), jnp.shape(mask))
    first = known & (segments.over_label(places, labels, "min") == places)
    chosen = downsample_mask(key, first, multiple=multiple)
    return known & (segments.over_label(chosen.astype(jnp.float32), labels) > 0)
