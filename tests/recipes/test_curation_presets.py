"""Presets that shape rewards or choose what trains: whole loss and gradient in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import MASK, batch_of, expect_loss, near
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import Batch, catalog

P, G, T = 4, 4, 5
NAMES = ("fapo", "d3s", "dars", "capo", "brorl", "ps_grpo")
OPTIONS = {
    "capo": {
        "direction": "ascent",
        "hidden_sq": 30.0,
        "learning_rate": 0.005,
        "tau_h": 0.05,
        "tau_f": 0.0025,
    },
    "brorl": {"kl_coef": 0.05, "cap": 1.2},
    "ps_grpo": {"agreement": 2.0, "accuracy": 0.5},
    "d3s": {"steps": 4},
}
HIGH = {"fapo": 1.28, "brorl": 1.28}


def make_batch() -> tuple[np.ndarray, Batch]:
    """Ratios far from 1; a group that agrees, an empty response, a rollout left out."""
    rng = np.random.default_rng(4)
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 1, np.nan], [1, 0, 0, 0]])
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    old_logp = near(rng, logp).astype(np.float32)
    p = np.exp(np.float64(old_logp))
    rest = 1 - p
    extras = {
        "flawed": rng.random((P, G)) < 0.5,
        "old_entropy": rng.uniform(0.5, 2.0, (P, G, T)),
        # The rest of the mass on two other tokens.
        "sum_pi_sq": p**2 + 0.5 * rest**2,
        "sum_pi_cubed": p**3 + 0.25 * rest**3,
        # Two paraphrases a question.
        "similarity": rng.random((P, G, 2 * G)),
    }
    batch = batch_of(
        MASK,
        rewards,
        old_logp=old_logp,
        ref_logp=near(rng, logp),
        behavior_logp=near(rng, logp),
        reward_components={"accuracy": np.float32(rewards > 0.5)},
        extras=extras,
    )
    return logp, batch


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
        agree = kept.max() == kept.min()
        if name in ("dars", "brorl") and agree:
            where[p] = False
        elif not agree:
            eps = 1e-4 if name == "capo" else 1e-6
            std = 1.0 if name in ("dars", "brorl") else kept.std(ddof=1) + eps
            out[p][where[p]] = (kept - kept.mean()) / std
    if name == "brorl":
        every = out[where]
        out[where] = (every - every.mean()) / (every.std(ddof=1) + 1e-8)
    return out, where


def selected(name, batch, advantages, mask):
    if name == "capo":
        lr, w = OPTIONS["capo"]["learning_rate"], OPTIONS["capo"]["hidden_sq"]
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
            keep[i] = m_f < OPTIONS["capo"]["tau_f"] and abs(m_h) < OPTIONS["capo"]["tau_h"]
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
    arrays = (batch.old_logp, batch.ref_logp, batch.behavior_logp)
    rows = []
    for p, g in np.argwhere(mask.any(-1)):
        m, a = mask[p, g], advantages[p, g]
        x = np.asarray(logp[p, g], np.float64)[m]
        old, ref, behavior = (np.asarray(v[p, g], np.float64)[m] for v in arrays)
        ratio = np.exp(x - old)
        loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, HIGH.get(name, 1.2)) * a)
        if name == "brorl":
            loss *= np.minimum(np.exp(old - behavior), 1.2)
            loss += 0.05 * (np.exp(ref - x) - 1 - (ref - x))
        rows.append(loss)
    if name in ("capo", "ps_grpo"):
        return np.mean([row.mean() for row in rows])
    return np.concatenate(rows).mean()


def prepared(name):
    logp, batch = make_batch()
    recipe = jr.recipes.PRESETS[name](**OPTIONS.get(name, {}))
    return logp, batch, recipe, recipe.prepare(batch, recipe.init())[0]


@for_each("name", NAMES)
def test_the_loss_and_its_gradient_are_the_papers(name):
    logp, batch, recipe, ready = prepared(name)
    formula = functools.partial(reference, name, batch=batch)
    expect_loss(recipe, logp, ready, formula, rel=5e-6, rtol=2e-4)


def test_capo_and_d3s_leave_something_out_and_something_in():
    for name in ("capo", "d3s"):
        _, batch, _, ready = prepared(name)
        share = ready.mask.sum() / (batch.mask & batch.where[..., None]).sum()
        assert 0.02 < share < 0.98


def test_d3s_relaxes_as_training_goes_on():
    _, batch, recipe, _ = prepared("d3s")
    state, kept = recipe.init(), []
    for _ in range(6):
        ready, state = recipe.prepare(batch, state)
        kept.append(int(ready.mask.sum()))
    assert kept == sorted(kept) and kept[0] < kept[3] < kept[4] == kept[5]


def test_prompt_gdro_weighs_the_advantages_of_grpo_by_what_was_lost_before():
    logp, batch = make_batch()
    ids = jnp.array([3, 0, 5, 9])
    batch = batch.replace(extras={"prompt_ids": ids})
    recipe = jr.recipes.prompt_gdro(num_prompts=10, edges=(0.5,), eta=2.0, kl_coef=0.0)
    robust = jr.curation.prompt_gdro(num_prompts=10, edges=(0.5,), eta=2.0)
    state, parts = recipe.init(), robust.init()
    first, solved = (
        batch.rewards,
        np.array([[1, 1, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [1, 1, 1, 1]]),
    )
    for seen in range(4):
        batch = batch.replace(rewards=first * solved[seen, :, None])
        plain = jr.advantages.grpo(batch.rewards, where=batch.where)
        context = {"prompt_ids": ids, "rewards": batch.rewards, "where": batch.where}
        ready, state = jax.jit(recipe.prepare)(batch, state)
        expected, parts = robust.update(plain, parts, **context)
        expected = jnp.where(batch.where, expected, 0.0)
        np.testing.assert_allclose(ready.advantages, expected, rtol=1e-6)
        rows = np.asarray(ready.mask.any(-1))
        each = [losses(logp, batch, p, g, ready.advantages, 1.28) for p, g in np.argwhere(rows)]
        mean = np.concatenate(each).mean()
        assert float(recipe.loss(logp, ready)) == pytest.approx(mean, rel=5e-6), seen
        state = recipe.learn(ready, state, logp=logp)
        after = {"logp": logp, "old_logp": batch.old_logp, "mask": ready.mask}
        parts = robust.learn(parts, advantages=ready.advantages, **context, **after)
        for a, b in zip(jax.tree.leaves(state.advantage), jax.tree.leaves(parts), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert not np.allclose(ready.advantages, jnp.where(batch.where, plain, 0.0))
    flat = jr.recipes.prompt_gdro(num_prompts=10, eta=0.0)
    ready, _ = flat.prepare(batch, flat.prepare(batch, flat.init())[1])
    np.testing.assert_allclose(ready.advantages, jnp.where(batch.where, plain, 0.0), rtol=1e-6)


def losses(logp, batch, p, g, advantages, high):
    """Clipped losses of the tokens of a response, in float64."""
    m, a = np.asarray(batch.mask[p, g]), float(advantages[p, g])
    ratio = np.exp(
        np.asarray(logp[p, g], np.float64) - np.asarray(batch.old_logp[p, g], np.float64)
    )
    return -np.minimum(ratio * a, np.clip(ratio, 0.8, high) * a)[m]


def options_of_dapo():
    return {
        "plain": {"dynamic_sampling": False},
        "dynamic_sampling": {},
        "metric": {"metric": "accuracy"},
        "overlong": {
            "dynamic_sampling": False,
            "length": 5,
            "buffer_share": 0.6,
            "overlong_factor": 0.5,
        },
        "filter": {"dynamic_sampling": False, "overlong_filter": True},
    }


@for_each("form", options_of_dapo())
def test_the_options_of_dapo(form):
    logp, batch = make_batch()
    truncated = np.asarray(batch.mask).all(-1)
    batch = batch.replace(extras={"truncated": jnp.asarray(truncated)})
    recipe = jr.recipes.dapo(**options_of_dapo()[form])
    ready, _ = recipe.prepare(batch, recipe.init())
    r, where = np.asarray(batch.rewards, np.float64), np.array(batch.where)
    if form == "overlong":
        r = r - 0.5 * np.clip((np.asarray(batch.mask).sum(-1) - 2) / 3, 0, 1)
    losses = []
    for p in range(P):
        kept = r[p][where[p]]
        agree = kept.max() == kept.min()
        if agree and form in ("dynamic_sampling", "metric"):
            continue
        a = np.zeros(G)
        if not agree:
            a[where[p]] = (kept - kept.mean()) / (kept.std(ddof=1) + 1e-6)
        for g in np.flatnonzero(where[p]):
            m = np.asarray(batch.mask[p, g])
            if form == "filter" and truncated[p, g]:
                continue
            x, old = (np.asarray(v[p, g], np.float64)[m] for v in (logp, batch.old_logp))
            ratio = np.exp(x - old)
            losses.append(-np.minimum(ratio * a[g], np.clip(ratio, 0.8, 1.28) * a[g]))
    expected = np.concatenate(losses).mean()
    assert float(recipe.loss(logp, ready)) == pytest.approx(expected, rel=5e-6)


def test_dapo_by_its_name_has_the_penalty_of_the_paper():
    """With 4096 of 20480 tokens; groups are still compared by the reward before it."""
    recipe = catalog.preset("dapo", length=20480)
    tokens, where = jnp.array([[1000, 16384, 18432, 20480]]), jnp.ones((1, 4), bool)
    context = {"mask": jnp.arange(20480) < tokens[..., None], "where": where}
    rewards = jnp.array([[1.0, -1.0, 1.0, 1.0]])
    advantages, _ = recipe.advantage.update(rewards, recipe.init().advantage, **context)
    shaped = np.array([1.0, -1.0, 1.0 - 0.5, 1.0 - 1.0])
    expected = (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(advantages, [expected], rtol=1e-6)
    for values, keeps in ((rewards, True), (jnp.ones((1, 4)), False)):
        keep, _ = recipe.curation.update(values, recipe.init().curation, **context)
        assert keep.all() == keep.any() == keeps


def test_dynamic_sampling_looks_at_the_named_column():
    _, batch = make_batch()
    agreeing = batch.replace(reward_components={"accuracy": jnp.ones((P, G))})
    recipe = jr.recipes.dapo(metric="accuracy")
    assert (
        "reward_components" in recipe.required_fields
        and "reward_components" not in jr.recipes.dapo().required_fields
    )
    assert not recipe.prepare(agreeing, recipe.init())[0].where.any()


def test_brorl_without_a_penalty_has_no_reference():
    free = jr.recipes.brorl(kl_coef=0.0)
    assert (
        "ref_logp" in jr.recipes.brorl().required_fields and "ref_logp" not in free.required_fields
    )
    assert free.reference is None and not free.regularizers
