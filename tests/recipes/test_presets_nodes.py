"""Presets that train nodes once, sets, turns that fork, and in a band: all losses in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import preset_cases
from preset_cases import batch_of, double, near, z
from rows import for_each

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
    batch = batch_of(
        np.arange(T) < np.array([[4, 4, 4, 4], [4, 2, 3, 1]])[..., None],
        np.array([[1.0, 0.0, 1.0, 0.5], [0.25, 1.0, 0.0, 1.0]]),
        old_logp=np.minimum(near(rng, logp), -0.01),
        ref_logp=near(np.random.default_rng(5), logp),
        extras={
            "node_ids": np.array(NODES),
            "old_entropy": rng.uniform(0.2, 2.0, logp.shape),
            "answer_ids": np.array([[0, 0, 1, -1], [2, 0, 2, 2]]),
            "embeddings": rng.normal(size=(P, G, 3)),
            "prm_logp": near(rng, logp, 0.5),
            "turn_ids": np.broadcast_to(np.arange(T) // 2, (P, G, T)),
            "turn_where": np.array([[[True, True]] * 4, [[True, True], [True, False]] * 2]),
        },
    )
    return logp, batch


def group_advantages(batch):
    return np.broadcast_to(z(*double(batch.rewards))[..., None], (P, G, T))


def clip(logp, batch, advantages, high, dual=1e9):
    x, old = double(logp, batch.old_logp)
    return preset_cases.clip(np.exp(x - old), advantages, high=1 + high, dual=dual)


def k3(logp, batch):
    return preset_cases.k3(*double(logp, batch.ref_logp))


def masa(logp, batch, entropy):
    return clip(logp, batch, group_advantages(batch), 0.28, 10.0)[np.asarray(batch.mask)].mean()


def epo(logp, batch, entropy):
    """The first step, in which the weight is 1 and histories are the means of this step's turns."""
    mask, h = np.asarray(batch.mask), np.float64(entropy)
    old, turns = np.float64(batch.extras["old_entropy"]), np.asarray(batch.extras["turn_ids"])
    history = np.choose(turns, [old[mask & (turns == k)].mean() for k in range(2)])
    outside = ~((h > 0) & (h < 2.0 * history))
    band = -0.001 * (h - 0.1 * outside)
    loss = clip(logp, batch, group_advantages(batch), 0.2) + band + 0.01 * k3(logp, batch)
    return loss[mask].mean()


def branch_grpo(logp, batch, entropy):
    """Depth by depth over the nodes of a group; the extreme half of the leaves trains."""
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


def paths(batch):
    """The nodes of each rollout."""
    mask = np.asarray(batch.mask)
    return [
        [list(dict.fromkeys(np.asarray(NODES[p][g])[mask[p, g]].tolist())) for g in range(G)]
        for p in range(P)
    ]


def spo_tree(logp, batch, entropy):
    """Segments whose siblings differ, whitened; each token once, if it was not certain."""
    mask, rewards = np.asarray(batch.mask), np.float64(batch.rewards)
    raw, trains = np.zeros((P, G, T)), np.zeros((P, G, T), bool)
    for p, rows in enumerate(paths(batch)):

        def value(node, p=p, rows=rows):
            at = [(g, path.index(node)) for g, path in enumerate(rows) if node in path]
            below = sorted({rows[g][d + 1] for g, d in at if len(rows[g]) > d + 1})
            return np.mean([value(x) for x in below]) if below else rewards[p, at[0][0]]

        for g, t in np.argwhere(mask[p]):
            node = NODES[p][g][t]
            d = rows[g].index(node)
            family = {x[d] for x in rows if len(x) > d and x[:d] == rows[g][:d]}
            raw[p, g, t] = value(node) - np.mean([value(x) for x in family])
            first = min(h for h, x in enumerate(rows) if node in x)
            uncertain = np.exp(np.float64(batch.old_logp[p, g, t])) < 0.9
            trains[p, g, t] = first == g and abs(raw[p, g, t]) > 1e-9 and uncertain
    x = raw[trains]
    whitened = (raw - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
    return (clip(logp, batch, whitened, 0.2) + 1e-4 * k3(logp, batch))[trains].mean()


def polychromic(logp, batch, entropy):
    """Every pair of a group; no answer adds none."""
    advantages = np.zeros((P, G, T))
    for p in range(P):
        ids, r = np.asarray(batch.extras["answer_ids"][p]), np.float64(batch.rewards[p])
        scores = {
            pair: r[list(pair)].mean() * len({ids[i] for i in pair if ids[i] >= 0}) / 2
            for pair in itertools.combinations(range(G), 2)
        }
        for g in range(G):
            mine = np.mean([f for pair, f in scores.items() if g in pair])
            advantages[p, g] = mine - np.mean(list(scores.values()))
    return clip(logp, batch, advantages, 0.2)[np.asarray(batch.mask)].mean()


def by_hand(advantages, high=0.2):
    """The token mean of the clipped loss with advantages of turns ``[P, G, 2]``."""

    def loss(logp, batch, entropy):
        of_tokens = np.repeat(advantages(batch), 2, axis=-1)
        return clip(logp, batch, of_tokens, high)[np.asarray(batch.mask)].mean()

    return loss


def oprl(batch):
    """Leave one out of rollouts, and of all turns of the group."""
    mask, out = np.asarray(batch.mask), np.zeros((P, G, 2))
    ratio = np.where(mask, np.float64(batch.extras["prm_logp"]) - np.float64(batch.old_logp), 0)
    turns = 0.05 * ratio.reshape(P, G, 2, 2).sum(-1)
    there = np.asarray(batch.extras["turn_where"])
    for p in range(P):
        r, n = np.float64(batch.rewards[p]), there[p].sum()
        x = turns[p][there[p]]
        out[p][there[p]] = np.repeat((r - r.mean()) * G / (G - 1), 2).reshape(G, 2)[there[p]]
        out[p][there[p]] += (x - x.mean()) * n / (n - 1)
    return out


def prime(reference):
    """Process rewards of tokens and the outcome, both with leave-one-out, whitened."""

    def loss(logp, batch, entropy):
        mask = np.asarray(batch.mask)
        base = np.float64(batch.old_logp if reference == "policy" else batch.ref_logp)
        q = np.where(mask, 0.05 * (np.float64(batch.extras["prm_logp"]) - base), 0.0)
        q = np.where(np.arange(T) == mask.sum(-1, keepdims=True) - 1, 0.0, q)
        q /= np.abs(np.cumsum(q[..., ::-1], -1)).max() + 1e-6
        means = (q.sum(-1) / mask.sum(-1)).sum(-1)[:, None, None]
        p = np.where(mask, (G * q - means) / (G - 1), 0.0)
        r = np.float64(batch.rewards)
        a = ((r - r.mean(-1, keepdims=True)) * G / (G - 1))[..., None]
        a = a + np.cumsum(p[..., ::-1], -1)[..., ::-1]
        a = (a - a[mask].mean()) / a[mask].std(ddof=1)
        return (clip(logp, batch, a, 0.2) - 0.001 * np.float64(entropy))[mask].mean()

    return loss


def portool(batch):
    """Outcomes over the group, and turns against their siblings."""
    there, out = np.asarray(batch.extras["turn_where"]), np.zeros((P, G, 2))
    outcome = group_advantages(batch)
    for p, rows in enumerate(paths(batch)):
        last = there[p].sum(-1)
        # Without a fork inside, the two turns of the second prompt have one node.
        steps = [[path[0], path[-1] if len(path) > 1 else (path[0], 1)] for path in rows]

        def value(step, k, p=p, last=last, steps=steps):
            mine = [g for g in range(G) if there[p, g, k] and steps[g][k] == step]
            return np.mean([0.95 ** (last[g] - 1 - k) * float(batch.rewards[p, g]) for g in mine])

        for g, k in np.argwhere(there[p]):
            family = {
                steps[h][k] for h in range(G) if there[p, h, k] and steps[h][:k] == steps[g][:k]
            }
            fork = value(steps[g][k], k) - np.mean([value(x, k) for x in family])
            out[p, g, k] = outcome[p, g, 0] + fork
    return out


def srpo_vla(logp, batch, entropy):
    """One center: no two successes are near each other."""
    r, e = np.float64(batch.rewards), np.float64(batch.extras["embeddings"])
    shaped = np.where(r > 0.5, 1.0, 0.0)
    for p in range(P):
        bad = r[p] <= 0.5
        d = np.linalg.norm(e[p][bad] - e[p][~bad].mean(0), axis=-1)
        n = (d - d.min()) / np.ptp(d)
        shaped[p][bad] = 0.6 / (1 + np.exp(-10 * (0.5 - n)))
    batch = batch.replace(rewards=jnp.asarray(shaped, jnp.float32))
    return clip(logp, batch, group_advantages(batch), 0.28)[np.asarray(batch.mask)].mean()


def arpo(logp, batch, entropy):
    """A token has the mean advantage of the rollouts that share it."""
    mask, nodes = np.asarray(batch.mask), np.array(NODES)
    outcome, out = group_advantages(batch), np.zeros((P, G, T))
    for p, g, t in np.argwhere(mask):
        share = [h for h in range(G) if mask[p, h, t] and nodes[p, h, t] == nodes[p, g, t]]
        out[p, g, t] = outcome[p, share, 0].mean()
    return clip(logp, batch, out, 0.2)[mask].mean()


def seeupo(logp, batch, entropy):
    """All turns in one step: a ratio a rollout, advantages normalized over the batch."""
    mask, r = np.asarray(batch.mask), np.float64(batch.rewards)
    a = r - r.mean(-1, keepdims=True)
    a = np.clip((a - a.mean()) / (a.std(ddof=1) + 1e-8), -3, 3)
    change = np.where(mask, np.float64(logp) - np.float64(batch.old_logp), 0.0)
    ratio = np.exp(change.sum(-1) / mask.sum(-1))
    return -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a).mean()


REFERENCES = {
    "masa": masa,
    "epo": epo,
    "branch_grpo": branch_grpo,
    "spo_tree": spo_tree,
    "polychromic": polychromic,
    "oprl": by_hand(oprl),
    "prime": prime("initial"),
    "portool": by_hand(portool),
    "arpo": arpo,
    "seeupo": seeupo,
    "srpo_vla": srpo_vla,
}
OPTIONS = {
    "polychromic": {"kl_coef": 0.0, "size": 2},
    "arpo": {"credit": "hard"},
    "seeupo": {"kl_coef": 0.0},
}


@for_each("name", REFERENCES)
def test_loss_matches_numpy(name):
    logp, batch = make_batch()
    entropy = np.random.default_rng(4).uniform(0.1, 4.0, logp.shape).astype(np.float32)
    recipe = getattr(jr.recipes, name)(**OPTIONS.get(name, {}))
    prepared, _ = jax.jit(recipe.prepare)(batch, recipe.init())
    loss = jax.jit(recipe.loss)(jnp.asarray(logp), prepared, entropy=jnp.asarray(entropy))
    np.testing.assert_allclose(loss, REFERENCES[name](logp, batch, entropy), rtol=2e-4)


def test_prime_with_the_policy_as_the_reference_of_its_reward_model():
    logp, batch = make_batch()
    recipe = jr.recipes.prime(reference="policy")
    assert recipe.required_fields == {"entropy", "old_logp", "prm_logp"}
    prepared, _ = jax.jit(recipe.prepare)(batch.replace(ref_logp=None), recipe.init())
    entropy = np.full_like(logp, 2.0)
    loss = jax.jit(recipe.loss)(jnp.asarray(logp), prepared, entropy=jnp.asarray(entropy))
    np.testing.assert_allclose(loss, prime("policy")(logp, batch, entropy), rtol=2e-4)
    other = prime("initial")(logp, batch, entropy)
    assert abs(float(loss) - other) > 1e-3
