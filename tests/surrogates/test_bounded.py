import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rows import for_each

from jaxrl_llm.surrogates import (
    bpo_center,
    bpo_mu_loss,
    bpo_soft_target,
    gbpo,
    median_advantage,
    reinforce,
)

ONE = jnp.ones(1, bool)
VALUES = jnp.array([0.0, 0.1, 0.9, 1.2, 3.0])


def at(ratio, advantage, median, **options):
    """Loss and d/dlogp of one token."""
    options["median_advantages"] = jnp.array([median])

    def loss(logp):
        return gbpo(logp, jnp.zeros(1), jnp.array([advantage]), ONE, **options)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.log(jnp.array([ratio])))
    return float(value), float(gradient[0])


@for_each(
    ("ratio", "advantage", "median", "expected"),
    [
        (1.0, 2.0, 1.0, (0.4, -2.0)),
        (1.5, 2.0, 1.0, (0.6, 3.0)),
        (1.0, -1.0, -1.0, (0.2, 1.0)),
        (0.7, -1.0, -1.0, (0.1, -0.7)),
        (1.1, 0.5, -0.2, (0.15, 0.55)),
        (1.5, 1.0, 0.0, (0.5, 1.5)),
        (1.5, 0.0, 1.0, (0.0, 0.0)),
    ],
)
def test_worked_numbers(ratio, advantage, median, expected):
    np.testing.assert_allclose(at(ratio, advantage, median), expected, atol=1e-6)


def test_on_the_target_it_rests():
    # Ratio 1 and eps 0: float32 meets the target exactly.
    assert at(1.0, 2.0, 1.0, eps_high=0.0) == (0.0, 0.0)
    assert at(1.0, 2.0, 0.0) == (0.0, 0.0)
    np.testing.assert_allclose(at(1.2, 2.0, 1.0)[0], 0.0, atol=1e-6)


def test_bounds_of_their_own():
    np.testing.assert_allclose(at(1.0, 2.0, 1.0, eps_high=0.5)[0], 1.0, rtol=1e-6)
    np.testing.assert_allclose(at(1.0, -2.0, -1.0, eps_low=0.1)[0], 0.2, rtol=1e-5)


RNG = np.random.default_rng(0)
LOGP = RNG.normal(-1, 0.5, (4, 6)).astype(np.float32)
TOKENS = RNG.normal(size=(4, 6)).astype(np.float32)
MASK = RNG.random((4, 6)) < 0.8


def gradient(advantages, median, old=None):
    loss = lambda x: gbpo(x, old, advantages, MASK, median_advantages=median).sum()  # noqa: E731
    return jax.grad(loss)(LOGP)


def test_where_mean_and_median_agree_it_starts_as_the_policy_gradient():
    plain = jax.grad(lambda x: reinforce(x, None, TOKENS, MASK).sum())(LOGP)
    np.testing.assert_array_equal(gradient(TOKENS, 3 * TOKENS), plain)
    np.testing.assert_array_equal(gradient(TOKENS, -TOKENS), -plain)


def test_the_medians_may_be_one_a_sequence():
    median = RNG.normal(size=4).astype(np.float32)
    spread = np.broadcast_to(median[:, None], (4, 6))
    old = LOGP + RNG.normal(0, 0.3, (4, 6)).astype(np.float32)
    np.testing.assert_array_equal(gradient(TOKENS, median, old), gradient(TOKENS, spread, old))


def test_masked_medians_are_not_read_and_medians_are_constants():
    dirty = np.where(MASK, TOKENS, np.nan).astype(np.float32)
    np.testing.assert_array_equal(gradient(TOKENS, dirty), gradient(TOKENS, TOKENS))
    moved = jax.grad(lambda m: gbpo(LOGP, None, TOKENS, MASK, median_advantages=m).sum())
    assert not np.any(moved(jnp.asarray(TOKENS)))


def test_worked_median_advantage():
    got = median_advantage(jnp.array([1.0, 1.0, 1.0, 0.0, 0.0]))
    np.testing.assert_allclose(got, [0, 0, 0, -2.04124, -2.04124], atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    arrays(np.float32, (2, 5), elements=st.floats(-3, 3, width=16)),
    arrays(np.bool_, (2, 5)),
)
def test_median_advantage_row_by_row(rewards, where):
    got = np.asarray(jax.jit(median_advantage)(np.where(where, rewards, np.nan), where=where))
    for row, keep, out in zip(rewards.astype(np.float64), where, got, strict=True):
        kept = row[keep]
        expected = np.zeros(5)
        if kept.size and kept.max() > kept.min():
            expected[keep] = (kept - np.median(kept)) / kept.std()
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_equal_rewards_have_exactly_no_direction_and_a_finite_gradient():
    rewards = jnp.full((2, 3), 0.1)
    value, pullback = jax.vjp(median_advantage, rewards)
    assert not value.any()
    assert np.isfinite(pullback(jnp.ones((2, 3)))[0]).all()


def test_rewards_whose_deviation_underflows_have_a_direction():
    assert median_advantage(jnp.array([1e-25, 0.0, 0.0])).tolist() == [np.float32(1e-25), 0.0, 0.0]
    assert np.isnan(median_advantage(jnp.array([jnp.nan, 0.0, 0.0]))).all()


@for_each(("temperature", "center"), [(0.01, 0.9), (1.0, 0.9638)])
def test_worked_centers(temperature, center):
    got = bpo_center(VALUES, temperature=temperature)
    np.testing.assert_allclose(got, [center], atol=1e-4)
    targets = bpo_soft_target(VALUES, got, temperature=temperature)
    np.testing.assert_allclose(targets.mean(), 1.0, atol=1e-5)
    slope = jax.grad(lambda mu: bpo_mu_loss(VALUES, mu, temperature=temperature))(got)
    np.testing.assert_allclose(slope, [0.0], atol=1e-5)


def test_the_center_goes_from_the_median_to_the_mean():
    np.testing.assert_allclose(bpo_center(VALUES, temperature=1e-4), [0.9], atol=1e-5)
    np.testing.assert_allclose(bpo_center(VALUES, temperature=1e3), [VALUES.mean()], atol=1e-3)
    two = bpo_center(jnp.array([0.0, 1.0]), temperature=1e-3)
    np.testing.assert_allclose(two, [0.5], atol=1e-6)


def test_centers_of_ragged_groups():
    values = jnp.stack([VALUES, jnp.full(5, 0.3), jnp.full(5, jnp.nan), VALUES])
    where = jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0] * 5, [0, 1, 1, 0, 1]], bool)
    got = bpo_center(values, where=where, temperature=0.1)
    assert got.shape == (4, 1)
    np.testing.assert_allclose(got[0], bpo_center(VALUES, temperature=0.1), rtol=1e-6)
    np.testing.assert_allclose(got[1:3], [[0.3], [0.0]], rtol=1e-6)
    alone = bpo_center(jnp.array([0.1, 0.9, 3.0]), temperature=0.1)
    np.testing.assert_allclose(got[3], alone, rtol=1e-5)
    assert bpo_mu_loss(values, got, where=where)[2] == 0


def test_soft_targets_harden_as_the_temperature_falls():
    targets = bpo_soft_target(VALUES, 0.9, eps=0.2, temperature=1e-5)
    np.testing.assert_allclose(targets, [0.8, 0.8, 1.0, 1.2, 1.2], rtol=1e-6)
    x = (np.asarray(VALUES, np.float64) - 0.5) / 0.7
    logistic = 1 + 0.2 * (2 / (1 + np.exp(-x)) - 1)
    got = bpo_soft_target(VALUES, 0.5, eps=0.2, temperature=0.7)
    np.testing.assert_allclose(got, logistic, rtol=1e-6)


def test_mu_loss_equals_float64_also_far_away():
    for temperature in (1e-3, 0.5):
        x = (np.asarray(VALUES, np.float64) - 0.4) / temperature
        expected = temperature * np.mean(np.logaddexp(0, x) - x / 2)
        got = bpo_mu_loss(VALUES, jnp.array([0.4]), temperature=temperature)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        slope = jax.grad(lambda mu, t=temperature: bpo_mu_loss(VALUES, mu, temperature=t))
        np.testing.assert_allclose(
            slope(jnp.array([0.4])), [-np.tanh(x / 2).mean() / 2], rtol=1e-4, atol=1e-6
        )


@for_each(
    ("call", "error", "message"),
    [
        (lambda: at(1.0, 1.0, 1.0, eps_low=-0.1), ValueError, "gbpo: eps_low must not be negative"),
        (
            lambda: gradient(TOKENS, TOKENS[0]),
            ValueError,
            r"gbpo: median_advantages must have .*\(4, 6\).*got \(6,\)",
        ),
        (lambda: gradient(TOKENS, MASK), TypeError, "gbpo: median_advantages must be floating"),
        (
            lambda: median_advantage(jnp.zeros((2, 3)), where=jnp.ones((2, 4), bool)),
            ValueError,
            r"median_advantage: .*rewards \(2, 3\), where \(2, 4\)",
        ),
        (lambda: bpo_soft_target(VALUES, 0.0, eps=-1.0), ValueError, "bpo_soft_target: eps must"),
        (
            lambda: bpo_soft_target(VALUES, 0.0, temperature=0.0),
            ValueError,
            "bpo_soft_target: temperature must be above 0",
        ),
        (
            lambda: bpo_mu_loss(VALUES, jnp.zeros(5)),
            ValueError,
            r"bpo_mu_loss: center must have shape \(1,\); got \(5,\)",
        ),
        (lambda: bpo_center(jnp.zeros(3, int)), TypeError, "bpo_center: values must be floating"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()
