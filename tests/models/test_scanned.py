"""Layers scanned over stacked weights: the same numbers as one layer after the other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.models import LayerKind
from jaxrl_llm.models.layers import ExpertsConfig, LinearAttentionConfig
from jaxrl_llm.models.scanned import period_of, run_layers
from jaxrl_llm.train.models.score import score_hidden

WINDOWS = tuple(LayerKind(window=4) if i % 2 == 0 else LayerKind() for i in range(5))
LINEAR = tuple(LayerKind(linear=i % 2 == 0) for i in range(4))
MODELS = {
    "plain": {"num_layers": 2},
    "windows, one layer left over": {"num_layers": 5, "layers": WINDOWS},
    "experts": {"num_layers": 2, "experts": ExpertsConfig(count=4, active=2, width=16)},
    "linear attention": {
        "num_layers": 4,
        "layers": LINEAR,
        "linear_attention": LinearAttentionConfig(
            key_heads=2, value_heads=2, key_dim=8, value_dim=8
        ),
    },
}


def both(**fields):
    """A model with the layers one after the other, the same scanned, and its parameters."""
    model, params = jr.testing.tiny_model(**fields)
    config = dataclasses.replace(model.config, scan_layers=True)
    return model, jr.models.make_model(config), params


def batch():
    prompts = 1 + jnp.arange(12).reshape(2, 6) % 50
    responses = 1 + jnp.arange(24).reshape(2, 2, 6) % 50
    return prompts, prompts > 3, responses, (responses > 0).at[0, 1, 4:].set(False)


def loss(model, params, delta=None, **options):
    return jnp.sum(jnp.sin(score_hidden(model, params, *batch(), delta=delta, **options)))


def close(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), found, wanted)


@pytest.mark.of_many
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in MODELS),
        ("plain", {"remat": "dots"}),
        ("plain", {"remat": "full", "shared_prefix_len": 2}),
    ],
)
def test_the_loss_and_its_gradient_are_the_same(name, options):
    """Rematerialized and after a shared prefix too."""
    model, scanned, params = both(**MODELS[name])
    # Of the whole weights, linear attention has gradients of several hundred, whose rounding
    # reaches the bound on processors without AVX-512.
    params = jax.tree.map(lambda x: x / 2, params)
    of_one, of_scan = (
        jax.jit(jax.value_and_grad(functools.partial(loss, m, **options))) for m in (model, scanned)
    )
    close(of_scan(params), of_one(params))


def test_the_cache_and_the_experts_come_back_by_layer():
    model, scanned, params = both(**MODELS["experts"])
    tokens = 1 + jnp.arange(12).reshape(2, 1, 6)
    places = jnp.broadcast_to(jnp.arange(6), tokens.shape)
    of_one, of_scan = (
        jax.jit(
            lambda experts, m=m: m.apply_routed(
                params, tokens, places, jr.models.AttentionContext(tokens > 0, experts=experts)
            )
        )
        for m in (model, scanned)
    )
    chosen = jnp.zeros((2, 1, 6, 2, 2), jnp.int16)  # by the router
    wanted, found = of_one(chosen), of_scan(chosen)
    close(found, wanted)
    taken = (wanted[2] % 4) + 1
    close(of_scan(taken), of_one(taken))
    assert len(found[1]) == model.config.num_layers


def test_an_adapter_in_bfloat16_keeps_its_dtype():
    model, scanned, params = both(num_layers=2, dtype="bfloat16")
    factors = jax.random.normal(jax.random.key(0), (2, model.config.width, 2)) * 0.1

    def delta(scale):
        wide = jnp.ones((2, model.config.mlp_width)) * 0.1
        layers = {str(i): {"mlp": {"up": (factors[i], wide, scale)}} for i in range(2)}
        return {"layers": layers}

    def hidden(model, scale):
        return jax.jit(lambda x: score_hidden(model, params, *batch(), delta=x))(delta(scale))

    for scale in (0.5, jnp.float32(0.5)):
        wanted, found = hidden(model, scale), hidden(scanned, scale)
        assert found.dtype == wanted.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))
    first = delta(0.5)
    del first["layers"]["1"]
    with pytest.raises(ValueError, match="deltas of the same submodules"):
        score_hidden(scanned, params, *batch(), delta=first)


def test_the_program_does_not_grow_with_depth():
    """Products in the gradient's program: those of one layer, whatever the number of layers."""

    def products(layers: int) -> int:
        model, scanned, params = both(num_layers=layers)
        text = jax.jit(jax.grad(functools.partial(loss, scanned))).lower(params).as_text()
        return text.count("dot_general")

    assert products(2) == products(7)


def test_a_cache_is_not_stacked():
    """Decoding runs one layer after the other: as many products as the model has layers."""
    model, scanned, params = both(num_layers=3)
    tokens, places = jnp.ones((1, 1, 1), int), jnp.zeros((1, 1, 1), int)
    cache = jr.models.empty_cache(model, (1, 1), 4)
    context = jr.models.AttentionContext(mask=tokens > 0, cache=cache, index=jnp.asarray(0))

    def program(model):
        return jax.jit(model.apply).lower(params, tokens, places, context).as_text()

    assert program(scanned) == program(model)


def test_the_period_of_layers():
    for layers, period in {"aaaa": 1, "ababa": 2, "aaab" * 3: 4, "baaa": 4, "a": 1}.items():
        assert period_of(layers) == period


def test_layers_that_do_not_repeat_are_refused():
    kinds = (LayerKind(window=4), LayerKind(), LayerKind())
    for layers in ({"num_layers": 3, "layers": kinds}, {"num_layers": 1}):
        with pytest.raises(ValueError, match="`scan_layers` has no effect"):
            jr.testing.tiny_config(**layers, scan_layers=True)


def test_numbers_of_layers_that_differ_are_stacked():
    def layer(i, x, factor):
        return x * factor, x

    for factors in ((2.0, 3.0, 4.0), (2.0, 2.0, 2.0)):
        x, outputs = run_layers(layer, jnp.float32(1), factors, period=1)
        wanted, each = run_layers(layer, jnp.float32(1), factors)
        assert x == wanted == np.prod(factors)
        assert [float(y) for y in outputs] == [float(y) for y in each]
