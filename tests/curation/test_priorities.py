"""Scores of replayed groups and probabilities of a draw by them."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close
from scipy import stats

from jaxrl_llm.advantages import grpo

KEY = jax.random.key(0)
KEYS = jax.random.split(jax.random.key(1), 3000)


def test_scores():
    # Scores of groups.
    rewards = jnp.array([[1.0, 0.0, 1.0, 0.0], [0.1, 0.1, 0.1, 0.1], [1.0, 0.0, jnp.nan, 9.0]])
    where = jnp.array([[True] * 4, [True] * 4, [True, True, False, False]])
    advantages = jnp.where(where, jnp.array([1.0, -1.0, 1.0, -1.0]), jnp.inf)
    std = rewards[0].std(ddof=1)
    scores = cur.replay_scores(advantages, rewards, where=where)
    close(scores, [4 * std, 0.0, 2 * np.sqrt(0.5)], rtol=1e-6)
    assert scores[1] == 0
    # As the paper of the entry has it, where the deviation is 1.
    unit = jnp.array([1.0, -1.0, 1.0, -1.0]) * np.sqrt(0.75)
    close(cur.replay_scores(advantages[0], unit), 4.0, rtol=1e-6)
    assert cur.replay_scores(grpo(rewards[1]), rewards[1]) == 0

    # Priorities and their undoing.
    scores, where = jnp.array([1.0, 4.0, jnp.nan, 9.0]), jnp.array([True, True, False, True])
    for power, expected in ((0.5, [1 / 6, 2 / 6, 0, 3 / 6]), (0.0, [1 / 3, 1 / 3, 0, 1 / 3])):
        close(cur.replay_priorities(scores, power=power, where=where), expected, rtol=1e-6)
    huge = cur.replay_priorities(jnp.array([1e30, 1e30]), power=2.0)
    close(huge, 0.5)
    assert not cur.replay_priorities(jnp.zeros(3)).any()
    probs = cur.replay_priorities(scores, where=where)
    weights = cur.replay_importance(probs, where=where)
    # At a power of 1 every item counts alike in expectation.
    close((weights * probs)[where], probs[0], rtol=1e-6)
    assert weights[2] == 0 and weights.max() == 1
    flat = cur.replay_importance(probs, power=0.0, where=where)
    assert flat.tolist() == [1, 1, 0, 1]

    # Recency.
    out = cur.recency_weights(
        jnp.array([4, 2, 9, -50]), version=4, scale=2.0, where=jnp.array([True, True, True, False])
    )
    close(out, [1.0, np.exp(-1), 1.0, 0.0], rtol=1e-6)

    # Fading worked numbers.
    expected = [0, 0.088971, 0.263279, 0.321820, 0.325930]
    close(cur.fading_probs(jnp.arange(5)), expected, atol=1e-6)
    order = jnp.array([12, -1, 3, 40, 7, 9])
    shuffled = np.array(expected)[[3, 0, 0, 4, 1, 2]] * [1, 0, 1, 1, 1, 1]
    close(cur.fading_probs(order), shuffled, atol=1e-6)
    x = np.arange(6) / 6
    sharp = np.tanh(70 * x**30 + 0.02 * x**2)
    close(cur.fading_probs(jnp.arange(6), form="sharp"), sharp / sharp.sum(), rtol=1e-5)
    assert cur.fading_probs(jnp.array([-1, 5])).tolist() == [0.0, 1.0]
    assert not cur.fading_probs(jnp.full(3, -1)).any()
    for factor in (0.01, 7.0, 100.0):
        probs = cur.fading_probs(jnp.arange(20), factor=factor)
        assert (jnp.diff(probs) >= 0).all() and probs[0] == 0
        close(probs.sum(), 1.0, rtol=1e-5)


def test_selective_samples():
    # Selective samples are fresh first and by advantage.
    advantages = jnp.array([0.5, -1.5, 0.0, 2.0, jnp.nan])
    where = jnp.array([True, True, True, True, False])
    stored = jnp.array([1.0, 0.0, -3.0, jnp.inf])
    stored_where = jnp.array([True, True, True, False])
    draw = jax.jit(jax.vmap(lambda key: cur.ssb_sample(
        key, advantages, stored, count=5, where=where, stored_where=stored_where
    )))  # fmt: skip
    sample = draw(KEYS)
    assert (np.asarray(sample.stored) == [False, False, False, True, True]).all()
    fresh = np.bincount(np.asarray(sample.index[:, 0]), minlength=4)
    assert fresh[2] == 0
    expected = np.array([0.125, 0.375, 0.5]) * len(KEYS)
    assert stats.chisquare(fresh[[0, 1, 3]], expected).pvalue > 0.01
    old = np.bincount(np.asarray(sample.index[:, 4]), minlength=3)
    assert (
        old[1] == 0
        and stats.chisquare(old[[0, 2]], [len(KEYS) / 4, 3 * len(KEYS) / 4]).pvalue > 0.01
    )

    # Selective samples without an advantage.
    none, some = jnp.zeros(3), jnp.array([0.0, -1.0])
    assert cur.ssb_sample(KEY, none, none, count=2).index.tolist() == [-1, -1]
    only_old = cur.ssb_sample(KEY, none, some, count=2)
    assert only_old.index.tolist() == [1, 1] and only_old.stored.all()
    only_new = cur.ssb_sample(KEY, some, none, count=3)
    assert only_new.index.tolist() == [1, -1, -1] and not only_new.stored.any()
    even = jax.vmap(lambda key: cur.ssb_sample(
        key, jnp.array([1.0, 100.0]), none, count=1, power=0.0
    ).index[0])(KEYS[:500])  # fmt: skip
    assert 150 < int(even.sum()) < 350

    # The sizes of advantages leave out what is masked.
    advantages = np.array([[0.5, -1.5, np.nan, 2.0], [3.0, 0.0, 0.0, -1.0]], np.float32)
    where = np.array([[True, True, False, True], [False] * 4])
    got = cur.advantage_sizes(advantages, where=where)
    close(got, [4.0 / 3, 0.0], rtol=1e-6)
