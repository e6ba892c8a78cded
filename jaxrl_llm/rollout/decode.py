"""Filling slots with keys and values, and decoding new tokens in them.

The last prompt token is the first input of every response, in sampling as in training. So a row's
prefix holds all prompt tokens but the last, and entry ``t`` of a slot's cache belongs to the input
from which response token ``t`` is predicted. Known tokens are read ``block`` at a time: one program
then serves every length, and no array grows with the square of a length.

All functions take the model, its parameters and the slots, and return slots. ``deltas`` are
low-rank deltas with a leading axis ``[N]``, and each row takes one; or None. ``rows`` are
int32 ``[S, k]``, distinct; see :mod:`~jaxrl_llm.rollout.slots`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.kernels.soft_cap import soft_cap
from jaxrl_llm.models.protocol import AttentionContext, Cache, Model, empty_cache
from jaxrl_llm.rollout.compaction import rows_for
from jaxrl_llm.rollout.slots import (
    Slots,
    advance,
    expand_mask,
    put_rows,
    put_slots,
    take_rows,
    take_slots,
)


class RowDeltas(NamedTuple):
    """Deltas in the order of the rows, so that no row needs a copy of its factors.

    Factors are ``[R / k, in, r]``, each for k consecutive rows, and scales ``[N, ...]``.
    """

    deltas: ArrayTree


def count_deltas(function: str, deltas: ArrayTree | None, *, pairs: bool = False) -> int:
    """The number N of low-rank deltas; 1 for None, which adds nothing.

    With ``pairs``, two consecutive deltas may share their factors.

    Raises:
      ValueError: If factors ``[N, in, r]`` (of experts ``[N, E, in, r]``) and scales, one number or
        ``[N]``, differ in N.
    """
    if deltas is None:
        return 1
    entries = jax.tree.leaves(deltas, is_leaf=lambda x: isinstance(x, tuple))
    factors = jax.tree.leaves([x[:2] for x in entries if isinstance(x, tuple)])
    scales = jax.tree.leaves([x[2:] if isinstance(x, tuple) else x for x in entries])
    of_factors, of_scales = ({np.shape(x)[0] for x in xs if np.ndim(x)} for xs in (factors, scales))
    count = max(of_factors | of_scales, default=0)
    halves = pairs and of_scales == {count} and of_factors == {count // 2} and count % 2 == 0
    equal = len(of_factors | of_scales) == 1
    forms = all(np.ndim(x) in (0, 1, 3, 4) for x in factors) and all(
        np.ndim(x) in (0, 1, 3) for x in scales
    )
    if not (equal or halves) or not forms:
        shapes = ", ".join(str(np.shape(x)) for x in factors + scales)
        raise ValueError(f"{function}: deltas must share one leading axis [N]; got {shapes}.")
    return count


def fill_prompts(
    model: Model, params: ArrayTree, slots: Slots, rows: Array, *, block: int, deltas=None
) -> Slots:
    """Computes the keys and values of the prompts of some rows; rows beyond a shard are dropped."""
    tokens, ends, delta = _prompts_of(slots, rows, deltas)
    cache = empty_cache(model, (rows.size, 1), tokens.shape[-1])
    start = jnp.zeros_like(ends)[:, None]
    kv = _read(model, params, tokens[:, None], start, cache, ends[:, None], block, delta)
    prompts = slots.prompts
    prefix = jax.tree.map(lambda x, new: put_rows(x, rows, new[:, 0]), prompts.prefix, kv)
    return slots._replace(prompts=prompts._replace(prefix=prefix))


def fill_responses(
    model: Model,
    params: ArrayTree,
    slots: Slots,
    rows: Array,
    count: Array,
    where: Array,
    *,
    block: int,
    deltas=None,
) -> Slots:
    """Computes the keys and values of resumed responses, one row after the other.

    The slots have the keys and values of their prompts. Of the rows, those of the first ``count``
    columns are filled, and of their slots those of ``where``, bool ``[R, W]``.
    """
    shards, width = rows.shape[0], slots.length.shape[1]

    def fill_row(i: Array, cache: tuple[Cache, ...]) -> tuple[Cache, ...]:
        row = jax.lax.dynamic_slice_in_dim(rows, i, 1, axis=1)
        tokens, ends, delta = _prompts_of(slots, row, deltas)
        fill, length, responses = (
            take_rows(x, row) for x in (where, slots.length, slots.out.tokens)
        )
        prefix = jax.tree.map(lambda x: take_rows(x, row), slots.prompts.prefix)
        prefix_mask = jnp.arange(tokens.shape[-1]) < ends[:, None]
        last = jnp.take_along_axis(tokens, ends[:, None], axis=-1)
        first = jnp.broadcast_to(last[:, None], (shards, width, 1))
        inputs = jnp.concatenate([first, responses[..., :-1]], axis=-1)
        start = jnp.broadcast_to(ends[:, None], fill.shape)
        blank = empty_cache(model, fill.shape, inputs.shape[-1])
        lengths = jnp.where(fill, length, 0)
        kv = _read(model, params, inputs, start, blank, lengths, block, delta, prefix, prefix_mask)

        def write(x: Array, new: Array) -> Array:
            old = take_rows(x, row)
            return put_rows(x, row, jnp.where(expand_mask(fill, old), new, old))

        return jax.tree.map(write, cache, kv)

    return slots._replace(cache=jax.lax.fori_loop(0, count, fill_row, slots.cache))


def fill_extended(
    model: Model,
    params: ArrayTree,
    slots: Slots,
    index: Array,
    first: Array,
    longest: Array,
    *,
    block: int,
    deltas=None,
) -> Slots:
    """Computes the keys and values of tokens that were added to responses; the rest stay.

    Args:
      model, params, slots, deltas: See the module.
      index: int32 ``[S, k]``, the slots by their numbers within each shard, row by row.
      first: int32 ``[S, k]``, from which token on.
      longest: int32 scalar, the most tokens of one of them.
      block: Tokens a pass.
    """
    width, T = slots.length.shape[1], slots.out.tokens.shape[-1]
    block = min(block, T)

    def of_slot(x: Array) -> Array:
        return take_slots(x, index)[:, None]

    rows = jnp.minimum(index // width, slots.length.shape[0] // index.shape[0])
    tokens, ends, delta = _prompts_of(slots, rows, deltas)
    prefix = jax.tree.map(lambda x: take_rows(x, rows), slots.prompts.prefix)
    prefix_mask = jnp.arange(tokens.shape[-1]) < ends[:, None]
    last = jnp.take_along_axis(tokens, ends[:, None], axis=-1)
    responses = of_slot(slots.out.tokens)
    inputs = jnp.concatenate([last[:, None], responses[..., :-1]], axis=-1)
    start, length = first.reshape(-1, 1), of_slot(slots.length)

    def read(i: Array, cache: tuple[Cache, ...]) -> tuple[Cache, ...]:
        # The last block ends with the cache; tokens read twice give the same keys and values.
        # What is read beyond the last token is junk, which decoding overwrites before reading it.
        # A state reads each token once.
        begin = jnp.minimum(start + i * block, T - block)
        places = begin[..., None] + jnp.arange(block, dtype=jnp.int32)
        taken = jnp.take_along_axis(inputs, places, axis=-1)
        positions = ends[:, None, None] + places
        exists = (places >= (start + i * block)[..., None]) & (places < length[..., None])
        context = AttentionContext(exists, prefix, prefix_mask, cache=cache, index=begin)
        return model.apply(params, taken, positions, context, delta=delta)[1]

    cache = jax.tree.map(of_slot, slots.cache)
    cache = jax.lax.fori_loop(0, -(-longest // block), read, cache)

    def put(x: Array, new: Array) -> Array:
        return put_slots(x, index, new[:, 0])

    return slots._replace(cache=jax.tree.map(put, slots.cache, cache))


def fill_all(
    model: Model, params: ArrayTree, slots: Slots, count: int, *, block: int, deltas=None
) -> Slots:
    """Computes the keys and values of the first ``count`` tokens of all responses at once.

    The slots have the keys and values of their prompts. Entries beyond the length of a response are
    junk; decoding overwrites them before reading them.
    """
    prompts = slots.prompts
    ends, delta = jnp.maximum(prompts.length - 1, 0), _deltas_of(deltas, prompts.adapter)
    last = jnp.take_along_axis(prompts.tokens, ends[:, None], axis=-1)
    first = jnp.broadcast_to(last[:, None], (*slots.length.shape, 1))
    inputs = jnp.concatenate([first, slots.out.tokens[..., : count - 1]], axis=-1)
    start = jnp.broadcast_to(ends[:, None], slots.length.shape)
    prefix_mask = jnp.arange(prompts.tokens.shape[-1]) < ends[:, None]
    cache = _read(
        model,
        params,
        inputs,
        start,
        slots.cache,
        jnp.minimum(slots.length, count),
        block,
        delta,
        prompts.prefix,
        prefix_mask,
    )
    return slots._replace(cache=cache)


def _read(
    model, params, tokens, start, cache, lengths, block, delta, prefix=None, prefix_mask=None
) -> tuple[Cache, ...]:
    """The cache after the first ``lengths [P, G]`` tokens of ``[P, G, n]``.

    They begin at the positions ``start [P, G]``.
    """
    n = tokens.shape[-1]
    block = min(block, n)

    def read(i: Array, cache: tuple[Cache, ...]) -> tuple[Cache, ...]:
        # The last block ends with the array; tokens read twice give the same keys and values. A
        # state reads each token once.
        begin = jnp.minimum(i * block, n - block)
        inputs = jax.lax.dynamic_slice_in_dim(tokens, begin, block, axis=-1)
        places = begin + jnp.arange(block, dtype=jnp.int32)
        positions = start[..., None] + places
        exists = (places >= i * block) & (places < lengths[..., None])
        context = AttentionContext(exists, prefix, prefix_mask, cache=cache, index=begin)
        return model.apply(params, inputs, positions, context, delta=delta)[1]

    return jax.lax.fori_loop(0, -(-jnp.max(lengths) // block), read, cache)


def _prompts_of(slots: Slots, rows: Array, deltas) -> tuple[Array, Array, ArrayTree]:
    """The rows' prompts, the position of each one's last token (0 beyond a shard), their deltas."""
    prompts = slots.prompts
    tokens, length, adapter = (
        take_rows(x, rows) for x in (prompts.tokens, prompts.length, prompts.adapter)
    )
    exists = (rows < prompts.length.shape[0] // rows.shape[0]).reshape(-1)
    return tokens, jnp.where(exists, jnp.maximum(length - 1, 0), 0), _deltas_of(deltas, adapter)


def _deltas_of(deltas, adapter: Array):
    """The delta of each row: factors ``[N, in, r]`` become ``[P, 1, in, r]``, for all siblings."""

    def expand(x):
        return x[:, None, None, None] if jnp.ndim(x) == 1 else x[:, None]

    def choose(x):
        return x if jnp.ndim(x) == 0 else expand(x[adapter])

    def choose_scales(entry):
        if not isinstance(entry, tuple):
            return choose(entry)
        return (*jax.tree.map(expand, entry[:2]), *jax.tree.map(choose, entry[2:]))

    if isinstance(deltas, RowDeltas):
        return jax.tree.map(choose_scales, deltas.deltas, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.map(choose, deltas)


def decode(
    model: Model,
    draw: Callable,
    params: ArrayTree,
    slots: Slots,
    key: Array,
    *,
    version: Array,
    steps: Array | int,
    leave_at: Array | int = 0,
    siblings: int = 1,
    stop_ids: tuple[int, ...] = (),
    deltas=None,
    prompt_tokens: Array | int = 0,
) -> Slots:
    """Decodes until ``steps`` tokens are sampled or few enough slots are active.

    Args:
      model, params, slots, deltas: See the module.
      draw: ``draw(logits [R, W, V], uniform [R, W], slots) -> Tokens``: one token of every slot.
      key: The key of all requests.
      version: int32 scalar, recorded with each token.
      steps: The most tokens a slot decodes.
      leave_at: Decoding ends as soon as no more than this number of slots are active.
      siblings: So many active slots of one row count as one for ``leave_at``.
      stop_ids: Tokens that end a response; they belong to it.
      prompt_tokens: int ``[R, W]``, how many first tokens of a slot belong to its prompt; the
        random numbers of a response are counted from there.
    """
    keys = jax.vmap(jax.vmap(lambda request: jax.random.fold_in(key, request)))(slots.requests.id)
    uniform = jax.vmap(jax.vmap(lambda k, t: jax.random.uniform(jax.random.fold_in(k, t))))
    matrix = None if model.logits is not None else model.output_matrix(params)
    prompts = slots.prompts
    delta = _deltas_of(deltas, prompts.adapter)
    ends = jnp.maximum(prompts.length - 1, 0)
    prefix_mask = jnp.arange(prompts.tokens.shape[-1]) < ends[:, None]
    first = jnp.take_along_axis(prompts.tokens, ends[:, None], axis=-1)
    stops = jnp.array(stop_ids, jnp.int32)

    def step(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        n, slots = carry
        active, length = slots.active, slots.length
        index = jnp.maximum(length - 1, 0)[..., None]
        last = jnp.take_along_axis(slots.out.tokens, index, axis=-1)[..., 0]
        last = jnp.where(length == 0, first, last)
        context = AttentionContext(
            active[..., None], prompts.prefix, prefix_mask, slots.cache, length
        )
        positions = (ends[:, None] + length)[..., None]
        inputs, experts = (params, last[..., None], positions, context), None
        if model.apply_routed is None or slots.out.experts is None:
            hidden, cache = model.apply(*inputs, delta=delta)
        else:
            hidden, cache, experts = model.apply_routed(*inputs, delta=delta)
            experts = experts[:, :, 0]
        if model.logits is not None:
            logits = model.logits(params, hidden[:, :, 0])
        else:
            logits = jnp.einsum(
                "rwd,vd->rwv", hidden[:, :, 0], matrix, preferred_element_type=jnp.float32
            )
            logits = soft_cap(logits, model.logit_cap)
        place = length + slots.requests.skipped - prompt_tokens
        drawn = draw(logits, uniform(keys, place), slots)
        drawn = drawn._replace(version=jnp.broadcast_to(version, active.shape), experts=experts)
        return n + 1, advance(slots._replace(cache=cache), drawn, stops)

    def running(carry: tuple[Array, Slots]) -> Array:
        n, slots = carry
        return (n < steps) & (rows_for(slots.active, siblings) > leave_at)

    return jax.lax.while_loop(running, step, (jnp.int32(0), slots))[1]
