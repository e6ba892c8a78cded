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


def check_axes(function: str, shape: tuple[int, ...], **options) -> None:
    """Raises ValueError unless each option is a scalar or broadcasts to ``shape`` at its rank.

    One of fewer axes would be read along the last ones, a value per prompt, ``[P]``, along tokens.
    """
    for name, x in options.items():
        got = jnp.shape(x)
        broadcasts = len(got) == len(shape) and all(
            size in (1, full) for size, full in zip(got, shape, strict=True)
        )
        if got and not broadcasts:
            raise ValueError(
                f"{function}: {name} must be a number, or an array with the axes, full or 1, of "
                f"the token loss {shape}; got {got}."
            )


def scaled(coef, x: Array) -> Array:
    """``coef * x`` in float32; the coefficient is a constant, and 0 turns off an infinite x too."""
    check_axes("regularizers", jnp.shape(x), coef=coef)
    coef = jax.lax.stop_gradient(jnp.asarray(coef, jnp.float32))
    return jnp.where((coef == 0) & jnp.isinf(x), 0.0, coef * x)
