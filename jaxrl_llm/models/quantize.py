"""Matrix products of operands rounded to 8 bits, equal in sampling and training.

``mode`` is "fp8" or "int8". An unknown mode, and shapes that disagree, raise ValueError; an array
that is not floating point raises TypeError; a missing qwix raises ImportError.
"""

import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array


class _Mode(NamedTuple):
    """How a mode rounds; a block of None is all of an axis."""

    dtype: Any
    calibration: str  # of qwix
    inputs: tuple[int | None, ...]  # a block of the last axis of the inputs
    weights: tuple[int | None, ...]  # of both axes of the weights


_BLOCK = 128
_MODES = {
    # qwix puts the greatest value at 127.5. There the last bit of a float decides between -127 and
    # -128, and a sampler would round otherwise than a trainer: 127 it is.
    "int8": _Mode(jnp.int8, f"absmax,{127.5 / 127}", inputs=(None,), weights=(None, 1)),
    "fp8": _Mode(jnp.float8_e4m3fn, "absmax", inputs=(_BLOCK,), weights=(_BLOCK, _BLOCK)),
}
QUANTIZATIONS = (None, *_MODES)


class RoundedWeights(NamedTuple):
    """Weights that are rounded once, before a loop that would otherwise round them per token.

    Attributes:
      q: ``[K, N]`` in 8 bits.
      scale: float32, one per block.
    """

    q: Array
    scale: Array

    @property
    def ndim(self) -> int:
        """That of the weights, which tells those of a linear layer from those of experts."""
        return self.q.ndim

    @property
    def mode(self) -> str:
        """How they are rounded: "fp8" or "int8"."""
        return "int8" if self.q.dtype == jnp.int8 else "fp8"


def check_quantization(function: str, mode: str | None) -> None:
    """Raises unless ``mode`` is None or known; ImportError if the package for it is missing."""
    checks.check_option(function, "quantization", mode, QUANTIZATIONS)
    if mode is not None:
        _qwix(function)


def _qwix(function: str) -> Any:
    try:
        return importlib.import_module("qwix")
    except ImportError as error:
        raise ImportError(
            f"{function} needs the package qwix: pip install 'jaxrl_llm[quant]'."
        ) from error


def quantize_block(
    x: Array, block: tuple[int | None, ...], *, mode: str = "fp8"
) -> tuple[Array, Array]:
    """Rounds an array to 8 bits, with one scale for each block of its last axes.

        scale = max |x| over the block / bound    (1 where that is below 1e-19)
        q = round(x / scale)                      x is about q * scale
        mode="fp8":   e4m3, bound 448: an error of at most 2^-4 |x| down to 2^-6 scale
        mode="int8":  bound 127: an error of at most scale / 2

    If a block does not divide its axis, the last block is smaller. Rounding to "fp8" twice has no
    further effect; a block of zeros remains zero, and a NaN makes all of its block NaN.

    Args:
      x: Floating point ``[..., n_1, ..., n_k]``.
      block: Sizes along the last k axes, each positive; None for the full axis. Each index of the
        other axes has separate blocks.
      mode: See the module.

    Returns:
      ``(q, scale)``: ``q`` float8_e4m3fn or int8 in the shape of ``x``, and ``scale`` float32 with
      the number of blocks along the last k axes.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> x = jnp.array([[448.0, 17.0, 0.0, -14.0, 3.0]])
      >>> q, scale = jr.models.quantize_block(x, (1, 3))
      >>> q.astype(float).tolist(), scale.tolist()
      ([[448.0, 16.0, 0.0, -448.0, 96.0]], [[1.0, 0.03125]])

    References:
      Jet-RL (arXiv:2601.14243), PAPER reading, for "fp8"; qwix 0.1 for scales and rounding.
    """
    name = "quantize_block"
    checks.check_option(name, "mode", mode, _MODES)
    checks.check_float(name, x=x)
    checks.check_min_rank(name, len(block), x=x)
    checks.check_positive(name, **{f"block[{i}]": size for i, size in enumerate(block)})
    rounded = _round(x, block, mode)
    return rounded.qvalue[tuple(map(slice, x.shape))], rounded.scale


def round_weights(w: Array, mode: str) -> RoundedWeights:
    """Weights ``[K, N]`` as :func:`quantized_matmul` rounds them."""
    return RoundedWeights(*quantize_block(w, _MODES[mode].weights, mode=mode))


def _product(x: Array, w: Array | RoundedWeights, mode: str) -> Array:
    if not isinstance(w, RoundedWeights):
        w = round_weights(w, mode)
    if mode == "int8":
        # One scale a row and a column: qwix multiplies and adds integers.
        qwix = _qwix("quantized_matmul")
        inputs = _round(x, _MODES[mode].inputs, mode)
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        return qwix.dot_general(inputs, qwix.QArray(w.q, w.scale), numbers).astype(x.dtype)
    # For blocks along the contraction qwix would keep a product for every 128 inputs in memory.
    return _dot("...k,kn->...n", _rounded_inputs(x, mode), _values(w, x.dtype))


# ``mode`` has no gradient.
_differentiable = jax.custom_vjp(_product, nondiff_argnums=(2,))


def quantized_matmul(x: Array, w: Array | RoundedWeights, *, mode: str = "fp8") -> Array:
    """``x @ w`` of operands that are both rounded to 8 bits, with gradients through the rounding.

        y  = Q(x) Q(w)
        dx = Q(dy) Q(w)^T,  dw = Q'(x)^T Q'(dy)     mode="fp8"
        dx =   dy  Q(w)^T,  dw = Q(x)^T    dy       mode="int8"

    ``Q`` is :func:`quantize_block` and back. For "fp8" its blocks are 128 inputs of one token, or
    128 x 128 weights; ``Q'`` takes 128 tokens of one column, since the sum of ``dw`` runs over
    tokens. For "int8" a block is a token, or a column of the weights. Sums are float32, or int32.
    A row of ``y`` depends only on its row of ``x``, so decoding token by token rounds in the same
    way as scoring a full response.

    qwix rounds, and multiplies for "int8". The backward pass is ours, since qwix has none for
    blocks of two axes; and "fp8" operands return to the dtype of ``x`` before they are multiplied,
    which shows what training in "fp8" does to a policy but is no faster.

    Args:
      x: Activations ``[..., T, K]``; blocks of tokens are along T and never cross rows.
      w: Weights ``[K, N]``, taken in the dtype of ``x``; or :func:`round_weights` of them, which
        have no gradient.
      mode: See the module.

    Returns:
      ``[..., T, N]`` in the dtype of ``x``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> x, w = jnp.array([[17.0, 448.0]]), jnp.eye(2)
      >>> jr.models.quantized_matmul(x, w).tolist()
      [[16.0, 448.0]]

    References:
      Jet-RL (arXiv:2601.14243), PAPER reading; ending the blocks of ``Q'`` with a row of ``x`` is
      ours, so that the contribution of a row to ``dw`` does not depend on other rows. "int8" is
      ours, its gradient straight through.
    """
    name = "quantized_matmul"
    checks.check_option(name, "mode", mode, _MODES)
    rounded = isinstance(w, RoundedWeights)
    checks.check_float(name, x=x, **({} if rounded else {"w": w}))
    checks.check_min_rank(name, 1, x=x)
    matrix = w.q if rounded else w
    checks.check_rank(name, 2, w=matrix)
    if x.shape[-1] != matrix.shape[0]:
        raise ValueError(
            f"{name}: the last axis of x {x.shape} must be the first of w {matrix.shape}."
        )
    rows = x if x.ndim > 1 else x[None]
    y = _differentiable(rows, w if rounded else w.astype(x.dtype), mode)
    return y if x.ndim > 1 else y[0]


def _backward(mode: str, residuals, dy: Array) -> tuple[Array, Array | None]:
    x, w = residuals
    weights = w if isinstance(w, RoundedWeights) else round_weights(w, mode)
    by_token = _rounded_inputs(dy, mode) if mode == "fp8" else dy
    dx = _dot("...n,kn->...k", by_token, _values(weights, x.dtype))
    if weights is w:
        return dx, None
    if mode == "fp8":
        # Padding has no gradient, and must not widen the scale of a block.
        x = jnp.where(jnp.any(dy != 0, axis=-1, keepdims=True), x, 0)
        x, dy = (_rounded(a, (_BLOCK, 1), mode) for a in (x, dy))
    else:
        x = _rounded_inputs(x, mode)
    return dx, _dot("...k,...n->kn", x, dy)


_differentiable.defvjp(lambda x, w, mode: (_product(x, w, mode), (x, w)), _backward)


def _dot(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def _rounded_inputs(x: Array, mode: str) -> Array:
    return _rounded(x, _MODES[mode].inputs, mode)


def _rounded(x: Array, block: tuple[int | None, ...], mode: str) -> Array:
    """``x`` after rounding, in the shape and dtype of ``x``."""
    values = _qwix("quantized_matmul").dequantize(_round(x, block, mode))
    return values[tuple(map(slice, x.shape))].astype(x.dtype)


def _values(w: RoundedWeights, dtype) -> Array:
    """The weights that rounded ones stand for."""
    qwix = _qwix("quantized_matmul")
    q, _ = _pad_blocks(w.q, _MODES[w.mode].weights)
    values = qwix.dequantize(qwix.QArray(q, w.scale))
    return values[tuple(map(slice, w.q.shape))].astype(dtype)


def _round(x: Array, block: tuple[int | None, ...], mode: str) -> Any:
    """A ``qwix.QArray``, with zeros behind ``x`` where a block does not divide its axis."""
    x, tiles = _pad_blocks(x.astype(jnp.float32), block)
    return _qwix("quantize_block").quantize(
        x,
        _MODES[mode].dtype,
        calibration_method=_MODES[mode].calibration,
        channelwise_axes=range(x.ndim - len(block)),
        tiled_axes=tiles,
    )


def _pad_blocks(x: Array, block: tuple[int | None, ...]) -> tuple[Array, dict[int, int]]:
    """``x`` with zeros behind it, so that blocks divide their axes, and their size by axis."""
    axes = range(x.ndim - len(block), x.ndim)
    sizes = zip(axes, block, strict=True)
    tiles = {i: max(1, min(size or x.shape[i], x.shape[i])) for i, size in sizes}
    padding = [(0, -n % tiles.get(i, 1)) for i, n in enumerate(x.shape)]
    return jnp.pad(x, padding), tiles
