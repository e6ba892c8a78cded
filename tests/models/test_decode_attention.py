"""The kernel for decoding on GPUs, interpreted: against plain products, and where it is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import KV, AttentionContext, context
from jaxrl_llm.models.attention import Prefix, attend
from jaxrl_llm.models.context import Window, context_attention, update_cache
from jaxrl_llm.models.decode_attention import Grid, decode_attention, takes_kernel

D = 16


def _inputs(P, G, kv_heads, repeat, length, prompt, *, seed=0):
    """A query, a new token, a cache, its places, and prompts with gaps, of which one is short."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    query = normal(P, G, 1, kv_heads * repeat, D)
    new = KV(normal(P, G, kv_heads, D, 1), normal(P, G, kv_heads, 1, D))
    cache = KV(normal(P, G, kv_heads, D, length), normal(P, G, kv_heads, length, D))
    index = jnp.asarray(rng.integers(0, length, (P, G)), jnp.int32).at[0, 0].set(0)
    index = index.at[-1, -1].set(length - 1)
    prefix = KV(normal(P, kv_heads, D, prompt), normal(P, kv_heads, prompt, D))
    mask = jnp.asarray(rng.random((P, prompt)) < 0.8).at[0, 3:].set(False)
    return query, new, cache, index, prefix, mask


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [
        ((2, 3, 2, 2, 64, 128), None),
        ((2, 2, 2, 1, 70, 50), None),
        ((1, 5, 2, 4, 200, 300), Grid(32, 16, 3, 2)),
        ((1, 9, 1, 8, 32, 64), Grid(32, 16, 1, 1)),
    ],
)
@pytest.mark.parametrize("prompts", [True, False])
def test_it_is_plain_attention(sizes, grid, prompts):
    """In parts and whole, with blocks that are cut, groups of several blocks, and no prompts."""
    query, new, cache, index, prefix, mask = _inputs(*sizes)
    if not prompts:
        prefix = mask = None
        grid = None if grid is None else grid._replace(prompt_parts=0)
    kv = update_cache(cache, new, index)
    expected = attend(
        query,
        kv,
        index[..., None],
        prefix=Prefix(prefix, mask) if prompts else None,
        implementation="plain",
    )[:, :, 0]
    output, written = decode_attention(
        query[:, :, 0] * D**-0.5,
        KV(new.keys[..., 0], new.values[..., 0, :]),
        cache,
        index,
        prefix=prefix,
        prefix_mask=mask,
        grid=grid,
        interpret=True,
    )
    np.testing.assert_allclose(output, expected.astype(jnp.float32), atol=0.02)
    assert jnp.all(written.keys == kv.keys)
    assert jnp.all(written.values == kv.values)


def test_what_a_prompt_hides_does_not_reach_the_output():
    """Nor what lies in the cache from the place of the token on."""
    query, new, cache, index, prefix, mask = _inputs(2, 3, 2, 2, 64, 128)

    def run(cache, prefix):
        return decode_attention(
            query[:, :, 0],
            KV(new.keys[..., 0], new.values[..., 0, :]),
            cache,
            index,
            prefix=prefix,
            prefix_mask=mask,
            interpret=True,
        )[0]

    def hide(kv, kept):
        return KV(
            jnp.where(kept[..., None, :], kv.keys, 9), jnp.where(kept[..., None], kv.values, 9)
        )

    before = (jnp.arange(64) < index[..., None])[:, :, None]
    changed = run(hide(cache, before), hide(prefix, mask[:, None]))
    np.testing.assert_array_equal(run(cache, prefix), changed)


@pytest.fixture
def on_gpu(monkeypatch):
    """As on a GPU: the kernel is taken, and interpreted."""
    calls = []

    def kernel(*inputs, **options):
        calls.append(inputs[0].shape)
        return decode_attention(*inputs, **options, interpret=True)

    monkeypatch.setattr(context, "takes_kernel", lambda query, cache: True)
    monkeypatch.setattr(context, "decode_attention", kernel)
    return calls


@pytest.mark.parametrize("one_place", [True, False])
def test_a_step_of_a_context_takes_it(on_gpu, one_place):
    query, new, cache, index, prefix, mask = _inputs(2, 3, 2, 2, 64, 32)
    index = jnp.int32(5) if one_place else index
    ones = jnp.ones((2, 3, 1), bool)
    here = AttentionContext(ones, (prefix,), mask, (cache,), index).of_layer(0)
    output, kv = context_attention(query, new, here, scale=0.5)
    assert on_gpu == [(2, 3, 4, D)]
    last = jnp.broadcast_to(index, (2, 3))[..., None]
    updated = update_cache(cache, new, index)
    expected = attend(query, updated, last, prefix=Prefix(prefix, mask), scale=0.5)
    np.testing.assert_allclose(*(x.astype(jnp.float32) for x in (output, expected)), atol=0.03)
    assert jnp.all(kv.keys == updated.keys)


@pytest.mark.parametrize("why", ["window", "cap", "sinks", "tokens"])
def test_other_attention_stays_plain(on_gpu, why):
    query, new, cache, index, prefix, mask = _inputs(2, 3, 2, 2, 64, 32)
    options = {
        "window": {"window": Window(4, index[..., None] + 32)},
        "cap": {"cap": 5.0},
        "sinks": {"sinks": jnp.zeros(4)},
        "tokens": {},
    }[why]
    if why == "tokens":
        query, new = jnp.repeat(query, 2, 2), KV(new.keys.repeat(2, -1), new.values.repeat(2, -2))
        index = jnp.minimum(index, 62)
    ones = jnp.ones(query.shape[:3], bool)
    here = AttentionContext(ones, (prefix,), mask, (cache,), index).of_layer(0)
    context_attention(query, new, here, **options)
    assert not on_gpu


def test_processors_have_no_kernel():
    query, _, cache, *_ = _inputs(2, 3, 2, 2, 64, 32)
    assert not takes_kernel(query, cache)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"dtype": jnp.float32}, False),
        ({"d": 48}, False),
        ({"heads": 64}, False),
        ({"devices": 2}, False),
        ({"capability": "8.9"}, False),
        ({"capability": "90.0"}, False),
        ({"capability": "gfx942"}, False),
    ],
)
def test_where_it_is_taken(monkeypatch, change, taken):
    case = {"dtype": jnp.bfloat16, "d": 128, "heads": 16, "devices": 1, "capability": "9.0"}
    case |= change
    device = type("Device", (), {"compute_capability": case["capability"]})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device] * case["devices"])
    triton = pytest.importorskip("jax.experimental.pallas.triton")
    monkeypatch.setattr(triton, "get_gpu_info", dict, raising=False)
    query = jnp.zeros((1, 1, 1, case["heads"], case["d"]), case["dtype"])
    cache = KV(*(jnp.zeros((1, 1, 2, case["d"], case["d"]), case["dtype"]),) * 2)
    assert takes_kernel(query, cache) == taken


def test_a_grid_keeps_a_gpu_busy_with_blocks_to_share():
    query = jnp.zeros((8, 8, 16, 128))
    cache = KV(jnp.zeros((8, 8, 8, 128, 256)), jnp.zeros((8, 8, 8, 256, 128)))
    prefix = KV(jnp.zeros((8, 8, 128, 512)), jnp.zeros((8, 8, 512, 128)))
    assert Grid.of(query, cache, prefix) == Grid(64, 16, 4, 1)
    assert Grid.of(query, cache, None) == Grid(64, 16, 0, 1)
    one = KV(*(x[:1, :1] for x in cache))
    assert Grid.of(query[:1, :1], one, None).row_parts == 2
