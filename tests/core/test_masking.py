"""Masked arithmetic: float64 references, nothing kept, junk in masked cells."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.core import masking

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5)).astype(np.float32)
MASK = RNG.random((3, 5)) < 0.6
MASK[1] = False
AXES = for_each("axis", [None, 0, -1, (0, 1)])


def ma():
    return np.ma.array(X.astype(np.float64), mask=~MASK)


@AXES
@for_each("keepdims", [False, True])
def test_sum_mean_variance_equal_numpy(axis, keepdims):
    pairs = [
        (masking.masked_sum(X, MASK, axis, keepdims), ma().sum(axis, keepdims=keepdims)),
        (masking.masked_mean(X, MASK, axis, keepdims), ma().mean(axis, keepdims=keepdims)),
        (masking.masked_var(X, MASK, axis, keepdims), ma().var(axis, keepdims=keepdims)),
        (masking.masked_std(X, MASK, axis, keepdims), ma().std(axis, keepdims=keepdims)),
    ]
    for ours, theirs in pairs:
        assert ours.dtype == jnp.float32
        assert ours.shape == np.shape(theirs)
        np.testing.assert_allclose(ours, np.ma.filled(theirs, 0.0), rtol=1e-5, atol=1e-6)


@for_each("ddof", [0, 1, 2, 3])
def test_variance_is_zero_where_no_more_than_ddof_are_kept(ddof):
    x = jnp.array([1.0, 5.0, 2.0, 9.0])
    for kept in range(5):
        ours = masking.masked_var(x, jnp.arange(4) < kept, ddof=ddof)
        expected = np.var(np.asarray(x)[:kept], ddof=ddof) if kept > ddof else 0.0
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


@for_each("x", [[2.0, 2.0], [0.0, 0.0], [5.0, 7.0]])
def test_the_gradient_of_a_zero_deviation_is_zero(x):
    mask = jnp.array([True, x[0] == x[1]])
    gradient = jax.grad(lambda v: masking.masked_std(v, mask))(jnp.array(x))
    assert gradient.tolist() == [0.0, 0.0]


@for_each(
    "function",
    [
        masking.masked_sum,
        masking.masked_mean,
        masking.masked_var,
        masking.masked_std,
        lambda x, mask: masking.safe_log_ratio(x, 2 * x, mask).sum(),
        lambda x, mask: jnp.exp(masking.zero_masked(x, mask)).sum(),
    ],
)
def test_masked_cells_are_never_read_in_value_or_gradient(function):
    value_and_grad = jax.jit(jax.value_and_grad(function))
    clean_value, clean_gradient = value_and_grad(jnp.asarray(X), MASK)
    for junk in (1e4, np.nan, np.inf, -np.inf):
        value, gradient = value_and_grad(jnp.where(MASK, X, junk), MASK)
        assert value == clean_value
        np.testing.assert_array_equal(gradient, clean_gradient)
        assert not np.asarray(gradient)[~MASK].any()


def test_float32_whatever_comes_in():
    x = jnp.ones(300, jnp.bfloat16)
    assert float(masking.masked_sum(x, None)) == 300.0
    assert masking.zero_masked(x, None).dtype == jnp.float32
    assert masking.masked_mean(jnp.array([True, False]), None).dtype == jnp.float32
    difference = masking.safe_log_ratio(x, x)
    assert difference.dtype == jnp.float32


@for_each(
    ("x", "mask", "expected"),
    [
        ([0.1, 0.1, 0.1], None, True),
        ([0.1, 0.2, 0.1], None, False),
        ([0.1, 0.2, 0.1], [True, False, True], True),
        ([0.1, np.nan, 0.1], [True, False, True], True),
        ([0.1, np.nan, 0.1], None, False),
        ([0.1, 0.2, 0.3], [True, False, False], True),
        ([0.1, 0.2, 0.3], [False, False, False], True),
        ([-np.inf, -np.inf, -np.inf], None, True),
    ],
)
def test_is_constant(x, mask, expected):
    mask = None if mask is None else jnp.array(mask)
    assert bool(masking.is_constant(jnp.array(x), mask)) is expected


def test_lengths_and_last_token():
    mask = jnp.array([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    assert masking.lengths(mask).tolist() == [2.0, 2.0, 0.0, 4.0]
    last = masking.last_token(mask)
    assert last.dtype == jnp.bool_
    assert last.astype(int).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]


def test_safe_log_ratio_of_a_token_that_neither_policy_can_produce_is_zero():
    logp, other = jnp.array([-jnp.inf, -1.0, -jnp.inf]), jnp.array([-jnp.inf, -2.0, -3.0])
    np.testing.assert_array_equal(masking.safe_log_ratio(logp, other), [0.0, 1.0, -np.inf])
    ratio = lambda x: jnp.exp(masking.safe_log_ratio(x, other)).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(ratio)(logp), [0.0, np.e, 0.0], rtol=1e-6)


def test_safe_log_ratio_clamps():
    ours = masking.safe_log_ratio(jnp.array([50.0, -50.0, 1.0]), jnp.zeros(3), clamp=20.0)
    assert ours.tolist() == [20.0, -20.0, 1.0]


def test_spread():
    mask = jnp.ones((2, 3, 4), bool).at[0, 1, 2:].set(False)
    tokens, sequences = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((2, 3)).at[0, 1].set(jnp.nan)
    assert masking.spread("f", "advantages", tokens, mask).dtype == jnp.float32
    assert masking.spread("f", "advantages", tokens, mask).tolist() == mask.tolist()
    spread = masking.spread("f", "advantages", sequences.at[1, 1].set(2.0), mask)
    assert spread[1, 1].tolist() == [2.0] * 4
    assert jnp.isnan(spread[0, 1]).tolist() == [True, True, False, False]
    assert masking.spread("f", "weight", jnp.float32(1.0), mask[0, 0]).shape == (4,)
    # Equal in size is not enough: [3, 4] might be tokens of one prompt, or a mistake.
    for shape in [(3, 4), (2, 4), (2, 3, 1), (2, 1), ()]:
        with pytest.raises(ValueError, match=r"f: weight must have the shape of logp \(2, 3, 4\)"):
            masking.spread("f", "weight", jnp.ones(shape), mask)
    with pytest.raises(TypeError, match="f: advantages must be floating point"):
        masking.spread("f", "advantages", jnp.ones((2, 3), int), mask)


def test_distance_has_no_gradient_at_zero():
    x = jnp.array([-2.0, 0.0, 3.0])
    np.testing.assert_array_equal(masking.distance(x), jnp.abs(x))
    np.testing.assert_array_equal(jax.grad(lambda x: masking.distance(x).sum())(x), [-1, 0, 1])


@for_each("length", [5, 127, 128, 300])
def test_row_sum_of_short_and_long_rows(length):
    x = np.random.default_rng(length).normal(size=(8, 3, length)).astype(np.float32)
    want = x.astype(np.float64).sum(-1)
    for function in (masking.row_sum, jax.jit(masking.row_sum), jax.vmap(masking.row_sum)):
        np.testing.assert_allclose(function(jnp.asarray(x)), want, atol=1e-4)
    assert masking.row_sum(jnp.asarray(x), keepdims=True).shape == (8, 3, 1)
    grads = jax.grad(lambda x: jnp.sum(masking.row_sum(x) ** 2))(jnp.asarray(x))
    np.testing.assert_allclose(grads, np.broadcast_to(2 * want[..., None], x.shape), rtol=1e-3)
    kept = x > 0
    np.testing.assert_array_equal(masking.lengths(jnp.asarray(kept)), kept.sum(-1))


def test_row_sum_of_a_sharded_array():
    x = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("data",))
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    out = jax.jit(masking.row_sum)(spread)
    np.testing.assert_allclose(out, x.astype(np.float64).sum(-1), atol=1e-4)
    assert out.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("data")), 1)


def test_variance_in_two_passes_keeps_a_small_spread():
    x = 1e4 + jnp.array([0.0, 0.5, 1.0])
    np.testing.assert_allclose(masking.masked_var(x, None), np.var([0.0, 0.5, 1.0]), rtol=1e-4)
