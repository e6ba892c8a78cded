"""The update of a batch, from top to bottom. A method's parts add to it at six places.

See :mod:`~jaxrl_llm.train.update.part` for the places and what their functions return.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import masking
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.recipes import AlgoState, Batch
from jaxrl_llm.train.batches import run_passes
from jaxrl_llm.train.metrics import batch_metrics, no_signal, rejection_metrics
from jaxrl_llm.train.optimizer import apply_if_finite, keep, stays_finite
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.learned import next_state
from jaxrl_llm.train.update.objective import policy_objective
from jaxrl_llm.train.update.part import At, Done, Gradients, Objective, Part
from jaxrl_llm.train.update.reads import prepare_batch


class Begun(NamedTuple):
    """A batch before its optimizer steps.

    Attributes:
      state: The state, as the parts changed it before the batch was scored.
      batch: The prepared batch.
      algo_state: The recipe's state as ``prepare`` returned it.
      at: Where the step is.
      sampled: The responses of the batch before it was prepared.
      finite: Whether the recipe's next state is finite where the one before was; bool ``[]``.
      metrics: Of the parts so far.
    """

    state: TrainState
    batch: Batch
    algo_state: AlgoState
    at: At
    sampled: Batch
    finite: Array
    metrics: dict[str, Array]

    @property
    def accumulated(self) -> int:
        """Number of microbatches whose gradients an optimizer step adds up."""
        return self.at.setup.passes.of(self.batch.packing).accumulated


def update_batch(
    parts: Sequence[Part], state: TrainState, batch: Batch, at: At
) -> tuple[TrainState, dict[str, Array]]:
    """The state after the optimizer steps of a batch, and their metrics."""
    begun = begin(parts, state, batch, at)
    objective = objective_of(parts, begun.at, begun.accumulated)

    def update(carry: Any, rows: Batch, trains: Array):
        gradients = objective.gradient(carry[0], rows)
        return optimizer_step(parts, begun, carry, rows, gradients, trains=trains)

    return finish(parts, begun, *optimizer_steps(parts, begun, update))


def begin(parts: Sequence[Part], state: TrainState, batch: Batch, at: At) -> Begun:
    """The batch with all that is known before its optimizer steps."""
    sampled, of_parts = at.recipe.responses(batch), dict[str, Array]()
    before = state.algo_state
    for part in parts:
        if part.first is not None:
            state, batch, metrics = part.first(state, batch, at)
            of_parts |= metrics
    at = at._replace(state=state)
    batch, algo_state = prepare_batch(parts, state, batch, at)
    algo_state = next_state(at.recipe, algo_state, before)
    finite = stays_finite(before, algo_state)
    return Begun(state, batch, algo_state, at, sampled, finite, of_parts)


def objective_of(parts: Sequence[Part], at: At, accumulated: int) -> Objective:
    """The loss of an optimizer step, as the parts change it."""
    objective = policy_objective(at.setup.scorer, at.recipe, at.state.base, accumulated)
    for part in parts:
        if part.wrap is not None:
            objective = part.wrap(objective, at)
    return objective


def optimizer_step(
    parts: Sequence[Part],
    begun: Begun,
    carry: tuple[ArrayTree, ArrayTree],
    rows: Batch,
    gradients: Gradients,
    *,
    trains: Array,
) -> tuple[tuple[ArrayTree, ArrayTree], tuple[dict[str, Array], Array | None]]:
    """Parameters and optimizer after one step on some rows; its metrics and log-probabilities."""
    setup = begun.at.setup
    trains &= jnp.any(rows.weights != 0)
    loss, grads, logp, entropy, scale = gradients
    carry, metrics = apply_if_finite(
        setup.optimizer, carry, loss, grads, scale=scale, finite=begun.finite, trains=trains
    )
    metrics |= batch_metrics(setup.recipe, logp, entropy, rows)
    reads_logp = setup.passes.updates == 1 or any(part.reads_logp for part in parts)
    return carry, (metrics, logp if reads_logp else None)


def optimizer_steps(
    parts: Sequence[Part], begun: Begun, update: Callable
) -> tuple[TrainState, Done]:
    """The state with the policy after the optimizer steps of a prepared batch."""
    state, batch, at = begun.state, begun.batch, begun.at
    run: Callable = next((part.passes for part in parts if part.passes is not None), _minibatches)
    carry, (metrics, logp) = run(update, (state.params, state.opt_state), batch, at)
    state = state._replace(params=carry[0], opt_state=carry[1])
    return state, Done(batch, begun.algo_state, logp, metrics)


def finish(
    parts: Sequence[Part], begun: Begun, state: TrainState, done: Done
) -> tuple[TrainState, dict[str, Array]]:
    """The state after the step, with all that follows the policy, and the metrics."""
    recipe, batch, before = begun.at.recipe, done.batch, begun.state.algo_state
    of_parts, sampled = dict(begun.metrics), begun.sampled
    applied = done.metrics["updates"] + done.metrics.get("withheld", 0.0) > 0
    applied |= done.metrics["skipped"] == 0
    applied &= begun.finite
    state = state._replace(algo_state=done.algo_state)
    for part in parts:
        if part.after is not None:
            state, metrics = part.after(state, done, begun.at)
            of_parts |= metrics
    metrics = done.metrics | of_parts
    metrics |= rejection_metrics(recipe, batch, sampled.mask & sampled.where[..., None])
    metrics["no_signal"] = no_signal(recipe, batch)
    if recipe.curation is not None:  # which may drop every rollout
        reward = masking.masked_mean(batch.rewards, sampled.where)
        metrics["reward"] = jnp.where(jnp.any(batch.where), metrics["reward"], reward)
    algo_state = keep(applied, state.algo_state, before)
    return state._replace(algo_state=algo_state, step=state.step + 1), metrics


def _minibatches(update: Callable, carry: Any, batch: Batch, at: At):
    return run_passes(at.setup.passes, weighed(update, at), carry, batch)


def weighed(update: Callable, at: At) -> Callable:
    """``update`` on minibatches, whose weights add up as those of a batch do."""
    if at.setup.passes.minibatches == 1:
        return update
    return lambda carry, part, trains: update(carry, at.recipe.weigh(part), trains)
