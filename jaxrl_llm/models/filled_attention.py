"""Attention of a few tokens a row to the filled part of a cache, as one kernel for GPUs.

A decode step has one token a row, and its time is that of reading keys and values. Plain products
read the whole cache, write the scores and read them again; this kernel reads keys up to the last
one that a row sees, and writes outputs alone:

    m' = max(m, max s),  l' = l exp(m - m') + sum exp(s - m'),  o' = o exp(m - m') + exp(s - m') V

over blocks of keys, as in :mod:`~jaxrl_llm.models.attention_blocks`. Where rows are few, the keys
of a row are divided among several programs, whose outputs are merged.

References:
  FlashAttention (arXiv:2205.14135), Algorithm 1; its division of keys while decoding is that of
  Flash-Decoding.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.models.attention_blocks import MASKED
from jaxrl_llm.models.protocol import KV

# Keys of a block, and the least and most queries of a product on tensor cores that share them.
_KEYS = 64
_QUERIES = (16, 64)
# Programs that keep a large GPU busy.
_PROGRAMS = 256


class Grid(NamedTuple):
    """How the work is divided: blocks of queries, and parts of the keys of a row."""

    queries: int
    parts: int

    @classmethod
    def of(cls, rows: int, queries: int, keys: int) -> "Grid":
        """For ``rows`` pairs of a row and a head; a part has at least two blocks of keys."""
        block = min(max(_power(queries), _QUERIES[0]), _QUERIES[1])
        programs = rows * -(-queries // block)
        return cls(block, max(1, min(-(-_PROGRAMS // programs), keys // (2 * _KEYS))))


def _power(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def takes_width(d: int) -> bool:
    """Whether the kernel has heads of width ``d``: powers of two from 16 to 256."""
    return 16 <= d <= 256 and d == _power(d)


def _kernel(
    query_ref,
    keys_ref,
    values_ref,
    last_ref,
    mask_ref,
    output_ref,
    lse_ref,
    *,
    count: int,
    part: int,
):
    """One block of the ``count`` queries of one row and head, and one part of its keys."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    queries, d = query_ref.shape
    length, begin = keys_ref.shape[-1], pl.program_id(2) * part
    # Behind the last query a block has rows that see nothing.
    exists = pl.program_id(1) * queries + jnp.arange(queries) < count
    last = triton.load(last_ref.at[:], mask=exists, other=-1)
    query = triton.load(query_ref.at[:, :], mask=exists[:, None], other=0.0)

    def add(i, carry):
        output, top, total = carry
        start = begin + i * _KEYS
        index = start + jnp.arange(_KEYS)
        inside = index < length
        block = pl.ds(start, _KEYS)
        keys = triton.load(keys_ref.at[:, block], mask=inside[None, :], other=0.0)
        values = triton.load(values_ref.at[block, :], mask=inside[:, None], other=0.0)
        visible = index[None, :] <= last[:, None]
        if mask_ref is not None:
            kept = triton.load(mask_ref.at[block], mask=inside, other=0)
            visible = visible & (kept[None, :] > 0)
        scores = jnp.where(visible, triton.dot(query, keys), MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        # Of a query that has seen no key yet, a weight would be exp(0).
        weights = jnp.where(visible, jnp.exp(scores - higher[:, None]), 0.0)
        shrink = jnp.exp(top - higher)
        total = total * shrink + jnp.sum(weights, axis=-1)
        change = triton.dot(weights.astype(values.dtype), values)
        return output * shrink[:, None] + change, higher, total

    empty = (
        jnp.zeros((queries, d), jnp.float32),
        jnp.full(queries, MASKED, jnp.float32),
        jnp.zeros(queries, jnp.float32),
    )
    end = jnp.minimum(jnp.minimum(begin + part, length), jnp.max(last) + 1)
    blocks = jnp.maximum(end - begin + _KEYS - 1, 0) // _KEYS
    output, top, total = jax.lax.fori_loop(0, blocks, add, empty)
    total = jnp.maximum(total, 1e-30)  # where nothing is seen, top is about -1e30
    triton.store(output_ref.at[:, :], output / total[:, None], mask=exists[:, None])
    triton.store(lse_ref.at[:], top + jnp.log(total), mask=exists)


def attend_filled(
    query: Array,
    kv: KV,
    last: Array,
    mask: Array | None = None,
    *,
    grid: Grid | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Softmax attention of N queries a row and head, with its log-sum-exp, by the kernel.

    Args:
      query: ``[B, H, N, d]``, already scaled, in half precision.
      kv: Keys ``[B, H, d, S]`` and values ``[B, H, S, d]``.
      last: int32 ``[B, N]``, the last key that each query sees.
      mask: bool ``[B, S]``, which keys exist; None for all.
      grid: How the work is divided; None chooses by the shapes.
      interpret: Whether to run without a GPU, slowly.

    Returns:
      Outputs ``[B, H, N, d]`` and log-sum-exp ``[B, H, N]``, float32; about -1e30 where a query
      sees no key.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (B, H, N, d), S = query.shape, kv.keys.shape[-1]
    queries, parts = grid or Grid.of(B * H, N, S)
    part = -(-S // (parts * _KEYS)) * _KEYS
    parts = -(-S // part)
    output, lse = pl.pallas_call(
        functools.partial(_kernel, count=N, part=part),
        grid=(B * H, -(-N // queries), parts),
        in_specs=[
            pl.BlockSpec((None, None, queries, d), lambda i, j, p: (i // H, i % H, j, 0)),
            pl.BlockSpec((None, None, d, S), lambda i, j, p: (i // H, i % H, 0, 0)),
            pl.BlockSpec((None, None, S, d), lambda i, j, p: (i // H, i % H, 0, 0)),
            pl.BlockSpec((None, queries), lambda i, j, p: (i // H, j)),
            None if mask is None else pl.BlockSpec((None, S), lambda i, j, p: (i // H, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, queries, d), lambda i, j, p: (p, i // H, i % H, j, 0)),
            pl.BlockSpec((None, None, None, queries), lambda i, j, p: (p, i // H, i % H, j)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((parts, B, H, N, d), jnp.float32),
            jax.ShapeDtypeStruct((parts, B, H, N), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="attend_filled",
    )(query, kv.keys, kv.values, last, None if mask is None else mask.astype(jnp.int32))
    if parts == 1:
        return output[0], lse[0]
    top = jnp.max(lse, axis=0)
    weights = jnp.exp(lse - top)
    total = jnp.sum(weights, axis=0)
    return jnp.sum(weights[..., None] * output, axis=0) / total[..., None], top + jnp.log(total)
