"""Layer 2: the model protocol, the built-in decoder, its weights, adapters and mesh placement."""

from jaxrl_llm.core.runtime.lazy import lazy

_HOMES = {
    "Adapted": "lora",
    "AttentionContext": "protocol",
    "KV": "protocol",
    "LoRAConfig": "lora",
    "Model": "protocol",
    "ModelConfig": "config",
    "RopeScaling": "config",
    "adapted_model": "lora",
    "batch_sharding": "sharding",
    "cast_params": "protocol",
    "count_params": "transformer",
    "empty_cache": "protocol",
    "init_lora": "lora",
    "load_model": "loading",
    "make_model": "transformer",
    "merge_attention": "attention",
    "merge_lora": "lora",
    "param_shapes": "transformer",
    "param_shardings": "sharding",
    "prefill": "protocol",
    "quantize_block": "quantize",
    "quantized_matmul": "quantize",
    "resolve": "names",
    "save_adapter": "peft",
    "save_safetensors": "export",
}

__all__ = sorted(_HOMES)

# What is heavy loads where it is used.
__getattr__, __dir__ = lazy(__name__, _HOMES)
