"""Group statistics over the last axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.core import stats

X = jnp.array([[1.0, 0.0, 0.0, 1.0], [2.0, 4.0, jnp.nan, 9.0], [3.0, jnp.nan, jnp.nan, jnp.nan]])
WHERE = jnp.array([[True] * 4, [True, True, False, True], [True, False, False, False]])


def test_statistics_of_ragged_groups():
    assert stats.group_count(X, WHERE).tolist() == [[4.0], [3.0], [1.0]]
    assert stats.group_count(X).tolist() == [[4.0]] * 3
    np.testing.assert_allclose(stats.group_mean(X, WHERE), [[0.5], [5.0], [3.0]], rtol=1e-6)
    for ddof in (0, 1):
        expected = [np.std([1, 0, 0, 1], ddof=ddof), np.std([2, 4, 9], ddof=ddof), 0.0]
        np.testing.assert_allclose(stats.group_std(X, WHERE, ddof=ddof)[:, 0], expected, rtol=1e-6)
    assert stats.group_is_constant(X, WHERE).tolist() == [[False], [False], [True]]


def test_an_empty_group():
    none = jnp.zeros((3, 4), bool)
    assert stats.group_mean(X, none).tolist() == [[0.0]] * 3
    assert stats.group_std(X, none).tolist() == [[0.0]] * 3
    assert stats.group_is_constant(X, none).all()


@for_each("value", [0.1, 1.1, -3.3])
def test_constant_is_decided_by_the_values_and_not_by_the_deviation(value):
    x = jnp.full((1, 12), value)
    assert stats.group_is_constant(x).tolist() == [[True]]
    assert stats.group_is_constant(x.at[0, 3].add(1e-6)).tolist() == [[False]]


def test_check_group():
    stats.check_group("f", X, WHERE)
    stats.check_group("f", X, None)
    bad = [
        ((jnp.float32(1.0), None), ValueError, "f: rewards must have at least 1 axis"),
        ((WHERE, None), TypeError, "f: rewards must be floating point"),
        ((X, WHERE[:, :1]), ValueError, r"f: .*rewards \(3, 4\), where \(3, 1\)"),
    ]
    for arrays, error, message in bad:
        with pytest.raises(error, match=message):
            stats.check_group("f", *arrays)


def test_median_of_ragged_groups():
    assert stats.group_median(X, WHERE).tolist() == [[0.0], [4.0], [3.0]]
    assert stats.group_median(X, WHERE, "midpoint").tolist() == [[0.5], [4.0], [3.0]]
    assert stats.group_median(X[0]).tolist() == [0.0]
    for kind in ("lower", "midpoint"):
        assert stats.group_median(X, jnp.zeros((3, 4), bool), kind).tolist() == [[0.0]] * 3
        assert stats.group_median(jnp.zeros((2, 0)), kind=kind).tolist() == [[0.0]] * 2
    with pytest.raises(ValueError, match="group_median: kind must be one of .* got 'upper'"):
        stats.group_median(X, WHERE, "upper")


@for_each("kind", ["lower", "midpoint"])
def test_median_equals_float64_and_does_not_read_what_is_dropped(kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 5, 7)).astype(np.float32)
    where = rng.random(x.shape) < 0.7
    method = {"lower": "lower", "midpoint": "linear"}[kind]
    expected = np.zeros((6, 5, 1))
    for i in np.ndindex(6, 5):
        kept = x[i][where[i]]
        expected[i] = np.quantile(kept.astype(np.float64), 0.5, method=method) if len(kept) else 0
    median = jax.jit(stats.group_median, static_argnames="kind")
    for junk in (0.0, 1e4, -np.inf, np.inf, np.nan):
        np.testing.assert_allclose(
            median(np.where(where, x, np.float32(junk)), where, kind=kind), expected, rtol=1e-6
        )


@for_each("kind", ["lower", "midpoint"])
def test_the_gradient_of_the_median_goes_to_the_middle_entries_alone(kind):
    x = jnp.array([3.0, jnp.nan, 1.0, 2.0, 7.0, 9.0])
    where = jnp.array([True, False, True, True, True, False])
    gradient = jax.grad(lambda x: stats.group_median(x, where, kind).sum())(x)
    half = 0.5 * (kind == "midpoint")
    assert gradient.tolist() == [half, 0, 0, 1 - half, 0, 0]


def test_a_kept_nan_is_the_median():
    assert jnp.isnan(stats.group_median(jnp.array([0.0, jnp.nan, 1.0, 2.0, 3.0])))[0]


def test_ranks_go_by_position_where_entries_are_equal():
    x = jnp.array([[2.0, 1.0, 2.0, 1.0, jnp.nan], [0.0, jnp.inf, -1.0, jnp.inf, 0.0]])
    order, ranks = stats.order_and_ranks(x)
    assert order.tolist() == [[1, 3, 0, 2, 4], [2, 0, 4, 1, 3]]
    assert ranks.tolist() == [[2, 0, 3, 1, 4], [1, 3, 0, 4, 2]]
    many = jnp.asarray(np.random.default_rng(0).integers(0, 4, (3, 64)), jnp.float32)
    order, ranks = jax.jit(stats.order_and_ranks)(many)
    assert (np.take_along_axis(np.asarray(ranks), np.asarray(order), -1) == np.arange(64)).all()
    np.testing.assert_array_equal(order, np.argsort(many, axis=-1, kind="stable"))
