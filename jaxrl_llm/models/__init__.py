"""Layer 2: the model protocol, the built-in decoder, its weights, adapters and mesh placement."""

from jaxrl_llm.core.runtime.lazy import lazy

_HOMES = {
    "Adapted": "lora",
    "AttentionContext": "protocol",
    "FlowConfig": "flow",
    "TextFlowConfig": "text_flow",
    "KV": "protocol",
    "LoRAConfig": "lora",
    "Model": "protocol",
    "ModelConfig": "config",
    "RopeScaling": "rope",
    "LinearScaling": "rope",
    "YarnScaling": "rope",
    "adapted_model": "lora",
    "average_lora": "merging",
    "average_params": "merging",
    "batch_sharding": "sharding",
    "cast_params": "protocol",
    "count_params": "transformer",
    "dare": "merging",
    "denoise": "denoising",
    "empty_cache": "protocol",
    "extrapolate": "merging",
    "flow_matching_loss": "flow",
    "init_lora": "lora",
    "iso_c": "merging",
    "load_model": "loading",
    "load_reward_model": "heads",
    "make_flow_model": "flow",
    "make_model": "transformer",
    "make_text_flow_model": "text_flow",
    "merge_attention": "attention",
    "merge_lora": "lora",
    "metric_weights": "merging",
    "mix_models": "mixture",
    "model_stock": "merging",
    "param_shapes": "transformer",
    "param_shardings": "sharding",
    "prefill": "protocol",
    "quantize_block": "quantize",
    "quantized_matmul": "quantize",
    "resolve": "names",
    "save_adapter": "peft",
    "save_safetensors": "export",
    "pretrain_flow": "flow",
    "slerp": "merging",
    "task_arithmetic": "merging",
    "task_vector": "merging",
    "ties_merge": "merging",
    "with_head": "heads",
}

__all__ = sorted(_HOMES)

# What is heavy loads where it is used.
__getattr__, __dir__ = lazy(__name__, _HOMES)
