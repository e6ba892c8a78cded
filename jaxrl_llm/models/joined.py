"""Kernels that multiply the same input, side by side in one array while tokens are decoded.

A decode step reads every matrix for a few rows, and one large matrix is read faster than several
small ones. On GPUs XLA multiplies them together anyway, but from where each lies, at every step,
and then has only its own products for it, not those of cuBLAS.

A joined kernel is that of the first of its group; the others have no rows, only their width:

    gate [in, a], up [in, b]    ->    gate [in, a + b], up [0, b]
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import Model, cast_params

# Names of linear layers that read the same input, in one layer of a model.
_GROUPS = (("q", "k", "v"), ("gate", "up"))


def decoding_params(model: Model, params: ArrayTree) -> ArrayTree:
    """What a loop over tokens takes: :func:`cast_params`, with joined kernels where that is faster.

    That is on one GPU; several would each need their parts of every kernel side by side. Inside of
    the loop, :func:`split_kernels` gives the parameters of the model.
    """
    params = cast_params(model, params)
    return join_kernels(params) if _on_one_gpu() else params


def _on_one_gpu() -> bool:
    return jax.default_backend() == "gpu" and len(jax.devices()) == 1


def join_kernels(params: ArrayTree) -> ArrayTree:
    """The parameters with joined kernels, of the groups that have them."""
    if not isinstance(params, Mapping):
        return params
    joined = {name: join_kernels(x) for name, x in params.items()}
    for group in _GROUPS:
        kernels = [_kernel_of(params, name) for name in group]
        found = [x for x in kernels if x is not None and x.ndim == 2]
        if len(found) < len(group) or len({(x.shape[0], x.dtype) for x in found}) > 1:
            continue
        # Without the barrier XLA would move the joining into the loop.
        wide = jax.lax.optimization_barrier(jnp.concatenate(found, axis=1))
        rest = [jnp.zeros((0, x.shape[1]), x.dtype) for x in found[1:]]
        for name, x in zip(group, (wide, *rest), strict=True):
            joined[name] = joined[name] | {"kernel": x}
    return joined


def split_kernels(params: ArrayTree) -> ArrayTree:
    """The inverse of :func:`join_kernels`; other parameters are unchanged."""
    if not isinstance(params, Mapping):
        return params
    split = {name: split_kernels(x) for name, x in params.items()}
    for group in _GROUPS:
        wide, *rest = (_kernel_of(params, name) for name in group)
        widths = [x.shape[1] for x in rest if x is not None and x.shape[0] == 0]
        if wide is None or len(widths) < len(rest):
            continue
        ends = np.cumsum([wide.shape[1] - sum(widths), *widths])
        for name, x in zip(group, jnp.split(wide, ends[:-1], axis=1), strict=True):
            split[name] = split[name] | {"kernel": x}
    return split


def _kernel_of(params: Mapping, name: str) -> Array | None:
    layer = params.get(name)
    kernel = layer.get("kernel") if isinstance(layer, Mapping) else None
    return kernel if isinstance(kernel, jax.Array) else None
