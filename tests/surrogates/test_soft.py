import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.surrogates import sapo


def gate(ratio, advantage=1.0, **options):
    """f and df/dlogp: the loss is -A f."""
    mask = jnp.ones(1, bool)
    loss = lambda x: sapo(x, jnp.zeros(1), jnp.array([advantage]), mask, **options)[0]  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(jnp.log(jnp.array([ratio])))
    return float(value) / -advantage, float(gradient[0]) / -advantage


@pytest.mark.parametrize(
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
    np.testing.assert_allclose(gate(ratio, advantage), expected, atol=6e-6)


@pytest.mark.parametrize("tau", [0.1, 1.0, 1.05, 7.0])
def test_unchanged_policy_has_value_two_over_tau_and_slope_one(tau):
    for advantage in (1.0, -1.0):
        got = gate(1.0, advantage, tau_pos=tau, tau_neg=tau)
        np.testing.assert_allclose(got, (2 / tau, 1.0), rtol=1e-6)


def test_a_small_tau_tends_to_the_plain_ratio():
    for ratio in (0.2, 1.0, 5.0, 20.0):
        slope = gate(ratio, tau_pos=1e-4)[1]
        np.testing.assert_allclose(slope, ratio, rtol=1e-5)


def test_a_huge_ratio_has_no_gradient_left():
    for advantage in (1.0, -1.0):
        assert gate(1e3, advantage)[1] == 0.0
        assert np.isfinite(gate(1e30, advantage)).all()


def test_each_tau_serves_its_sign():
    assert gate(1.5, 1.0, tau_neg=9.0) == gate(1.5, 1.0)
    assert gate(1.5, -1.0, tau_pos=9.0) == gate(1.5, -1.0)
    assert gate(1.5, 1.0, tau_pos=9.0) != gate(1.5, 1.0)
    assert gate(1.5, -1.0, tau_neg=9.0) != gate(1.5, -1.0)


def test_the_statements_of_the_docstring():
    def slope(ratio, tau):
        logp, mask = jnp.log(jnp.array([ratio])), jnp.ones(1, bool)
        loss = lambda x: sapo(x, jnp.zeros(1), jnp.ones(1), mask, tau_pos=tau)[0]  # noqa: E731
        return -float(jax.grad(loss)(logp)[0])

    assert slope(1.0, 1.0) == pytest.approx(1.0)
    assert slope(1.5, 1.0) == pytest.approx(1.41, abs=0.005)
    assert slope(20.0, 1.0) < 1e-6
    assert slope(1e-4, 1.0) / 1e-4 == pytest.approx(1 / np.cosh(0.5) ** 2, rel=1e-3)
    assert slope(1.5, 1e-3) == pytest.approx(1.5, rel=1e-5)
