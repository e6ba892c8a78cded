"""Presets with a critic at turns, off policy, and with values of prefixes: the loss in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.recipes import Batch

P, G, T, K = 2, 3, 9, 3


def make_batch():
    """Rollouts of up to three turns with an observation between them; one empty."""
    rng = np.random.default_rng(7)
    ids = np.broadcast_to([0, 0, -1, 1, 1, 1, -1, 2, 2], (P, G, T))
    lengths = np.array([[9, 6, 8], [2, 9, 0]])[..., None]
    mask = (ids >= 0) & (np.arange(T) < lengths)
    logp = rng.normal(-1.2, 0.5, (3, P, G, T)).clip(-3, -0.01).astype(np.float32)
    values = rng.uniform(0, 1, (P, G, T)).astype(np.float32)
    happened = np.stack([(mask & (ids == k)).any(-1) for k in range(K)], -1)
    batch = Batch(
        tokens=jnp.zeros((P, G, T), jnp.int32),
        mask=jnp.asarray(mask),
        rewards=jnp.array([[1.0, 0.0, 0.5], [0.25, 1.0, 0.0]]),
        where=jnp.ones((P, G), bool),
        prompt_tokens=jnp.ones((P, 2), jnp.int32),
        prompt_mask=jnp.ones((P, 2), bool),
        old_logp=jnp.asarray(logp[1]),
        behavior_logp=jnp.asarray(logp[2]),
        extras={
            "turn_ids": jnp.asarray(ids, jnp.int32),
            "turn_rewards": jnp.asarray(rng.uniform(0, 1, (P, G, K)), jnp.float32),
            "turn_where": jnp.asarray(happened),
            "unfinished": jnp.array([[True, False, False], [False, True, False]]),
            "versions": jnp.asarray(np.where(np.arange(T) < 2, 3, 4) + np.zeros((P, G, 1), int)),
            "segment_ids": jnp.asarray(ids, jnp.int32),
            "segment_where": jnp.asarray(happened),
            "prefix_values": jnp.asarray(rng.uniform(0, 1, (P, G, K)), jnp.float32),
            "values": jnp.asarray(values),
            "old_values": jnp.asarray(values)[..., None],
        },
    )
    return logp[0], batch


def rollouts(batch):
    """Of each rollout with a token: its place, its tokens, and a reader of its numbers."""
    for index in np.ndindex(P, G):
        tokens = np.flatnonzero(np.asarray(batch.mask)[index])
        if len(tokens):
            yield index, tokens, lambda name, i=index: np.float64(batch.extras[name][i])


def back(r, v, after, discount, trace):
    out, running = np.zeros(len(r)), 0.0
    for i in reversed(range(len(r))):
        running = r[i] + discount[i] * after[i] - v[i] + discount[i] * trace[i] * running
        out[i] = running
    return out


def turns_of(index, tokens, of):
    """The first and last token of each turn, and its reward."""
    ids = of("turn_ids")[tokens].astype(int)
    for k in np.unique(ids):
        mine = tokens[ids == k]
        yield mine, of("turn_rewards")[k]


def of_tokens(batch, gamma, intra, lam):
    """Token advantages and returns, a discount between turns and one within."""
    a, y = np.zeros((P, G, T)), np.zeros((P, G, T))
    for index, tokens, of in rollouts(batch):
        r, discount = np.zeros(T), np.full(T, intra)
        for mine, reward in turns_of(index, tokens, of):
            r[mine[-1]], discount[mine[-1]] = reward, gamma
        v = of("values")[tokens]
        found = back(r[tokens], v, np.append(v[1:], 0), discount[tokens], [lam] * len(tokens))
        a[index][tokens], y[index][tokens] = found, found + v
    return a, y, np.asarray(batch.mask)


def of_turns(batch, gamma, lam, post=False):
    a, y, learns = np.zeros((P, G, T)), np.zeros((P, G, T)), np.zeros((P, G, T), bool)
    for index, tokens, of in rollouts(batch):
        turns = list(turns_of(index, tokens, of))
        r = np.array([reward for _, reward in turns])
        v = of("values")[[mine[0] for mine, _ in turns]]
        w = of("values")[[mine[-1] for mine, _ in turns]]
        n = len(turns)
        found = back(r, v, np.append(v[1:], 0), [gamma] * n, [lam] * n)
        targets = found + v
        if post:
            found = np.maximum(found, r + np.append(w[:-1], 0) - v)
        for k, (mine, _) in enumerate(turns):
            a[index][mine] = found[k]
            if post:
                y[index][mine[-1]] = gamma * targets[k + 1] if k + 1 < n else 0.0
                learns[index][mine[-1]] = True
            y[index][mine[0]], learns[index][mine[0]] = targets[k], True
    return a, y, learns


def t_ppo(batch):
    a, y, mask = np.zeros((P, G, T)), np.zeros((P, G, T)), np.asarray(batch.mask)
    cut = np.asarray(batch.extras["unfinished"])
    for index, tokens, of in rollouts(batch):
        v, r = of("values")[tokens], np.zeros(len(tokens))
        r[-1] = float(batch.rewards[index])
        after = np.append(v[1:], v[-1] if cut[index] else 0.0)
        a[index][tokens] = back(r, v, after, [1.0] * len(r), [0.95] * len(r))
        y[index][tokens] = r[-1]
    now = (mask & (np.asarray(batch.extras["versions"]) == 4)).any(-1)
    return a, y, mask & (now & ~cut)[..., None]


def vtrace(batch):
    a, y = np.zeros((P, G, T)), np.zeros((P, G, T))
    for index, tokens, of in rollouts(batch):
        v, r = of("values")[tokens], np.zeros(len(tokens))
        r[-1] = float(batch.rewards[index])
        ratio = np.float64(batch.old_logp[index]) - np.float64(batch.behavior_logp[index])
        rho = np.minimum(np.exp(ratio[tokens]), 1.0)
        after, e, errors = np.append(v[1:], 0), 0.0, np.zeros(len(r))
        for t in reversed(range(len(r))):
            e = rho[t] * (r[t] + 0.9 * after[t] - v[t] + 0.9 * e)
            errors[t] = e
        vs = errors + v
        y[index][tokens] = vs
        a[index][tokens] = rho * (r + 0.9 * np.append(vs[1:], 0) - v)
    return a, y, np.asarray(batch.mask)


def of_segments(batch, alpha=0.0):
    a = np.zeros((P, G, T))
    for index, tokens, of in rollouts(batch):
        ids = of("segment_ids")[tokens].astype(int)
        v = of("prefix_values")[np.unique(ids)]
        mu = 1 - (1 - v) ** 4
        reward = float(batch.rewards[index])
        r = np.array([reward, 1 - (1 - reward) ** 4])
        gained = np.append(v[1:], r[0]) - v + alpha * (np.append(mu[1:], r[1]) - mu)
        for k, x in zip(np.unique(ids), gained, strict=True):
            a[index][tokens[ids == k]] = x
    return a, None, None


def white(a, mask):
    return np.where(mask, (a - a[mask].mean()) / a[mask].std(ddof=1), 0.0)


def unlikely(batch):
    return np.asarray(batch.mask) & (np.exp(np.float64(batch.old_logp)) < 0.4)


def newest(batch):
    """Not the two first tokens, which an older batch sampled; not the last of what goes on."""
    mask, cut = np.asarray(batch.mask), np.asarray(batch.extras["unfinished"])
    keep = mask & (np.asarray(batch.extras["versions"]) == 4)
    for index, tokens, _ in rollouts(batch):
        if cut[index]:
            keep[index][tokens[-1]] = False
    return keep


# The preset, its options, and advantages, returns and the tokens of the critic.
CASES = {
    "gae_token": ({"gamma": 0.9, "lam": 0.8}, lambda b: of_tokens(b, 0.9, 0.9, 0.8)),
    "gae_turn": ({"gamma": 0.9, "lam": 0.8}, lambda b: of_turns(b, 0.9, 0.8)),
    "poad": ({"gamma": 0.8}, lambda b: of_tokens(b, 0.8, 1.0, 0.95)),
    "pdppo": ({"gamma": 0.9}, lambda b: of_turns(b, 0.9, 0.95, post=True)),
    "t_ppo": ({"drop_tail": 1}, t_ppo),
    "vtrace": ({"gamma": 0.9}, vtrace),
    "vineppo": ({}, of_segments),
    "spo_chain": ({"rho": 0.4}, of_segments),
    "pav": ({"alpha": 2.0}, lambda b: of_segments(b, 2.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_policy_and_critic_is_the_papers(name):
    logp, batch = make_batch()
    options, reference = CASES[name]
    recipe = getattr(jr.recipes, name)(**options)
    prepared, _ = recipe.prepare(batch, recipe.init())
    a, y, learns = reference(batch)
    mask = np.asarray(batch.mask)
    trains = {"spo_chain": unlikely, "t_ppo": newest}.get(name, lambda b: mask)(batch)
    if name not in ("pdppo", "vtrace", "pav", "t_ppo"):
        a = white(a, trains if name == "spo_chain" else mask)
    if name == "vtrace":
        loss = -a * logp
    else:
        ratio = np.exp(np.float64(logp) - np.float64(batch.old_logp))
        loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
    found = recipe.loss(jnp.asarray(logp), prepared)
    np.testing.assert_allclose(found, loss[trains].mean(), rtol=2e-4)
    if y is None:
        assert recipe.critic is None
        return
    # A critic that moved by less than its clip: its plain squared error, where it learns.
    moved = batch.extras["old_values"] + 0.1
    error = 0.5 * (np.float64(moved[..., 0]) - y) ** 2
    found = recipe.critic.total_loss(moved, prepared)
    np.testing.assert_allclose(found, error[learns].mean(), rtol=2e-4)


def test_the_penalty_of_gae_token_stands_in_the_rewards_of_tokens():
    logp, batch = make_batch()
    ref = jnp.asarray(np.random.default_rng(2).normal(-1.2, 0.3, (P, G, T)), jnp.float32)
    recipe = jr.recipes.gae_token(kl_coef=0.5, whiten=False, lam=1.0)
    prepared, _ = recipe.prepare(batch.replace(ref_logp=ref), recipe.init())
    plain = jr.recipes.gae_token(whiten=False, lam=1.0)
    without, _ = plain.prepare(batch, plain.init())
    mask = np.asarray(batch.mask)
    penalty = np.where(mask, 0.5 * (batch.old_logp - ref), 0)
    later = np.cumsum(penalty[..., ::-1], -1)[..., ::-1]
    expected = np.where(mask, without.advantages - later, 0)
    np.testing.assert_allclose(prepared.advantages, expected, atol=1e-5)


def test_bad_options():
    with pytest.raises(ValueError, match="gae_turn: value_eps must be above 0"):
        jr.recipes.gae_turn(value_eps=0.0)
    with pytest.raises(ValueError, match="combine must be one of"):
        jr.recipes.pdppo(combine="sum")
    with pytest.raises(ValueError, match="rollouts must be above 0"):
        jr.recipes.vineppo(rollouts=0)
    with pytest.raises(ValueError, match="k must be an integer above 0"):
        jr.recipes.pav(k=0)
    with pytest.raises(ValueError, match="clip_trace must be above 0"):
        jr.recipes.vtrace(clip_trace=0.0)
    with pytest.raises(ValueError, match="kl_coef must not be negative"):
        jr.recipes.gae_token(kl_coef=-1.0)
