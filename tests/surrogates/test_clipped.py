"""Clips and gates of a token's ratio r: PPO, DAPO, DCPO and SAPO.

- PPO: max(-A r, -A clip(r, 0.8, 1.2)). r = 1.5 and A = 1 give -1.2 without a gradient; A = -1
  gives 1.5. A dual clip bounds what a bad token costs: r = 4, A = -1 and a bound of 3 give 3.
- DAPO: an upper bound of 1.28 and a dual clip of 10.
- DCPO: bounds that are wider for rarer tokens. Of an old probability q = 0.9 they are
  (0.76874, 1.18718), of q = 0.01 (0.5, 5).
- SAPO: a gate 4 / tau sigmoid(tau (r - 1)) in place of a clip, with value 2 and slope 1 at r = 1.

Inside a clip the gradient is exactly zero. All are compared with float64 in `test_surrogates.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal
from rows import for_each

from jaxrl_llm.surrogates import dapo_clip, dcpo_bounds, dcpo_dynamic_clip, ppo_clip, sapo

ONE = jnp.ones(1, bool)


def at(surrogate, ratio, advantage, **options):
    """Loss and d/dlogp of one token."""

    def loss(logp):
        old = jnp.full(1, -2.0)
        return surrogate(logp, old, jnp.array([advantage]), ONE, **options)[0]

    value, gradient = jax.value_and_grad(loss)(-2.0 + jnp.log(jnp.array([ratio])))
    return float(value), float(gradient[0])


@for_each(
    ("ratio", "advantage", "expected"),
    [
        (1.5, 1.0, (-1.2, 0.0)),
        (0.5, 1.0, (-0.5, -0.5)),
        (1.5, -1.0, (1.5, 1.5)),
        (0.5, -1.0, (0.8, 0.0)),
        (4.0, -1.0, (4.0, 4.0)),
    ],
)
def test_ppo_worked_numbers(ratio, advantage, expected):
    got = at(ppo_clip, ratio, advantage)
    close(got, expected, rtol=1e-6)
    assert (got[1] == 0) == (expected[1] == 0)  # inside the clip the gradient is exactly zero
    if advantage > 0 or ratio < 3:  # a dual clip of 3 changes none of these
        assert at(ppo_clip, ratio, advantage, dual_clip=3.0) == got


def test_dual_clip():
    # Dual clip worked number.
    assert at(ppo_clip, 4.0, -1.0, dual_clip=3.0) == (3.0, 0.0)

    # Dual clip spares positive advantages.
    got = at(ppo_clip, 8.0, 1.0, eps_high=np.inf, dual_clip=3.0)
    close(got, (-8.0, -8.0), rtol=1e-6)

    # Epsilon zero keeps the gradient of an unchanged policy.
    assert at(ppo_clip, 1.0, 2.0, eps_low=0.0, eps_high=0.0) == (-2.0, -2.0)
    assert at(ppo_clip, 1.0, -2.0, eps_low=0.0, eps_high=0.0) == (2.0, 2.0)


@for_each(("distance", "sign"), [(30.0, 1), (1e4, 1), (-30.0, -1)])
def test_log_ratio_is_clamped(distance, sign):
    old = jnp.zeros(1)
    loss = lambda x: ppo_clip(x, old, -jnp.ones(1), ONE, eps_low=np.inf)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(jnp.array([distance]))
    close(value, np.exp(sign * 20.0), rtol=1e-5)
    assert gradient[0] == 0


def test_dapo():
    # Dapo worked numbers.
    close(at(dapo_clip, 1.25, 1.0), (-1.25, -1.25), rtol=1e-6)
    close(at(dapo_clip, 1.3, 1.0), (-1.28, 0.0), rtol=1e-6)
    close(at(ppo_clip, 1.25, 1.0), (-1.2, 0.0), rtol=1e-6)
    close(at(dapo_clip, 12.0, -1.0), (10.0, 0.0), rtol=1e-6)


# DCPO: bounds that depend on the probability.

bounds = jax.jit(dcpo_bounds)


@for_each(
    ("probability", "low", "high"),
    [
        (0.9, 0.76874, 1.18718),
        (0.5, 0.5, 1.30623),
        (0.1, 0.5, 2.0),
        (0.01, 0.5, 5.0),
        (0.001, 0.5, 10.0),
    ],
)
def test_worked_bounds(probability, low, high):
    got = bounds(jnp.log(jnp.array([probability])))
    # Where 4 eps_low / q is near 1 the root magnifies the rounding of the logarithm.
    close(np.ravel(got), [low, high], atol=1e-5)


def test_dcpo_bounds():
    # Epsilon zero is a band of no width.
    low, high = bounds(jnp.array([-0.1, -5.0, -500.0]), eps_low=0.0, eps_high=0.0)
    equal(low, 1.0)
    equal(high, 1.0)

    # Bounds of masked tokens are those of certainty.
    low, high = bounds(jnp.array([-2.0, jnp.nan]), jnp.array([True, False]))
    sure = bounds(jnp.zeros(1))
    assert low[1] == sure[0][0]
    assert high[1] == sure[1][0]

    # Without a greatest bound they grow.
    _, high = dcpo_bounds(jnp.log(jnp.array([1e-4])), r_max=np.inf)
    close(high, 0.5 + 0.5 * np.sqrt(1 + 0.8 / 1e-4), rtol=1e-5)

    # The bounds are constants.
    old = jnp.log(jnp.array([0.3]))
    gradient = jax.grad(lambda old: sum(x[0] for x in dcpo_bounds(old)))(old)
    assert not np.any(gradient)

    # The dual clip is an option.
    close(dcpo_at(12.0, -1.0, 0.05, dual_clip=None), (12.0, 12.0), rtol=1e-5)


def dcpo_at(ratio, advantage, probability, **options):
    """Loss and d/dlogp of one token."""
    old = jnp.log(jnp.array([probability]))
    loss = lambda x: dcpo_dynamic_clip(x, old, jnp.array([advantage]), ONE, **options)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(old + jnp.log(ratio))
    return float(value), float(gradient[0])


@for_each(
    ("ratio", "advantage", "probability", "expected"),
    [
        (4.0, 1.0, 0.9, (-1.18718, 0.0)),
        (4.0, 1.0, 0.01, (-4.0, -4.0)),
        (6.0, 1.0, 0.01, (-5.0, 0.0)),
        (0.6, -1.0, 0.9, (0.76874, 0.0)),
        (0.6, -1.0, 0.1, (0.6, 0.6)),
        (0.4, -1.0, 0.1, (0.5, 0.0)),
        (0.4, 1.0, 0.1, (-0.4, -0.4)),
        (8.0, -1.0, 0.1, (8.0, 8.0)),
        (12.0, -1.0, 0.05, (10.0, 0.0)),
    ],
)
def test_clip_by_probability(ratio, advantage, probability, expected):
    got = dcpo_at(ratio, advantage, probability)
    close(got, expected, atol=2e-5, rtol=1e-5)
    assert (got[1] == 0) == (expected[1] == 0)


# SAPO: a gate in place of a clip.


def gate(ratio, advantage=1.0, **options):
    """f and df/dlogp: the loss is -A f."""
    mask = jnp.ones(1, bool)
    loss = lambda x: sapo(x, jnp.zeros(1), jnp.array([advantage]), mask, **options)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(jnp.log(jnp.array([ratio])))
    return float(value) / -advantage, float(gradient[0]) / -advantage


@for_each(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 1.0, (2.0, 1.0)),
        (1.5, 1.0, (2.48984, 1.41002)),
        (3.0, 1.0, (3.52319, 1.25992)),
        (0.5, -1.0, (1.41594, 0.46707)),  # tau_neg 1.05
        (1.5, -1.0, (2.39359, 1.40121)),
    ],
)
def test_worked_numbers(ratio, advantage, expected):
    close(gate(ratio, advantage), expected, atol=6e-6)


def test_sapo():
    # A huge ratio has no gradient left.
    for advantage in (1.0, -1.0):
        assert gate(1e3, advantage)[1] == 0.0
        assert np.isfinite(gate(1e30, advantage)).all()

    # Each tau serves its sign.
    assert gate(1.5, 1.0, tau_neg=9.0) == gate(1.5, 1.0)
    assert gate(1.5, -1.0, tau_pos=9.0) == gate(1.5, -1.0)
    assert gate(1.5, 1.0, tau_pos=9.0) != gate(1.5, 1.0)
    assert gate(1.5, -1.0, tau_neg=9.0) != gate(1.5, -1.0)

    # The statements of the docstring.
    def slope(ratio, tau):
        logp, mask = jnp.log(jnp.array([ratio])), jnp.ones(1, bool)
        loss = lambda x: sapo(x, jnp.zeros(1), jnp.ones(1), mask, tau_pos=tau)[0]  # noqa: E731
        return -float(jax.grad(loss)(logp)[0])

    assert slope(1.0, 1.0) == pytest.approx(1.0)
    assert slope(1.5, 1.0) == pytest.approx(1.41, abs=0.005)
    assert slope(20.0, 1.0) < 1e-6
    assert slope(1e-4, 1.0) / 1e-4 == pytest.approx(1 / np.cosh(0.5) ** 2, rel=1e-3)
    assert slope(1.5, 1e-3) == pytest.approx(1.5, rel=1e-5)
