"""Presets that shape rewards or choose what trains: whole loss and gradient in float64.

fapo     a right answer whose reasoning is flawed is worth 0
ps_grpo  the mean agreement with the other paraphrase of a question is in the reward
dars     groups that agree leave; scores without a deviation     brorl  and those of the batch
d3s      the quarter of rollouts whose advantages vary most, and a fifth of their tokens
capo     tokens whose predicted change of the policy is small
"""

import functools

import jax.numpy as jnp
import numpy as np
from preset_cases import G, Rows, T, center, clip, example, expect_loss, k3, mean, prepared, z
from rows import for_each

import jaxrl_llm as jr

P = 4
REWARDS = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, np.nan], [1, 0, 0, 0]])
CAPO = {"hidden_sq": 30.0, "learning_rate": 0.005, "tau_h": 0.05, "tau_f": 0.0025}
OPTIONS = {
    "fapo": {},
    "dars": {},
    "capo": {"direction": "ascent", **CAPO},
    "brorl": {"kl_coef": 0.05, "cap": 1.2},
    "ps_grpo": {"agreement": 2.0, "accuracy": 0.5},
    "d3s": {"steps": 4},
    "prompt_gdro": {"num_prompts": 9, "kl_coef": 0.0},  # at the first step, where it is GRPO
}


def make_batch():
    logp, batch = example(4, REWARDS)
    rng, p = np.random.default_rng(4), np.exp(np.float64(batch.old_logp))
    extras = {
        "flawed": rng.random((P, G)) < 0.5,
        "old_entropy": rng.uniform(0.5, 2.0, (P, G, T)),
        # The rest of the mass on two other tokens.
        "sum_pi_sq": p**2 + 0.5 * (1 - p) ** 2,
        "sum_pi_cubed": p**3 + 0.25 * (1 - p) ** 3,
        "similarity": rng.random((P, G, 2 * G)),  # two paraphrases a question
        "prompt_ids": np.arange(P),
    }
    extras = {
        k: jnp.asarray(x, None if x.dtype.kind in "bi" else "float32") for k, x in extras.items()
    }
    return logp, batch.replace(extras=extras)


def shaped(name, batch):
    """The rewards that the advantage sees."""
    r, where = np.asarray(batch.rewards, np.float64), np.asarray(batch.where)
    if name == "fapo":
        return np.where(r > 0, 1.0 - np.asarray(batch.extras["flawed"]), -1.0)
    if name == "ps_grpo":
        out = 0.5 * np.where(where, r, 0.0)
        similarity = np.asarray(batch.extras["similarity"], np.float64)
        for p, g in np.argwhere(where):
            other = p + 1 if p % 2 == 0 else p - 1
            pairs = [similarity[p, g, (other % 2) * G + j] for j in range(G) if where[other, j]]
            out[p, g] += 2.0 * np.mean(pairs)
        return out
    return r


def advantages_of(name, batch):
    r, where = shaped(name, batch), np.array(batch.where)
    out = np.zeros((P, G))
    for p in range(P):
        kept = r[p][where[p]]
        if name in ("dars", "brorl"):
            out[p][where[p]] = center(kept)
            where[p] &= np.ptp(kept) > 0
        else:
            out[p][where[p]] = z(kept, 1e-4 if name == "capo" else 1e-6)
    if name == "brorl":
        out[where] = z(out[where], 1e-8)
    return out, where


def selected(name, batch, advantages, mask):
    if name == "capo":
        lr, w = CAPO["learning_rate"], CAPO["hidden_sq"]
        keep = mask.copy()
        for place in np.argwhere(mask):
            i = tuple(place)
            p = np.exp(float(batch.old_logp[i]))
            pi, a = np.array([p, (1 - p) / 2, (1 - p) / 2]), advantages[i[:2]]
            v = np.array([1.0, 0, 0]) - pi
            u = a * w * v
            variance = pi @ u**2 - (pi @ u) ** 2
            m_f = lr**2 / 2 * (v @ u) ** 2
            m_h = lr * a * (v @ u) + lr**2 / 2 * a * ((v @ u) ** 2 - variance)
            keep[i] = m_f < CAPO["tau_f"] and abs(m_h) < CAPO["tau_h"]
        return keep
    if name == "d3s":  # at the first step
        rows = [tuple(i) for i in np.argwhere(mask.any(-1))]
        rows.sort(key=lambda i: (-advantages[i], i))
        n = round(0.25 * len(rows))
        subsets = [rows[:k] + rows[len(rows) - (n - k) :] for k in range(n + 1)]
        spreads = np.array([np.var([advantages[i] for i in s]) for s in subsets])
        best = subsets[int(np.argmax(spreads >= spreads.max() - 1e-6))]
        alive = np.zeros(mask.shape, bool)
        for i in best:
            alive[i] = mask[i]
        entropy = np.asarray(batch.extras["old_entropy"])
        tokens = [tuple(i) for i in np.argwhere(alive)]
        tokens.sort(key=lambda i: (-abs(advantages[i[:2]]) * entropy[i], i))
        keep = np.zeros(mask.shape, bool)
        for i in tokens[: round(0.2 * len(tokens))]:
            keep[i] = True
        return keep
    return mask


def reference(name, logp, batch) -> float:
    advantages, where = advantages_of(name, batch)
    mask = selected(name, batch, advantages, np.asarray(batch.mask) & where[..., None])
    rows, losses = Rows(logp, batch.replace(mask=mask)), []
    high = 1.28 if name in ("fapo", "brorl", "prompt_gdro") else 1.2
    for place, x, old, ref, mu in zip(rows.places, *rows.all, strict=True):
        loss = clip(np.exp(x - old), advantages[place], high=high)
        if name == "brorl":
            loss = np.minimum(np.exp(old - mu), 1.2) * loss + 0.05 * k3(x, ref)
        losses.append(loss)
    return mean(losses, "sequence" if name in ("capo", "ps_grpo") else "token")


@for_each("name", OPTIONS)
def test_the_loss_and_its_gradient_are_the_papers(name):
    logp, batch = make_batch()
    recipe = jr.recipes.PRESETS[name](**OPTIONS[name])
    ready = prepared(recipe, batch)
    share = ready.mask.sum() / (batch.mask & batch.where[..., None]).sum()
    assert 0.02 < share < 0.98 or name not in ("capo", "d3s")
    formula = functools.partial(reference, name, batch=batch)
    expect_loss(recipe, logp, ready, formula)


def test_d3s_relaxes_as_training_goes_on():
    _, batch = make_batch()
    recipe = jr.recipes.d3s(steps=4)
    state, kept = recipe.init(), []
    for _ in range(6):
        ready, state = recipe.prepare(batch, state)
        kept.append(int(ready.mask.sum()))
    assert kept == sorted(kept) and kept[0] < kept[3] < kept[4] == kept[5]


def test_prompt_gdro_weighs_the_advantages_of_grpo_by_what_was_lost_before():
    logp, batch = make_batch()
    ids = jnp.array([3, 0, 5, 9])
    batch = batch.replace(extras={"prompt_ids": ids})
    options = {"num_prompts": 10, "edges": (0.5,), "eta": 2.0}
    recipe = jr.recipes.prompt_gdro(**options, kl_coef=0.0)
    robust = jr.curation.prompt_gdro(**options)
    state, parts, first = recipe.init(), robust.init(), batch.rewards
    for solved in ([1, 1, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 1, 1]):
        batch = batch.replace(rewards=first * jnp.array(solved)[:, None])
        plain = jr.advantages.grpo(batch.rewards, where=batch.where)
        context = {"prompt_ids": ids, "rewards": batch.rewards, "where": batch.where}
        ready, state = recipe.prepare(batch, state)
        expected, parts = robust.update(plain, parts, **context)
        expected = jnp.where(batch.where, expected, 0.0)
        np.testing.assert_allclose(ready.advantages, expected, rtol=1e-6)
        state = recipe.learn(ready, state, logp=logp)
        after = {"logp": logp, "old_logp": batch.old_logp, "mask": ready.mask}
        parts = robust.learn(parts, advantages=ready.advantages, **context, **after)
    assert not np.allclose(ready.advantages, jnp.where(batch.where, plain, 0.0))
