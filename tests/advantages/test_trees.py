"""Trees of rollouts: rewards from the leaves up, and advantages among nodes of one depth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import depth_advantages, grpo, node_rewards

rewards_of = jax.jit(node_rewards, static_argnames=("max_depth", "alpha"))
advantages_of = jax.jit(depth_advantages, static_argnames=("trees", "max_depth", "bound"))
# A root, two children, four leaves.
PARENTS, DEPTH = jnp.array([-1, 0, 0, 1, 1, 2, 2]), jnp.array([0, 1, 1, 2, 2, 2, 2])
LEAVES = jnp.array([9.0, 9.0, 9.0, 1.0, 0.0, 1.0, 1.0])


def test_the_worked_tree():
    rewards = rewards_of(PARENTS, DEPTH, LEAVES, max_depth=2)
    np.testing.assert_allclose(rewards[:3], [0.75, 0.5, 1.0])
    ours = advantages_of(rewards, DEPTH, jnp.zeros(7, int), trees=1, max_depth=2)
    np.testing.assert_allclose(ours, [0, -0.707107, 0.707107, 0.5, -1.5, 0.5, 0.5], atol=1e-5)


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


@pytest.mark.parametrize("seed", range(4))
def test_rewards_equal_a_walk_over_the_tree(seed):
    parents, depth, tree, rng = random_trees(seed)
    leaf_rewards, logp = rng.normal(size=(2, 24)).astype(np.float32)
    ours = rewards_of(parents, depth, leaf_rewards, max_depth=4)
    np.testing.assert_allclose(ours, plain(parents, np.float64(leaf_rewards)), atol=1e-5)
    ours = rewards_of(parents, depth, leaf_rewards, max_depth=4, edge_logp=50.0 * logp)
    expected = plain(parents, np.float64(leaf_rewards), 50.0 * np.float64(logp))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    flat = rewards_of(parents, depth, leaf_rewards, max_depth=4, edge_logp=logp, alpha=0.0)
    even = plain(parents, np.float64(leaf_rewards), np.zeros(24))
    np.testing.assert_allclose(flat, even, atol=1e-5)
    advantages = advantages_of(ours, depth, tree, trees=2, max_depth=4, bound=1.2)
    for t in range(2):
        for d in range(5):
            rows = np.flatnonzero((tree == t) & (depth == d))
            x = np.float64(ours)[rows]
            z = np.zeros(len(rows))
            if len(rows) > 1 and x.std(ddof=1) >= 1e-6:
                z = np.clip((x - x.mean()) / (x.std(ddof=1) + 1e-8), -1.2, 1.2)
            np.testing.assert_allclose(advantages[rows], z, atol=1e-4)


def test_chains_are_grpo_at_every_depth():
    outcome = jnp.array([1.0, 0.0, 0.0, 1.0])
    parents = jnp.array([-1, 0, 0, 0, 0, 1, 2, 3, 4])
    depth = jnp.array([0, 1, 1, 1, 1, 2, 2, 2, 2])
    rewards = rewards_of(parents, depth, jnp.concatenate([jnp.zeros(5), outcome]), max_depth=2)
    ours = advantages_of(rewards, depth, jnp.zeros(9, int), trees=1, max_depth=2)
    expected = grpo(outcome, eps=1e-8)
    np.testing.assert_allclose(ours[1:5], expected, atol=1e-6)
    np.testing.assert_allclose(ours[5:], expected, atol=1e-6)


@pytest.mark.parametrize("junk", [jnp.nan, jnp.inf, 1e4])
def test_absent_nodes_are_not_read(junk):
    parents = jnp.concatenate([PARENTS, jnp.array([0, 3])])
    depth = jnp.concatenate([DEPTH, jnp.array([1, 3])])
    where = jnp.arange(9) < 7
    leaves = jnp.concatenate([LEAVES, jnp.array([junk, junk])])
    for logp in (None, jnp.where(where, 0.1, junk)):
        clean = None if logp is None else logp[:7]
        padded = rewards_of(parents, depth, leaves, max_depth=3, where=where, edge_logp=logp)
        alone = rewards_of(PARENTS, DEPTH, LEAVES, max_depth=2, edge_logp=clean)
        np.testing.assert_allclose(padded, [*alone, 0.0, 0.0], atol=1e-6)
    ours = advantages_of(
        jnp.where(where, padded, junk), depth, jnp.zeros(9, int), trees=1, max_depth=3, where=where
    )
    clean = advantages_of(padded[:7], DEPTH, jnp.zeros(7, int), trees=1, max_depth=3)
    np.testing.assert_allclose(ours, [*clean, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: node_rewards(PARENTS, DEPTH, LEAVES[:3], max_depth=2),
            ValueError,
            "node_rewards: these must have one shape",
        ),
        (
            lambda: node_rewards(PARENTS, DEPTH, LEAVES, max_depth=2, alpha=1.0),
            ValueError,
            "node_rewards: alpha=1.0 has no effect without edge_logp",
        ),
        (
            lambda: depth_advantages(LEAVES, 1.0 * DEPTH, DEPTH, trees=1, max_depth=2),
            TypeError,
            "depth_advantages: depth must hold integers",
        ),
        (
            lambda: depth_advantages(LEAVES, DEPTH, DEPTH, trees=0, max_depth=2),
            ValueError,
            "depth_advantages: trees must be above 0; got 0",
        ),
    ],
)
def test_bad_input_is_one_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()
