"""Slots: the state of a sampler as one pytree of fixed shape, and pure functions over it.

R rows hold one prompt each, whose keys and values exist once. Each row has W slots, one for each
response that is sampled from the prompt. Prompts enter and responses leave while others decode, and
no shape ever changes. The random number of a token depends only on the key, the request and the
token's position, so a response does not depend on its slot, its neighbors, or on how often decoding
was interrupted.

R, W, L and T are rows, slots of a row, room for a prompt's tokens and room for a response's.
``where`` is bool ``[R, W]``, the slots to change; other arrays are read in these only. Rows of an
array that lies in S equal shards, one per device, are named by int32 ``[S, k]``, row numbers within
each shard, so that nothing is sent from device to device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.scatter import scattered
from jaxrl_llm.models.protocol import Cache, Model, empty_cache
from jaxrl_llm.rollout.types import FAILED, LENGTH, STOP, UNFINISHED, Rollout


class Prompts(NamedTuple):
    """The prompts of R rows.

    Attributes:
      tokens: int32 ``[R, L]``, right padded.
      length: int32 ``[R]``; 0 for a row without a prompt so far.
      adapter: int32 ``[R]``, which of the low-rank deltas is added to the weights for this row.
      prefix: One KV a layer, ``[R, Hk, d, L]`` and ``[R, Hk, L, d]``.
    """

    tokens: Array
    length: Array
    adapter: Array
    prefix: tuple[Cache, ...]


class Requests(NamedTuple):
    """The requests in the slots, arrays ``[R, W]``.

    Attributes:
      id: int32, names the stream of random numbers.
      limit: int32, the longest response, at most T.
      skipped: int32, how many random numbers of the stream were used for tokens that are not in the
        slot any more.
      settings: By name, the draw options that may differ between requests.
    """

    id: Array
    limit: Array
    skipped: Array
    settings: dict[str, Array]


class Tokens(NamedTuple):
    """Sampled tokens ``[R, W, T]``, named as in :class:`~jaxrl_llm.rollout.Rollout`.

    ``entropy`` is float32 of the distribution sampled from, in nats, or None. ``runner_up`` is the
    most likely token of the plain model but the sampled one, int32, and ``runner_up_logp`` its
    log-probability, float32; or None. ``experts`` are int16 ``[R, W, T, L, k]`` or None.
    """

    tokens: Array
    behavior_logp: Array
    model_logp: Array
    log_kept: Array
    version: Array
    entropy: Array | None = None
    support: Any = None
    runner_up: Array | None = None
    runner_up_logp: Array | None = None
    experts: Array | None = None


class Slots(NamedTuple):
    """R rows of W slots.

    Attributes:
      prompts: The prompts of the rows.
      cache: Keys and values of the responses, ``[R, W, ...]`` with T positions.
      requests: The requests of the slots.
      active: bool ``[R, W]``, True while a slot decodes.
      length: int32 ``[R, W]``, response tokens so far.
      finish: int32 ``[R, W]``, why a slot ended; see :class:`~jaxrl_llm.rollout.Rollout`.
      nonfinite: bool ``[R, W]``, True where the cache may hold non-finite numbers. Masked positions
        have weight 0, but 0 times NaN is NaN: :func:`clear_cache` before the next request.
      out: The sampled tokens.
    """

    prompts: Prompts
    cache: tuple[Cache, ...]
    requests: Requests
    active: Array
    length: Array
    finish: Array
    nonfinite: Array
    out: Tokens


def join_rollout(
    prompt_tokens: Array, prompt_mask: Array, out: Tokens, mask: Array, finish: Array
) -> Rollout:
    """Prompts ``[P, Lp]`` and their sampled tokens ``[P, G, T]`` as one rollout."""
    return Rollout(
        prompt_tokens=prompt_tokens,
        prompt_mask=prompt_mask,
        tokens=out.tokens,
        mask=mask,
        behavior_logp=out.behavior_logp,
        model_logp=out.model_logp,
        log_kept=out.log_kept,
        finish=finish,
        version=out.version,
        support=out.support,
        experts=out.experts,
    )


def init_slots(
    model: Model,
    rows: int,
    width: int,
    prompt_length: int,
    max_new_tokens: int,
    *,
    blank: Tokens,
    settings: dict[str, float] | None = None,
) -> Slots:
    """Empty slots.

    ``blank`` has the outputs of one token, as shapes or arrays ``[...]``; the buffers have their
    dtypes. ``settings`` are the draw options that may differ between requests, with their defaults.
    """
    grid = (rows, width)

    def buffer(x) -> Array:
        return jnp.zeros((*grid, max_new_tokens, *x.shape), x.dtype)

    prompts = Prompts(
        jnp.zeros((rows, prompt_length), jnp.int32),
        jnp.zeros((rows,), jnp.int32),
        jnp.zeros((rows,), jnp.int32),
        empty_cache(model, (rows,), prompt_length),
    )
    defaults = {k: jnp.full(grid, v, jnp.float32) for k, v in (settings or {}).items()}

    def zeros() -> Array:  # a buffer for each array, so that all of them can be donated
        return jnp.zeros(grid, jnp.int32)

    return Slots(
        prompts=prompts,
        cache=empty_cache(model, grid, max_new_tokens),
        requests=Requests(zeros(), zeros(), zeros(), defaults),
        active=jnp.zeros(grid, bool),
        length=zeros(),
        finish=zeros(),
        nonfinite=jnp.zeros(grid, bool),
        out=jax.tree.map(buffer, blank),
    )


def put_prompts(slots: Slots, where: Array, tokens: Array, length: Array, adapter: Array) -> Slots:
    """Writes prompts into rows; ``decode.fill_prompts`` then computes their keys and values.

    ``where`` is bool ``[R]``, ``tokens`` int32 ``[R, L]``, right padded; ``length`` int32 ``[R]``,
    at least 1; ``adapter`` int32 ``[R]``, 0 where there are no deltas.
    """
    old = slots.prompts
    prompts = old._replace(
        tokens=jnp.where(where[:, None], tokens, old.tokens),
        length=jnp.where(where, length, old.length),
        adapter=jnp.where(where, adapter, old.adapter),
    )
    return slots._replace(prompts=prompts)


def copy_prompts(slots: Slots, source: Array, target: Array) -> Slots:
    """Copies the keys and values of prompts from rows to other rows that hold the same prompt.

    ``source`` and ``target`` are int32 ``[S, k]``; targets beyond a shard's end are dropped.
    """
    prompts = slots.prompts
    prefix = jax.tree.map(lambda x: put_rows(x, target, take_rows(x, source)), prompts.prefix)
    return slots._replace(prompts=prompts._replace(prefix=prefix))


def start(slots: Slots, where: Array, requests: Requests) -> Slots:
    """Starts new requests in place of the old ones."""
    merged = jax.tree.map(lambda new, old: jnp.where(where, new, old), requests, slots.requests)
    return slots._replace(
        requests=merged,
        active=slots.active | where,
        length=jnp.where(where, 0, slots.length),
        finish=jnp.where(where, UNFINISHED, slots.finish),
    )


def resume(slots: Slots, where: Array, out: Tokens, length: Array) -> Slots:
    """Writes the first tokens of responses that have just started: ``length [R, W]`` of ``out``.

    ``decode.fill_responses`` then computes their keys and values.
    """
    return slots._replace(
        out=jax.tree.map(
            lambda new, old: jnp.where(expand_mask(where, old), new, old), out, slots.out
        ),
        length=jnp.where(where, length, slots.length),
    )


def extend(
    slots: Slots, where: Array, tokens: Array, count: Array, limit: Array, keep: Array
) -> Slots:
    """Adds known tokens, which nothing sampled, to responses that have ended; they then go on.

    ``decode.fill_extended`` then computes their keys and values. The first ``keep``, int32
    ``[R, W]``, tokens of each response stay. The first ``count [R, W]`` of ``tokens``, int32
    ``[R, W, n]``, are added with version -1 and zeros in the other records. ``limit``, int32
    ``[R, W]``, is the longest response from here on; the tokens and one more must fit.
    """
    places = jnp.arange(tokens.shape[-1])
    added = where[..., None] & (places < count[..., None])
    index = jnp.where(added, keep[..., None] + places, slots.out.tokens.shape[-1])
    skipped = slots.requests.skipped + jnp.where(where, slots.length - keep, 0)
    limit = jnp.where(where, limit, slots.requests.limit)

    @jax.vmap
    @jax.vmap
    def put(buffer: Array, new: Array, index: Array) -> Array:
        return buffer.at[index].set(new.astype(buffer.dtype), mode="drop")

    blank = jax.tree.map(lambda x: jnp.zeros((*index.shape, *x.shape[3:]), x.dtype), slots.out)
    blank = blank._replace(tokens=tokens, version=jnp.full(index.shape, -1, jnp.int32))
    if blank.support is not None and blank.support.ids is not None:
        # An empty set stands for the full vocabulary.
        ids = jnp.full_like(blank.support.ids, -1)
        blank = blank._replace(support=blank.support._replace(ids=ids))
    return slots._replace(
        out=jax.tree.map(lambda x, new: put(x, new, index), slots.out, blank),
        requests=slots.requests._replace(limit=limit, skipped=skipped),
        length=jnp.where(where, keep + count, slots.length),
        active=slots.active | where,
        finish=jnp.where(where, UNFINISHED, slots.finish),
    )


def take_slot(slots: Slots, index: Array) -> Slots:
    """One slot with its prompt, keys and values, as slots of one row and column a shard.

    ``index`` is int32 ``[S, 2]``, row and column within each of S shards.
    """
    width = slots.active.shape[1]
    row, slot = index[:, :1], index[:, :1] * width + index[:, 1:]

    def of_slot(x: Array) -> Array:
        return take_slots(x, slot)[:, None]

    prompts = jax.tree.map(lambda x: take_rows(x, row), slots.prompts)
    return Slots(prompts, *jax.tree.map(of_slot, tuple(slots)[1:]))


def put_slot(slots: Slots, index: Array, taken: Slots) -> Slots:
    """The inverse of :func:`take_slot`: puts its result into a slot, with its prompt.

    ``index`` is int32 ``[S, 2]``; shards in which nothing is put have a row beyond their end.
    """
    width = slots.active.shape[1]
    row, slot = index[:, :1], index[:, :1] * width + index[:, 1:]

    def of_slot(x: Array, new: Array) -> Array:
        return put_slots(x, slot, new[:, 0])

    prompts = jax.tree.map(lambda x, new: put_rows(x, row, new), slots.prompts, taken.prompts)
    return Slots(prompts, *jax.tree.map(of_slot, tuple(slots)[1:], tuple(taken)[1:]))


def advance(slots: Slots, drawn: Tokens, stops: Array) -> Slots:
    """The slots after one token each: active slots record it, and some end with it.

    ``drawn`` has arrays ``[R, W]``; a token among ``stops`` ends its response and belongs to it.
    """
    nonfinite = ~jnp.isfinite(drawn.model_logp)
    # An empty set of tokens to draw from is a failure too, though the cache stays finite.
    failed = slots.active & ~(jnp.isfinite(drawn.model_logp) & jnp.isfinite(drawn.behavior_logp))
    writes = slots.active & ~failed
    length = slots.length + writes
    stopped = writes & jnp.isin(drawn.tokens, stops)
    full = writes & (length >= slots.requests.limit)
    finish = jnp.where(full, LENGTH, slots.finish)
    finish = jnp.where(stopped, STOP, finish)
    index = jnp.where(writes, slots.length, slots.out.tokens.shape[-1])

    # Mapped over rows and slots, so that on a mesh each device writes only its rows.
    @jax.vmap
    @jax.vmap
    def record(buffer: Array, new: Array, index: Array) -> Array:
        return buffer.at[index].set(new.astype(buffer.dtype), mode="drop", unique_indices=True)

    return slots._replace(
        active=writes & ~stopped & ~full,
        length=length,
        finish=jnp.where(failed, FAILED, finish),
        nonfinite=slots.nonfinite | nonfinite,
        out=jax.tree.map(lambda x, new: record(x, new, index), slots.out, drawn),
    )


def expand_mask(mask: Array, x: Array) -> Array:
    """The mask with trailing axes of size 1, as many axes as ``x``."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def end_slots(slots: Slots, where: Array, finish: Array | int) -> Slots:
    """Ends the active slots among ``where``; their tokens stay."""
    ends = where & slots.active
    return slots._replace(active=slots.active & ~ends, finish=jnp.where(ends, finish, slots.finish))


def take_rows(x: Array, rows: Array) -> Array:
    """Some rows of an array ``[R, ...]``: ``[S k, ...]``; beyond a shard's end is its last row."""
    shards = x.reshape(rows.shape[0], -1, *x.shape[1:])
    taken = jax.vmap(lambda shard, row: shard.at[row].get(mode="clip"))(shards, rows)
    return taken.reshape(-1, *x.shape[1:])


def put_rows(x: Array, rows: Array, new: Array) -> Array:
    """The array with some rows set to ``new [S k, ...]``; rows beyond a shard's end are dropped."""
    shards = x.reshape(rows.shape[0], -1, *x.shape[1:])
    new = new.reshape(*rows.shape, *x.shape[1:]).astype(x.dtype)
    put = jax.vmap(lambda shard, row, value: shard.at[row].set(value, mode="drop"))
    return scattered(lambda x, new, rows: put(x, rows, new), shards, new, rows).reshape(x.shape)


# Flat, an array whose rows have one slot would change its layout on a CPU, and so be copied whole.
def take_slots(x: Array, index: Array) -> Array:
    """Some slots of an array ``[R, W, ...]``: ``[S k, ...]``, by their numbers within each shard.

    Beyond a shard's end is its last slot.
    """
    if index.shape[0] == 1:
        return x.at[jnp.divmod(index[0], x.shape[1])].get(mode="clip")
    return take_rows(x.reshape(-1, *x.shape[2:]), index)


def put_slots(x: Array, index: Array, new: Array) -> Array:
    """The array with some slots set to ``new [S k, ...]``; those beyond a shard are dropped."""
    if index.shape[0] == 1:
        return scattered(
            lambda x, new, row, slot: x.at[row, slot].set(new, mode="drop"),
            x,
            new.astype(x.dtype),
            *jnp.divmod(index[0], x.shape[1]),
        )
    return put_rows(x.reshape(-1, *x.shape[2:]), index, new).reshape(x.shape)


def copy_slot(slots: Slots, source: Array, target: Array, request: Array) -> Slots:
    """Copies a response with its keys and values into another slot: a fork.

    From here on the copy draws the random numbers of the request ``request``. In another row the
    copy brings its prompt, so no slot of that row may be in use for another prompt. ``source`` and
    ``target`` are int32 ``[S, 2]``, row and column within each of S shards of the grid; shards in
    which nothing is copied have a row beyond their end.
    """
    width = slots.active.shape[1]
    from_row, to_row = source[:, :1], target[:, :1]
    from_slot, to_slot = (index[:, :1] * width + index[:, 1:] for index in (source, target))

    def slot(x: Array) -> Array:
        return put_slots(x, to_slot, take_slots(x, from_slot))

    prompts = jax.tree.map(lambda x: put_rows(x, to_row, take_rows(x, from_row)), slots.prompts)
    copied = Slots(prompts, *jax.tree.map(slot, tuple(slots)[1:]))
    ids = copied.requests.id.reshape(-1)
    ids = put_rows(ids, to_slot, jnp.broadcast_to(request, to_slot.shape))
    requests = copied.requests._replace(id=ids.reshape(slots.active.shape))
    return copied._replace(requests=requests)


def clear_cache(slots: Slots, where: Array) -> Slots:
    """Zeroes keys and values."""
    cache = jax.tree.map(lambda x: jnp.where(expand_mask(where, x), 0, x), slots.cache)
    return slots._replace(cache=cache, nonfinite=slots.nonfinite & ~where)
