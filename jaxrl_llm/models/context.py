"""Attention of the tokens of one call to the contents of its :class:`AttentionContext`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.scatter import scattered
from jaxrl_llm.models.attention import Prefix, Sight, attend
from jaxrl_llm.models.protocol import KV, AttentionContext, Cache, DeltaState, PromptTree
from jaxrl_llm.models.sharding import context_size


class Window(NamedTuple):
    """The window of a layer.

    Attributes:
      size: Number of tokens that a token sees, including itself.
      positions: int32, positions of the tokens of the call.
    """

    size: int
    positions: Array


def check_context(tokens: Array, context: AttentionContext) -> None:
    """Raises ValueError unless the fields of a context and the tokens agree."""
    name = "Model.apply"
    if context.prefix is not None and context.prefix_mask is None:
        raise ValueError(f"{name}: context.prefix needs context.prefix_mask.")
    if context.cache is not None and context.segments is not None:
        raise ValueError(f"{name}: context.segments cannot be used with context.cache.")
    if context.ends is not None and (context.cache is not None or context.segments is not None):
        other = "segments" if context.cache is None else "cache"
        raise ValueError(f"{name}: context.ends cannot be used with context.{other}.")
    if context.cache is not None and context.prompt_mask is not None:
        raise ValueError(
            f"{name}: context.prefix_mask without context.prefix cannot be used with context.cache."
        )
    if context.prompt_mask is None:
        checks.check_shape(name, "context.mask", context.mask, tokens.shape)
    else:
        checks.check_rank(name, 2, prefix_mask=context.prompt_mask)
        checks.check_rank(name, 3, mask=context.mask)
        P, G, T = context.mask.shape
        row = context.prompt_mask.shape[-1] + G * T
        checks.check_shape(name, "tokens of prompts and responses", tokens, (P, 1, row))
    if (tree := context.prompt_tree) is not None:
        if context.prompt_mask is None:
            raise ValueError(f"{name}: context.prompt_tree needs prompts in the rows of the call.")
        checks.check_same_shape(name, prefix_mask=context.prompt_mask, prompt_ends=tree.ends)
        checks.check_same_shape(name, mask=context.mask, leaves=tree.leaves)
    checks.check_same_shape(name, mask=context.mask, segments=context.segments, ends=context.ends)


def look_ahead(
    positions: Array, context: AttentionContext, block_length: int | None
) -> AttentionContext:
    """The context of a model that is not causal.

    Args:
      positions: int32 ``[P, G, T]``, of tokens that follow each other without gaps.
      context: Context of the call; unchanged if the caller has set ``ahead``.
      block_length: Tokens of a block; None for one block of any length.

    Raises:
      ValueError: If the context is one of a causal model: prompts that do not see the responses to
        them, segments, trees; or keys of a cache, which without blocks see nothing behind them.
    """
    if context.ahead is not None:
        return context
    name, T = "Model.apply", positions.shape[-1]
    for field in ("segments", "ends", "prompt_tree", "prompt_mask"):
        if getattr(context, field) is not None:
            what = "prefix_mask without context.prefix" if field == "prompt_mask" else field
            raise ValueError(f"{name}: context.{what} needs a causal model.")
    if block_length is None:
        if context.prefix is not None or context.cache is not None:
            what = "cache" if context.prefix is None else "prefix"
            raise ValueError(
                f"{name}: context.{what} needs keys that do not depend on later tokens; the model "
                "must be causal or have a block_length."
            )
        return context._replace(ahead=jnp.full(T, T - 1))
    return context._replace(ahead=block_length - 1 - positions % block_length)


class Rows(NamedTuple):
    """Rows of a prompt and of the responses to it, as c devices of the mesh axis ``context`` do.

    Device i has the i-th of c parts of the prompt, then that of each response, so that neither the
    prompt nor a response moves between devices where rows are divided into them. Without the axis
    c is 1: the prompt, then the responses one after the other.

    Attributes:
      prompt: Lp, a multiple of c.
      responses: G.
      length: T, a multiple of c.
      devices: c.
    """

    prompt: int
    responses: int
    length: int
    devices: int

    @classmethod
    def of(cls, context: AttentionContext) -> "Rows":
        """The rows of a context with prompts in them, whose fields have the lengths of the rows."""
        prompt_mask: Any = context.prompt_mask
        _, G, T = context.mask.shape
        return cls(prompt_mask.shape[-1], G, T, context_size())

    def split(self, x: Array, axis: int) -> tuple[Array, Array]:
        """``[P, 1, ..., c (Lp + G T) / c, ...]`` as prompts and responses.

        Returns:
          ``[P, 1, ..., Lp, ...]`` and ``[P, G, ..., T, ...]``.
        """
        axis, c, each = axis % x.ndim, self.devices, self.prompt // self.devices
        x = x.reshape(*x.shape[:axis], c, -1, *x.shape[axis + 1 :])
        prompts = jax.lax.slice_in_dim(x, 0, each, axis=axis + 1)
        x = jax.lax.slice_in_dim(x, each, None, axis=axis + 1)[:, 0]
        x = x.reshape(*x.shape[:axis], self.responses, -1, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x, axis, 1)
        return _merged(prompts, axis), _merged(x, axis)

    def join(self, prompts: Array, responses: Array) -> Array:
        """The inverse of ``split`` for an axis of 2."""
        (P, c), rest = (len(prompts), self.devices), prompts.shape[3:]
        responses = responses.reshape(P, self.responses, c, -1, *rest)
        responses = jnp.moveaxis(responses, 1, 2).reshape(P, c, -1, *rest)
        x = jnp.concatenate([prompts.reshape(P, c, -1, *rest), responses], axis=2)
        return x.reshape(P, 1, -1, *rest)


def _merged(x: Array, axis: int) -> Array:
    """Two axes of an array as one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def spread_rows(
    tokens: Array, positions: Array, context: AttentionContext
) -> tuple[Array, Array, AttentionContext]:
    """The tokens of a call as the devices of the mesh axis ``context`` have them, inside `on_mesh`.

    Prompts and responses get zeros at their ends, so that the axis divides them, and are in the
    order of :class:`Rows`. No token attends to what is added. Rows with a cache, and those of fewer
    tokens than there are devices, stay as they are.
    """
    size, T = context_size(), tokens.shape[-1]
    if size == 1 or context.cache is not None or (context.prompt_mask is None and size > T):
        return tokens, positions, context

    def pad(x: Array | None, axis: int = -1) -> Array | None:
        if x is None:
            return None
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % size)
        return jnp.pad(x, widths)

    padded = context._replace(
        mask=pad(context.mask),
        segments=pad(context.segments),
        ends=pad(context.ends),
        ahead=pad(context.ahead),
        experts=pad(context.experts, 2),
    )
    if context.prompt_mask is None:
        return pad(tokens), pad(positions), padded
    tree = None
    if context.prompt_tree is not None:
        tree = PromptTree(*map(pad, context.prompt_tree))
    padded = padded._replace(prefix_mask=pad(context.prefix_mask), prompt_tree=tree)
    before, after = Rows.of(context)._replace(devices=1), Rows.of(padded)

    def spread(x: Array) -> Array:
        return after.join(*map(pad, before.split(x, 2)))

    return spread(tokens), spread(positions), padded


def collect_rows(x: Array, axis: int, context: AttentionContext, padded: AttentionContext) -> Array:
    """The inverse of :func:`spread_rows` for arrays ``[P, G, ..., T, ...]`` of its tokens."""
    if context.prompt_mask is None:
        return jax.lax.slice_in_dim(x, 0, context.mask.shape[-1], axis=axis)
    prompts, responses = Rows.of(padded).split(x, axis)
    before = Rows.of(context)._replace(devices=1)
    prompts = jax.lax.slice_in_dim(prompts, 0, before.prompt, axis=axis)
    responses = jax.lax.slice_in_dim(responses, 0, before.length, axis=axis)
    axis = axis % x.ndim
    responses = _merged(jnp.moveaxis(responses, 1, axis - 1), axis - 1)[:, None]
    return jnp.concatenate([prompts, responses], axis=axis)


def take_experts(context: AttentionContext) -> tuple[Array | None, AttentionContext]:
    """The experts of the tokens of a call ``[P, G, T, L, k]``, zeros for prompts in its rows.

    Returns:
      The experts, in the order of :func:`spread_rows`, and the context without them.
    """
    experts, rest = context.experts, context._replace(experts=None)
    if experts is None or context.prompt_mask is None:
        return experts, rest
    P, Lp = context.prompt_mask.shape
    chooses = jnp.zeros((P, 1, Lp, *experts.shape[3:]), experts.dtype)
    return Rows.of(context).join(chooses, experts), rest


def update_cache(cache: KV, new: KV, index: Array) -> KV:
    """The cache of a layer with the keys and values of one call written into it.

    Args:
      cache: Keys ``[P, G, Hk, d, S]`` and values ``[P, G, Hk, S, d]``.
      new: The same of T tokens.
      index: int32, the first position to write: ``[]`` for all rows, or ``[P, G]``.

    Returns:
      The cache of the same shape.

    Raises:
      ValueError: If there are more tokens than the cache has room for.
    """
    if jnp.ndim(index) == 0:
        keys = jax.lax.dynamic_update_slice_in_dim(cache.keys, new.keys, index, axis=-1)
        values = jax.lax.dynamic_update_slice_in_dim(cache.values, new.values, index, axis=-2)
        return KV(keys, values)

    room, length = cache.values.shape[-2], new.values.shape[-2]
    if length > room:
        raise ValueError(f"Model.apply: {length} tokens do not fit in a cache of {room}.")

    if length == 1 and cache.keys.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # A scatter would copy the whole cache twice, as bits and back; this is one pass in place.
        start = jnp.clip(index, 0, room - 1)[..., None, None, None]
        new = KV(*(x.astype(jnp.bfloat16) for x in new))
        keys = jnp.where(jnp.arange(room) == start, new.keys, cache.keys)
        values = jnp.where(jnp.arange(room)[:, None] == start, new.values, cache.values)
        return KV(keys, values)

    # One scatter to distinct places, done where the cache lies. A window of one head each: TPUs
    # write those of several heads one after the other.
    def put(cache: Array, new: Array, start: Array, axis: int) -> Array:
        start = jnp.clip(start, 0, cache.shape[axis] - new.shape[axis])

        def write(cache: Array, new: Array, places: Array) -> Array:
            return cache.at[(slice(None),) * axis + (places,)].set(
                new, mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True
            )

        return scattered(write, cache, new, start + jnp.arange(new.shape[axis]))

    def of_rows(axis: int) -> Callable:
        of_heads = jax.vmap(partial(put, axis=axis), in_axes=(0, 0, None))
        return jax.vmap(jax.vmap(of_heads))

    return KV(of_rows(1)(cache.keys, new.keys, index), of_rows(0)(cache.values, new.values, index))


def _with_old(cache: KV, new: KV, index: Array, mask: Array) -> KV:
    """The keys and values of one call, with those of the cache for tokens that are masked."""
    P, G, T = mask.shape
    index = jnp.broadcast_to(jnp.asarray(index), (P, G))

    def choose(old: Array, new: Array, axis: int) -> Array:
        @jax.vmap
        @jax.vmap
        def take(row: Array, start: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(row, start, T, axis=axis)

        kept = mask[:, :, None, None, :] if axis == -1 else mask[:, :, None, :, None]
        return jnp.where(kept, new, take(old, index))

    return KV(choose(cache.keys, new.keys, -1), choose(cache.values, new.values, -2))


def context_attention(
    query: Array,
    new: KV,
    context: AttentionContext,
    *,
    keep_masked: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, KV]:
    """Attention of this call's tokens to prefix, cache and each other.

    With prompts in the rows of the call, G is 1 and T counts the prompt too.

    Args:
      query: ``[P, G, T, Hq, d]``, rotary embedding applied, not scaled.
      new: Keys ``[P, G, Hk, d, T]`` and values ``[P, G, Hk, T, d]`` of this call.
      context: Masks, prefix and cache, those of one layer: see :meth:`AttentionContext.of_layer`.
      keep_masked: Whether the cache keeps its entries for tokens that ``context.mask`` masks.
        Beside linear attention, a token that is read twice has other keys the second time.
      window: Window of the layer, if it has one.
      scale: Multiplies the scores; None for ``d ** -0.5``.
      cap: Soft cap of the scores, if any.
      sinks: Scores ``[Hq]`` without values, if any; see :func:`attend`.

    Returns:
      Outputs ``[P, G, T, Hq, d]`` in the query's dtype, and the KV to return: the updated cache, or
      ``new``.
    """
    attend_layer = partial(attend, scale=scale, cap=cap, sinks=sinks)
    if context.prompt_mask is not None:
        return _attend_rows(attend_layer, query, new, context, window), new
    T = query.shape[2]
    cache, before = _of_attention(context.cache), _of_attention(context.prefix)
    last = jnp.arange(T)
    if context.ahead is not None:
        last = jnp.minimum(last + context.ahead, T - 1)
    if cache is None:
        kv, key_mask = new, context.mask
    else:
        if keep_masked and T > 1:
            new = _with_old(cache, new, context.index, context.mask)
        kv, key_mask = update_cache(cache, new, context.index), None
        last = jnp.asarray(context.index)[..., None] + last
    sight = None if window is None else _sight(window, window.positions)
    if sight is not None and cache is not None:
        # A row of a cache has no gaps: the position of its place 0 says all.
        start = sight.places[..., :1] - jnp.asarray(context.index)[..., None]
        sight = sight._replace(places=start + jnp.arange(kv.keys.shape[-1]))
    prefix = None
    if before is not None and context.prefix_mask is not None:
        prefix = Prefix(before, context.prefix_mask)
    output = attend_layer(
        query,
        kv,
        last,
        key_mask=key_mask,
        segments=context.segments,
        ends=context.ends,
        prefix=prefix,
        sight=sight,
    )
    return output, kv


def _attend_rows(
    attend_layer: Callable, query: Array, new: KV, context: AttentionContext, window: Window | None
) -> Array:
    """Attention within rows of a prompt and its responses: of the prompt, then of the responses."""
    rows = Rows.of(context)
    (prompt_query, response_query), tree = rows.split(query, 2), context.prompt_tree
    prompts, responses = map(KV, rows.split(new.keys, -1), rows.split(new.values, -2))
    sight = of_responses = None
    if window is not None:
        sight, of_responses = (_sight(window, x) for x in rows.split(window.positions, 2))
    prefix = Prefix(KV(prompts.keys[:, 0], prompts.values[:, 0]), context.prompt_mask)
    if tree is not None:
        places = None if sight is None else sight.places[:, 0]
        prefix = prefix._replace(last=tree.leaves, ends=tree.ends, places=places)
    before = attend_layer(
        prompt_query,
        prompts,
        jnp.arange(rows.prompt),
        key_mask=prefix.mask[:, None],
        ends=None if tree is None else tree.ends[:, None],
        sight=sight,
    )
    after = attend_layer(
        response_query,
        responses,
        jnp.arange(rows.length),
        key_mask=context.mask,
        segments=context.segments,
        ends=context.ends,
        prefix=prefix,
        sight=of_responses,
    )
    return rows.join(before, after)


def _of_attention(layers: tuple[Cache, ...] | None) -> KV | None:
    """The keys and values of the one layer of a context."""
    if layers is None or isinstance(layers[0], DeltaState):
        return None
    return layers[0]


def _sight(window: Window, positions: Array) -> Sight:
    """What a window leaves of keys at these positions, of the tokens at these positions."""
    return Sight(positions - window.size + 1, positions)
