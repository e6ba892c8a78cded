"""Layer 2: the model protocol, the built-in decoder, its weights and where they live on a mesh."""

from jaxrl_llm.core.lazy import lazy

_HOMES = {
    "AttentionContext": "protocol",
    "KV": "protocol",
    "Model": "protocol",
    "ModelConfig": "config",
    "RopeScaling": "config",
    "batch_sharding": "sharding",
    "cast_params": "protocol",
    "count_params": "transformer",
    "empty_cache": "protocol",
    "load_model": "loading",
    "make_model": "transformer",
    "merge_attention": "attention",
    "param_shapes": "transformer",
    "param_shardings": "sharding",
    "prefill": "protocol",
    "quantize_block": "quantize",
    "quantized_matmul": "quantize",
    "resolve": "names",
    "save_safetensors": "export",
}

__all__ = sorted(_HOMES)

# What is heavy loads where it is used.
__getattr__, __dir__ = lazy(__name__, _HOMES)
