"""The nodes of forked responses, from the ids of the rollouts that sampled their tokens."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import checks, masking
from jaxrl_llm.core.axes import Array


class Branches(NamedTuple):
    """Nodes of the G responses of each group; a node of depth d is the d-th segment of its rows.

    Attributes:
      depth: int32 ``[..., G, T]``, the depth of each token; -1 where it is masked.
      first: int32 ``[..., G, D]``, for each row and depth, the first row that has the same node;
        -1 where the row has no node.
      nodes: bool ``[..., G, D]``, True for the first row of each node.
      leaves: bool ``[..., G, D]``, True for nodes without children.
    """

    depth: Array
    first: Array
    nodes: Array
    leaves: Array

    def of_tokens(self, values: Array, *, fill: float | bool = 0.0) -> Array:
        """Values of nodes ``[..., G, D]`` as values of their tokens ``[..., G, T]``."""
        values = jnp.take_along_axis(values, jnp.maximum(self.first, 0), axis=-2)
        values = jnp.take_along_axis(values, jnp.maximum(self.depth, 0), axis=-1)
        return jnp.where(self.depth >= 0, values, fill)


def branches(function: str, node_ids: Array, mask: Array, *, max_depth: int | None) -> Branches:
    """The nodes of groups of responses.

    A node is a segment of tokens that one rollout sampled and the same rows share. A response that
    was paused and continued has several nodes, and rows that share tokens have the same rollout id
    for them. Where rows fork from a response that went on, what follows is a node of its own: the
    response keeps a leaf.

    Args:
      function: Named in messages.
      node_ids: ``[..., G, T]`` integers, the number of the rollout that sampled each token; below 0
        for none, which is a segment that no other row shares.
      mask: bool ``[..., G, T]``.
      max_depth: The largest depth; later segments belong to it. None for floor(log2(G)), as in
        binary trees.
    """
    checks.check_min_rank(function, 2, node_ids=node_ids)
    checks.check_integer(function, node_ids=node_ids)
    checks.check_bool(function, mask=mask)
    checks.check_same_shape(function, node_ids=node_ids, mask=mask)
    checks.check_non_negative(function, finite=True, max_depth=max_depth)
    G = jnp.shape(mask)[-2]
    if max_depth is None:
        max_depth = max(G, 1).bit_length() - 1
    rows = jnp.arange(G, dtype=jnp.int32)
    ids = jnp.where(jnp.asarray(node_ids) < 0, -1 - rows[:, None], node_ids)
    alike = (ids[..., :, None, :] == ids[..., None, :, :]) & mask[..., None, :, :]
    sharing = jnp.sum(alike, axis=-2, dtype=jnp.int32)
    before = masking.previous_token(mask)
    last, shared = (jnp.take_along_axis(x, jnp.maximum(before, 0), axis=-1) for x in (ids, sharing))
    starts = mask & ((before < 0) | (ids != last) | (sharing < shared))
    depth = jnp.minimum(jnp.cumsum(starts, axis=-1) - 1, max_depth)
    depth = jnp.where(mask, depth, -1).astype(jnp.int32)
    at = depth[..., None, :] == jnp.arange(max_depth + 1)[:, None]  # [..., G, D, T]
    there = jnp.any(at, axis=-1)
    # The last id of each segment: those of the greatest depth may hold several.
    end = jnp.max(jnp.where(at, jnp.arange(at.shape[-1]), -1), axis=-1, initial=-1)
    held = at & (jnp.arange(at.shape[-1]) == end[..., None])
    stretch = jnp.sum(jnp.where(held, ids[..., None, :], 0), axis=-1)
    # same[g, h]: whether rows g and h have one node.
    same = (stretch[..., :, None, :] == stretch[..., None, :, :]) & there[..., None, :, :]
    first = jnp.where(there, jnp.argmax(same, axis=-2), -1).astype(jnp.int32)
    nodes = there & (first == rows[:, None])
    follows = jnp.concatenate([there[..., 1:], jnp.zeros_like(there[..., :1])], axis=-1)
    inner = jnp.any(same & follows[..., None, :, :], axis=-2)
    return Branches(depth, first, nodes, nodes & ~inner)


def sampled_here(
    function: str,
    advantages: Array,
    mask: Array,
    node_ids: Array,
    *,
    old_logp: Array | None,
    max_prob: float | None,
) -> Array:
    """The tokens ``[..., G, T]`` of nonzero advantage, each in the first response that has it.

    With ``max_prob``, only tokens that the old policy samples with less than this probability.

    Args:
      function: Named in messages.
      advantages: ``[..., G, T]``, floating point.
      mask: bool ``[..., G, T]``.
      node_ids: ``[..., G, T]`` integers, as of :func:`branches`.
      old_logp: ``[..., G, T]``, floating point; only with ``max_prob``.
      max_prob: In (0, 1], or None.
    """
    checks.check_min_rank(function, 2, mask=mask)
    checks.check_mask(function, mask)
    checks.check_integer(function, node_ids=node_ids)
    checks.check_float(function, advantages=advantages, old_logp=old_logp)
    checks.check_same_shape(
        function, advantages=advantages, mask=mask, node_ids=node_ids, old_logp=old_logp
    )
    checks.check_share(function, zero=False, max_prob=max_prob)
    if max_prob is not None and old_logp is None:
        raise ValueError(f"{function}: max_prob needs old_logp.")
    keep = jnp.asarray(mask) & (masking.zero_masked(advantages, mask) != 0)
    ids = jnp.asarray(node_ids)
    G = ids.shape[-2]
    # earlier[g, h]: whether row h comes before row g.
    earlier = jnp.tril(jnp.ones((G, G), bool), -1)[:, :, None]
    same = (ids[..., :, None, :] == ids[..., None, :, :]) & (ids[..., :, None, :] >= 0)
    keep &= ~jnp.any(same & earlier & keep[..., None, :, :], axis=-2)
    if max_prob is not None:
        keep &= masking.unlikely(old_logp, mask, max_prob)
    return keep
