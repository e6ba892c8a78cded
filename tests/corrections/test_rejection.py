"""Rejection rules against worked numbers and references written row by row."""

import math

import jax.numpy as jnp
import numpy as np
from cheap import equal
from rows import for_each

from jaxrl_llm.corrections import m2_mask, off_policy_sequence_mask, rejection_mask, veto_mask

G = np.array([0.1, -0.3, 0.9, 0.0], np.float32)
ONES = np.ones(4, bool)


def reference(d, mask, statistic, level, lower, upper, invert=False):
    """Row by row in float64."""
    shape, out = d.shape, np.zeros(d.shape, bool)
    rows = zip(
        d.reshape(-1, shape[-1]),
        mask.reshape(-1, shape[-1]),
        out.reshape(-1, shape[-1]),
        strict=True,
    )
    for row, keep, result in rows:
        if not keep.any():
            continue
        g = np.clip(row[keep].astype(np.float64), -20, 20)
        values = {"k1": -g if invert else g, "k2": g**2 / 2, "k3": np.exp(g) - 1 - g}[statistic]
        if statistic == "k1":
            low, high = math.log(lower) if lower else -math.inf, math.log(upper)
        else:
            low, high = -math.inf, upper
        if level == "sequence_sum":
            values = values.sum()
        elif level == "sequence_mean":
            values = values.mean()
        inside = (values >= low) & (values <= high)
        result[keep] = inside.all() if level == "sequence_max" else inside
    return out


def batch(seed, scale):
    rng = np.random.default_rng(seed)
    d = rng.normal(0, scale, (2, 4, 5)).astype(np.float32)
    mask = rng.random(d.shape) < 0.7
    mask[0, 1] = False
    return d, mask


@for_each("level", ["token", "sequence_sum", "sequence_mean", "sequence_max"])
@for_each("scale", [0.3, 1.5, 25.0])
def test_equals_the_float64_reference(level, scale):
    d, mask = batch(int(10 * scale), scale)
    zeros = np.zeros_like(d)
    for lower, upper, invert in ((0.6, 3.0, False), (0.6, 3.0, True), (0.0, 1.5, False)):
        ours = rejection_mask(
            d, zeros, mask, statistic="k1", level=level, lower=lower, upper=upper, invert=invert
        )
        equal(ours, reference(d, mask, "k1", level, lower, upper, invert=invert))
    for statistic in ("k2", "k3"):
        for upper in (0.05, 0.4, 5.0):
            ours = rejection_mask(d, zeros, mask, statistic=statistic, level=level, upper=upper)
            equal(ours, reference(d, mask, statistic, level, 0.0, upper))


@for_each(
    ("statistic", "values"),
    [("k2", [0.005, 0.045, 0.405, 0.0]), ("k3", [0.005171, 0.040818, 0.559603, 0.0])],
)
def test_worked_numbers_lie_where_the_bound_flips(statistic, values):
    def kept(level, upper):
        arrays = (jnp.asarray(G), np.zeros(4), ONES)
        return rejection_mask(*arrays, statistic=statistic, level=level, upper=upper)

    for token, value in enumerate(values[:3]):
        assert kept("token", value + 2e-6)[token]
        assert not kept("token", value - 2e-6)[token]
    for level, value in (("sum", sum(values)), ("mean", np.mean(values)), ("max", max(values))):
        assert kept(f"sequence_{level}", value + 3e-6).all()
        assert not kept(f"sequence_{level}", value - 3e-6).any()


@for_each("bounds", [{"lower": 1.0, "upper": 2.0}, {"lower": 0.5, "upper": 1.0}])
def test_a_ratio_at_a_bound_is_kept(bounds):
    arrays = (np.zeros(4), np.zeros(4), ONES)
    assert rejection_mask(*arrays, statistic="k1", level="token", **bounds).all()


def test_k1_of_a_sequence_is_its_ratio_and_of_a_mean_its_geometric_mean():
    arrays = (np.asarray(G), np.zeros(4), ONES)
    for level, value in (("sequence_sum", 2.013753), ("sequence_mean", 1.191246)):
        options = {"statistic": "k1", "level": level, "lower": 0.0}
        assert rejection_mask(*arrays, upper=value + 1e-5, **options).all()
        assert not rejection_mask(*arrays, upper=value - 1e-5, **options).any()


def test_a_kept_nan_is_rejected():
    d = np.array([[np.nan, 0.0], [0.0, 0.0]])
    arrays = (d, np.zeros((2, 2)), np.ones((2, 2), bool))
    for statistic in ("k1", "k2", "k3"):
        tokens = rejection_mask(*arrays, statistic=statistic, level="token", upper=2.0)
        assert tokens.tolist() == [[False, True], [True, True]]
        for level in ("sequence_sum", "sequence_mean", "sequence_max"):
            whole = rejection_mask(*arrays, statistic=statistic, level=level, upper=2.0)
            assert whole.tolist() == [[False, False], [True, True]]
    assert veto_mask(*arrays).tolist() == [[False, False], [True, True]]


def test_veto_is_a_one_sided_bound_on_the_worst_token():
    d, mask = batch(2, 6.0)
    options = {"statistic": "k1", "level": "sequence_max", "lower": 1e-3, "upper": math.inf}
    ours = veto_mask(d, 0 * d, mask, threshold=1e-3)
    equal(ours, rejection_mask(d, 0 * d, mask, **options))
    assert 0 < int(ours.sum()) < mask.sum()


def test_veto_ignores_the_clamp():
    d, mask = np.array([[-25.0, 0.0]]), np.ones((1, 2), bool)
    assert not veto_mask(d, np.zeros((1, 2)), mask, threshold=1e-10).any()
    assert veto_mask(d, np.zeros((1, 2)), mask, threshold=1e-12).all()


def m2_reference(d, mask, threshold):
    """The farthest token goes, one at a time, until the rest is close enough."""
    kept = [tuple(i) for i in np.argwhere(mask)]
    kept.sort(key=lambda i: float(d[i]) ** 2)
    while len(kept) > 1 and np.mean([float(d[i]) ** 2 for i in kept]) >= threshold:
        kept.pop()
    out = np.zeros(mask.shape, bool)
    for i in kept:
        out[i] = True
    return out


@for_each("threshold", [1e-6, 0.04, 0.3, 100.0])
@for_each("seed", range(3))
def test_m2_equals_dropping_one_by_one(threshold, seed):
    d, mask = batch(seed, 0.8)
    ours = m2_mask(d, np.zeros_like(d), mask, threshold=threshold)
    equal(ours, m2_reference(d, mask, threshold))
    assert ours.any()


def test_m2_keeps_all_on_policy_and_nothing_of_nothing():
    mask = np.array([[True, True, False]])
    equal(m2_mask(np.zeros((1, 3)), np.zeros((1, 3)), mask), mask)
    assert not m2_mask(np.zeros((1, 3)), np.zeros((1, 3)), np.zeros((1, 3), bool)).any()
    assert m2_mask(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros((0, 3), bool)).shape == (0, 3)


def test_m2_the_threshold_is_strict_and_the_earlier_of_equals_stays():
    d, mask = np.array([[2.0, 1.0, 1.0]]), np.ones((1, 3), bool)
    assert m2_mask(d, np.zeros((1, 3)), mask, threshold=1.0).tolist() == [[False, True, False]]
    assert m2_mask(d, np.zeros((1, 3)), mask, threshold=1.01).tolist() == [[False, True, True]]


def test_off_policy_mask_drops_what_is_bad_and_far():
    old = np.full((4, 3), -2.0, np.float32)
    behavior = old + np.array([0.6, 0.6, 0.4, -5.0], np.float32)[:, None]
    advantages = np.array([-1.0, 1.0, -1.0, -1.0], np.float32)
    mask = np.ones((4, 3), bool)
    mask[0, 2] = False
    kept = off_policy_sequence_mask(advantages, mask, old_logp=old, behavior_logp=behavior)
    assert kept.any(-1).tolist() == [False, True, True, True]
    equal(kept[1:], mask[1:])


def test_off_policy_mask_of_token_advantages_drops_the_negative_tokens():
    old, behavior = np.full((1, 3), -2.0), np.full((1, 3), -1.0)
    # At the threshold itself they stay.
    tie = {"old_logp": old, "behavior_logp": behavior, "threshold": 1.0}
    assert off_policy_sequence_mask(np.array([-1.0]), np.ones((1, 3), bool), **tie).all()
    kept = off_policy_sequence_mask(
        np.array([[-1.0, 0.0, 1.0]]), np.ones((1, 3), bool), old_logp=old, behavior_logp=behavior
    )
    assert kept.tolist() == [[False, True, True]]


def test_off_policy_mask_equals_the_reference():
    rng = np.random.default_rng(3)
    d, mask = batch(3, 1.0)
    advantages = rng.normal(size=d.shape[:-1]).astype(np.float32)
    expected = mask.copy()
    for i in np.ndindex(advantages.shape):
        if mask[i].any() and advantages[i] < 0 and -d[i][mask[i]].mean() > 0.05:
            expected[i] = False
    options = {"old_logp": d, "behavior_logp": 0 * d, "threshold": 0.05}
    equal(off_policy_sequence_mask(advantages, mask, **options), expected)
    assert (expected != mask).any()
