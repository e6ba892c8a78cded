"""Reading and writing slots with a model: ``fill`` computes keys and values, ``decode`` tokens.

The last prompt token is the first input of every response, in sampling as in training. So a row's
prefix holds all prompt tokens but the last, and entry ``t`` of a slot's cache belongs to the input
from which response token ``t`` is predicted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import AttentionContext, Model, prefill
from jaxrl_llm.rollout.rollout import FAILED, LENGTH, STOP
from jaxrl_llm.rollout.slots import Slots, Tokens


def fill(
    model: Model,
    params: ArrayTree,
    slots: Slots,
    rows: Array,
    *,
    prompt_width: int,
    own_width: int = 0,
    deltas=None,
) -> Slots:
    """Computes the keys and values of some rows: of their prompts, and of resumed responses.

    Args:
      model: The model.
      params: Its parameters.
      slots: The slots.
      rows: int32 ``[k]``, distinct; R and more is computed in vain and dropped, so that k may be
        one of a few sizes.
      prompt_width: The first tokens of the prompts to look at: at least the longest of them.
      own_width: The same for responses; 0 where none of the rows' slots has any.
      deltas: Low-rank deltas with a leading axis ``[N]``, from which each row takes one.
    """
    held, size = slots.prompts, slots.prompts.length.shape[0]
    source = jnp.minimum(rows, size - 1)
    delta = _of_rows(deltas, held.adapter[source])
    prompt, ends = held.tokens[source, :prompt_width], held.length[source] - 1
    shared_mask = jnp.arange(prompt_width) < ends[:, None]
    prefix = prefill(model, params, prompt, shared_mask, delta=delta)
    new_prefix = jax.tree.map(_writer(rows), held.prefix, prefix)
    slots = slots._replace(prompts=held._replace(prefix=new_prefix))
    if not own_width:
        return slots
    k, width = rows.shape[0], slots.length.shape[1]
    last = jnp.take_along_axis(prompt, jnp.maximum(ends, 0)[:, None], axis=-1)
    first = jnp.broadcast_to(last[:, None], (k, width, 1))
    own = slots.out.tokens[source, :, : own_width - 1]
    inputs = jnp.concatenate([first, own], axis=-1)
    positions = ends[:, None, None] + jnp.arange(own_width, dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, inputs.shape)
    context = AttentionContext(jnp.ones(inputs.shape, bool), prefix, shared_mask)
    _, kv = model.apply(params, inputs, positions, context, delta=delta)
    return slots._replace(cache=jax.tree.map(_writer(rows), slots.cache, kv))


def _of_rows(deltas, adapter: Array):
    """The delta of each row: factors ``[N, in, r]`` become ``[k, 1, in, r]``, for all siblings."""
    return jax.tree.map(lambda x: x[adapter][:, None] if jnp.ndim(x) == 3 else x, deltas)


def _writer(rows: Array) -> Callable[[Array, Array], Array]:
    """Writes ``new [k, ...]`` into rows of ``old [R, ...]``, at the start of a longer axis."""

    def write(old: Array, new: Array) -> Array:
        corner = (rows, *(slice(0, n) for n in new.shape[1:]))
        return old.at[corner].set(new.astype(old.dtype), mode="drop", unique_indices=True)

    return write


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
        drawn = draw(logits, uniform(keys, length), slots)
        drawn = drawn._replace(version=jnp.broadcast_to(version, active.shape))
        return n + 1, _advance(slots._replace(cache=cache), drawn, stops)

    def running(carry: tuple[Array, Slots]) -> Array:
        n, slots = carry
        return (n < steps) & (jnp.sum(slots.active) > leave_at)

    return jax.lax.while_loop(running, step, (jnp.int32(0), slots))[1]


def _advance(slots: Slots, drawn: Tokens, stops: Array) -> Slots:
    """The slots after one token each: active ones keep it, and some end with it."""
    failed = slots.active & ~jnp.isfinite(drawn.model_logp)
    writes = slots.active & ~failed
    length = slots.length + writes
    stopped = writes & jnp.isin(drawn.tokens, stops)
    full = writes & (length >= slots.requests.limit)
    finish = jnp.where(full, LENGTH, slots.finish)
    finish = jnp.where(stopped, STOP, finish)
    rows, columns = jnp.indices(slots.active.shape, sparse=True)

    def record(buffer: Array, new: Array) -> Array:
        place = jnp.where(writes, slots.length, buffer.shape[2])
        new = new.astype(buffer.dtype)
        return buffer.at[rows, columns, place].set(new, mode="drop", unique_indices=True)

    return slots._replace(
        active=writes & ~stopped & ~full,
        length=length,
        finish=jnp.where(failed, FAILED, finish),
        out=jax.tree.map(record, slots.out, drawn),
    )
