"""Merged attention: the worked numbers, and one joint attention in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import KV, AttentionContext, merge_attention
from jaxrl_llm.models.attention import attend, context_attention


def _partial(scores, values):
    weights = np.exp(scores)
    return np.array([weights @ values / weights.sum()]), np.array(np.log(weights.sum()))


def test_worked_numbers():
    scores, values = np.array([1.0, 2.0, 0.0, -1.0]), np.array([1.0, 2.0, 3.0, 4.0])
    parts = _partial(scores[:2], values[:2]), _partial(scores[2:], values[2:])
    np.testing.assert_allclose(
        [float(parts[0][0][0]), float(parts[0][1])], [1.731059, 2.313262], atol=1e-6
    )
    output, lse = merge_attention(*(jnp.asarray(x) for x in (*parts[0], *parts[1])))
    joint = _partial(scores, values)
    np.testing.assert_allclose([float(output[0]), float(lse)], [1.914379, 2.440190], atol=1e-6)
    np.testing.assert_allclose([float(output[0]), float(lse)], [joint[0][0], joint[1]], atol=1e-6)


def test_merging_is_commutative_associative_and_ignores_an_empty_set():
    rng = np.random.default_rng(0)
    parts = [(jnp.asarray(rng.normal(size=(3, 4))), jnp.asarray(rng.normal(size=3))) for _ in "abc"]
    a, b, c = parts
    left = merge_attention(*merge_attention(*a, *b), *c)
    right = merge_attention(*a, *merge_attention(*c, *b))
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    empty = jnp.full((3, 4), 7.0), jnp.full(3, -1e30)
    for x, y in zip(merge_attention(*a, *empty), a, strict=True):
        np.testing.assert_array_equal(x, y)
    assert all(np.isfinite(x).all() for x in merge_attention(*empty, *empty))


def _numpy_attention(q, keys, values, visible):
    """One query ``[d]`` over keys and values ``[S, d]``, float64."""
    scores = np.where(visible, keys @ q * len(q) ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


@pytest.mark.parametrize(
    ("where", "per_row_index"),
    [
        ("own", False),
        ("prefix", False),
        ("cache", False),
        ("cache", True),
        ("prefix and cache", False),
        ("prefix and cache", True),
    ],
)
def test_every_context_equals_one_joint_attention(where, per_row_index):
    P, G, T, H, Hk, d, Lp, C = 2, 3, 2, 4, 2, 4, 5, 6
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q, k, v = draw(P, G, T, H, d), draw(P, G, T, Hk, d), draw(P, G, T, Hk, d)
    past_k, past_v = draw(P, G, C, Hk, d), draw(P, G, C, Hk, d)
    pre_k, pre_v = draw(P, Lp, Hk, d), draw(P, Lp, Hk, d)
    prefix_mask = np.arange(Lp) < np.array([[3], [0]])  # One prompt has no prefix at all.
    index = np.array([[0, 1, 4], [2, 2, 3]]) if per_row_index else np.int32(2)

    def layout(keys, values):
        return KV(jnp.asarray(np.moveaxis(keys, -3, -1)), jnp.asarray(np.swapaxes(values, -3, -2)))

    context = AttentionContext(mask=jnp.ones((P, G, T), bool))
    if "prefix" in where:
        context = context._replace(prefix=(layout(pre_k, pre_v),), prefix_mask=prefix_mask)
    if "cache" in where:
        context = context._replace(cache=(layout(past_k, past_v),), index=jnp.asarray(index))
    output, kv = context_attention(q, layout(k, v), context, 0)

    for p, g, t, h in np.ndindex(P, G, T, H):
        keys, values, hk = [k[p, g, : t + 1]], [v[p, g, : t + 1]], h // (H // Hk)
        if "cache" in where:
            i = int(index[p, g]) if per_row_index else int(index)
            keys, values = [past_k[p, g, :i], *keys], [past_v[p, g, :i], *values]
        if "prefix" in where:
            keys = [pre_k[p][prefix_mask[p]], *keys]
            values = [pre_v[p][prefix_mask[p]], *values]
        keys, values = np.concatenate(keys)[:, hk], np.concatenate(values)[:, hk]
        expected = _numpy_attention(q[p, g, t, h], keys, values, np.ones(len(keys), bool))
        np.testing.assert_allclose(output[p, g, t, h], expected, rtol=2e-5, atol=2e-6)
    if "cache" in where:
        i = int(index[0, 2]) if per_row_index else int(index)
        np.testing.assert_array_equal(kv.keys[0, 2, :, :, i], k[0, 2, 0])
        np.testing.assert_array_equal(kv.values[0, 2, :, i], v[0, 2, 0])


def test_a_query_without_keys_has_a_finite_gradient():
    def loss(q):
        kv = KV(jnp.ones((4, 3)), jnp.ones((3, 4)))
        output, lse = attend(q, kv, jnp.zeros((2, 3), bool))
        merged, _ = merge_attention(output, lse, q, jnp.zeros(2))
        return merged.sum()

    np.testing.assert_allclose(jax.grad(loss)(jnp.ones((2, 4))), 1.0)
