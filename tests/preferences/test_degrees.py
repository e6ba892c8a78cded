"""Degraded responses: which tokens remain, and the loss of their degrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, put, value_and_grad

from jaxrl_llm import preferences

KEY = jax.random.key(0)


def test_the_most_salient_tokens_are_removed():
    salience = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    mask = np.arange(8) < np.array([8, 5, 0])[:, None]
    salience[~mask] = np.nan
    run = jax.jit(lambda fraction: preferences.degrade_mask(KEY, salience, mask, fraction=fraction))
    for k in range(5):
        remain = np.asarray(run(k / 4))
        assert not (remain & ~mask).any()
        for row, length in enumerate((8, 5, 0)):
            removed = np.flatnonzero(mask[row] & ~remain[row])
            top = np.argsort(-salience[row, :length])[: k * length // 4]
            assert set(removed) == set(top)
    equal(run(0.0), mask)
    each = preferences.degrade_mask(KEY, salience, mask, fraction=np.array([0.25, 0.4, 1.0]))
    assert each.sum(-1).tolist() == [6, 3, 0]


def test_a_term_of_degrees_is_the_loss_of_the_copies_of_a_group():
    rng = np.random.default_rng(3)
    logits = np.asarray(rng.normal(size=(2, 5, 3, 4)), jnp.float32)
    mask = np.ones((2, 5, 3), bool)
    mask[0, 1, 2] = mask[1, 4] = False
    rewards = np.array([[0.5, 1.0, 0.0, 0.75, 0.25], [1.0, 0.0, 0.9, 0.5, 0.75]])
    logits = np.where(mask[..., None], logits, np.nan)
    term = preferences.degree_term(
        degree_logits=logits, rewards=rewards, mask=np.asarray(mask), coef=0.3
    )
    want = []
    for group, degrees in ((0, {0: 2, 1: 0, 3: 1, 4: 3}), (1, {0: 0, 3: 2})):
        losses = []
        for g, degree in degrees.items():
            z = np.float64(logits[group, g, np.flatnonzero(mask[group, g]).max()])
            losses.append(np.log(np.exp(z).sum()) - z[degree])
        want.append(0.3 * np.mean(losses))
    close(term, np.where(mask, np.array(want)[:, None, None], 0), rtol=1e-5)
    ordered = np.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)
    close(
        preferences.degree_loss(ordered),
        preferences.degree_loss(ordered[:, ::-1], degrees=np.tile(np.arange(4)[::-1], (3, 1))),
        rtol=1e-6,
    )


def test_a_head_is_rows_of_the_output_matrix():
    logits = np.arange(12.0).reshape(2, 6)
    assert preferences.degree_logits(logits, classes=(5, 1)).tolist() == [[5, 1], [11, 7]]
    outside = put(logits, np.s_[0, 5], -np.inf)
    assert preferences.degree_logits(outside, classes=(5, 1)).tolist() == [[0, 1], [11, 7]]


def test_ties_are_broken_at_random():
    mask = np.ones((200, 4), bool)
    remain = preferences.degrade_mask(KEY, np.zeros((200, 4)), mask, fraction=0.5)
    assert (np.asarray(remain).sum(-1) == 2).all()
    close(np.asarray(remain).mean(0), np.full(4, 0.5), atol=0.12)


def test_what_remains_moves_to_the_left():
    tokens = np.array([[5, 6, 7, 8], [1, 2, 3, 4]])
    keep = np.array([[False, True, False, True], [False] * 4])
    assert preferences.compact_left(tokens, keep, fill=9).tolist() == [[6, 8, 9, 9], [9] * 4]


def test_the_loss_of_degrees():
    assert float(preferences.degree_loss(np.zeros((4, 4)))) == pytest.approx(1.386294, abs=1e-6)
    logits = np.random.default_rng(1).normal(size=(2, 3, 3)).astype(np.float32)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    right = -np.diagonal(logp, axis1=1, axis2=2)
    close(preferences.degree_loss(logits), right.mean(-1), rtol=1e-5)
    where = np.array([[True, False, True], [False] * 3])
    logits[~where] = np.nan
    run = value_and_grad(lambda x: preferences.degree_loss(x, where=where).sum())
    value, slope = run(logits)
    assert float(value) == pytest.approx(right[0, [0, 2]].mean(), rel=1e-5)
    assert np.isfinite(slope).all() and not slope[~where].any()
