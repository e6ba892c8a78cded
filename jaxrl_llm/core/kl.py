"""Estimators of KL(p || q) at one token, from the log ratio ``d = log p - log q``.

The token is sampled from p. k1 and k3 have the right expected value and a wrong expected gradient;
k2 has a biased value and the right gradient. For tokens sampled from q, estimators of KL(q || p)
take ``-d``.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks, masking
from jaxrl_llm.core.axes import Array

ESTIMATORS = ("k1", "k2", "k3", "abs")

# The value of the first estimator with the gradient of k2.
STRAIGHT_THROUGH = ("k1+", "k3+", "abs+")


def k2(d: Array) -> Array:
    """``d^2 / 2``."""
    return 0.5 * d**2


def k3(d: Array) -> Array:
    """``exp(-d) - 1 + d``, by its series where the two terms would cancel."""
    series = 0.5 * d**2 * (1.0 - d / 3.0 * (1.0 - d / 4.0 * (1.0 - d / 5.0)))
    return jnp.where(jnp.abs(d) < 0.03, series, jnp.expm1(-d) + d)


def estimate(d: Array, estimator: str, *, cap: float | None = None) -> Array:
    """One of the estimators by name.

        k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d      abs = |d|, with gradient 0 at 0
        k1+, k3+, abs+ :  the value of k1, k3 or abs with the gradient of k2

    Args:
      d: ``[...]`` float32, log ratios (nats), already clamped.
      estimator: One of ``ESTIMATORS`` or ``STRAIGHT_THROUGH``.
      cap: Largest value of k3, with gradient 0 above it; None for no cap.

    Example:
      >>> import jax.numpy as jnp
      >>> estimate(jnp.array([0.5, -1.0]), "k3").round(4).tolist()
      [0.10649..., 0.7182...]

    References:
      Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html).
    """
    checks.check_option("estimate", "estimator", estimator, (*ESTIMATORS, *STRAIGHT_THROUGH))
    name = estimator.removesuffix("+")
    if name == "k2":
        return k2(d)
    value = {"k1": lambda d: d, "k3": k3, "abs": masking.distance}[name](d)
    value = value if cap is None else jnp.where(value > cap, cap, value)
    if estimator == name:
        return value
    # In this order the first two cancel exactly, so the value stays the same to the last bit.
    half_square = k2(d)
    return half_square - jax.lax.stop_gradient(half_square) + jax.lax.stop_gradient(value)
