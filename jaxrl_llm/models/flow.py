"""A small flow model: the velocity of a latent of D numbers, after a prompt.

    x_sigma = (1 - sigma) x + sigma noise,      velocity = E[noise - x | x_sigma, prompt]

It makes it possible to try methods for flow policies on 2D mixtures in seconds, with the same
training loop, checkpoints and rewards as other models. ``model`` is one of :func:`make_flow_model`
and ``params`` its parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.denoising import velocity_of
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.quantize import RoundedWeights, check_quantization, quantized_matmul


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The configuration of a flow model.

    Attributes:
      latent_dim: D, dimension of a latent.
      width: Width of a hidden layer.
      depth: Number of hidden layers.
      vocab_size: Vocabulary of the tokenizer; the model reads the mean embedding of the prompt.
      max_length: Maximum number of prompt tokens plus denoising steps.
      quantization: Rounds both operands of the hidden layers to 8 bits, as in a
        :class:`~jaxrl_llm.models.ModelConfig`; None does not.
    """

    latent_dim: int = 2
    width: int = 64
    depth: int = 2
    vocab_size: int = 260
    max_length: int = 128
    dtype: str = "float32"
    quantization: str | None = None
    causal: bool = False
    mask_id: None = None

    def __post_init__(self):
        check_quantization("FlowConfig", self.quantization)
        checks.check_count(
            "FlowConfig",
            latent_dim=self.latent_dim,
            width=self.width,
            depth=self.depth,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
        )


class _Hidden(nnx.Linear):
    """A hidden layer, whose operands are rounded if its weights are, or in the mode of a config."""

    def __init__(self, inputs: int, outputs: int, *, quantization: str | None, rngs: nnx.Rngs):
        super().__init__(inputs, outputs, rngs=rngs)
        self.quantization = quantization

    def __call__(self, inputs: Array) -> Array:
        """``[..., in] -> [..., out]``."""
        kernel = self.kernel.get_value()
        mode = kernel.mode if isinstance(kernel, RoundedWeights) else self.quantization
        if mode is None:
            return super().__call__(inputs)
        return quantized_matmul(inputs, kernel, mode=mode) + self.bias[...]


class Velocity(nnx.Module):
    """A multilayer perceptron of a latent, its noise level and a condition.

    The condition is the mean embedding of a prompt, or, with ``condition``, a vector of that size.
    """

    def __init__(
        self,
        config: Any,
        rngs: nnx.Rngs,
        *,
        condition: int | None = None,
        quantization: str | None = None,
    ):
        c = config
        if condition is None:
            self.embed = nnx.Embed(c.vocab_size, c.width, rngs=rngs)
            condition = c.width
        sizes = [c.latent_dim + 3 + condition, *[c.width] * c.depth]
        self.layers = nnx.List(
            [
                _Hidden(a, b, quantization=quantization, rngs=rngs)
                for a, b in zip(sizes[:-1], sizes[1:], strict=True)
            ]
        )
        self.head = nnx.Linear(c.width, c.latent_dim, rngs=rngs)

    def __call__(self, x: Array, sigma: Array, prompts: Array, prompt_mask: Array) -> Array:
        """As :attr:`Model.velocity`."""
        count = jnp.maximum(jnp.sum(prompt_mask, axis=-1, keepdims=True), 1)
        embedded = jnp.where(prompt_mask[..., None], self.embed(prompts), 0.0)
        return self.conditioned(x, sigma, jnp.sum(embedded, axis=-2) / count)

    def conditioned(self, x: Array, sigma: Array, condition: Array) -> Array:
        """The velocity of latents ``[P, ..., D]`` given vectors ``[P, C]``."""
        condition = condition.reshape(len(condition), *[1] * (x.ndim - 2), -1)
        condition = jnp.broadcast_to(condition, (*x.shape[:-1], condition.shape[-1]))
        angle = jnp.pi * sigma
        level = jnp.stack([sigma, jnp.cos(angle), jnp.sin(angle)], axis=-1)
        h = jnp.concatenate([x, level, condition], axis=-1)
        for layer in self.layers:
            h = jax.nn.silu(layer(h))
        return self.head(h)


def make_flow_model(config: FlowConfig) -> Model:
    """The flow model as pure functions of a dict of arrays.

    Args:
      config: The configuration.

    Returns:
      A :class:`Model` with a ``velocity``. It reads no tokens of a response: ``apply`` raises
      ValueError. Its output matrix is that of the velocity, ``[D, width]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model = jr.models.make_flow_model(jr.models.FlowConfig(width=8))
      >>> params = model.init(jax.random.key(0))
      >>> prompts = jnp.array([[65], [66]])
      >>> x, sigma = jnp.zeros((2, 4, 2)), jnp.full((2, 4), 0.5)
      >>> model.velocity(params, x, sigma, prompts, prompts > 0).shape
      (2, 4, 2)

    References:
      Lipman et al., Flow Matching (arXiv:2210.02747), the straight path.
    """

    def make(rngs: nnx.Rngs) -> Velocity:
        return Velocity(config, rngs, quantization=config.quantization)

    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(key: Array) -> ArrayTree:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=key)), nnx.Param))

    def apply(params, tokens, positions, context, *, delta=None, remat="none"):
        raise ValueError("Model.apply: a flow model denoises latents; it reads no tokens.")

    def velocity(params, x, sigma, prompts, prompt_mask) -> Array:
        name = "Model.velocity"
        checks.check_float(name, x=x, sigma=sigma)
        checks.check_min_rank(name, 2, x=x)
        checks.check_bool(name, prompt_mask=prompt_mask)
        checks.check_same_shape(name, prompts=prompts, prompt_mask=prompt_mask)
        checks.check_shape(name, "x", x, (len(prompts), *x.shape[1:-1], config.latent_dim))
        checks.check_shape(name, "sigma", sigma, x.shape[:-1])
        return nnx.merge(graphdef, params)(x, sigma, prompts, prompt_mask)

    return Model(
        config,
        init,
        apply,
        output_matrix=lambda params: params["head"]["kernel"].T,
        sharding_rules=(),
        velocity=velocity,
    )


def flow_matching_loss(
    model: Model, params: ArrayTree, key: Array, x: Array, prompts: Array, prompt_mask: Array
) -> Array:
    """The squared error of the velocity at random levels, a mean over the data.

        sigma ~ U[0, 1],  noise ~ N(0, 1)
        loss = mean over D of (velocity((1 - sigma) x + sigma noise) - (noise - x))^2

    Args:
      model, params: See the module.
      key: Typed key.
      x: float32 ``[P, D]``, data.
      prompts, prompt_mask: Their prompts ``[P, L]``, int32 and bool.

    Returns:
      A float32 scalar.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model = jr.models.make_flow_model(jr.models.FlowConfig(width=8))
      >>> params, prompts = model.init(jax.random.key(0)), jnp.ones((3, 1), int)
      >>> args = params, jax.random.key(1), jnp.zeros((3, 2)), prompts, prompts > 0
      >>> bool(jr.models.flow_matching_loss(model, *args) > 0)
      True
      >>> def exact(params, latent, sigma, prompts, prompt_mask):  # of data that are all 0
      ...     return latent / sigma[..., None]
      >>> round(float(jr.models.flow_matching_loss(model._replace(velocity=exact), *args)), 6)
      0.0

    References:
      Lipman et al., Flow Matching (arXiv:2210.02747).
    """
    velocity = velocity_of("flow_matching_loss", model)
    of_level, of_noise = jax.random.split(key)
    sigma = jax.random.uniform(of_level, x.shape[:-1])
    noise = jax.random.normal(of_noise, x.shape)
    at, level = sigma[..., None], sigma[:, None]
    latent = (1.0 - at) * x + at * noise
    v = velocity(params, latent[:, None], level, prompts, prompt_mask)[:, 0]
    return jnp.mean((v - (noise - x)) ** 2)


def pretrain_flow(
    model: Model,
    params: ArrayTree,
    key: Array,
    draw: Callable[[Array], tuple[Array, Array]],
    *,
    steps: int = 500,
    learning_rate: float = 3e-3,
) -> ArrayTree:
    """Trains parameters by Adam on :func:`flow_matching_loss`.

    Args:
      model, params: See the module.
      key: Typed key.
      draw: ``key -> (x [P, D], prompts [P, L])``, data and their prompts, a new batch each step.
      steps: Number of steps.
      learning_rate: Initial learning rate, with a cosine decay to 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model = jr.models.make_flow_model(jr.models.FlowConfig(width=8))
      >>> def draw(key):
      ...     return jax.random.normal(key, (16, 2)), jnp.ones((16, 1), int)
      >>> params = model.init(jax.random.key(0))
      >>> params = jr.models.pretrain_flow(model, params, jax.random.key(1), draw, steps=2)
    """
    checks.check_count("pretrain_flow", steps=steps)
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    def step(carry, key):
        params, state = carry
        of_data, of_loss = jax.random.split(key)
        x, prompts = draw(of_data)
        exists = jnp.ones(prompts.shape, bool)
        grads = jax.grad(lambda p: flow_matching_loss(model, p, of_loss, x, prompts, exists))(
            params
        )
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(key, steps)
    carry = (params, optimizer.init(params))
    return jax.jit(lambda c: jax.lax.scan(step, c, keys)[0][0])(carry)
