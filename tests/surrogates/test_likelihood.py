import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.surrogates import cispo, cispo_bounds, ppo_clip, reinforce

TWO = jnp.ones(2, bool)


def test_reinforce_worked_numbers():
    logp, advantages = jnp.array([-1.0, -2.0]), jnp.array([2.0, -1.0])
    loss = lambda x: reinforce(x, None, advantages, TWO)  # noqa: E731
    np.testing.assert_array_equal(loss(logp), [2.0, -2.0])
    np.testing.assert_array_equal(jax.grad(lambda x: loss(x).sum())(logp), [-2.0, 1.0])


def test_reinforce_gradient_is_minus_weight_times_advantage():
    weight, advantages = jnp.array([0.5, 3.0]), jnp.array([2.0, -1.0])
    gradient = jax.grad(lambda x: reinforce(x, None, advantages, TWO, weight=weight).sum())
    np.testing.assert_array_equal(gradient(jnp.array([-1.0, -2.0])), [-1.0, 3.0])


def test_reinforce_stops_the_gradient_of_its_weight():
    advantages = jnp.array([2.0, -1.0])

    def loss(x):
        ratio = jnp.exp(x - jax.lax.stop_gradient(x))  # value 1, gradient 1
        return reinforce(x, None, advantages, TWO, weight=ratio).sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([-1.0, -2.0])), [-2.0, 1.0])


def test_reinforce_has_no_ratio():
    logp, advantages = jnp.array([-1.0, -2.0]), jnp.array([2.0, -1.0])
    np.testing.assert_array_equal(
        reinforce(logp, jnp.array([-5.0, 0.0]), advantages, TWO),
        reinforce(logp, None, advantages, TWO),
    )


def gradient_at(ratio, advantage, **options):
    old = jnp.full(1, -3.0)
    loss = lambda x: cispo(x, old, jnp.array([advantage]), jnp.ones(1, bool), **options)[0]  # noqa: E731
    return float(jax.grad(loss)(old + jnp.log(ratio))[0])


def test_cispo_worked_numbers():
    assert gradient_at(1.0, 1.5) == -1.5
    np.testing.assert_allclose(gradient_at(8.0, 1.0), -5.0, rtol=1e-6)  # PPO would give 0
    np.testing.assert_allclose(gradient_at(8.0, 1.0, w_max=10.0), -8.0, rtol=1e-6)
    np.testing.assert_allclose(gradient_at(0.1, 1.0), -0.1, rtol=1e-6)
    np.testing.assert_allclose(gradient_at(0.1, 1.0, w_min=0.8), -0.8, rtol=1e-6)


def test_cispo_gradient_never_changes_sign():
    ratios = np.geomspace(1e-4, 1e4, 25)
    assert all(gradient_at(r, 2.0) < 0 for r in ratios)
    assert all(gradient_at(r, -2.0) > 0 for r in ratios)


def test_cispo_without_bounds_has_the_gradient_of_minus_a_r():
    rng = np.random.default_rng(0)
    logp, old, advantages = (jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) for _ in range(3))
    mask = jnp.asarray(rng.random((4, 6)) < 0.8)
    free = jax.grad(lambda x: cispo(x, old, advantages, mask, w_max=np.inf).sum())(logp)
    ratio = jax.grad(
        lambda x: ppo_clip(x, old, advantages, mask, eps_low=np.inf, eps_high=np.inf).sum()
    )(logp)
    np.testing.assert_allclose(free, ratio, rtol=1e-6)


def test_cispo_with_both_bounds_one_is_reinforce():
    logp, old, advantages = jnp.array([-1.0, -2.0]), jnp.array([-3.0, -1.0]), jnp.array([2.0, -1.0])
    np.testing.assert_array_equal(
        cispo(logp, old, advantages, TWO, **cispo_bounds(eps_low=0.0, eps_high=0.0)),
        reinforce(logp, None, advantages, TWO),
    )


def test_cispo_bounds():
    assert cispo_bounds(eps_low=0.25, eps_high=0.5) == {"w_min": 0.75, "w_max": 1.5}
    assert cispo_bounds(eps_low=10.0, eps_high=0.5)["w_min"] == 0.0
    bound = jr.bind(cispo, **cispo_bounds(eps_low=0.2, eps_high=0.25))
    old, mask = jnp.zeros(1), jnp.ones(1, bool)
    gradient = jax.grad(lambda x: bound(x, old, jnp.ones(1), mask)[0])
    np.testing.assert_allclose(gradient(jnp.log(jnp.array([8.0]))), [-1.25], rtol=1e-6)
    with pytest.raises(ValueError, match="cispo_bounds: eps_low must not be negative"):
        cispo_bounds(eps_low=-0.1, eps_high=0.2)
