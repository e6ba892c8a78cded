"""The decoder's laws; its numbers are compared with another implementation in test_parity.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.models import AttentionContext, empty_cache, make_model, prefill
from jaxrl_llm.models.layers import ExpertsConfig, LayerKind, LinearAttentionConfig
from jaxrl_llm.models.linear import RMSNorm
from jaxrl_llm.models.transformer import param_shapes
from jaxrl_llm.testing import tiny_config, tiny_model

FAMILIES = {
    "llama": {},
    "qwen2": {"architecture": "qwen2", "attention_bias": True, "tied": False},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "head_dim": 16},
}
P, G, T = 2, 3, 4
LENGTHS = np.array([5, 1])


def _random_bias(params):
    """Biases start at zero; a test needs them to matter."""
    return jax.tree.map(lambda x: x + 0.1 * jnp.arange(x.size).reshape(x.shape) / x.size, params)


def _batch():
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 256, (P, 6)).astype(np.int32)
    return prompts, rng.integers(0, 256, (P, G, T)).astype(np.int32)


def _shared(model, params):
    """Hidden states of the responses with the prompt computed once a group."""
    prompts, tokens = _batch()
    shared = np.arange(6) < LENGTHS[:, None] - 1
    prefix = prefill(model, params, jnp.asarray(prompts), jnp.asarray(shared))
    last = prompts[np.arange(P), LENGTHS - 1]
    first = np.broadcast_to(last[:, None, None], (P, G, 1))
    inputs = np.concatenate([first, tokens[..., :-1]], -1)
    positions = np.broadcast_to((LENGTHS - 1)[:, None, None] + np.arange(T), (P, G, T))
    context = AttentionContext(jnp.ones((P, G, T), bool), prefix, jnp.asarray(shared))
    return inputs, positions, context, model.apply(params, inputs, positions, context)[0]


def _shared_arrays(model, params):
    """The same as NumPy arrays, compiled as one program."""
    return jax.tree.map(np.asarray, jax.jit(functools.partial(_shared, model))(params))


@pytest.mark.of_many
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prefix_equals_one_row_a_rollout(family):
    model, params = tiny_model(**FAMILIES[family])
    params = _random_bias(params)
    prompts, tokens = _batch()

    @jax.jit
    def forward(params, row):
        context = AttentionContext(mask=jnp.ones(row.shape, bool))
        return model.apply(params, row, np.arange(row.shape[-1])[None, None], context)

    hidden = jax.jit(lambda params: _shared(model, params)[-1])(params)
    for p, g in np.ndindex(P, G):
        row = np.concatenate([prompts[p, : LENGTHS[p]], tokens[p, g]])[None, None]
        plain, _ = forward(params, row)
        np.testing.assert_allclose(hidden[p, g], plain[0, 0, LENGTHS[p] - 1 : -1], atol=3e-5)


def test_padding_is_never_attended_to():
    model, params = tiny_model()
    prompts, _ = _batch()
    mask = jnp.asarray(np.arange(6) < LENGTHS[:, None])
    clean = prefill(model, params, jnp.asarray(prompts), mask)
    dirty = prefill(model, params, jnp.where(mask, prompts, 255), mask)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a.keys[0, :, :, :5], b.keys[0, :, :, :5])
        np.testing.assert_array_equal(a.values[1, :, :1], b.values[1, :, :1])


def _delta(params, leading, rank=2, seed=0):
    """Factors for one projection of each kind."""
    rng = np.random.default_rng(seed)

    def factors(kernel):
        inputs, outputs = kernel.shape
        a = rng.normal(size=(*leading, inputs, rank)).astype(np.float32)
        b = rng.normal(size=(*leading, rank, outputs)).astype(np.float32)
        return a, b, 0.1

    layer = params["layers"]["1"]
    return {
        "layers": {
            "1": {
                "attention": {"q": factors(layer["attention"]["q"]["kernel"])},
                "mlp": {"down": factors(layer["mlp"]["down"]["kernel"])},
            }
        }
    }


def _merged(params, delta, row=()):
    """The parameters with a row's delta added to the kernels."""
    params = jax.tree.map(lambda x: x, params)
    for part, name in (("attention", "q"), ("mlp", "down")):
        a, b, scale = delta["layers"]["1"][part][name]
        kernel = params["layers"]["1"][part][name]["kernel"]
        params["layers"]["1"][part][name] = {"kernel": kernel + scale * a[row] @ b[row]}
    return params


@for_each("leading", [(), (P, 1), (P, G)], ids=["one", "a prompt", "a rollout"])
def test_low_rank_delta_equals_changed_kernels(leading):
    model, params = tiny_model()
    _, tokens = _batch()
    positions = np.broadcast_to(np.arange(T), tokens.shape)
    context = AttentionContext(mask=jnp.ones(tokens.shape, bool))
    delta = _delta(params, leading)
    apply = jax.jit(model.apply)
    hidden, _ = apply(params, tokens, positions, context, delta=delta)
    for p, g in np.ndindex(P, G):
        row = (p, min(g, leading[1] - 1)) if leading else ()
        expected, _ = apply(_merged(params, delta, row), tokens, positions, context)
        np.testing.assert_allclose(hidden[p, g], expected[p, g], atol=5e-5)


@for_each("leading", [None, (P, 1)], ids=["no delta", "a prompt"])
def test_cached_decoding_equals_one_pass(leading):
    model, params = tiny_model()
    delta = None if leading is None else _delta(params, leading)
    inputs, positions, context, _ = _shared_arrays(model, params)
    expected, _ = jax.jit(model.apply)(params, inputs, positions, context, delta=delta)
    cache, out, step_mask = empty_cache(model, (P, G), T), [], jnp.ones((P, G, 1), bool)

    @jax.jit
    def step(tokens, positions, cache, index):
        here = context._replace(mask=step_mask, cache=cache, index=index)
        return model.apply(params, tokens, positions, here, delta=delta)

    for t in range(T):
        here, index = slice(t, t + 1), jnp.full((P, G), t, jnp.int32)
        hidden, cache = step(inputs[..., here], positions[..., here], cache, index)
        out.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(out, 2), expected, atol=2e-5)


def test_bfloat16_compute_keeps_float32_parameters():
    model = make_model(tiny_config(dtype="bfloat16"))
    params = model.init(jax.random.key(0))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    hidden = _shared_arrays(model, params)[-1]
    exact = _shared_arrays(make_model(tiny_config()), params)[-1]
    assert hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(hidden.astype(np.float32), exact, atol=0.15)


SHAPES = {
    **FAMILIES,
    "experts": {"experts": ExpertsConfig(count=4, active=2, width=16, shared=16)},
    "linear": {
        "linear_attention": LinearAttentionConfig(
            key_heads=2, value_heads=4, key_dim=6, value_dim=10
        ),
        "layers": (LayerKind(linear=True), LayerKind()),
    },
}


@for_each("kind", SHAPES)
def test_shapes_and_count_without_allocating(kind):
    """Shapes come from a form without draws; they are those of the drawn parameters."""
    model, params = tiny_model(**SHAPES[kind])
    shapes = jr.models.param_shapes(model)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    jax.tree.map(lambda s, x: np.testing.assert_equal(s.shape, x.shape), shapes, params)
    assert all(s.dtype == jnp.float32 for s in jax.tree.leaves(shapes))
    assert jr.models.count_params(model) == sum(x.size for x in jax.tree.leaves(params))
    shapes["norm"] = None  # the caller's own
    assert jr.models.param_shapes(model)["norm"] is not None


@for_each(
    ("change", "message"),
    [
        ({"tokens": np.zeros((P, T), np.int32)}, "tokens must have 3 axes"),
        ({"positions": np.zeros((P, G, T + 1), np.int32)}, "these must have the same shape"),
        ({"remat": "everything"}, "remat must be one of 'none', 'full', 'dots'"),
        ({"delta": {"layers": {"9": {}}}}, "delta names 'layers/9', which the model does not have"),
        ({"delta": {"norm": (0, 0, 1)}}, "delta 'norm' is not at a linear layer"),
    ],
)
def test_bad_input_is_named(change, message):
    model, params = tiny_model()
    _, tokens = _batch()
    arguments = {
        "tokens": tokens,
        "positions": np.broadcast_to(np.arange(T), tokens.shape),
        "context": AttentionContext(mask=jnp.ones(tokens.shape, bool)),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        model.apply(params, **arguments)


@for_each("remat", ["none", "full"])
def test_equal_layers_are_traced_once(remat):
    """Of eight layers with a window in every second one, two are traced, and lowered."""
    windows = tuple(LayerKind(window=3 if i % 2 else None) for i in range(8))
    model = make_model(tiny_config(num_layers=8, layers=windows))
    params, tokens = param_shapes(model), jnp.zeros((1, 1, 4), jnp.int32)

    def loss(params):
        context = AttentionContext(jnp.ones(tokens.shape, bool))
        return jnp.sum(model.apply(params, tokens, tokens, context, remat=remat)[0])

    def blocks(jaxpr):
        """The compiled functions with matrix products that a jaxpr calls."""
        calls = [x for x in jaxpr.eqns if x.primitive.name == "jit"]
        return [x.params["jaxpr"] for x in calls if "dot_general" in str(x.params["jaxpr"])]

    forward = blocks(jax.make_jaxpr(loss)(params).jaxpr)
    assert len(forward) == 8 and len(set(map(id, forward))) == 2
    lowered = jax.jit(jax.grad(loss)).lower(params).as_text()
    assert lowered.count("dot_general") < 3 * 2 * 12  # products of two layers, not of eight


def test_a_norm_rounds_to_its_dtype(optimized):
    """Also where its result is read in float32 next, as by a rotation.

    Else some programs would round and others not, so that sampler and trainer would differ.
    """
    norm = RMSNorm(8, tiny_config(dtype="bfloat16"))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 1, 32, 4, 8)), jnp.bfloat16)
    y = jax.jit(lambda x: 2 * norm(x).astype(jnp.float32))(x) / 2
    np.testing.assert_array_equal(y, np.asarray(y).astype(jnp.bfloat16).astype(np.float32))
