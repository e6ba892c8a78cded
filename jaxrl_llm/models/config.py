"""The configuration of a decoder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxrl_llm.core import checks
from jaxrl_llm.models.families import ACTIVATIONS, ARCHITECTURES, MOST_LAYERS, read_fields
from jaxrl_llm.models.layers import ExpertsConfig, LayerKind, LinearAttentionConfig
from jaxrl_llm.models.quantize import check_quantization
from jaxrl_llm.models.rope import Rope, Scaling
from jaxrl_llm.models.scanned import period_of

DTYPES = ("float32", "bfloat16", "float16")
NORM_PLACEMENTS = ("before", "after", "both")
# What of a configuration is about how it is computed, not which model it is.
COMPUTE = ("dtype", "quantization", "scan_layers")

# Far beyond any released decoder: a number above is an error of the file, or a trap.
_MOST = {
    "vocab_size": 2**24,
    "width": 2**20,
    "num_layers": MOST_LAYERS,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "mlp_width": 2**22,
    "max_length": 2**31 - 1,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration of a decoder, such as Llama, Qwen, Mistral, OLMo, Gemma or Qwen3.5.

    Args:
      architecture: One of `ARCHITECTURES`; only names the family, the fields below decide.
      vocab_size, width: V and D, the size of the residual stream.
      num_layers, max_length: Decoder blocks, and the longest sequence in tokens.
      num_heads, num_kv_heads: Query heads, and key and value heads, whose number divides them.
      head_dim: Size of one head, even; num_heads * head_dim need not be the width.
      mlp_width: Hidden size of the gated MLP.
      norm_eps: Added to the mean square inside every RMS norm.
      rotary_dim: First dimensions of a head that are rotated, even; None for all of them.
      rope_theta, rope_scaling: Base of the rotary frequencies, and their scaling, if any:
        `RopeScaling` (Llama 3), `YarnScaling` or `LinearScaling`.
      tied: The head is the embedding.
      attention_bias: q, k and v have a bias (Qwen2).
      output_bias: The output projection of attention has a bias (gpt-oss).
      sinks: Each query head has a trained score that joins the softmax over its keys but has no
        value (gpt-oss): `exp(s_j) / (exp(sink) + sum_i exp(s_i))`.
      mlp_bias: gate, up and down have a bias.
      qk_norm: RMS norm of q and k before the rotary embedding (Qwen3).
      qk_norm_over: "head" for each head separately, or "projection" for all together (OLMo 2).
      output_gate: The outputs of attention are multiplied by `sigmoid(W x)` before their
        projection (Qwen3-Next, Qwen3.5).
      norm_placement: Norms "before" attention and MLP, "after" them (OLMo 2), or "both" (Gemma).
      norm_offset: Added to the scale of every norm: 1 in Gemma, whose scales are around 0.
      activation: Activation of the MLP, "silu" or "gelu_tanh".
      embedding_scale: Multiplies the embedding; `width ** 0.5` in Gemma.
      query_scale: Multiplies the attention scores; None for `head_dim ** -0.5`.
      attention_cap: Soft cap of the attention scores (Gemma 2): `cap * tanh(score / cap)` before
        mask and softmax. None for none.
      logit_cap: Soft cap of the logits, before a temperature divides them (Gemma 2). None for none.
      experts: Experts in the place of the MLP, in all layers that are not `dense`; None for none.
      linear_attention: Sizes of the linear attention of layers that are `linear`; None for none.
      layers: One `LayerKind` per layer, for windows, rotary embeddings, linear attention and MLPs
        of some layers; None if all layers are plain.
      dtype: The dtype of matrix products; norms and statistics are float32.
      quantization: Rounds both operands of the linear layers to 8 bits: "fp8" or "int8", see
        `quantized_matmul`; None does not. Attention, embedding, head and low-rank deltas stay in
        `dtype`.
      scan_layers: Scores and trains with one scan over the layers, whose weights are stacked for
        it, in place of one layer after the other; decoding does not. Layers of several kinds repeat
        in periods, which then are scanned.
      causal: Whether a token sees only the tokens before it. False for a masked-diffusion model,
        whose tokens see all others.
      block_length: With `causal=False`, the tokens of a block: a token sees its block and the
        blocks before it, counted by positions from 0. None for one block of any length.
      mask_id: The id of a masked token; None for a model without masks.

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
    rotary_dim: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    tied: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: str = "head"
    output_gate: bool = False
    norm_placement: str = "before"
    norm_offset: float = 0.0
    activation: str = "silu"
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    experts: ExpertsConfig | None = None
    linear_attention: LinearAttentionConfig | None = None
    layers: tuple[LayerKind, ...] | None = None
    dtype: str = "float32"
    quantization: str | None = None
    # Not in the text by which a checkpoint knows its model: it is the same one.
    scan_layers: bool = field(default=False, repr=False)
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
        if self.rotary_dim is not None and (
            self.rotary_dim % 2 or not 0 < self.rotary_dim < self.head_dim
        ):
            raise ValueError(
                f"ModelConfig: `rotary_dim` must be even, above 0 and below `head_dim` "
                f"({self.head_dim}), got {self.rotary_dim}"
            )
        name = "ModelConfig"
        checks.check_option(name, "norm_placement", self.norm_placement, NORM_PLACEMENTS)
        checks.check_option(name, "activation", self.activation, set(ACTIVATIONS.values()))
        checks.check_option(name, "qk_norm_over", self.qk_norm_over, ("head", "projection"))
        scales = {"embedding_scale": self.embedding_scale, "query_scale": self.query_scale}
        scales |= {"attention_cap": self.attention_cap, "logit_cap": self.logit_cap}
        checks.check_positive(name, finite=True, **scales)
        if self.qk_norm_over != "head" and not self.qk_norm:
            raise ValueError("ModelConfig: `qk_norm_over` has no effect with `qk_norm` False")
        if self.layers is not None and len(self.layers) != self.num_layers:
            raise ValueError(
                f"ModelConfig: `layers` must have one entry for each of the {self.num_layers} "
                f"layers, got {len(self.layers)}"
            )
        if not self.causal and any(kind.window for kind in self.layers or ()):
            raise ValueError("ModelConfig: `layers` with windows need `causal` True")
        linear = [self.kind_of(i).linear for i in range(self.num_layers)]
        if any(linear) != (self.linear_attention is not None):
            raise ValueError(
                "ModelConfig: `layers` that are linear need `linear_attention`, which has no "
                "effect without"
            )
        if not self.causal and any(linear):
            raise ValueError("ModelConfig: `layers` that are linear need `causal` True")
        dense = [self.kind_of(i).dense for i in range(self.num_layers)]
        if self.experts is None and any(dense):
            raise ValueError(
                "ModelConfig: `layers` that are dense have no effect without `experts`"
            )
        if self.experts is not None and all(dense):
            raise ValueError("ModelConfig: `experts` have no effect where every layer is dense")
        if self.experts is not None and self.quantization is not None:
            raise ValueError(
                f"ModelConfig: `quantization` {self.quantization!r} does not round `experts`; use "
                "None"
            )
        if self.scan_layers and 2 * self.layer_period > self.num_layers:
            raise ValueError(
                f"ModelConfig: `scan_layers` has no effect: no pattern of the {self.num_layers} "
                "layers occurs twice"
            )
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

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer."""
        return LayerKind() if self.layers is None else self.layers[layer]

    @property
    def layer_period(self) -> int:
        """The smallest p for which each layer is of the kind of the layer p before it."""
        return period_of([self.kind_of(i) for i in range(self.num_layers)])

    @property
    def rotated(self) -> int:
        """How many dimensions of a head are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in the place of its MLP."""
        return self.experts is not None and not self.kind_of(layer).dense

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    def rope_of(self, layer: int) -> Rope | None:
        """Base and scaling of a layer's rotary embedding; None for a layer without."""
        kind = self.kind_of(layer)
        if not kind.rotary or kind.linear:
            return None
        if kind.rope_theta is not None:
            return Rope(kind.rope_theta)
        return Rope(self.rope_theta, self.rope_scaling)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> "ModelConfig":
        """Reads a Hugging Face config.json that was parsed into a mapping.

        Args:
          config: The parsed file, written by any transformers version (`rope_theta` and
            `rope_scaling` of 4, `rope_parameters` of 5).
          dtype: Compute dtype; the dtype in the file is only that of the stored weights.

        Raises:
          ValueError: If the architecture is unknown, a size is missing, or the file requires a
            feature that this decoder does not have.

        Example:
          >>> ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], "vocab_size": 64,
          ...     "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
          ...     "intermediate_size": 48}).head_dim
          8
        """
        return cls(**read_fields(config), dtype=dtype)


def differences(first: ModelConfig, other: ModelConfig) -> str:
    """The fields that make two decoders different functions of the same parameters, as text.

    Empty if there are none. How a decoder is computed, the name of its family and its longest
    sequence do not change the function; a window that acts is a field of its layers.

    Example:
      >>> import jaxrl_llm as jr
      >>> differences(jr.testing.tiny_config(), jr.testing.tiny_config(rope_theta=5.0))
      'rope_theta is 10000.0 and 5.0'
    """
    found = []
    for name in (entry.name for entry in fields(ModelConfig)):
        values = getattr(first, name), getattr(other, name)
        if name in ("architecture", "max_length", *COMPUTE) or values[0] == values[1]:
            continue
        if name == "layers" and first.num_layers == other.num_layers:
            # The first layer that differs: a model has dozens. None is plain layers.
            kinds = [(first.kind_of(i), other.kind_of(i)) for i in range(first.num_layers)]
            layer = next((i for i, (one, two) in enumerate(kinds) if one != two), None)
            if layer is None:
                continue
            name, values = f"layers[{layer}]", kinds[layer]
        found.append(f"{name} is {values[0]!r} and {values[1]!r}")
    return ", ".join(found)
