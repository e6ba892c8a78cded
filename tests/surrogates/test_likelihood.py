"""Constant weights of the likelihood: -w A log pi, of which w has no gradient.

- REINFORCE has w = 1, CISPO w = clip(r), so that no token loses its gradient: r = 8, A = 1 and
  an upper bound of 5 give -5, where PPO gives 0.
- TOPR has w = 1 where A > 0, and min(1, r of the response) elsewhere.
- DISPO has bounds of its own for each sign of A.
- MinPRO multiplies r by the least ratio before it: ratios (0.5, 1.2, 2, 0.9, 1.1) have the weights
  (0.5, 0.6, 1, 0.45, 0.55).
- DPPO drops the tokens whose probability moved too far, and not those whose ratio did.

The values and gradients of these are compared with float64 in `test_surrogates.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.surrogates import (
    cispo,
    cispo_bounds,
    dispo,
    dppo_kl,
    dppo_tv,
    min_prefix_ratio,
    minpro,
    reinforce,
    topr,
)

TWO = jnp.ones(2, bool)


def test_reinforce():
    # Reinforce worked numbers.
    logp, advantages = jnp.array([-1.0, -2.0]), jnp.array([2.0, -1.0])
    loss = lambda x: reinforce(x, None, advantages, TWO)  # noqa: E731
    equal(loss(logp), [2.0, -2.0])
    equal(jax.grad(lambda x: loss(x).sum())(logp), [-2.0, 1.0])


def gradient_at(ratio, advantage, **options):
    old = jnp.full(1, -3.0)
    loss = lambda x: cispo(x, old, jnp.array([advantage]), jnp.ones(1, bool), **options)[0]  # noqa: E731
    return float(jax.grad(loss)(old + jnp.log(ratio))[0])


def test_topr():
    # Topr worked numbers.
    old_logp, logp = jnp.zeros((3, 2)), jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5], [4.0, 0.5]]))
    advantages, mask = jnp.array([1.0, -1.0, -1.0]), jnp.ones((3, 2), bool)

    def gradient(level):
        return jax.grad(lambda x: topr(x, old_logp, advantages, mask, level=level).sum())(logp)

    # Half as likely twice is a quarter as likely; twice as likely in sum counts no more than 1.
    close(gradient("sequence"), [[-1, -1], [0.25, 0.25], [1, 1]], rtol=1e-6)
    close(gradient("token"), [[-1, -1], [0.5, 0.5], [1, 0.5]], rtol=1e-6)

    # Topr forgets what has become impossible.
    logp, old, mask = jnp.full((1, 40), -9.0), jnp.zeros((1, 40)), jnp.ones((1, 40), bool)
    for advantage, expected in ((-1.0, 0.0), (1.0, -1.0)):
        loss = lambda x, a=advantage: topr(x, old, jnp.array([a]), mask).sum()  # noqa: E731
        equal(jax.grad(loss)(logp), np.full((1, 40), expected))


def test_cispo():
    # Cispo worked numbers.
    assert gradient_at(1.0, 1.5) == -1.5
    close(gradient_at(8.0, 1.0), -5.0, rtol=1e-6)  # PPO would give 0
    close(gradient_at(8.0, 1.0, w_max=10.0), -8.0, rtol=1e-6)
    close(gradient_at(0.1, 1.0), -0.1, rtol=1e-6)
    close(gradient_at(0.1, 1.0, w_min=0.8), -0.8, rtol=1e-6)

    # Cispo bounds.
    assert cispo_bounds(eps_low=0.25, eps_high=0.5) == {"w_min": 0.75, "w_max": 1.5}
    assert cispo_bounds(eps_low=10.0, eps_high=0.5)["w_min"] == 0.0
    bound = jr.bind(cispo, **cispo_bounds(eps_low=0.2, eps_high=0.25))
    old, mask = jnp.zeros(1), jnp.ones(1, bool)
    gradient = jax.grad(lambda x: bound(x, old, jnp.ones(1), mask)[0])
    close(gradient(jnp.log(jnp.array([8.0]))), [-1.25], rtol=1e-6)


# DISPO, MinPRO and DPPO: constant weights of the likelihood.

ALL = jnp.ones(3, bool)
RATIOS = np.array([0.5, 1.2, 2.0, 0.9, 1.1], np.float32)


def weights(surrogate, ratios, advantage=1.0, **options):
    """What each token's advantage is multiplied by in the gradient."""
    old, mask = jnp.full(len(ratios), -2.0), jnp.ones(len(ratios), bool)
    advantages = jnp.full(len(ratios), advantage)
    loss = lambda x: surrogate(x, old, advantages, mask, **options).sum()  # noqa: E731
    return -jax.grad(loss)(old + jnp.log(jnp.asarray(ratios, jnp.float32))) / advantage


@for_each(
    ("advantage", "ratio", "expected"),
    [(1.0, 1.5, 1.5), (1.0, 20.0, 11.0), (1.0, 0.5, 0.8), (-1.0, 200.0, 101.0), (-1.0, 0.01, 0.01)],
)
def test_dispo_worked_numbers(advantage, ratio, expected):
    close(weights(dispo, [ratio], advantage), [expected], rtol=1e-5)


@for_each("surrogate", [reinforce, cispo, dispo, minpro, dppo_tv, dppo_kl])
def test_an_impossible_token_of_advantage_zero_is_left_out_and_a_nan_shows(surrogate):
    loss = lambda x: surrogate(x, None, jnp.array([0.0, 1.0]), TWO)  # noqa: E731
    logp = jnp.array([-jnp.inf, -2.0])
    equal(loss(logp), [0.0, 2.0])
    equal(jax.grad(lambda x: loss(x).sum())(logp), [0.0, -1.0])
    assert np.isnan(loss(logp.at[0].set(jnp.nan))[0])


def test_minpro():
    # Minpro worked numbers.
    mask = jnp.ones(5, bool)
    prefix = min_prefix_ratio(jnp.log(RATIOS), jnp.zeros(5), mask)
    close(prefix, [1.0, 0.5, 0.5, 0.5, 0.5], rtol=1e-6)
    got = weights(minpro, RATIOS)
    close(got, [0.5, 0.6, 1.0, 0.45, 0.55], rtol=1e-6)
    clipped = weights(minpro, RATIOS, w_min=0.5, w_max=0.9)
    close(clipped, [0.5, 0.6, 0.9, 0.5, 0.55], rtol=1e-6)

    # The prefix may enlarge unless capped.
    ratios = [2.0, 1.5, 0.5, 3.0]
    prefix = [1.0, 2.0, 1.5, 0.5]
    logp, old, mask = jnp.log(jnp.array(ratios)), jnp.zeros(4), jnp.ones(4, bool)
    close(min_prefix_ratio(logp, old, mask), prefix, rtol=1e-6)
    capped = np.minimum(prefix, 1)
    close(min_prefix_ratio(logp, old, mask, cap_one=True), capped, rtol=1e-6)
    close(weights(minpro, ratios, cap_one=True, w_max=np.inf), capped * ratios, rtol=1e-6)

    # Far ratios stay finite.
    # Least prefix e^-25, next ratio e^25: the weight is 1, though each factor alone is clamped.
    logp, mask = jnp.array([-25.0, 25.0, 60.0]), jnp.ones(3, bool)
    close(
        min_prefix_ratio(logp, jnp.zeros(3), mask), [1.0, np.exp(-20.0), np.exp(-20.0)], rtol=1e-5
    )
    loss = lambda x: minpro(x, jnp.zeros(3), jnp.ones(3), mask, w_max=np.inf).sum()  # noqa: E731
    expected = -np.exp([-20.0, 0.0, 20.0])
    close(jax.grad(loss)(logp), expected, rtol=1e-5)


def test_masked_tokens_in_the_middle_change_nothing():
    mask = jnp.array([True, False, True, False, False, True, True, True])
    for junk in (-30.0, np.nan, np.inf):
        logp = jnp.full(8, junk).at[jnp.flatnonzero(mask)].set(jnp.log(RATIOS))
        advantages = jnp.arange(1.0, 9.0)
        got = minpro(logp, jnp.zeros(8), advantages, mask)
        kept = minpro(jnp.log(RATIOS), jnp.zeros(5), advantages[mask], jnp.ones(5, bool))
        equal(got[mask], kept)
        prefix = min_prefix_ratio(logp, jnp.zeros(8), mask)
        assert not np.asarray(prefix)[~mask].any()


def test_dppo_bounds_the_probability_and_not_the_ratio():
    """A rare token that rises fourfold is kept; a likely one is cut at a much smaller ratio."""
    old, new = np.log([0.01, 0.5, 0.5]), np.log([0.04, 0.6, 0.7])
    for surrogate in (dppo_tv, dppo_kl):
        loss = lambda x, f=surrogate: f(x, old.astype(np.float32), jnp.ones(3), ALL).sum()  # noqa: E731
        gradient = jax.grad(loss)(new.astype(np.float32))
        close(gradient, [-4.0, -1.2, 0.0], rtol=1e-5)


@for_each("surrogate", [dppo_tv, dppo_kl])
def test_dppo_of_certain_and_impossible_tokens_is_finite(surrogate):
    logp, old = jnp.array([0.0, -1e-9, -80.0]), jnp.array([-80.0, 0.0, -1e-9])
    for sign in (1.0, -1.0):
        loss = lambda x, a=sign: surrogate(x, old, jnp.full(3, a), ALL).sum()  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(logp)
        assert np.isfinite(value) and np.isfinite(gradient).all()
