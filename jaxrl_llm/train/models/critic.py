"""A critic or a process reward model: a second model, trained with the policy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.packing import pack, unpack
from jaxrl_llm.models.heads import apply_head, init_head
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.models.score import score_hidden


class CriticState(NamedTuple):
    """The state of a critic between steps."""

    params: ArrayTree  # {"model": body parameters, "head": {"kernel" [D, C], "bias" [C]}}
    opt_state: ArrayTree
    target: ArrayTree  # a moving average of ``params``, or ``()`` if the recipe uses none


def init_critic(model: Model, params: ArrayTree, *, heads: int = 1, key: Array) -> ArrayTree:
    """Parameters of a critic, with the body of a language or reward model.

    Args:
      model: The body; the same kind of model as the policy, of any size.
      params: Parameters of the body; they are copied.
      heads: C, predictions per token; 0 for a process reward model, which has no head.
      key: Key for the head. Its initial weights are small, so values are near 0 and heads differ.

    Returns:
      ``{"model": ..., "head": {"kernel": [D, C], "bias": [C]}}``; with 0 heads only ``"model"``.

    Raises:
      ValueError: If ``heads`` is negative.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> critic = jr.train.init_critic(model, params, heads=2, key=jax.random.key(0))
      >>> critic["head"]["kernel"].shape, critic["head"]["bias"].tolist()
      ((32, 2), [0.0, 0.0])
      >>> critic["model"]["embed"]["embedding"] is params["embed"]["embedding"]  # a copy
      False
    """
    checks.check_non_negative("init_critic", heads=heads)
    body = jax.tree.map(jnp.copy, trees.cast(params, jnp.float32))
    if not heads:
        return {"model": body}
    return {"model": body, "head": init_head(key, model.output_matrix(params).shape[-1], heads)}


def critic_values(model: Model, params: ArrayTree, batch: Batch, *, remat: str = "none") -> Array:
    """Values of the state before each response token, as a critic predicts them.

        values[p, g, t, c] = hidden(prompt[p], y[p, g, :t]) @ kernel[:, c] + bias[c]

    Args:
      model: The critic's body.
      params: From :func:`init_critic`, with at least one head.
      batch: ``[P, G, T]``; its rewards are not read.
      remat: Rematerialization of the layers: "none", "dots" or "full".

    Returns:
      float32 ``[P, G, T, C]`` for C heads, 0 where ``mask`` is False.

    Raises:
      ValueError: If the shapes of the batch disagree.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> critic = jr.train.init_critic(model, params, key=jax.random.key(0))
      >>> critic["head"] = {"kernel": critic["head"]["kernel"] * 0, "bias": jax.numpy.full(1, 0.5)}
      >>> batch = jr.testing.make_case().batch
      >>> values = jr.train.critic_values(model, critic, batch)
      >>> bool((values[batch.mask] == 0.5).all()), bool((values[~batch.mask] == 0).all())
      (True, True)
    """
    hidden = score_hidden(
        model,
        params["model"],
        batch.prompt_tokens,
        batch.prompt_mask,
        batch.tokens,
        batch.mask,
        remat=remat,
        packing=batch.packing,
    )
    mask = pack(batch.packing, batch.mask)
    values = apply_head(params["head"], jnp.where(mask[..., None], hidden, 0))
    return unpack(batch.packing, values, batch.mask)


def check_critic(config: Any, recipe: Any) -> None:
    """Raises ValueError for the optimizer of a critic that a recipe does not have."""
    if recipe.needs.second_model is None and config.critic is not None:
        raise ValueError(f"config: critic has no effect: recipe {recipe.name!r} has none.")
