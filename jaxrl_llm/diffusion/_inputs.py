"""Checks that the functions of this package share."""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks


def check_token_mask(function: str, name: str, mask: Array) -> None:
    """Raises unless ``mask`` is bool with at least one axis."""
    if mask is None:
        raise TypeError(f"{function}: {name} must be a bool array; got None.")
    checks.check_bool(function, **{name: mask})
    checks.check_min_rank(function, 1, **{name: mask})


def check_draws(function: str, logp: Array, masked: Array) -> None:
    """Raises unless ``logp [J, ..., T]`` is floating and of the shape of the bool ``masked``."""
    check_token_mask(function, "masked", masked)
    checks.check_float(function, logp=logp)
    checks.check_same_shape(function, logp=logp, masked=masked)
    checks.check_min_rank(function, 2, logp=logp)
    if jnp.shape(logp)[0] == 0:
        raise ValueError(f"{function}: logp must hold at least one draw; got {jnp.shape(logp)}.")


def of_draws(function: str, name: str, x: Array, shape: tuple[int, ...]) -> Array:
    """Numbers ``[J]`` or ``[J, ...]`` as float32 ``[J, ..., 1]``, for draws of ``shape``."""
    checks.check_float(function, **{name: x})
    if jnp.shape(x) == shape[:1]:
        x = jnp.reshape(x, (shape[0], *(1,) * (len(shape) - 2)))
        x = jnp.broadcast_to(x, shape[:-1])
    if jnp.shape(x) != shape[:-1]:
        raise ValueError(
            f"{function}: {name} must have shape {shape[:1]} or {shape[:-1]}; got {jnp.shape(x)}."
        )
    return jnp.asarray(x, jnp.float32)[..., None]


def draw_weights(function: str, weights: Array | None, shape: tuple[int, ...]) -> Array:
    """Weights of the draws ``[J, ..., 1]``, by default ``1 / J``."""
    if weights is None:
        return jnp.full((shape[0], *(1,) * (len(shape) - 1)), 1.0 / shape[0], jnp.float32)
    return of_draws(function, "weights", weights, shape)
