"""Writes an adapter as a folder that PEFT loads for a Hugging Face model."""

import os
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.export import check_decoder, save_tensors, write_json
from jaxrl_llm.models.loading import parameter_table
from jaxrl_llm.models.lora import LoRAConfig

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_FACTORS = {"a": "lora_A", "b": "lora_B"}
# In models of these families PEFT takes every gate_proj, up_proj and down_proj for those of routed
# experts, which transformers 5 stores as one parameter, and ignores the tensors of other layers.
_TAKEN_FOR_EXPERTS = ("qwen3_moe", "qwen3_next")


def save_adapter(
    adapter: ArrayTree,
    folder: str | os.PathLike[str],
    *,
    lora: LoRAConfig,
    config: ModelConfig,
    base: str = "",
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json.

    Args:
      adapter: From a run, float32.
      folder: Created if it is absent.
      lora: Configuration of the adapter, with its rank.
      config: Configuration of the adapted decoder.
      base: Name of the adapted model, which PEFT loads by default.

    Raises:
      ValueError: If the configuration is not of the built-in decoder, the adapter has a layer that
        the decoder does not have, or not the shapes that rank and decoder ask for, or it adapts a
        router, experts, any MLP of Qwen3-MoE or Qwen3-Next, or a layer that is a part of one in
        transformers, as in Qwen3.5 and Qwen3-Next.

    Example:
      >>> import pathlib, tempfile
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> lora = jr.train.LoRAConfig(rank=2)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     adapter = jr.train.init_lora(params, lora)
      ...     jr.train.save_adapter(adapter, folder, lora=lora, config=model.config)
      ...     sorted(path.name for path in pathlib.Path(folder).iterdir())
      ['adapter_config.json', 'adapter_model.safetensors']

    References:
      PEFT's format of checkpoints (its documentation): ``lora_A`` [rank, in], ``lora_B`` [out,
      rank], lora_alpha / r as factor.
    """
    check_decoder("save_adapter", config)
    if lora.rank is None:
        raise ValueError("save_adapter: the configuration has no rank.")
    table, tensors = parameter_table(config), {}
    for path, x in jax.tree_util.tree_leaves_with_path(adapter):
        *layer, factor = trees.path_str(path).split("/")
        weight = table.get((*layer, "kernel"))
        if weight is not None and {"router", "experts"} & set(layer):
            raise ValueError(
                f"save_adapter: PEFT has no adapter for {'/'.join(layer)!r}, since routers and "
                "experts are no linear layers in transformers; save the merged model instead."
            )
        is_mlp = "mlp" in layer and layer[-1] in ("gate", "up", "down")
        if weight is not None and is_mlp and config.architecture in _TAKEN_FOR_EXPERTS:
            raise ValueError(
                f"save_adapter: PEFT has no adapter for {'/'.join(layer)!r}, since it takes its "
                f"name for that of experts in a {config.architecture} model; save the merged model "
                "instead."
            )
        if weight is not None and weight.section is not None:
            raise ValueError(
                f"save_adapter: PEFT has no adapter for {'/'.join(layer)!r} alone, which is a part "
                f"of {weight.name!r} in transformers; save the merged model instead."
            )
        if weight is None or factor not in _FACTORS:
            raise ValueError(f"save_adapter: the decoder has no linear layer {'/'.join(layer)!r}.")
        inputs, outputs = weight.shape
        shape = (inputs, lora.rank) if factor == "a" else (lora.rank, outputs)
        if x.shape != shape:
            raise ValueError(
                f"save_adapter: {factor} of {'/'.join(layer)!r} has shape {x.shape}, but rank "
                f"{lora.rank} and the decoder ask for {shape}."
            )
        name = f"{_PREFIX}{weight.name.removesuffix('weight')}{_FACTORS[factor]}.weight"
        tensors[name] = np.ascontiguousarray(np.asarray(x, np.float32).T)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, target / WEIGHTS)
    # The fields that PEFT builds the adapter's layers from.
    layers = {name.removeprefix(_PREFIX).rsplit(".", 2)[0] for name in tensors}
    kinds = {name.rsplit(".", 1)[1] for name in layers}
    # A short name means all layers with that end; where some have no adapter, or could be an
    # expert's, each is named in full.
    everywhere = len(layers) == len(kinds) * config.num_layers
    everywhere &= config.experts is None or not kinds & {"gate_proj", "up_proj", "down_proj"}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(kinds if everywhere else layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    write_json(target / CONFIG, settings)
