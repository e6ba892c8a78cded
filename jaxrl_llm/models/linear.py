"""The modules that most layers are made of: a linear layer and an RMS norm, both with deltas."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.products import project
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.delta import over_axes, row_product
from jaxrl_llm.models.norms import rms_norm
from jaxrl_llm.models.quantize import RoundedWeights, quantized_matmul
from jaxrl_llm.models.remat import product


def drawn(init: Callable, rngs: nnx.Rngs | None, *shape: int) -> nnx.Param:
    """A parameter before training, float32.

    Zeros without ``rngs``, for the form and the shapes of a model: tracing the draws of all its
    layers would take several times as long as all else.
    """
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, jnp.float32))
    return nnx.Param(init(rngs.params(), shape, jnp.float32))


class Linear(nnx.Module):
    """``y = x W + b``, plus ``scale (x A) B`` with a low-rank delta.

    Quantization rounds ``x`` and ``W`` for their product; the rest stays as it is. A layer whose
    ``W`` is rounded already (:func:`~jaxrl_llm.models.round_params`) rounds ``x`` in the same mode.

    A delta is ``(A, B, scale)`` with ``A`` ``[..., in, r]`` and ``B`` ``[..., r, out]``: without
    leading axes it is one adapter for all rows, with leading axes ``[P, G]`` there is one for
    each row of the batch. A fourth entry ``[..., 1, out]`` is added to the bias; the others may
    then be None.
    """

    def __init__(self, inputs: int, outputs: int, config: ModelConfig, rngs, *, bias=False):
        self.kernel = drawn(nnx.initializers.normal(inputs**-0.5), rngs, inputs, outputs)
        self.bias = nnx.Param(jnp.zeros((outputs,))) if bias else None
        self.dtype, self.quantization = config.dtype, config.quantization

    def __call__(self, x: Array, delta=None) -> Array:
        """``[..., T, in] -> [..., T, out]``."""
        kernel = self.kernel.get_value()
        mode = kernel.mode if isinstance(kernel, RoundedWeights) else self.quantization
        if mode is None:
            y = project(x, kernel.astype(self.dtype))
        else:
            y = quantized_matmul(x, kernel, mode=mode)
        if self.bias is not None:
            y = y + self.bias[...].astype(self.dtype)
        if delta is not None:
            a, b, scale, *own_bias = delta
            if a is not None:
                low = row_product(x, a.astype(self.dtype))
                y = y + scale * row_product(low, b.astype(self.dtype))
            for bias in own_bias:
                y = y + over_axes(bias, y)
        return product(y.astype(self.dtype))


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * (offset + scale)`` over the last axis, in float32.

    A delta ``[..., 1, size]`` is added to the scale.
    """

    def __init__(self, size: int, config: ModelConfig):
        self.scale = nnx.Param(jnp.full((size,), 1.0 - config.norm_offset, jnp.float32))
        self.offset, self.eps, self.dtype = config.norm_offset, config.norm_eps, config.dtype

    def __call__(self, x: Array, delta=None) -> Array:
        """``[..., size] -> [..., size]``."""
        scale = self.scale[...].astype(jnp.float32)
        if self.offset:
            scale = self.offset + scale
        if delta is not None:
            scale = scale + over_axes(delta, x)
        y, kind = rms_norm(x, scale, self.eps), jnp.finfo(self.dtype)
        # A cast alone does not always round: before a rotation, which is float32, the compiler of
        # some programs removes it, and sampler and trainer would differ.
        if kind.bits < 32:
            y = jax.lax.reduce_precision(y, kind.nexp, kind.nmant)
        return y.astype(self.dtype)
