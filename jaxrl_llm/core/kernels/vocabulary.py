"""Log-probability and entropy of tokens over blocks of the vocabulary, with their gradient.

Each block of words is projected for all tokens at once. The forward pass is an online softmax: its
log-sum-exp and entropy grow block by block. The backward pass computes each block of logits again.
Each pass reads a row of the output matrix once, and the gradient of a row is written once. Tokens
are never split: on a mesh every device keeps its slice.

The vocabulary is viewed as ``[stripes, words]``, and a block takes some words of every stripe. If
the rows of the matrix are split over devices, every block is split too.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.products import sum_over_rows
from jaxrl_llm.core.kernels.soft_cap import soft_cap, soft_cap_slope
from jaxrl_llm.core.support import Support

# Where a running maximum starts: finite, so that the difference of two maxima is not NaN.
_LOWEST = -1e30
# Rows can be split over this many devices. On CPUs, sums over the shorter rows are faster, too.
_STRIPES = 16
# Minimum words of a block per dimension of the hidden states. Every block reads and writes the
# gradient of all hidden states; for narrower blocks that would take longer than the product.
_WORDS_PER_WIDTH = 2
# Minimum words of a block in each stripe.
_NARROWEST = 8


def block_words(vocab_size: int, tokens: int, width: int, chunk_size: int) -> int:
    """Number of words per block, from the number of tokens and the width of the hidden states."""
    stripes = math.gcd(vocab_size, _STRIPES)
    wanted = max(chunk_size * vocab_size // max(tokens, 1), _WORDS_PER_WIDTH * width)
    return min(vocab_size, stripes * max(wanted // stripes, _NARROWEST))


class _Blocks:
    """The blocks of the output matrix ``[V, D]``, for a number of tokens."""

    def __init__(self, matrix: Array, tokens: int, chunk_size: int):
        vocab_size = matrix.shape[0]
        self.stripes = math.gcd(vocab_size, _STRIPES)
        self.words = vocab_size // self.stripes
        self.matrix = matrix.reshape(self.stripes, self.words, -1)
        self.width = block_words(vocab_size, tokens, matrix.shape[1], chunk_size) // self.stripes

    def over(self, function: Callable, carry):
        """``carry = function(carry, first, width)`` for the blocks of words ``first:first+width``.

        The narrower last block comes first: code after a loop cannot write to the loop's buffer.
        """
        count, rest = divmod(self.words, self.width)
        if rest:
            carry = function(carry, count * self.width, rest)
        if count == 1:
            return function(carry, 0, self.width)
        starts = self.width * jnp.arange(count)
        return jax.lax.scan(lambda c, s: (function(c, s, self.width), None), carry, starts)[0]

    def rows(self, first, width: int) -> Array:
        """The part of the matrix for a block: ``[stripes * width, D]``."""
        block = jax.lax.dynamic_slice_in_dim(self.matrix, first, width, axis=1)
        return block.reshape(self.stripes * width, -1)

    def columns(self, ids: Array, first, width: int) -> Array:
        """The columns of ids in a block; ``stripes * width`` for ids outside of it."""
        stripe, word = jnp.divmod(ids, self.words)
        inside = (word >= first) & (word < first + width) & (ids >= 0) & (stripe < self.stripes)
        return jnp.where(inside, stripe * width + word - first, self.stripes * width)

    def allowed(self, support: Support, first, width: int) -> Array:
        """Which words of a block are in the sets of the tokens: bool ``[N, stripes * width]``."""
        if support.ids is not None:
            columns = self.columns(support.ids, first, width)
            allowed = jnp.zeros((len(columns), self.stripes * width), bool)
            allowed = allowed.at[jnp.arange(len(columns))[:, None], columns].set(True, mode="drop")
            known = (support.ids >= 0) & (support.ids < self.stripes * self.words)
        else:
            stripe = self.words * jnp.arange(self.stripes)[:, None]
            ids = (stripe + first + jnp.arange(width)).reshape(-1)
            shift = (ids % 32).astype(jnp.uint32)
            allowed = ((jnp.take(support.bits, ids // 32, axis=1) >> shift) & 1).astype(bool)
            known = support.bits != 0
        return allowed | ~jnp.any(known, axis=-1, keepdims=True)  # an empty set keeps all words


def scaled_logits(hidden: Array, rows: Array, temperature: Array, cap: float | None) -> Array:
    """``soft_cap(hidden rows^T, cap) / temperature``, in the dtype of the temperature."""
    product = jax.lax.dot_general(
        hidden, rows, (((1,), (1,)), ((), ())), preferred_element_type=temperature.dtype
    )
    return soft_cap(product, cap) / temperature


def log_normalizer(logits: Array) -> tuple[Array, Array]:
    """``(top, log_total)`` of logits ``[..., V]``, whose sum is their log-sum-exp; each ``[...]``.

    A log-probability is ``(logit - top) - log_total``. Subtracting the sum of the two would round
    at the size of the logits: at logits near 1,000 by 3e-5, more than many log-probabilities.

    Example:
      >>> import jax.numpy as jnp
      >>> top, log_total = log_normalizer(jnp.array([1000.0, 989.0]))
      >>> round(float((1000.0 - top) - log_total), 6)
      -1.7e-05
    """
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    return top, jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def logp_and_entropy(hidden, matrix, targets, support, temperature, chunk_size, cap):
    """Logp and entropy of targets ``[N]`` for states ``[N, D]``; see ``logprobs.token_logprobs``.

    Args:
      hidden: ``[N, D]``.
      matrix: ``[V, D]``.
      targets: Integers ``[N]``.
      support: Sets of the N tokens, or None.
      temperature: ``[]`` in the dtype of the results.
      chunk_size: Memory bound: the logits of at most this many tokens exist at once; see
        :func:`block_words`.
      cap: Soft cap of the logits before the temperature divides them, or None.

    Returns:
      ``(logp, entropy)``, each ``[N]``; logp of a target outside the vocabulary is NaN.
    """
    return _forward(hidden, matrix, targets, support, temperature, chunk_size, cap)[0]


def _at_column(logits: Array, column: Array) -> Array:
    """The logit ``[N]`` of each row ``[N, W]`` in one column; any number beyond the last one."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jnp.take_along_axis(logits, column[:, None], axis=1, mode="clip")[:, 0]
    # In a shard_map over one axis of a mesh, XLA ends the process on a gather along the vocabulary
    # that another axis splits; the sum takes one more pass over the logits.
    here = jnp.arange(logits.shape[1]) == column[:, None]
    return jnp.sum(jnp.where(here, logits, 0.0), axis=1)


def _merged(top, total, mean, higher):
    """Converts sums over ``exp(z - top)`` to sums over ``exp(z - higher)``."""
    moved = top - higher
    shrink = jnp.exp(moved)
    return shrink * total, shrink * (mean + moved * total)


def _forward(hidden, matrix, targets, support, temperature, chunk_size, cap):
    tokens = len(hidden)
    blocks = _Blocks(matrix, tokens, chunk_size)

    def block(carry, first, width):
        top, total, mean, chosen = carry
        logits, allowed = scaled_logits(hidden, blocks.rows(first, width), temperature, cap), True
        if support is not None:
            allowed = blocks.allowed(support, first, width)
            logits = jnp.where(allowed, logits, -jnp.inf)
            allowed = allowed.reshape(tokens, blocks.stripes, width)
        column = blocks.columns(targets, first, width)
        at_target = _at_column(logits, column)
        chosen = jnp.where(column < blocks.stripes * width, at_target, chosen)
        # One sum per stripe: stripes may lie on several devices and merge after the last block.
        logits = logits.reshape(tokens, blocks.stripes, width)
        higher = jnp.maximum(top, jnp.max(logits, axis=-1))
        # Relative to the top: the difference of two large numbers would lose small entropies.
        below = logits - higher[..., None]
        weights = jnp.exp(below)
        total, mean = _merged(top, total, mean, higher)
        total += jnp.sum(weights, axis=-1)
        mean += jnp.sum(weights * jnp.where(allowed, below, 0.0), axis=-1)
        return higher, total, mean, chosen

    zeros = jnp.zeros((tokens, blocks.stripes), temperature.dtype)
    top, total, mean, chosen = blocks.over(
        block, (zeros + _LOWEST, zeros, zeros, jnp.full_like(zeros[:, 0], jnp.nan))
    )
    higher = jnp.max(top, axis=-1, keepdims=True)
    total, mean = (jnp.sum(x, axis=-1) for x in _merged(top, total, mean, higher))
    top, log_total = higher[:, 0], jnp.log(total)
    entropy = log_total - mean / total
    saved = (hidden, matrix, targets, support, temperature, top, log_total, entropy)
    # Subtract the top first: top + log_total would round at the size of the logits.
    return ((chosen - top) - log_total, entropy), saved


def _backward(chunk_size, cap, saved, cotangents):
    hidden, matrix, targets, support, temperature, *statistics = saved
    top, log_total, entropy, d_logp, d_entropy = (x[:, None] for x in (*statistics, *cotangents))
    blocks = _Blocks(matrix, len(hidden), chunk_size)

    def block(carry, first, width):
        d_hidden, d_matrix = carry
        rows = blocks.rows(first, width)
        logits = scaled_logits(hidden, rows, temperature, cap)
        log_p = (logits - top) - log_total
        column = blocks.columns(targets, first, width)
        chosen = jnp.arange(blocks.stripes * width) == column[:, None]
        d_logits = jnp.where(chosen, d_logp, 0.0)
        d_logits -= jnp.exp(log_p) * (d_logp + d_entropy * (log_p + entropy))
        if support is not None:
            d_logits = jnp.where(blocks.allowed(support, first, width), d_logits, 0.0)
        if cap is not None:
            d_logits *= soft_cap_slope(logits * temperature, cap)
        d_logits = (d_logits / temperature).astype(matrix.dtype)
        d_hidden += jnp.matmul(d_logits, rows, preferred_element_type=temperature.dtype)
        d_rows = sum_over_rows(d_logits, hidden, dtype=temperature.dtype)
        d_rows = d_rows.astype(matrix.dtype).reshape(blocks.stripes, width, -1)
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_matrix, d_rows, first, axis=1)

    zeros = (jnp.zeros(hidden.shape, temperature.dtype), jnp.zeros_like(blocks.matrix))
    d_hidden, d_matrix = blocks.over(block, zeros)
    return d_hidden.astype(hidden.dtype), d_matrix.reshape(matrix.shape), None, None, None


logp_and_entropy.defvjp(_forward, _backward)
