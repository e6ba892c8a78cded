"""A flow model that writes before it denoises: one decoder reads, writes, and conditions a flow.

    text ~ decoder(prompt),      velocity = f(x, sigma, last hidden state of prompt and text)

Its parameters are ``{"decoder": ..., "flow": ...}``. As a language model it is :func:`writer_of`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flow import Velocity
from jaxrl_llm.models.protocol import AttentionContext, Model
from jaxrl_llm.models.transformer import make_model


@dataclass(frozen=True, kw_only=True)
class TextFlowConfig:
    """The shape of a flow model that writes.

    Attributes:
      decoder: Of the language model, causal.
      latent_dim: D, numbers of a latent.
      width: Of a hidden layer of the velocity.
      depth: Its hidden layers.
    """

    decoder: ModelConfig
    latent_dim: int = 2
    width: int = 64
    depth: int = 2
    causal: bool = False
    mask_id: None = None

    def __post_init__(self):
        name = "TextFlowConfig"
        checks.check_count(name, latent_dim=self.latent_dim, width=self.width, depth=self.depth)
        if not self.decoder.causal:
            raise ValueError(f"{name}: decoder writes token by token, so it must be causal.")

    @property
    def vocab_size(self) -> int:
        """Tokens of the decoder."""
        return self.decoder.vocab_size

    @property
    def max_length(self) -> int:
        """Tokens of a prompt, of the text and steps of denoising together."""
        return self.decoder.max_length

    @property
    def dtype(self) -> str:
        """Of the decoder's matrix products."""
        return self.decoder.dtype


def make_text_flow_model(config: TextFlowConfig) -> Model:
    """The model as pure functions of a dict of arrays.

    Args:
      config: Its shape.

    Returns:
      A :class:`Model` with a ``velocity``, whose prompts are those of a trajectory with the text
      behind them. ``apply`` and ``output_matrix`` are those of the decoder.

    Raises:
      ValueError: In a call of the velocity, for latents or levels of a wrong shape.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_text_flow_model()
      >>> rows = jnp.array([[65, 66], [67, 68]])
      >>> x, sigma = jnp.zeros((2, 4, 2)), jnp.full((2, 4), 0.5)
      >>> model.velocity(params, x, sigma, rows, rows > 0).shape
      (2, 4, 2)

    References:
      UniGRPO (arXiv:2603.23500), whose model is a transformer for both; this one is for trying.
    """
    decoder = make_model(config.decoder)
    width = config.decoder.width

    def make(rngs: nnx.Rngs) -> Velocity:
        return Velocity(config, rngs, condition=width)

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(key: Array) -> ArrayTree:
        of_decoder, of_flow = jax.random.split(key)
        flow = nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=of_flow)), nnx.Param))
        return {"decoder": decoder.init(of_decoder), "flow": flow}

    def apply(params, tokens, positions, context, *, delta=None, remat="none"):
        return decoder.apply(
            params["decoder"], tokens, positions, context, delta=delta, remat=remat
        )

    def velocity(params, x, sigma, prompts, prompt_mask) -> Array:
        name = "Model.velocity"
        checks.check_float(name, x=x, sigma=sigma)
        checks.check_bool(name, prompt_mask=prompt_mask)
        checks.check_same_shape(name, prompts=prompts, prompt_mask=prompt_mask)
        checks.check_shape(name, "x", x, (len(prompts), *x.shape[1:-1], config.latent_dim))
        checks.check_shape(name, "sigma", sigma, x.shape[:-1])
        # Padding goes behind the tokens, which linear attention reads one behind the other.
        order = jnp.argsort(~prompt_mask, axis=-1, stable=True)
        prompts, prompt_mask = (
            jnp.take_along_axis(x, order, axis=-1) for x in (prompts, prompt_mask)
        )
        positions = jnp.maximum(jnp.cumsum(prompt_mask, axis=-1) - 1, 0)
        context = AttentionContext(prompt_mask[:, None])
        hidden, _ = apply(params, prompts[:, None], positions[:, None], context)
        places = jnp.arange(prompts.shape[-1])
        last = jnp.max(jnp.where(prompt_mask, places, 0), axis=-1)
        condition = jnp.take_along_axis(hidden[:, 0], last[:, None, None], axis=1)[:, 0]
        flow = nnx.merge(graphdef, params["flow"])
        return flow.conditioned(x, sigma, condition.astype(jnp.float32))

    return Model(
        config,
        init,
        apply,
        output_matrix=lambda params: decoder.output_matrix(params["decoder"]),
        sharding_rules=decoder.sharding_rules,
        velocity=velocity,
        empty_cache=decoder.empty_cache,
        logit_cap=decoder.logit_cap,
    )


def writer_of(function: str, model: Model) -> Model:
    """The language model in a flow model that writes; ValueError for one that does not."""
    if not isinstance(model.config, TextFlowConfig):
        raise ValueError(
            f"{function} writes text before it denoises, which needs a model of "
            "models.make_text_flow_model."
        )
    return model._replace(config=model.config.decoder, velocity=None)
