"""A policy over latent strategies: worked numbers, a loop in float64, a game that it solves."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal

KEY = jax.random.key(0)
KINDS = 8 * np.eye(3, 6, dtype=np.float32)


def test_worked_numbers():
    # Worked numbers.
    game = cur.latent_policy(num_prompts=3, clusters=3)
    state, update = game.init(), jax.jit(game.update)
    options = {"embeddings": KINDS[None, [0, 1, 1, 2]], "prompt_ids": jnp.array([1])}
    where = jnp.array([[True, True, True, False]])
    rewards = jnp.array([[1.0, 0.0, 0.5, jnp.nan]])
    # Uniform over the two that were played: u = 1 and 1/4, their mean 5/8.
    values, state = update(rewards, state, where=where, key=KEY, **options)
    assert values.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    first = int(jnp.argmax(state.regrets[1]))
    assert sorted(state.regrets[1].tolist()) == [-0.375, 0.0, 0.375]
    assert not state.regrets[jnp.array([0, 2])].any() and int(state.batches) == 1
    # Then the policy is sure of the first, whose utility is 0 now: R = (3/8, 5/8), average 11/16.
    values, state = update(
        jnp.array([[0.0, 1.0, 1.0, 0.0]]), state, where=where, key=KEY, **options
    )
    assert values.tolist() == [[0.6875, 0.3125, 0.3125, 0.0]]
    assert state.policies[1, first] == 1.375
    # Nothing to see changes nothing.
    _, same = update(rewards, state, where=np.zeros((1, 4), bool), key=KEY, **options)
    equal(same.regrets, state.regrets)
    equal(same.policies, state.policies)

    # Equals a loop over states and begins anew.
    game = cur.latent_policy(num_prompts=6, clusters=4, size=5, every=3)
    update, state = jax.jit(game.update), game.init()
    rng = np.random.default_rng(0)
    regrets, policies = np.zeros((2, 6, 4))
    for step in range(5):
        ids, where = rng.permutation(6)[:3], rng.random((3, 5)) < 0.7
        rewards = np.where(where, rng.normal(size=(3, 5)), np.nan).astype(np.float32)
        x = np.where(where[..., None], rng.normal(size=(3, 5, 7)), np.nan).astype(np.float32)
        options = {"embeddings": x, "prompt_ids": jnp.asarray(ids), "key": jax.random.key(step)}
        old = state
        values, state = update(rewards, state, where=where, **options)
        if step in (0, 3):
            regrets, policies = np.zeros((2, 6, 4))
            assert not np.array_equal(state.centers, old.centers)
        else:
            equal(state.centers, old.centers)
        # The projection is the same for all batches.
        axes = np.asarray(jax.random.normal(jax.random.key(0), (7, 5)) / 5**0.5)
        points = np.where(where[..., None], x, 0) @ axes
        strategies = np.square(points[..., None, :] - np.asarray(state.centers)).sum(-1).argmin(-1)
        wanted = loop(np.float64(rewards), strategies, where, ids, regrets, policies)
        close(values, wanted, atol=1e-5)
        close(state.regrets, regrets, atol=1e-5)
        close(state.policies, policies, atol=1e-5)


def loop(rewards, strategies, where, ids, regrets, policies):
    """One batch over the states of the game, in float64."""
    values = np.zeros(rewards.shape)
    for p, q in enumerate(ids):
        here = [g for g in range(rewards.shape[1]) if where[p, g]]
        played = sorted({strategies[p, g] for g in here})
        if not played:
            continue
        u = {a: np.mean([rewards[p, g] for g in here if strategies[p, g] == a]) for a in played}
        positive = {a: max(regrets[q, a], 0) for a in played}
        total = sum(positive.values())
        policy = {a: positive[a] / total if total else 1 / len(played) for a in played}
        mean = sum(policy[a] * u[a] for a in played)
        for a in played:
            regrets[q, a] += u[a] - mean
        positive = np.maximum(regrets[q], 0)
        following = positive / positive.sum() if positive.sum() else np.full(len(positive), 0.25)
        policies[q] += following
        for g in here:
            values[p, g] = policies[q, strategies[p, g]] / policies[q].sum()
    return values


def test_play():
    # Groups without a better utterance do not train.
    mask = jnp.array([[[True, True], [True, False]], [[True, True], [False, False]]])
    values = jnp.array([[0.5, 0.25], [0.5, 0.0]])
    out = cur.differing_values(values, mask)
    assert out.tolist() == [mask[0].tolist(), [[False] * 2] * 2]
