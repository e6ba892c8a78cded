"""Rewards of failures by their distance to the successes of the group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.rewards import progress_rewards

compiled = jax.jit(progress_rewards, static_argnames=("radius", "threshold"))


def test_worked_numbers():
    rewards = jnp.array([1.0, 0.0, 0.0, 0.0])
    embeddings = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    ours = compiled(rewards, embeddings=embeddings)
    np.testing.assert_allclose(ours, [1.0, 0.5960, 0.3, 0.0040], atol=5e-5)
    one = compiled(jnp.array([1.0, 0.0]), embeddings=embeddings[:2])
    np.testing.assert_allclose(one, [1.0, 0.3], rtol=1e-6)
    assert not np.asarray(compiled(jnp.zeros(4), embeddings=embeddings)).any()
    # Neither an embedding of 0 nor a row that takes no part counts, right or wrong.
    padded = jnp.array([1.0, 0.0, 0.0, 0.0, 1.0, jnp.nan])
    more = jnp.concatenate([embeddings, jnp.zeros((1, 1)), jnp.full((1, 1), jnp.nan)])
    where = jnp.arange(6) < 5
    ours = compiled(padded, embeddings=more, where=where)
    np.testing.assert_allclose(ours, [1.0, 0.5960, 0.3, 0.0040, 0.0, 0.0], atol=5e-5)


def dbscan(x, radius):
    """Clusters of points linked by steps of at most radius; alone is none."""
    left, clusters = set(range(len(x))), []
    while left:
        cluster = {left.pop()}
        while True:
            near = {j for j in left for i in cluster if np.linalg.norm(x[i] - x[j]) <= radius}
            if not near:
                break
            cluster |= near
            left -= near
        clusters += [sorted(cluster)] if len(cluster) > 1 else []
    return clusters


def reference(rewards, e, where, radius):
    out = np.zeros(rewards.shape)
    for p in range(len(rewards)):
        valid = [g for g in np.flatnonzero(where[p]) if e[p, g].any()]
        good = [g for g in valid if rewards[p, g] > 0.5]
        bad = [g for g in valid if g not in good]
        out[p, good] = 1.0
        if not good or not bad:
            continue
        s = np.float64(e[p, good])
        std = s.std(0)
        clusters = dbscan((s - s.mean(0)) / np.where(std > 0, std, 1), radius) if radius else []
        centers = [s[c].mean(0) for c in clusters] or [s.mean(0)]
        d = np.array([min(np.linalg.norm(np.float64(e[p, g]) - c) for c in centers) for g in bad])
        n = (d - d.min()) / np.ptp(d) if np.ptp(d) > 1e-6 else np.full(len(d), 0.5)
        out[p, bad] = 0.6 / (1 + np.exp(-10 * (0.5 - n)))
    return out


@for_each("radius", [0.9, None])
def test_rewards_equal_a_search_for_clusters(radius):
    rng = np.random.default_rng(4)
    P, G = 8, 12
    rewards = (rng.random((P, G)) < 0.6).astype(np.float32)
    # Successes around two places, and some far away.
    places = rng.integers(0, 2, (P, G, 1)) * 4.0 + rng.normal(0, 0.4, (P, G, 2))
    e = places.astype(np.float32)
    e[rng.random((P, G)) < 0.1] = 0.0
    where = rng.random((P, G)) < 0.9
    junk = np.where(where[..., None], e, np.nan), np.where(where, rewards, np.inf)
    ours = np.asarray(compiled(junk[1], embeddings=junk[0], where=where, radius=radius))
    np.testing.assert_allclose(ours, reference(rewards, e, where, radius), atol=1e-4)
    assert (ours[(ours < 1)] <= 0.6).all()
    if radius is None:
        moved = np.where(e.any(-1, keepdims=True), 3.0 * e + 7.0, 0.0).astype(np.float32)
        again = compiled(rewards, embeddings=moved, where=where, radius=None)
        np.testing.assert_allclose(again, ours, atol=2e-3)


def test_two_clusters_have_two_centers():
    """The middle is far from both of them."""
    e = jnp.array([[0.1], [0.1], [10.0], [10.0], [5.0], [9.0]])
    rewards = jnp.array([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    near = compiled(rewards, embeddings=e)
    middle = compiled(rewards, embeddings=e, radius=None)
    assert near[5] > near[4] and middle[4] > middle[5]


def test_words_as_embeddings_of_a_batch():
    texts = [["write abc", "write abd", "no"], ["a", "", "a"]]
    embeddings = jr.curation.hashed_responses(texts)
    assert embeddings.shape == (2, 3, 256) and not embeddings[1, 1].any()
    rewards = progress_rewards(jnp.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]), embeddings=embeddings)
    assert rewards[0, 1] > rewards[0, 2] and rewards[1].tolist()[:2] == [1.0, 0.0]


@for_each(
    ("change", "error", "words"),
    [
        ({"embeddings": jnp.ones((3, 2))}, ValueError, "embeddings must have the shape of rewards"),
        ({"embeddings": jnp.ones((2, 2), int)}, TypeError, "embeddings must be floating point"),
        ({"radius": 0.0}, ValueError, "progress_rewards: radius must be above 0"),
        ({"cap": -1.0}, ValueError, "progress_rewards: cap must not be negative"),
    ],
)
def test_bad_input_is_one_sentence(change, error, words):
    with pytest.raises(error, match=words):
        progress_rewards(jnp.ones(2), **{"embeddings": jnp.ones((2, 2))} | change)
