"""Parameters as a Hugging Face folder that transformers and this package load."""

import dataclasses
import json
import math
import os
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.config import COMPUTE, DTYPES, ModelConfig
from jaxrl_llm.models.families import (
    ACTIVATIONS,
    ARCHITECTURES,
    CAPS,
    DENOISERS,
    FAMILIES,
    HEADS,
    NEVER,
    OUR_SCORERS,
    SCORERS,
)
from jaxrl_llm.models.layers import LayerKind
from jaxrl_llm.models.loading import Weight, parameter_table
from jaxrl_llm.models.lora import Adapted
from jaxrl_llm.models.rope import LinearScaling, RopeScaling, Scaling, YarnScaling
from jaxrl_llm.models.safetensors import INDEX, SINGLE

# Bytes of one file of weights, as transformers cuts them.
_FILE_BYTES = 5_000_000_000
_FILE = "model-{:05d}-of-{:05d}.safetensors"
_FILES = "model-*-of-*.safetensors"
_CONFIG = "config.json"
_UNFINISHED = ".unfinished"


def save_safetensors(
    params: ArrayTree,
    folder: str | os.PathLike[str],
    *,
    config: ModelConfig,
    dtype: str = "float32",
    file_bytes: int = _FILE_BYTES,
    head: str | None = None,
    pad_id: int | None = None,
) -> None:
    """Writes config.json and weights under the names of Hugging Face.

    Kernels are stored as [out, in]. One file is in memory at a time; above ``file_bytes`` a new
    file begins, with an index.

    An existing model in the folder is replaced when the new one is complete, so the disk needs
    space for both. After a crash the folder has the old model, the new one, or no config.json, in
    which case it does not load; never a mixture. Other files are unchanged.

    Args:
      params: Parameters of the decoder, without adapter; see `train.merge_lora`.
      folder: Created if it is absent.
      config: Configuration of the decoder.
      dtype: Dtype of the stored weights.
      file_bytes: Maximum size of a file.
      head: For a reward model, whose parameters are those of :func:`~jaxrl_llm.models.with_head`,
        what its head reads: "response" (its last token) or "step" (the last one of each). They are
        a sequence or a token classifier of transformers with one label. A few families have no such
        class in transformers; this warns, and only :func:`~jaxrl_llm.models.load_reward_model`
        loads the folder. With "response", config.json has `"read_at": "stop"`: the head was trained
        at the stop token, where :class:`~jaxrl_llm.train.reward_model` then reads it.
      pad_id: For a reward model, the token behind the shorter rows of a batch, which no response
        ends with: transformers reads the last token that is another one. None for rows alone.

    Raises:
      ValueError: If the configuration is not of the built-in decoder, the parameters have an
        adapter or are not those of the configuration, transformers has no class that computes it,
        or `dtype` is unknown.

    Example:
      >>> import tempfile
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jr.models.save_safetensors(params, folder, config=model.config)
      ...     again, _ = jr.models.load_model(folder)
      >>> again.config == model.config
      True
    """
    name = "save_safetensors"
    check_decoder(name, config)
    if isinstance(params, Adapted):
        how = "train.merge_lora" if head is None else "models.heads.merge_headed"
        raise ValueError(f"{name}: the parameters have an adapter; merge it first, with {how}.")
    checks.check_option(name, "dtype", dtype, DTYPES)
    checks.check_positive(name, file_bytes=file_bytes)
    settings = hf_config(config) | {"dtype": dtype, "torch_dtype": dtype}
    if head is not None:
        checks.check_option(name, "head", head, HEADS)
        settings |= _of_head(settings, head)
        params = _scorer_params(params, head)
    if pad_id is not None:
        if head is None or not 0 <= pad_id < config.vocab_size:
            raise ValueError(
                f"{name}: pad_id is only for a reward model, and must be below its "
                f"{config.vocab_size} tokens; got {pad_id} with head {head!r}."
            )
        settings["pad_token_id"] = pad_id
    leaves = check_params(params, config, head=head)
    tensors = _stored(parameter_table(config, head=head))
    size = jnp.dtype(dtype).itemsize
    files: list[list[str]] = []
    used = 0
    for tensor, parts in tensors.items():
        needed = size * math.prod(parts[0].weight.stored_shape)
        if not files or used + needed > file_bytes:
            files, used = [*files, []], 0
        files[-1].append(tensor)
        used += needed
    n = len(files)
    names = [SINGLE] if n == 1 else [_FILE.format(i, n) for i in range(1, n + 1)]
    target, where = Path(folder), {}

    def values(parts: list[_Part]) -> np.ndarray:
        arrays = []
        for path, _, index in parts:
            array = leaves[path] if index is None else leaves[path][index]
            arrays.append(np.asarray(array).astype(jnp.dtype(dtype)))
        array = arrays[0]
        if len(arrays) > 1:
            sizes = [part.weight.section.size for part in parts if part.weight.section]
            groups = [x.reshape(*x.shape[:-1], -1, n) for x, n in zip(arrays, sizes, strict=True)]
            array = np.concatenate(groups, axis=-1).reshape(*array.shape[:-1], -1)
        return np.ascontiguousarray(array.T if parts[0].weight.transposed else array)

    unfinished = target / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        for file, held in zip(names, files, strict=True):
            # Without a variable, so that one file is in memory at a time.
            save_tensors({tensor: values(tensors[tensor]) for tensor in held}, unfinished / file)
            where |= dict.fromkeys(held, file)
        if len(files) > 1:
            total = size * sum(math.prod(x[0].weight.stored_shape) for x in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": where}
            write_json(unfinished / INDEX, index)
        write_json(unfinished / _CONFIG, settings)
        # Without config.json a folder does not load: it goes first and comes last.
        (target / _CONFIG).unlink(missing_ok=True)
        for old in (target / SINGLE, target / INDEX, *target.glob(_FILES)):
            old.unlink(missing_ok=True)
        for new in sorted(unfinished.iterdir(), key=lambda path: path.name == _CONFIG):
            new.replace(target / new.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class _Part(NamedTuple):
    """What of a parameter is in a tensor."""

    path: tuple[str, ...]
    weight: Weight
    index: int | None  # along the first axis; None for all of it


def _stored(table: Mapping[tuple[str, ...], Weight]) -> dict[str, list[_Part]]:
    """By name, the parameters of each tensor, in the order of their sections."""
    tensors: dict[str, list[_Part]] = {}
    for path, weight in table.items():
        for i, name in enumerate(weight.tensors):
            part = _Part(path, weight, None if name == weight.name else i)
            tensors.setdefault(name, []).append(part)

    def start(part: _Part) -> int:
        return part.weight.section.start if part.weight.section else 0

    return {name: sorted(parts, key=start) for name, parts in tensors.items()}


def check_decoder(function: str, config: Any) -> None:
    """Raises ValueError unless a configuration is that of the built-in decoder."""
    if not isinstance(config, ModelConfig):
        raise ValueError(
            f"{function}: only models of the built-in decoder have a Hugging Face form; got a "
            f"model with a {type(config).__name__} config."
        )


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The contents of config.json for a configuration; the inverse of `ModelConfig.from_hf`.

    Where transformers 4 and 5 differ, it includes the entries of both.

    Raises:
      ValueError: If no class of transformers computes this model, such as a Llama with normed
        queries.

    Example:
      >>> import jaxrl_llm as jr
      >>> hf_config(jr.testing.tiny_config())["architectures"]
      ['LlamaForCausalLM']
    """
    classes = {kind: name for name, kind in ARCHITECTURES.items()}
    family = FAMILIES[classes[config.architecture]]
    rope = _hf_rope(config.rope_scaling)
    values: dict[str, Any] = {
        "architectures": [classes[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "attention_bias": config.attention_bias,
        "use_cache": True,
    }
    # In a family with linear attention an absent share means a quarter, not all.
    if config.rotary_dim is not None or family.linear:
        share = {"partial_rotary_factor": config.rotated / config.head_dim}
        values |= share | {"rope_parameters": values["rope_parameters"] | share}
    if config.mlp_bias:
        values["mlp_bias"] = True
    values |= _of_layers(config, values["rope_parameters"]) | _of_experts(config)
    values |= _of_linear(config)
    values |= {name: getattr(config, CAPS[name]) for name in family.caps}
    if config.query_scale is not None:
        values["query_pre_attn_scalar"] = round(config.query_scale**-2)
    if config.activation != "silu":
        name = next(k for k, ours in ACTIVATIONS.items() if ours == config.activation)
        values |= {"hidden_act": name, "hidden_activation": name}
    if not config.causal:
        name = "A2DQwen3LMHeadModel" if config.block_length is None else "SDARForCausalLM"
        values |= {"architectures": [name], "model_type": DENOISERS[name]}
    if config.block_length is not None:
        values["block_size"] = config.block_length
    if config.mask_id is not None:
        values["mask_token_id"] = config.mask_id
    try:
        again = ModelConfig.from_hf(values)
    except ValueError as error:
        raise ValueError(f"hf_config: transformers has no such model: {error}") from error
    read, same = dataclasses.asdict(again), COMPUTE
    if _acting_kinds(again) == _acting_kinds(config):
        same = (*COMPUTE, "layers")
    for key, value in dataclasses.asdict(config).items():
        if key not in same and read[key] != value:
            raise ValueError(
                f"hf_config: transformers has no {config.architecture} model with {key} {value!r}, "
                f"only with {read[key]!r}"
            )
    return values


def _acting_kinds(config: ModelConfig) -> list[LayerKind]:
    """The kinds of all layers; a window as long as the context is none."""
    kinds = [config.kind_of(i) for i in range(config.num_layers)]
    return [
        dataclasses.replace(kind, window=None) if (kind.window or 0) >= config.max_length else kind
        for kind in kinds
    ]


def _of_layers(config: ModelConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of windows, and of layers that are not rotated as the others."""
    family = FAMILIES[next(k for k, kind in ARCHITECTURES.items() if kind == config.architecture)]
    if family.linear:
        return {}
    kinds = _acting_kinds(config)
    local = [kind.window is not None or kind.rope_theta is not None for kind in kinds]
    values: dict[str, Any] = {}
    window = max((kind.window for kind in kinds if kind.window is not None), default=None)
    # A layer of a family may be one with a window that is as long as the context.
    values["sliding_window"] = config.max_length if window is None and any(local) else window
    if family.full_every != NEVER:
        names = ["sliding_attention" if x else "full_attention" for x in local]
        values |= {"layer_types": names, "use_sliding_window": window is not None}
    if family.model_type == "qwen3_moe":
        values["use_sliding_window"] = window is not None
    if family.model_type == "smollm3":
        values["no_rope_layers"] = [int(kind.rotary) for kind in kinds]
    if family.window_rope is not None:
        thetas = {kind.rope_theta for kind in kinds if kind.rope_theta is not None}
        theta = max(thetas, default=config.rope_theta)
        plain = {"rope_type": "default", "rope_theta": theta}
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": plain}
        values[family.window_rope] = theta
    return values if any(values.values()) or family.windows else {}


def _of_linear(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of linear attention."""
    family = FAMILIES[next(k for k, kind in ARCHITECTURES.items() if kind == config.architecture)]
    if not family.linear:
        return {}
    kinds = [config.kind_of(i).linear for i in range(config.num_layers)]
    names = ["linear_attention" if linear else "full_attention" for linear in kinds]
    values: dict[str, Any] = {"layer_types": names}
    if (sizes := config.linear_attention) is not None:
        values |= {
            "linear_num_key_heads": sizes.key_heads,
            "linear_num_value_heads": sizes.value_heads,
            "linear_key_head_dim": sizes.key_dim,
            "linear_value_head_dim": sizes.value_dim,
            "linear_conv_kernel_dim": sizes.conv_size,
        }
    return values


def _of_experts(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of experts."""
    experts = config.experts
    if experts is None:
        return {}
    # The first name is that of transformers 5, and of gpt-oss.
    values = dict.fromkeys(("num_local_experts", "num_experts"), experts.count)
    values["num_experts_per_tok"] = experts.active
    if config.architecture == "gpt_oss":
        limits = {"swiglu_limit": experts.limit, "swiglu_alpha": experts.alpha}
        return values | limits | {"intermediate_size": experts.width}
    if experts.shared is not None:
        values["shared_expert_intermediate_size"] = experts.shared
    return values | {
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.num_layers) if config.kind_of(i).dense],
    }


def _hf_rope(scaling: Scaling | None) -> dict[str, Any]:
    """The rope settings of a config.json, but for the base."""
    if scaling is None:
        return {"rope_type": "default"}
    kinds = {RopeScaling: "llama3", LinearScaling: "linear", YarnScaling: "yarn"}
    values = {"rope_type": kinds[type(scaling)]} | dataclasses.asdict(scaling)
    if "original_max_length" in values:
        values["original_max_position_embeddings"] = values.pop("original_max_length")
    return values


def _of_head(settings: Mapping[str, Any], head: str) -> dict[str, Any]:
    """What config.json says of a head of one number."""
    kind = settings["model_type"]
    scorer = SCORERS.get((kind, head))
    if scorer is None:
        raise ValueError(f"save_safetensors: there is no class of {kind!r} with head {head!r}")
    if (kind, head) in OUR_SCORERS:
        warnings.warn(
            f"save_safetensors: transformers has no class {scorer!r}, so it cannot load this "
            "reward model; train.reward_model and models.load_reward_model can.",
            stacklevel=3,
        )
    label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    mark = {"read_at": "stop"} if head == "response" else {}  # read by `heads.read_at_of`
    return {"architectures": [scorer], "num_labels": 1} | label | mark


def _scorer_params(params: Any, head: str) -> dict[str, Any]:
    """The parameters of body and head in one tree, without the output matrix."""
    if not {"model", "head"} <= set(params):
        raise ValueError(
            f"save_safetensors: head {head!r} needs the parameters of models.with_head, which have "
            f"'model' and 'head'; got {', '.join(sorted(map(str, params)))}."
        )
    body = {name: x for name, x in params["model"].items() if name != "head"}
    score = dict(params["head"])
    if head == "step":
        score.setdefault("bias", jnp.zeros((1,), jnp.float32))
    return body | {"score": score}


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The arrays of nested dicts with their paths."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, (*path, key))


def check_params(
    params: Any, config: ModelConfig, *, head: str | None = None
) -> dict[tuple[str, ...], Any]:
    """The arrays of a decoder's parameters by path.

    Raises ValueError unless there is exactly one array of the right shape for each tensor of the
    configuration.
    """
    leaves, table = dict(_leaves(params)), parameter_table(config, head=head)
    for path, weight in table.items():
        shape = None if path not in leaves else tuple(getattr(leaves[path], "shape", ()))
        if shape != weight.shape:
            what = "is missing" if shape is None else f"has shape {shape}"
            raise ValueError(
                f"save_safetensors: the parameter {'/'.join(path)} {what}, but the configuration "
                f"asks for {weight.shape}"
            )
    if extra := sorted("/".join(map(str, path)) for path in leaves if path not in table):
        raise ValueError(
            f"save_safetensors: the decoder has no parameter {extra[0]} ({len(extra)} such); merge "
            "an adapter first, with train.merge_lora"
        )
    return leaves


def save_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Writes a safetensors file with the mode of a new file; safetensors makes it private."""
    from safetensors.numpy import save_file

    path.unlink(missing_ok=True)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object in the format of transformers."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
