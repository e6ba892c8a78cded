"""Presets of turns, states and steps: the full loss in float64, on the arrays of an episode."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import batch_of, clip, double, k3, loss_of, near
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import Batch

P, G, T, K = 2, 3, 9, 4


def make_batch() -> tuple[np.ndarray, Batch]:
    """Episodes of up to three turns of two tokens with one of the environment between."""
    rng = np.random.default_rng(6)
    counts = np.array([[3, 2, 3], [1, 3, 2]])
    turn = np.where(np.arange(T) % 3 < 2, np.arange(T) // 3, -1)
    turn_ids = np.where(turn < counts[..., None], turn, -1)
    mask = turn_ids >= 0
    turn_where = np.arange(K) < counts[..., None]
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    turn_rewards = rng.integers(0, 3, (P, G, K)) * turn_where * 0.5
    where = np.ones((P, G), bool)
    where[1, 2] = False

    extras = {
        "turn_ids": turn_ids,
        "turn_where": turn_where,
        "turn_rewards": np.where(turn_where, turn_rewards, np.nan),
        "state_ids": np.where(turn_where, rng.integers(0, 3, (P, G, K)), -1),
        "next_state_ids": np.where(turn_where, rng.integers(0, 3, (P, G, K)), -1),
        "action_ids": np.where(turn_where, rng.integers(0, 2, (P, G, K)), -1),
        "step_rewards": rng.uniform(0, 1, (P, G, K)),
        "expert_match": rng.random((P, G, K)) < 0.6,
        "won": (np.arange(K) == counts[..., None] - 1) & (rng.random((P, G, 1)) < 0.5),
        "answer_logp": -rng.uniform(0.1, 2.0, (P, G, K + 1)),
    }
    others = {name: near(rng, logp, 0.3) for name in ("old_logp", "ref_logp")}
    rewards = np.where(where, turn_rewards.sum(-1), np.nan)
    return logp, batch_of(mask, rewards, **others, extras=extras)


def turns_of(batch, p):
    taken = np.asarray(batch.extras["turn_where"][p]) & np.asarray(batch.where[p])[:, None]
    return [tuple(i) for i in np.argwhere(taken)]


def spread(values):
    """Minus the mean, over the sample deviation; 0 where all are equal."""
    x = np.array(list(values.values()), np.float64)
    if len(x) < 2 or x.max() == x.min():
        return dict.fromkeys(values, 0.0)
    return {key: (v - x.mean()) / (x.std(ddof=1) + 1e-6) for key, v in values.items()}


def less_mean(values):
    mean = np.mean(list(values.values())) if values else 0.0
    return {key: v - mean for key, v in values.items()}


def apart(values, kind, norm):
    """`norm` within the entries for which `kind` is equal."""
    out = {}
    for name in {kind(key) for key in values}:
        out |= norm({key: v for key, v in values.items() if kind(key) == name})
    return out


def to_come(values, gamma):
    return {
        (g, k): sum(gamma ** (j - k) * v for (h, j), v in values.items() if h == g and j >= k)
        for g, k in values
    }


def credit(name, batch, p):
    """Advantages of the turns (g, k) of a prompt."""
    x = {key: np.asarray(v[p]) for key, v in batch.extras.items()}
    turns, rewards = turns_of(batch, p), np.float64(batch.rewards[p])
    r = {t: float(x["turn_rewards"][t]) for t in turns}
    members = {g: rewards[g] for g in range(G) if batch.where[p, g]}
    if name == "mc_return":
        return apart(to_come(r, 1.0), lambda t: t[1], less_mean)
    if name == "gigpo":
        episode = less_mean(members)
        step = apart(to_come(r, 0.95), lambda t: x["state_ids"][t], less_mean)
        return {t: episode[t[0]] + step[t] for t in turns}
    if name == "mua_rl":
        return {t: spread(members)[t[0]] for t in turns}
    if name == "salt":
        base = spread(members)

        def edge(t):
            before = tuple(x[n][t[0], t[1] - 1] for n in ids) if t[1] else ()
            return before + tuple(x[n][t] for n in ids)

        ids = ("state_ids", "action_ids", "next_state_ids")
        shared = {t: {u[0] for u in turns if edge(u) == edge(t)} for t in turns}
        return {t: np.mean([base[g] for g in shared[t]]) for t in turns}
    if name == "ui_s1":
        cut = {}
        for g, k in sorted(turns, reverse=True):
            follows = (g, k + 1) in cut and x["expert_match"][g, k : k + 2].all()
            cut[g, k] = r[g, k] + (0.5 * cut[g, k + 1] if follows else 0.0)
        step, episode = apart(cut, lambda t: t[1], spread), spread(r)
        return {t: episode[t] + step[t] for t in turns}
    last = {g: max(k for h, k in turns if h == g) for g in members}
    if name == "eapo":
        return spread({(g, k): 0.99 ** (last[g] - k) * rewards[g] for g, k in turns})
    if name == "gated_reward":
        gated = {t: r[t] + (rewards[t[0]] > 0) * float(x["step_rewards"][t]) for t in turns}
        return apart(to_come(gated, 1.0), lambda t: t[1], less_mean)
    share = np.exp(np.float64(x["answer_logp"]))
    gain = {(g, k): share[g, k + 1] - share[g, k] for g, k in turns}
    return to_come(spread(gain | {(g, k): rewards[g] for g, k in last.items()}), 1.0)


def token_advantages(name, batch):
    out, turn_ids = np.zeros((P, G, T)), np.asarray(batch.extras["turn_ids"])
    for p in range(P):
        for (g, k), value in credit(name, batch, p).items():
            out[p, g, turn_ids[p, g] == k] = value
    return out


def ppo(logp, batch, advantages, kl_coef):
    x, old, ref = double(logp, batch.old_logp, batch.ref_logp)
    loss = clip(np.exp(x - old), advantages) + kl_coef * k3(x, ref)
    mask = np.asarray(batch.mask) & np.asarray(batch.where)[..., None]
    return loss[mask].mean()


KL = {"mua_rl": 0.001, "gigpo": 0.01, "ui_s1": 1e-4, "igpo": 0.001}


@for_each("name", ["mc_return", "gigpo", "salt", "ui_s1", "gated_reward", "igpo", "mua_rl"])
def test_loss_matches_numpy(name):
    logp, batch = make_batch()
    expected = ppo(logp, batch, token_advantages(name, batch), KL.get(name, 0.0))
    recipe = getattr(jr.recipes, name)()
    assert loss_of(recipe, logp, batch) == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_eapo_is_the_mean_over_turns_of_one_ratio_each():
    logp, batch = make_batch()
    turn_ids, losses = np.asarray(batch.extras["turn_ids"]), []
    gap = np.float64(logp) - np.float64(batch.old_logp)
    for p in range(P):
        for (g, k), a in credit("eapo", batch, p).items():
            s = np.exp(gap[p, g, turn_ids[p, g] == k].mean())
            losses.append(-min(s * a, np.clip(s, 1 - 3e-4, 1 + 4e-4) * a))
    assert loss_of(jr.recipes.eapo(), logp, batch) == pytest.approx(np.mean(losses), rel=2e-5)
    recipe = jr.recipes.eapo(multiple=5)
    prepared, _ = jax.jit(recipe.prepare)(batch, recipe.init(), key=jax.random.key(0))
    trains = np.asarray(prepared.weights) > 0
    left = {(p, g, k) for p, g, t in np.argwhere(trains) for k in [turn_ids[p, g, t]]}
    assert len(left) == len(losses) // 5 * 5 < len(losses)


def test_hgpo_reads_the_states_of_the_episode():
    logp, batch = make_batch()
    x = {name: batch.extras[name] for name in ("turn_rewards", "state_ids", "turn_where")}
    turns = jr.advantages.hgpo(batch.rewards, where=batch.where, **x)
    turn_ids = np.asarray(batch.extras["turn_ids"])
    advantages = np.take_along_axis(np.asarray(turns), np.maximum(turn_ids, 0), -1)
    expected = ppo(logp, batch, np.where(turn_ids >= 0, advantages, 0.0), 0.01)
    assert np.abs(advantages).max() > 0.1
    assert loss_of(jr.recipes.hgpo(), logp, batch) == pytest.approx(expected, rel=2e-5)


@for_each("estimator", ["rloo", "grpo"])
def test_the_practitioners_compare_sums_of_placed_rewards(estimator):
    logp, batch = make_batch()
    kl_coef = 0.001 if estimator == "rloo" else 0.01
    mask, advantages = np.asarray(batch.mask), np.zeros((P, G, T))
    d = np.float64(batch.old_logp) - np.float64(batch.ref_logp)
    for p in range(P):
        totals = {}
        for g in np.flatnonzero(batch.where[p]):
            r = np.array(
                [batch.extras["turn_rewards"][p, h, k] for h, k in turns_of(batch, p) if h == g]
            )
            share = max(1, (r > 0).sum()) if batch.extras["won"][p, g].any() else 1.0
            totals[g] = r.sum() / share - kl_coef * d[p, g][mask[p, g]].sum()
        n = len(totals)
        compared = spread(totals)
        if estimator == "rloo":
            compared = {g: v * n / (n - 1) for g, v in less_mean(totals).items()}
        for g, value in compared.items():
            advantages[p, g] = value
    recipe = jr.recipes.practitioner_recipe(estimator=estimator)
    expected = ppo(logp, batch, advantages, 0.0)
    assert loss_of(recipe, logp, batch) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@for_each(
    "estimator, dense, kl_coef",
    [("rloo", True, 0.0), *itertools.product(["rloo", "grpo"], [True, False], [0.5])],
)
def test_a_rollout_that_a_correction_rejects_keeps_its_reward_in_the_baseline(
    estimator, dense, kl_coef
):
    rejects = jnp.arange(4)[:, None] == 3
    logp = jnp.full((1, 4, 2), -1.0)
    extras = {
        "turn_ids": np.broadcast_to(np.arange(2), (1, 4, 2)),
        "turn_rewards": np.broadcast_to([0.0, 1.0], (1, 4, 2)),
        "turn_where": np.ones((1, 4, 2), bool),
        "won": np.broadcast_to([False, True], (1, 4, 2)),
    }
    others = dict.fromkeys(("old_logp", "ref_logp", "behavior_logp"), logp)
    batch = batch_of(np.ones((1, 4, 2), bool), np.ones((1, 4)), **others, extras=extras)
    recipe = jr.recipes.practitioner_recipe(estimator=estimator, dense=dense, kl_coef=kl_coef)
    recipe = recipe.replace(
        correction=lambda old_logp, behavior_logp, mask: (jnp.ones(mask.shape), mask & ~rejects)
    )
    prepared, _ = jax.jit(recipe.prepare)(batch, recipe.init())
    assert not prepared.mask[0, 3].any() and prepared.mask[0, :3].all()
    np.testing.assert_allclose(prepared.advantages, 0.0, atol=1e-6)


def test_the_practitioners_ppo_and_a_single_reward():
    recipe = jr.recipes.practitioner_recipe(estimator="ppo", dense=False)
    assert recipe.required_fields == {"old_logp", "ref_logp", "values", "old_values", "turn_ids"}
    logp, batch = make_batch()
    values = jnp.zeros(batch.mask.shape)
    brought = batch.replace(
        extras=batch.extras | {"values": values, "old_values": values[..., None]}
    )
    prepared, _ = jax.jit(recipe.prepare)(brought, recipe.init())
    d = np.float64(batch.old_logp) - np.float64(batch.ref_logp)
    mask = np.asarray(batch.mask) & np.asarray(batch.where)[..., None]
    kl = np.where(mask, 0.01 * d, 0.0)
    expected = np.nan_to_num(batch.rewards)[..., None] - np.cumsum(kl[..., ::-1], -1)[..., ::-1]
    returns = np.asarray(prepared.extras["returns"])[..., 0]
    np.testing.assert_allclose(returns[mask], expected[mask], atol=1e-4)
