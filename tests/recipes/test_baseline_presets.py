"""Presets of other baselines, of returns and of a critic: the whole loss in float64, row by row."""

import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import MASK, REWARDS, batch_of, near
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import Batch

P, G, T = 3, 4, 5


def make_batch() -> tuple[np.ndarray, Batch]:
    """Ratios far from 1; a group that agrees, an empty response, a rollout left out."""
    rng = np.random.default_rng(5)
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    values = rng.normal(0, 0.5, (P, G, T)).astype(np.float32)
    others = {name: np.minimum(near(rng, logp), -0.01) for name in ("old_logp", "ref_logp")}
    extras = {
        "greedy_rewards": np.array([0.25, 1.0, 0.5]),
        "sum_pi_sq": rng.uniform(0.3, 0.9, (P, G, T)),
        "values": values,
        "old_values": values[..., None],
    }
    return logp, batch_of(MASK[:P], REWARDS, **others, extras=extras)


class Rows:
    """The kept rollouts of a batch as lists of float64 numbers, one list a rollout."""

    def __init__(self, logp, batch):
        self.places = [tuple(i) for i in np.argwhere(np.asarray(batch.where))]
        tokens = np.asarray(batch.mask)

        def rows(x):
            return [np.float64(x[i])[tokens[i]] for i in self.places]

        self.logp, self.old, self.ref = map(rows, (logp, batch.old_logp, batch.ref_logp))
        self.sum_pi_sq, self.values = (rows(batch.extras[n]) for n in ("sum_pi_sq", "values"))
        self.rewards = [float(batch.rewards[i]) for i in self.places]
        self.greedy = [float(batch.extras["greedy_rewards"][p]) for p, _ in self.places]
        self.lengths = [len(x) for x in self.logp]

    def group(self, i):
        """Indices of the rollouts of the group of rollout i."""
        return [j for j, place in enumerate(self.places) if place[0] == self.places[i][0]]


def per_token(rows, values):
    return [np.full(n, a) for n, a in zip(rows.lengths, values, strict=True)]


def whitened(lists):
    kept = np.concatenate(lists)
    return [(x - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8) for x in lists]


def to_go(rows, scale=1.0, clip=np.inf, kl_coef=0.0, gamma=1.0):
    out = []
    for r, old, ref in zip(rows.rewards, rows.old, rows.ref, strict=True):
        rewards = -kl_coef * (old - ref)
        if len(rewards):
            rewards[-1] += np.clip(r / scale, -clip, clip)
        running, returns = 0.0, np.zeros(len(rewards))
        for t in range(len(rewards) - 1, -1, -1):
            returns[t] = running = rewards[t] + gamma * running
        out.append(returns)
    return out


def opo(rows):
    out = []
    for i, r in enumerate(rows.rewards):
        group = rows.group(i)
        length = np.array([rows.lengths[j] for j in group])
        out.append(r - length @ np.array([rows.rewards[j] for j in group]) / length.sum())
    return per_token(rows, out)


def centered(rows):
    return [
        r - np.mean([rows.rewards[j] for j in rows.group(i)]) for i, r in enumerate(rows.rewards)
    ]


def otb(rows, zero_tail=False):
    energy = [
        np.cumsum(1 - 2 * np.exp(old) + sq)
        for old, sq in zip(rows.old, rows.sum_pi_sq, strict=True)
    ]
    out = []
    for i, r in enumerate(rows.rewards):
        group = rows.group(i)
        lengths = sorted(rows.lengths[j] for j in group)
        row = []
        for t in range(rows.lengths[i]):
            alive = [j for j in group if rows.lengths[j] > t]
            weights = np.array([energy[j][t] for j in alive])
            base = weights @ np.array([rows.rewards[j] for j in alive]) / (weights.sum() + 1e-8)
            if zero_tail and rows.lengths[i] == lengths[-1] and t >= lengths[-2]:
                base = 0.0
            row.append(r - base)
        out.append(np.array(row))
    return out


def gae(rows, scale, clip, kl_coef, lam):
    out = []
    for r, old, ref, values in zip(rows.rewards, rows.old, rows.ref, rows.values, strict=True):
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
    return np.std(rows.rewards, ddof=1)


def remax_kl(rows, kl_coef):
    return [g - b for g, b in zip(to_go(rows, kl_coef=kl_coef), rows.greedy, strict=True)]


def rloo_kl(rows, kl_coef):
    """The divergence of a response is part of its reward."""
    lost = [np.sum(old - ref) for old, ref in zip(rows.old, rows.ref, strict=True)]
    rewards = np.subtract(rows.rewards, kl_coef * np.array(lost))
    others = [np.mean([rewards[j] for j in rows.group(i) if j != i]) for i in range(len(rewards))]
    return per_token(rows, rewards - others)


def batch_normal(rows):
    values = np.array(centered(rows))
    return per_token(rows, (values - values.mean()) / (values.std(ddof=1) + 1e-8))


# Two of three groups have a spread; of 11 kept rollouts, 7 have a reward that is not zero.
SHARE = 2 / 3 + 1e-5
ADVANTAGES = {
    ("remax", (("kl_coef", 0.0),)): lambda x: per_token(x, np.subtract(x.rewards, x.greedy)),
    ("remax", (("kl_coef", 0.3),)): lambda x: remax_kl(x, 0.3),
    ("rloo", ()): lambda x: rloo_kl(x, 0.0),
    ("rloo", (("kl_coef", 0.3),)): lambda x: rloo_kl(x, 0.3),
    ("reinforce_pp", ()): lambda x: whitened(to_go(x)),
    ("reinforce_pp", (("kl_coef", 0.1), ("gamma", 0.9))): lambda x: whitened(
        to_go(x, kl_coef=0.1, gamma=0.9)
    ),
    ("reinforce_pp_baseline", ()): lambda x: whitened(per_token(x, centered(x))),
    ("reinforce_pp_baseline", (("norm", "sequence"),)): batch_normal,
    ("opo", ()): opo,
    ("otb", ()): otb,
    ("otb", (("zero_tail", True),)): lambda x: otb(x, zero_tail=True),
    ("gpg", ()): lambda x: per_token(x, np.array(centered(x)) / SHARE),
    ("gpg", (("mode", "nonzero_reward"),)): lambda x: per_token(
        x, np.array(centered(x)) * 11 / np.count_nonzero(x.rewards)
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
    ready, _ = recipe.prepare(batch, recipe.init())
    rows = Rows(logp, batch)
    losses = []
    for x, old, a in zip(rows.logp, rows.old, ADVANTAGES[name, options](rows), strict=True):
        ratio = np.exp(x - old)
        pessimist = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
        losses.append(pessimist if name in CLIPPED else -a * x)
    # The empty response counts among no mean.
    expected = (
        np.mean([row.sum() for row in losses if len(row)])
        if name in ("remax", "rloo")
        else np.concatenate(losses).mean()
    )
    assert float(recipe.loss(jnp.asarray(logp), ready)) == pytest.approx(expected, rel=1e-5)


def test_remax_has_the_penalty_of_its_scripts():
    assert jr.recipes.remax() == jr.recipes.remax(kl_coef=0.05)


def test_the_critic_of_ppo_max_learns_the_returns_of_the_same_scaled_scores():
    logp, batch = make_batch()
    recipe = jr.recipes.ppo_max(score_clip=1.5, lam=0.8, value_eps=0.1, whiten=True)
    ready, _ = recipe.prepare(batch, recipe.init())
    rows = Rows(logp, batch)
    plain = gae(rows, spread_of_rewards(rows), 1.5, 0.02, 0.8)
    rng = np.random.default_rng(0)
    values = np.asarray(batch.extras["values"]) + rng.normal(0, 0.3, (P, G, T)).astype(np.float32)
    errors = []
    for i, (a, old) in enumerate(zip(plain, rows.values, strict=True)):
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


@for_each(
    ("name", "options", "needs"),
    [
        ("remax", {"kl_coef": 0.0}, {"greedy_rewards"}),
        ("rloo", {"kl_coef": 0.1}, {"old_logp", "ref_logp"}),
        ("reinforce_pp", {"kl_coef": 0.1}, {"old_logp", "ref_logp"}),
        ("ppo_max", {"kl_coef": 0.0}, {"values", "old_values"}),
    ],
)
def test_options_change_what_they_need(name, options, needs):
    recipe = getattr(jr.recipes, name)(**options)
    assert recipe.required_fields == needs
    brought = needs - {"greedy_rewards"}
    assert brought <= recipe.step_fields


@for_each("name", ["remax", "reinforce_pp", "ppo_max"])
def test_one_response_a_prompt_is_enough(name):
    recipe = getattr(jr.recipes, name)()
    recipe.check_group_size(1)


@for_each("name", CLIPPED)
def test_the_clip_is_an_option(name):
    logp, batch = make_batch()
    make, losses = getattr(jr.recipes, name), []
    for options in ({}, {"eps_low": 0.01}, {"eps_high": 0.01}):
        recipe = make(**options)
        ready, _ = recipe.prepare(batch, recipe.init())
        losses.append(float(recipe.loss(jnp.asarray(logp), ready)))
    assert losses[0] not in losses[1:]


def test_the_statistic_of_otb_is_that_of_the_logits():
    ((name, function),) = jr.recipes.otb().computed_from("old_policy").items()
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 9)), jnp.float32)
    assert name == "sum_pi_sq"
    np.testing.assert_array_equal(
        function(logits, jnp.zeros(4, jnp.int32)), jr.advantages.sum_pi_squared(logits)
    )
