"""A critic or a process reward model: a second model, trained with the policy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.compose import accepted
from jaxrl_llm.core.packing import pack, unpack
from jaxrl_llm.models.heads import apply_head, init_head
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.preferences.groups import count_pairs
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.critic import Critic
from jaxrl_llm.recipes.prm import ProcessRewardModel
from jaxrl_llm.train.batches import Passes, accumulate_gradients, run_passes
from jaxrl_llm.train.denoising import PolicyScorer
from jaxrl_llm.train.optimizer import apply_if_finite, keep
from jaxrl_llm.train.score import score_hidden


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


def average(target: ArrayTree, params: ArrayTree, rate: float | None) -> ArrayTree:
    """The target after a step that moves it toward the parameters by ``rate``."""
    if rate is None:
        return ()
    return jax.tree.map(lambda a, b: a + rate * (b - a), target, params)


def update_critic(
    critic: Critic,
    state: CriticState,
    recipe: Recipe,
    batch: Batch,
    *,
    passes: Passes,
    model: Model,
    optimizer: optax.GradientTransformation,
    remat: str,
) -> tuple[CriticState, dict[str, Array]]:
    """The critic after the optimizer steps of a prepared batch, and their metrics."""
    batch = recipe.without_texts(batch)

    def loss(params: ArrayTree, part: Batch):
        return critic.total_loss(critic_values(model, params, part, remat=remat), part), ()

    def update(carry, part: Batch, there: Array):
        part = recipe.weigh(part) if passes.minibatches > 1 else part
        there &= jnp.any(part.extras["critic_weights"] != 0)
        value, _, grads = accumulate_gradients(loss, carry[0], part, passes.accumulated)
        carry, metrics = apply_if_finite(optimizer, carry, value, grads, there=there)
        return carry, (metrics, None)

    before = (state.params, state.opt_state)
    (params, opt_state), (metrics, _) = run_passes(passes, update, before, batch)
    target = average(state.target, params, critic.target_rate)
    target = keep(metrics["updates"] > 0, target, state.target)
    return CriticState(params, opt_state, target), metrics


def update_prm(
    rule: ProcessRewardModel,
    state: CriticState,
    batch: Batch,
    *,
    scorer: PolicyScorer,
    optimizer: optax.GradientTransformation,
    microbatches: int,
) -> tuple[CriticState, dict[str, Array]]:
    """The process reward model after an optimizer step on a batch with ``old_logp``."""
    pairs = count_pairs(batch.rewards, batch.mask, where=batch.where)
    rollouts = jnp.sum(batch.where & jnp.any(batch.mask, axis=-1))
    batch = batch.replace(experts=None)  # which are those of the policy

    def loss(params: ArrayTree, part: Batch):
        logp = scorer(params["model"], part).logp
        return rule.total_loss(logp, part, pairs=pairs, rollouts=rollouts), ()

    value, _, grads = accumulate_gradients(loss, state.params, batch, microbatches)
    carry = (state.params, state.opt_state)
    # Without anything to learn from, the momentum alone would move it.
    there = rollouts > 0
    if "pairs" in accepted(rule.loss):
        there &= pairs > 0
    (params, opt_state), metrics = apply_if_finite(optimizer, carry, value, grads, there=there)
    return CriticState(params, opt_state, ()), metrics
