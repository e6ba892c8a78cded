"""What `assert_model_ok` accepts and what it refuses."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.models import ExpertsConfig, LayerKind, LinearAttentionConfig
from jaxrl_llm.testing import MODEL_CHECKS, assert_model_ok, tiny_model


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"architecture": "qwen2", "attention_bias": True, "tied": False},
        {"architecture": "qwen3", "qk_norm": True, "dtype": "bfloat16"},
        {"quantization": "int8"},
        {
            "architecture": "gemma3_text",
            "num_layers": 2,
            "layers": (LayerKind(window=3, rope_theta=100.0), LayerKind(rotary=False)),
            "norm_placement": "both",
            "norm_offset": 1.0,
            "qk_norm": True,
            "qk_norm_over": "projection",
            "activation": "gelu_tanh",
            "embedding_scale": 3.0,
            "query_scale": 0.5,
            "attention_cap": 1.0,
            "logit_cap": 3.0,
        },
    ],
    ids=["llama", "qwen2", "qwen3 in bfloat16", "int8", "all parts"],
)
def test_the_built_in_decoder_passes(options):
    assert_model_ok(*tiny_model(**{"num_layers": 1} | options))


def changed_apply(change):
    """A model whose `apply` gets other arguments."""

    def broken(model):
        def apply(params, tokens, positions, context, *, delta=None, remat="none"):
            arguments = change(tokens, positions, context, delta)
            return model.apply(params, *arguments[:3], delta=arguments[3], remat=remat)

        return model._replace(apply=apply)

    return broken


def with_context(when, **fields):
    """A model that reads other fields of a context that has ``when``."""

    def change(tokens, positions, context, delta):
        if getattr(context, when) is not None:
            context = context._replace(**{name: make(context) for name, make in fields.items()})
        return tokens, positions, context, delta

    return changed_apply(change)


def nothing(context):
    return None


def all_there(context):
    return jnp.ones_like(context.mask)


def shorter_tree(context):
    """The first prompt ends where the second begins to differ from it."""
    tree = context.prompt_tree
    return tree._replace(ends=jnp.minimum(tree.ends, 3))


def doubled(tree):
    return jax.tree.map(lambda x: 2 * x, tree) if tree else None


def summed_over_tokens(model):
    def apply(*arguments, **options):
        hidden, kv = model.apply(*arguments, **options)
        return hidden + hidden.sum(axis=2, keepdims=True), kv

    return model._replace(apply=apply)


@pytest.mark.slow
def test_a_decoder_with_linear_attention_has_the_shapes_of_its_states():
    layers = LayerKind(linear=True), LayerKind()
    linear = LinearAttentionConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=8)
    model, params = tiny_model(
        architecture="qwen3_5_text", num_layers=2, layers=layers, linear_attention=linear
    )
    assert_model_ok(model, params, checks=["shapes", "cache"])


def other_remat(model):
    def apply(*arguments, remat="none", **options):
        hidden, kv = model.apply(*arguments, remat=remat, **options)
        return (hidden if remat == "none" else 2 * hidden), kv

    return model._replace(apply=apply)


@pytest.mark.of_many
@pytest.mark.parametrize(
    ("check", "broken", "message"),
    [
        ("shapes", lambda m: m._replace(output_matrix=lambda p: jnp.zeros((3, 32))), "[V, D]"),
        (
            "shapes",
            lambda m: m._replace(apply=lambda *a, **k: (m.apply(*a, **k)[0], ())),
            "kv must hold, layer by layer, (KV",
        ),
        ("causality", summed_over_tokens, "changing a later token changed other tokens"),
        (
            "causality",
            with_context("mask", mask=all_there),
            "changing a masked token changed other tokens",
        ),
        (
            "causality",
            lambda m: m._replace(
                apply=lambda p, t, *a, **k: (p["embed"]["embedding"][t], m.apply(p, t, *a, **k)[1])
            ),
            "reads no context",
        ),
        (
            "prefix",
            changed_apply(lambda t, p, c, d: (t, p - p[..., :1], c, d)),
            "positions that continue it differ",
        ),
        (
            "cache",
            with_context("index", index=lambda c: jnp.zeros_like(c.index)),
            "decoding through the cache differs",
        ),
        (
            "cache",  # all rows stand where the first one does
            with_context("index", index=lambda c: jnp.ravel(c.index)[0]),
            "decoding through the cache differs",
        ),
        ("delta", changed_apply(lambda t, p, c, d: (t, p, c, None)), "changes nothing"),
        (
            "delta",
            changed_apply(lambda t, p, c, d: (t, p, c, doubled(d))),
            "differs from weights that it is added to",
        ),
        ("remat", other_remat, "remat='dots' gave another gradient"),
        (
            "packing",
            with_context("segments", segments=lambda c: jnp.zeros_like(c.segments)),
            "packed responses differ",
        ),
        ("packing", with_context("ends", ends=nothing), "the trees of a row differ"),
        (
            "packing",  # what ends where is a segment
            with_context("ends", segments=lambda c: c.ends, ends=nothing),
            "the trees of a row differ",
        ),
        (
            "packing",
            with_context("prompt_mask", segments=nothing),
            "prompts in the rows of packed responses differ",
        ),
        (
            "packing",
            with_context("prompt_tree", ends=nothing),
            "trees of several prompts in a row differ",
        ),
        (
            "packing",
            with_context("prompt_tree", prompt_tree=shorter_tree),
            "several prompts in a row differ",
        ),
        (
            "sharding",
            lambda m: m._replace(sharding_rules=(("own/name", ("fsdp",)),)),
            "split no parameter in two",
        ),
        (
            "sharding",
            lambda m: m._replace(sharding_rules=(("norm/scale", ("fsdp", "tensor")),)),
            "has more axes than",
        ),
    ],
)
def test_a_model_that_breaks_a_promise_is_refused(check, broken, message):
    model, params = tiny_model(num_layers=1)
    with pytest.raises(AssertionError) as failure:
        assert_model_ok(broken(model), params, checks=[check])
    assert str(failure.value).startswith(f"{check}: ") and message in str(failure.value)


def of_experts():
    experts = ExpertsConfig(count=4, active=2, width=16)
    return tiny_model(num_layers=1, experts=experts)


def test_a_model_with_experts_passes():
    assert_model_ok(*of_experts(), checks=["experts"])


@pytest.mark.of_many
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda context: context._replace(experts=None),
            "a token takes other experts than those of the context",
        ),
        (
            lambda context: (
                context
                if context.experts is None
                else context._replace(experts=jnp.roll(context.experts, 1, axis=2))
            ),
            "the same experts give other hidden states",
        ),
    ],
)
def test_a_model_that_takes_other_experts_is_refused(change, message):
    model, params = of_experts()

    def changed(function):
        def run(params, tokens, positions, context, **options):
            return function(params, tokens, positions, change(context), **options)

        return run

    broken = model._replace(apply=changed(model.apply), apply_routed=changed(model.apply_routed))
    with pytest.raises(AssertionError, match=f"^experts: {message}"):
        assert_model_ok(broken, params, checks=["experts"])


def test_options():
    model, params = tiny_model(num_layers=1)
    assert_model_ok(model._replace(sharding_rules=()), params, checks=["sharding"])
    with pytest.raises(ValueError, match="no check 'shape'; there are shapes, causality"):
        assert_model_ok(model, params, checks=["shape"])
    assert set(MODEL_CHECKS) >= {"shapes", "causality", "prefix", "cache", "delta", "sharding"}
