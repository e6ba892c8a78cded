"""Settings of Hugging Face become a configuration: what each entry means, and what is refused."""

import math
from dataclasses import replace

import pytest
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm.models.config import ModelConfig, differences
from jaxrl_llm.models.layers import ExpertsConfig, LayerKind
from jaxrl_llm.models.rope import LinearScaling, RopeScaling, YarnScaling

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


GOOD = ModelConfig.from_hf(SMOLLM2)


def changed(**changes):
    return {**SMOLLM2, **changes}


def without(*names):
    return {name: value for name, value in SMOLLM2.items() if name not in names}


def test_smollm2():
    assert ModelConfig.from_hf(SMOLLM2) == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        width=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_width=1536,
        max_length=8192,
        norm_eps=1e-5,
        rope_theta=100000.0,
        tied=True,
    )


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
ABSENT = dict.fromkeys(
    ("num_key_value_heads", "tie_word_embeddings", "rope_theta", "rms_norm_eps")
    + ("max_position_embeddings", "rope_scaling")
)
QWEN2, QWEN3, QWEN3_5 = (
    {"architectures": [f"Qwen{name}ForCausalLM"]} for name in ("2", "3", "3_5")
)
PARTIAL = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}


@for_each(
    ("changes", "expected"),
    [
        (ABSENT, {"num_kv_heads": 9, "tied": False, "rope_theta": 10000.0, "norm_eps": 1e-6}),
        (ABSENT, {"max_length": 2048}),
        (QWEN2, {"attention_bias": True, "qk_norm": False, "head_dim": 64}),
        (QWEN3 | {"head_dim": 32}, {"attention_bias": False, "qk_norm": True, "head_dim": 32}),
        (QWEN3, {"head_dim": 128}),
        ({"architectures": None, "model_type": "qwen3"}, {"architecture": "qwen3"}),
        (
            ABSENT | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            {"rope_theta": 7.0, "rope_scaling": None},
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {"rope_scaling": LinearScaling(factor=8.0)},
        ),
        ({"per_layer_config": {}}, vars(GOOD)),
        (QWEN3_5 | {"hidden_act": "swish"}, {"activation": "silu"}),
        # A part of each head stays rotated under a rope scaling.
        (
            QWEN3_5
            | {"head_dim": 64, "rope_scaling": YARN, "rope_parameters": PARTIAL}
            | {"rope_theta": None},
            {"rotary_dim": 32, "rope_theta": 1e7, "head_dim": 64},
        ),
    ],
)
def test_what_an_entry_means_and_an_absent_one(changes, expected):
    settings = {name: x for name, x in changed(**changes).items() if x is not None}
    config = ModelConfig.from_hf(settings)
    assert {name: getattr(config, name) for name in expected} == expected


@for_each(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    ],
)
def test_llama3_rope_in_both_forms(rope):
    config = ModelConfig.from_hf(changed(**rope))
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192
    )


@for_each(
    ("changes", "expected"),
    [
        # 0.1 log 4 + 1
        ({}, {"attention_factor": 1.138629436}),
        # (0.0707 log 4 + 1) / (0.05 log 4 + 1)
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, {"attention_factor": 1.026836153}),
        ({"mscale": 0.707}, {"attention_factor": 1.138629436}),
        (
            {"attention_factor": 1.5, "truncate": False},
            {"attention_factor": 1.5, "truncate": False},
        ),
        (
            {"beta_fast": 16, "beta_slow": None},
            {"beta_fast": 16.0, "attention_factor": 1.138629436},
        ),
        # The factor is what is left out: 8192 / 2048.
        ({"factor": None}, {"attention_factor": 1.138629436}),
    ],
)
def test_yarn_settings(changes, expected):
    scaling = ModelConfig.from_hf(changed(rope_scaling=YARN | changes)).rope_scaling
    factor = expected.pop("attention_factor")
    assert scaling.attention_factor == pytest.approx(factor, abs=1e-9)
    plain = YarnScaling(factor=4.0, original_max_length=2048, attention_factor=1.0, **expected)
    assert replace(scaling, attention_factor=1.0) == plain


def test_a_rope_scaling_wins_over_rope_parameters_as_in_transformers():
    """An export holds both; whoever stretches the context edits the entry of the model's card."""
    plain = {"rope_type": "default", "rope_theta": 5e5}
    yarn = {"rope_scaling": YARN, "rope_parameters": plain}
    expected = ModelConfig.from_hf(changed(rope_scaling=YARN)).rope_scaling
    config = ModelConfig.from_hf({**without("rope_theta"), **yarn})
    assert (config.rope_scaling, config.rope_theta) == (expected, 5e5)
    # The entry of the whole file is the one that transformers reads beside `rope_scaling`.
    assert ModelConfig.from_hf(changed(**yarn)).rope_theta == 100000.0
    inside = {**yarn, "rope_scaling": YARN | {"rope_theta": 7.0}}
    assert ModelConfig.from_hf(changed(**inside)).rope_theta == 7.0
    # It replaces other settings; null and an empty object are no scaling.
    llama3 = {"rope_scaling": YARN, "rope_parameters": LLAMA3}
    assert ModelConfig.from_hf(changed(**llama3)).rope_scaling == expected
    for none in (None, {}):
        config = ModelConfig.from_hf(changed(rope_scaling=none, rope_parameters=LLAMA3))
        assert isinstance(config.rope_scaling, RopeScaling)
    for broken in ({"rope_scaling": YARN, "rope_parameters": 3}, {"rope_scaling": [3]}):
        with pytest.raises(ValueError, match="rope settings must be an object"):
            ModelConfig.from_hf(changed(**broken))


@for_each("kind", ["type", "rope_type"])
def test_a_rope_scaling_updates_the_layers_without_a_window(kind):
    """Of Gemma 3 and OLMo 3; the layers with a window keep their own frequencies."""
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    scaling = {kind: "linear", "factor": 8.0}
    changes = GEMMA3 | {"sliding_window": 64, "rope_theta": None}
    config = ModelConfig.from_hf(changed(**changes, rope_scaling=scaling, rope_parameters=rope))
    assert (config.rope_scaling, config.rope_theta) == (LinearScaling(factor=8.0), 2e6)
    assert config.layers[0] == LayerKind(window=64, rope_theta=3e4)


@for_each("kind", ["type", "rope_type"])
def test_a_scaled_rope_of_layers_with_a_window_is_refused(kind):
    plain, scaled = {"rope_type": "default"}, {kind: "linear", "factor": 8.0}
    rope = {"rope_parameters": {"full_attention": plain, "sliding_attention": scaled}}
    with pytest.raises(ValueError, match="a scaled rope on layers with windows is not supported"):
        ModelConfig.from_hf(changed(**GEMMA3, **rope))


def test_a_null_number_of_key_heads_is_that_of_query_heads():
    """As in transformers; an absent one is the default of the class."""
    for name, default in (("Mistral", 8), ("SmolLM3", 4)):
        sizes = {"architectures": [f"{name}ForCausalLM"], "num_attention_heads": 16}
        nulled = changed(**sizes, hidden_size=1024, num_key_value_heads=None)
        assert ModelConfig.from_hf(nulled).num_kv_heads == 16
        del nulled["num_key_value_heads"]
        assert ModelConfig.from_hf(nulled).num_kv_heads == default
    assert ModelConfig.from_hf(GPT_OSS | {"num_key_value_heads": None}).num_kv_heads == 64


@for_each(
    ("changes", "expected"),
    [
        ({"max_length": 64, "dtype": "bfloat16", "quantization": "int8"}, ""),
        ({"architecture": "mistral", "scan_layers": True}, ""),
        ({"layers": (LayerKind(),) * 30}, ""),
        (
            {"rope_theta": 5.0, "rope_scaling": LinearScaling(factor=8.0)},
            "rope_theta is 100000.0 and 5.0, rope_scaling is None and LinearScaling(factor=8.0)",
        ),
        (
            {"layers": (LayerKind(),) * 29 + (LayerKind(rotary=False),)},
            f"layers[29] is {LayerKind()!r} and {LayerKind(rotary=False)!r}",
        ),
        (
            {"num_layers": 1, "layers": (LayerKind(window=8),)},
            f"num_layers is 30 and 1, layers is None and {(LayerKind(window=8),)!r}",
        ),
    ],
)
def test_what_makes_two_decoders_different_functions(changes, expected):
    assert differences(GOOD, replace(GOOD, **changes)) == expected


GEMMA2, GEMMA3 = (
    {"architectures": [f"Gemma{i}ForCausalLM"], "hidden_act": None, "head_dim": None}
    for i in (2, 3)
)


@for_each(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope.*'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear rope scaling lacks `factor`"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping.*'llama'"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping.*'gemma3_text'"),
        (GEMMA2 | {"attn_logit_softcapping": 0}, "attn_logit_softcapping.*positive number"),
        ({"layer_types": ["sliding_attention"] * 30, "sliding_window": 9}, "no sliding windows"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 2}, "num_kv_heads.*num_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"layer_types": 3}, "layer_types.* has 3"),
        ({"architectures": [["x"]]}, "unknown architecture"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"num_key_value_heads": [1]}, "num_key_value_heads"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": 3}, "rope settings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"per_layer_config": {"3": {"num_key_value_heads": 1}}}, "per_layer_config"),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "num_experts": 4}
            | {"hidden_act": "gelu_pytorch_tanh"},
            "hidden_act.*gelu_pytorch_tanh.*'qwen3_next', whose linear attention",
        ),
        ({"use_sliding_window": True, "max_window_layers": []}, "max_window_layers"),
    ],
)
def test_refusals_name_the_entry(changes, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_hf(changed(**changes))


def test_a_window_is_one_only_where_it_acts():
    qwen = changed(architectures=["Qwen2ForCausalLM"], sliding_window=1024)
    for inactive in (
        {"use_sliding_window": False},
        {"use_sliding_window": True, "max_window_layers": 30},
        {"layer_types": ["full_attention"] * 30},
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8192},
    ):
        assert ModelConfig.from_hf({**qwen, **inactive}).layers is None
    plain, local = LayerKind(), LayerKind(window=1024)
    flags = {"use_sliding_window": True, "max_window_layers": 10}
    assert ModelConfig.from_hf({**qwen, **flags}).layers == (plain,) * 10 + (local,) * 20
    types = {"layer_types": ["full_attention"] * 29 + ["sliding_attention"]}
    assert ModelConfig.from_hf({**qwen, **types}).layers == (plain,) * 29 + (local,)


def test_what_classes_fill_in_for_layers():
    def read(name, **changes):
        absent = without("rope_theta", "rope_scaling", "tie_word_embeddings")
        return ModelConfig.from_hf(absent | {"architectures": [f"{name}ForCausalLM"]} | changes)

    mistral = read("Mistral")
    assert mistral.layers == (LayerKind(window=4096),) * 30
    assert read("Mistral", sliding_window=None).layers is None
    smollm = read("SmolLM3")
    assert (smollm.rope_theta, smollm.tied) == (2e6, True)
    assert [kind.rotary for kind in smollm.layers[:5]] == [True, True, True, False, True]
    olmo = read("Olmo3", sliding_window=64)
    local = LayerKind(window=64, rope_theta=5e5)
    assert olmo.layers[:5] == (local, local, local, LayerKind(), local)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    flat = read("Olmo3", sliding_window=64, rope_parameters=rope)
    assert (flat.layers[0].rope_theta, flat.rope_theta) == (1e4, 1e4)
    qwen = read("Qwen2", use_sliding_window=True, max_window_layers=29)
    assert qwen.layers == (LayerKind(),) * 29 + (LayerKind(window=4096),)
    nulled = read("Qwen2", use_sliding_window=True, max_window_layers=0, sliding_window=None)
    assert nulled.layers is None
    gemma = read("Gemma3", sliding_window=64, hidden_act=None, head_dim=None)
    assert gemma.layers[5:7] == (LayerKind(), LayerKind(window=64, rope_theta=1e4))
    assert (gemma.activation, gemma.rope_theta, gemma.query_scale) == ("gelu_tanh", 1e6, 1 / 16)
    assert (gemma.embedding_scale, gemma.norm_offset, gemma.head_dim) == (24.0, 1.0, 256)
    assert gemma.logit_cap is None
    assert read("Gemma3", **GEMMA3 | {"final_logit_softcapping": 20.0}).logit_cap == 20.0
    gemma = read("Gemma2", **GEMMA2 | {"query_pre_attn_scalar": 144})
    assert gemma.layers[:3] == (LayerKind(window=4096), LayerKind(), LayerKind(window=4096))
    assert (gemma.query_scale, gemma.embedding_scale, gemma.norm_placement) == (
        1 / 12,
        24.0,
        "both",
    )
    assert (gemma.attention_cap, gemma.logit_cap, gemma.qk_norm) == (50.0, 30.0, False)
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    gemma = read("Gemma2", **GEMMA2 | uncapped)
    assert (gemma.attention_cap, gemma.logit_cap) == (None, None)


SCALING = RopeScaling(factor=2, low_freq_factor=1, high_freq_factor=4, original_max_length=8)


BAD = r"""
TypeError:
ModelConfig.from_hf([1, 2])  # !.*mapping
ValueError:
replace(GOOD, architecture="gpt2")  # !.*architecture
replace(GOOD, dtype="int8")  # !.*dtype
replace(GOOD, width=0)  # !.*width
replace(GOOD, attention_cap=0.0)  # !.*attention_cap must be above 0
replace(GOOD, logit_cap=-1.0)  # !.*logit_cap must be above 0
replace(SCALING, low_freq_factor=4)  # !.*high_freq_factor
replace(SCALING, factor=0)  # !.*factor
replace(GOOD, layers=(LayerKind(),))  # !.*one entry for each
replace(GOOD, qk_norm_over="projection")  # !.*qk_norm_over
replace(GOOD, norm_placement="middle")  # !.*norm_placement
replace(GOOD, causal=False, layers=(LayerKind(window=2),) * 30)  # !.*causal
LayerKind(window=0)  # !.*window
LayerKind(rotary=False, rope_theta=1e4)  # !.*rope_theta
LinearScaling(factor=-1.0)  # !LinearScaling: `factor`
YarnScaling(factor=4.0, original_max_length=8, beta_fast=1.0)  # !.*beta_fast
"""


@for_each(("error", "call", "message"), bad_calls(BAD))
def test_direct_construction_is_checked(error, call, message):
    raises(error, call, message, globals())


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "num_local_experts": 32,
    "vocab_size": 201088,
}


def test_qwen3_moe():
    config = ModelConfig.from_hf(QWEN3_MOE)
    assert config.experts == ExpertsConfig(count=128, active=8, width=768, normalized=True)
    assert config.layers is None and config.qk_norm and config.mlp_width == 6144
    absent = {k: x for k, x in QWEN3_MOE.items() if k != "norm_topk_prob"}
    assert not ModelConfig.from_hf(absent).experts.normalized


def test_layers_of_qwen3_moe_without_experts():
    changes = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = ModelConfig.from_hf(QWEN3_MOE | changes)
    assert [kind.dense for kind in config.layers] == [True, False, True, True]
    # Here the window is one of all layers; `max_window_layers` has no effect in this class.
    changes = {"use_sliding_window": True, "sliding_window": 64}
    config = ModelConfig.from_hf(QWEN3_MOE | changes)
    assert [kind.window for kind in config.layers] == [64] * 4
    assert ModelConfig.from_hf(QWEN3_MOE | {"sliding_window": 64}).layers is None


def test_gpt_oss_with_the_defaults_of_its_class():
    config = ModelConfig.from_hf(GPT_OSS)
    assert config.experts == ExpertsConfig(count=32, active=4, width=2880, bias=True, limit=7.0)
    assert config.sinks and config.attention_bias and config.output_bias
    assert [kind.window for kind in config.layers] == [128, None, 128, None]
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (8, 64, 150000.0)
    scaling = config.rope_scaling
    assert (scaling.factor, scaling.original_max_length, scaling.truncate) == (32.0, 4096, False)
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    plain = ModelConfig.from_hf(GPT_OSS | {"rope_parameters": {"rope_type": "default"}})
    assert plain.rope_scaling is None
    bare = ModelConfig.from_hf(GPT_OSS | {"attention_bias": False})
    assert not bare.attention_bias and not bare.output_bias


@for_each(
    ("config", "message"),
    [
        (QWEN3_MOE | {"num_experts": None}, "`num_experts` must be a positive integer, got None"),
        (GPT_OSS | {"num_local_experts": 0}, "`num_local_experts` must be a positive integer"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "`mlp_only_layers` must be a list of integers, got 3"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "`decoder_sparse_step` must be a positive"),
        (QWEN3_MOE | {"decoder_sparse_step": 5}, "`experts` have no effect"),
        (QWEN3_MOE | {"num_experts_per_tok": 129}, r"`active` \(129\) is above `count` \(128\)"),
        (QWEN3_MOE | {"attention_bias": True}, "`attention_bias` true is not supported"),
        (GPT_OSS | {"quantization_config": {"quant_method": "bitsandbytes"}}, "but for MXFP4"),
        (QWEN3_MOE | {"quantization_config": {"quant_method": "mxfp4"}}, "take the unquantized"),
        (QWEN3_MOE | {"architectures": ["MixtralForCausalLM"]}, "unknown .*Qwen3MoeForCausalLM"),
    ],
)
def test_experts_that_cannot_be_read(config, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(config)
