"""Low-rank deltas of a model's weights for one call, and the layers that take them.

A delta is a nested dict like the parameters. At a linear layer it is ``(A, B, scale)``, with a
fourth entry ``[..., 1, out]`` for the bias; at an embedding ``(A, B, scale)``; at a norm an array
``[..., 1, size]`` for its scale; at experts ``(A [..., E, in, r], B [..., E, r, out], scale)``.
Leading axes, if any, are the batch axes ``[P, G]``. Factors may be shorter along the first axis;
each then applies to several consecutive rows, such as the two members of a pair.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array


def delta_of(delta: Mapping | None, name: str):
    """The entry of one submodule, or None."""
    return None if delta is None else delta.get(name)


def over_axes(vector: Array, x: Array) -> Array:
    """Reshapes a vector per row, ``[..., 1, size]``, to broadcast against ``x`` with more axes."""
    inner = (1,) * (x.ndim - vector.ndim)
    return vector.reshape(vector.shape[:-1] + inner + vector.shape[-1:])


def row_product(x: Array, factor: Array) -> Array:
    """Multiplies rows ``[P, ..., T, in]`` by factors ``[P / k, ..., in, r]``, or by one factor."""
    if factor.ndim != x.ndim or factor.shape[0] == x.shape[0]:
        return jnp.matmul(x, factor)
    # Factors are not repeated: they may take as much memory as a model.
    low = jnp.matmul(_in_lines(x, len(factor)), factor[:, None])
    return low.reshape(*x.shape[:-1], factor.shape[-1])


def row_embedding(factor: Array, tokens: Array) -> Array:
    """Rows of factors ``[P / k, ..., V, r]`` at ``tokens [P, ..., T]``: ``[P, ..., T, r]``."""
    if factor.ndim == 2:
        return factor[tokens]
    lines = _in_lines(tokens, len(factor))
    rows = jnp.take_along_axis(factor[:, None], lines[..., None], axis=-2)
    return rows.reshape(*tokens.shape, factor.shape[-1])


def row_experts(factors: Array, chosen: Array) -> Array:
    """The matrices of experts ``[P / k, G or 1, E, i, j]`` that ``chosen [P, G, T, n]`` names.

    ``[P, G, T, n, i, j]``.
    """
    lines = _in_lines(chosen, len(factors))
    of_all = factors.shape[1] == 1

    def of_line(factors: Array, chosen: Array) -> Array:  # chosen: [k, G, T, n]
        if of_all:
            return factors[0][chosen]
        return jax.vmap(lambda x, i: x[i], in_axes=(0, 1), out_axes=1)(factors, chosen)

    rows = jax.vmap(of_line)(factors, lines)
    return rows.reshape(*chosen.shape, *factors.shape[-2:])


def _in_lines(x: Array, count: int) -> Array:
    """Rows ``[P, ...]`` as ``[count, P / count, ...]``."""
    if x.shape[0] % count:
        raise ValueError(
            f"Model.apply: {count} factors of a delta do not divide {x.shape[0]} rows."
        )
    return x.reshape(count, -1, *x.shape[1:])


def check_delta(delta: Mapping, params: Mapping, path: str = "") -> None:
    """Raises unless the model takes every entry of a delta."""
    for name, entry in delta.items():
        here = f"{path}/{name}" if path else str(name)
        target = params.get(name) if isinstance(params, Mapping) else None
        if isinstance(entry, Mapping):
            if not isinstance(target, Mapping):
                raise ValueError(
                    f"Model.apply: delta names {here!r}, which the model does not have."
                )
            check_delta(entry, target, here)
        elif here == "embed" and "embed" in params:
            if "head" not in params:
                raise ValueError(
                    "Model.apply: delta 'embed' would not change the output matrix of a tied "
                    "model, which is the same table."
                )
        elif isinstance(target, Mapping) and "scale" in target and not isinstance(entry, tuple):
            checks.check_min_rank("Model.apply", 1, **{f"delta {here!r}": entry})
        elif not (isinstance(target, Mapping) and "kernel" in target) or here == "head":
            raise ValueError(f"Model.apply: delta {here!r} is not at a linear layer.")
        elif target["kernel"].ndim == 3:
            factors = entry[:2] if isinstance(entry, tuple) and len(entry) == 3 else ()
            if [getattr(x, "ndim", 0) for x in factors] not in ([3, 3], [5, 5]):
                raise ValueError(
                    f"Model.apply: delta {here!r} must be (A [E, in, r], B [E, r, out], scale) for "
                    "all rows or have the batch axes [P, G] in front; experts take none for their "
                    "biases."
                )
