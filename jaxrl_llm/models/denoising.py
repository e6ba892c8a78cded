"""What a model that is not causal reads of a response, part of which is hidden behind its mask id.

A prompt sees the response to it, so each response has a row of its own with its prompt before it.

A model with blocks (``block_length``) counts them from the first token of the prompt, so that the
first tokens of a response may share a block with the last of its prompt; the last block ends with
the response. Sampler and likelihoods count them in the same way.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import AttentionContext, Model


def is_causal(model: Model) -> bool:
    """Whether a token of a model sees those before it alone, as one without such a field does."""
    return getattr(model.config, "causal", True)


def block_length_of(model: Model) -> int | None:
    """Tokens of a block of a model that denoises; None for one block of any length."""
    return getattr(model.config, "block_length", None)


def check_causal(function: str, model: Model, *, what: str = "the model") -> None:
    """Raises ValueError for a model that denoises: its outputs are not of the next token."""
    if not is_causal(model):
        raise ValueError(
            f"{function}: {what} is a denoising model (causal=False), which has no next-token "
            "probabilities; use make_denoising_sampler, or a recipe with a likelihood."
        )


def mask_id_of(function: str, model: Model) -> int:
    """The mask id of a denoising model; ValueError for another, or one with a cap of logits."""
    config = model.config
    if is_causal(model) or config.mask_id is None:
        lacks = "this one is causal; set causal=False and mask_id in its ModelConfig"
        if not is_causal(model):
            lacks = "this one has no mask_id: `mask_token_id` of config.json, or a mask token of "
            lacks += "the tokenizer"
        raise ValueError(f"{function} needs a denoising model; {lacks}.")
    if model.logit_cap is not None:
        raise ValueError(
            f"{function}: samplers and likelihoods of a denoising model have no soft cap of "
            f"logits; the model has logit_cap {model.logit_cap:g}."
        )
    return config.mask_id


def velocity_of(function: str, model: Model) -> Callable[..., Array]:
    """The velocity of a flow model; ValueError for another."""
    if model.velocity is None:
        raise ValueError(
            f"{function} needs a flow model, such as models.make_flow_model; this one "
            "has no velocity."
        )
    return model.velocity


def denoise(
    model: Model,
    params: ArrayTree,
    prompts: Array,
    prompt_mask: Array,
    tokens: Array,
    *,
    uncovered: Array | None = None,
    delta=None,
    remat: str = "none",
) -> Array:
    """Hidden states from which the tokens of responses are predicted, each from its own place.

    A model with blocks is trained to uncover a block after those before it: what it predicts of a
    block has a meaning where they are uncovered. A sampler has them so; a likelihood hides tokens
    in all blocks at a time, and says in ``uncovered`` what later blocks see. That is exactly a
    forward a block, in one of rows twice as long.

    Args:
      model: One with ``causal=False``.
      params: Its parameters.
      prompts: int32 ``[P, Lp]``, right padded; or ``[P, G, Lp]`` where responses see other parts.
      prompt_mask: bool ``[P, Lp]``.
      tokens: int32 ``[P, G, T]``, the mask id where a token is hidden; all T exist.
      uncovered: int32 ``[P, G, T]``, of a model with blocks: the tokens that later blocks see. None
        where they see ``tokens``.
      delta: Low-rank delta of the linear layers, if any.
      remat: What the backward pass keeps of a layer; see :func:`~jaxrl_llm.models.make_model`.

    Returns:
      ``[P, G, T, D]``.

    Raises:
      ValueError: If the shapes do not fit together, the model is causal, or it has no blocks and
        ``uncovered`` is there.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(causal=False, vocab_size=260, mask_id=259)
      >>> hidden = jr.models.denoise(
      ...     model, params, jnp.ones((1, 3), int), jnp.ones((1, 3), bool),
      ...     jnp.full((1, 2, 4), 259))
      >>> hidden.shape
      (1, 2, 4, 32)

    References:
      Blocks: Cheng et al., SDAR (arXiv:2510.06303), whose released sampler counts them from the
      first token of the prompt and fills the last one up. Rows with both forms of each block:
      Arriola et al., BD3-LM (arXiv:2503.09573).
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
    if uncovered is not None:
        checks.check_shape(function, "uncovered", uncovered, (P, G, T))
        return _denoise_blocks(
            model, params, prompts, prompt_mask, tokens, uncovered, delta=delta, remat=remat
        )
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


def _denoise_blocks(
    model: Model,
    params: ArrayTree,
    prompts: Array,
    prompt_mask: Array,
    tokens: Array,
    uncovered: Array,
    *,
    delta,
    remat: str,
) -> Array:
    """:func:`denoise` where each block sees those before it uncovered.

    A row has each block twice, as it is denoised and, behind that, uncovered. The first form ends
    there, as a branch of a tree does; the second is what later blocks see.
    """
    block = block_length_of(model)
    if block is None:
        raise ValueError("denoise: uncovered has no effect with a model without blocks.")
    (P, G, T), length = tokens.shape, prompt_mask.shape[-1]
    n = jnp.sum(prompt_mask, axis=-1, keepdims=True)
    # What the prompt has of the first block of the response is in both of its forms.
    before = n - n % block + jnp.arange(block - 1)
    index = jnp.broadcast_to(jnp.clip(before, 0, length - 1)[:, None], (P, G, block - 1))
    rows = [prompts, uncovered, jnp.take_along_axis(prompts, index, axis=-1), tokens]
    after = n + jnp.arange(T)
    places = [jnp.broadcast_to(jnp.arange(length), (P, length)), after, before, after]
    exists = [prompt_mask, jnp.ones((P, T), bool), before < n, jnp.ones((P, T), bool)]
    row, place, there = (jnp.concatenate(x, axis=-1) for x in (rows, places, exists))
    second = jnp.arange(row.shape[-1]) < length + T
    rank = jnp.where(there, 2 * (place // block) + second, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(rank, axis=-1, stable=True)

    def in_order(x: Array) -> Array:
        return jnp.take_along_axis(x, order, axis=-1)

    def of_rows(x: Array) -> Array:
        return jnp.broadcast_to(x[:, None], row.shape).astype(jnp.int32)

    rank, size = in_order(rank), row.shape[-1]
    # Each form of a block ends behind the last token of its rank.
    end = jax.vmap(lambda rank: jnp.searchsorted(rank, rank, side="right"))(rank)
    context = AttentionContext(
        of_rows(in_order(there)).astype(bool),
        ends=of_rows(jnp.where(in_order(jnp.broadcast_to(second, place.shape)), size, end)),
        ahead=of_rows(end - 1 - jnp.arange(size)),
    )
    row = jnp.take_along_axis(row, of_rows(order), axis=-1)
    hidden, _ = model.apply(
        params, row, of_rows(in_order(place)), context, delta=delta, remat=remat
    )
    back = of_rows(jnp.argsort(order, axis=-1))[..., -T:, None]
    return jnp.take_along_axis(hidden, back, axis=-2)
