"""Checks that the terms share."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


def check_tokens(function: str, mask: Array | None, **arrays) -> None:
    """Raises unless the arrays are given, floating ``[..., T]``, of one shape with a bool mask."""
    for name, x in arrays.items():
        if x is None:
            raise ValueError(f"{function}: {name} is None; this term requires it.")
    checks.check_bool(function, mask=mask)
    checks.check_arrays(function, arrays, mask=mask)


def scaled(coef, x: Array) -> Array:
    """``coef * x`` in float32; the coefficient is a constant, and 0 turns off an infinite x too."""
    checks.check_coefficients("regularizers", "the token loss", jnp.shape(x), coef=coef)
    coef = jax.lax.stop_gradient(jnp.asarray(coef, jnp.float32))
    return masking.product(coef, x)
