"""Attention of one token a row to its prompt and its cache, as one kernel for GPUs.

A decode step has one token a row, and its time is that of reading keys and values. Plain products
read the whole cache, write the scores and read them again, and write the keys of the new token by
a scatter; this kernel reads keys up to the last one, and writes outputs and the new keys alone:

    m' = max(m, max s),  l' = l exp(m - m') + sum exp(s - m'),  o' = o exp(m - m') + exp(s - m') V

over blocks of keys, from ``m = s``, ``l = 1`` and ``o = v`` of the new token. Some of its programs
have a prompt and the queries of a whole group, whose keys are read once; the others have a row.
Where programs are few, keys are divided among several, and all outputs are merged at the end.

References:
  FlashAttention (arXiv:2205.14135), Algorithm 1; its division of keys while decoding is that of
  Flash-Decoding. Keys that a group shares are read once as in Hydragen (arXiv:2402.05099).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.models.attention_blocks import MASKED
from jaxrl_llm.models.protocol import KV

# Keys of a block, and the least and most queries of a product on tensor cores.
_KEYS = 64
_QUERIES = (16, 64)
# Programs of each kind that keep a large GPU busy, and the most that share the keys of a row.
_PROGRAMS, _PARTS = 256, 8


class Grid(NamedTuple):
    """How the work is divided.

    Attributes:
      keys: Keys of a block.
      queries: Queries of a block, of a group to its prompt; at least those of a key head.
      prompt_parts: Programs that share the keys of a prompt; 0 without prompts.
      row_parts: Programs that share the keys of a row.
      warps, stages: Of a program, and of the reading of its blocks.
    """

    keys: int
    queries: int
    prompt_parts: int
    row_parts: int
    warps: int = 4
    stages: int = 3

    @classmethod
    def of(cls, query: Array, cache: KV, prefix: KV | None) -> "Grid":
        """By the shapes; a part has at least two blocks of keys."""
        (P, G, heads, d), kv_heads = query.shape, cache.keys.shape[2]
        queries = min(max(_power(G * heads // kv_heads), _QUERIES[0]), _QUERIES[1])

        def parts(programs: int, length: int) -> int:
            return max(1, min(-(-_PROGRAMS // programs), length // (2 * _KEYS), _PARTS))

        of_prompts = 0
        if prefix is not None:
            blocks = -(-(G * heads // kv_heads) // queries)
            of_prompts = parts(P * kv_heads * blocks, prefix.keys.shape[-1])
        of_rows = parts(P * G * kv_heads, cache.keys.shape[-1])
        # Blocks of wider heads would not fit into the shared memory of a program three times.
        return cls(_KEYS, queries, of_prompts, of_rows, stages=3 if d <= 128 else 2)


def _power(n: int) -> int:
    """The least power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def takes_kernel(query: Array, cache: KV) -> bool:
    """Whether the kernel serves queries ``[..., Hq, d]`` and this device.

    It takes half precision and heads of a width of 16 to 256 that is a power of two, on one GPU of
    NVIDIA's Hopper generation, where it was measured. Others have less memory for its blocks, and
    the compiler cannot divide it among several.
    """
    (heads, d), kv_heads = query.shape[-2:], cache.keys.shape[-3]
    half = query.dtype in (jnp.bfloat16, jnp.float16) and query.dtype == cache.keys.dtype
    fits = 16 <= d <= 256 and d == _power(d) and heads // kv_heads <= _QUERIES[0]
    return half and fits and len(jax.devices()) == 1 and _has_triton()


def _has_triton() -> bool:
    """Whether programs run on a GPU for which JAX compiles the kernel."""
    if jax.default_backend() != "gpu":
        return False
    # "9.0"; that of AMD's is a name such as "gfx942".
    major = getattr(jax.devices()[0], "compute_capability", "").partition(".")[0]
    if major != "9":
        return False
    try:
        from jax.experimental.pallas import triton

        # Before JAX 0.11 any kind is known.
        getattr(triton, "get_gpu_info", dict)()
    except (ImportError, ValueError):  # JAX without this backend, or a GPU that it does not know
        return False
    return True


class _Softmax(NamedTuple):
    """Of some queries ``[N]``: the output ``[N, d]`` so far, not divided, and its m and l."""

    output: Array
    top: Array
    total: Array


class _Refs(NamedTuple):
    """The arrays of the kernel: arguments of :func:`decode_attention`, then what it writes."""

    query: Any
    new_keys: Any
    new_values: Any
    index: Any
    keys: Any
    values: Any
    keys_out: Any
    values_out: Any
    output: Any
    lse: Any


class _Prompts(NamedTuple):
    """Those of the prompts; ``length`` is the number of keys up to the last one that exists."""

    keys: Any
    values: Any
    mask: Any
    length: Any


def _kernel(*refs, grid: Grid):
    """One program: a part of the keys of a prompt, or of those of a row."""
    from jax.experimental import pallas as pl

    *prompts, refs = *refs[: -len(_Refs._fields)], _Refs(*refs[-len(_Refs._fields) :])
    program, of_prompts = pl.program_id(0), 0
    if prompts:
        of_prompts = _prompt_programs(refs.query.shape, refs.keys.shape[2], grid)
        pl.when(program < of_prompts)(lambda: _read_prompt(refs, _Prompts(*prompts), program, grid))
    pl.when(program >= of_prompts)(lambda: _read_row(refs, program - of_prompts, grid))


def _prompt_programs(shape: tuple[int, ...], kv_heads: int, grid: Grid) -> int:
    """How many programs read prompts, for queries ``[P, G, Hq, d]``."""
    P, G, heads, _ = shape
    return P * kv_heads * -(-(G * heads // kv_heads) // grid.queries) * grid.prompt_parts


def _read_prompt(refs: _Refs, prompts: _Prompts, program: Array, grid: Grid) -> None:
    """A block of the queries of a group, and a part of the keys of its prompt."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (_, G, heads, d), kv_heads, L = refs.query.shape, refs.keys.shape[2], prompts.keys.shape[-1]
    count = G * heads // kv_heads
    rest, part = _divide(program, grid.prompt_parts)
    rest, block = _divide(rest, -(-count // grid.queries))
    p, head = _divide(rest, kv_heads)
    n = block * grid.queries + jnp.arange(grid.queries)
    g, r = _divide(n, heads // kv_heads)
    exists, place = n < count, (p, g, head * (heads // kv_heads) + r)

    def visible(start):
        at_mask = prompts.mask.at[p, pl.ds(start, grid.keys)]
        if L % grid.keys == 0:
            return triton.load(at_mask) > 0
        inside = start + jnp.arange(grid.keys) < L
        return triton.load(at_mask, mask=inside, other=0) > 0

    begin = part * _part(L, grid.prompt_parts, grid.keys)
    end = begin + _part(L, grid.prompt_parts, grid.keys)
    found = _attend_keys(
        triton.load(_rows_of(refs.query, *place), mask=exists[:, None], other=0.0),
        _empty(grid.queries, d),
        begin,
        jnp.minimum(end, triton.load(prompts.length.at[p])),
        read_kv=_reader(prompts.keys, prompts.values, (p, head), grid.keys),
        size=grid.keys,
        visible=visible,
    )
    _write(refs, part, place, exists, found)


def _read_row(refs: _Refs, program: Array, grid: Grid) -> None:
    """The queries of a key head and a part of the keys of a row; the first has the new token."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (_, G, heads, d), kv_heads, S = refs.query.shape, refs.keys.shape[2], refs.keys.shape[-1]
    rest, part = _divide(program, grid.row_parts)
    rest, head = _divide(rest, kv_heads)
    p, g = _divide(rest, G)
    r, every = jnp.arange(_QUERIES[0]), slice(None)
    exists, place = r < heads // kv_heads, (p, g, head * (heads // kv_heads) + r)
    query = triton.load(_rows_of(refs.query, *place), mask=exists[:, None], other=0.0)
    index = jnp.minimum(triton.load(refs.index.at[p, g]), S - 1)
    key = triton.load(refs.new_keys.at[p, g, head, every])
    value = triton.load(refs.new_values.at[p, g, head, every])
    first = part == 0

    @pl.when(first)
    def put():
        triton.store(refs.keys_out.at[p, g, head, every, index], key)
        triton.store(refs.values_out.at[p, g, head, index, every], value)

    score = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32)[None, :], axis=-1)
    none = _empty(_QUERIES[0], d)
    begun = _Softmax(
        none.output + jnp.where(first, value.astype(jnp.float32), 0.0)[None, :],
        jnp.where(first, score, MASKED),
        jnp.where(first, jnp.ones_like(none.total), 0.0),
    )
    begin = part * _part(S, grid.row_parts, grid.keys)
    end = begin + _part(S, grid.row_parts, grid.keys)
    found = _attend_keys(
        query,
        begun,
        begin,
        jnp.minimum(end, index),
        read_kv=_reader(refs.keys, refs.values, (p, g, head), grid.keys),
        size=grid.keys,
        visible=lambda start: start + jnp.arange(grid.keys) < index,
    )
    _write(refs, grid.prompt_parts + part, place, exists, found)


def _attend_keys(query, so_far: _Softmax, begin, end, *, read_kv, size: int, visible) -> _Softmax:
    """Adds the keys from ``begin`` to ``end``, ``size`` at a time.

    ``read_kv(start)`` gives a block of keys ``[d, size]`` and of values ``[size, d]``, and
    ``visible(start)`` which of them are seen, ``[size]``.
    """
    from jax.experimental.pallas import triton

    def add(i, so_far):
        output, top, total = so_far
        start = begin + i * size
        keys, values = read_kv(start)
        seen = visible(start)[None, :]
        scores = jnp.where(seen, triton.dot(query, keys), MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        # Of a query that has seen no key yet, a weight would be exp(0).
        weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0)
        shrink = jnp.exp(top - higher)
        change = triton.dot(weights.astype(values.dtype), values)
        return _Softmax(
            output * shrink[:, None] + change, higher, total * shrink + jnp.sum(weights, axis=-1)
        )

    return jax.lax.fori_loop(0, jnp.maximum(end - begin + size - 1, 0) // size, add, so_far)


def _empty(queries: int, d: int) -> _Softmax:
    zeros = jnp.zeros(queries, jnp.float32)
    return _Softmax(jnp.zeros((queries, d), jnp.float32), zeros + MASKED, zeros)


def _reader(keys, values, place: tuple, size: int) -> Callable:
    """Reads blocks of the keys and values of one place; what is behind their end is 0."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    length, every = keys.shape[-1], slice(None)

    def read_kv(start):
        block = pl.ds(start, size)
        at_keys, at_values = keys.at[(*place, every, block)], values.at[(*place, block, every)]
        if length % size == 0:  # no block is cut
            return triton.load(at_keys), triton.load(at_values)
        inside = start + jnp.arange(size) < length
        return (
            triton.load(at_keys, mask=inside[None, :], other=0.0),
            triton.load(at_values, mask=inside[:, None], other=0.0),
        )

    return read_kv


def _rows_of(ref, *place):
    """The rows ``[N, d]`` of an array; the last index is an array ``[N]``, others may be numbers.

    All indices are arrays ``[N, d]``: interpreted kernels take arrays and slices only apart.
    """
    columns = jnp.arange(ref.shape[-1])[None, :]
    rows = [jnp.broadcast_to(i, place[-1].shape)[:, None] for i in place]
    return ref.at[tuple(jnp.broadcast_arrays(*rows, columns))]


def _write(refs: _Refs, part, place: tuple, exists, found: _Softmax) -> None:
    from jax.experimental.pallas import triton

    total = jnp.maximum(found.total, 1e-30)  # where nothing is seen, top is about -1e30
    at_output = _rows_of(refs.output, part, *place)
    triton.store(at_output, found.output / total[:, None], mask=exists[:, None])
    at_lse = refs.lse.at[tuple(jnp.broadcast_to(i, exists.shape) for i in (part, *place))]
    triton.store(at_lse, found.top + jnp.log(total), mask=exists)


def _part(length: int, parts: int, block: int) -> int:
    """Keys of each part, whole blocks."""
    return -(-length // (parts * block)) * block


def _divide(n: Array, size: int) -> tuple[Array, Array]:
    """Quotient and remainder of what is not negative."""
    size = jnp.full_like(n, size)
    return jax.lax.div(n, size), jax.lax.rem(n, size)


def decode_attention(
    query: Array,
    new: KV,
    cache: KV,
    index: Array,
    *,
    prefix: KV | None = None,
    prefix_mask: Array | None = None,
    grid: Grid | None = None,
    interpret: bool = False,
) -> tuple[Array, KV]:
    """Attention of one token a row to its prompt, its cache and itself, by the kernel.

    Args:
      query: ``[P, G, Hq, d]``, already scaled, in half precision.
      new: Keys and values of the token, ``[P, G, Hk, d]``.
      cache: Keys ``[P, G, Hk, d, S]`` and values ``[P, G, Hk, S, d]``. Given away.
      index: int32 ``[P, G]``, the place of the token in its cache; it sees those before it.
      prefix: Keys ``[P, Hk, d, L]`` and values ``[P, Hk, L, d]`` of the prompts, if any.
      prefix_mask: bool ``[P, L]``, which of them exist.
      grid: How the work is divided; None chooses by the shapes.
      interpret: Whether to run without a GPU, slowly.

    Returns:
      Outputs ``[P, G, Hq, d]``, float32, and the cache with the new keys and values.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (P, G, heads, d), kv_heads = query.shape, cache.keys.shape[2]
    if prefix is None or prefix_mask is None:
        prefix = prefix_mask = None
    grid = grid or Grid.of(query, cache, prefix)
    of_prompts, programs = (), P * G * kv_heads * grid.row_parts
    if prefix is not None and prefix_mask is not None:
        L = prefix_mask.shape[-1]
        length = jnp.max(jnp.where(prefix_mask, jnp.arange(L) + 1, 0), axis=-1)
        of_prompts = (*prefix, prefix_mask.astype(jnp.int32), length.astype(jnp.int32))
        programs += _prompt_programs(query.shape, kv_heads, grid)
    parts, first = grid.prompt_parts + grid.row_parts, len(of_prompts) + 4
    keys, values, output, lse = pl.pallas_call(
        functools.partial(_kernel, grid=grid),
        grid=(programs,),
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache),
            jax.ShapeDtypeStruct((parts, P, G, heads, d), jnp.float32),
            jax.ShapeDtypeStruct((parts, P, G, heads), jnp.float32),
        ],
        input_output_aliases={first: 0, first + 1: 1},
        compiler_params=triton.CompilerParams(num_warps=grid.warps, num_stages=grid.stages),
        interpret=interpret,
        name="decode_attention",
    )(*of_prompts, query, *new, index.astype(jnp.int32), *cache)
    return _merge_parts(output, lse), KV(keys, values)


def _merge_parts(output: Array, lse: Array) -> Array:
    """Attention to all parts from outputs ``[N, ..., d]`` and log-sum-exp ``[N, ...]`` of each.

    Written out, so that it is one elementwise kernel.
    """
    top = functools.reduce(jnp.maximum, lse)
    weights = [jnp.exp(x - top) for x in lse]
    total = sum(weights)
    return sum((w / total)[..., None] * x for w, x in zip(weights, output, strict=True))
