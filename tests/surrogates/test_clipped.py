import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.surrogates import dapo_clip, dcpo_dynamic_clip, ppo_clip, reinforce

ONE = jnp.ones(1, bool)


def at(surrogate, ratio, advantage, **options):
    """Loss and d/dlogp of one token."""

    def loss(logp):
        old = jnp.full(1, -2.0)
        return surrogate(logp, old, jnp.array([advantage]), ONE, **options)[0]

    value, gradient = jax.value_and_grad(loss)(-2.0 + jnp.log(jnp.array([ratio])))
    return float(value), float(gradient[0])


@pytest.mark.parametrize(
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
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert (got[1] == 0) == (expected[1] == 0)  # inside the clip the gradient is exactly zero
    if advantage > 0 or ratio < 3:  # a dual clip of 3 changes none of these
        assert at(ppo_clip, ratio, advantage, dual_clip=3.0) == got


def test_dual_clip_worked_number():
    assert at(ppo_clip, 4.0, -1.0, dual_clip=3.0) == (3.0, 0.0)


def test_dual_clip_spares_positive_advantages():
    got = at(ppo_clip, 8.0, 1.0, eps_high=np.inf, dual_clip=3.0)
    np.testing.assert_allclose(got, (-8.0, -8.0), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"eps_low": 1e9, "eps_high": 1e9},
        {"eps_low": np.inf, "eps_high": np.inf, "dual_clip": np.inf},
    ],
)
@pytest.mark.parametrize("advantage", [1.5, -0.7, 0.0])
def test_without_bounds_it_is_minus_a_r(options, advantage):
    for ratio in (0.01, 0.9, 7.0, 300.0):
        expected = -advantage * ratio
        np.testing.assert_allclose(
            at(ppo_clip, ratio, advantage, **options), (expected, expected), rtol=1e-5, atol=1e-7
        )


def test_epsilon_zero_keeps_the_gradient_of_an_unchanged_policy():
    assert at(ppo_clip, 1.0, 2.0, eps_low=0.0, eps_high=0.0) == (-2.0, -2.0)
    assert at(ppo_clip, 1.0, -2.0, eps_low=0.0, eps_high=0.0) == (2.0, 2.0)


@pytest.mark.parametrize(("distance", "sign"), [(30.0, 1), (1e4, 1), (-30.0, -1)])
def test_log_ratio_is_clamped(distance, sign):
    old = jnp.zeros(1)
    loss = lambda x: ppo_clip(x, old, -jnp.ones(1), ONE, eps_low=np.inf)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(jnp.array([distance]))
    np.testing.assert_allclose(value, np.exp(sign * 20.0), rtol=1e-5)
    assert gradient[0] == 0


def test_dapo_worked_numbers():
    np.testing.assert_allclose(at(dapo_clip, 1.25, 1.0), (-1.25, -1.25), rtol=1e-6)
    np.testing.assert_allclose(at(dapo_clip, 1.3, 1.0), (-1.28, 0.0), rtol=1e-6)
    np.testing.assert_allclose(at(ppo_clip, 1.25, 1.0), (-1.2, 0.0), rtol=1e-6)
    np.testing.assert_allclose(at(dapo_clip, 12.0, -1.0), (10.0, 0.0), rtol=1e-6)


def test_dapo_is_ppo_for_negative_advantages():
    for ratio in (0.3, 0.9, 1.25, 2.0, 9.0):
        assert at(dapo_clip, ratio, -1.3) == at(ppo_clip, ratio, -1.3)


def test_dapo_with_equal_epsilons_is_ppo():
    rng = np.random.default_rng(0)
    logp, old, advantages = (jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) for _ in range(3))
    mask = jnp.asarray(rng.random((4, 6)) < 0.8)

    def both(f, **options):
        loss = lambda x: f(x, old, advantages, mask, **options)  # noqa: E731
        return loss(logp), jax.grad(lambda x: loss(x).sum())(logp)

    got = both(dapo_clip, eps_low=0.2, eps_high=0.2, dual_clip=None)
    for a, b in zip(got, both(ppo_clip), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_ratio_form_has_the_gradient_of_reinforce_at_every_token():
    rng = np.random.default_rng(1)
    logp, advantages = (jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) for _ in range(2))
    mask = jnp.ones((4, 6), bool)
    ratio = jax.grad(lambda x: ppo_clip(x, None, advantages, mask).sum())(logp)
    plain = jax.grad(lambda x: reinforce(x, None, advantages, mask).sum())(logp)
    np.testing.assert_array_equal(ratio, plain)


@pytest.mark.parametrize(
    ("surrogate", "option"),
    [(ppo_clip, "dual_clip"), (dapo_clip, "eps_low"), (dcpo_dynamic_clip, "r_max")],
)
def test_an_option_that_is_a_text_is_named(surrogate, option):
    message = f"^{surrogate.__name__}: {option} must be a number; got 'x'"
    with pytest.raises(TypeError, match=message):
        at(surrogate, 1.0, 1.0, **{option: "x"})
