"""Credit of the nodes of a tree of rollouts: rewards from the leaves up, advantages by depth.

Shared arguments:
  ``parents``: ``[N]`` integers, the parent of each node; -1 for a root. Several trees may stand in
    one table; a node that there is not has ``where`` False.
  ``depth``: ``[N]`` integers, 0 for a root.
  ``where``: bool ``[N]``, True for the nodes that there are; the others are not read.

An edge trains with the advantage of the node it leads to. All raise TypeError for a wrong dtype and
ValueError for a wrong shape or an option out of range.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


def node_rewards(
    parents: Array,
    depth: Array,
    leaf_rewards: Array,
    *,
    max_depth: int,
    where: Array | None = None,
    edge_logp: Array | None = None,
    alpha: float | None = None,
) -> Array:
    """The reward of every node of a tree: the mean over the leaves below it.

        R(leaf) = its reward;   R(v) = mean over the leaves below v
        with edge_logp:         R(v) = sum over children c of softmax(alpha edge_logp)_c R(c)

    Args:
      parents, depth, where: See the module.
      leaf_rewards: ``[N]``, floating point; read at the nodes without a child.
      max_depth: The greatest depth, not negative.
      edge_logp: ``[N]``, floating point, log-probability of the edge that leads to a node. None for
        the plain mean.
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
      BranchGRPO (arXiv:2509.06040), the released code.
    """
    function = "node_rewards"
    _check(function, parents, depth, leaf_rewards, "leaf_rewards", where, max_depth)
    checks.check_float(function, edge_logp=edge_logp)
    checks.check_same_shape(function, leaf_rewards=leaf_rewards, edge_logp=edge_logp)
    if edge_logp is None:
        checks.check_no_effect(function, "without edge_logp", alpha=alpha)
    checks.check_non_negative(function, finite=True, alpha=alpha)
    size = jnp.shape(parents)[0]
    valid = jnp.ones(size, bool) if where is None else where
    child = valid & (jnp.asarray(parents) >= 0)
    # Nodes without a parent add to a place beyond the end, which is dropped.
    up = jnp.where(child, parents, size)
    leaf = valid & (jnp.zeros(size, jnp.int32).at[up].add(1, mode="drop") == 0)
    total = masking.zero_masked(leaf_rewards, leaf)
    if edge_logp is None:
        count = leaf.astype(jnp.float32)
        for level in range(max_depth, 0, -1):
            here = jnp.where(depth == level, up, size)
            total = total.at[here].add(total, mode="drop")
            count = count.at[here].add(count, mode="drop")
        return jnp.where(valid, total / jnp.maximum(count, 1.0), 0.0)
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
        A = 0   alone at its depth, or std < 1e-6

    Independent chains of one length are GRPO, the same at every depth.

    Args:
      rewards: ``[N]``, floating point: :func:`node_rewards`.
      depth, where: See the module.
      tree_ids: ``[N]`` integers, from 0.
      trees: How many trees there are, at least 1.
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
    _check(function, tree_ids, depth, rewards, "rewards", where, max_depth)
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
    std = jnp.sqrt(total(centered**2) / jnp.maximum(count - 1.0, 1.0))
    known = valid & (count > 1) & (std >= 1e-6)
    return jnp.where(known, jnp.clip(centered / (std + 1e-8), -bound, bound), 0.0)


def _check(function, ids, depth, values, name, where, max_depth) -> None:
    checks.check_rank(function, 1, ids=ids)
    checks.check_integer(function, ids=ids, depth=depth)
    checks.check_min_rank(function, 1, **{name: values})
    checks.check_float(function, **{name: values})
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, ids=ids, depth=depth, where=where, **{name: values})
    checks.check_non_negative(function, finite=True, max_depth=max_depth)
