"""Masked reductions and the token arithmetic that surrogates and regularizers share.

All functions follow one rule: masked values are replaced before any ``exp``, ``log`` or division,
because a NaN multiplied by zero afterward is still a NaN, in the value and in the gradient. All
results are float32 for any input dtype.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array

# Bounds the ratio of one token to [2e-9, 5e8], so that no overflow reaches a product with zero.
LOG_RATIO_CLAMP = 20.0


def zero_masked(x: Array, mask: Array | None) -> Array:
    """``x`` in float32 with zeros where ``mask`` is False; the masked values are never read."""
    x = jnp.asarray(x, jnp.float32)
    return x if mask is None else jnp.where(mask, x, 0.0)


def unlikely(logp: Array, mask: Array, probability: float) -> Array:
    """Unmasked tokens whose sampling probability is below a threshold."""
    return mask & (jnp.exp(zero_masked(logp, mask)) < probability)


# Entries from which a sum over the last axis is worth a product on CPUs.
_LONG = 128


def row_sum(x: Array, keepdims: bool = False) -> Array:
    """Sum over the last axis, in float32.

    On CPUs a long sum is computed as a product with ones: XLA does not reorder the additions of a
    reduction there, which makes it several times slower.
    """
    x = jnp.asarray(x, jnp.float32)
    if x.shape[-1] < _LONG:
        return jnp.sum(x, axis=-1, keepdims=keepdims)

    def product(x: Array) -> Array:
        ones = jnp.ones((x.shape[-1],), x.dtype)
        return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)

    total = jax.lax.platform_dependent(x, cpu=product, default=lambda x: jnp.sum(x, axis=-1))
    return total[..., None] if keepdims else total


def lengths(mask: Array) -> Array:
    """Number of unmasked tokens of each sequence: ``[..., T] -> [...]`` float32."""
    length = jnp.shape(mask)[-1]
    # Integers may be added in any order: columns of bytes first, as many as a byte can count.
    if length % _LONG == 0 and 0 < length // _LONG <= 127:
        columns = jnp.reshape(mask, (*jnp.shape(mask)[:-1], length // _LONG, _LONG))
        mask = jnp.sum(columns, axis=-2, dtype=jnp.int8)
    return jnp.sum(mask, axis=-1, dtype=jnp.int32).astype(jnp.float32)


def response_tokens(function: str, mask: Array, response_mask: Array | None) -> Array:
    """The tokens of the responses: ``response_mask``, or ``mask`` if nothing was rejected.

    A mask that is not bool raises TypeError, and one of another shape ValueError.
    """
    checks.check_mask(function, mask)
    if response_mask is None:
        return mask
    checks.check_bool(function, response_mask=response_mask)
    checks.check_same_shape(function, mask=mask, response_mask=response_mask)
    return response_mask


def masked_sum(x: Array, mask: Array | None, axis=None, keepdims: bool = False) -> Array:
    """Sum of the unmasked entries."""
    x = zero_masked(x, mask)
    if axis == -1 and x.ndim:
        return row_sum(x, keepdims)
    return jnp.sum(x, axis=axis, keepdims=keepdims)


def _count(x: Array, mask: Array | None, axis, keepdims: bool) -> Array:
    valid = jnp.ones(jnp.shape(x), bool) if mask is None else jnp.broadcast_to(mask, jnp.shape(x))
    return masked_sum(valid, None, axis, keepdims)


def masked_mean(x: Array, mask: Array | None, axis=None, keepdims: bool = False) -> Array:
    """Mean of the unmasked entries; 0 where nothing is unmasked."""
    count = _count(x, mask, axis, keepdims)
    return masked_sum(x, mask, axis, keepdims) / jnp.maximum(count, 1.0)


def masked_var(
    x: Array, mask: Array | None, axis=None, keepdims: bool = False, *, ddof: int = 0
) -> Array:
    """Variance of the unmasked entries in two passes; 0 where there are at most ``ddof``."""
    x = zero_masked(x, mask)
    centered = zero_masked(x - masked_mean(x, mask, axis, keepdims=True), mask)
    count = _count(x, mask, axis, keepdims)
    squares = jnp.sum(centered**2, axis=axis, keepdims=keepdims)
    return jnp.where(count > ddof, squares / jnp.maximum(count - ddof, 1.0), 0.0)


def masked_std(
    x: Array, mask: Array | None, axis=None, keepdims: bool = False, *, ddof: int = 0
) -> Array:
    """Standard deviation of the unmasked entries; 0, with gradient 0, where they do not vary."""
    return safe_sqrt(masked_var(x, mask, axis, keepdims, ddof=ddof))


def safe_sqrt(x: Array) -> Array:
    """Square root, and 0 with gradient 0 where x is not above 0.

    The gradient of a square root at zero is infinite.
    """
    return jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)


def is_constant(x: Array, mask: Array | None, axis=None, keepdims: bool = False) -> Array:
    """Whether the unmasked entries are all equal, one, or none.

    Tested by max == min. A threshold on the deviation would not work: three float32 values of 0.1
    have a mean that is not 0.1.
    """
    valid = True if mask is None else mask
    largest = jnp.max(x, axis=axis, keepdims=keepdims, where=valid, initial=-jnp.inf)
    least = jnp.min(x, axis=axis, keepdims=keepdims, where=valid, initial=jnp.inf)
    return largest <= least


def check_tokens(function: str, mask: Array, **arrays) -> None:
    """Raises unless arrays (None is skipped) are floating ``[..., T]`` of the shape of a bool mask.

    A dtype raises TypeError, a shape ValueError.
    """
    checks.check_mask(function, mask)
    checks.check_arrays(function, arrays, mask=mask)


def safe_log_ratio(
    logp: Array, other_logp: Array, mask: Array | None = None, *, clamp: float | None = None
) -> Array:
    """``logp - other_logp`` in float32, 0 where masked, clamped to ``[-clamp, clamp]``.

    It is 0, without a gradient, where both are -inf: a token that neither policy can produce has
    ratio 1.
    """
    logp, other_logp = zero_masked(logp, mask), zero_masked(other_logp, mask)
    impossible = (logp == -jnp.inf) & (other_logp == -jnp.inf)
    log_ratio = jnp.where(impossible, 0.0, logp) - jnp.where(impossible, 0.0, other_logp)
    return log_ratio if clamp is None else jnp.clip(log_ratio, -clamp, clamp)


def product(coefficient: Array | float, x: Array) -> Array:
    """``coefficient * x``, and 0 where the coefficient is 0 and x infinite; a NaN stays.

    The coefficient is a constant. A token that the policy cannot produce has log-probability -inf,
    and 0 times that would be NaN.
    """
    return jnp.where((coefficient == 0) & jnp.isinf(x), 0.0, coefficient * x)


def distance(x: Array) -> Array:
    """``|x|`` with gradient 0 at 0, where that of ``jnp.abs`` is 1."""
    return x * jax.lax.stop_gradient(jnp.sign(x))


def spread(function: str, name: str, x: Array, mask: Array) -> Array:
    """One value per token ``[..., T]`` or per sequence ``[...]``, as float32 values of tokens.

    Zero where masked. Any shape other than that of ``mask``, with or without its last axis, raises
    ValueError; a dtype that is not floating point raises TypeError.
    """
    checks.check_float(function, **{name: x})
    shape, target = jnp.shape(x), jnp.shape(mask)
    if shape not in (target, target[:-1]):
        raise ValueError(
            f"{function}: {name} must have the shape of logp {target} or of its sequences "
            f"{target[:-1]}; got {shape}."
        )
    x = jnp.asarray(x, jnp.float32)
    # Masked even when one value serves a sequence: an empty sequence's value may be anything.
    return zero_masked(x if shape == target else x[..., None], mask)


def block_ids(first: Array, length: int, block: int) -> Array:
    """The block of each of ``length`` tokens, ``[...] -> [..., length]``, 0 for the first token's.

    Blocks are counted from the first place of a row, where a prompt begins; ``first`` is the place
    of the first of these tokens.
    """
    first = jnp.asarray(first)[..., None]
    return (first + jnp.arange(length)) // block - first // block


def previous_token(mask: Array) -> Array:
    """The place of the last unmasked token before each one, -1 where there is none."""
    places = jnp.where(mask, jnp.arange(jnp.shape(mask)[-1]), -1)
    last = jax.lax.cummax(places, axis=places.ndim - 1)
    return jnp.concatenate([jnp.full_like(last[..., :1], -1), last[..., :-1]], axis=-1)


def last_token(mask: Array) -> Array:
    """A mask that is True at the last unmasked token of each sequence and nowhere else."""
    later = jnp.cumsum(mask[..., ::-1], axis=-1)[..., ::-1]
    return mask & (later == 1)
