"""Presets with a critic, at turns, off policy, and values of prefixes: the loss in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import batch_of
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
        ratio = np.exp(np.float64(logp) - np.float64(batch.old_logp))
        loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.28 if name == "vapo" else 1.2) * a)
    if name in ("spo_chain", "vineppo"):
        difference = np.float64(batch.ref_logp) - np.float64(logp)
        loss = loss + 0.3 * (np.exp(difference) - 1 - difference)
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


def subgoals(batch, values, gamma, action_lam, subgoal_lam):
    """Advantages, tokens that train, and of each of three critics returns and places."""
    value, trains = np.zeros((3, P, G, T)), np.zeros((3, P, G, T), bool)
    y, learns = np.zeros((P, G, T, 3)), np.zeros((P, G, T, 3), bool)
    chosen = [[], [], []]  # the turns that have a token of each kind
    for index, tokens, of in rollouts(batch):
        turns, roles = list(turns_of(index, tokens, of)), of("token_roles")
        n, ids = len(turns), of("subgoal_ids")
        switches = [bool(of("switches")[k]) for k in range(n)]
        rewards = []
        for k, (_, r) in enumerate(turns):
            if not switches[k]:
                r -= 0.3 / n if n > 1 else 0.0
                r -= 0.3 * (k > 0 and min(ids[k - 1 : k + 1]) >= 0 and ids[k] != ids[k - 1])
            rewards.append(r)
        # Behind the subgoal, else behind the switch, else the first token.
        places = []
        for mine, _ in turns:
            place = mine[0]
            for role in (3, 2):
                behind = [b for a, b in zip(mine, mine[1:], strict=False)
                          if roles[a] == role != roles[b]]  # fmt: skip
                place = behind[0] if behind else place
            places.append(place)
        v = [values[index][place][0] for place in places]
        w = [values[index][mine[0]][1] for mine, _ in turns]
        u = [values[index][mine[0]][2] for mine, _ in turns]
        cut = bool(batch.extras["truncated"][index])
        starts = [0] + [k for k in range(1, n) if switches[k]]
        above = 0.0
        for s, e in reversed(list(zip(starts, [*starts[1:], n], strict=True))):
            last = w[e] if e < n else None
            low = last if last is not None else (v[n - 1] if cut else 0.0)
            high = last if last is not None else (w[s] if cut else 0.0)
            running, total = 0.0, high
            for k in reversed(range(s, e)):
                after = v[k + 1] if k + 1 < e else low
                running = rewards[k] + gamma * after - v[k] + gamma * action_lam * running
                total = rewards[k] + gamma * total
                of_turn = {1: running, 3: total - u[k]}
                y[index][places[k]][0], learns[index][places[k], 0] = running + v[k], True
                first = turns[k][0][0]
                y[index][first, 2], learns[index][first, 2] = total, True
                if k == s:
                    d = e - s
                    earned = sum(gamma**j * rewards[s + j] for j in range(d))
                    above = earned + gamma**d * high - w[s] + gamma**d * subgoal_lam * above
                    of_turn[2] = above
                    y[index][first, 1], learns[index][first, 1] = above + w[s], True
                for c, role in enumerate((1, 2, 3)):
                    here = turns[k][0][roles[turns[k][0]] == role]
                    if role in of_turn and len(here):
                        chosen[c].append(of_turn[role])
                        value[c][index][here], trains[c][index][here] = of_turn[role], True
    for c in range(3):
        value[c] = (value[c] - np.mean(chosen[c])) / (np.std(chosen[c]) + 1e-8) * trains[c]
    return value.sum(0), trains.any(0), y, learns


def test_the_loss_of_a_hierarchy_and_of_its_three_critics():
    logp, batch = make_batch()
    rng = np.random.default_rng(3)
    values = rng.uniform(0, 1, (P, G, T, 3)).astype(np.float32)
    ref = rng.normal(-1.2, 0.3, (P, G, T)).astype(np.float32)
    batch = batch.replace(extras=batch.extras | {"old_values": jnp.asarray(values)})
    options = {"gamma": 0.9, "action_lam": 0.8, "subgoal_lam": 0.5}
    recipe = jr.recipes.hiper_hae(**options)
    prepared, _ = jax.jit(recipe.prepare)(batch.replace(ref_logp=jnp.asarray(ref)), recipe.init())
    a, trains, y, learns = subgoals(batch, np.float64(values), *options.values())
    np.testing.assert_allclose(prepared.advantages, a, atol=1e-5)
    ratio = np.exp(np.float64(logp) - np.float64(batch.old_logp))
    d = np.float64(ref) - np.float64(logp)
    loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a) + 0.01 * (np.exp(d) - d - 1)
    found = jax.jit(recipe.loss)(jnp.asarray(logp), prepared)
    np.testing.assert_allclose(found, loss[trains].mean(), rtol=2e-4)
    error = 0.5 * (np.float64(values + np.float32(0.1)) - y) ** 2
    found = recipe.critic.total_loss(jnp.asarray(values) + 0.1, prepared)
    each = [error[..., c][learns[..., c]].mean() for c in range(3)]
    np.testing.assert_allclose(found, sum(each), rtol=2e-4)


def test_poad_leaves_out_updates_above_the_divergence_of_its_code():
    gate = jr.bind(jr.regularizers.kl_gate, max_kl=0.02)
    assert jr.recipes.poad().computed_from("update") == {"update_scale": gate}
    assert not jr.recipes.poad(max_kl=None).computed


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


@for_each(
    "name, options, words",
    [
        ("gae_turn", {"value_eps": 0.0}, "gae_turn: value_eps must be above 0"),
        ("hiper_hae", {"value_eps": 0.0}, "hiper_hae: value_eps must be above 0"),
        ("hiper_hae", {"keep_penalty": -0.3}, "hiper_rewards: keep_penalty must not be negative"),
        ("pdppo", {"combine": "sum"}, "combine must be one of"),
        ("vineppo", {"rollouts": 0}, "rollouts must be above 0"),
        ("pav", {"k": 0}, "k must be an integer above 0"),
        ("vtrace", {"clip_trace": 0.0}, "clip_trace must be above 0"),
        ("gae_token", {"kl_coef": -1.0}, "kl_coef must not be negative"),
    ],
)
def test_bad_options(name, options, words):
    with pytest.raises(ValueError, match=words):
        getattr(jr.recipes, name)(**options)
