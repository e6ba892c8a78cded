"""What a call may attend to: prompts in its own rows, and contexts that make no sense."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.models import KV, AttentionContext
from jaxrl_llm.models.context import check_context, context_attention
from jaxrl_llm.testing import tiny_model

P, G, T, LENGTH = 2, 3, 4, 5


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@for_each("segmented", [False, True])
def test_prompts_in_the_rows_are_the_prefix_of_their_responses(segmented):
    heads, kv_heads, d = 4, 2, 8
    kept = jnp.arange(LENGTH) < jnp.array([[5], [2]])
    mask = jnp.ones((P, G, T), bool).at[0, 1, 3].set(False)
    segments = jnp.broadcast_to(jnp.array([0, 0, 1, 1]), mask.shape) if segmented else None
    prompts = KV(draw(1, P, kv_heads, d, LENGTH), draw(2, P, kv_heads, LENGTH, d))
    own = KV(draw(3, P, G, kv_heads, d, T), draw(4, P, G, kv_heads, T, d))
    query_of_prompts, query = draw(5, P, 1, LENGTH, heads, d), draw(6, P, G, T, heads, d)

    @jax.jit
    def apart(query, kv, mask, **parts):
        return context_attention(query, kv, AttentionContext(mask, **parts), cap=0.7)[0]

    before = apart(query_of_prompts, KV(*(x[:, None] for x in prompts)), kept[:, None])
    after = apart(query, own, mask, prefix=(prompts,), prefix_mask=kept, segments=segments)
    want = jnp.concatenate([before, after.reshape(P, 1, G * T, heads, d)], axis=2)

    keys = jnp.moveaxis(own.keys, 1, -2).reshape(P, kv_heads, d, G * T)
    values = jnp.moveaxis(own.values, 1, 2).reshape(P, kv_heads, G * T, d)
    rows = KV(
        jnp.concatenate([prompts.keys, keys], -1)[:, None],
        jnp.concatenate([prompts.values, values], -2)[:, None],
    )
    queries = jnp.concatenate([query_of_prompts, query.reshape(P, 1, G * T, heads, d)], axis=2)
    context = AttentionContext(mask, prefix_mask=kept, segments=segments)
    got, kv = jax.jit(partial(context_attention, cap=0.7))(queries, rows, context)
    np.testing.assert_allclose(got, want, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, kv, rows)


CACHE = (KV(jnp.ones((P, G, 1, 4, 3)), jnp.ones((P, G, 1, 3, 4))),)
MASK = jnp.ones((P, G, T), bool)
IDS = MASK.astype(int)
PREFIX_MASK = jnp.ones((P, LENGTH), bool)


@for_each(
    ("parts", "message"),
    [
        ({"prefix": CACHE}, "context.prefix needs context.prefix_mask"),
        ({"cache": CACHE, "segments": IDS}, "context.segments cannot be used with context.cache"),
        ({"segments": IDS, "ends": IDS}, "context.ends cannot be used with context.segments"),
        ({"cache": CACHE, "ends": IDS}, "context.ends cannot be used with context.cache"),
        ({"cache": CACHE, "prefix_mask": PREFIX_MASK}, "context.prefix_mask without"),
        ({"prefix_mask": PREFIX_MASK}, r"prompts and responses must have shape \(2, 1, 17\)"),
        ({"prefix_mask": PREFIX_MASK[0]}, "prefix_mask must have 2 axes"),
        ({"mask": MASK[:, :1]}, r"context.mask must have shape \(2, 3, 4\)"),
        ({"segments": jnp.zeros((P, G, 1), int)}, "these must have the same shape"),
    ],
)
def test_a_context_that_does_not_fit_is_named(parts, message):
    context = AttentionContext(**{"mask": MASK} | parts)
    with pytest.raises(ValueError, match=f"Model.apply: .*{message}"):
        check_context(jnp.ones((P, G, T), int), context)


def test_the_decoder_checks_its_context():
    model, params = tiny_model(num_layers=1)
    tokens = jnp.ones((P, 1, LENGTH + G * T), int)
    context = AttentionContext(MASK, prefix_mask=PREFIX_MASK)
    hidden, kv = model.apply(params, tokens, tokens, context)
    assert hidden.shape == (*tokens.shape, model.config.width)
    assert kv[0].values.shape[-2] == tokens.shape[-1]
    with pytest.raises(ValueError, match="prompts and responses must have shape"):
        model.apply(params, tokens[..., 1:], tokens[..., 1:], context)


@for_each(("length", "dtype"), [(1, jnp.float32), (1, jnp.bfloat16), (3, jnp.bfloat16)])
def test_each_row_is_written_at_its_own_place(length, dtype):
    room, heads, d = 7, 2, 4
    cache = KV(draw(1, P, G, heads, d, room), draw(2, P, G, heads, room, d))
    own = KV(draw(3, P, G, heads, d, length), draw(4, P, G, heads, length, d))
    cache, own = jax.tree.map(lambda x: x.astype(dtype), (cache, own))

    @jax.jit
    def written(cache, index):
        query = draw(5, P, G, length, heads, d).astype(dtype)
        context = AttentionContext(jnp.ones((P, G, length), bool), cache=(cache,), index=index)
        return context_attention(query, own, context)[1]

    index = jnp.array([[0, 2, 4], [3, 9, 1]])  # one lies too far, and is moved back
    found = written(cache, index)
    keys, values = np.array(cache.keys), np.array(cache.values)
    for p, g in np.ndindex(P, G):
        start = min(int(index[p, g]), room - length)
        keys[p, g, :, :, start : start + length] = own.keys[p, g]
        values[p, g, :, start : start + length] = own.values[p, g]
    np.testing.assert_array_equal(found.keys, keys)
    np.testing.assert_array_equal(found.values, values)
    one = written(cache, jnp.int32(2))
    for a, b in zip(one, written(cache, jnp.full((P, G), 2)), strict=True):
        np.testing.assert_array_equal(a, b)
    if length > 1:
        with pytest.raises(ValueError, match="3 tokens do not fit in a cache of 2"):
            written(KV(cache.keys[..., :2], cache.values[..., :2, :]), index)


@for_each("dtype", [jnp.float32, jnp.bfloat16])
def test_decoding_reads_no_cache_as_bits(dtype):
    """On CPUs an array as bits is a copy, of the whole cache for a scatter of bfloat16."""
    heads, d, room = 2, 4, 512
    shapes = (P, G, heads, d, room), (P, G, heads, room, d)
    cache = KV(*(jnp.zeros(shape, dtype) for shape in shapes))
    own = KV(jnp.ones((P, G, heads, d, 1), dtype), jnp.ones((P, G, heads, 1, d), dtype))

    def decode(cache, index):
        def step(t, carry):
            query, cache = carry
            context = AttentionContext(jnp.ones((P, G, 1), bool), cache=(cache,), index=index + t)
            return context_attention(query, own, context)

        return jax.lax.fori_loop(0, 3, step, (jnp.ones((P, G, 1, heads, d), dtype), cache))

    index = jnp.zeros((P, G), int)
    program = jax.jit(decode, donate_argnums=0).lower(cache, index).compile()
    assert "bitcast-convert(" not in program.as_text()
    assert (program(cache, index)[1].keys.sum(-1) == 3).all()
