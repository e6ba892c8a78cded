"""Selections of the training tokens of forked responses."""

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks
from jaxrl_llm.core.branches import branches, sampled_here
from jaxrl_llm.curation.trees.forks import depth_prune, width_prune

__all__ = ["branch_tokens", "segment_tokens"]


def branch_tokens(
    advantages: Array,
    mask: Array,
    node_ids: Array,
    current_version: Array | None = None,
    *,
    ratio: float | None = None,
    keep: Literal["best", "extremes"] | None = None,
    window: Sequence[int] | None = None,
    interval: int | None = None,
    stop: int | None = None,
    max_depth: int | None = None,
) -> Array:
    """The tokens that train: each node once, without the pruned nodes.

        keep = first row of the node  and  not pruned

    With ``ratio``, leaves are pruned by :func:`width_prune`, with ``window`` depths by
    :func:`depth_prune`. Pruned nodes still count in rewards and in the statistics of a depth. Among
    equal advantages the rollout with the lower index counts as the larger.

    Args:
      advantages: ``[..., G, T]``, floating point, equal for all tokens of a node.
      mask: bool ``[..., G, T]``.
      node_ids: ``[..., G, T]`` integers, the rollout that sampled each token; below 0 for none.
      current_version: ``[...]`` integers, the training step; needed with ``interval``.
      ratio: Share of the leaves that train; None for all.
      keep: "extremes" of the leaves of a group, or the "best" of those of a last split; only with
        ``ratio``. None means "extremes".
      window: Depths that do not train; None for no window.
      interval: Steps after which the window slides up by one; None for a fixed one.
      stop: Depth beyond which the window does not slide; None for 0.
      max_depth: The largest depth of a node; None for floor(log2(G)).

    Returns:
      bool ``[..., G, T]``.

    Raises:
      TypeError: If an argument has a wrong dtype.
      ValueError: If a shape is wrong, or an option out of range or without effect.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ids, mask = jnp.array([[0, 1], [0, 2]]), jnp.ones((2, 2), bool)
      >>> jr.curation.branch_tokens(jnp.zeros((2, 2)), mask, ids).tolist()
      [[True, True], [False, True]]

    References:
      BranchGRPO (arXiv:2509.06040), the released code. There the nodes are denoising steps; here
      they are segments of a text.
    """
    function = "branch_tokens"
    checks.check_float(function, advantages=advantages)
    checks.check_same_shape(function, advantages=advantages, mask=mask)
    if ratio is None:
        checks.check_no_effect(function, "without ratio", keep=keep)
    if window is None:
        checks.check_no_effect(function, "without window", interval=interval, stop=stop)
    tree = branches(function, node_ids, mask, max_depth=max_depth)
    trains = tree.nodes
    depth = jnp.arange(trains.shape[-1])
    if window is not None:
        step: Array | int = 0
        if interval is not None:
            if current_version is None:
                raise ValueError(f"{function}: interval needs current_version.")
            checks.check_shape(
                function, "current_version", current_version, jnp.shape(advantages)[:-2]
            )
            step = jnp.asarray(current_version)[..., None, None]  # beside depths and the window
        inside = depth_prune(depth, window=window, step=step, interval=interval, stop=stop or 0)
        trains &= jnp.broadcast_to(inside[..., None, :], trains.shape)
    if ratio is not None:
        at = tree.depth[..., None, :] == depth[:, None]
        values = jnp.max(jnp.where(at, advantages[..., None, :], -jnp.inf), axis=-1)
        # A response has one leaf.
        is_leaf = jnp.any(tree.leaves, axis=-1)
        leaf = jnp.max(jnp.where(tree.leaves, values, -jnp.inf), axis=-1)
        leaf = jnp.where(is_leaf, leaf, 0.0)
        # In the order of their numbers, which breaks ties alike in any order of the members.
        last = jnp.max(jnp.where(mask, jnp.arange(mask.shape[-1]), 0), axis=-1, keepdims=True)
        numbers = jnp.take_along_axis(jnp.asarray(node_ids), last, axis=-1)[..., 0]
        order = jnp.argsort(numbers, axis=-1, stable=True)
        leaf, there = (jnp.take_along_axis(x, order, axis=-1) for x in (leaf, is_leaf))
        keep = "extremes" if keep is None else keep
        if keep == "best":
            above = jnp.roll(tree.first, 1, axis=-1).at[..., 0].set(-1)
            # The parent's first row and depth; leaves of depth 0 are of one branch.
            parent = jnp.max(
                jnp.where(tree.leaves, jnp.where(above < 0, 0, above * depth.size + depth), 0), -1
            )
            parent = jnp.take_along_axis(parent, order, axis=-1)
            of_one = (parent[..., None] == parent[..., None, :]) & there[..., None, :]
            G = of_one.shape[-1]
            wide = jnp.broadcast_to(leaf[..., None, :], (*leaf.shape[:-1], G, G))
            kept = jnp.any(width_prune(wide, ratio=ratio, keep=keep, where=of_one), axis=-2)
        else:
            kept = width_prune(leaf, ratio=ratio, keep=keep, where=there)
        kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
        trains &= ~tree.leaves | kept[..., None]
    rows = jnp.arange(trains.shape[-2])[:, None]
    depth_of = jnp.maximum(tree.depth, 0)
    own = jnp.take_along_axis(tree.first, depth_of, axis=-1) == rows
    return tree.of_tokens(trains, fill=False) & own & mask


def segment_tokens(
    advantages: Array,
    mask: Array,
    node_ids: Array,
    old_logp: Array | None = None,
    *,
    max_prob: float | None = 0.9,
) -> Array:
    """The tokens that train: uncertain tokens of segments that differ from their siblings, once.

        keep = A != 0  and  exp(old_logp) < max_prob  and  the first response that has the token

    Args:
      advantages: ``[..., G, T]``, floating point.
      mask: bool ``[..., G, T]``.
      node_ids: ``[..., G, T]`` integers, the rollout that sampled each token; below 0 for none.
      old_logp: ``[..., G, T]``, floating point, log-probabilities (nats) under the old policy; only
        with ``max_prob``.
      max_prob: In (0, 1]; None for tokens of any probability.

    Returns:
      bool ``[..., G, T]``.

    Raises:
      TypeError: If an argument has a wrong dtype.
      ValueError: If a shape is wrong, or ``max_prob`` is out of its range or has no ``old_logp``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ids, mask = jnp.array([[0, 1], [0, 2]]), jnp.ones((2, 2), bool)
      >>> advantages, old_logp = jnp.array([[0.5, 0.25], [0.5, 0.0]]), jnp.full((2, 2), -1.0)
      >>> jr.curation.segment_tokens(advantages, mask, ids, old_logp).tolist()
      [[True, True], [False, False]]

    References:
      SPO-tree (arXiv:2505.23564), the released code: each segment is a sample, and those of
      advantage 0 are left out.
    """
    return sampled_here(
        "segment_tokens", advantages, mask, node_ids, old_logp=old_logp, max_prob=max_prob
    )
