"""Group statistics over the last axis."""

import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize("value", [0.1, 1.1, -3.3])
def test_constant_is_decided_by_the_values_and_not_by_the_deviation(value):
    x = jnp.full((1, 12), value)
    assert stats.group_is_constant(x).tolist() == [[True]]
    assert stats.group_is_constant(x.at[0, 3].add(1e-6)).tolist() == [[False]]


def test_check_group():
    stats.check_group("f", X, WHERE)
    stats.check_group("f", X, None)
    with pytest.raises(ValueError, match="f: rewards must have at least 1 axis"):
        stats.check_group("f", jnp.float32(1.0), None)
    with pytest.raises(TypeError, match="f: rewards must be floating point"):
        stats.check_group("f", WHERE, None)
    with pytest.raises(ValueError, match=r"f: .*rewards \(3, 4\), where \(3, 1\)"):
        stats.check_group("f", X, WHERE[:, :1])
