"""Merged attention: the worked numbers, and one joint attention in NumPy."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.models import KV, AttentionContext, attention, merge_attention
from jaxrl_llm.models.attention import Prefix, _whole_forward, attend, attend_set
from jaxrl_llm.models.attention_blocks import Seen, Sizes
from jaxrl_llm.models.context import context_attention


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


def _plain(query, keys, values, visible, cap):
    """Softmax attention and its log-sum-exp, with the gradients that jax derives."""
    scores = query @ keys
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = jnp.where(visible, scores, -1e30)
    return jax.nn.softmax(scores) @ values, jax.nn.logsumexp(scores, axis=-1)


@for_each("cap", [None, 2.0])
def test_gradients_are_those_of_plain_formulas(cap):
    """Of a set, and of two sets that merge, where some queries see no key of one of them."""
    rng = np.random.default_rng(1)
    shapes = (2, 1, 5, 4), (2, 1, 4, 6), (2, 1, 6, 4)
    query, keys, values = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    mask = jnp.asarray(rng.random((2, 1, 6)) < 0.7).at[..., 0].set(True).at[..., 3].set(True)
    ids, key_ids = jnp.arange(5) // 4, jnp.arange(6) // 5  # the fifth query sees one key
    visible = mask[..., None, :] & (ids[:, None] == key_ids)
    weights = jnp.asarray(rng.normal(size=(2, 1, 5, 5)), jnp.float32)

    def part(x, first, last):
        return KV(x[0][..., first:last], x[1][..., first:last, :])

    def one(query, keys, values):
        seen = Seen(ids=ids, key_ids=key_ids, mask=mask)
        return attend_set(query, KV(keys, values), seen=seen, cap=cap)

    def merged(query, keys, values):
        sets = []
        for first, last in ((0, 3), (3, 6)):
            seen = Seen(ids=ids, key_ids=key_ids[first:last], mask=mask[..., first:last])
            sets += attend_set(query, part((keys, values), first, last), seen=seen, cap=cap)
        return merge_attention(*sets)

    def derived(query, keys, values):  # the gradients that other devices take
        seen = Seen(ids=ids, key_ids=key_ids, mask=mask)
        return _whole_forward(query, KV(keys, values), seen, cap)[0]

    def loss(function):
        def of(*arrays):
            output, lse = function(*arrays)
            return jnp.sum(weights * jnp.concatenate([output, lse[..., None]], axis=-1))

        return jax.jit(jax.grad(of, (0, 1, 2)))

    wanted = loss(lambda *arrays: _plain(*arrays, visible, cap))(query, keys, values)
    for function in (one, merged, derived):
        for got, want in zip(loss(function)(query, keys, values), wanted, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6)


def test_gradients_in_half_precision():
    """Products of the backward pass too are those of the model's dtype, sums are float32."""
    rng = np.random.default_rng(2)
    shapes = (2, 3, 8, 16), (2, 3, 16, 12), (2, 3, 12, 16)
    wide = [jnp.asarray(rng.normal(size=s), jnp.bfloat16).astype(jnp.float32) for s in shapes]

    def gradients(query, keys, values):
        def loss(query, keys, values):
            output, lse = attend_set(query, KV(keys, values))
            return jnp.sum(jnp.sin(output)) + jnp.sum(lse)

        return jax.grad(loss, (0, 1, 2))(query, keys, values)

    arrays = [x.astype(jnp.bfloat16) for x in wide]
    traced = jax.make_jaxpr(gradients)(*arrays).jaxpr
    dots = [x for x in _equations(traced) if x.primitive.name == "dot_general"]
    assert len(dots) == 6
    for dot in dots:
        assert [x.aval.dtype for x in dot.invars] == [jnp.bfloat16] * 2
        assert dot.outvars[0].aval.dtype == jnp.float32
    for got, want in zip(jax.jit(gradients)(*arrays), jax.jit(gradients)(*wide), strict=True):
        assert got.dtype == jnp.bfloat16
        scale = float(jnp.max(jnp.abs(want)))
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.02 * scale)


def _equations(jaxpr):
    """All equations, those of inner functions too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "jaxpr"):
                yield from _equations(inner.jaxpr)


def _numpy_attention(q, keys, values, cap, sink):
    """One query ``[d]`` over keys and values ``[S, d]`` and a sink, float64."""
    scores = np.float64(keys @ q * len(q) ** -0.5)
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    weights = np.exp(scores - scores.max())
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - scores.max()))
    return weights @ values / total


def _layout(keys, values):
    """Keys and values ``[..., S, Hk, d]`` as a KV."""
    return KV(jnp.asarray(np.moveaxis(keys, -3, -1)), jnp.asarray(np.swapaxes(values, -3, -2)))


@for_each(
    ("where", "per_row_index", "cap", "sinks"),
    [
        ("kv", False, None, None),
        ("kv", False, None, (0.5, -2.0, 3.0, 0.0)),
        ("prefix", False, None, None),
        ("prefix", False, 0.7, None),
        ("cache", False, None, None),
        ("cache", True, None, None),
        ("prefix and cache", False, None, None),
        ("prefix and cache", True, 0.7, (0.5, -2.0, 3.0, 0.0)),
    ],
)
def test_every_context_equals_one_joint_attention(where, per_row_index, cap, sinks):
    P, G, T, H, Hk, d, Lp, C = 2, 3, 2, 4, 2, 4, 5, 6
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q, k, v = draw(P, G, T, H, d), draw(P, G, T, Hk, d), draw(P, G, T, Hk, d)
    past_k, past_v = draw(P, G, C, Hk, d), draw(P, G, C, Hk, d)
    pre_k, pre_v = draw(P, Lp, Hk, d), draw(P, Lp, Hk, d)
    prefix_mask = np.arange(Lp) < np.array([[3], [0]])  # One prompt has no prefix at all.
    index = np.array([[0, 1, 4], [2, 2, 3]]) if per_row_index else np.int32(2)

    context = AttentionContext(mask=jnp.ones((P, G, T), bool))
    if "prefix" in where:
        context = context._replace(prefix=(_layout(pre_k, pre_v),), prefix_mask=prefix_mask)
    if "cache" in where:
        context = context._replace(cache=(_layout(past_k, past_v),), index=jnp.asarray(index))
    output, kv = context_attention(
        q, _layout(k, v), context, cap=cap, sinks=None if sinks is None else jnp.array(sinks)
    )

    for p, g, t, h in np.ndindex(P, G, T, H):
        keys, values, hk = [k[p, g, : t + 1]], [v[p, g, : t + 1]], h // (H // Hk)
        if "cache" in where:
            i = int(index[p, g]) if per_row_index else int(index)
            keys, values = [past_k[p, g, :i], *keys], [past_v[p, g, :i], *values]
        if "prefix" in where:
            keys = [pre_k[p][prefix_mask[p]], *keys]
            values = [pre_v[p][prefix_mask[p]], *values]
        keys, values = np.concatenate(keys)[:, hk], np.concatenate(values)[:, hk]
        expected = _numpy_attention(q[p, g, t, h], keys, values, cap, sinks and sinks[h])
        np.testing.assert_allclose(output[p, g, t, h], expected, rtol=2e-5, atol=2e-6)
    if "cache" in where:
        i = int(index[0, 2]) if per_row_index else int(index)
        np.testing.assert_array_equal(kv.keys[0, 2, :, :, i], k[0, 2, 0])
        np.testing.assert_array_equal(kv.values[0, 2, :, i], v[0, 2, 0])


def test_a_query_without_keys_has_a_finite_gradient():
    def loss(q):
        kv = KV(jnp.ones((4, 3)), jnp.ones((3, 4)))
        output, lse = attend_set(q, kv, seen=Seen(mask=jnp.zeros(3, bool)))
        merged, _ = merge_attention(output, lse, q, jnp.zeros(2))
        return merged.sum()

    np.testing.assert_allclose(jax.grad(loss)(jnp.ones((2, 4))), 1.0)


def _arguments(G, T, heads, *, prefix, cache, dtype=np.float32):
    """Arguments of :func:`attend` for two prompts: what is differentiated, and what is not."""
    P, d, Lp, C = 2, 8, 6, 10
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    (hq, hk), S = heads, C if cache else T
    arrays = {
        "query": draw(P, G, T, hq, d),
        "kv": _layout(draw(P, G, S, hk, d), draw(P, G, S, hk, d)),
    }
    fixed = {"last": jnp.arange(T), "key_mask": jnp.ones((P, G, S), bool).at[:, 0, 1].set(False)}
    if cache:
        start = jnp.asarray(rng.integers(0, C - T + 1, (P, G, 1)))
        fixed = {"last": start + jnp.arange(T)}
    if prefix:
        arrays["prefix"] = _layout(draw(P, Lp, hk, d), draw(P, Lp, hk, d))
        # Of the second prompt nothing is shared.
        fixed["prefix_mask"] = jnp.arange(Lp) < jnp.array([[4], [0]])
    return arrays, fixed


def _attend(arrays, fixed, **options):
    """:func:`attend` with the prefix of :func:`_arguments` as its record."""
    arrays, fixed = dict(arrays), dict(fixed)
    if "prefix" in arrays:
        fixed["prefix"] = Prefix(arrays.pop("prefix"), fixed.pop("prefix_mask"))
    return attend(**arrays, **fixed, **options)


@partial(jax.jit, static_argnames=("implementation", "join"))
def _outputs_and_gradients(arrays, fixed, implementation, where=True, join=True):
    where = jnp.asarray(where)[..., None, None]

    def loss(arrays):
        output = _attend(arrays, fixed, implementation=implementation)
        kept = jnp.where(where, output.astype(jnp.float32), 0.0)
        return jnp.sum(jnp.sin(kept)), output

    (_, output), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
    return jax.tree.leaves((output, gradients)) if join else (output, gradients)


@pytest.mark.of_many
@pytest.mark.parametrize(
    ("G", "T", "heads", "prefix", "cache"),
    [
        (1, 4, (4, 2), False, False),
        (8, 4, (4, 2), True, False),
        (1, 3, (4, 1), True, False),
        (8, 1, (2, 2), True, True),
        (2, 3, (4, 4), False, True),
    ],
)
def test_the_forms_agree_in_values_and_gradients(G, T, heads, prefix, cache):
    arguments = _arguments(G, T, heads, prefix=prefix, cache=cache)
    plain, joint = (_outputs_and_gradients(*arguments, name) for name in ("plain", "xla"))
    for a, b in zip(plain, joint, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _segments(P, G, T):
    """Two or three segments a row, of unequal lengths; the last places of some rows are empty."""
    edges = np.array([[2, T - 1, T], [1, 3, T - 1]])[np.arange(P * G) % 2].reshape(P, G, 1, 3)
    ids = (np.arange(T)[:, None] >= edges).sum(-1)
    return jnp.asarray(np.where(ids == 3, -1, ids), jnp.int32)


@for_each(
    ("implementation", "prefix", "by"),
    [
        ("plain", False, "segments"),
        ("plain", True, "segments"),
        ("xla", True, "segments"),
        ("plain", True, "ends"),
        ("xla", True, "ends"),
    ],
)
def test_a_segment_attends_as_if_it_were_alone(implementation, prefix, by):
    G, T = 2, 6
    arrays, fixed = _arguments(G, T, (4, 2), prefix=prefix, cache=False)
    fixed = fixed | {"key_mask": None, "segments": _segments(2, G, T)}
    same = fixed["segments"][..., None] == fixed["segments"][..., None, :]
    ends = T - jnp.argmax(same[..., ::-1], axis=-1)  # a segment is a tree of one branch
    rows = fixed if by == "segments" else fixed | {"segments": None, "ends": ends}
    output, gradients = _outputs_and_gradients(arrays, rows, implementation, join=False)
    alone = jnp.zeros_like(output)
    total = jax.tree.map(jnp.zeros_like, gradients)
    for segment in (-1, 0, 1, 2):
        # The same with every other key hidden, read where the segment is.
        here = fixed["segments"] == segment
        hidden = fixed | {"key_mask": here, "segments": None}
        part, slope = _outputs_and_gradients(arrays, hidden, "plain", where=here, join=False)
        alone = jnp.where(here[..., None, None], part, alone)
        total = jax.tree.map(jnp.add, total, slope)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        (output, gradients),
        (alone, total),
    )


def test_the_forms_agree_in_half_precision():
    arguments = _arguments(2, 4, (4, 2), prefix=True, cache=False, dtype=jnp.bfloat16)
    plain, joint = (_outputs_and_gradients(*arguments, name) for name in ("plain", "xla"))
    assert plain[0].dtype == joint[0].dtype == jnp.bfloat16
    for a, b in zip(plain, joint, strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=0.06)


def test_an_unknown_form_is_named():
    arrays, fixed = _arguments(1, 2, (2, 2), prefix=False, cache=False)
    with pytest.raises(ValueError, match="attend: implementation must be one of 'plain', 'xla'"):
        attend(**arrays, **fixed, implementation="flash")
    for form in ("xla", "cudnn"):
        with pytest.raises(ValueError, match=f"'{form}' has no soft cap of scores; use 'plain'"):
            attend(**arrays, **fixed, cap=5.0, implementation=form)
        with pytest.raises(ValueError, match=f"'{form}' has no attention sinks; use 'plain'"):
            attend(**arrays, **fixed, sinks=jnp.zeros(2), implementation=form)


def test_a_cap_in_worked_numbers():
    """Scores 3 and 0 with a cap of 2: 2 tanh(1.5) = 1.810297 and 0, and a weight of 0.859398."""
    kv = KV(jnp.array([[3.0, 0.0]]), jnp.array([[1.0], [0.0]]))

    def output(query):
        return attend_set(query, kv, cap=2.0)[0][0, 0]

    value, slope = jax.value_and_grad(output)(jnp.ones((1, 1)))
    np.testing.assert_allclose(value, 0.859398, rtol=1e-5)
    # weight (1 - weight) (1 - tanh(1.5)^2) 3
    np.testing.assert_allclose(slope[0, 0], 0.0655061, rtol=1e-5)


@for_each(
    ("capability", "found"), [("9.0", True), ("7.5", False), ("12.0", True), ("gfx942", False)]
)
def test_the_kernel_is_known_by_the_device(capability, found, monkeypatch):
    assert not attention.has_cudnn()  # a CPU has none
    device = SimpleNamespace(compute_capability=capability)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setattr(jax, "devices", lambda: [device])
        assert attention.has_cudnn() == found


@for_each(
    ("options", "form"),
    [
        ({"dtype": jnp.bfloat16}, "cudnn"),
        ({"dtype": jnp.float16, "prefix": False}, "cudnn"),
        ({"dtype": np.float32}, "plain"),
        ({"dtype": jnp.bfloat16, "T": 3}, "plain"),
        ({"dtype": jnp.bfloat16, "cache": True}, "plain"),
        ({"dtype": jnp.bfloat16, "most": 150}, "plain"),
        ({"dtype": jnp.bfloat16, "cap": 5.0}, "plain"),
    ],
)
def test_the_kernel_is_taken_where_it_fits(options, form, monkeypatch):
    options = {"G": 2, "T": 4, "heads": (4, 2), "prefix": True, "cache": False} | options
    monkeypatch.setattr(attention, "_LARGEST_MASK", options.pop("most", 160))
    cap = options.pop("cap", None)
    arrays, fixed = _arguments(**options)
    used = []

    def record(query, *args, implementation, **kwargs):
        used.append(implementation)
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    monkeypatch.setattr(attention, "has_cudnn", lambda: True)
    output = jax.eval_shape(lambda: _attend(arrays, fixed, cap=cap))
    assert (output.shape, output.dtype) == (arrays["query"].shape, options["dtype"])
    assert used == (["cudnn"] if form == "cudnn" else [])


@for_each(("cap", "sizes"), [(None, ((3, 7), (3, 2), (10, 3), (4, 4))), (0.8, ((3, 2),))])
def test_blocks_change_nothing(cap, sizes, monkeypatch):
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(2, 3, 10, 4)), jnp.float32)
    kv = KV(*(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, 4, 7), (2, 3, 7, 4))))
    last = jnp.arange(10) % 7
    seen = Seen(
        last,
        ids=last // 5,
        first=jnp.broadcast_to(last - 3, (3, 10)),
        mask=jnp.arange(7) != 3,
        key_ids=jnp.arange(7) // 5,
        ends=jnp.array([7, 2, 7, 7, 6, 7, 7]),
        places=jnp.broadcast_to(jnp.arange(7), (2, 1, 7)),
    )

    def compute(sizes):
        def loss(query, kv):
            output, lse = attend_set(query, kv, seen=seen, cap=cap, sizes=sizes)
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(lse)), (output, lse)

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(query, kv)

    split = [compute(Sizes(*each)) for each in sizes]
    # With the gradients that jax derives; those of CPUs are compared with them above.
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_attend_on_cpu", lambda *args: _whole_forward(*args)[0])
        whole = compute(None)
    for some in split:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, some)


def test_blocks_in_half_precision():
    """Products are those of the model's dtype, sums are float32, as without blocks."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(2, 10, 4)), jnp.bfloat16)
    kv = KV(*(jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 4, 10), (2, 10, 4))))
    seen = Seen(jnp.arange(10))

    def compute(sizes):
        def loss(query, kv):
            output, lse = attend_set(query, kv, seen=seen, sizes=sizes)
            assert output.dtype == lse.dtype == jnp.float32
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(lse))

        return jax.jit(jax.grad(loss, (0, 1)))(query, kv)

    for a, b in zip(*map(jax.tree.leaves, (compute(None), compute(Sizes(4, 3)))), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.03)


def test_blocks_that_no_query_sees_are_not_computed():
    query, values = jnp.ones((8, 2)), jnp.ones((8, 2)).at[6:].set(jnp.nan)
    seen = Seen(jnp.minimum(jnp.arange(8), 5))

    def total(query, kv, seen):
        return jnp.sum(attend_set(query, kv, seen=seen, sizes=Sizes(4, 2))[0])

    kv = KV(jnp.ones((2, 8)), values)
    value, grads = jax.value_and_grad(total, (0, 1))(query, kv, seen)
    assert value == 16 and all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    # In arrays with more axes, other rows could see other keys, so that all blocks are computed.
    assert np.isnan(total(query[None], kv, Seen(seen.last[None])))


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_of_long_inputs_is_not_their_square(gradient):
    heads, T, d = 8, 4096, 16
    shapes = (heads, T, d), KV((heads, d, T), (heads, T, d))
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: len(s) == 3
    )

    def total(query, kv):
        return jnp.sum(attend_set(query, kv, seen=Seen(jnp.arange(T)))[0])

    compiled = jax.jit(jax.grad(total, (0, 1)) if gradient else total).lower(*shapes).compile()
    scores = 4 * heads * T * T
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 10
