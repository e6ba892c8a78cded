"""Layer 2: the model protocol, the built-in decoder, its weights and where they live on a mesh."""

import importlib

_WHERE = {
    "AttentionContext": "protocol",
    "KV": "protocol",
    "Model": "protocol",
    "ModelConfig": "config",
    "RopeScaling": "config",
    "batch_sharding": "sharding",
    "count_params": "transformer",
    "empty_cache": "protocol",
    "load_model": "loading",
    "make_model": "transformer",
    "merge_attention": "attention",
    "param_shapes": "transformer",
    "param_shardings": "sharding",
    "prefill": "protocol",
    "resolve": "names",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str):
    # flax and the weight formats load where they are used, not with the package.
    if name in _WHERE:
        return getattr(importlib.import_module(f"jaxrl_llm.models.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'jaxrl_llm.models' has no attribute {name!r}.")


def __dir__():
    return __all__
