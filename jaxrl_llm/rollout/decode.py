"""Reading and writing slots with a model: keys and values of what is there, and new tokens.

The last prompt token is the first input of every response, in sampling as in training. So a row's
prefix holds all prompt tokens but the last, and entry ``t`` of a slot's cache belongs to the input
from which response token ``t`` is predicted.

What is there is read a block of tokens at a time. One program then serves every length, and no
array grows with the square of one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import KV, AttentionContext, Model, empty_cache
from jaxrl_llm.rollout.slots import Slots, Tokens, like, put_rows, take_rows
from jaxrl_llm.rollout.types import FAILED, LENGTH, STOP


class OwnRows(NamedTuple):
    """Deltas in the order of the rows, so that no row has to be given a copy of its factors.

    Attributes:
      deltas: Factors ``[R / k, in, r]`` of k rows in a line each, and what is small ``[N, ...]``.
    """

    deltas: ArrayTree


def fill_prompts(
    model: Model, params: ArrayTree, slots: Slots, rows: Array, *, block: int, deltas=None
) -> Slots:
    """Computes the keys and values of the prompts of some rows.

    Args:
      model: The model.
      params: Its parameters.
      slots: The slots.
      rows: int32 ``[S, k]``, distinct, as in :func:`~jaxrl_llm.rollout.slots.take_rows`; what is
        beyond the end of a part is computed in vain and dropped.
      block: How many tokens are read in one pass.
      deltas: Low-rank deltas with a leading axis ``[N]``, from which each row takes one.
    """
    held = slots.prompts
    tokens, ends, delta = _prompts(slots, rows, deltas)
    scratch = empty_cache(model, (rows.size, 1), tokens.shape[-1])
    start = jnp.zeros_like(ends)[:, None]
    kv = _read(model, params, tokens[:, None], start, scratch, jnp.max(ends), block, delta)
    prefix = jax.tree.map(lambda x, new: put_rows(x, rows, new[:, 0]), held.prefix, kv)
    return slots._replace(prompts=held._replace(prefix=prefix))


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
    """Computes the keys and values of responses that have begun, a row after the other.

    Args:
      model: The model.
      params: Its parameters.
      slots: The slots, those of the prompts computed.
      rows: int32 ``[S, n]``, as in :func:`fill_prompts`.
      count: int32 scalar, how many of the n are to be done.
      where: bool ``[R, W]``, the slots that are meant; the others keep what they have.
      block: How many tokens are read in one pass.
      deltas: Low-rank deltas with a leading axis ``[N]``, from which each row takes one.
    """
    shares, width = rows.shape[0], slots.length.shape[1]

    def one(i: Array, cache: tuple[KV, ...]) -> tuple[KV, ...]:
        row = jax.lax.dynamic_slice_in_dim(rows, i, 1, axis=1)
        tokens, ends, delta = _prompts(slots, row, deltas)
        mine, length, own = (take_rows(x, row) for x in (where, slots.length, slots.out.tokens))
        prefix = jax.tree.map(lambda x: take_rows(x, row), slots.prompts.prefix)
        shared_mask = jnp.arange(tokens.shape[-1]) < ends[:, None]
        last = jnp.take_along_axis(tokens, ends[:, None], axis=-1)
        first = jnp.broadcast_to(last[:, None], (shares, width, 1))
        inputs = jnp.concatenate([first, own[..., :-1]], axis=-1)
        start = jnp.broadcast_to(ends[:, None], mine.shape)
        scratch = empty_cache(model, mine.shape, inputs.shape[-1])
        longest = jnp.max(jnp.where(mine, length, 0))
        beside = {"prefix": prefix, "prefix_mask": shared_mask}
        kv = _read(model, params, inputs, start, scratch, longest, block, delta, **beside)

        def write(x: Array, new: Array) -> Array:
            old = take_rows(x, row)
            return put_rows(x, row, jnp.where(like(mine, old), new, old))

        return jax.tree.map(write, cache, kv)

    return slots._replace(cache=jax.lax.fori_loop(0, count, one, slots.cache))


def fill_all(
    model: Model, params: ArrayTree, slots: Slots, count: int, *, block: int, deltas=None
) -> Slots:
    """Computes the keys and values of the first tokens of all responses, all rows at one time.

    What lies beyond the tokens that a slot has is junk, which it writes over before it is read.

    Args:
      model: The model.
      params: Its parameters.
      slots: The slots, those of the prompts computed.
      count: How many tokens of each.
      block: How many of them are read in one pass.
      deltas: Low-rank deltas with a leading axis ``[N]``, from which each row takes one.
    """
    held = slots.prompts
    ends, delta = jnp.maximum(held.length - 1, 0), _of_rows(deltas, held.adapter)
    last = jnp.take_along_axis(held.tokens, ends[:, None], axis=-1)
    first = jnp.broadcast_to(last[:, None], (*slots.length.shape, 1))
    inputs = jnp.concatenate([first, slots.out.tokens[..., : count - 1]], axis=-1)
    start = jnp.broadcast_to(ends[:, None], slots.length.shape)
    shared_mask = jnp.arange(held.tokens.shape[-1]) < ends[:, None]
    beside = {"prefix": held.prefix, "prefix_mask": shared_mask}
    given = (params, inputs, start, slots.cache, jnp.int32(count), block, delta)
    return slots._replace(cache=_read(model, *given, **beside))


def _read(model, params, tokens, start, cache, length, block, delta, **beside) -> tuple[KV, ...]:
    """The cache after the first ``length`` tokens ``[P, G, n]``, from position ``start [P, G]``."""
    n = tokens.shape[-1]
    block = min(block, n)

    def read(i: Array, cache: tuple[KV, ...]) -> tuple[KV, ...]:
        # The last block ends with the array; what it reads twice comes out the same.
        begin = jnp.minimum(i * block, n - block)
        inputs = jax.lax.dynamic_slice_in_dim(tokens, begin, block, axis=-1)
        positions = start[..., None] + begin + jnp.arange(block, dtype=jnp.int32)
        context = AttentionContext(jnp.ones(inputs.shape, bool), cache=cache, index=begin, **beside)
        return model.apply(params, inputs, positions, context, delta=delta)[1]

    return jax.lax.fori_loop(0, -(-length // block), read, cache)


def _prompts(slots: Slots, rows: Array, deltas) -> tuple[Array, Array, ArrayTree]:
    """Tokens of some rows' prompts, the place of the last of them, and the rows' deltas.

    The place is 0 for rows that are dropped.
    """
    held = slots.prompts
    tokens, length, adapter = (take_rows(x, rows) for x in (held.tokens, held.length, held.adapter))
    there = (rows < held.length.shape[0] // rows.shape[0]).reshape(-1)
    return tokens, jnp.where(there, jnp.maximum(length - 1, 0), 0), _of_rows(deltas, adapter)


def _of_rows(deltas, adapter: Array):
    """The delta of each row: factors ``[N, in, r]`` become ``[P, 1, in, r]``, for all siblings."""

    def siblings(x):
        return x[:, None, None, None] if jnp.ndim(x) == 1 else x[:, None]

    def of_rows(x):
        return x if jnp.ndim(x) == 0 else siblings(x[adapter])

    def of_own(entry):
        if not isinstance(entry, tuple):
            return of_rows(entry)
        return (*jax.tree.map(siblings, entry[:2]), *jax.tree.map(of_rows, entry[2:]))

    if isinstance(deltas, OwnRows):
        return jax.tree.map(of_own, deltas.deltas, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.map(of_rows, deltas)


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
    stop_ids: tuple[int, ...] = (),
    deltas=None,
    begun: Array | int = 0,
) -> Slots:
    """Decodes until ``steps`` tokens are sampled or at most ``leave_at`` slots are active.

    Args:
      model: The model.
      draw: ``draw(logits [R, W, V], uniform [R, W], slots) -> Tokens``: one token of every slot.
      params: Parameters of the model.
      slots: The slots.
      key: The key of all requests.
      version: int32 scalar, recorded with each token.
      steps: Tokens a slot at most.
      leave_at: Ends as soon as no more slots than these are active.
      stop_ids: Tokens that end a response; they belong to it.
      deltas: Low-rank deltas with a leading axis ``[N]``, from which each row takes one.
      begun: int ``[R, W]``, the first tokens of a slot that are a prompt's: the random numbers of a
        response are counted from there.
    """
    keys = jax.vmap(jax.vmap(lambda request: jax.random.fold_in(key, request)))(slots.requests.id)
    uniform = jax.vmap(jax.vmap(lambda k, t: jax.random.uniform(jax.random.fold_in(k, t))))
    matrix = model.output_matrix(params)
    held = slots.prompts
    delta = _of_rows(deltas, held.adapter)
    ends = jnp.maximum(held.length - 1, 0)
    shared_mask = jnp.arange(held.tokens.shape[-1]) < ends[:, None]
    first = jnp.take_along_axis(held.tokens, ends[:, None], axis=-1)
    stops = jnp.array(stop_ids, jnp.int32)

    def step(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        n, slots = carry
        active, length = slots.active, slots.length
        place = jnp.maximum(length - 1, 0)[..., None]
        last = jnp.take_along_axis(slots.out.tokens, place, axis=-1)[..., 0]
        last = jnp.where(length == 0, first, last)
        context = AttentionContext(
            jnp.ones((*active.shape, 1), bool), held.prefix, shared_mask, slots.cache, length
        )
        positions = (ends[:, None] + length)[..., None]
        hidden, cache = model.apply(params, last[..., None], positions, context, delta=delta)
        logits = jnp.einsum(
            "rwd,vd->rwv", hidden[:, :, 0], matrix, preferred_element_type=jnp.float32
        )
        drawn = draw(logits, uniform(keys, length - begun), slots)
        drawn = drawn._replace(version=jnp.broadcast_to(version, active.shape))
        return n + 1, _advance(slots._replace(cache=cache), drawn, stops)

    def running(carry: tuple[Array, Slots]) -> Array:
        n, slots = carry
        return (n < steps) & (jnp.sum(slots.active) > leave_at)

    return jax.lax.while_loop(running, step, (jnp.int32(0), slots))[1]


def _advance(slots: Slots, drawn: Tokens, stops: Array) -> Slots:
    """The slots after one token each: active ones keep it, and some end with it."""
    spoiled = ~jnp.isfinite(drawn.model_logp)
    # Nothing left to draw is a failure too, though it leaves no bad numbers behind.
    failed = slots.active & ~(jnp.isfinite(drawn.model_logp) & jnp.isfinite(drawn.behavior_logp))
    writes = slots.active & ~failed
    length = slots.length + writes
    stopped = writes & jnp.isin(drawn.tokens, stops)
    full = writes & (length >= slots.requests.limit)
    finish = jnp.where(full, LENGTH, slots.finish)
    finish = jnp.where(stopped, STOP, finish)
    place = jnp.where(writes, slots.length, slots.out.tokens.shape[-1])

    # Mapped over rows and slots, so that on a mesh each device writes its own.
    @jax.vmap
    @jax.vmap
    def record(buffer: Array, new: Array, place: Array) -> Array:
        return buffer.at[place].set(new.astype(buffer.dtype), mode="drop", unique_indices=True)

    return slots._replace(
        active=writes & ~stopped & ~full,
        length=length,
        finish=jnp.where(failed, FAILED, finish),
        spoiled=slots.spoiled | spoiled,
        out=jax.tree.map(lambda x, new: record(x, new, place), slots.out, drawn),
    )
