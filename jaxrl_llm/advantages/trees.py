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

from jaxrl_llm.core import Array, checks, masking, stats
from jaxrl_llm.core.branches import branches


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
    """The advantage of the node of each token, of a group whose responses fork.

        R(node) = mean reward of the responses that have it;   A = R standardized at its depth

    A node is what one rollout sampled until it paused or ended. The prompt is the root of a group,
    so that all its nodes of one depth are compared. Without forks it is GRPO with ``eps=1e-8``.

    Args:
      rewards: ``[..., G]``, floating point.
      node_ids: ``[..., G, T]`` integers, the rollout that sampled each token: equal where tokens
        are shared; below 0 for none.
      mask: bool ``[..., G, T]``.
      where: bool ``[..., G]``, True for responses that take part. None for all.
      old_logp: ``[..., G, T]``; with it a node's reward is that of its children, weighted by
        ``softmax(alpha mean old_logp)``. None for the plain mean.
      alpha: Sharpness of these weights, not negative; only with ``old_logp``. None means 1.
      bound: Greatest size, above 0.
      max_depth: The greatest depth of a node; None for floor(log2(G)).

    Returns:
      ``[..., G, T]`` float32; 0 where masked, and where a depth has one node.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> ids = jnp.array([[0, 2], [0, 3], [1, 4], [1, 5]])
      >>> rewards, mask = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.ones((4, 2), bool)
      >>> (100 * jr.advantages.branch_advantages(rewards, ids, mask)).round().tolist()
      [[-71.0, 50.0], [-71.0, -150.0], [71.0, 50.0], [71.0, 50.0]]

    References:
      BranchGRPO (arXiv:2509.06040): :func:`node_rewards` and :func:`depth_advantages`. There a
      depth is a step of denoising, and the weights are those of an edge's summed log-density.
    """
    function = "branch_advantages"
    stats.check_group(function, rewards, where)
    checks.check_shape(function, "node_ids", node_ids, (*jnp.shape(rewards), jnp.shape(mask)[-1]))
    checks.check_float(function, old_logp=old_logp)
    checks.check_same_shape(function, mask=mask, old_logp=old_logp)
    mask = jnp.asarray(mask) if where is None else mask & jnp.asarray(where)[..., None]
    tree = branches(function, node_ids, mask, max_depth=max_depth)
    G, D = tree.nodes.shape[-2:]
    lead = jnp.shape(rewards)[:-1]

    def flat(x: Array) -> Array:
        return jnp.broadcast_to(x, (*lead, G, D)).reshape(-1, G * D)

    depth = jnp.arange(D)
    above = jnp.concatenate([jnp.full_like(tree.first[..., :1], -1), tree.first[..., :-1]], axis=-1)
    parents = jnp.where(above >= 0, above * D + depth - 1, -1)
    arrays = {
        "parents": flat(parents),
        "rewards": flat(masking.zero_masked(rewards, where)[..., None]),
        "where": flat(tree.nodes),
    }
    if old_logp is not None:
        at = tree.depth[..., None, :] == depth[:, None]
        total = jnp.sum(jnp.where(at, masking.zero_masked(old_logp, mask)[..., None, :], 0.0), -1)
        arrays["edge_logp"] = flat(total / jnp.maximum(jnp.sum(at, axis=-1), 1))
    depths = jnp.tile(depth, G)

    def credit(x: dict[str, Array]) -> Array:
        values = node_rewards(
            x["parents"],
            depths,
            x["rewards"],
            max_depth=D - 1,
            where=x["where"],
            edge_logp=x.get("edge_logp"),
            alpha=alpha,
        )
        return depth_advantages(
            values,
            depths,
            jnp.zeros_like(depths),
            trees=1,
            max_depth=D - 1,
            where=x["where"],
            bound=bound,
        )

    return tree.of_tokens(jax.vmap(credit)(arrays).reshape((*lead, G, D)))


def _check(function, ids, depth, values, name, where, max_depth) -> None:
    checks.check_rank(function, 1, ids=ids)
    checks.check_integer(function, ids=ids, depth=depth)
    checks.check_min_rank(function, 1, **{name: values})
    checks.check_float(function, **{name: values})
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, ids=ids, depth=depth, where=where, **{name: values})
    checks.check_non_negative(function, finite=True, max_depth=max_depth)
