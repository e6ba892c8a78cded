"""What a model that is not causal reads of a response, part of which is hidden behind its mask id.

A prompt sees the response to it, so each response has a row of its own with its prompt before it.
"""

import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import AttentionContext, Model


def is_causal(model: Model) -> bool:
    """Whether a token of a model sees those before it alone, as one without such a field does."""
    return getattr(model.config, "causal", True)


def check_causal(function: str, model: Model, *, what: str = "the model") -> None:
    """Raises ValueError for a model that denoises: its outputs are not of the next token."""
    if not is_causal(model):
        raise ValueError(
            f"{function}: {what} is a model that denoises (causal=False), which does not score "
            "each token after those before it; make_denoising_sampler and recipes with a "
            "likelihood take one."
        )


def mask_id_of(function: str, model: Model) -> int:
    """The mask id of a model that denoises; ValueError for another."""
    config = model.config
    if is_causal(model) or config.mask_id is None:
        lacks = "causal=False" if is_causal(model) else "a mask_id"
        raise ValueError(f"{function} needs a model that denoises; its config lacks {lacks}.")
    return config.mask_id


def denoise(
    model: Model,
    params: ArrayTree,
    prompts: Array,
    prompt_mask: Array,
    tokens: Array,
    *,
    delta=None,
    remat: str = "none",
) -> Array:
    """Hidden states from which the tokens of responses are predicted, each from its own place.

    Args:
      model: One with ``causal=False``.
      params: Its parameters.
      prompts: int32 ``[P, Lp]``, right padded; or ``[P, G, Lp]`` where responses see other parts.
      prompt_mask: bool ``[P, Lp]``.
      tokens: int32 ``[P, G, T]``, the mask id where a token is hidden; all T exist.
      delta: Low-rank delta of the linear layers, if any.
      remat: What the backward pass keeps of a layer; see :func:`~jaxrl_llm.models.make_model`.

    Returns:
      ``[P, G, T, D]``.

    Raises:
      ValueError: If the shapes do not fit together, or the model is causal.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(causal=False, vocab_size=260, mask_id=259)
      >>> hidden = jr.models.denoise(
      ...     model, params, jnp.ones((1, 3), int), jnp.ones((1, 3), bool),
      ...     jnp.full((1, 2, 4), 259))
      >>> hidden.shape
      (1, 2, 4, 32)
    """
    function = "denoise"
    mask_id_of(function, model)
    checks.check_rank(function, 3, tokens=tokens)
    checks.check_bool(function, prompt_mask=prompt_mask)
    (P, G, T), length = tokens.shape, prompt_mask.shape[-1]
    checks.check_shape(function, "prompt_mask", prompt_mask, (P, length))
    if prompts.ndim == 2:
        prompts = jnp.broadcast_to(prompts[:, None], (P, G, prompts.shape[-1]))
    checks.check_shape(function, "prompts", prompts, (P, G, length))
    # Prompts end where responses begin, so that rows have no gaps.
    place = jnp.arange(length) - (length - jnp.sum(prompt_mask, axis=-1, keepdims=True))
    index = jnp.broadcast_to(jnp.maximum(place, 0)[:, None], prompts.shape)
    shifted = jnp.take_along_axis(prompts, index, axis=-1)
    exists = jnp.pad(place >= 0, [(0, 0), (0, T)], constant_values=True)
    positions = jnp.concatenate([place, place[:, -1:] + 1 + jnp.arange(T)], axis=-1)
    row = (P, G, length + T)
    rows = jnp.concatenate([jnp.where(place[:, None] >= 0, shifted, 0), tokens], axis=-1)
    positions = jnp.broadcast_to(jnp.maximum(positions, 0)[:, None], row).astype(jnp.int32)
    context = AttentionContext(jnp.broadcast_to(exists[:, None], row))
    hidden, _ = model.apply(params, rows, positions, context, delta=delta, remat=remat)
    return hidden[:, :, length:]
