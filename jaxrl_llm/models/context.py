"""Attention of the tokens of one call to the contents of its :class:`AttentionContext`."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.models.attention import Prefix, Sight, attend
from jaxrl_llm.models.protocol import KV, AttentionContext


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

    # One scatter to distinct places, done where the cache lies. A window of one head each: TPUs
    # write those of several heads one after the other.
    def put(cache: Array, new: Array, start: Array, axis: int) -> Array:
        start = jnp.clip(start, 0, cache.shape[axis] - new.shape[axis])
        places = (slice(None),) * axis + (start + jnp.arange(new.shape[axis]),)
        return cache.at[places].set(
            new, mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True
        )

    def of_rows(axis: int) -> Callable:
        of_heads = jax.vmap(partial(put, axis=axis), in_axes=(0, 0, None))
        return jax.vmap(jax.vmap(of_heads))

    return KV(of_rows(1)(cache.keys, new.keys, index), of_rows(0)(cache.values, new.values, index))


def context_attention(
    query: Array,
    new: KV,
    context: AttentionContext,
    *,
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
      window: Window of the layer, if it has one.
      scale: Multiplies the scores; None for ``d ** -0.5``.
      cap: Soft cap of the scores, if any.
      sinks: Scores ``[Hq]`` without values, if any; see :func:`attend`.

    Returns:
      Outputs ``[P, G, T, Hq, d]`` in the query's dtype, and the KV to return: the updated cache, or
      ``new``.
    """
    if context.prompt_mask is not None:
        # Rows of a prompt and the responses to it, [P, 1, Lp + G T].
        (P, G, T), length = context.mask.shape, context.prompt_mask.shape[-1]

        def responses(x: Array, axis: int) -> Array:
            """``[P, 1, ..., Lp + G T, ...]`` as ``[P, G, ..., T, ...]``."""
            x = jax.lax.slice_in_dim(x[:, 0], length, None, axis=axis)
            axis += x.ndim
            x = x.reshape(*x.shape[:axis], G, T, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 1)

        prompts = KV(new.keys[..., :length], new.values[..., :length, :])
        sight, tree = _sight(window, lambda x: x[:, :, :length]), context.prompt_tree
        prefix = Prefix(KV(prompts.keys[:, 0], prompts.values[:, 0]), context.prompt_mask)
        if tree is not None:
            places = None if sight is None else sight.places[:, 0]
            prefix = prefix._replace(last=tree.leaves, ends=tree.ends, places=places)
        before = attend(
            query[:, :, :length],
            prompts,
            jnp.arange(length),
            key_mask=context.prompt_mask[:, None],
            ends=None if tree is None else tree.ends[:, None],
            sight=sight,
            scale=scale,
            cap=cap,
            sinks=sinks,
        )
        after = attend(
            responses(query, -3),
            KV(responses(new.keys, -1), responses(new.values, -2)),
            jnp.arange(T),
            key_mask=context.mask,
            segments=context.segments,
            ends=context.ends,
            prefix=prefix,
            sight=_sight(window, lambda x: responses(x, -1)),
            scale=scale,
            cap=cap,
            sinks=sinks,
        )
        after = after.reshape(P, 1, G * T, *after.shape[3:])
        return jnp.concatenate([before, after], axis=2), new
    T = query.shape[2]
    last = jnp.arange(T)
    if context.ahead is not None:
        last = jnp.minimum(last + context.ahead, T - 1)
    if context.cache is None:
        kv, key_mask = new, context.mask
    else:
        kv, key_mask = update_cache(context.cache[0], new, context.index), None
        last = jnp.asarray(context.index)[..., None] + last
    sight = _sight(window, lambda x: x)
    if sight is not None and context.cache is not None:
        # A row of a cache has no gaps: the position of its place 0 says all.
        start = sight.places[..., :1] - jnp.asarray(context.index)[..., None]
        sight = sight._replace(places=start + jnp.arange(kv.keys.shape[-1]))
    prefix = None
    if context.prefix is not None and context.prefix_mask is not None:
        prefix = Prefix(context.prefix[0], context.prefix_mask)
    output = attend(
        query,
        kv,
        last,
        key_mask=key_mask,
        segments=context.segments,
        ends=context.ends,
        prefix=prefix,
        sight=sight,
        scale=scale,
        cap=cap,
        sinks=sinks,
    )
    return output, kv


def _sight(window: Window | None, of_call: Callable[[Array], Array]) -> Sight | None:
    """What a window leaves of the keys of a call, whose positions ``of_call`` takes."""
    if window is None:
        return None
    positions = of_call(window.positions)
    return Sight(positions - window.size + 1, positions)
