"""Checks that the terms share."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks


def check_tokens(function: str, mask: Array | None, **arrays) -> None:
    """Raises unless the arrays are given, floating ``[..., T]``, of one shape with a bool mask."""
    for name, x in arrays.items():
        if x is None:
            raise ValueError(f"{function}: {name} is None; this term requires it.")
    checks.check_bool(function, mask=mask)
    checks.check_arrays(function, arrays, mask=mask)


def scaled(coef, x: Array) -> Array:
    """``coef * x`` in float32; a coefficient is a constant.

    Raises ValueError unless it is a scalar or broadcasts to ``x`` at the same rank: one of fewer
    axes would be read along the last ones, a value per prompt, ``[P]``, along tokens.
    """
    shape, got = jnp.shape(x), jnp.shape(coef)
    broadcasts = len(got) == len(shape) and all(
        size in (1, full) for size, full in zip(got, shape, strict=True)
    )
    if got and not broadcasts:
        raise ValueError(
            "regularizers: coef must be a number, or an array with the axes, full or 1, of the "
            f"token loss {shape}; got {got}."
        )
    return jax.lax.stop_gradient(jnp.asarray(coef, jnp.float32)) * x
