"""Pretrained weights as the parameters of the decoder, on one device or over a mesh.

``dtype`` is the dtype of the parameters and of the matrix products; ``matrices`` is the dtype of
parameters with two axes, if it differs.
"""

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.runtime.files import parsing
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.gguf import open_gguf
from jaxrl_llm.models.layers import ExpertsConfig, LinearAttentionConfig
from jaxrl_llm.models.mxfp4 import open_folder
from jaxrl_llm.models.names import ModelFiles, resolve
from jaxrl_llm.models.released import TextDecoder
from jaxrl_llm.models.safetensors import TensorSource, read_json

if TYPE_CHECKING:
    from jax.sharding import Mesh, Sharding

    from jaxrl_llm.models.protocol import Model


# The tensors of a layer's norms by where they stand: transformers names some after their place.
_AFTER = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_NORMS = {
    "before": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "after": _AFTER,
    "both": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        **_AFTER,
    },
}
# Memory of a part of two tensors that are compared, in float32.
_COMPARED_BYTES = 2**26


class Section(NamedTuple):
    """A part of a tensor that holds several parameters side by side.

    Along the last axis of the parameter, the tensor has ``total`` entries where the parameter has
    ``size``: those from ``start`` on.
    """

    start: int
    size: int
    total: int


class Weight(NamedTuple):
    """Where a file holds a parameter.

    Attributes:
      name: Name of its tensor. With `{}` in it there is one tensor for each index of the first
        axis, which stands there.
      shape: Our shape.
      transposed: Whether the file stores [out, in], or all axes in reverse order.
      section: For a tensor of several parameters, which part of it; None for all of it.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    section: Section | None = None

    @property
    def tensors(self) -> list[str]:
        """The names of its tensors."""
        return [self.name.format(i) for i in range(self.shape[0] if "{}" in self.name else 1)]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of a tensor in the file."""
        shape = self.shape[1:] if "{}" in self.name else self.shape
        if self.section is not None:
            shape = (*shape[:-1], shape[-1] // self.section.size * self.section.total)
        return shape[::-1] if self.transposed else shape

    def read(self, source: TensorSource, index: Sequence[slice]) -> np.ndarray:
        """A slice for each axis of the parameter, without steps."""
        if "{}" in self.name:
            names, inner = self.tensors[index[0]], self._replace(shape=self.shape[1:])
            return np.stack([inner._replace(name=x).read(source, index[1:]) for x in names])
        if self.section is None:
            return self._stored(source, index)
        start, size, total = self.section
        first, stop, _ = index[-1].indices(self.shape[-1])
        group, last = first // size, -(-stop // size)
        if last - group == 1:
            begin = group * total + start - group * size
            return self._stored(source, [*index[:-1], slice(begin + first, begin + stop)])
        both = self._stored(source, [*index[:-1], slice(group * total, last * total)])
        groups = both.reshape(*both.shape[:-1], last - group, total)[..., start : start + size]
        whole = groups.reshape(*both.shape[:-1], -1)
        return whole[..., first - group * size : stop - group * size]

    def _stored(self, source: TensorSource, index: Sequence[slice]) -> np.ndarray:
        """Slices of the tensor, in the order of our axes."""
        if self.transposed:
            return source.read(self.name, index[::-1]).T
        return source.read(self.name, index)


def parameter_table(
    config: ModelConfig, *, head: str | None = None
) -> dict[tuple[str, ...], Weight]:
    """Maps the path of every parameter to the tensor that holds it.

    ``head`` is one of ``families.HEADS``: a head with one output replaces the output matrix, under
    the path "score".

    Example:
      >>> config = ModelConfig(architecture="llama", vocab_size=16, width=8, num_layers=1,
      ...     num_heads=2, num_kv_heads=1, head_dim=4, mlp_width=12, max_length=32, tied=True)
      >>> weight = parameter_table(config)["layers", "0", "attention", "k", "kernel"]
      >>> weight.name, weight.shape, weight.transposed
      ('model.layers.0.self_attn.k_proj.weight', (8, 4), True)
    """
    width = config.width
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    vocabulary = (config.vocab_size, width)
    table: dict[tuple[str, ...], Weight] = {
        ("embed", "embedding"): Weight("model.embed_tokens.weight", vocabulary, False),
        ("norm", "scale"): Weight("model.norm.weight", (width,), False),
    }
    if head is not None:
        table["score", "kernel"] = Weight("score.weight", (width, 1), True)
        if head == "step":
            table["score", "bias"] = Weight("score.bias", (1,), False)
    elif not config.tied:
        table["head", "kernel"] = Weight("lm_head.weight", vocabulary, False)
    norms: dict[tuple[str, ...], tuple[str, int]] = {
        (ours,): (theirs, width) for ours, theirs in _NORMS[config.norm_placement].items()
    }
    if config.qk_norm:
        each = config.qk_norm_over == "head"
        norms["attention", "q_norm"] = ("self_attn.q_norm", config.head_dim if each else queries)
        norms["attention", "k_norm"] = ("self_attn.k_norm", config.head_dim if each else keys)
    for layer in range(config.num_layers):
        path, name = ("layers", str(layer)), f"model.layers.{layer}"
        for ours, (theirs, inputs, outputs, bias) in _linears(config, layer).items():
            weight = Weight(f"{name}.{theirs}.weight", (inputs, outputs), True)
            table[*path, *ours, "kernel"] = weight
            if bias:
                table[*path, *ours, "bias"] = Weight(f"{name}.{theirs}.bias", (outputs,), False)
        linear = config.kind_of(layer).linear
        if linear and config.linear_attention is not None:
            of_layer = _of_linear_attention(config, config.linear_attention, f"{name}.linear_attn")
            table |= {(*path, "attention", *ours): weight for ours, weight in of_layer.items()}
        if config.output_gate and not linear:
            for i, ours in enumerate(("q", "gate")):
                part = Section(i * config.head_dim, config.head_dim, 2 * config.head_dim)
                weight = Weight(f"{name}.self_attn.q_proj.weight", (width, queries), True, part)
                table[*path, "attention", ours, "kernel"] = weight
        if config.sinks:
            sinks = Weight(f"{name}.self_attn.sinks", (config.num_heads,), False)
            table[*path, "attention", "sinks"] = sinks
        if config.experts is not None and not config.kind_of(layer).dense:
            for ours, weight in _of_experts(config, config.experts, f"{name}.mlp.experts").items():
                table[*path, "mlp", "experts", *ours] = weight
        for ours, (theirs, size) in norms.items():
            if linear and ours[0] == "attention":
                continue
            table[*path, *ours, "scale"] = Weight(f"{name}.{theirs}.weight", (size,), False)
    return table


def _linears(config: ModelConfig, layer: int) -> dict[tuple[str, ...], tuple[str, int, int, bool]]:
    """Linear layers of a layer: their tensor, inputs, outputs, and whether they have a bias.

    Without those that share a tensor with others.
    """
    width, hidden, experts = config.width, config.mlp_width, config.experts
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    linears: dict[tuple[str, ...], tuple[str, int, int, bool]] = {
        ("attention", "q"): ("self_attn.q_proj", width, queries, config.attention_bias),
        ("attention", "k"): ("self_attn.k_proj", width, keys, config.attention_bias),
        ("attention", "v"): ("self_attn.v_proj", width, keys, config.attention_bias),
        ("attention", "o"): ("self_attn.o_proj", queries, width, config.output_bias),
    }
    if config.output_gate:  # one tensor with that of the gate
        del linears["attention", "q"]
    if config.kind_of(layer).linear:
        linears = {}
    if experts is not None and not config.kind_of(layer).dense:
        name = "mlp.router" if config.architecture == "gpt_oss" else "mlp.gate"
        linears |= {("mlp", "router"): (name, width, experts.count, experts.bias)}
        if experts.shared is None:
            return linears
        name = "mlp.shared_expert"
        return linears | {
            ("mlp", "shared_gate"): (f"{name}_gate", width, 1, False),
            ("mlp", "shared", "gate"): (f"{name}.gate_proj", width, experts.shared, False),
            ("mlp", "shared", "up"): (f"{name}.up_proj", width, experts.shared, False),
            ("mlp", "shared", "down"): (f"{name}.down_proj", experts.shared, width, False),
        }
    return linears | {
        ("mlp", "gate"): ("mlp.gate_proj", width, hidden, config.mlp_bias),
        ("mlp", "up"): ("mlp.up_proj", width, hidden, config.mlp_bias),
        ("mlp", "down"): ("mlp.down_proj", hidden, width, config.mlp_bias),
    }


def _of_linear_attention(
    config: ModelConfig, sizes: LinearAttentionConfig, name: str
) -> dict[tuple[str, ...], Weight]:
    """The parameters of linear attention, several of which share a tensor."""
    s, width = sizes, config.width
    keys, values = s.key_heads * s.key_dim, s.value_heads * s.value_dim
    repeat = s.value_heads // s.key_heads
    columns = {"q": keys, "k": keys, "v": values, "gate": values}
    columns |= {"beta": s.value_heads, "decay": s.value_heads}
    # Side by side: queries, keys and values of all heads.
    whole = _side_by_side({"q": keys, "k": keys, "v": values})
    if config.architecture == "qwen3_next":
        # For each head of keys, what belongs to it.
        of_head = {"q": s.key_dim, "k": s.key_dim}
        of_head |= dict.fromkeys(("v", "gate"), repeat * s.value_dim)
        parts = {x: ("in_proj_qkvz", part) for x, part in _side_by_side(of_head).items()}
        of_head = {"beta": repeat, "decay": repeat}
        parts |= {x: ("in_proj_ba", part) for x, part in _side_by_side(of_head).items()}
    else:
        parts = {x: ("in_proj_qkv", part) for x, part in whole.items()}
        parts |= {"gate": ("in_proj_z", None), "beta": ("in_proj_b", None)}
        parts |= {"decay": ("in_proj_a", None)}
    table: dict[tuple[str, ...], Weight] = {}
    for ours, (theirs, part) in parts.items():
        shape = (width, columns[ours])
        table[ours, "kernel"] = Weight(f"{name}.{theirs}.weight", shape, True, part)
    for ours, part in whole.items():
        shape = (s.conv_size, 1, columns[ours])
        table[(f"{ours}_conv",)] = Weight(f"{name}.conv1d.weight", shape, True, part)
    return table | {
        ("a_log",): Weight(f"{name}.A_log", (s.value_heads,), False),
        ("dt_bias",): Weight(f"{name}.dt_bias", (s.value_heads,), False),
        ("norm", "scale"): Weight(f"{name}.norm.weight", (s.value_dim,), False),
        ("o", "kernel"): Weight(f"{name}.out_proj.weight", (values, width), True),
    }


def _side_by_side(sizes: Mapping[str, int]) -> dict[str, Section]:
    """The sections of parameters that follow one another in a tensor."""
    total, start, sections = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        sections[name] = Section(start, size, total)
        start += size
    return sections


def _of_experts(
    config: ModelConfig, experts: ExpertsConfig, name: str
) -> dict[tuple[str, str], Weight]:
    """The parameters of all experts of a layer: one tensor each, or gate and up in one tensor."""
    count, width, hidden = experts.count, config.width, experts.width
    sizes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    fused = config.architecture == "gpt_oss"
    table: dict[tuple[str, str], Weight] = {}
    for i, (ours, (inputs, outputs)) in enumerate(sizes.items()):
        theirs = f"{name}.{{}}.{ours}_proj"
        kernel, bias, part = f"{theirs}.weight", f"{theirs}.bias", None
        if fused:
            kernel = f"{name}.{'down' if ours == 'down' else 'gate_up'}_proj"
            bias, part = f"{kernel}_bias", None if ours == "down" else Section(i, 1, 2)
        table[ours, "kernel"] = Weight(kernel, (count, inputs, outputs), not fused, part)
        if experts.bias:
            table[ours, "bias"] = Weight(bias, (count, outputs), False, part)
    return table


def check_source(source: TensorSource, table: Mapping[tuple[str, ...], Weight]) -> None:
    """Raises ValueError unless the source has exactly the tensors of the table, with their shapes.

    A tensor that is not read would mean a different model.
    """
    held = source.names()
    wanted = {name: weight.stored_shape for weight in table.values() for name in weight.tensors}
    for name, expected in wanted.items():
        if name not in held:
            raise ValueError(f"load_model: {source.path} lacks the tensor {source.label(name)}")
        if source.shape(name) != expected:
            raise ValueError(
                f"load_model: tensor {source.label(name)} of {source.path} has shape "
                f"{source.shape(name)}, but the configuration asks for {expected}"
            )
    harmless = re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight")
    extra = sorted(name for name in held - set(wanted) if not harmless.fullmatch(name))
    if extra:
        raise ValueError(
            f"load_model: {source.path} holds the tensor {source.label(extra[0])}, which the "
            f"decoder has no place for ({len(extra)} such)"
        )


def _check_tied(source: TensorSource) -> None:
    """Raises ValueError if a tied decoder's file holds an output matrix that is not its embedding.

    transformers 5 takes such a matrix, whatever the configuration says.
    """
    ours, theirs = "model.embed_tokens.weight", "lm_head.weight"
    if theirs not in source.names():
        return
    rows, width = source.shape(ours)
    step = max(1, _COMPARED_BYTES // (4 * width))
    same = source.shape(theirs) == (rows, width)
    for start in range(0, rows if same else 0, step):
        part = (slice(start, min(start + step, rows)), slice(0, width))
        if not np.array_equal(source.read(ours, part), source.read(theirs, part)):
            same = False
            break
    if not same:
        raise ValueError(
            f"load_model: {source.path} holds a {source.label(theirs)} that differs from "
            f"{source.label(ours)}, but its config.json ties them; set `tie_word_embeddings: "
            "false` in it"
        )


def load_params(
    source: TensorSource,
    config: ModelConfig,
    *,
    dtype: str = "float32",
    matrices: str | None = None,
    shardings: Mapping[str, Any] | None = None,
    head: str | None = None,
) -> dict[str, Any]:
    """Reads all parameters.

    Args:
      source: The tensors.
      config: The decoder.
      dtype, matrices: See the module.
      shardings: A tree like the parameters, of shardings. Every process reads only the slices
        of its devices. None puts the arrays on the default device.
      head: See :func:`parameter_table`.

    Returns:
      The parameter tree, kernels as [in, out].

    Raises:
      ValueError: If a tensor is missing, unexpected, or has another shape, or a tied decoder has an
        output matrix of its own.
    """
    table = parameter_table(config, head=head)
    check_source(source, table)
    if config.tied and head is None:
        _check_tied(source)

    def read(weight: Weight, dtype: np.dtype, sharding: "Sharding | None") -> jax.Array:
        slices: dict[tuple, np.ndarray] = {}

        def part(index: Sequence[slice]) -> np.ndarray:
            # Replicas ask for the same slice; it is read once.
            bounds = [s.indices(n)[:2] for s, n in zip(index, weight.shape, strict=True)]
            if (key := tuple(bounds)) not in slices:
                cut = tuple(slice(a, b) for a, b in bounds)
                slices[key] = np.ascontiguousarray(weight.read(source, cut), dtype)
            return slices[key]

        if sharding is None:
            return jnp.asarray(part([slice(None)] * len(weight.shape)))
        return jax.make_array_from_callback(weight.shape, sharding, part)

    params: dict[str, Any] = {}
    for path, weight in table.items():
        kind = jnp.dtype(matrices if matrices and len(weight.shape) > 1 else dtype)
        sharding: Any = shardings and functools.reduce(operator.getitem, path, shardings)
        *modules, leaf = path
        node = functools.reduce(lambda tree, key: tree.setdefault(key, {}), modules, params)
        node[leaf] = read(weight, kind, sharding)
    return params


def load_model(
    name_or_path: str | Path,
    *,
    mesh: "Mesh | None" = None,
    dtype: str = "float32",
    matrices: str | None = None,
) -> "tuple[Model, dict[str, Any]]":
    """Loads a pretrained decoder by name.

    Args:
      name_or_path: A folder with config.json and safetensors, a .gguf file, a short name such as
        `smollm2-135m-instruct`, or a Hugging Face repository `owner/name`.
      mesh: Spreads the parameters by the rules of `models.sharding`; None uses one device.
      dtype: See the module.
      matrices: See the module; equivalent to `cast_params` afterward, without the memory of both.

    Returns:
      (model, params).

    Raises:
      FileNotFoundError: If a file is missing or the name is unknown.
      ValueError: If a file is broken, the architecture unknown, or a tensor missing or misshapen.
      ConnectionError: If the model has to be fetched and cannot be.

    Example:
      >>> import tempfile
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jr.models.save_safetensors(params, folder, config=model.config)
      ...     _, loaded = jr.models.load_model(folder)
      >>> bool((loaded["embed"]["embedding"] == params["embed"]["embedding"]).all())
      True
    """
    opened = open_weights(name_or_path, mesh=mesh, dtype=dtype, matrices=matrices)
    return opened.model, opened.read()


class OpenedWeights(NamedTuple):
    """A pretrained decoder whose weights have not been read yet.

    Attributes:
      model: The model.
      shapes: Returns a `jax.ShapeDtypeStruct` per parameter, with its sharding on a mesh.
      read: Reads the weights and returns the parameters.
    """

    model: "Model"
    shapes: Callable[[], Any]
    read: Callable[[], dict[str, Any]]


def open_weights(
    name_or_path: str | Path,
    *,
    mesh: "Mesh | None" = None,
    dtype: str = "float32",
    matrices: str | None = None,
) -> OpenedWeights:
    """Opens a pretrained decoder, so that programs can be compiled before its weights are read.

    Arguments and errors are those of :func:`load_model`; errors about tensors are raised by `read`.
    """
    from jaxrl_llm.models.transformer import make_model, param_shapes

    source, config = open_model(name_or_path, dtype=dtype)
    model = make_model(config)
    shardings = None
    if mesh is not None:
        from jaxrl_llm.models.sharding import param_shardings

        shardings = param_shardings(param_shapes(model), mesh)

    def shape_of(x: jax.ShapeDtypeStruct, sharding: "Sharding | None" = None):
        kind = matrices if matrices and len(x.shape) > 1 else dtype
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(kind), sharding=sharding)

    def shapes():
        more = () if shardings is None else (shardings,)
        return jax.tree.map(shape_of, param_shapes(model), *more)

    read = functools.partial(
        load_params, source, config, dtype=dtype, matrices=matrices, shardings=shardings
    )
    return OpenedWeights(model, shapes, read)


def open_model(
    name_or_path: str | Path, *, dtype: str = "float32"
) -> tuple[TensorSource, ModelConfig]:
    """Opens the weights of a model and reads its configuration; no tensor is read."""
    # Before the weights are fetched: a decoder may be refused.
    config = read_config(resolve(name_or_path, weights=False).config, dtype=dtype)
    source = open_source(resolve(name_or_path), config)
    # Before a decoder of so many layers is made.
    if config.num_layers > (count := len(source.names())):
        raise ValueError(
            f"load_model: the configuration asks for {config.num_layers} layers, but {source.path} "
            f"holds {count} tensors"
        )
    return source, config


def open_source(files: ModelFiles, config: ModelConfig) -> TensorSource:
    """The tensors of a model under the names of a decoder of texts."""
    source: TensorSource
    if files.config.suffix == ".gguf":
        source = open_gguf(files.config)
    else:
        source = open_folder(files.weights)
    if config.architecture in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        return TextDecoder(source)
    return source


def read_config(path: Path, *, dtype: str = "float32") -> ModelConfig:
    """The configuration of a model from its config.json or .gguf file, without its weights.

    If config.json has no mask id, a denoising model uses that of its tokenizer. Raises
    ValueError, which names the file, for a decoder that `ModelConfig` does not describe.
    """
    if path.suffix == ".gguf":
        return replace(open_gguf(path).config, dtype=dtype)
    values = read_json(path)
    try:
        config = ModelConfig.from_hf(values, dtype=dtype)
        if config.causal or config.mask_id is not None:
            return config
        return replace(config, mask_id=_mask_id_of_tokenizer(path.parent))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{error} (in {path})") from error


def _mask_id_of_tokenizer(folder: Path) -> int | None:
    """The id of the mask token that a tokenizer's settings name; None where they name none."""
    settings = folder / "tokenizer_config.json"
    values = read_json(settings) if settings.is_file() else {}
    token = values.get("mask_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    if token is None:
        return None
    with parsing("read_config", settings, "settings of a tokenizer"):
        added = values.get("added_tokens_decoder") or {}
        ids = {entry["content"]: int(i) for i, entry in added.items()}
        known = token in ids
    file = folder / "tokenizer.json"
    if not known and file.is_file():
        with parsing("read_config", file, "tokenizer"):
            tokenizer = read_json(file)
            ids = tokenizer.get("model", {}).get("vocab", {})
            ids = dict(ids) if isinstance(ids, Mapping) else {}
            ids |= {x["content"]: x["id"] for x in tokenizer.get("added_tokens", ())}
    if token not in ids:
        raise ValueError(f"{settings} names the mask token {token!r}, which has no id in {folder}")
    return ids[token]
