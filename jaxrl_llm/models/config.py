"""The shape of a decoder, and how it is read from a Hugging Face config.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.core import checks
from jaxrl_llm.models.quantize import check_quantization
from jaxrl_llm.models.rope import LinearScaling, Rope, RopeScaling, Scaling, YarnScaling

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Denoisers of the same layers: bidirectional, or causal over blocks. By class and by model_type.
DENOISERS = {"A2DQwen3LMHeadModel": "a2d-qwen3", "SDARForCausalLM": "sdar"}
DTYPES = ("float32", "bfloat16", "float16")
# What a head reads, and the class of transformers that has it: the last token, or every one.
HEADS = {"response": "ForSequenceClassification", "step": "ForTokenClassification"}

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

# What a config.json leaves out means what the class that wrote it would have filled in.
_MAX_LENGTH = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
# Far beyond any released decoder: a number above is an error of the file, or a trap.
_MOST = {
    "vocab_size": 2**24,
    "width": 2**20,
    "num_layers": 1024,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "mlp_width": 2**22,
    "max_length": 2**31 - 1,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a dense decoder of the Llama, SmolLM2, Qwen2 or Qwen3 family.

    Args:
      architecture: "llama", "qwen2" or "qwen3"; only names the family, the flags below decide.
      vocab_size, width: V and D, the size of the residual stream.
      num_layers, max_length: Decoder blocks, and the longest sequence in tokens.
      num_heads, num_kv_heads: Query heads, and key and value heads, whose number divides them.
      head_dim: Size of one head, even; num_heads * head_dim need not be the width.
      mlp_width: Hidden size of the gated MLP.
      norm_eps: Added to the mean square inside every RMS norm.
      rope_theta, rope_scaling: Base of the rotary frequencies, and how they are scaled if at all:
        `RopeScaling` (Llama 3), `YarnScaling` or `LinearScaling`.
      tied: The head is the embedding.
      attention_bias: q, k and v have a bias (Qwen2); the output projection has none.
      mlp_bias: gate, up and down have a bias.
      qk_norm: RMS norm over each head of q and k before the rotary embedding (Qwen3).
      dtype: The dtype of matrix products; norms and statistics are float32.
      quantization: Rounds both operands of the linear layers to 8 bits: "fp8" or "int8", see
        `quantized_matmul`; None does not. Attention, embedding, head and low-rank deltas stay in
        `dtype`.
      causal: A token sees those before it alone. False for a masked-diffusion model, whose tokens
        see all others.
      block_length: With `causal=False`, the tokens of a block: a token sees its block and those
        before it, counted by positions from 0. None for one block of any length.
      mask_id: The id that stands for a hidden token; None for a model without.

    Raises:
      ValueError: If a size is not positive or beyond all decoders, the heads do not group, a name
        is unknown, there are blocks in a causal model, or the mask id is outside the vocabulary.

    Example:
      >>> config = ModelConfig(architecture="llama", vocab_size=256, width=32, num_layers=2,
      ...     num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=64, max_length=128)
      >>> config.tied, config.dtype
      (False, 'float32')
    """

    architecture: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_length: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    quantization: str | None = None
    causal: bool = True
    block_length: int | None = None
    mask_id: int | None = None

    def __post_init__(self) -> None:
        known = tuple(ARCHITECTURES.values())
        if self.architecture not in known:
            raise ValueError(
                f"ModelConfig: unknown `architecture` {self.architecture!r}; known: "
                f"{', '.join(known)}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(
                f"ModelConfig: unknown `dtype` {self.dtype!r}; known: {', '.join(DTYPES)}"
            )
        check_quantization("ModelConfig", self.quantization)
        checks.check_numbers("ModelConfig", self)
        for name in (*_MOST, "norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"ModelConfig: `{name}` must be positive, got {value!r}")
            if value > _MOST.get(name, math.inf):
                raise ValueError(
                    f"ModelConfig: `{name}` must be at most {_MOST[name]:,}, got {value:,}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig: `num_kv_heads` ({self.num_kv_heads}) does not divide `num_heads` "
                f"({self.num_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig: `head_dim` must be even, got {self.head_dim}")
        if self.block_length is not None and (self.causal or self.block_length < 1):
            raise ValueError(
                f"ModelConfig: `block_length` {self.block_length} must be positive, and has no "
                "effect with `causal` True"
            )
        if self.mask_id is not None and not 0 <= self.mask_id < self.vocab_size:
            raise ValueError(
                f"ModelConfig: `mask_id` {self.mask_id} is outside the vocabulary of "
                f"{self.vocab_size}"
            )

    @property
    def rope(self) -> Rope:
        """Base and scaling of the rotary embedding."""
        return Rope(self.rope_theta, self.rope_scaling)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> "ModelConfig":
        """Reads a Hugging Face config.json that was parsed into a mapping.

        Args:
          config: The parsed file, written by any transformers version (`rope_theta` and
            `rope_scaling` of 4, `rope_parameters` of 5).
          dtype: Compute dtype; that of the file is only of the stored weights.

        Raises:
          ValueError: If the architecture is unknown, a size is missing, or the file asks for
            something that this decoder does not compute.

        Example:
          >>> ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], "vocab_size": 64,
          ...     "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
          ...     "intermediate_size": 48}).head_dim
          8
        """
        if not isinstance(config, Mapping):
            raise TypeError(
                f"ModelConfig.from_hf: `config` must be a mapping, got {type(config).__name__}"
            )
        names = config.get("architectures")
        name = names[0] if isinstance(names, list | tuple) and names else None
        if name is None:
            by_type = {kind: name for name, kind in (ARCHITECTURES | DENOISERS).items()}
            name = by_type.get(str(config.get("model_type")), config.get("model_type"))
        if not isinstance(name, str) or name not in ARCHITECTURES | DENOISERS:
            raise ValueError(
                f"ModelConfig.from_hf: unknown architecture {name!r}; known: "
                f"{', '.join(ARCHITECTURES | DENOISERS)}"
            )
        architecture = ARCHITECTURES.get(name, "qwen3")
        _refuse_unsupported(config, architecture)
        width = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads")
        # Either way in which transformers has written them.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ValueError(
                f"ModelConfig.from_hf: the rope settings must be an object, got {rope!r}"
            )
        theta = _number(rope if rope.get("rope_theta") else config, "rope_theta", 10000.0)
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
        if partial != 1.0:
            raise ValueError(
                f"ModelConfig.from_hf: `partial_rotary_factor` {partial} is not supported, only 1"
            )
        max_length = _size(config, "max_position_embeddings", _MAX_LENGTH[architecture])
        head_dim = 128 if architecture == "qwen3" else width // num_heads
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            width=width,
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_size(config, "num_key_value_heads", num_heads),
            head_dim=_size(config, "head_dim", head_dim),
            mlp_width=_size(config, "intermediate_size"),
            max_length=max_length,
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=_scaling(rope, max_length),
            tied=_flag(config, "tie_word_embeddings"),
            attention_bias=architecture == "qwen2",
            mlp_bias=_flag(config, "mlp_bias"),
            qk_norm=architecture == "qwen3",
            dtype=dtype,
            causal=name not in DENOISERS,
            block_length=_size(config, "block_size") if name == "SDARForCausalLM" else None,
            mask_id=None if config.get("mask_token_id") is None else _mask_id(config),
        )


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


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    """Raises for settings that would change the outputs and that the decoder does not have."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(
            f"ModelConfig.from_hf: `hidden_act` {activation!r} is not supported, only 'silu'"
        )
    if config.get("attention_bias") and architecture != "qwen2":
        raise ValueError(
            "ModelConfig.from_hf: `attention_bias` true is not supported for "
            f"{architecture!r}: it puts a bias on the output projection too"
        )
    if config.get("quantization_config"):
        raise ValueError(
            "ModelConfig.from_hf: `quantization_config` is not supported; take the "
            "unquantized weights or a GGUF file"
        )
    # A window matters only where some layer uses it and it is shorter than the context.
    kinds = config.get("layer_types")
    if kinds is not None:
        for kind in kinds if isinstance(kinds, list | tuple) else [kinds]:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(
                    f"ModelConfig.from_hf: `layer_types` has {kind!r}; only 'full_attention' "
                    "is supported"
                )
        used = "sliding_attention" in kinds
    else:
        used = _flag(config, "use_sliding_window")
        first = config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ValueError(
                f"ModelConfig.from_hf: `max_window_layers` must be an integer, got {first!r}"
            )
        used = used and _size(config, "num_hidden_layers") > first
    limit = _size(config, "max_position_embeddings", _MAX_LENGTH[architecture])
    window = _size(config, "sliding_window", limit) if used else limit
    if window < limit:
        raise ValueError(
            f"ModelConfig.from_hf: sliding-window attention is not supported, and "
            f"`sliding_window` {window} is shorter than the context of {limit} tokens"
        )
