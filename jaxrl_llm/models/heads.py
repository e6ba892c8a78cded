"""A value head on a model: reward models and critics from any model of this library.

    values[t] = hidden[t] kernel + bias

The parameters are ``{"model": those of the body, "head": {"kernel" [D, C], "bias" [C]}}``; the
parameters of an adapter are split likewise, and the head is trained with it. Without "bias" the
bias is 0.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime.files import parsing
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import (
    ARCHITECTURES,
    DENOISERS,
    HEADS,
    WITH_IMAGES,
    body_class,
)
from jaxrl_llm.models.loading import load_params, open_source
from jaxrl_llm.models.lora import Adapted, LoRAConfig, merge_lora
from jaxrl_llm.models.names import resolve
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.safetensors import read_json
from jaxrl_llm.models.transformer import make_model


def init_head(key: Array, width: int, heads: int = 1, *, bias: bool = True) -> dict[str, Array]:
    """A head for hidden states ``[..., width]``, initialized small so that values are near 0.

    Args:
      key: A typed key.
      width: D.
      heads: C.
      bias: Whether a constant is added, which a loss of differences does not train.

    Example:
      >>> import jax
      >>> {k: v.shape for k, v in init_head(jax.random.key(0), 8).items()}
      {'kernel': (8, 1), 'bias': (1,)}
    """
    kernel = jax.random.normal(key, (width, heads), jnp.float32) * (0.02 / width**0.5)
    return {"kernel": kernel} | ({"bias": jnp.zeros((heads,), jnp.float32)} if bias else {})


def apply_head(head: Mapping[str, Array], hidden: Array) -> Array:
    """Values ``[..., C]``, float32, of hidden states ``[..., D]``."""
    values = hidden.astype(jnp.float32) @ head["kernel"]
    return values + head["bias"] if "bias" in head else values


def with_head(
    model: Model, params: ArrayTree, *, key: Array, mesh: jax.sharding.Mesh | None = None
) -> tuple[Model, ArrayTree]:
    """A reward model whose body starts from a language model, with or without an adapter.

    Args:
      model: Any model of this library.
      params: Its parameters; they are not copied.
      key: Key to initialize the head.
      mesh: Mesh of the parameters, if any.

    Returns:
      The model whose :attr:`~jaxrl_llm.models.Model.values` are those of the head, and its
      parameters; of an adapted model its base under "model", and "model" and "head" of its adapter.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.models.with_head(*jr.testing.tiny_model(), key=jax.random.key(0))
      >>> sorted(params), model.values is not None
      (['head', 'model'], True)
    """
    head = init_head(key, model.output_matrix(params).shape[-1], bias=False)
    if mesh is not None:
        from jaxrl_llm.models.sharding import leaf_shardings, shard

        tree = {"head": head}
        head = shard(tree, leaf_shardings(tree, mesh, model.sharding_rules))["head"]
    if isinstance(params, Adapted):
        adapter = {"model": params.adapter, "head": head}
        return headed_model(model), Adapted({"model": params.base}, adapter)
    return headed_model(model), {"model": params, "head": head}


def without_output(model: Model, params: ArrayTree) -> tuple[Model, ArrayTree]:
    """A built-in decoder without a separate output matrix, which a head does not read.

    This saves the memory of the matrix and of its moments.

    Args:
      model: Of :func:`make_model`.
      params: Its parameters.
    """
    if model.config.tied:
        return model, params
    body = {name: x for name, x in params.items() if name != "head"}
    return make_model(replace(model.config, tied=True)), body


def with_vocabulary(model: Model, size: int) -> Model:
    """Restricts a model's distribution to the first tokens of its vocabulary.

    Models of one family often share a tokenizer but have embedding tables of different sizes, whose
    last rows belong to no token.

    Args:
      model: A model with at least ``size`` tokens.
      size: Number of tokens.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> with_vocabulary(model, 200).output_matrix(params).shape
      (200, 32)
    """
    checks.check_count("with_vocabulary", most=model.config.vocab_size, size=size)
    config = replace(model.config, vocab_size=size)
    return model._replace(config=config, output_matrix=lambda x: model.output_matrix(x)[:size])


def headed_model(model: Model) -> Model:
    """The model as a function of the parameters that :func:`with_head` makes."""

    def init(key: Array) -> ArrayTree:
        body, of_head = jax.random.split(key)
        params = model.init(body)
        width = model.output_matrix(params).shape[-1]
        return {"model": params, "head": init_head(of_head, width, bias=False)}

    def apply(params, tokens, positions, context, *, delta=None, remat="none"):
        body = split_head(params)[0]
        return model.apply(body, tokens, positions, context, delta=delta, remat=remat)

    def output_matrix(params: ArrayTree) -> Array:
        return model.output_matrix(split_head(params)[0])

    def values(params: ArrayTree, hidden: Array) -> Array:
        return apply_head(split_head(params)[1], hidden)

    return model._replace(
        init=init, apply=apply, output_matrix=output_matrix, values=values, apply_routed=None
    )


def split_head(params: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
    """The parameters of body and head; the base of an adapter alone has no head, which is None."""
    if isinstance(params, Adapted):
        body = Adapted(params.base["model"], params.adapter["model"])
        return body, params.adapter["head"]
    return params["model"], params.get("head")


def merge_headed(params: Adapted, config: LoRAConfig) -> ArrayTree:
    """The parameters of an equivalent reward model without adapter."""
    body, head = split_head(params)
    return {"model": merge_lora(body, config), "head": head}


def head_of(name_or_path: str | Path) -> str | None:
    """What the head of a stored model reads, "response" or "step"; None for a language model.

    No weight is read.
    """
    name = _class_of(name_or_path)
    return next((head for head, end in HEADS.items() if name.endswith(end)), None)


def checked_head(function: str, name_or_path: str | Path) -> str:
    """What the head of a stored reward model reads; ValueError names `function` if it has none."""
    if (head := head_of(name_or_path)) is not None:
        return head
    name = _class_of(name_or_path)
    if not name or name in ARCHITECTURES or name in DENOISERS or name in WITH_IMAGES:
        raise ValueError(
            f"{function}: {str(name_or_path)!r} is a language model without a head; a run with "
            "recipe reward_model trains one, and `jaxrl-llm export` writes it."
        )
    raise ValueError(
        f"{function}: {str(name_or_path)!r} is of class {name!r}, which is not "
        "supported; a reward model is a ...ForSequenceClassification, which reads responses, or a "
        "...ForTokenClassification, which reads steps."
    )


def read_at_of(name_or_path: str | Path) -> Literal["stop", "end"]:
    """Where the head of a stored reward model of responses was trained to read.

    "stop" is the stop token after prompt and response, as in runs of this library. "end" is the
    last token of the conversation that the chat template writes, as in transformers. No weight is
    read.
    """
    values = read_json(resolve(name_or_path, weights=False).config)
    # Earlier exports lack the mark; what transformers has saved also has its version.
    ours = values.get("read_at") == "stop" or "transformers_version" not in values
    return "stop" if ours else "end"


def _class_of(name_or_path: str | Path) -> str:
    """The class of transformers of a stored model; empty for GGUF, which has no heads."""
    path = resolve(name_or_path, weights=False).config
    names = None if path.suffix == ".gguf" else read_json(path).get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def reward_model_config(
    name_or_path: str | Path, *, dtype: str = "float32"
) -> tuple[ModelConfig, str]:
    """The body of a stored reward model and what its head reads; no weight is read.

    Args:
      name_or_path: See :func:`load_reward_model`, which raises the same.
      dtype: Of the matrix products.
    """
    head = checked_head("load_reward_model", name_or_path)
    path = resolve(name_or_path, weights=False).config
    values = read_json(path)
    body = body_class(str(values["architectures"][0]), composite=bool(values.get("text_config")))
    with parsing("load_reward_model", path, "config.json"):
        config = ModelConfig.from_hf({**values, "architectures": [body]}, dtype=dtype)
    # Its output matrix is not stored, and no one asks for it.
    return replace(config, tied=True), head


def load_reward_model(
    name_or_path: str | Path, *, dtype: str = "float32"
) -> tuple[Model, ArrayTree]:
    """Loads a reward model written by ``jaxrl-llm export`` or by transformers.

    Args:
      name_or_path: A folder or repository with a sequence or token classifier of one label.
      dtype: Of the matrix products.

    Returns:
      The model and its parameters, as from :func:`with_head`.

    Raises:
      FileNotFoundError: If there is no such model.
      ValueError: If it has no head, one of several labels, or a tensor is missing or misshapen.

    Example:
      >>> import tempfile
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> _, scorer = jr.models.with_head(model, params, key=jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jr.models.save_safetensors(scorer, folder, config=model.config, head="response")
      ...     _, again = jr.models.load_reward_model(folder)
      >>> again["head"]["kernel"].shape
      (32, 1)
    """
    config, head = reward_model_config(name_or_path, dtype=dtype)
    files = resolve(name_or_path)
    params = load_params(open_source(files, config), config, head=head)
    return headed_model(make_model(config)), {"head": params.pop("score"), "model": params}
