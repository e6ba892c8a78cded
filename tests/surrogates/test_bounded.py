"""GBPO and BPO: a ratio is drawn to a bound, and not only held below it.

- GBPO: |A| |r - target|, the target 1 + eps where the median advantage is positive, 1 - eps where
  it is negative, and 1 between: r = 1, A = 2, eps = 0.2 and a positive median give 0.4 with the
  gradient -2. On the target it rests.
- The median advantage of rewards (1, 1, 1, 0, 0) is (0, 0, 0, -2.04124, -2.04124).
- BPO's center lies between the median (temperature to 0) and the mean (to infinity): of
  (0, 0.1, 0.9, 1.2, 3) it is 0.9 at 0.01 and 0.9638 at 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
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
    close(at(ratio, advantage, median), expected, atol=1e-6)


def test_the_target_and_its_bounds():
    # On the target it rests.
    # Ratio 1 and eps 0: float32 meets the target exactly.
    assert at(1.0, 2.0, 1.0, eps_high=0.0) == (0.0, 0.0)
    assert at(1.0, 2.0, 0.0) == (0.0, 0.0)
    close(at(1.2, 2.0, 1.0)[0], 0.0, atol=1e-6)

    # Bounds of their own.
    close(at(1.0, 2.0, 1.0, eps_high=0.5)[0], 1.0, rtol=1e-6)
    close(at(1.0, -2.0, -1.0, eps_low=0.1)[0], 0.2, rtol=1e-5)


RNG = np.random.default_rng(0)
LOGP = RNG.normal(-1, 0.5, (4, 6)).astype(np.float32)
TOKENS = RNG.normal(size=(4, 6)).astype(np.float32)
MASK = RNG.random((4, 6)) < 0.8


def gradient(advantages, median, old=None):
    loss = lambda x: gbpo(x, old, advantages, MASK, median_advantages=median).sum()  # noqa: E731
    return jax.grad(loss)(LOGP)


def test_gbpo_gradients():
    # Where mean and median agree it starts as the policy gradient.
    plain = jax.grad(lambda x: reinforce(x, None, TOKENS, MASK).sum())(LOGP)
    equal(gradient(TOKENS, 3 * TOKENS), plain)
    equal(gradient(TOKENS, -TOKENS), -plain)

    # The medians may be one a sequence.
    median = RNG.normal(size=4).astype(np.float32)
    spread = np.broadcast_to(median[:, None], (4, 6))
    old = LOGP + RNG.normal(0, 0.3, (4, 6)).astype(np.float32)
    equal(gradient(TOKENS, median, old), gradient(TOKENS, spread, old))

    # Masked medians are not read and medians are constants.
    dirty = np.where(MASK, TOKENS, np.nan).astype(np.float32)
    equal(gradient(TOKENS, dirty), gradient(TOKENS, TOKENS))
    moved = jax.grad(lambda m: gbpo(LOGP, None, TOKENS, MASK, median_advantages=m).sum())
    assert not np.any(moved(jnp.asarray(TOKENS)))


def test_median_advantage():
    # Worked median advantage.
    got = median_advantage(jnp.array([1.0, 1.0, 1.0, 0.0, 0.0]))
    close(got, [0, 0, 0, -2.04124, -2.04124], atol=1e-5)

    # Equal rewards have exactly no direction and a finite gradient.
    rewards = jnp.full((2, 3), 0.1)
    value, pullback = jax.vjp(median_advantage, rewards)
    assert not value.any()
    assert np.isfinite(pullback(jnp.ones((2, 3)))[0]).all()

    # Rewards whose deviation underflows have a direction.
    assert median_advantage(jnp.array([1e-25, 0.0, 0.0])).tolist() == [np.float32(1e-25), 0.0, 0.0]
    assert np.isnan(median_advantage(jnp.array([jnp.nan, 0.0, 0.0]))).all()


@quick
@given(arrays(np.float32, (2, 5), elements=st.floats(-3, 3, width=16)), arrays(np.bool_, (2, 5)))
def test_median_advantage_row_by_row(rewards, where):
    got = np.asarray(jax.jit(median_advantage)(np.where(where, rewards, np.nan), where=where))
    for row, keep, out in zip(rewards.astype(np.float64), where, got, strict=True):
        kept = row[keep]
        expected = np.zeros(5)
        if kept.size and kept.max() > kept.min():
            expected[keep] = (kept - np.median(kept)) / kept.std()
        close(out, expected, rtol=1e-4, atol=1e-4)


@for_each(("temperature", "center"), [(0.01, 0.9), (1.0, 0.9638)])
def test_worked_centers(temperature, center):
    got = bpo_center(VALUES, temperature=temperature)
    close(got, [center], atol=1e-4)
    targets = bpo_soft_target(VALUES, got, temperature=temperature)
    close(targets.mean(), 1.0, atol=1e-5)
    slope = jax.grad(lambda mu: bpo_mu_loss(VALUES, mu, temperature=temperature))(got)
    close(slope, [0.0], atol=1e-5)


def test_centers():
    # The center goes from the median to the mean.
    close(bpo_center(VALUES, temperature=1e-4), [0.9], atol=1e-5)
    close(bpo_center(VALUES, temperature=1e3), [VALUES.mean()], atol=1e-3)
    two = bpo_center(jnp.array([0.0, 1.0]), temperature=1e-3)
    close(two, [0.5], atol=1e-6)

    # Centers of ragged groups.
    values = jnp.stack([VALUES, jnp.full(5, 0.3), jnp.full(5, jnp.nan), VALUES])
    where = jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0] * 5, [0, 1, 1, 0, 1]], bool)
    got = bpo_center(values, where=where, temperature=0.1)
    assert got.shape == (4, 1)
    close(got[0], bpo_center(VALUES, temperature=0.1), rtol=1e-6)
    close(got[1:3], [[0.3], [0.0]], rtol=1e-6)
    alone = bpo_center(jnp.array([0.1, 0.9, 3.0]), temperature=0.1)
    close(got[3], alone, rtol=1e-5)
    assert bpo_mu_loss(values, got, where=where)[2] == 0


def test_soft_targets_and_their_loss():
    # Soft targets harden as the temperature falls.
    targets = bpo_soft_target(VALUES, 0.9, eps=0.2, temperature=1e-5)
    close(targets, [0.8, 0.8, 1.0, 1.2, 1.2], rtol=1e-6)
    x = (np.asarray(VALUES, np.float64) - 0.5) / 0.7
    logistic = 1 + 0.2 * (2 / (1 + np.exp(-x)) - 1)
    got = bpo_soft_target(VALUES, 0.5, eps=0.2, temperature=0.7)
    close(got, logistic, rtol=1e-6)

    # Mu loss equals float64 also far away.
    for temperature in (1e-3, 0.5):
        x = (np.asarray(VALUES, np.float64) - 0.4) / temperature
        expected = temperature * np.mean(np.logaddexp(0, x) - x / 2)
        got = bpo_mu_loss(VALUES, jnp.array([0.4]), temperature=temperature)
        close(got, expected, rtol=1e-5)
        slope = jax.grad(lambda mu, t=temperature: bpo_mu_loss(VALUES, mu, temperature=t))
        close(slope(jnp.array([0.4])), [-np.tanh(x / 2).mean() / 2], rtol=1e-4, atol=1e-6)
