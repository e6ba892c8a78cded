"""KL estimators on log ratios, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.core import kl

D = np.array([-20.0, -3.0, -0.031, -0.029, -1e-3, -1e-6, 0.0, 1e-5, 0.02, 0.03, 0.5, 20.0])
VALUES = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "abs": np.abs}
VALUES["k3"] = lambda d: (
    np.where(np.abs(d) < 1e-2, d**2 / 2 - d**3 / 6 + d**4 / 24, 0.0)
    + (np.where(np.abs(d) < 1e-2, 0.0, np.exp(-d) - 1 + d))
)


@for_each("estimator", [*kl.ESTIMATORS, *kl.STRAIGHT_THROUGH])
def test_values_and_gradients_keep_their_digits(estimator):
    d = jnp.asarray(D, jnp.float32)
    exact = np.asarray(d, np.float64)
    want = VALUES[estimator.removesuffix("+")](exact)
    np.testing.assert_allclose(kl.estimate(d, estimator), want, rtol=1e-5)
    slope = jax.grad(lambda x: kl.estimate(x, estimator).sum())(d)
    slopes = {"k1": np.ones_like(exact), "k3": -np.expm1(-exact), "abs": np.sign(exact)}
    np.testing.assert_allclose(slope, slopes.get(estimator, exact), rtol=1e-5)


def test_cap_and_unknown_names():
    d = jnp.array([-4.0, -1.0])
    assert kl.estimate(d, "k3", cap=10.0)[0] == 10.0
    with pytest.raises(ValueError, match="estimator must be one of 'k1'.*Did you mean 'k3'"):
        kl.estimate(d, "k33")
