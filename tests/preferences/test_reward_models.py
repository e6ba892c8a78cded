"""Losses of reward models: worked numbers, laws, gradients, steps, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, grad, value_and_grad

from jaxrl_llm.preferences import (
    bradley_terry,
    last_token_value,
    listed_rewards,
    paired_rewards,
    process_reward,
    soft_bradley_terry,
    step_marks,
    step_rewards,
    step_values,
)

W, L = np.array([1.0, 0.3, -2.0]), np.array([0.5, 0.9, -2.5])


def test_the_worked_numbers():
    one, half = np.array(1.0), np.array(0.5)
    plain = bradley_terry(one, half)
    close(plain, 0.474077, atol=1e-6)
    close(bradley_terry(one, half, margin=0.3), 0.598139, atol=1e-6)
    close(bradley_terry(one, half, centering=0.01) - plain, 0.0225, atol=1e-6)


def test_laws_of_pairs():
    margin = np.array([0.1, 0.0, 2.0])
    loss = bradley_terry(W, L, margin=margin)
    close(bradley_terry(W + 4, L + 4, margin=margin), loss, rtol=1e-5)
    moved = bradley_terry(W + 4, L + 4, centering=0.1) - bradley_terry(W, L, centering=0.1)
    close(moved, 0.1 * ((W + L + 8) ** 2 - (W + L) ** 2), rtol=1e-5)
    # A smoothed label is the mixture of both labels.
    mixed = 0.9 * bradley_terry(W, L) + 0.1 * bradley_terry(L, W)
    close(bradley_terry(W, L, label_smoothing=0.1), mixed, rtol=1e-6)
    close(soft_bradley_terry(W, L, np.full(3, 0.9)), mixed, rtol=1e-6)
    close(soft_bradley_terry(W, L, np.ones(3)), bradley_terry(W, L), rtol=1e-6)
    p = np.array([0.2, 0.5, 0.9])
    slope = grad(lambda r: soft_bradley_terry(r, np.zeros(3), p).sum())(np.log(p / (1 - p)))
    close(slope, np.zeros(3), atol=1e-6)


def test_absent_pairs_are_not_read():
    where = np.array([True, False, True])
    for junk in (np.nan, np.inf):
        w, m = np.where(where, W, junk), np.where(where, 0.2, junk)
        loss, slope = value_and_grad(
            lambda x, m=m: bradley_terry(x, L, margin=m, centering=0.1, where=where).sum()
        )(w)
        expected = bradley_terry(W, L, margin=0.2, centering=0.1)
        close(loss, expected[0] + expected[2], rtol=1e-6)
        assert np.isfinite(slope).all() and slope[1] == 0
        soft = soft_bradley_terry(w, L, m, where=where)
        assert np.isfinite(soft).all() and soft[1] == 0


def test_steps_are_read_at_their_last_token():
    steps = np.array([[-1, 0, 0, 1, 1, 2], [0, 1, 1, 1, 2, 2]])
    mask = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]], bool)
    marks = step_marks(steps, mask)
    assert marks.tolist() == [
        [False, False, True, False, True, True],
        [True, False, False, True, False, False],
    ]
    last = step_marks(steps, mask, last_only=True)
    assert last.sum(-1).tolist() == [1, 1] and last[0, 5] and last[1, 3]
    logits = np.where(marks, np.asarray(np.random.default_rng(0).normal(size=(2, 6))), np.nan)
    labels = np.array([[0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0]])
    loss, slope = value_and_grad(lambda z: process_reward(z, labels, marks).sum())(logits)
    p = 1 / (1 + np.exp(-np.float64(np.where(marks, logits, 0.0))))
    expected = -np.where(labels, np.log(p), np.log(1 - p))
    close(loss, expected[np.asarray(marks)].sum(), rtol=1e-5)
    close(slope, np.where(marks, p - labels, 0.0), atol=1e-6)
    of_bools = process_reward(logits, labels == 1, marks)
    close(of_bools, process_reward(logits, labels, marks), rtol=1e-6)


def test_the_reward_is_that_of_the_last_token():
    values = np.array([[1.0, 2.0, np.nan], [4.0, np.nan, 6.0], [np.nan] * 3])
    mask = np.array([[1, 1, 0], [1, 0, 1], [0, 0, 0]], bool)
    rewards, slope = value_and_grad(lambda v: last_token_value(v, mask).sum())(values)
    assert last_token_value(values, mask).tolist() == [2.0, 6.0, 0.0] and rewards == 8
    assert slope.tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_pairs_that_are_not_there_do_not_reach_a_loss_of_ones_own():
    def exponential(chosen, rejected):
        return jnp.exp(rejected - chosen) - 0.01 * chosen

    def total(values):
        mask, signs = np.ones((2, 1), bool), np.array([1.0, -1.0])
        return paired_rewards(values[:, None], None, signs, mask, loss=exponential)[0, 0]

    rewards = np.array([60.0, -60.0])
    value, slope = value_and_grad(total)(rewards)
    close(value, exponential(*rewards), rtol=1e-6)
    close(slope, grad(lambda x: exponential(*x))(rewards), rtol=1e-6)


def test_a_step_beyond_the_labels_is_not_a_number_of_the_last_label():
    """NaN where such a step is read, as `turns_to_tokens` has it; nothing elsewhere."""
    mask = np.array([[True, True, True, True, False], [True, False, True, True, True]])
    ids = np.array([[0, 1, 2, 2, 7], [-1, 5, 1, 1, 3]])
    labels, where = np.array([[1.0, 0.0]] * 2), np.array([[True, True], [True, False]])
    loss = step_rewards(
        np.zeros((2, 5)), None, np.zeros(2), mask, turn_rewards=labels, turn_where=where,
        turn_ids=ids,
    )  # fmt: skip
    half, nan = np.log(2), np.nan
    want = [[half, half, 0, nan, 0], [0, 0, 0, 0, nan]]
    close(loss, want, rtol=1e-6)


def test_surrogates_of_a_head_read_the_ends_of_responses_and_steps():
    rng = np.random.default_rng(5)
    mask = np.arange(5) < np.array([[3], [5], [1], [0]])
    values = np.where(mask, rng.normal(size=(4, 5)), np.nan)
    order, last = np.array([1.0, 0.0, 0.5, 9.0]), values[[0, 1, 2], [2, 4, 0]]

    def of(function, **options):
        run = jax.jit(lambda x: function(x, None, order, jnp.asarray(mask), **options))
        loss = run(values)
        assert not np.asarray(loss)[~mask].any() and len(set(np.asarray(loss)[mask])) == 1
        grads = grad(lambda x: run(x).sum())(values)
        assert np.isfinite(grads).all() and set(np.argwhere(np.asarray(grads))[:, 0]) <= {0, 1, 2}
        return float(loss[0, 0])

    # The best against the worst; the empty response is no member, whatever its advantage is.
    want = np.log1p(np.exp(last[1] - last[0]))
    assert of(paired_rewards) == pytest.approx(want, rel=1e-5)
    pairs = [(0, 1), (0, 2), (2, 1)]
    want = sum(np.log1p(np.exp(last[b] - last[a])) for a, b in pairs)
    assert of(listed_rewards, rewards=order) == pytest.approx(want, rel=1e-5)
    ids = np.broadcast_to(np.array([0, 0, 1, 1, 2]), mask.shape)
    ends = step_values(values, ids, np.asarray(mask), steps=2)
    at = np.array([[1, 2], [1, 3], [0, 0], [0, 0]])
    want = np.take_along_axis(values, at, axis=-1) * np.array([[1, 1], [1, 1], [1, 0], [0, 0]])
    close(ends, np.nan_to_num(want), rtol=1e-6)
    labels, where = np.ones((4, 3)), np.arange(3) < np.full((4, 1), 2)
    loss = step_rewards(
        values, None, order, np.asarray(mask), turn_rewards=labels, turn_where=where, turn_ids=ids
    )
    marked = np.zeros(mask.shape, bool)
    marked[[0, 0, 1, 1, 2], [1, 2, 1, 3, 0]] = True
    want = np.where(marked, np.log1p(np.exp(-np.nan_to_num(values))), 0.0)
    close(loss, want, rtol=1e-5)
