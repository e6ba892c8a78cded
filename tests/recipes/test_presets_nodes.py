"""Presets that train nodes once, predictions, and in a band: the whole loss in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.recipes import Batch

P, G, T = 2, 4, 4
# Two trees of two splits, of one token a node and then of two; a tree without a split.
NODES = [
    [[0, 0, 2, 2], [0, 0, 3, 3], [1, 1, 4, 4], [1, 1, 5, 5]],
    [[6, 6, 6, 6], [7, 7, 7, 7], [8, 8, 8, 8], [9, 9, 9, 9]],
]


def make_batch() -> tuple[np.ndarray, Batch]:
    rng = np.random.default_rng(3)
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    batch = Batch(
        tokens=jnp.zeros((P, G, T), jnp.int32),
        mask=jnp.asarray(np.arange(T) < np.array([[4, 4, 4, 4], [4, 2, 3, 1]])[..., None]),
        rewards=jnp.array([[1.0, 0.0, 1.0, 0.5], [0.25, 1.0, 0.0, 1.0]]),
        where=jnp.ones((P, G), bool),
        prompt_tokens=jnp.ones((P, 2), jnp.int32),
        prompt_mask=jnp.ones((P, 2), bool),
        old_logp=jnp.asarray(np.minimum(logp + rng.normal(0, 0.4, logp.shape), -0.01), jnp.float32),
        extras={
            "node_ids": jnp.array(NODES),
            "old_entropy": jnp.asarray(rng.uniform(0.2, 2.0, logp.shape), jnp.float32),
        },
    )
    return logp, batch


def group_advantages(batch):
    r = np.float64(batch.rewards)
    r = (r - r.mean(-1, keepdims=True)) / (r.std(-1, ddof=1, keepdims=True) + 1e-6)
    return np.broadcast_to(r[..., None], (P, G, T))


def clip(logp, batch, advantages, high, dual=1e9):
    ratio = np.exp(np.float64(logp) - np.float64(batch.old_logp))
    loss = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1 + high) * advantages)
    return np.where(advantages < 0, np.minimum(loss, -dual * advantages), loss)


def masa(logp, batch, entropy):
    del entropy
    return clip(logp, batch, group_advantages(batch), 0.28, 10.0)[np.asarray(batch.mask)].mean()


def epo(logp, batch, entropy):
    """The first step, in which the weight is 1 and the history is this step's mean alone."""
    mask, h = np.asarray(batch.mask), np.float64(entropy)
    history = np.float64(batch.extras["old_entropy"])[mask].mean()
    outside = ~((h > 0) & (h < 2.0 * history))
    band = -0.001 * (h - 0.1 * outside)
    return (clip(logp, batch, group_advantages(batch), 0.2) + band)[mask].mean()


def branch_grpo(logp, batch, entropy):
    """Depth by depth over the nodes of a group; the extreme half of the leaves trains."""
    del entropy
    mask, rewards = np.asarray(batch.mask), np.float64(batch.rewards)
    advantages, trains = np.zeros((P, G, T)), np.zeros((P, G, T), bool)
    for p in range(P):
        values, depth, first, leaf = {}, {}, {}, {}
        for g in range(G):
            path = list(dict.fromkeys(np.asarray(NODES[p][g])[mask[p, g]].tolist()))
            for d, node in enumerate(path):
                values.setdefault(node, []).append(rewards[p, g])
                depth[node], _ = d, first.setdefault(node, g)
            leaf[path[-1]] = g
        mean = {node: np.mean(x) for node, x in values.items()}
        credit = {}
        for node, d in depth.items():
            peers = np.array([mean[n] for n in depth if depth[n] == d])
            spread = peers.std(ddof=1) + 1e-8
            credit[node] = np.clip((mean[node] - peers.mean()) / spread, -5, 5)
        order = sorted(leaf, key=lambda n: (-credit[n], n))
        kept = {order[0], order[-1]}
        for g in range(G):
            for t in np.flatnonzero(mask[p, g]):
                node = NODES[p][g][t]
                advantages[p, g, t] = credit[node]
                trains[p, g, t] = first[node] == g and (node not in leaf or node in kept)
    return clip(logp, batch, advantages, 0.2)[trains].mean()


REFERENCES = {"masa": masa, "epo": epo, "branch_grpo": branch_grpo}


@pytest.mark.parametrize("name", REFERENCES)
def test_loss_matches_numpy(name):
    logp, batch = make_batch()
    entropy = np.random.default_rng(4).uniform(0.1, 4.0, logp.shape).astype(np.float32)
    recipe = getattr(jr.recipes, name)()
    prepared, _ = recipe.prepare(batch, recipe.init())
    loss = recipe.loss(jnp.asarray(logp), prepared, entropy=jnp.asarray(entropy))
    np.testing.assert_allclose(loss, REFERENCES[name](logp, batch, entropy), rtol=2e-4)
