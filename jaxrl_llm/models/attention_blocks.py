"""Softmax attention in blocks of queries and of keys, whose memory is linear in both.

For a block of queries, the blocks of keys with scores s change a running maximum m, total l and
output o to

    m' = max(m, max s),  l' = l exp(m - m') + sum exp(s - m'),  o' = o exp(m - m') + exp(s - m') V

and after the last block the output is o / l and the log-sum-exp is m + log l. The backward pass
stores the inputs, the output and the log-sum-exp, and computes the scores of each block again:

    p = exp(s - lse),  ds = p (do V^T - do . o + dlse)
    dQ = ds K^T,  dK = Q^T ds,  dV = p^T do

References:
  Rabe and Staats (arXiv:2112.05682); FlashAttention (arXiv:2205.14135), Algorithms 1 and 4.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.barriers import always
from jaxrl_llm.core.kernels.products import sum_of_products
from jaxrl_llm.core.kernels.soft_cap import soft_cap, soft_cap_slope
from jaxrl_llm.models.protocol import KV

# Finite, so that a query without any key gets a weight of zero in a merge and not a NaN.
MASKED = -1e30


class Seen(NamedTuple):
    """Which keys queries see; a field of None excludes none.

    The leading axes of all fields may be missing or 1.

    Attributes:
      last: int32 ``[..., N]``, the last key that each query sees.
      ids: ``[..., N]``, ids of the queries; a query sees the keys with its id.
      first: int32 ``[..., N]``, the position of the first key that each query sees.
      mask: bool ``[..., S]``, which keys exist.
      key_ids: ``[..., S]``, ids of the keys; required with ``ids``.
      ends: int32 ``[..., S]``, the first value of ``last`` that does not see a key; used with
        ``last``.
      places: int32 ``[..., S]``, positions of the keys; required with ``first``.
    """

    last: Array | None = None
    ids: Array | None = None
    first: Array | None = None
    mask: Array | None = None
    key_ids: Array | None = None
    ends: Array | None = None
    places: Array | None = None

    def visible(self, keys: Array) -> Array | None:
        """Whether each query sees each key, by the indices of the keys: bool ``[..., N, S]``."""
        masks = []
        if self.last is not None:
            masks.append(keys <= self.last[..., None])
            if self.ends is not None:
                masks.append(self.last[..., None] < self.ends[..., None, :])
        if self.mask is not None:
            masks.append(self.mask[..., None, :])
        if self.ids is not None and self.key_ids is not None:
            masks.append(self.ids[..., None] == self.key_ids[..., None, :])
        if self.first is not None and self.places is not None:
            masks.append(self.places[..., None, :] >= self.first[..., None])
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def of_queries(self, start: Array, size: int) -> "Seen":
        """The fields for a block of queries."""
        return self._part(("last", "ids", "first"), start, size)

    def of_keys(self, start: Array, size: int) -> "Seen":
        """The fields for a block of keys."""
        return self._part(("mask", "key_ids", "ends", "places"), start, size)

    def _part(self, names: tuple[str, ...], start: Array, size: int) -> "Seen":
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        return self._replace(**{name: _slice(x, start, size, -1) for name, x in given.items()})


class Sizes(NamedTuple):
    """Numbers of queries and of keys in a block."""

    queries: int
    keys: int


def attend_in_blocks(
    query: Array, kv: KV, seen: Seen, *, cap: float | None, sizes: Sizes
) -> tuple[Array, Array]:
    """Attention to one set of keys, with its log-sum-exp; see ``attention.attend_set``.

    A block of keys that no query of a block can see by ``last``, of one axis, costs nothing.

    Args:
      query: ``[..., N, d]``, already scaled.
      kv: Keys ``[..., d, S]`` and values ``[..., S, d]``, with the leading axes of the queries.
      seen: Which keys queries see.
      cap: Soft cap of the scores, if any.
      sizes: Sizes of a block, which need not divide N and S.

    Returns:
      Outputs ``[..., N, d]`` and log-sum-exp ``[..., N]``, float32.
    """
    N, S = query.shape[-2], kv.values.shape[-2]
    return _attend(query, kv, seen, cap, Sizes(min(sizes.queries, N), min(sizes.keys, S)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(
    query: Array, kv: KV, seen: Seen, cap: float | None, sizes: Sizes
) -> tuple[Array, Array]:
    """:func:`attend_in_blocks` with blocks that are not larger than the inputs."""
    lead, count, width = query.shape[:-2], sizes.queries, kv.values.shape[-1]

    def of_queries(start: Array, _: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        rows, seen_by_rows = _slice(query, start, count, -2), seen.of_queries(start, count)

        def of_keys(begin: Array, fresh: Array, state: tuple[Array, Array, Array]):
            top, total, output = state
            block = _block(kv, begin, sizes.keys)
            scores = _scores(rows, block, seen_by_rows, begin, fresh, cap)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights, shrunk = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            output = output * shrunk[..., None] + _product(
                weights, block.values, block.values.dtype
            )
            return new_top, total * shrunk + jnp.sum(weights, axis=-1), output

        empty = jnp.full((*lead, count), MASKED), jnp.zeros((*lead, count))
        state = (*empty, jnp.zeros((*lead, count, width)))
        top, total, output = _over_keys(of_keys, state, kv, seen_by_rows, sizes)
        outputs, logs = results
        return (
            _put(outputs, output / total[..., None], start, -2),
            _put(logs, top + jnp.log(total), start, -1),
        )

    results = (
        _zeros((*query.shape[:-1], width), after=query),
        _zeros(query.shape[:-1], after=query),
    )
    return _over(of_queries, results, query.shape[-2], count)


def _forward(query: Array, kv: KV, seen: Seen, cap: float | None, sizes: Sizes):
    output, lse = _attend(query, kv, seen, cap, sizes)
    return (output, lse), (query, kv, seen, output, lse)


def _backward(cap: float | None, sizes: Sizes, stored, cotangents):
    """Gradients of queries, keys and values; the formulas are those of the module."""
    query, kv, seen, output, lse = stored
    d_output, d_lse = cotangents
    pull = sum_of_products(d_output, output) - d_lse
    count = sizes.queries

    def of_queries(start: Array, fresh: Array, grads: tuple[Array, KV]) -> tuple[Array, KV]:
        d_query, d_kv = grads
        # The last block begins among queries of the block before it, which count only once.
        new = (start + jnp.arange(count) >= fresh)[:, None]
        rows, seen_by_rows = _slice(query, start, count, -2), seen.of_queries(start, count)
        d_rows = jnp.where(new, _slice(d_output, start, count, -2), 0.0)
        lse_rows = _slice(lse, start, count, -1)
        pull_rows = jnp.where(new[:, 0], _slice(pull, start, count, -1), 0.0)

        def of_keys(begin: Array, fresh: Array, grads: tuple[Array, KV]) -> tuple[Array, KV]:
            d_rows_query, d_kv = grads
            block = _block(kv, begin, sizes.keys)
            scores = _scores(rows, block, seen_by_rows, begin, fresh, cap)
            added, of_block = gradients_of_scores(
                rows, block, scores, lse_rows, d_rows, pull_rows, cap
            )
            return d_rows_query + added, KV(
                _add(d_kv.keys, of_block.keys, begin, -1),
                _add(d_kv.values, of_block.values, begin, -2),
            )

        state = jnp.zeros(rows.shape), d_kv
        part, d_kv = _over_keys(of_keys, state, kv, seen_by_rows, sizes)
        old = _slice(d_query, start, count, -2)
        return _put(d_query, jnp.where(new, part, old), start, -2), d_kv

    grads = _zeros(query.shape, after=pull), KV(*(_zeros(x.shape, after=pull) for x in kv))
    d_query, d_kv = _over(of_queries, grads, query.shape[-2], count)
    d_kv = jax.tree.map(lambda x, d: d.astype(x.dtype), kv, d_kv)
    return d_query.astype(query.dtype), d_kv, None


_attend.defvjp(_forward, _backward)


def gradients_of_scores(
    query: Array,
    kv: KV,
    scores: Array,
    lse: Array,
    d_output: Array,
    pull: Array,
    cap: float | None,
) -> tuple[Array, KV]:
    """The backward pass of the module for queries ``[..., N, d]`` and keys whose scores are known.

    Args:
      query, kv: As in :func:`attend_in_blocks`.
      scores: ``[..., N, S]`` after the cap, ``MASKED`` where a query does not see a key.
      lse: ``[..., N]``, log-sum-exp of the scores of all keys.
      d_output: ``[..., N, d]``.
      pull: ``[..., N]``, ``d_output . output - d_lse``.
      cap: Soft cap of the scores, if any.

    Returns:
      The gradients of the queries, and of keys and values, all float32.
    """
    dtype = kv.values.dtype
    weights = jnp.where(scores > MASKED, jnp.exp(scores - lse[..., None]), 0.0)
    d_scores = weights * (_product(d_output, _swap(kv.values), dtype) - pull[..., None])
    if cap is not None:
        d_scores *= jnp.where(scores > MASKED, soft_cap_slope(scores, cap), 0.0)
    d_kv = KV(_product(_swap(query), d_scores, dtype), _product(_swap(weights), d_output, dtype))
    return _product(d_scores, _swap(kv.keys), dtype), d_kv


def _scores(
    rows: Array, block: KV, seen: Seen, begin: Array, fresh: Array, cap: float | None
) -> Array:
    """Scores of a block ``[..., queries, keys]``, ``MASKED`` where a query does not see a key.

    The last block of keys begins among those of the block before it, below ``fresh``.
    """
    size = block.keys.shape[-1]
    scores = soft_cap(_product(rows, block.keys, block.keys.dtype), cap)
    keys = begin + jnp.arange(size)
    visible, new = seen.of_keys(begin, size).visible(keys), keys >= fresh
    return jnp.where(new if visible is None else visible & new, scores, MASKED)


def _over(function: Callable, state, count: int, size: int, steps: Array | None = None):
    """The state after ``function(start, fresh, state)`` for each block of ``size`` of ``count``.

    All blocks have one size, so the last one may begin below ``fresh``, the end of those before it.
    """
    every = -(-count // size)
    if every == 1:
        return function(jnp.int32(0), jnp.int32(0), state)

    def one(i: Array, state):
        return function(jnp.minimum(i * size, count - size), i * size, state)

    return jax.lax.fori_loop(0, every if steps is None else steps, one, state)


def _over_keys(function: Callable, state, kv: KV, seen: Seen, sizes: Sizes):
    """:func:`_over` for the blocks of keys up to the last key that a block of queries sees."""
    count, steps = kv.values.shape[-2], None
    if seen.last is not None and seen.last.ndim == 1:
        steps = jnp.clip(jnp.max(seen.last) // sizes.keys + 1, 1, -(-count // sizes.keys))
    return _over(function, state, count, sizes.keys, steps)


def _zeros(shape: tuple[int, ...], *, after: Array) -> Array:
    """Zeros that are not made before ``after``.

    XLA's compiler for CPUs would make those of all layers before the first layer and keep them.
    """
    if jax.default_backend() != "cpu":
        return jnp.zeros(shape)
    return jnp.broadcast_to(jnp.where(always(after), 0.0, 1.0), shape)


def _product(a: Array, b: Array, dtype: jax.typing.DTypeLike) -> Array:
    """The product of two matrices in a dtype, summed in float32."""
    return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def _swap(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _block(kv: KV, start: Array, size: int) -> KV:
    return KV(_slice(kv.keys, start, size, -1), _slice(kv.values, start, size, -2))


def _slice(x: Array, start: Array, size: int, axis: int) -> Array:
    """A slice of ``size``, the array itself if that is all of the axis."""
    if x.shape[axis] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def _put(x: Array, part: Array, start: Array, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=axis)


def _add(x: Array, part: Array, start: Array, axis: int) -> Array:
    return _put(x, _slice(x, start, part.shape[axis], axis) + part, start, axis)
