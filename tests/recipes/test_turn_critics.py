"""Presets with a critic, at turns, off policy, and values of prefixes: the loss in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import batch_of, clip, double, k3
from rows import for_each

import jaxrl_llm as jr

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
    extras = {
        "turn_ids": ids,
        "turn_rewards": rng.uniform(0, 1, (P, G, K)),
        "turn_where": happened,
        "unfinished": np.array([[True, False, False], [False, True, False]]),
        "current_version": np.full(P, 4),
        "versions": np.where(np.arange(T) < 2, 3, 4) + np.zeros((P, G, 1), int),
        "segment_ids": ids,
        "segment_where": happened,
        "prefix_values": rng.uniform(0, 1, (P, G, K)),
        "values": values,
        "old_values": values[..., None],
        "switches": np.array([[0, 1, 0, 1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 1, 1, 1, 1]], bool),
        "subgoal_ids": np.array([[0, 1, 2, 3, 3, 1, 0, 0, -1], [5, 0, 0, 2, -1, 4, 0, 0, 0]]),
        "token_roles": np.broadcast_to([3, 2, 1, 2, 1, 1, 1, 0, 3], (P, G, T)),
        "truncated": np.array([[True, False, False], [False, True, False]]),
    }
    for name in ("switches", "subgoal_ids"):
        extras[name] = extras[name].reshape(P, G, K)
    others = dict(zip(("old_logp", "ref_logp", "behavior_logp"), logp[[1, 2, 2]], strict=True))
    rewards = np.array([[1.0, 0.0, 0.5], [0.25, 1.0, 0.0]])
    return logp[0], batch_of(mask, rewards, **others, extras=extras)


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


def of_rewards(batch, gamma, lam, critic_lam, kl_coef=0.0):
    """PPO of one reward at the end; ``lam`` may be a function of the number of tokens."""
    a, y = np.zeros((P, G, T)), np.zeros((P, G, T))
    for index, tokens, of in rollouts(batch):
        v, n = of("values")[tokens], len(tokens)
        old, ref = (np.float64(x[index])[tokens] for x in (batch.old_logp, batch.ref_logp))
        r = -kl_coef * (old - ref)
        r[-1] += float(batch.rewards[index])
        after, trace = np.append(v[1:], 0), lam(n) if callable(lam) else lam
        a[index][tokens] = back(r, v, after, [gamma] * n, [trace] * n)
        y[index][tokens] = v + back(r, v, after, [gamma] * n, [critic_lam] * n)
    return a, y, np.asarray(batch.mask)


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
    "poad": ({"gamma": 0.8, "entropy_coef": 0.0}, lambda b: of_tokens(b, 0.8, 1.0, 0.95)),
    "pdppo": ({"gamma": 0.9}, lambda b: of_turns(b, 0.9, 0.95, post=True)),
    "ppo": (
        {"gamma": 0.9, "lam": 0.8, "critic_lam": 0.6, "kl_coef": 0.3},
        lambda b: of_rewards(b, 0.9, 0.8, 0.6, 0.3),
    ),
    "vc_ppo": ({"gamma": 0.9}, lambda b: of_rewards(b, 0.9, 0.95, 1.0)),
    # Of the lengths here, those of 2 and 5 tokens have a lambda of 0.
    "vapo": ({"alpha": 0.2}, lambda b: of_rewards(b, 1.0, lambda n: max(1 - 5 / n, 0), 1.0)),
    "t_ppo": ({"drop_tail": 1}, t_ppo),
    "vtrace": ({"gamma": 0.9}, vtrace),
    "vineppo": ({"kl_coef": 0.3}, of_segments),
    "spo_chain": ({"rho": 0.4, "kl_coef": 0.3}, of_segments),
    "pav": ({"alpha": 2.0}, lambda b: of_segments(b, 2.0)),
}


@for_each("name", CASES)
def test_the_loss_of_policy_and_critic_is_the_papers(name):
    logp, batch = make_batch()
    options, reference = CASES[name]
    recipe = getattr(jr.recipes, name)(**options)
    prepared, _ = jax.jit(recipe.prepare)(batch, recipe.init())
    a, y, learns = reference(batch)
    mask = np.asarray(batch.mask)
    trains = {"spo_chain": unlikely, "t_ppo": newest}.get(name, lambda b: mask)(batch)
    if name not in ("pdppo", "vtrace", "pav", "t_ppo"):
        a = white(a, trains if name == "spo_chain" else mask)
    if name == "vtrace":
        loss = -a * logp
    else:
        x, old, ref = double(logp, batch.old_logp, batch.ref_logp)
        loss = clip(np.exp(x - old), a, high=1.28 if name == "vapo" else 1.2)
    if name in ("spo_chain", "vineppo"):
        loss = loss + 0.3 * k3(x, ref)
    if name == "vapo":  # the mean over the tokens of right responses
        right = mask & (np.asarray(batch.rewards) > 0)[..., None]
        loss = loss - 0.1 * np.where(right, np.float64(logp), 0.0) * mask.sum() / right.sum()
    found = jax.jit(recipe.loss)(jnp.asarray(logp), prepared)
    np.testing.assert_allclose(found, loss[trains].mean(), rtol=2e-4)
    if y is None:
        assert recipe.critic is None
        return
    # A critic that moved by less than its clip: its plain squared error, where it learns.
    moved = batch.extras["old_values"] + 0.1
    error = 0.5 * (np.float64(moved[..., 0]) - y) ** 2
    found = recipe.critic.total_loss(moved, prepared)
    np.testing.assert_allclose(found, error[learns].mean(), rtol=2e-4)


@for_each("coef", [0.1, 50.0])
def test_without_a_right_response_vapo_imitates_nothing(coef):
    logp, batch = make_batch()
    batch = batch.replace(rewards=-batch.rewards)

    def gradient(coef):
        recipe = jr.recipes.vapo(imitation_coef=coef)
        prepared, _ = jax.jit(recipe.prepare)(batch, recipe.init())
        return jax.jit(jax.value_and_grad(recipe.loss))(jnp.asarray(logp), prepared)

    found, expected = gradient(coef), gradient(0.0)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])
    assert np.any(found[1])


def test_the_loss_of_a_hierarchy_and_of_its_three_critics():
    """Advantages, tokens, targets and their places are those of four functions."""
    logp, batch = make_batch()
    values = np.random.default_rng(3).uniform(0, 1, (P, G, T, 3)).astype(np.float32)
    extras = {**batch.extras, "old_values": jnp.asarray(values)}
    options = {"gamma": 0.9, "action_lam": 0.8, "subgoal_lam": 0.5}
    recipe = jr.recipes.hiper_hae(**options)
    prepared, _ = jax.jit(recipe.prepare)(batch.replace(extras=extras), recipe.init())
    adv, mask = jr.advantages, batch.mask
    turns = {k: extras[k] for k in ("turn_ids", "token_roles", "switches", "turn_where")}
    parts = {k: extras[k] for k in ("switches", "subgoal_ids", "turn_where")}
    rewards = adv.hiper_rewards(extras["turn_rewards"], **parts)
    given = turns | options | {"truncated": extras["truncated"]}
    a = np.float64(adv.hiper(rewards, values, mask, **given))
    np.testing.assert_allclose(prepared.advantages, a, atol=1e-5)
    x, old, ref = double(logp, batch.old_logp, batch.ref_logp)
    loss = clip(np.exp(x - old), a) + 0.01 * k3(x, ref)
    found = jax.jit(recipe.loss)(jnp.asarray(logp), prepared)
    trains = np.asarray(adv.hiper_tokens(mask, **turns))
    np.testing.assert_allclose(found, loss[trains].mean(), rtol=2e-4)
    y = np.float64(adv.hiper_returns(rewards, values, mask, **given))
    error = 0.5 * (np.float64(values + np.float32(0.1)) - y) ** 2
    places = np.asarray(adv.hiper_places(mask, **turns))
    found = recipe.critic.total_loss(jnp.asarray(values) + 0.1, prepared)
    each = [error[..., c][places[..., c]].mean() for c in range(3)]
    np.testing.assert_allclose(found, sum(each), rtol=2e-4)


def test_the_penalty_of_gae_token_stands_in_the_rewards_of_tokens():
    logp, batch = make_batch()
    ref = jnp.asarray(np.random.default_rng(2).normal(-1.2, 0.3, (P, G, T)), jnp.float32)
    recipe = jr.recipes.gae_token(kl_coef=0.5, whiten=False, lam=1.0)
    prepared, _ = jax.jit(recipe.prepare)(batch.replace(ref_logp=ref), recipe.init())
    plain = jr.recipes.gae_token(whiten=False, lam=1.0)
    without, _ = plain.prepare(batch, plain.init())
    mask = np.asarray(batch.mask)
    penalty = np.where(mask, 0.5 * (batch.old_logp - ref), 0)
    later = np.cumsum(penalty[..., ::-1], -1)[..., ::-1]
    expected = np.where(mask, without.advantages - later, 0)
    np.testing.assert_allclose(prepared.advantages, expected, atol=1e-5)


def prepared_of_two_turns(recipe, dropped):
    """The recipe and one episode of two turns, the second won; tokens ``dropped`` are left out."""
    extras = {
        "turn_ids": np.array([[[0, 0, 1, 1]]]),
        "turn_rewards": np.array([[[0.0, 1.0]]]),
        "turn_where": np.ones((1, 1, 2), bool),
        "values": np.zeros((1, 1, 4)),
        "old_values": np.zeros((1, 1, 4, 1)),
    }
    old_logp, whole = np.full((1, 1, 4), -1.0), np.ones((1, 1, 4), bool)
    batch = batch_of(whole, np.ones((1, 1)), old_logp=old_logp, extras=extras)
    keep = ~jnp.isin(jnp.arange(4), jnp.array(dropped))
    recipe = recipe.replace(selection=lambda advantages, mask: mask & keep)
    return recipe, jax.jit(recipe.prepare)(batch, recipe.init())[0]


@for_each("name", ["gae_token", "gae_turn", "poad", "pdppo"])
def test_a_critic_learns_of_the_rewards_of_turns_that_are_left_out(name):
    options = {"gamma": 1.0, "lam": 1.0, "whiten": False}
    recipe = getattr(jr.recipes, name)(**options)
    _, prepared = prepared_of_two_turns(recipe, [2, 3])
    weights = np.asarray(prepared.extras["critic_weights"])[0, 0]
    assert weights[:2].any() and not weights[2:].any()
    returns = np.asarray(prepared.extras["returns"])[0, 0, :, 0]
    np.testing.assert_allclose(returns[:2][weights[:2] > 0], 1.0)


def test_a_critic_of_turns_learns_only_at_the_tokens_that_have_a_target():
    """The first token that remains of a turn is not the first token of the turn."""
    recipe, prepared = prepared_of_two_turns(jr.recipes.gae_turn(whiten=False), [0])
    returns, weights = (prepared.extras[name][0, 0] for name in ("returns", "critic_weights"))
    assert returns[..., 0].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert (weights > 0).tolist() == [False, False, True, False]
    assert weights.sum() == pytest.approx(1.0)
    again = recipe.weigh(prepared)  # as for a minibatch
    np.testing.assert_array_equal(again.extras["critic_weights"][0, 0], weights)


def test_the_weights_of_each_critic_of_a_hierarchy_add_up_after_a_selection():
    """The first token of some turns is left out, at which only some of the critics learn."""
    _, batch = make_batch()
    values = jnp.zeros((P, G, T, 3))
    batch = batch.replace(extras=batch.extras | {"old_values": values}, ref_logp=batch.old_logp)
    whole = jr.recipes.hiper_hae()
    keep = jnp.ones((P, G, T), bool).at[0, :, 0].set(False).at[:, 1, 3].set(False)
    some = whole.replace(selection=lambda advantages, mask: mask & keep)
    found, expected = (
        np.asarray(jax.jit(recipe.prepare)(batch, recipe.init())[0].extras["critic_weights"])
        for recipe in (some, whole)
    )
    places = (expected > 0) & np.asarray(keep)[..., None]
    assert places.sum() < (expected > 0).sum()
    np.testing.assert_array_equal(found > 0, places)
    np.testing.assert_allclose(found.sum((0, 1, 2)), expected.sum((0, 1, 2)), rtol=1e-5)
