"""Models that train in milliseconds: a decoder with all parts of a real one, and flow models."""

import jax

from jaxrl_llm.core import ArrayTree
from jaxrl_llm.models import (
    FlowConfig,
    Model,
    ModelConfig,
    TextFlowConfig,
    make_flow_model,
    make_model,
    make_text_flow_model,
)
from jaxrl_llm.recipes.records import replace_fields
from jaxrl_llm.testing.tokenizer import ByteTokenizer

_CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=ByteTokenizer.vocab_size,
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=64,
    max_length=256,
    tied=True,
)


def tiny_config(**overrides) -> ModelConfig:
    """The configuration of :func:`tiny_model`: two layers of width 32 over bytes.

    Args:
      **overrides: Fields of ``models.ModelConfig``, which checks them.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.testing.tiny_config(num_layers=1).num_layers
      1
    """
    return replace_fields(_CONFIG, overrides)


def tiny_model(*, seed: int = 0, **overrides) -> tuple[Model, ArrayTree]:
    """A Llama with 27 thousand random parameters, for tests and notebooks: ``(model, params)``.

    Args:
      seed: Seed of the parameters.
      **overrides: As for :func:`tiny_config`, such as ``architecture="qwen3", qk_norm=True``.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> model.output_matrix(params).shape
      (259, 32)
    """
    model = make_model(replace_fields(_CONFIG, overrides))
    return model, model.init(jax.random.key(seed))


def tiny_flow_model(*, seed: int = 0) -> tuple[Model, ArrayTree]:
    """A flow model with five thousand random parameters, for latents of two numbers.

    Args:
      seed: Seed of the parameters.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_flow_model()
      >>> model.output_matrix(params).shape
      (2, 16)
    """
    model = make_flow_model(FlowConfig(width=16, vocab_size=ByteTokenizer.vocab_size))
    return model, model.init(jax.random.key(seed))


def tiny_text_flow_model(*, seed: int = 0) -> tuple[Model, ArrayTree]:
    """A model of one layer that writes a text and then denoises a latent of two numbers.

    Args:
      seed: Seed of the parameters.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_text_flow_model()
      >>> sorted(params), model.config.latent_dim
      (['decoder', 'flow'], 2)
    """
    config = TextFlowConfig(decoder=replace_fields(_CONFIG, {"num_layers": 1}), width=16)
    model = make_text_flow_model(config)
    return model, model.init(jax.random.key(seed))
