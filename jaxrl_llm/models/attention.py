"""Attention over several sets of keys, computed apart and merged exactly.

For a query and a set A of keys with scores ``s``, let ``l_A = log sum exp s`` and ``o_A`` the
softmax average of the values. Two disjoint sets merge into their union by

    m = max(l_A, l_B),  w_A = exp(l_A - m),  w_B = exp(l_B - m)
    o = (w_A o_A + w_B o_B) / (w_A + w_B),   l = m + log(w_A + w_B)

so the keys of a prompt can be held once and attended to by every rollout of its group.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.models.protocol import KV, AttentionContext

# Finite, so that a query without any key gets a weight of zero in the merge and not a NaN.
_MASKED = -1e30


def attend(query: Array, kv: KV, mask: Array) -> tuple[Array, Array]:
    """Softmax attention to one set of keys, with its log-sum-exp.

    Args:
      query: ``[..., N, d]``, already scaled.
      kv: Keys ``[..., d, S]`` and values ``[..., S, d]``.
      mask: bool, broadcastable to ``[..., N, S]``.

    Returns:
      Outputs ``[..., N, d]`` and log-sum-exp ``[..., N]``, float32. Where no key is kept the output
      is meaningless and the log-sum-exp about -1e30, so that it vanishes in
      :func:`merge_attention`.
    """
    scores = jnp.matmul(query, kv.keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores, _MASKED)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    output = jnp.matmul(
        weights.astype(kv.values.dtype), kv.values, preferred_element_type=jnp.float32
    )
    return output / total, (top + jnp.log(total))[..., 0]


def merge_attention(
    output_a: Array, lse_a: Array, output_b: Array, lse_b: Array
) -> tuple[Array, Array]:
    """Attention to the union of two disjoint sets of keys from the attention to each.

    Args:
      output_a: ``[..., d]`` outputs for the first set.
      lse_a: ``[...]`` log-sum-exp of its scores; -1e30 or less for an empty set.
      output_b: ``[..., d]`` outputs for the second set.
      lse_b: ``[...]`` log-sum-exp of its scores.

    Returns:
      The merged output and log-sum-exp. Associative and commutative.

    Example:
      >>> import jax.numpy as jnp
      >>> o, l = merge_attention(jnp.array([1.731059]), jnp.array(2.313262),
      ...                        jnp.array([3.268941]), jnp.array(0.313262))
      >>> round(float(o[0]), 6), round(float(l), 6)
      (1.914379, 2.44019)
    """
    top = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    output = (weight_a[..., None] * output_a + weight_b[..., None] * output_b) / total[..., None]
    return output, top + jnp.log(total)


def _write(cache: KV, own: KV, index: Array) -> KV:
    """The cache with this call's keys and values at ``index``, one place for all rows or each."""
    if jnp.ndim(index) == 0:
        keys = jax.lax.dynamic_update_slice_in_dim(cache.keys, own.keys, index, axis=-1)
        values = jax.lax.dynamic_update_slice_in_dim(cache.values, own.values, index, axis=-2)
        return KV(keys, values)

    def row(c: KV, o: KV, i: Array) -> KV:
        return _write(c, o, i)

    return jax.vmap(jax.vmap(row))(cache, own, index)


def _own_mask(context: AttentionContext, keys: Array, length: int) -> Array:
    """Which key positions each token of this call may see: ``[P or 1, G or 1, T, S]``."""
    steps = jnp.arange(length)
    if context.cache is None:
        causal = steps[:, None] >= steps[None, :]
        return causal & context.mask[:, :, None, :]
    last = jnp.asarray(context.index)[..., None] + steps
    visible = jnp.arange(keys.shape[-1]) <= last[..., None]
    return visible.reshape((1,) * (4 - visible.ndim) + visible.shape)


def context_attention(
    query: Array, own: KV, context: AttentionContext, layer: int
) -> tuple[Array, KV]:
    """Attention of this call's tokens to prefix, cache and each other.

    Args:
      query: ``[P, G, T, Hq, d]``, rotary embedding applied, not scaled.
      own: Keys ``[P, G, Hk, d, T]`` and values ``[P, G, Hk, T, d]`` of this call.
      context: What else there is to attend to.
      layer: Which layer's prefix and cache to read.

    Returns:
      Outputs ``[P, G, T, Hq, d]`` in the query's dtype, and the KV to hand on: the updated cache,
      or ``own``.
    """
    P, G, T, heads, d = query.shape
    kv_heads = own.keys.shape[-3]
    repeat = heads // kv_heads
    kv = own if context.cache is None else _write(context.cache[layer], own, context.index)
    # [P, G, Hk, R, T, d]: the R query heads that share a key head become rows of one product.
    query = (query * d**-0.5).reshape(P, G, T, kv_heads, repeat, d)
    query = jnp.transpose(query, (0, 1, 3, 4, 2, 5))
    mask = jnp.broadcast_to(
        _own_mask(context, kv.keys, T)[:, :, None], (P, G, repeat, T, kv.keys.shape[-1])
    ).reshape(P, G, 1, repeat * T, -1)
    output, lse = attend(query.reshape(P, G, kv_heads, repeat * T, d), kv, mask)
    if context.prefix is not None:
        if context.prefix_mask is None:
            raise ValueError("Model.apply: context.prefix needs context.prefix_mask.")
        rows = jnp.swapaxes(query, 1, 2).reshape(P, kv_heads, G * repeat * T, d)
        prefix_mask = context.prefix_mask[:, None, None, :]
        shared, shared_lse = attend(rows, context.prefix[layer], prefix_mask)
        shared = jnp.swapaxes(shared.reshape(P, kv_heads, G, repeat * T, d), 1, 2)
        shared_lse = jnp.swapaxes(shared_lse.reshape(P, kv_heads, G, repeat * T), 1, 2)
        output, _ = merge_attention(output, lse, shared, shared_lse)
    output = jnp.transpose(output.reshape(P, G, kv_heads, repeat, T, d), (0, 1, 4, 2, 3, 5))
    return output.reshape(P, G, T, heads, d).astype(query.dtype), kv
