"""Log-probabilities and entropies of tokens from hidden states, without the logits tensor.

The projection to the vocabulary, its log-sum-exp, the target's logit and the entropy are computed
over chunks of tokens; the backward pass computes each chunk again. Memory grows with ``chunk_size *
V`` instead of with all tokens times V.
"""

import functools

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array


def token_logprobs(
    hidden: Array,
    output_matrix: Array,
    targets: Array,
    *,
    temperature: float = 1.0,
    mask: Array | None = None,
    chunk_size: int = 256,
) -> tuple[Array, Array]:
    """Log-probability of each target and entropy of its distribution, in chunks of tokens.

    With logits ``z = hidden . output_matrix^T / temperature``:

        logp    = z[target] - log sum_v exp z_v
        entropy = log sum_v exp z_v - sum_v p_v z_v,    p = softmax(z)

    Both are differentiable in ``hidden`` and ``output_matrix``, with d logp / dz = onehot - p and
    d entropy / dz = -p (log p + entropy).

    Args:
      hidden: ``[..., T, D]`` hidden states after the last norm, any floating dtype.
      output_matrix: ``[V, D]``.
      targets: Integers ``[..., T]``; under a mask that is False they may hold anything.
      temperature: Divides the logits; above 0. The log-probabilities of a policy that was sampled
        at this temperature.
      mask: bool ``[..., T]``, True = keep. Elsewhere both results are 0, and neither hidden states
        nor targets are read.
      chunk_size: Tokens whose logits exist at one time.

    Returns:
      ``(logp, entropy)``, each ``[..., T]`` float32 (float64 for float64 hidden states), in nats.

    Raises:
      ValueError: If shapes disagree, or temperature or chunk_size is not above 0.
      TypeError: If ``targets`` are not integers or ``mask`` is not bool.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> hidden, matrix = jnp.ones((1, 2, 4)), jnp.zeros((8, 4))
      >>> logp, entropy = jr.logprobs.token_logprobs(hidden, matrix, jnp.array([[0, 7]]))
      >>> bool(jnp.allclose(logp, -jnp.log(8.0)) and jnp.allclose(entropy, jnp.log(8.0)))
      True
    """
    name = "token_logprobs"
    checks.check_min_rank(name, 2, hidden=hidden)
    checks.check_rank(name, 2, output_matrix=output_matrix)
    checks.check_integer(name, targets=targets)
    checks.check_bool(name, mask=mask)
    checks.check_shape(name, "targets", targets, hidden.shape[:-1])
    checks.check_same_shape(name, targets=targets, mask=mask)
    if hidden.shape[-1] != output_matrix.shape[-1]:
        raise ValueError(
            f"{name}: hidden {hidden.shape} and output_matrix {output_matrix.shape} must have one "
            "width."
        )
    checks.check_positive(name, temperature=temperature, chunk_size=chunk_size)
    if mask is not None:
        hidden = jnp.where(mask[..., None], hidden, 0)
        targets = jnp.where(mask, targets, 0)
    flat = hidden.reshape(-1, hidden.shape[-1])
    # Statistics in float32; in float64 only where that is what came in (checks of exactness).
    temperature = jnp.asarray(temperature, jnp.promote_types(hidden.dtype, jnp.float32))
    logp, entropy = _chunked(flat, output_matrix, targets.reshape(-1), temperature, chunk_size)
    logp, entropy = logp.reshape(targets.shape), entropy.reshape(targets.shape)
    if mask is not None:
        logp, entropy = jnp.where(mask, logp, 0.0), jnp.where(mask, entropy, 0.0)
    return logp, entropy


def _logits(hidden: Array, matrix: Array, temperature: Array) -> Array:
    product = jax.lax.dot_general(
        hidden, matrix, (((1,), (1,)), ((), ())), preferred_element_type=temperature.dtype
    )
    return product / temperature


def _over_chunks(function, carry, arrays, chunk_size: int):
    """``lax.scan`` of ``function`` over rows in chunks; the last chunk is padded with zeros."""
    rows = arrays[0].shape[0]
    chunk_size = min(chunk_size, rows)
    count = -(-rows // chunk_size)

    def split(x):
        x = jnp.pad(x, [(0, count * chunk_size - rows)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, chunk_size, *x.shape[1:])

    if count == 1:
        carry, out = function(carry, arrays)
        return carry, out
    carry, out = jax.lax.scan(function, carry, tuple(split(x) for x in arrays))
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(hidden, matrix, targets, temperature, chunk_size):
    return _forward(hidden, matrix, targets, temperature, chunk_size)[0]


def _forward(hidden, matrix, targets, temperature, chunk_size):
    def chunk(carry, rows):
        h, target = rows
        logits = _logits(h, matrix, temperature)
        top = jnp.max(logits, axis=-1)
        below = logits - top[:, None]
        weights = jnp.exp(below)
        total = jnp.sum(weights, axis=-1)
        log_sum = top + jnp.log(total)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        # Relative to the top logit: the difference of two large numbers would lose small entropies.
        entropy = jnp.log(total) - jnp.sum(weights * below, axis=-1) / total
        return carry, (chosen - log_sum, entropy, log_sum)

    _, (logp, entropy, log_sum) = _over_chunks(chunk, (), (hidden, targets), chunk_size)
    return (logp, entropy), (hidden, matrix, targets, temperature, log_sum, entropy)


def _backward(chunk_size, saved, cotangents):
    hidden, matrix, targets, temperature, log_sum, entropy = saved
    d_logp, d_entropy = cotangents

    def chunk(d_matrix, rows):
        h, target, log_sum, entropy, d_logp, d_entropy = rows
        log_p = _logits(h, matrix, temperature) - log_sum[:, None]
        p = jnp.exp(log_p)
        onehot = jax.nn.one_hot(target, matrix.shape[0], dtype=temperature.dtype)
        d_logits = d_logp[:, None] * (onehot - p)
        d_logits -= d_entropy[:, None] * p * (log_p + entropy[:, None])
        d_logits = (d_logits / temperature).astype(matrix.dtype)
        d_h = jnp.matmul(d_logits, matrix, preferred_element_type=temperature.dtype)
        d_matrix += jax.lax.dot_general(
            d_logits, h, (((0,), (0,)), ((), ())), preferred_element_type=temperature.dtype
        )
        return d_matrix, d_h.astype(h.dtype)

    rows = (hidden, targets, log_sum, entropy, d_logp, d_entropy)
    zeros = jnp.zeros(matrix.shape, temperature.dtype)
    d_matrix, d_hidden = _over_chunks(chunk, zeros, rows, chunk_size)
    return d_hidden, d_matrix.astype(matrix.dtype), None, None


_chunked.defvjp(_forward, _backward)
