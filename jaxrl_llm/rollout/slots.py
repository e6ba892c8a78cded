"""Slots: the state of a sampler as one pytree of fixed shape, and pure functions over it.

R rows hold one prompt each, whose keys and values exist once; each row has W slots, the siblings
that are sampled from it. Prompts enter and rollouts leave while others decode, and no shape ever
changes. The random number of a token depends only on the key, the request and the token's place:
a rollout does not depend on its slot, its neighbors, or how often decoding was interrupted.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.models.protocol import KV, Model, empty_cache
from jaxrl_llm.rollout.types import UNFINISHED


class Prompts(NamedTuple):
    """The prompts of R rows.

    Attributes:
      tokens: int32 ``[R, L]``, right padded.
      length: int32 ``[R]``; 0 for a row that has held none yet.
      adapter: int32 ``[R]``, which of the low-rank deltas is added to the weights for this row.
      prefix: One KV a layer, ``[R, Hk, d, L]`` and ``[R, Hk, L, d]``.
    """

    tokens: Array
    length: Array
    adapter: Array
    prefix: tuple[KV, ...]


class Requests(NamedTuple):
    """What is asked of the rollouts in ``[R, W]`` slots.

    Attributes:
      id: int32, names the stream of random numbers.
      limit: int32, the longest response, at most T.
      settings: Arrays ``[R, W]`` by name: those options of the draw that may differ between
        requests.
    """

    id: Array
    limit: Array
    settings: dict[str, Array]


class Tokens(NamedTuple):
    """What was sampled, ``[R, W, T]``: as in :class:`~jaxrl_llm.rollout.Rollout`.

    Attributes:
      tokens: int32.
      behavior_logp: float32.
      model_logp: float32.
      log_kept: float32.
      version: int32, of the weights that sampled each token.
      entropy: float32 of the distribution sampled from, in nats, or None.
      support: The kept set of each token, or None.
    """

    tokens: Array
    behavior_logp: Array
    model_logp: Array
    log_kept: Array
    version: Array
    entropy: Array | None = None
    support: Any = None


class Slots(NamedTuple):
    """R rows of W slots.

    Attributes:
      prompts: Of the rows.
      cache: Keys and values of the responses, ``[R, W, ...]`` with T positions.
      requests: Of the slots.
      active: bool ``[R, W]``, still decoding.
      length: int32 ``[R, W]``, response tokens so far.
      finish: int32 ``[R, W]``, why a slot ended; see :class:`~jaxrl_llm.rollout.Rollout`.
      spoiled: bool ``[R, W]``, the cache may hold numbers that are none, where it is not read now.
        What is masked has weight 0, but 0 times NaN is NaN: :func:`wipe` it before the next use.
      out: What was sampled.
    """

    prompts: Prompts
    cache: tuple[KV, ...]
    requests: Requests
    active: Array
    length: Array
    finish: Array
    spoiled: Array
    out: Tokens


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
    """Slots that hold nothing.

    Args:
      model: The model.
      rows: R.
      width: W, slots of a row.
      prompt_length: L, room for the tokens of a prompt.
      max_new_tokens: T, room for the tokens of a response.
      blank: Outputs of one token ``[...]``, as shapes or arrays, from which the buffers are made.
      settings: Options that may differ between requests, with their defaults.
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
    filled = {k: jnp.full(grid, v, jnp.float32) for k, v in (settings or {}).items()}

    def zeros() -> Array:  # each its own buffer, so that all of them can be given away
        return jnp.zeros(grid, jnp.int32)

    return Slots(
        prompts=prompts,
        cache=empty_cache(model, grid, max_new_tokens),
        requests=Requests(zeros(), zeros(), filled),
        active=jnp.zeros(grid, bool),
        length=zeros(),
        finish=zeros(),
        spoiled=jnp.zeros(grid, bool),
        out=jax.tree.map(buffer, blank),
    )


def put_prompts(slots: Slots, take: Array, tokens: Array, length: Array, adapter: Array) -> Slots:
    """Writes prompts into rows; ``decoding.fill_prompts`` then computes their keys and values.

    Args:
      slots: The slots.
      take: bool ``[R]``, the rows that get one; the rest of the arrays is read there only.
      tokens: int32 ``[R, L]``, right padded.
      length: int32 ``[R]``, at least 1.
      adapter: int32 ``[R]``, 0 where there are no deltas.
    """
    held = slots.prompts
    held = held._replace(
        tokens=jnp.where(take[:, None], tokens, held.tokens),
        length=jnp.where(take, length, held.length),
        adapter=jnp.where(take, adapter, held.adapter),
    )
    return slots._replace(prompts=held)


def start(slots: Slots, take: Array, requests: Requests) -> Slots:
    """Slots where ``take`` is True begin with new requests, those already there forgotten.

    Args:
      slots: The slots.
      take: bool ``[R, W]``.
      requests: Arrays ``[R, W]``, read where ``take`` is True.
    """
    mixed = jax.tree.map(lambda new, old: jnp.where(take, new, old), requests, slots.requests)
    return slots._replace(
        requests=mixed,
        active=slots.active | take,
        length=jnp.where(take, 0, slots.length),
        finish=jnp.where(take, UNFINISHED, slots.finish),
    )


def resume(slots: Slots, take: Array, out: Tokens, length: Array) -> Slots:
    """Gives slots that have just started the first tokens of their responses.

    ``decoding.fill_responses`` then computes their keys and values.

    Args:
      slots: The slots.
      take: bool ``[R, W]``; the other arrays are read where it is True.
      out: Arrays ``[R, W, T]``.
      length: int32 ``[R, W]``, how many of these tokens there are.
    """
    return slots._replace(
        out=jax.tree.map(lambda new, old: jnp.where(like(take, old), new, old), out, slots.out),
        length=jnp.where(take, length, slots.length),
    )


def like(mask: Array, x: Array) -> Array:
    """A mask with as many axes as ``x``, which begins with the same."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def release(slots: Slots, where: Array, finish: Array | int) -> Slots:
    """Ends the slots where ``where [R, W]`` is True that are still active; their tokens stay."""
    ends = where & slots.active
    return slots._replace(active=slots.active & ~ends, finish=jnp.where(ends, finish, slots.finish))


def take_rows(x: Array, rows: Array) -> Array:
    """Some rows of an array ``[R, ...]`` that is S equal parts, each on a device of its own.

    Nothing is sent from device to device.

    Args:
      x: The array.
      rows: int32 ``[S, k]``, places in each part; beyond its end stands for the last.

    Returns:
      ``[S k, ...]``.
    """
    parts = x.reshape(rows.shape[0], -1, *x.shape[1:])
    taken = jax.vmap(lambda part, row: part.at[row].get(mode="clip"))(parts, rows)
    return taken.reshape(-1, *x.shape[1:])


def put_rows(x: Array, rows: Array, new: Array) -> Array:
    """The array with some rows set to ``new [S k, ...]``; see :func:`take_rows`.

    Rows beyond the end of a part are dropped.
    """
    parts = x.reshape(rows.shape[0], -1, *x.shape[1:])
    new = new.reshape(*rows.shape, *x.shape[1:]).astype(x.dtype)
    put = jax.vmap(lambda part, row, value: part.at[row].set(value, mode="drop"))
    return put(parts, rows, new).reshape(x.shape)


def copy_slot(slots: Slots, source: Array, target: Array, request: Array) -> Slots:
    """Copies a rollout with its keys and values into another slot: a fork.

    From here on the copy draws its own random numbers, those of ``request``. In another row the
    copy takes the row's prompt along, so no slot of that row may be in use by another prompt.

    Args:
      slots: The slots.
      source: int32 ``[S, 2]``, row and column in each of S parts of the grid; see
        :func:`take_rows`. Parts in which nothing is copied have a row beyond their end.
      target: int32 ``[S, 2]``, likewise.
      request: int32 scalar, the id of the copy.
    """
    width = slots.active.shape[1]
    from_row, to_row = source[:, :1], target[:, :1]
    from_slot, to_slot = (place[:, :1] * width + place[:, 1:] for place in (source, target))

    def slot(x: Array) -> Array:
        flat = x.reshape(-1, *x.shape[2:])
        return put_rows(flat, to_slot, take_rows(flat, from_slot)).reshape(x.shape)

    prompts = jax.tree.map(lambda x: put_rows(x, to_row, take_rows(x, from_row)), slots.prompts)
    copied = Slots(prompts, *jax.tree.map(slot, tuple(slots)[1:]))
    ids = copied.requests.id.reshape(-1)
    ids = put_rows(ids, to_slot, jnp.broadcast_to(request, to_slot.shape))
    requests = copied.requests._replace(id=ids.reshape(slots.active.shape))
    return copied._replace(requests=requests)


def wipe(slots: Slots, where: Array) -> Slots:
    """Zeroes the keys and values of slots ``[R, W]``, which are then no longer spoiled."""
    cache = jax.tree.map(lambda x: jnp.where(like(where, x), 0, x), slots.cache)
    return slots._replace(cache=cache, spoiled=slots.spoiled & ~where)
