"""Attention over several sets of keys, computed separately and merged exactly.

For a query and a set A of keys with scores ``s``, let ``l_A = log sum exp s`` and ``o_A`` the
softmax average of the values. Two disjoint sets merge into their union by

    m = max(l_A, l_B),  w_A = exp(l_A - m),  w_B = exp(l_B - m)
    o = (w_A o_A + w_B o_B) / (w_A + w_B),   l = m + log(w_A + w_B)

so the keys of a prompt are stored once, and every rollout of its group attends to them. A soft cap
changes each score before this, ``s`` to ``cap tanh(s / cap)``, so that sets merge as without one.

A mask argument of None allows every key. The output of a query that sees no key is undefined.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.products import sum_of_products
from jaxrl_llm.core.kernels.soft_cap import soft_cap
from jaxrl_llm.models.attention_blocks import (
    MASKED,
    Seen,
    Sizes,
    attend_in_blocks,
    gradients_of_scores,
)
from jaxrl_llm.models.protocol import KV
from jaxrl_llm.models.sharding import context_size, over_context

# Attention is computed in blocks of about so many scores where there would be more than twice as
# many: what stays in a processor's caches, and what keeps an accelerator busy.
_SCORES = {"cpu": 2**20}
_SCORES_ELSEWHERE = 2**27
_SMALLEST_BLOCK = 64  # queries
_KEYS = 1024  # of a block
# A kernel takes its mask as an array over all rows; beyond so many elements blocks need less.
_LARGEST_MASK = 2**30

IMPLEMENTATIONS = ("plain", "xla", "cudnn")


class Sight(NamedTuple):
    """The earliest keys that queries see, by position; key j of a prompt has position j.

    Attributes:
      first: int32 ``[P, G, T]``, the position of the first key that each query sees.
      places: int32 ``[P, G, S]``, the positions of the keys of a row.
    """

    first: Array
    places: Array


class Prefix(NamedTuple):
    """The keys of the prompts, which the tokens of all rollouts see.

    Attributes:
      kv: Keys ``[P, Hk, d, Lp]`` and values ``[P, Hk, Lp, d]``.
      mask: bool ``[P, Lp]``, which keys exist.
      places: int32 ``[P, Lp]``, the positions of the keys, of a layer with a window; None for 0 to
        Lp - 1.
      last: int32 ``[P, G, T]``, the last key that each token sees; None for all.
      ends: int32 ``[P, Lp]``, the first key whose tokens do not see a key: a token sees keys
        ``j <= last < ends[j]``. Required with ``last``.
    """

    kv: KV
    mask: Array
    places: Array | None = None
    last: Array | None = None
    ends: Array | None = None


def _attend_whole(query: Array, kv: KV, seen: Seen, cap: float | None) -> tuple[Array, Array]:
    """:func:`attend_set` with all scores at once."""
    if jax.default_backend() == "cpu":
        return _attend_on_cpu(query, kv, seen, cap)
    # The gradients that jax derives take more products in float32, but on TPUs less memory.
    return _whole_forward(query, kv, seen, cap)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend_on_cpu(query: Array, kv: KV, seen: Seen, cap: float | None) -> tuple[Array, Array]:
    return _whole_forward(query, kv, seen, cap)[0]


def _whole_forward(query: Array, kv: KV, seen: Seen, cap: float | None):
    scores = soft_cap(jnp.matmul(query, kv.keys, preferred_element_type=jnp.float32), cap)
    visible = seen.visible(jnp.arange(scores.shape[-1]))
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    output = jnp.matmul(
        weights.astype(kv.values.dtype), kv.values, preferred_element_type=jnp.float32
    )
    output, lse = output / total, (top + jnp.log(total))[..., 0]
    return (output, lse), (query, kv, scores, output, lse)


def _whole_backward(cap: float | None, stored, cotangents):
    query, kv, scores, output, lse = stored
    d_output, d_lse = cotangents
    pull = sum_of_products(d_output, output) - d_lse
    d_query, d_kv = gradients_of_scores(query, kv, scores, lse, d_output, pull, cap)
    d_kv = jax.tree.map(lambda x, d: d.astype(x.dtype), kv, d_kv)
    return d_query.astype(query.dtype), d_kv, None


_attend_on_cpu.defvjp(_whole_forward, _whole_backward)


def block_sizes(rows: int, queries: int, keys: int) -> Sizes | None:
    """Sizes of the blocks in which scores ``[rows, queries, keys]`` are computed; None for all."""
    budget = _SCORES.get(jax.default_backend(), _SCORES_ELSEWHERE)
    if rows * queries * keys <= 2 * budget:
        return None
    keys = keys if keys <= 2 * _KEYS else _KEYS
    return Sizes(min(queries, max(_SMALLEST_BLOCK, budget // (rows * keys))), keys)


def attend_set(
    query: Array,
    kv: KV,
    *,
    seen: Seen | None = None,
    cap: float | None = None,
    sizes: Sizes | None = None,
) -> tuple[Array, Array]:
    """Softmax attention to one set of keys, with its log-sum-exp.

    Long inputs are computed in blocks of queries and keys, forward and backward, so that memory is
    linear in their numbers.

    Args:
      query: ``[..., N, d]``, already scaled.
      kv: Keys ``[..., d, S]`` and values ``[..., S, d]``, whose leading axes broadcast to those of
        the queries.
      seen: Which keys queries see; None for all.
      cap: Soft cap of the scores, if any.
      sizes: Queries and keys of a block; None chooses them from the shapes, or no blocks.

    Returns:
      Outputs ``[..., N, d]`` and log-sum-exp ``[..., N]``, float32. Where no key is seen the
      log-sum-exp is about -1e30, so that the set vanishes in :func:`merge_attention`.
    """
    count, length = query.shape[-2], kv.keys.shape[-1]
    seen = Seen() if seen is None else seen
    sizes = sizes or block_sizes(math.prod(query.shape[:-2]), count, length)
    kv = KV(*(jnp.broadcast_to(x, (*query.shape[:-2], *x.shape[-2:])) for x in kv))
    if sizes is None:
        return _attend_whole(query, kv, seen, cap)
    return attend_in_blocks(query, kv, seen, cap=cap, sizes=sizes)


def merge_attention(
    output_a: Array, lse_a: Array, output_b: Array, lse_b: Array
) -> tuple[Array, Array]:
    """Attention to the union of two disjoint sets of keys from the attention to each.

    Args:
      output_a, output_b: ``[..., d]`` outputs for each set.
      lse_a, lse_b: ``[...]`` log-sum-exp of its scores; -1e30 or less for an empty set.

    Returns:
      The merged output and log-sum-exp. Associative and commutative.

    Raises:
      ValueError: If the shapes disagree.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> a = jnp.array([1.731059]), jnp.array(2.313262)
      >>> b = jnp.array([3.268941]), jnp.array(0.313262)
      >>> o, l = jr.models.merge_attention(*a, *b)
      >>> round(float(o[0]), 6), round(float(l), 6)
      (1.914379, 2.44019)

    References:
      The merge of attention states in FlashInfer's documentation of cascade attention.
    """
    name = "merge_attention"
    checks.check_same_shape(name, lse_a=lse_a, lse_b=lse_b)
    for part, output in (("output_a", output_a), ("output_b", output_b)):
        checks.check_shape(name, part, output, (*jnp.shape(lse_a), *jnp.shape(output)[-1:]))
    return _merge(output_a, lse_a, output_b, lse_b)


@jax.custom_vjp
def _merge(output_a: Array, lse_a: Array, output_b: Array, lse_b: Array) -> tuple[Array, Array]:
    top = jnp.maximum(lse_a, lse_b)
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    output = (weight_a[..., None] * output_a + weight_b[..., None] * output_b) / total[..., None]
    return output, top + jnp.log(total)


def _merge_backward(parts, cotangents):
    """``do_A = s do`` and ``dl_A = s (t do . (o_A - o_B) + dl)``; s and t are the sets' shares."""
    output_a, lse_a, output_b, lse_b = parts
    d_output, d_lse = cotangents
    top = jnp.maximum(lse_a, lse_b)
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    share_a, share_b = (weight / (weight_a + weight_b) for weight in (weight_a, weight_b))
    shift = share_a * share_b * sum_of_products(d_output, output_a - output_b)
    grads = (
        share_a[..., None] * d_output,
        shift + share_a * d_lse,
        share_b[..., None] * d_output,
        share_b * d_lse - shift,
    )
    return tuple(grad.astype(part.dtype) for grad, part in zip(grads, parts, strict=True))


_merge.defvjp(lambda *parts: (_merge(*parts), parts), _merge_backward)


class Queries(NamedTuple):
    """What belongs to the tokens that attend; the fields are arguments of :func:`attend`.

    Attributes:
      query: ``[P, G, T, Hq, d]``.
      last: int32 ``[T]`` or ``[P, G, T]``.
      segments: int32 ``[P, G, T]``, or None.
      first: int32 ``[P, G, T]``, that of a :class:`Sight`, or None.
      last_of_prefix: int32 ``[P, G, T]``, that of a :class:`Prefix`, or None.
    """

    query: Array
    last: Array
    segments: Array | None = None
    first: Array | None = None
    last_of_prefix: Array | None = None


class Keys(NamedTuple):
    """What belongs to the keys of all rows, and to heads; the fields are arguments of `attend`.

    Attributes:
      kv: Keys ``[P, G, Hk, d, S]`` and values ``[P, G, Hk, S, d]``.
      mask: bool ``[P, G, S]``, or None.
      segments, ends: int32 ``[P, G, S]``, or None.
      places: int32 ``[P, G, S]``, those of a :class:`Sight`, or None.
      prefix: The keys of the prompts, without ``last``, or None.
      sinks: ``[Hq]``, or None.
    """

    kv: KV
    mask: Array | None = None
    segments: Array | None = None
    ends: Array | None = None
    places: Array | None = None
    prefix: Prefix | None = None
    sinks: Array | None = None


def plain_attention(queries: Queries, keys: Keys, scale: float | None, cap: float | None) -> Array:
    """:func:`attend` by plain products: the reference implementation."""
    P, G, T, heads, d = queries.query.shape
    kv, prefix = keys.kv, keys.prefix
    kv_heads = kv.keys.shape[-3]
    repeat = heads // kv_heads
    # [P, G, Hk, R, T, d]: the R query heads that share a key head become rows of one product.
    query = queries.query * (d**-0.5 if scale is None else scale)
    query = jnp.transpose(query.reshape(P, G, T, kv_heads, repeat, d), (0, 1, 3, 4, 2, 5))
    rows = query.reshape(P, G, kv_heads, repeat * T, d)

    def of_heads(x: Array) -> Array:
        """``[P, G, T]`` as the queries of a key head have it; of keys with one axis for heads."""
        return jnp.tile(x, repeat)[:, :, None]

    last = queries.last
    in_row = Seen(jnp.tile(last, repeat) if last.ndim == 1 else of_heads(last))
    if keys.mask is not None:
        in_row = in_row._replace(mask=keys.mask[:, :, None])
    if keys.ends is not None:
        in_row = in_row._replace(ends=keys.ends[:, :, None])
    if queries.segments is not None and keys.segments is not None:
        ids, key_ids = of_heads(queries.segments), keys.segments[:, :, None]
        in_row = in_row._replace(ids=ids, key_ids=key_ids)
    if queries.first is not None and keys.places is not None:
        first, places = of_heads(queries.first), keys.places[:, :, None]
        in_row = in_row._replace(first=first, places=places)
    output, lse = attend_set(rows, kv, seen=in_row, cap=cap)
    if prefix is not None:
        rows = jnp.swapaxes(query, 1, 2).reshape(P, kv_heads, G * repeat * T, d)

        def of_rows(x: Array) -> Array:
            """``[P, G, T]`` as the queries of ``rows`` have it."""
            return jnp.tile(x, repeat).reshape(P, 1, G * repeat * T)

        in_prefix = Seen(mask=prefix.mask[:, None])
        if queries.last_of_prefix is not None and prefix.ends is not None:
            last, ends = of_rows(queries.last_of_prefix), prefix.ends[:, None]
            in_prefix = in_prefix._replace(last=last, ends=ends)
        if queries.first is not None:
            first, places = of_rows(queries.first), _places(prefix)[:, None]
            in_prefix = in_prefix._replace(first=first, places=places)
        shared, shared_lse = attend_set(rows, prefix.kv, seen=in_prefix, cap=cap)
        shared = jnp.swapaxes(shared.reshape(P, kv_heads, G, repeat * T, d), 1, 2)
        shared_lse = jnp.swapaxes(shared_lse.reshape(P, kv_heads, G, repeat * T), 1, 2)
        output, lse = merge_attention(output, lse, shared, shared_lse)
    if keys.sinks is not None:
        # One more term of the softmax, which has no value: exp(l) / (exp(l) + exp(sink)).
        sinks = keys.sinks.astype(jnp.float32).reshape(kv_heads, repeat)
        output = output * jax.nn.sigmoid(lse - jnp.repeat(sinks, T, axis=1))[..., None]
    output = jnp.transpose(output.reshape(P, G, kv_heads, repeat, T, d), (0, 1, 4, 2, 3, 5))
    return output.reshape(P, G, T, heads, d)


def fused_attention(
    queries: Queries, keys: Keys, scale: float | None, implementation: str
) -> Array:
    """:func:`attend` by one call of ``jax.nn.dot_product_attention``.

    Its residual has the dtype of the model and no gradient, so it cannot be merged. Instead the
    keys of the prefix are put before those of each rollout.
    """
    P, G, T, _, d = queries.query.shape
    kv, prefix = keys.kv, keys.prefix
    row = Seen(
        queries.last,
        queries.segments,
        queries.first,
        mask=keys.mask,
        key_ids=keys.segments,
        ends=keys.ends,
        places=keys.places,
    )
    visible = row.visible(jnp.arange(kv.keys.shape[-1]))
    visible = jnp.broadcast_to(visible, (P, G, T, kv.keys.shape[-1]))
    of_rows, values = jnp.moveaxis(kv.keys, -1, 2), jnp.swapaxes(kv.values, 2, 3)
    if prefix is not None:
        shared = prefix.kv
        rows = (P, G, shared.keys.shape[-1])
        before = KV(jnp.moveaxis(shared.keys, -1, 1), jnp.swapaxes(shared.values, 1, 2))
        before = KV(*(jnp.broadcast_to(x[:, None], (*rows, *x.shape[2:])) for x in before))
        ends = None if prefix.ends is None else prefix.ends[:, None]
        in_prefix = Seen(queries.last_of_prefix, mask=prefix.mask[:, None], ends=ends)
        if queries.first is not None:
            places = _places(prefix)[:, None]
            in_prefix = in_prefix._replace(first=queries.first, places=places)
        seen = jnp.broadcast_to(in_prefix.visible(jnp.arange(rows[-1])), (P, G, T, rows[-1]))
        of_rows = jnp.concatenate([before.keys, of_rows], axis=2)
        values = jnp.concatenate([before.values, values], axis=2)
        visible = jnp.concatenate([seen, visible], axis=-1)

    def flat(x: Array) -> Array:
        return x.reshape(P * G, *x.shape[2:])

    output = jax.nn.dot_product_attention(
        flat(queries.query),
        flat(of_rows),
        flat(values),
        mask=flat(visible)[:, None],
        scale=d**-0.5 if scale is None else scale,
        implementation=implementation,
    )
    return output.reshape(queries.query.shape)


def _places(prefix: Prefix) -> Array:
    """The positions ``[P, Lp]`` of the keys of a prefix."""
    if prefix.places is not None:
        return prefix.places
    return jnp.broadcast_to(jnp.arange(prefix.mask.shape[-1]), prefix.mask.shape)


def has_cudnn() -> bool:
    """Whether programs run on a GPU that has cuDNN's attention."""
    if jax.default_backend() != "gpu":
        return False
    # "9.0"; that of AMD's is a name such as "gfx942".
    major, _, minor = getattr(jax.devices()[0], "compute_capability", "").partition(".")
    return major.isdigit() and minor.isdigit() and int(major) >= 8


def attend(
    query: Array,
    kv: KV,
    last: Array,
    *,
    key_mask: Array | None = None,
    segments: Array | None = None,
    ends: Array | None = None,
    prefix: Prefix | None = None,
    sight: Sight | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Attention of the tokens of G rollouts to the keys of their row and of their prompt.

    On a mesh with an axis ``context``, each of its devices computes some of the tokens and has all
    keys.

    Args:
      query: ``[P, G, T, Hq, d]``, not scaled.
      kv: Keys ``[P, G, Hk, d, S]`` and values ``[P, G, Hk, S, d]``.
      last: int32 ``[T]`` or ``[P, G, T]``, the last key of its row that a token sees.
      key_mask: bool ``[P, G, S]``, which keys of a row exist.
      segments: int32 ``[P, G, T]``, where several responses lie in one row and the keys are
        those of the queries (S = T): a token sees keys of its segment only.
      ends: int32 ``[P, G, T]``, where a row is a tree and the keys are those of the queries: token
        i sees key j only where ``i < ends[j]``.
      prefix: The keys of the prompts, if any.
      sight: The earliest keys that tokens see, of a layer with a window.
      scale: Multiplies the scores; None for ``d ** -0.5``.
      cap: Soft cap of the scores, ``cap tanh(score / cap)`` before the masks; None for none.
      sinks: ``[Hq]``, a score of each head that joins the softmax without a value; None for none.
      implementation: ``"plain"``, or ``"xla"`` or ``"cudnn"`` of ``jax.nn.dot_product_attention``,
        which have neither cap nor sinks; None uses cuDNN where the GPU and the arguments allow it,
        else ``"plain"``.

    Returns:
      ``[P, G, T, Hq, d]`` in the query's dtype.

    Raises:
      ValueError: If ``implementation`` is unknown, or does not support these shapes, cap or sinks.
    """
    if implementation is None:
        # cuDNN's for many tokens in half precision. While decoding, the cache would have to be
        # copied into the layout of its kernel at every step.
        P, G, T, _, d = query.shape
        row_length = kv.keys.shape[-1]
        length = row_length + (0 if prefix is None else prefix.mask.shape[-1])
        half = query.dtype in (jnp.bfloat16, jnp.float16)
        here = -(-T // context_size()) if context_size() <= T else T  # tokens on one device
        takes = half and d % 8 == 0 and d <= 128 and here % 2 == 0 and length % 2 == 0
        takes = takes and row_length == T and P * G * T * length <= _LARGEST_MASK
        takes = takes and cap is None and sinks is None
        implementation = "cudnn" if takes and has_cudnn() else "plain"
    checks.check_option("attend", "implementation", implementation, IMPLEMENTATIONS)
    if implementation != "plain" and cap is not None:
        raise ValueError(
            f"attend: implementation {implementation!r} has no soft cap of scores; use 'plain' "
            f"for the cap {cap:g}."
        )
    if implementation != "plain" and sinks is not None:
        raise ValueError(
            f"attend: implementation {implementation!r} has no attention sinks; use 'plain'."
        )
    first, places = (None, None) if sight is None else sight
    last_of_prefix = None if prefix is None else prefix.last
    shown = None if prefix is None else prefix._replace(last=None)
    queries = Queries(query, last, segments, first, last_of_prefix)
    keys = Keys(kv, key_mask, segments, ends, places, shown, sinks)

    def of_tokens(queries: Queries, keys: Keys) -> Array:
        if implementation == "plain":
            return plain_attention(queries, keys, scale, cap)
        return fused_attention(queries, keys, scale, implementation)

    return over_context(of_tokens, queries, keys).astype(query.dtype)
