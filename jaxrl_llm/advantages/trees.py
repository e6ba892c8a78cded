"""Credit of the nodes of a tree of rollouts: rewards from the leaves up, then advantages.

A node is compared with all nodes of its depth, or only with its siblings.

Shared arguments:
  ``parents``: ``[N]`` integers, the parent of each node; -1 for a root. One table may hold several
    trees; unused rows have ``where`` False.
  ``depth``: ``[N]`` integers, 0 for a root.
  ``where``: bool ``[N]``, True for the nodes that exist; the others are not read.

For responses that fork, tokens ``[..., G, T]`` of groups of G:
  ``rewards``: ``[..., G]``, floating point, one per response.
  ``node_ids``: integers ``[..., G, T]``, the rollout that sampled each token: equal where tokens
    are shared; below 0 for none. A node is the run of tokens that one rollout sampled until it
    paused or ended, or until others forked from it; the prompt is the root of a group.
  ``mask``: bool ``[..., G, T]``, and ``where`` bool ``[..., G]``, True for the responses that take
    part; None for all.
  ``max_depth``: The greatest depth of a node, from 0; None for floor(log2(G)).

The tokens of a node train with its advantage. Nodes that are compared have equal rewards if these
differ by at most 1e-6 of the greatest (or of 1), as equal means do by rounding. Results are
float32. All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of
range.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import batch
from jaxrl_llm.core import Array, checks, masking, stats, traits
from jaxrl_llm.core.branches import branches, sampled_here

__all__ = [
    "branch_advantages",
    "depth_advantages",
    "node_rewards",
    "shared_prefix_advantages",
    "sibling_advantages",
    "spo_tree",
    "whiten_segments",
]


def node_rewards(
    parents: Array,
    depth: Array,
    leaf_rewards: Array,
    *,
    max_depth: int,
    where: Array | None = None,
    over: Literal["leaves", "children"] | None = None,
    edge_logp: Array | None = None,
    alpha: float | None = None,
) -> Array:
    """The reward of every node of a tree: the mean over the leaves below it, or over its children.

        R(leaf) = its reward
        "leaves":    R(v) = mean over the leaves below v
        "children":  R(v) = mean over children c of R(c)
        with edge_logp:  R(v) = sum over children c of softmax(alpha edge_logp)_c R(c)

    The first two differ where siblings have unequal numbers of leaves: the mean over children is an
    unbiased estimate of the reward after a node, even if some branches ended early.

    Args:
      parents, depth, where: See the module.
      leaf_rewards: ``[N]``, floating point; read at the nodes without a child.
      max_depth: The greatest depth, not negative.
      over: "leaves" (also None) or "children"; only without ``edge_logp``.
      edge_logp: ``[N]``, floating point, log-probability of the edge that leads to a node. None for
        a plain mean.
      alpha: Sharpness of the weights, not negative; only with ``edge_logp``. None means 1.

    Returns:
      ``[N]`` float32; 0 for nodes that there are not.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> parents, depth = jnp.array([-1, 0, 0, 1, 1, 2, 2]), jnp.array([0, 1, 1, 2, 2, 2, 2])
      >>> rewards = jnp.array([0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
      >>> jr.advantages.node_rewards(parents, depth, rewards, max_depth=2)[:3].tolist()
      [0.75, 0.5, 1.0]

    References:
      The released code of BranchGRPO (arXiv:2509.06040), over leaves and weighted, and of SPO-tree
      (arXiv:2505.23564), over children.
    """
    function = "node_rewards"
    _check(function, "leaf_rewards", leaf_rewards, where, parents=parents, depth=depth)
    checks.check_non_negative(function, finite=True, max_depth=max_depth)
    checks.check_option(function, "over", over, ("leaves", "children", None))
    checks.check_float(function, edge_logp=edge_logp)
    checks.check_same_shape(function, leaf_rewards=leaf_rewards, edge_logp=edge_logp)
    if edge_logp is None:
        checks.check_no_effect(function, "without edge_logp", alpha=alpha)
    else:
        checks.check_no_effect(function, "with edge_logp", over=over)
    checks.check_non_negative(function, finite=True, alpha=alpha)
    size = jnp.shape(parents)[0]
    valid = jnp.ones(size, bool) if where is None else where
    child = valid & (jnp.asarray(parents) >= 0)
    # Nodes without a parent add to a place beyond the end, which is dropped.
    up = jnp.where(child, parents, size)
    leaf = valid & (jnp.zeros(size, jnp.int32).at[up].add(1, mode="drop") == 0)
    total = masking.zero_masked(leaf_rewards, leaf)
    if edge_logp is None and over != "children":
        count = leaf.astype(jnp.float32)
        for level in range(max_depth, 0, -1):
            here = jnp.where(depth == level, up, size)
            total = total.at[here].add(total, mode="drop")
            count = count.at[here].add(count, mode="drop")
        return jnp.where(valid, total / jnp.maximum(count, 1.0), 0.0)
    if edge_logp is None:
        score = jnp.zeros(size)
    else:
        score = (1.0 if alpha is None else alpha) * masking.zero_masked(edge_logp, child)
    most = jnp.full(size, -jnp.inf).at[up].max(jnp.where(child, score, -jnp.inf), mode="drop")
    mass = jnp.where(child, jnp.exp(score - most[jnp.minimum(up, size - 1)]), 0.0)
    sums = jnp.zeros(size).at[up].add(mass, mode="drop")
    weight = jnp.where(child, mass / jnp.maximum(sums[jnp.minimum(up, size - 1)], 1e-30), 0.0)
    for level in range(max_depth, 0, -1):
        here = jnp.where(depth == level, up, size)
        total = total.at[here].add(weight * total, mode="drop")
    return jnp.where(valid, total, 0.0)


def depth_advantages(
    rewards: Array,
    depth: Array,
    tree_ids: Array,
    *,
    trees: int,
    max_depth: int,
    where: Array | None = None,
    bound: float = 5.0,
) -> Array:
    """Rewards of nodes, standardized among the nodes of one tree at one depth.

        A = clip((R - mean) / (std + 1e-8), -bound, bound),  ddof 1
        A = 0   if alone at its depth, if all rewards there are equal, or std < 1e-6

    For independent chains of equal length it is GRPO with ``eps=1e-8``, clipped to ``bound``, at
    every depth.

    Args:
      rewards: ``[N]``, floating point: :func:`node_rewards`.
      depth, where: See the module.
      tree_ids: ``[N]`` integers, from 0.
      trees: Number of trees, at least 1.
      max_depth: The greatest depth, not negative.
      bound: Greatest size, above 0.

    Returns:
      ``[N]`` float32; 0 for nodes that there are not.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> depth, tree = jnp.array([0, 1, 1]), jnp.zeros(3, int)
      >>> jr.advantages.depth_advantages(
      ...     jnp.array([0.75, 0.5, 1.0]), depth, tree, trees=1, max_depth=1).round(3).tolist()
      [0.0, -0.70..., 0.70...]

    References:
      BranchGRPO (arXiv:2509.06040), the released code.
    """
    function = "depth_advantages"
    _check(function, "rewards", rewards, where, tree_ids=tree_ids, depth=depth)
    checks.check_non_negative(function, finite=True, max_depth=max_depth)
    checks.check_positive(function, finite=True, trees=trees, bound=bound)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else where
    rewards = masking.zero_masked(rewards, where)
    groups = trees * (max_depth + 1)
    group = jnp.asarray(tree_ids) * (max_depth + 1) + depth
    group = jnp.where(valid, group, groups)

    def total(x: Array) -> Array:
        return jax.ops.segment_sum(jnp.where(valid, x, 0.0), group, groups + 1)[group]

    count = total(jnp.ones(jnp.shape(rewards)))
    centered = rewards - total(rewards) / jnp.maximum(count, 1.0)
    variance = total(centered**2) / jnp.maximum(count - 1.0, 1.0)
    # The gradient of a square root at zero is infinite.
    std = jnp.sqrt(jnp.where(variance > 0, variance, 1.0))
    most = jax.ops.segment_max(jnp.where(valid, rewards, -jnp.inf), group, groups + 1)
    least = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), group, groups + 1)
    known = valid & (count > 1) & (variance > 0) & (std >= 1e-6)
    known &= stats.beyond_rounding(most, least)[group]
    return jnp.where(known, jnp.clip(centered / (std + 1e-8), -bound, bound), 0.0)


def sibling_advantages(
    rewards: Array,
    parents: Array,
    *,
    where: Array | None = None,
    tree_ids: Array | None = None,
    scale: Literal["std"] | None = None,
    ddof: int | None = None,
    eps: float | None = None,
) -> Array:
    """Rewards of nodes minus the mean over the children of their parent.

        A = R - mean over siblings of R;   scale="std":  A / (std + eps)
        A = 0   for an only child, or if all siblings are equal

    Where a parent's reward is the mean over its children, A is the reward of a node minus that of
    its parent, so the advantages along a path add up to the reward of the leaf minus that of the
    root. For a tree of depth 1 it is :func:`dr_grpo`, or :func:`grpo` with
    ``scale="std", ddof=1, eps=1e-6``.

    Args:
      rewards: ``[N]``, floating point: those of :func:`node_rewards` with ``over="children"``.
      parents, where: See the module; roots of one tree are siblings.
      tree_ids: ``[N]`` integers from 0, below N, if the table holds several trees; None for one.
      scale: "std" for the deviation of the siblings, None for no division.
      ddof: Of that deviation, 0 or 1; None means 0.
      eps: Added to it, above 0; None means 1e-8.

    Returns:
      ``[N]``; 0 for nodes that there are not.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> parents, rewards = jnp.array([-1, 0, 0]), jnp.array([0.75, 0.5, 1.0])
      >>> jr.advantages.sibling_advantages(rewards, parents).tolist()
      [0.0, -0.25, 0.25]

    References:
      SPO-tree (arXiv:2505.23564), the released code, whose adv_method is "rloo" without a scale and
      "grpo" with one. PORTool (arXiv:2510.26020) compares the steps of a fork in the same way.
    """
    function = "sibling_advantages"
    _check(function, "rewards", rewards, where, parents=parents)
    checks.check_integer(function, tree_ids=tree_ids)
    checks.check_same_shape(function, rewards=rewards, tree_ids=tree_ids)
    checks.check_option(function, "scale", scale, ("std", None))
    if scale is None:
        checks.check_no_effect(function, "without scale", ddof=ddof, eps=eps)
    checks.check_option(function, "ddof", ddof, (0, 1, None))
    checks.check_positive(function, finite=True, eps=eps)
    size = jnp.shape(rewards)[0]
    valid = jnp.ones(size, bool) if where is None else jnp.asarray(where)
    rewards = masking.zero_masked(rewards, where)
    root = size + (0 if tree_ids is None else jnp.asarray(tree_ids))
    family = jnp.where(jnp.asarray(parents) < 0, root, parents)
    family = jnp.where(valid, family, 2 * size)

    def total(x: Array) -> Array:
        return jax.ops.segment_sum(jnp.where(valid, x, 0.0), family, 2 * size + 1)[family]

    count = total(jnp.ones(size))
    centered = rewards - total(rewards) / jnp.maximum(count, 1.0)
    most = jax.ops.segment_max(jnp.where(valid, rewards, -jnp.inf), family, 2 * size + 1)
    least = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), family, 2 * size + 1)
    differ = valid & stats.beyond_rounding(most, least)[family]
    if scale == "std":
        n = jnp.maximum(count - (0 if ddof is None else ddof), 1.0)
        variance = jnp.where(differ, total(centered**2) / n, 1.0)
        centered = centered / (jnp.sqrt(variance) + (1e-8 if eps is None else eps))
    return jnp.where(differ, centered, 0.0)


@traits(token_values=True)
def branch_advantages(
    rewards: Array,
    node_ids: Array,
    mask: Array,
    *,
    where: Array | None = None,
    old_logp: Array | None = None,
    alpha: float | None = None,
    bound: float = 5.0,
    max_depth: int | None = None,
) -> Array:
    """The advantage of each token's node, for a group whose responses fork.

        R(node) = mean reward of the responses through it;   A = R standardized at its depth

    The prompt is the root of a group, so that all its nodes of one depth are compared. Without
    forks it is GRPO with ``eps=1e-8``, clipped to ``bound``.

    Args:
      rewards, node_ids, mask, where, max_depth: See the module.
      old_logp: ``[..., G, T]``; with it a node's reward is the mean over its children, weighted by
        ``softmax(alpha mean old_logp)``. None for the plain mean.
      alpha: Sharpness of these weights, not negative; only with ``old_logp``. None means 1.
      bound: Greatest size, above 0.

    Returns:
      ``[..., G, T]``; 0 where masked, and at depths with one node.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ids = jnp.array([[0, 2], [0, 3], [1, 4], [1, 5]])
      >>> rewards, mask = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.ones((4, 2), bool)
      >>> (100 * jr.advantages.branch_advantages(rewards, ids, mask)).round().tolist()
      [[-71.0, 50.0], [-71.0, -150.0], [71.0, 50.0], [71.0, 50.0]]

    References:
      BranchGRPO (arXiv:2509.06040): :func:`node_rewards` and :func:`depth_advantages`. There a
      depth is a denoising step, and the weights use the summed log-density of an edge.
    """
    function = "branch_advantages"
    if old_logp is None:
        checks.check_no_effect(function, "without old_logp", alpha=alpha)
    checks.check_non_negative(function, finite=True, alpha=alpha)
    checks.check_positive(function, finite=True, bound=bound)

    def credit(nodes: _Nodes, depth: Array, last: int) -> Array:
        values = node_rewards(
            nodes.parents,
            depth,
            nodes.rewards,
            max_depth=last,
            where=nodes.where,
            edge_logp=nodes.edge_logp,
            alpha=alpha,
        )
        return depth_advantages(
            values,
            depth,
            jnp.zeros_like(depth),
            trees=1,
            max_depth=last,
            where=nodes.where,
            bound=bound,
        )

    return _of_tokens(function, credit, rewards, node_ids, mask, where, max_depth, old_logp)


@traits(token_values=True)
def spo_tree(
    rewards: Array,
    node_ids: Array,
    mask: Array,
    *,
    where: Array | None = None,
    scale: Literal["std"] | None = None,
    max_depth: int | None = None,
) -> Array:
    """The value of each token's segment relative to its parent, for a group whose responses fork.

        V(node) = reward of a leaf, else mean over its children of V
        A = V(node) - V(parent);   scale="std":  A / (std over the parent's children + 1e-8)

    Without forks it is :func:`dr_grpo`.

    Args:
      rewards, node_ids, mask, where, max_depth: See the module.
      scale: "std" for the population's deviation, None for no division.

    Returns:
      ``[..., G, T]``; 0 where masked, and in segments whose siblings have equal values.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ids = jnp.array([[0, 2], [0, 3], [1, 4], [1, 5]])
      >>> rewards, mask = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.ones((4, 2), bool)
      >>> jr.advantages.spo_tree(rewards, ids, mask).tolist()
      [[-0.25, 0.5], [-0.25, -0.5], [0.25, 0.0], [0.25, 0.0]]

    References:
      Guo et al., SPO-tree (arXiv:2505.23564), as in the released code, "rloo" and "grpo".
    """
    checks.check_option("spo_tree", "scale", scale, ("std", None))

    def credit(nodes: _Nodes, depth: Array, last: int) -> Array:
        values = node_rewards(
            nodes.parents,
            depth,
            nodes.rewards,
            max_depth=last,
            where=nodes.where,
            over="children",
        )
        return sibling_advantages(values, nodes.parents, where=nodes.where, scale=scale)

    return _of_tokens("spo_tree", credit, rewards, node_ids, mask, where, max_depth)


@traits(token_values=True)
def shared_prefix_advantages(
    advantages: Array, node_ids: Array, mask: Array, *, where: Array | None = None
) -> Array:
    """The advantage of a token that several responses share: the mean of their advantages.

        A[i, t] = mean over responses j that have token t of i of A_j

    A token that no other response shares has the advantage of its response. If each copy of a
    shared token instead had the advantage of its response, the gradient would be the same, as long
    as all copies have equal weights.

    Args:
      advantages: ``[..., G]``, floating point, one per response.
      node_ids, mask, where: See the module.

    Returns:
      ``[..., G, T]``, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ids, mask = jnp.array([[0, 0], [0, 1], [0, 2]]), jnp.ones((3, 2), bool)
      >>> advantages = jnp.array([1.0, -1.0, 0.75])
      >>> jr.advantages.shared_prefix_advantages(advantages, ids, mask).tolist()
      [[0.25, 1.0], [0.25, -1.0], [0.25, 0.75]]

    References:
      ARPO (arXiv:2507.19849), its hard form, PAPER; its soft form is GRPO. An estimator such as
      GRPO computes the advantages of the responses first.
    """
    function = "shared_prefix_advantages"
    stats.check_group(function, advantages, where, name="advantages")
    taken = _taken(function, advantages, node_ids, mask, where)
    G = jnp.shape(mask)[-2]
    ids = jnp.asarray(node_ids)
    same = (ids[..., :, None, :] == ids[..., None, :, :]) & (ids[..., None, :] >= 0)
    same = (same | jnp.eye(G, dtype=bool)[:, :, None]) & taken[..., None, :, :]
    theirs = masking.zero_masked(advantages, where)[..., None, :, None]
    total = jnp.sum(jnp.where(same, theirs, 0.0), axis=-2)
    return masking.zero_masked(total / jnp.maximum(jnp.sum(same, axis=-2), 1), taken)


@traits(token_values=True)
def whiten_segments(
    advantages: Array,
    mask: Array,
    *,
    node_ids: Array,
    old_logp: Array | None = None,
    max_prob: float | None = None,
    eps: float = 1e-8,
) -> Array:
    """Token advantages shifted and scaled to mean 0 and variance 1 over the tokens that train.

        y = (A - m) / sqrt(v + eps)    m, v over tokens with A != 0 and exp(old_logp) < max_prob,
                                       a shared token counted once

    Other tokens get 0. ``curation.segment_tokens`` selects the same tokens.

    Args:
      advantages: ``[..., G, T]``, floating point.
      mask: bool ``[..., G, T]``.
      node_ids: See the module.
      old_logp: ``[..., G, T]``, floating point; only with ``max_prob``.
      max_prob: In (0, 1]; None for tokens of any probability.
      eps: Above 0.

    Returns:
      ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ids, mask = jnp.array([[0, 1], [0, 2]]), jnp.ones((2, 2), bool)
      >>> a = jnp.array([[0.0, 0.25], [0.0, -0.25]])
      >>> jr.advantages.whiten_segments(a, mask, node_ids=ids).round(4).tolist()
      [[0.0, 0.707...], [0.0, -0.707...]]

    References:
      SPO (arXiv:2505.23564), the released code, ``masked_whiten`` with log-probabilities, over each
      batch of 128 segments.
    """
    function = "whiten_segments"
    checks.check_float(function, advantages=advantages)
    checks.check_same_shape(function, advantages=advantages, mask=mask)
    keep = sampled_here(function, advantages, mask, node_ids, old_logp=old_logp, max_prob=max_prob)
    return batch.whiten(advantages, keep, eps=eps)


class _Nodes(NamedTuple):
    """The nodes of a group, ``[N]`` arrays in the order of a table."""

    parents: Array
    rewards: Array
    where: Array
    edge_logp: Array | None


def _of_tokens(
    function: str,
    credit: Callable[[_Nodes, Array, int], Array],
    rewards: Array,
    node_ids: Array,
    mask: Array,
    where: Array | None,
    max_depth: int | None,
    old_logp: Array | None = None,
) -> Array:
    """``credit(nodes, depth, last)`` of the nodes of each group, on their tokens.

    ``last`` is the greatest depth. With ``old_logp`` nodes have its mean over their tokens.
    """
    stats.check_group(function, rewards, where)
    checks.check_float(function, old_logp=old_logp)
    checks.check_same_shape(function, mask=mask, old_logp=old_logp)
    taken = _taken(function, rewards, node_ids, mask, where)
    tree = branches(function, node_ids, taken, max_depth=max_depth)
    G, D = tree.nodes.shape[-2:]
    lead = jnp.shape(rewards)[:-1]

    def flat(x: Array) -> Array:
        return jnp.broadcast_to(x, (*lead, G, D)).reshape(-1, G * D)

    depth = jnp.arange(D)
    above = jnp.concatenate([jnp.full_like(tree.first[..., :1], -1), tree.first[..., :-1]], axis=-1)
    parents = jnp.where(above >= 0, above * D + depth - 1, -1)
    edge_logp = None
    if old_logp is not None:
        at = tree.depth[..., None, :] == depth[:, None]
        total = jnp.sum(jnp.where(at, masking.zero_masked(old_logp, taken)[..., None, :], 0.0), -1)
        edge_logp = flat(total / jnp.maximum(jnp.sum(at, axis=-1), 1))
    leaves = flat(masking.zero_masked(rewards, where)[..., None])
    nodes = _Nodes(flat(parents), leaves, flat(tree.nodes), edge_logp)
    depths = jnp.tile(depth, G)
    values = jax.vmap(lambda x: credit(x, depths, D - 1))(nodes)
    return tree.of_tokens(values.reshape((*lead, G, D)))


def _taken(function: str, rewards: Array, node_ids: Array, mask: Array, where) -> Array:
    """Checks the arrays of responses that fork; the tokens that take part."""
    checks.check_mask(function, mask)
    checks.check_integer(function, node_ids=node_ids)
    checks.check_shape(function, "node_ids", node_ids, (*jnp.shape(rewards), jnp.shape(mask)[-1]))
    checks.check_same_shape(function, mask=mask, node_ids=node_ids)
    return jnp.asarray(mask) if where is None else mask & jnp.asarray(where)[..., None]


def _check(function: str, name: str, values: Array, where: Array | None, **ids: Array) -> None:
    """Raises unless ``values``, the argument ``name``, and ids are columns of one table."""
    checks.check_rank(function, 1, **ids)
    checks.check_integer(function, **ids)
    checks.check_float(function, **{name: values})
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, **ids, where=where, **{name: values})
