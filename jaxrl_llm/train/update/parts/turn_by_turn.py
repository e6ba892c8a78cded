"""Updates turn by turn: each turn of a batch is an optimizer step, see ``recipes.TurnUpdates``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core import masking
from jaxrl_llm.core.axes import Array
from jaxrl_llm.corrections import sequential_factor, turn_order
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.parts.turn_updates import TurnUpdates
from jaxrl_llm.train.batches import batch_sizes, map_microbatches, summarize_updates, took_part
from jaxrl_llm.train.update.part import At, Part, Setup

# Separates the random order of turns from the other random numbers of a step.
_ORDER = 0x6F726472


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe that is trained turn by turn."""
    del setup
    turns = recipe.turn_updates
    if turns is None:
        return None
    return Part(
        "turn_by_turn",
        passes=_passes,
        draws=turns.order == "random",
        cost="a pass of the policy before the first turn and after each",
    )


def order_key(key: Array, step: int | Array) -> Array:
    """The key that orders the turns in a step of a run with this key."""
    return jax.random.fold_in(jax.random.fold_in(key, step), _ORDER)


def _passes(update: Callable, carry: Any, batch: Batch, at: At) -> Any:
    turns: Any = at.recipe.turn_updates
    scorer, base = at.setup.scorer, at.state.base

    def logp_of(carry) -> Array:
        policy = merge_adapter(base, carry[0])
        return map_microbatches(lambda rows: scorer(policy, rows).logp, batch, at.slices)

    def weighed(carry, rows: Batch, trains: Array):
        return update(carry, at.recipe.weigh(rows), trains)

    key = order_key(at.key, at.state.step) if turns.order == "random" else None
    return run_turns(turns, weighed, logp_of, carry, batch, key)


def run_turns(
    turns: TurnUpdates,
    update: Callable,
    logp_of: Callable,
    carry: Any,
    batch: Batch,
    key: Array | None,
) -> tuple[Any, tuple[dict[str, Array], Array]]:
    """Runs an optimizer step for each turn of a batch, in the order of ``turns``.

    Args:
      turns: See :class:`~jaxrl_llm.recipes.parts.turn_updates.TurnUpdates`.
      update: ``update(carry, part, trains) -> (carry, (metrics, _))``, which makes no step if
        ``trains`` is False; ``part.old_logp`` are the log-probabilities before the step.
      logp_of: ``logp_of(carry) -> [P, G, T]``, the log-probabilities of all tokens.
      carry: Parameters and the optimizer's state.
      batch: The prepared batch.
      key: Key for a random order, else None.

    Returns:
      The carry, the metrics of the batch, and the log-probabilities before the first step.
    """
    turn_ids, count = batch.extras["turn_ids"], batch.extras["turn_where"].shape[-1]
    advantages = jnp.asarray(batch.advantages)

    def one(state, turn):
        carry, before, factor = state
        mask = batch.mask & (turn_ids == turn)
        spread = factor if advantages.ndim == factor.ndim else factor[..., None]
        part = batch.replace(mask=mask, advantages=advantages * spread, old_logp=before)
        carry, (metrics, _) = update(carry, part, jnp.any(mask))
        logp = logp_of(carry)
        factor = sequential_factor(
            factor, logp, before, mask, eps_low=turns.eps_low, eps_high=turns.eps_high
        )
        return (carry, logp, factor), (metrics, took_part(metrics))

    first = logp_of(carry)
    start = carry, first, jnp.ones(batch.where.shape, jnp.float32)
    order = turn_order(count, order=turns.order, key=key)
    (carry, _, _), (history, there) = jax.lax.scan(one, start, order)
    # Count whole responses, not single turns.
    lengths, trains = masking.lengths(batch.mask), jnp.any(batch.mask, axis=-1)
    sizes = jax.tree.map(lambda n: jnp.broadcast_to(n, there.shape), batch_sizes(batch))
    metrics = summarize_updates(history, count, there, sizes)
    metrics |= {"length": masking.masked_mean(lengths, trains)}
    return carry, (metrics, first)
