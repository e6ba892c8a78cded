"""Weights and metadata of a GGUF file, under the tensor names of Hugging Face.

A tensor is de-quantized only when it is read, so opening a file reads only its header. The
converter stores the query and key rows of the llama architecture interleaved, (first half, second
half) of each rotary pair next to each other; they are read back in the order of transformers.
"""

import os
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.core.runtime.files import parsing
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.rope import LinearScaling, RopeScaling

# Families whose layers the metadata below describes completely.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_TENSOR = "rope_freqs.weight"
_MISSING: Any = object()


def hugging_face_name(name: str) -> str:
    """The name transformers gives a tensor of a GGUF file; other names are returned as they are.

    Example:
      >>> hugging_face_name("blk.3.attn_q.weight")
      'model.layers.3.self_attn.q_proj.weight'
    """
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in _BLOCK:
        return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{block[3]}"
    base, _, kind = name.rpartition(".")
    return f"{_GLOBAL[base]}.{kind}" if base in _GLOBAL else name


class GgufFile:
    """An open GGUF file: metadata, configuration, and tensors by their Hugging Face name.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is not a complete GGUF file; the message names it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from jaxrl_llm.models.gguf_header import read_header

        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"GgufFile: there is no file {self.path}")
        with parsing("GgufFile", self.path, "GGUF file"):
            self._metadata, tensors = read_header(self.path)
        self._tensors = {hugging_face_name(tensor.name): tensor for tensor in tensors}

    def metadata(self, key: str, default: Any = _MISSING) -> Any:
        """One metadata value as plain Python; without a default a missing key raises."""
        if key not in self._metadata and default is _MISSING:
            raise ValueError(f"GgufFile: {self.path} lacks the metadata {key!r}")
        return self._metadata.get(key, default)

    @cached_property
    def architecture(self) -> str:
        """The family of the decoder; an unknown one raises."""
        architecture = self.metadata("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ValueError(
                f"GgufFile: {self.path} holds the architecture {architecture!r}, which is not read "
                f"from GGUF; known: {', '.join(_ARCHITECTURES)}"
            )
        return architecture

    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors that are weights."""
        return frozenset(name for name in self._tensors if name != _ROPE_TENSOR)

    def label(self, name: str) -> str:
        """The name of a tensor in the file, for messages."""
        if name in self._tensors:
            return self._tensors[name].name
        outer = {value: key for key, value in _GLOBAL.items()}
        inner = {value: key for key, value in _BLOCK.items()}
        base, _, kind = name.rpartition(".")
        block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base)
        if block and block[2] in inner:
            return f"blk.{block[1]}.{inner[block[2]]}.{kind}"
        return f"{outer[base]}.{kind}" if base in outer else name

    def shape(self, name: str) -> tuple[int, ...]:
        """The row-major shape of a tensor, [out, in] for a projection."""
        return self._tensors[name].shape

    def read(self, name: str, index: Sequence[slice]) -> np.ndarray:
        """De-quantizes one slice per axis of a tensor, in float32; other rows are not read."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        kind = tensor.kind
        if kind.name not in READABLE:
            raise ValueError(
                f"GgufFile: tensor {tensor.name} of {self.path} has the unsupported block format "
                f"{kind.name}; supported: {', '.join(READABLE)}"
            )
        picked: Any = index[0]
        projection = re.search(r"self_attn\.([qk])_proj\.", name)
        if self.architecture == "llama" and projection is not None:
            heads = self.config.num_heads if projection[1] == "q" else self.config.num_kv_heads
            rows = self.shape(name)[0]
            if rows % (2 * heads):
                raise ValueError(
                    f"GgufFile: tensor {self.label(name)} of {self.path} has {rows} rows, which "
                    f"{heads} heads do not divide into rotary pairs"
                )
            # For each row of transformers' q or k, the row of the file that holds it.
            order = np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
            picked = order[index[0]]
        values = dequantize(np.ascontiguousarray(tensor.data[picked]), kind)
        return np.asarray(values, np.float32)[(slice(None), *index[1:])]

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration of the decoder, from the metadata and the names of the tensors."""
        with parsing("GgufFile", self.path, "GGUF model"):
            kind = self.architecture
            scaling = self._scaling_type(kind)
            if scaling not in ("none", "linear"):
                raise ValueError(
                    f"GgufFile: {self.path} asks for {scaling!r} rope scaling, which is not "
                    "supported"
                )
            window = self.metadata(f"{kind}.attention.sliding_window", 0)
            if window and window < self._count(f"{kind}.context_length"):
                raise ValueError(
                    f"GgufFile: {self.path} asks for sliding-window attention over {window} "
                    "tokens, which is not supported"
                )
            heads = self._count(f"{kind}.attention.head_count")
            width = self._count(f"{kind}.embedding_length")
            head_dim = self._count(f"{kind}.attention.key_length", width // heads)
            for key in (f"{kind}.attention.value_length", f"{kind}.rope.dimension_count"):
                if self._count(key, head_dim) != head_dim:
                    raise ValueError(
                        f"GgufFile: {key} of {self.path} is {self.metadata(key)}, which must equal "
                        f"the head size {head_dim}"
                    )
            embedding = "model.embed_tokens.weight"
            if embedding not in self._tensors:
                raise ValueError(f"GgufFile: {self.path} lacks the tensor {self.label(embedding)}")
            theta = _short_float(self.metadata(f"{kind}.rope.freq_base", 10000.0))
            return ModelConfig(
                architecture=kind,
                vocab_size=self.shape(embedding)[0],
                width=width,
                num_layers=self._count(f"{kind}.block_count"),
                num_heads=heads,
                num_kv_heads=self._count(f"{kind}.attention.head_count_kv", heads),
                head_dim=head_dim,
                mlp_width=self._count(f"{kind}.feed_forward_length"),
                max_length=self._count(f"{kind}.context_length"),
                norm_eps=_short_float(self.metadata(f"{kind}.attention.layer_norm_rms_epsilon")),
                rope_theta=theta,
                rope_scaling=self._rope_scaling(kind, theta, head_dim),
                tied="lm_head.weight" not in self._tensors,
                attention_bias=kind == "qwen2",
                qk_norm=kind == "qwen3",
            )

    def _count(self, key: str, default: Any = _MISSING) -> int:
        value = self.metadata(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ValueError(
                f"GgufFile: {key} of {self.path} must be a positive integer, got {value!r}"
            )
        return value

    def _scaling_type(self, kind: str) -> Any:
        """How rotary frequencies are scaled; as in llama.cpp, linearly where it is not stored."""
        return self.metadata(f"{kind}.rope.scaling.type", "linear")

    def _linear_scaling(self, kind: str) -> LinearScaling | None:
        """Linear scaling, of which older files store only the factor; None where there is none."""
        older = self.metadata(f"{kind}.rope.scale_linear", 0.0)
        factor = _short_float(self.metadata(f"{kind}.rope.scaling.factor", older))
        if self._scaling_type(kind) == "none" or factor in (0.0, 1.0):
            return None
        return LinearScaling(factor=factor)

    def _rope_scaling(
        self, kind: str, theta: float, head_dim: int
    ) -> RopeScaling | LinearScaling | None:
        """Llama 3 scaling is stored as its divisors only; find the settings that give them."""
        linear = self._linear_scaling(kind)
        if _ROPE_TENSOR not in self._tensors:
            return linear
        if linear is not None:
            raise ValueError(
                f"GgufFile: {self.path} asks for linear rope scaling by {linear.factor} beside the "
                f"scaling of the tensor {_ROPE_TENSOR}, which is not supported"
            )
        from gguf.quants import dequantize

        tensor = self._tensors[_ROPE_TENSOR]
        if tensor.shape != (head_dim // 2,):
            raise ValueError(
                f"GgufFile: tensor {_ROPE_TENSOR} of {self.path} has shape {tensor.shape}, but "
                f"heads have size {head_dim}"
            )
        divisors = np.asarray(dequantize(np.asarray(tensor.data), tensor.kind), np.float32)
        length = self.metadata(f"{kind}.rope.scaling.original_context_length", 8192)
        scaling = RopeScaling(
            factor=_short_float(divisors.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_length=int(length),
        )
        frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
        turns = scaling.original_max_length * frequencies / (2 * np.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
        if not np.allclose(expected, divisors, rtol=1e-4):
            raise ValueError(
                f"GgufFile: the tensor {_ROPE_TENSOR} of {self.path} is not the Llama 3 scaling "
                f"of any released model, and no other is supported"
            )
        return scaling


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Opens a GGUF file; the last two are cached, since a large vocabulary takes seconds to read.

    A file that has changed is read again. Errors are those of :class:`GgufFile`.
    """
    full = Path(path).resolve()
    if not full.is_file():
        raise FileNotFoundError(f"open_gguf: there is no file {path}")
    facts = full.stat()
    return _open(str(full), facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=2)
def _open(path: str, modified: int, size: int) -> GgufFile:
    return GgufFile(path)


def _short_float(value: Any) -> float:
    """The shortest decimal with this float32 value: 1e-5, not 9.999999747378752e-06."""
    return float(np.format_float_positional(np.float32(value), unique=True))
