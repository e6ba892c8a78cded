"""The kernel for decoding on GPUs, interpreted: against plain products, and where it is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import KV, attention
from jaxrl_llm.models.attention import Prefix, Sight, attend, attend_set
from jaxrl_llm.models.attention_blocks import Seen
from jaxrl_llm.models.filled_attention import Grid, attend_filled

D = 16


def _normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def _kv(rng, *lead, length):
    return KV(_normal(rng, *lead, D, length), _normal(rng, *lead, length, D))


@pytest.mark.parametrize("grid", [None, Grid(16, 1), Grid(16, 3)])
@pytest.mark.parametrize(
    ("queries", "length", "masked"), [(2, 256, False), (20, 200, True), (3, 50, True)]
)
def test_it_is_plain_attention(queries, length, masked, grid):
    rng = np.random.default_rng(0)
    query, kv = _normal(rng, 2, 3, queries, D), _kv(rng, 2, 3, length=length)
    last = jnp.asarray(rng.integers(0, length, (2, queries)), jnp.int32)
    mask = jnp.asarray(rng.random((2, length)) < 0.7).at[0].set(False) if masked else None
    output, lse = attend_filled(query, kv, last, mask, grid=grid, interpret=True)
    seen = Seen(last[:, None], mask=None if mask is None else mask[:, None])
    expected, total = attend_set(query, kv, seen=seen)
    assert output.dtype == lse.dtype == jnp.float32
    # The weights are rounded to half precision before and after they are scaled.
    there = np.asarray(total > -1e29)
    assert there.any()
    np.testing.assert_allclose(output[there], expected[there], atol=2e-2)
    np.testing.assert_allclose(lse[there], total[there], rtol=1e-5)
    assert (lse[~there] < -1e29).all()


def test_keys_behind_the_last_one_are_not_read():
    """Whole blocks of them; NaN would spread from where it is read."""
    rng = np.random.default_rng(0)
    query, kv = _normal(rng, 1, 1, 2, D), _kv(rng, 1, 1, length=192)
    junk = KV(kv.keys.at[..., 64:].set(jnp.nan), kv.values.at[..., 64:, :].set(jnp.nan))
    last = jnp.array([[63, 10]], jnp.int32)
    expected, got = (attend_filled(query, x, last, interpret=True) for x in (kv, junk))
    jax.tree.map(np.testing.assert_array_equal, expected, got)


def _decoding(*, rows=(2, 3), length=70, prefix=True, dtype=jnp.bfloat16):
    """One token a row of a cache, four heads that share two."""
    rng, (P, G) = np.random.default_rng(1), rows
    before = None
    if prefix:
        mask = np.arange(9) < np.array([[9], [4]])[:P]
        before = Prefix(_kv(rng, P, 2, length=9), jnp.asarray(mask))
    last = jnp.asarray(rng.integers(0, length, (P, G, 1)), jnp.int32)
    arrays = _normal(rng, P, G, 1, 4, D), _kv(rng, P, G, 2, length=length)
    query, kv = jax.tree.map(lambda x: x.astype(dtype), arrays)
    return (query, kv, last), before


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("sinks", [None, jnp.arange(4.0)])
def test_a_decode_step_is_that_of_plain_products(prefix, sinks):
    arguments, before = _decoding(prefix=prefix)
    outputs = [
        attend(*arguments, prefix=before, sinks=sinks, implementation=name)
        for name in ("plain", "triton")
    ]
    assert outputs[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(*(x.astype(np.float32) for x in outputs), atol=2e-2)


@pytest.mark.parametrize(
    ("options", "extra", "taken"),
    [
        ({}, {}, True),
        ({"prefix": False}, {"sinks": jnp.zeros(4)}, True),
        ({"dtype": jnp.float32}, {}, False),
        ({"length": 1}, {}, False),  # no cache, but a row of one token
        ({}, {"cap": 5.0}, False),
        ({}, {"sight": Sight(jnp.zeros((2, 3, 1), int), jnp.zeros((2, 3, 70), int))}, False),
    ],
)
def test_where_it_is_taken(options, extra, taken, monkeypatch):
    (query, kv, last), before = _decoding(**options)
    used = []

    def record(query, kv, last, mask, **_):
        used.append(query.shape)
        return query.astype(jnp.float32), query[..., 0].astype(jnp.float32)

    monkeypatch.setattr(attention, "attend_filled", record)
    monkeypatch.setattr(attention, "has_cudnn", lambda: True)
    monkeypatch.setattr(attention, "has_triton", lambda: True)
    jax.eval_shape(lambda: attend(query, kv, last, prefix=before, **extra))
    assert bool(used) == taken
    if not taken and options.get("length") != 1:
        with pytest.raises(ValueError, match="'triton' needs half precision, heads of 16 to 256"):
            attend(query, kv, last, prefix=before, **extra, implementation="triton")


def test_several_gpus_take_plain_products(monkeypatch):
    monkeypatch.setattr(attention, "has_cudnn", lambda: True)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not attention.has_triton()
