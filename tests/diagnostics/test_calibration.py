"""Calibration of preferences: worked numbers, float64, masks, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal

from jaxrl_llm.diagnostics import pair_calibration


def test_it_equals_float64_bin_by_bin():
    rng = np.random.default_rng(0)
    chosen, rejected = rng.normal(size=(2, 3, 200)).astype(np.float32)
    chosen[0, :5] = rejected[0, :5]
    seen = jax.jit(lambda w, l: pair_calibration(w, l, bins=4))(chosen, rejected)  # noqa: E741
    gap = np.float64(chosen) - np.float64(rejected)
    p = 1 / (1 + np.exp(-np.abs(gap)))
    hit = np.where(gap == 0, 0.5, gap > 0)
    error = 0.0
    for b in range(4):
        inside = (p >= 0.5 + b / 8) & (p < 0.5 + (b + 1) / 8)
        assert seen.pairs[b] == inside.sum()
        close(seen.confidence[b], p[inside].mean(), rtol=1e-5)
        close(seen.accuracy[b], hit[inside].mean(), rtol=1e-5)
        error += inside.mean() * abs(hit[inside].mean() - p[inside].mean())
    close(seen.error, error, rtol=1e-4)
    close(seen.brier, np.mean((hit - p) ** 2), rtol=1e-5)


def test_a_model_whose_labels_are_drawn_from_it_is_calibrated_and_a_louder_one_is_not():
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 20000))
    wins = rng.random(20000) < 1 / (1 + np.exp(second - first))
    chosen, rejected = np.where(wins, first, second), np.where(wins, second, first)
    rewards = [np.asarray(x, jnp.float32) for x in (chosen, rejected)]
    assert pair_calibration(*rewards).error < 0.01
    assert pair_calibration(*(5 * x for x in rewards)).error > 0.1


def test_what_is_masked_is_not_read_and_nothing_is_0():
    where = np.array([True, False, True])
    dirty = np.where(where, np.array([1.0, 0.0, -40.0]), np.nan)
    seen = pair_calibration(dirty, np.zeros(3), where=where)
    clean = pair_calibration(dirty[np.array([0, 2])], np.zeros(2))
    jax.tree.map(equal, seen, clean)
    assert seen.pairs[-1] == 1 and seen.accuracy[-1] == 0  # sure, and wrong
    empty = pair_calibration(dirty, np.zeros(3), where=np.zeros(3, bool))
    assert all(not x.any() for x in empty)
