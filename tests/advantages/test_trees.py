"""Trees of rollouts: rewards from the leaves up, and advantages among nodes of one depth."""

import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, grad, put
from rows import for_each

from jaxrl_llm.advantages import (
    branch_advantages,
    depth_advantages,
    dr_grpo,
    grpo,
    node_rewards,
    shared_prefix_advantages,
    sibling_advantages,
    spo_tree,
    whiten_segments,
)
from jaxrl_llm.curation import segment_tokens

# A root, two children, four leaves.
PARENTS, DEPTH = np.array([-1, 0, 0, 1, 1, 2, 2]), np.array([0, 1, 1, 2, 2, 2, 2])
LEAVES = np.array([9.0, 9.0, 9.0, 1.0, 0.0, 1.0, 1.0])


def test_the_worked_tree():
    rewards = node_rewards(PARENTS, DEPTH, LEAVES, max_depth=2)
    close(rewards[:3], [0.75, 0.5, 1.0])
    ours = depth_advantages(rewards, DEPTH, np.zeros(7, int), trees=1, max_depth=2)
    close(ours, [0, -0.707107, 0.707107, 0.5, -1.5, 0.5, 0.5], atol=1e-5)


def test_the_worked_tree_of_segments():
    values = node_rewards(PARENTS, DEPTH, LEAVES, max_depth=2, over="children")
    close(values[:3], [0.75, 0.5, 1.0])
    edges = np.asarray(sibling_advantages(values, PARENTS))
    close(edges, [0, -0.25, 0.25, 0.5, -0.5, 0, 0])
    scaled = sibling_advantages(values, PARENTS, scale="std")
    close(scaled, [0, -1, 1, 1, -1, 0, 0], rtol=1e-6)
    # Path sums telescope.
    for leaf, parent in ((3, 1), (4, 1), (5, 2), (6, 2)):
        close(edges[leaf] + edges[parent], LEAVES[leaf] - 0.75, rtol=1e-6)
    # A child that ended early counts as much as its sibling's two.
    ragged = (
        np.array([-1, 0, 0, 1, 1]),
        np.array([0, 1, 1, 2, 2]),
        LEAVES[np.array([0, 1, 3, 3, 4])],
    )
    over = {
        name: float(node_rewards(*ragged, max_depth=2, over=name)[0])
        for name in ("children", "leaves")
    }
    assert over == pytest.approx({"children": 0.75, "leaves": 2 / 3})
    equal = spo_tree(np.ones(4), np.array([[0, 2], [0, 3], [1, 4], [1, 5]]), np.ones((4, 2), bool))
    assert not np.asarray(equal).any()


def random_trees(seed, size=24):
    """Nodes in any order, some of them absent, leaves at any depth."""
    rng = np.random.default_rng(seed)
    parents, depth, tree = [-1, -1], [0, 0], [0, 1]
    while len(parents) < size:
        p = int(rng.integers(len(parents)))
        if depth[p] < 4:
            parents.append(p), depth.append(depth[p] + 1), tree.append(tree[p])
    order = rng.permutation(size)
    new = np.argsort(order)
    moved = np.array([-1 if parents[i] < 0 else new[parents[i]] for i in order])
    return moved, np.array(depth)[order], np.array(tree)[order], rng


def plain(parents, leaf_rewards, edge_logp=None):
    children = {i: np.flatnonzero(parents == i) for i in range(len(parents))}

    def leaves(i):
        return [i] if not children[i].size else [x for c in children[i] for x in leaves(c)]

    def weighted(i):
        if not children[i].size:
            return leaf_rewards[i]
        w = np.exp(edge_logp[children[i]] - edge_logp[children[i]].max())
        return sum(w / w.sum() * [weighted(c) for c in children[i]])

    if edge_logp is None:
        return [np.mean([leaf_rewards[x] for x in leaves(i)]) for i in children]
    return [weighted(i) for i in children]


@for_each("seed", range(4))
def test_rewards_equal_a_walk_over_the_tree(seed):
    parents, depth, tree, rng = random_trees(seed)
    leaf_rewards, logp = rng.normal(size=(2, 24)).astype(np.float32)
    ours = node_rewards(parents, depth, leaf_rewards, max_depth=4)
    close(ours, plain(parents, np.float64(leaf_rewards)), atol=1e-5)
    ours = node_rewards(parents, depth, leaf_rewards, max_depth=4, edge_logp=50.0 * logp)
    expected = plain(parents, np.float64(leaf_rewards), 50.0 * np.float64(logp))
    close(ours, expected, atol=1e-4)
    flat = node_rewards(parents, depth, leaf_rewards, max_depth=4, edge_logp=logp, alpha=0.0)
    even = plain(parents, np.float64(leaf_rewards), np.zeros(24))
    close(flat, even, atol=1e-5)
    mean = np.float64(node_rewards(parents, depth, leaf_rewards, max_depth=4, over="children"))
    close(mean, even, atol=1e-5)
    for scale in (None, "std"):
        options = {"scale": scale} if scale is None else {"scale": scale, "ddof": 0}
        edges = sibling_advantages(mean.astype(np.float32), parents, tree_ids=tree, **options)
        for i in range(24):
            same_root = tree == tree[i] if parents[i] < 0 else True
            x = mean[(parents == parents[i]) & same_root]
            expected = mean[i] - x.mean()
            if scale == "std":
                expected = 0.0 if len(x) == 1 else expected / (x.std() + 1e-8)
            close(edges[i], expected, atol=1e-4)
    advantages = depth_advantages(ours, depth, tree, trees=2, max_depth=4, bound=1.2)
    for t in range(2):
        for d in range(5):
            rows = np.flatnonzero((tree == t) & (depth == d))
            x = np.float64(ours)[rows]
            z = np.zeros(len(rows))
            if len(rows) > 1 and x.std(ddof=1) >= 1e-6:
                z = np.clip((x - x.mean()) / (x.std(ddof=1) + 1e-8), -1.2, 1.2)
            close(advantages[rows], z, atol=1e-4)


def forked_rows(seed, G=6, T=9):
    """Rows that share stretches, of different lengths and depths, and the stretches of each."""
    rng = np.random.default_rng(seed)
    number, rows = iter(range(100)), []

    def grow(path, leaves, depth):
        path = [*path, (next(number), int(rng.integers(1, 4)))]
        if leaves == 1 or depth == 2:
            rows.append(path)
            return
        left = int(rng.integers(1, leaves))
        grow(path, left, depth + 1), grow(path, leaves - left, depth + 1)

    while len(rows) < G:
        grow([], int(rng.integers(1, G - len(rows) + 1)), 0)
    rows = [rows[i] for i in rng.permutation(len(rows))[:G]]
    ids, mask = np.full((G, T), 55, np.int32), np.zeros((G, T), bool)
    for g, path in enumerate(rows):
        tokens = [n for n, size in path for _ in range(size)]
        ids[g, : len(tokens)], mask[g, : len(tokens)] = tokens, True
    return ids, mask, rows, rng


@for_each("seed", range(4))
def test_tokens_have_the_advantage_of_their_node(seed):
    ids, mask, paths, rng = forked_rows(seed)
    rewards = rng.normal(size=6).astype(np.float32)
    where = np.arange(6) != 3
    old_logp = rng.normal(size=mask.shape).astype(np.float32)
    junk = np.where(where, rewards, np.nan)
    logp = np.where(mask, old_logp, np.inf)
    ours = branch_advantages(junk, ids, mask, where=where)
    weighted = branch_advantages(junk, ids, mask, where=where, old_logp=logp, alpha=2.0)
    present = [g for g in range(6) if where[g]]

    def below(node):
        return [g for g in present if node in [n for n, _ in paths[g]]]

    def value(node, depth):
        """Of a node, from its children up."""
        rows = below(node)
        children = {paths[g][depth + 1][0] for g in rows if len(paths[g]) > depth + 1}
        if not children:
            return np.float64(rewards[rows[0]])
        mean = [
            np.float64(old_logp[below(c)[0]][ids[below(c)[0]] == c]).mean()
            for c in sorted(children)
        ]
        w = np.exp(2.0 * np.array(mean))
        return sum(w / w.sum() * [value(c, depth + 1) for c in sorted(children)])

    # Segments: the value of a node minus that of its parent; the prompt is the root.
    segments = spo_tree(junk, ids, mask, where=where, max_depth=2)
    scaled = spo_tree(junk, ids, mask, where=where, scale="std", max_depth=2)

    def children(parent, depth):
        rows = present if parent is None else below(parent)
        return sorted({paths[g][depth][0] for g in rows if len(paths[g]) > depth})

    def mean_value(node, depth):
        under = children(node, depth + 1)
        if not under:
            return np.float64(rewards[below(node)[0]])
        return np.mean([mean_value(c, depth + 1) for c in under])

    for depth in range(3):
        above = {paths[g][depth - 1][0] for g in present if len(paths[g]) >= max(depth, 1)}
        for parent in above if depth else [None]:
            family = children(parent, depth)
            v = np.array([mean_value(c, depth) for c in family])
            for node, x in zip(family, v, strict=True):
                tokens = mask & (ids == node) & where[:, None]
                close(np.asarray(segments)[tokens], x - v.mean(), atol=1e-4)
                unit = 0.0 if len(v) == 1 else (x - v.mean()) / (v.std() + 1e-8)
                close(np.asarray(scaled)[tokens], unit, atol=1e-4)
    # A token's mean over the rows that have it, and each segment once, with its uncertain tokens.
    shared = np.asarray(shared_prefix_advantages(junk, ids, mask, where=where))
    keep = np.asarray(segment_tokens(segments, mask, ids, logp, max_prob=0.5))
    seen = set()
    for g in range(6):
        for t in np.flatnonzero(mask[g]):
            if not where[g]:
                assert shared[g, t] == 0 and not keep[g, t]
                continue
            rows = [h for h in present if mask[h, t] and ids[h, t] == ids[g, t]]
            close(shared[g, t], np.mean(rewards[rows]), atol=1e-5)
            new = (ids[g, t], t) not in seen
            seen.add((ids[g, t], t))
            differs = abs(float(segments[g, t])) > 0
            assert keep[g, t] == (new and differs and np.exp(old_logp[g, t]) < 0.5)
    white = np.float64(whiten_segments(segments, mask, node_ids=ids, old_logp=logp, max_prob=0.5))
    taken = np.float64(segments)[keep]
    close(white[keep], (taken - taken.mean()) / taken.std(ddof=1), atol=1e-3)
    assert not white[~keep].any()

    for depth in range(3):
        nodes = sorted({paths[g][depth][0] for g in present if len(paths[g]) > depth})
        plainly = np.array([np.float64(rewards[below(n)]).mean() for n in nodes])
        for got, r in ((ours, plainly), (weighted, np.array([value(n, depth) for n in nodes]))):
            a = np.zeros(len(nodes))
            if len(nodes) > 1:
                a = (r - r.mean()) / (r.std(ddof=1) + 1e-8)
            for node, expected in zip(nodes, a, strict=True):
                tokens = mask & (ids == node) & where[:, None]
                close(np.asarray(got)[tokens], expected, atol=1e-4)
    assert not np.asarray(ours)[~(mask & where[:, None])].any()


def test_members_in_another_order_and_chains():
    ids, mask, _, rng = forked_rows(1)
    rewards = rng.normal(size=6).astype(np.float32)
    order = rng.permutation(6)
    ours = branch_advantages(rewards, ids, mask)
    close(
        branch_advantages(rewards[order], ids[order], mask[order]),
        np.asarray(ours)[order],
        atol=1e-6,
    )
    alone = np.broadcast_to(np.arange(6)[:, None], (6, 9))
    unknown = np.full((6, 9), -1)
    flat = np.broadcast_to(grpo(rewards, eps=1e-8)[:, None], (6, 9)) * mask
    for names in (alone, unknown):
        close(branch_advantages(rewards, names, mask), flat, atol=1e-5)
        plain_mean = np.broadcast_to(dr_grpo(rewards)[:, None], (6, 9)) * mask
        close(spo_tree(rewards, names, mask), plain_mean, atol=1e-5)
        own = np.broadcast_to(rewards[:, None], (6, 9)) * mask
        close(shared_prefix_advantages(rewards, names, mask), own, atol=1e-6)
    batch = branch_advantages(
        np.stack([rewards, rewards]), np.stack([ids, alone]), np.stack([mask] * 2)
    )
    close(batch, np.stack([ours, flat]), atol=1e-5)
    with pytest.raises(ValueError, match="branch_advantages: alpha=2.0 .* without old_logp"):
        branch_advantages(rewards, ids, mask, alpha=2.0)
    with pytest.raises(ValueError, match=r"branch_advantages: .*node_ids"):
        branch_advantages(rewards, ids[:, :4], mask)


def test_a_root_that_ended_and_was_forked_is_a_leaf_of_its_own():
    rewards, mask = np.array([1.0, 0.0, 0.0, 0.0]), np.ones((4, 4), bool)
    ids = np.array([[0, 0, 0, 0], [0, 2, 2, 2], [0, 3, 3, 3], [1, 1, 1, 1]])
    apart = put(ids, np.s_[0, 1:], 4)
    for credit in (branch_advantages, spo_tree):
        equal(credit(rewards, ids, mask), credit(rewards, apart, mask))
    ours = branch_advantages(rewards, ids, mask)
    close(ours[0], [0.7071, 1.1547, 1.1547, 1.1547], atol=1e-4)
    found = spo_tree(rewards, ids, mask)[0]
    close(found, [1 / 6, 2 / 3, 2 / 3, 2 / 3], atol=1e-6)
    # Forked at two places, the later one by a rollout of a lower number; a pause ends a run too.
    ids = np.array([[5, 5, 5, 5], [5, 2, 2, 2], [5, 5, 3, 3], [5, 5, 3, 4]])
    apart = np.array([[5, 6, 7, 7], [5, 2, 2, 2], [5, 6, 3, 8], [5, 6, 3, 4]])
    rewards = np.array([1.0, 0.5, 0.25, 0.0])
    for deep in (None, 1):
        for credit in (branch_advantages, spo_tree):
            ours = credit(rewards, ids, mask, max_depth=deep)
            equal(ours, credit(rewards, apart, mask, max_depth=deep))
    # A fork that takes no part ends no run.
    ids, where = np.array([[0, 0], [0, 2], [1, 1]]), np.array([True, False, True])
    ours = branch_advantages(np.array([1.0, np.nan, 0.0]), ids, np.ones((3, 2), bool), where=where)
    close(ours, np.array([[1, 1], [0, 0], [-1, -1]]) / 2**0.5, rtol=1e-5)


def test_equal_rewards_have_finite_gradients():
    ids, mask = np.array([[0, 2], [0, 3], [1, 4], [1, 5]]), np.ones((4, 2), bool)
    for logp in (None, np.zeros((4, 2))):
        slope = grad(lambda r, logp=logp: branch_advantages(r, ids, mask, old_logp=logp).sum())
        equal(slope(np.ones(4)), np.zeros(4))
    steps = grad(lambda r: depth_advantages(r, DEPTH, 0 * DEPTH, trees=1, max_depth=2).sum())
    equal(steps(np.ones(7)), np.zeros(7))


@for_each("reward", [8.1, -0.1, 3e4])
def test_equal_rewards_have_advantage_zero_whatever_their_size(reward):
    """The mean of several float32 rewards of 8.1 is not 8.1, nor the same for every number."""
    mask = np.ones((8, 1), bool)
    alone = branch_advantages(np.full(8, reward), np.arange(8)[:, None], mask)
    equal(alone, np.zeros((8, 1)))
    for seed in range(4):
        ids, mask, _, rng = forked_rows(seed, G=12)
        logp = rng.normal(size=mask.shape).astype(np.float32)
        for ours in (
            branch_advantages(np.full(12, reward), ids, mask),
            branch_advantages(np.full(12, reward), ids, mask, old_logp=logp),
            spo_tree(np.full(12, reward), ids, mask, scale="std"),
        ):
            equal(ours, np.zeros(mask.shape))
    # By one rounding, as of means that are computed on different paths.
    near = np.array([reward, np.nextafter(np.float32(reward), np.float32(np.inf))])
    for ours in (
        sibling_advantages(near, np.array([-1, -1]), scale="std"),
        depth_advantages(near, np.zeros(2, int), np.zeros(2, int), trees=1, max_depth=0),
    ):
        equal(ours, np.zeros(2))
    # Rewards that do differ count however large they are.
    apart = np.array([reward, 1.001 * reward])
    scaled = sibling_advantages(apart, np.array([-1, -1]), scale="std")
    close(np.abs(scaled), np.ones(2), rtol=1e-3)


def test_a_lone_winner_of_a_large_group_has_the_bound():
    rewards, mask = put(np.zeros(32), 0, 1.0), np.ones((32, 1), bool)
    ours = branch_advantages(rewards, np.arange(32)[:, None], mask)[:, 0]
    assert grpo(rewards, eps=1e-8)[0] > 5
    close(ours, np.clip(grpo(rewards, eps=1e-8), -5.0, 5.0), rtol=1e-5)


def test_soft_and_hard_credit_of_copies_have_one_gradient_under_a_sum():
    """ARPO's worked number; and a sum over all copies, in which shared logits are one parameter."""
    ids = np.array([[0, 1], [0, 2], [0, 3]])
    mask, soft = np.ones((3, 2), bool), np.array([1.0, -1.0, 0.2])
    hard = shared_prefix_advantages(soft, ids, mask)
    close(hard, [[0.2 / 3, 1.0], [0.2 / 3, -1.0], [0.2 / 3, 0.2]], rtol=1e-5)

    def gradient(advantages):
        def loss(logp):
            return -jnp.sum(advantages * logp[ids])

        return grad(loss)(np.zeros(4))

    close(gradient(soft[:, None]), gradient(hard), atol=1e-6)


@for_each("junk", [np.nan, np.inf, 1e4])
def test_absent_nodes_are_not_read(junk):
    parents = np.concatenate([PARENTS, np.array([0, 3])])
    depth = np.concatenate([DEPTH, np.array([1, 3])])
    where = np.arange(9) < 7
    leaves = np.concatenate([LEAVES, np.array([junk, junk])])
    for logp in (None, np.where(where, 0.1, junk)):
        clean = None if logp is None else logp[:7]
        padded = node_rewards(parents, depth, leaves, max_depth=3, where=where, edge_logp=logp)
        alone = node_rewards(PARENTS, DEPTH, LEAVES, max_depth=2, edge_logp=clean)
        close(padded, [*alone, 0.0, 0.0], atol=1e-6)
    ours = depth_advantages(
        np.where(where, padded, junk), depth, np.zeros(9, int), trees=1, max_depth=3, where=where
    )
    clean = depth_advantages(padded[:7], DEPTH, np.zeros(7, int), trees=1, max_depth=3)
    close(ours, [*clean, 0.0, 0.0], atol=1e-6)
