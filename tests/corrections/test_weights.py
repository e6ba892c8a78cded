"""Importance weights against the worked numbers and a float64 reference."""

import jax
import numpy as np
from cheap import close
from rows import for_each

from jaxrl_llm.corrections import importance_weights, masked_importance_weights

G = np.array([0.1, -0.3, 0.9, 0.0], np.float32)
LEVELS = ["token", "sequence", "geometric"]


def reference(old, behavior, mask, level, cut, normalize):
    """Row by row in float64; ``cut`` maps a ratio to its weight."""
    d = np.asarray(old, np.float64) - np.asarray(behavior, np.float64)
    shape, out, units = d.shape, np.zeros(d.shape), []
    rows = zip(
        d.reshape(-1, shape[-1]),
        mask.reshape(-1, shape[-1]),
        out.reshape(-1, shape[-1]),
        strict=True,
    )
    for row, keep, result in rows:
        if not keep.any():
            continue
        kept = row[keep]
        if level == "token":
            exponents = kept
        else:
            one = kept.sum() if level == "sequence" else kept.mean()
            exponents = np.array([one])
        weights = np.array([cut(np.exp(np.clip(x, -20, 20))) for x in exponents])
        result[keep] = weights
        units.extend(weights)
    return out / np.mean(units) if normalize and np.mean(units) > 1e-8 else out


def batch(seed, scale):
    rng = np.random.default_rng(seed)
    old = rng.normal(-2, 1, (2, 3, 5)).astype(np.float32)
    behavior = (old + rng.normal(0, scale, old.shape)).astype(np.float32)
    mask = rng.random(old.shape) < 0.7
    mask[0, 1] = False
    mask[1, 2] = np.arange(5) == 3
    return old, behavior, mask


@for_each(
    ("options", "expected"),
    [
        ({}, [1.105171, 0.740818, 2.0, 1.0]),
        ({"normalize": True}, [0.912236, 0.611490, 1.650850, 0.825425]),
        ({"level": "sequence", "cap": None}, [2.013753] * 4),
        ({"level": "sequence"}, [2.0] * 4),
        ({"level": "geometric"}, [1.191246] * 4),
        ({"cap": None}, [1.105171, 0.740818, 2.459603, 1.0]),
        ({"cap": 1.5, "floor": 0.9}, [1.105171, 0.9, 1.5, 1.0]),
        ({"level": "sequence", "cap": 1.5, "floor": 1.0}, [1.5] * 4),
        ({"cap": 0.8, "floor": 0.75}, [0.8, 0.75, 0.8, 0.8]),
    ],
)
def test_worked_numbers(options, expected):
    weights = importance_weights(np.asarray(G), np.zeros(4), np.ones(4, bool), **options)
    close(weights, expected, atol=1e-6)


def test_worked_numbers_of_the_mask_form():
    weights = masked_importance_weights(np.asarray(G), np.zeros(4), np.ones(4, bool))
    close(weights, [1.105171, 0.740818, 0.0, 1.0], atol=1e-6)


@for_each("level", LEVELS)
@for_each("normalize", [False, True])
@for_each("scale", [0.3, 2.0, 30.0])
def test_equals_the_float64_reference(level, normalize, scale):
    old, behavior, mask = batch(int(scale), scale)
    options = {"level": level, "normalize": normalize}
    for cap, cut in ((1.5, lambda w: min(w, 1.5)), (None, lambda w: w)):
        ours = importance_weights(old, behavior, mask, cap=cap, **options)
        theirs = reference(old, behavior, mask, level, cut, normalize)
        close(ours, theirs, rtol=2e-5, atol=1e-12)
    ours = masked_importance_weights(old, behavior, mask, lower=0.7, upper=3.0, **options)
    cut = lambda w: w if 0.7 <= w <= 3.0 else 0.0  # noqa: E731
    theirs = reference(old, behavior, mask, level, cut, normalize)
    close(ours, theirs, rtol=2e-5, atol=1e-12)


def test_a_sum_is_clamped_as_a_whole_and_not_token_by_token():
    d, mask = np.array([30.0, -29.0]), np.ones(2, bool)
    weights = importance_weights(d, np.zeros(2), mask, level="sequence", cap=None)
    close(weights, np.exp([1.0, 1.0]), rtol=1e-6)
    far = importance_weights(d, np.zeros(2), mask, cap=None)
    close(far, np.exp([20.0, -20.0]), rtol=1e-6)


def test_a_batch_of_which_nothing_is_left_is_not_divided():
    mask = np.ones((1, 2), bool)
    weights = masked_importance_weights(
        np.full((1, 2), 9.0), np.zeros((1, 2)), mask, normalize=True
    )
    assert not weights.any()


def test_a_traced_cap_works():
    cap = jax.jit(lambda cap: importance_weights(G, np.zeros(4), np.ones(4, bool), cap=cap))
    close(cap(2.0)[2], 2.0)
