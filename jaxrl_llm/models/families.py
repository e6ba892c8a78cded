"""The decoders of transformers that are known, and how their config.json is read.

Every error is a ValueError of ``ModelConfig.from_hf`` that names the entry.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.models.layers import ExpertsConfig, LayerKind, LinearAttentionConfig
from jaxrl_llm.models.rope import LinearScaling, RopeScaling, Scaling, YarnScaling


class Family(NamedTuple):
    """Rules to read the config.json of one class of transformers.

    Attributes:
      model_type: The name of the family.
      defaults: Defaults of the class for absent entries.
      fields: Fields of :class:`ModelConfig` that differ from their defaults.
      windows: Whether the class has layers with windows.
      full_every: Without `layer_types`, every n-th layer has no window, or no linear attention;
        None if flags decide.
      window_rope: Entry with the base of the rotary frequencies of layers with a window, which are
        then not scaled; None if these layers use the same frequencies as the others.
      caps: Entries with soft caps that the class computes; see `CAPS`.
      experts: Entries of the count of experts, the experts of a token, and the width of one; empty
        for a class without experts.
      linear: Whether the class has layers of linear attention.
    """

    model_type: str
    defaults: Mapping[str, Any] = {}
    fields: Mapping[str, Any] = {}
    windows: bool = False
    full_every: int | None = None
    window_rope: str | None = None
    caps: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    linear: bool = False


# Entries with soft caps, and our fields. A null is no cap, also where the class has a default.
CAPS = {"attn_logit_softcapping": "attention_cap", "final_logit_softcapping": "logit_cap"}
# Classes whose default number of heads of keys is not what a null means: as many as of queries.
_HEADS_OF_NULL = ("mistral", "smollm3", "gpt_oss")
# As `full_every`: all layers have a window, or none.
NEVER = 2**31
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_OLMO = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_OLMO_FIELDS = {"norm_placement": "after", "qk_norm": True, "qk_norm_over": "projection"}
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_GEMMA_FIELDS = {"norm_placement": "both", "norm_offset": 1.0}
_LINEAR = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_LINEAR_FIELDS = {"norm_offset": 1.0, "qk_norm": True, "output_gate": True}
_LINEAR_EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
FAMILIES = {
    "LlamaForCausalLM": Family("llama", {"max_position_embeddings": 2048}),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN, {"attention_bias": True}, windows=True),
    "Qwen3ForCausalLM": Family("qwen3", _QWEN | {"head_dim": 128}, {"qk_norm": True}, windows=True),
    "MistralForCausalLM": Family(
        "mistral",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        windows=True,
        full_every=NEVER,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        windows=True,
    ),
    "Olmo2ForCausalLM": Family("olmo2", _OLMO, _OLMO_FIELDS),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        _OLMO | {"rope_theta": 5e5, "sliding_window": 4096},
        _OLMO_FIELDS,
        windows=True,
        full_every=4,
        window_rope="rope_theta",
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA
        | {
            "max_position_embeddings": 8192,
            "vocab_size": 256000,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _GEMMA_FIELDS,
        windows=True,
        full_every=2,
        caps=tuple(CAPS),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _GEMMA
        | {
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "vocab_size": 262208,
        },
        _GEMMA_FIELDS | {"qk_norm": True},
        windows=True,
        full_every=6,
        window_rope="rope_local_base_freq",
        caps=("final_logit_softcapping",),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _QWEN
        | {
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
        },
        {"qk_norm": True},
        windows=True,
        full_every=NEVER,
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            # Where `rope_scaling` is absent too.
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "attention_bias": True,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
        {"sinks": True},
        windows=True,
        full_every=2,
        experts=("num_local_experts", "num_experts_per_tok", "intermediate_size"),
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        _LINEAR | _LINEAR_EXPERTS | {"num_experts_per_tok": 10, "decoder_sparse_step": 1},
        _LINEAR_FIELDS,
        full_every=4,
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        linear=True,
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        _LINEAR | {"num_key_value_heads": 4},
        _LINEAR_FIELDS,
        full_every=4,
        linear=True,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        _LINEAR | _LINEAR_EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8},
        _LINEAR_FIELDS,
        full_every=4,
        experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        linear=True,
    ),
}
ARCHITECTURES = {name: family.model_type for name, family in FAMILIES.items()}
# Denoisers of the same layers: bidirectional, or causal over blocks. By class and by model_type.
DENOISERS = {"A2DQwen3LMHeadModel": "a2d-qwen3", "SDARForCausalLM": "sdar"}
# Models of images and text, of which the decoder of texts is read, by class and by model_type.
WITH_IMAGES = {
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "Qwen3_5MoeForCausalLM"),
}
# What a head reads, and the class of transformers that has it: the last token, or every one.
HEADS = {"response": "ForSequenceClassification", "step": "ForTokenClassification"}
# The class of a decoder with such a head, by model_type and head; denoisers have none.
SCORERS = {
    (family.model_type, head): name.replace("ForCausalLM", end)
    for name, family in FAMILIES.items()
    for head, end in HEADS.items()
}
SCORERS |= {
    ("gemma3_text", "response"): "Gemma3TextForSequenceClassification",
    ("qwen3_5_text", "response"): "Qwen3_5TextForSequenceClassification",
}
# Those that transformers does not have: only this package loads them.
OUR_SCORERS = {
    ("gemma3_text", "step"),
    ("olmo2", "step"),
    ("olmo3", "step"),
    ("qwen3_5_text", "step"),
    ("qwen3_5_moe_text", "response"),
    ("qwen3_5_moe_text", "step"),
}

# The rope types of transformers that are known, and the settings without which they are none.
_SCALINGS = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (),
}

# How transformers calls the activations of an MLP that are known.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Far beyond any released decoder: a number above is an error of the file, or a trap.
MOST_LAYERS = 1024


def read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``ModelConfig`` in a parsed config.json, all but its dtype."""
    if not isinstance(config, Mapping):
        raise TypeError(
            f"ModelConfig.from_hf: `config` must be a mapping, got {type(config).__name__}"
        )
    config = _of_text(config)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else None
    if name is None:
        by_type = {kind: name for name, kind in (ARCHITECTURES | DENOISERS).items()}
        name = by_type.get(str(config.get("model_type")), config.get("model_type"))
    if not isinstance(name, str) or name not in ARCHITECTURES | DENOISERS:
        raise ValueError(
            f"ModelConfig.from_hf: unknown architecture {name!r}; known: "
            f"{', '.join(ARCHITECTURES | DENOISERS | WITH_IMAGES)}"
        )
    family = FAMILIES.get(name, FAMILIES["Qwen3ForCausalLM"])
    # A null means what an absent entry does, but for the window of Mistral and caps: none.
    none = ("sliding_window", *CAPS)
    if family.model_type in _HEADS_OF_NULL:
        none = (*none, "num_key_value_heads")
    config = {k: x for k, x in config.items() if x is not None or k in none}
    ropes = _rope_settings(config, family)
    config = {**family.defaults, **config}
    _refuse_unsupported(config, family)
    width = _size(config, "hidden_size")
    num_heads = _size(config, "num_attention_heads")
    head_dim = _size(config, "head_dim", width // num_heads)
    max_length = _size(config, "max_position_embeddings")
    fields = dict(family.fields)
    layers = _layers(config, family, ropes["sliding_attention"])
    if any(kind.linear for kind in layers or ()):
        fields["linear_attention"] = _linear_attention(config)
    if family.model_type == "qwen3_5_moe_text":  # it has no layer without experts
        config["intermediate_size"] = config["moe_intermediate_size"]
    if "query_pre_attn_scalar" in family.defaults:
        scalar = _number(config, "query_pre_attn_scalar", 256.0)
        fields |= {"embedding_scale": width**0.5, "query_scale": scalar**-0.5}
    for entry in family.caps:
        if config.get(entry) is not None:
            fields[CAPS[entry]] = _number(config, entry, 1.0)
    if family.model_type == "gpt_oss":
        fields["attention_bias"] = fields["output_bias"] = _flag(config, "attention_bias")
    return {
        "architecture": family.model_type,
        "vocab_size": _size(config, "vocab_size"),
        "width": width,
        "num_layers": _size(config, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": _size(config, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "rotary_dim": _rotary_dim(ropes["full_attention"], config, family, head_dim),
        "mlp_width": _size(config, "intermediate_size"),
        "max_length": max_length,
        "norm_eps": _number(config, "rms_norm_eps", 1e-6),
        "rope_theta": _theta(ropes["full_attention"], config),
        "rope_scaling": _scaling(ropes["full_attention"], max_length),
        "tied": _flag(config, "tie_word_embeddings"),
        "mlp_bias": _flag(config, "mlp_bias"),
        "activation": ACTIVATIONS[_activation(config)],
        "experts": _experts(config, family),
        "layers": layers,
        "causal": name not in DENOISERS,
        "block_length": _size(config, "block_size") if name == "SDARForCausalLM" else None,
        "mask_id": None if config.get("mask_token_id") is None else _mask_id(config),
        **fields,
    }


def body_class(name: str, *, composite: bool) -> str:
    """The class of the language model that the body of a class with a head is.

    ``composite``: whether its settings are those of a model of images and text. The same class of
    transformers may have either.
    """
    end = next(end for end in HEADS.values() if name.endswith(end))
    if composite:
        return name.removesuffix(end) + "ForConditionalGeneration"
    of_type = {kind: causal for causal, kind in ARCHITECTURES.items()}
    bodies = {scorer: of_type[kind] for (kind, _), scorer in SCORERS.items()}
    return bodies.get(name) or name.removesuffix(end) + "ForCausalLM"


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the decoder of texts in one of a model of images and text."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else None
    for composite, (kind, text) in WITH_IMAGES.items():
        if name == composite or (name is None and config.get("model_type") == kind):
            inner = config.get("text_config")
            if not isinstance(inner, Mapping):
                raise ValueError(
                    f"ModelConfig.from_hf: `text_config` of {composite!r} must be an object, got "
                    f"{inner!r}"
                )
            # The tie of the output matrix may be an entry of the whole alone.
            outer = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
            entry = "quantization_config"  # of the whole, or of the decoder alone
            quantized = config.get(entry) or inner.get(entry)
            return {**outer, **inner, "architectures": [text], entry: quantized}
    return config


def _linear_attention(config: Mapping[str, Any]) -> LinearAttentionConfig:
    """The sizes of linear attention in a config.json."""
    return LinearAttentionConfig(
        key_heads=_size(config, "linear_num_key_heads"),
        value_heads=_size(config, "linear_num_value_heads"),
        key_dim=_size(config, "linear_key_head_dim"),
        value_dim=_size(config, "linear_value_head_dim"),
        conv_size=_size(config, "linear_conv_kernel_dim"),
    )


def _rotary_dim(
    rope: Mapping[str, Any], config: Mapping[str, Any], family: Family, head_dim: int
) -> int | None:
    """How many dimensions of a head are rotated; None for all."""
    name = "partial_rotary_factor"
    share = _number(rope if rope.get(name) else config, name, 1.0)
    if share == 1.0:
        return None
    if not family.linear or share > 1.0:
        raise ValueError(f"ModelConfig.from_hf: `{name}` {share} is not supported, only 1")
    return int(head_dim * share)


def _experts(config: Mapping[str, Any], family: Family) -> ExpertsConfig | None:
    """The experts of a config.json; None for a class without."""
    if not family.experts:
        return None
    # transformers 5 writes the first name for every class, and reads both.
    aliases = ("num_local_experts", "num_experts")
    count = next((name for name in aliases if name in config), family.experts[0])
    _, active, width = family.experts
    fields: dict[str, Any] = {"normalized": _flag(config, "norm_topk_prob")}
    if family.model_type == "gpt_oss":
        fields = {
            "bias": True,
            "limit": _number(config, "swiglu_limit", 1.0),
            "alpha": _number(config, "swiglu_alpha", 1.0),
        }
    if family.linear:
        fields["shared"] = _size(config, "shared_expert_intermediate_size")
    if family.model_type == "qwen3_5_moe_text":
        fields["normalized"] = True
    return ExpertsConfig(
        count=_size(config, count),
        active=_size(config, active),
        width=_size(config, width),
        **fields,
    )


def _dense_layers(config: Mapping[str, Any], family: Family, count: int) -> list[bool]:
    """Which layers of a model with experts have a plain MLP."""
    if family.model_type not in ("qwen3_moe", "qwen3_next"):
        return [False] * count
    only, every = config.get("mlp_only_layers", ()), _size(config, "decoder_sparse_step")
    if not isinstance(only, list | tuple) or not all(type(i) is int for i in only):
        raise ValueError(
            f"ModelConfig.from_hf: `mlp_only_layers` must be a list of integers, got {only!r}"
        )
    return [i in only or (i + 1) % every > 0 for i in range(count)]


def _rope_settings(config: Mapping[str, Any], family: Family) -> dict[str, Mapping[str, Any]]:
    """The rope settings of layers without and with a window; the latter empty if not their own.

    ``config`` has no defaults yet. transformers 4 wrote `rope_scaling`, 5 writes `rope_parameters`;
    of both, `rope_scaling` wins in either version.
    """
    full, local = "full_attention", "sliding_attention"
    rope = config.get("rope_parameters", family.defaults.get("rope_parameters")) or {}
    scaling = _rope_object(config.get("rope_scaling") or {})
    if {full, local} & set(scaling):
        rope, scaling = scaling, {}
    nested = bool({full, local} & set(_rope_object(rope)))
    ropes = {kind: rope.get(kind) or {} for kind in (full, local)} if nested else {full: rope}
    shared = not nested and family.window_rope == "rope_theta"
    theta = {"rope_theta": rope["rope_theta"]} if shared and "rope_theta" in rope else {}
    ropes.setdefault(local, theta)
    for settings in ropes.values():
        _rope_object(settings)
    if scaling:
        ropes[full] = _with_scaling(ropes[full], scaling, config, family)
    return ropes


def _rope_object(settings: Any) -> Mapping[str, Any]:
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"ModelConfig.from_hf: the rope settings must be an object, got {settings!r}"
        )
    return settings


def _with_scaling(
    rope: Mapping[str, Any], scaling: Mapping[str, Any], config: Mapping[str, Any], family: Family
) -> dict[str, Any]:
    """The rope settings of layers without a window where `rope_scaling` is set.

    It updates those of a class that has others for layers with a window, and replaces those of any
    other class, which then takes base and share of a head from the config.
    """
    scaling = {name: x for name, x in scaling.items() if x is not None}
    if "type" in scaling:  # the older name must not lose to a `rope_type` that is updated
        scaling.setdefault("rope_type", scaling["type"])
    if family.window_rope is not None:
        return {**rope, **scaling}
    kept = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        value = config.get(name) or rope.get(name)
        if value is not None:
            kept[name] = value
    return {**kept, **scaling}


def _theta(rope: Mapping[str, Any], config: Mapping[str, Any], name: str = "rope_theta") -> float:
    """The base of the rotary frequencies in rope settings, else that of the entry of a config."""
    if rope.get("rope_theta"):
        return _number(rope, "rope_theta", 1.0)
    return _number(config, name, 10000.0)


def _layers(
    config: Mapping[str, Any], family: Family, local_rope: Mapping[str, Any]
) -> tuple[LayerKind, ...] | None:
    """What the layers of a config.json have of their own; None if they are all plain."""
    count = _size(config, "num_hidden_layers")
    if count > MOST_LAYERS:  # before a list of them takes all memory
        raise ValueError(
            f"ModelConfig.from_hf: `num_hidden_layers` must be at most {MOST_LAYERS:,}, "
            f"got {count:,}"
        )
    limit = _size(config, "max_position_embeddings")
    rotary: Any = [True] * count
    if family.model_type == "smollm3":
        every = _size(config, "no_rope_layer_interval")
        rotary = config.get("no_rope_layers", [(i + 1) % every > 0 for i in range(count)])
    if not isinstance(rotary, list | tuple) or len(rotary) != count:
        raise ValueError(
            f"ModelConfig.from_hf: `no_rope_layers` must have one entry for each of the {count} "
            f"layers, got {rotary!r}"
        )
    kinds = _layer_types(config, family, list(rotary))
    if len(kinds) != count:
        raise ValueError(
            f"ModelConfig.from_hf: `layer_types` must have one entry for each of the {count} "
            f"layers, got {len(kinds)}"
        )
    window = config.get("sliding_window")
    window = limit if window is None else _size(config, "sliding_window")
    if "sliding_attention" in kinds and window < limit and not family.windows:
        raise ValueError(
            f"ModelConfig.from_hf: {family.model_type!r} has no sliding windows, and "
            f"`sliding_window` {window} is shorter than the context of {limit} tokens"
        )
    theta = None
    if family.window_rope is not None:
        theta = _theta(local_rope, config, family.window_rope)
        if (local_rope.get("rope_type") or local_rope.get("type") or "default") != "default":
            raise ValueError(
                "ModelConfig.from_hf: a scaled rope on layers with windows is not supported"
            )
    layers = tuple(
        LayerKind(
            window=window if kind == "sliding_attention" and window < limit else None,
            rotary=bool(turns),
            rope_theta=theta if kind == "sliding_attention" else None,
            dense=dense,
            linear=kind == "linear_attention",
        )
        for kind, turns, dense in zip(
            kinds, rotary, _dense_layers(config, family, count), strict=True
        )
    )
    return None if set(layers) == {LayerKind()} else layers


def _layer_types(config: Mapping[str, Any], family: Family, rotary: list) -> list[str]:
    """The kind of attention of each layer, as transformers decides it."""
    full, local = "full_attention", "linear_attention" if family.linear else "sliding_attention"
    kinds, count = config.get("layer_types"), len(rotary)
    if kinds is not None and family.full_every != NEVER:
        for kind in kinds if isinstance(kinds, list | tuple) else [kinds]:
            if kind not in (full, local):
                raise ValueError(
                    f"ModelConfig.from_hf: `layer_types` has {kind!r}; only {full!r} and {local!r} "
                    "are supported"
                )
        return list(kinds)
    if family.linear:
        every = _size(config, "full_attention_interval", family.full_every)
        return [local if (i + 1) % every else full for i in range(count)]
    if family.full_every is not None:
        every = _size(config, "sliding_window_pattern", family.full_every)
        acts = config.get("sliding_window") is not None
        if family.model_type == "qwen3_moe":
            acts = acts and _flag(config, "use_sliding_window")
        return [local if acts and (i + 1) % every else full for i in range(count)]
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise ValueError(
            f"ModelConfig.from_hf: `max_window_layers` must be an integer, got {first!r}"
        )
    if not _flag(config, "use_sliding_window"):
        return [full] * count
    if family.model_type == "smollm3":
        return [full if turns else local for turns in rotary]
    return [local if i >= first else full for i in range(count)]


def _scaling(rope: Mapping[str, Any], max_length: int) -> Scaling | None:
    """The scaling in the rope settings of a config.json; None if they ask for none."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    original = "original_max_position_embeddings"
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise ValueError(
            f"ModelConfig.from_hf: rope type {kind!r} is not supported, only 'default', "
            f"{', '.join(map(repr, _SCALINGS))}"
        )
    for name in _SCALINGS[kind]:
        if rope.get(name) is None:
            raise ValueError(f"ModelConfig.from_hf: {kind} rope scaling lacks `{name}`")
    if kind == "linear":
        return LinearScaling(factor=_number(rope, "factor", 1.0))
    if kind == "llama3":
        return RopeScaling(
            factor=_number(rope, "factor", 1.0),
            low_freq_factor=_number(rope, "low_freq_factor", 1.0),
            high_freq_factor=_number(rope, "high_freq_factor", 1.0),
            original_max_length=_size(rope, original),
        )
    length = _size(rope, original, max_length)
    # A null means what an absent entry does, and in these a 0 too.
    absent = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    given = {k: x for k, x in rope.items() if x is not None and (x or k not in absent)}
    factor = _number(given, "factor", max_length / length)
    scales = [_number(given, name, 1.0) for name in ("mscale", "mscale_all_dim") if name in given]
    if len(scales) < 2:
        scales = [1.0, 0.0]
    above, below = (max(0.1 * scale * math.log(factor), 0.0) + 1.0 for scale in scales)
    return YarnScaling(
        factor=factor,
        original_max_length=length,
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        attention_factor=_number(given, "attention_factor", above / below),
        truncate=_flag(given, "truncate", default=True),
    )


def _mask_id(config: Mapping[str, Any]) -> int:
    value = config["mask_token_id"]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"ModelConfig.from_hf: `mask_token_id` must be an integer, got {value!r}")
    return value


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError(f"ModelConfig.from_hf: `{name}` must be a positive integer, got {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise ValueError(f"ModelConfig.from_hf: `{name}` must be a positive number, got {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = config.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"ModelConfig.from_hf: `{name}` must be true or false, got {value!r}")
    return bool(value)


def _activation(config: Mapping[str, Any]) -> Any:
    return config.get("hidden_activation", config.get("hidden_act", "silu"))


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    """Raises for settings that would change the outputs and that the decoder does not have."""
    activation = _activation(config)
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"ModelConfig.from_hf: `hidden_act` {activation!r} is not supported, only "
            f"{', '.join(map(repr, ACTIVATIONS))}"
        )
    if family.linear and ACTIVATIONS[activation] != "silu":
        raise ValueError(
            f"ModelConfig.from_hf: `hidden_act` {activation!r} is not supported for "
            f"{family.model_type!r}, whose linear attention has only 'silu'"
        )
    if config.get("attention_bias") and family.model_type not in ("qwen2", "gpt_oss"):
        raise ValueError(
            "ModelConfig.from_hf: `attention_bias` true is not supported for "
            f"{family.model_type!r}: it puts a bias on the output projection too"
        )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        if (family.model_type, method) != ("gpt_oss", "mxfp4"):
            raise ValueError(
                "ModelConfig.from_hf: `quantization_config` is not supported, but for MXFP4 of "
                "gpt-oss; take the unquantized weights or a GGUF file"
            )
    if config.get("per_layer_config"):
        raise ValueError(
            "ModelConfig.from_hf: `per_layer_config`, which gives some layers other settings, is "
            "not supported, only null"
        )
    for name in (*CAPS, "use_bidirectional_attention"):
        if config.get(name) and name not in family.caps:
            raise ValueError(
                f"ModelConfig.from_hf: `{name}` {config[name]!r} is not supported for "
                f"{family.model_type!r}, only null"
            )
