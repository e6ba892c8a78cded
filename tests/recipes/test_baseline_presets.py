"""Presets of other baselines, of returns and of a critic: the whole loss in float64, row by row.

remax      r - r of the greedy response        opo   r - mean weighed by lengths
rloo       r - mean of the others              otb   r - mean weighed by the energy so far
gpg        (r - mean) / share of groups        reinforce_pp   returns, whitened over the batch
ppo_max    generalized advantages of r over its deviation, with a penalty at each token
"""

import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import G, P, Rows, T, center, clip, example, mean, near, prepared
from rows import for_each

import jaxrl_llm as jr


def make_batch():
    def extras(rng, logp):
        values = rng.normal(0, 0.5, (P, G, T))
        return {
            "greedy_rewards": np.array([0.25, 1.0, 0.5]),
            "sum_pi_sq": rng.uniform(0.3, 0.9, (P, G, T)),
            "values": values,
            "old_values": values[..., None],
        }

    rng = np.random.default_rng(6)
    logp, batch = example(5, extras=extras)
    others = (np.minimum(near(rng, logp), -0.01) for _ in range(2))
    old, ref = (jnp.float32(x) for x in others)
    return logp, batch.replace(old_logp=old, ref_logp=ref)


def per_token(rows, values):
    return [np.full(n, a) for n, a in zip(rows.lengths, values, strict=True)]


def whitened(lists):
    kept = np.concatenate(lists)
    return [(x - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8) for x in lists]


def to_go(rows, scale=1.0, clip=np.inf, kl_coef=0.0, gamma=1.0):
    out = []
    for r, old, ref in zip(rows.r, rows.old, rows.ref, strict=True):
        rewards = -kl_coef * (old - ref)
        if len(rewards):
            rewards[-1] += np.clip(r / scale, -clip, clip)
        running, returns = 0.0, np.zeros(len(rewards))
        for t in range(len(rewards) - 1, -1, -1):
            returns[t] = running = rewards[t] + gamma * running
        out.append(returns)
    return out


def opo(rows):
    out = rows.r.copy()
    for group in rows.groups:
        out[group] -= rows.lengths[group] @ rows.r[group] / rows.lengths[group].sum()
    return per_token(rows, out)


def otb(rows, zero_tail=False):
    energy = [
        np.cumsum(1 - 2 * np.exp(old) + sq)
        for old, sq in zip(rows.old, rows.extra("sum_pi_sq"), strict=True)
    ]
    out = []
    for i, r in enumerate(rows.r):
        (group,) = (x for x in rows.groups if i in x)
        lengths = sorted(rows.lengths[j] for j in group)
        row = []
        for t in range(rows.lengths[i]):
            alive = [j for j in group if rows.lengths[j] > t]
            weights = np.array([energy[j][t] for j in alive])
            base = weights @ np.array([rows.r[j] for j in alive]) / (weights.sum() + 1e-8)
            if zero_tail and rows.lengths[i] == lengths[-1] and t >= lengths[-2]:
                base = 0.0
            row.append(r - base)
        out.append(np.array(row))
    return out


def gae(rows, scale, clip, kl_coef, lam):
    out = []
    for r, old, ref, values in zip(rows.r, rows.old, rows.ref, rows.extra("values"), strict=True):
        rewards = -kl_coef * (old - ref)
        if len(rewards):
            rewards[-1] += np.clip(r / scale, -clip, clip)
        following, running, row = 0.0, 0.0, np.zeros(len(rewards))
        for t in range(len(rewards) - 1, -1, -1):
            running = rewards[t] + following - values[t] + lam * running
            row[t], following = running, values[t]
        out.append(row)
    return out


def spread_of_rewards(rows):
    return np.std(rows.r, ddof=1)


def greedy(rows):
    return [float(rows.batch.extras["greedy_rewards"][p]) for p, _ in rows.places]


def remax_kl(rows, kl_coef):
    return [g - b for g, b in zip(to_go(rows, kl_coef=kl_coef), greedy(rows), strict=True)]


def rloo_kl(rows, kl_coef):
    """The divergence of a response is part of its reward."""
    lost = [np.sum(old - ref) for old, ref in zip(rows.old, rows.ref, strict=True)]
    rewards = np.subtract(rows.r, kl_coef * np.array(lost))
    return per_token(rows, rows.each(lambda r: center(r) * len(r) / (len(r) - 1), rewards))


def batch_normal(rows):
    values = rows.each(center)
    return per_token(rows, (values - values.mean()) / (values.std(ddof=1) + 1e-8))


# Two of three groups have a spread; of 11 kept rollouts, 7 have a reward that is not zero.
SHARE = 2 / 3 + 1e-5
ADVANTAGES = {
    ("remax", (("kl_coef", 0.0),)): lambda x: per_token(x, np.subtract(x.r, greedy(x))),
    ("remax", (("kl_coef", 0.3),)): lambda x: remax_kl(x, 0.3),
    ("rloo", ()): lambda x: rloo_kl(x, 0.0),
    ("rloo", (("kl_coef", 0.3),)): lambda x: rloo_kl(x, 0.3),
    ("reinforce_pp", ()): lambda x: whitened(to_go(x)),
    ("reinforce_pp", (("kl_coef", 0.1), ("gamma", 0.9))): lambda x: whitened(
        to_go(x, kl_coef=0.1, gamma=0.9)
    ),
    ("reinforce_pp_baseline", ()): lambda x: whitened(per_token(x, x.each(center))),
    ("reinforce_pp_baseline", (("norm", "sequence"),)): batch_normal,
    ("opo", ()): opo,
    ("otb", ()): otb,
    ("otb", (("zero_tail", True),)): lambda x: otb(x, zero_tail=True),
    ("gpg", ()): lambda x: per_token(x, x.each(center) / SHARE),
    ("gpg", (("mode", "nonzero_reward"),)): lambda x: per_token(
        x, x.each(center) * 11 / np.count_nonzero(x.r)
    ),
    ("ppo_max", ()): lambda x: gae(x, spread_of_rewards(x), 10.0, 0.02, 0.95),
    ("ppo_max", (("whiten", True), ("advantage_clip", 0.5), ("score_clip", 1.0), ("lam", 0.5))): (
        lambda x: [
            np.clip(a, -0.5, 0.5) for a in whitened(gae(x, spread_of_rewards(x), 1.0, 0.02, 0.5))
        ]
    ),
}
CLIPPED = ("reinforce_pp", "reinforce_pp_baseline", "otb", "ppo_max")


@for_each("name, options", ADVANTAGES)
def test_the_loss_is_the_papers(name, options):
    logp, batch = make_batch()
    recipe = getattr(jr.recipes, name)(**dict(options))
    rows = Rows(logp, batch)
    losses = [
        clip(np.exp(x - old), a) if name in CLIPPED else -a * x
        for x, old, a in zip(rows.x, rows.old, ADVANTAGES[name, options](rows), strict=True)
    ]
    expected = mean(losses, "sum" if name in ("remax", "rloo") else "token")
    found = float(recipe.loss(jnp.asarray(logp), prepared(recipe, batch)))
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_critic_of_ppo_max_learns_the_returns_of_the_same_scaled_scores():
    logp, batch = make_batch()
    recipe = jr.recipes.ppo_max(score_clip=1.5, lam=0.8, value_eps=0.1, whiten=True)
    ready, _ = recipe.prepare(batch, recipe.init())
    rows = Rows(logp, batch)
    plain = gae(rows, spread_of_rewards(rows), 1.5, 0.02, 0.8)
    rng = np.random.default_rng(0)
    values = np.asarray(batch.extras["values"]) + rng.normal(0, 0.3, (P, G, T)).astype(np.float32)
    errors = []
    for i, (a, old) in enumerate(zip(plain, rows.extra("values"), strict=True)):
        place = rows.places[i]
        np.testing.assert_allclose(ready.extras["returns"][place][: len(a), 0], a + old, atol=1e-5)
        v = np.float64(values[place])[: len(a)]
        clipped = old + np.clip(v - old, -0.1, 0.1)
        errors.append(0.5 * np.maximum((v - a - old) ** 2, (clipped - a - old) ** 2))
    loss = recipe.critic.total_loss(jnp.asarray(values)[..., None], ready)
    assert float(loss) == pytest.approx(np.concatenate(errors).mean(), rel=1e-5)


def test_ppo_max_remembers_the_scores():
    _, batch = make_batch()
    recipe = jr.recipes.ppo_max()
    _, state = recipe.prepare(batch, recipe.init())
    other = batch.replace(rewards=3.0 * batch.rewards)
    ready, state = recipe.prepare(other, state)
    seen = np.asarray(batch.rewards)[np.asarray(batch.where)]
    std = np.std([*seen, *(3.0 * seen)], ddof=1)
    np.testing.assert_allclose(ready.extras["score_std"], np.full((P, 1, 1), std), rtol=1e-5)
    assert state.controllers["score_std"].count == 22
