"""The update of a batch, from top to bottom. A method's parts add to it at six places.

See :mod:`~jaxrl_llm.train.update.part` for the places and what their functions return.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core import masking, trees
from jaxrl_llm.core.axes import Array
from jaxrl_llm.recipes import AlgoState, Batch, Recipe
from jaxrl_llm.train.batches import map_microbatches, run_passes
from jaxrl_llm.train.denoising import tell_temperature
from jaxrl_llm.train.metrics import batch_metrics, no_signal, rejection_metrics
from jaxrl_llm.train.optimizer import apply_if_finite, keep, stays_finite
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.objective import policy_objective
from jaxrl_llm.train.update.part import At, Done, Objective, Part, Read

_FIELDS = ("old_logp", "behavior_logp", "ref_logp")


def update_batch(
    parts: Sequence[Part], state: TrainState, batch: Batch, at: At
) -> tuple[TrainState, dict[str, Array]]:
    """The state after the optimizer steps of a batch, and their metrics."""
    recipe, before, of_parts = at.recipe, state.algo_state, dict[str, Array]()
    sampled = recipe.responses(batch)
    for part in parts:
        if part.first is not None:
            state, batch, metrics = part.first(state, batch, at)
            of_parts |= metrics
    at = at._replace(state=state)
    batch, algo_state = prepare_batch(parts, state, batch, at)
    algo_state = next_state(recipe, algo_state, before)
    state, done = _optimizer_steps(parts, state, batch, algo_state, at)
    applied = done.metrics["updates"] + done.metrics.get("withheld", 0.0) > 0
    applied |= done.metrics["skipped"] == 0
    applied &= stays_finite(before, algo_state)
    state = state._replace(algo_state=algo_state)
    for part in parts:
        if part.after is not None:
            state, metrics = part.after(state, done, at)
            of_parts |= metrics
    metrics = done.metrics | of_parts
    metrics |= rejection_metrics(recipe, batch, sampled.mask & sampled.where[..., None])
    metrics["no_signal"] = no_signal(recipe, batch)
    if recipe.curation is not None:  # which may drop every rollout
        reward = masking.masked_mean(batch.rewards, sampled.where)
        metrics["reward"] = jnp.where(jnp.any(batch.where), metrics["reward"], reward)
    algo_state = keep(applied, state.algo_state, before)
    return state._replace(algo_state=algo_state, step=state.step + 1), metrics


def prepare_batch(
    parts: Sequence[Part], state: TrainState, batch: Batch, at: At
) -> tuple[Batch, AlgoState]:
    """The batch with all that is known before the update, and the recipe's next state."""
    state, batch = read_batch(parts, state, batch, at)
    return at.recipe.prepare(batch, state.algo_state, key=at.draw)


def read_batch(
    parts: Sequence[Part], state: TrainState, batch: Batch, at: At
) -> tuple[TrainState, Batch]:
    """The batch with the entries that its parts read and amend, and the state."""
    tell_temperature(batch, at.setup.scorer)
    batch = read_entries(parts, batch, at)
    for part in parts:
        if part.amend is not None:
            state, batch = part.amend(state, batch, at)
    return state, batch


def read_entries(parts: Sequence[Part], batch: Batch, at: At) -> Batch:
    """The batch with the entries that models compute: one forward pass for each model and rows."""
    for reads in merged_reads(parts, batch, at):
        batch = _read(reads, batch, at)
    return batch


def merged_reads(parts: Sequence[Part], batch: Batch, at: At) -> list[list[Read]]:
    """The forward passes before an update, each the reads that share it."""
    passes: dict[Any, list[Read]] = {}
    for part in parts:
        for read in () if part.reads is None else part.reads(batch, at):
            passes.setdefault((read.source, read.rows, read.call), []).append(read)
    return list(passes.values())


def _read(reads: list[Read], batch: Batch, at: At) -> Batch:
    """The batch with the entries of one forward pass, which have no gradient."""
    rows, call = reads[0].rows, reads[0].call
    scorer, params = reads[0].source.get(at)
    read, slices = (batch, at.slices) if rows is None else rows(batch, at)
    statistics = {name: f for each in reads for name, f in each.statistics.items()}
    of_hidden = tuple(name for each in reads for name in each.of_hidden)
    entries = {entry: name for each in reads for entry, name in each.entries.items()}

    def values(part: Batch) -> dict[str, Array]:
        if call is not None:
            return call(scorer, params, part)
        options = {"of_hidden": of_hidden} if of_hidden else {}
        scores = scorer(params, part, statistics, **options)
        found = {"logp": scores.logp, "entropy": scores.entropy} | scores.statistics
        return {entry: found[name] for entry, name in entries.items()}

    computed = jax.lax.stop_gradient(map_microbatches(values, read, slices))
    fields = {name: computed.pop(name) for name in _FIELDS if name in computed}
    return batch.replace(**fields).with_extras(computed)


def objective_of(parts: Sequence[Part], at: At, accumulated: int) -> Objective:
    """The loss of an optimizer step, as the parts change it."""
    objective = policy_objective(at.setup.scorer, at.recipe, at.state.base, accumulated)
    for part in parts:
        if part.wrap is not None:
            objective = part.wrap(objective, at)
    return objective


def _optimizer_steps(
    parts: Sequence[Part], state: TrainState, batch: Batch, algo_state: AlgoState, at: At
) -> tuple[TrainState, Done]:
    """The state with the policy after the optimizer steps of a prepared batch."""
    setup, passes = at.setup, at.setup.passes
    objective = objective_of(parts, at, passes.of(batch.packing).accumulated)
    finite = stays_finite(state.algo_state, algo_state)
    reads_logp = passes.updates == 1 or any(part.reads_logp for part in parts)

    def update(carry, part: Batch, trains: Array):
        trains &= jnp.any(part.weights != 0)
        loss, grads, logp, entropy, scale = objective.gradient(carry[0], part)
        carry, metrics = apply_if_finite(
            setup.optimizer, carry, loss, grads, scale=scale, finite=finite, there=trains
        )
        metrics |= batch_metrics(setup.recipe, logp, entropy, part)
        return carry, (metrics, logp if reads_logp else None)

    run: Callable = next((part.passes for part in parts if part.passes is not None), _minibatches)
    carry, (metrics, logp) = run(update, (state.params, state.opt_state), batch, at)
    state = state._replace(params=carry[0], opt_state=carry[1])
    return state, Done(batch, algo_state, logp, metrics)


def _minibatches(update: Callable, carry, batch: Batch, at: At):
    return run_passes(at.setup.passes, weighed(update, at), carry, batch)


def weighed(update: Callable, at: At) -> Callable:
    """``update`` on minibatches, whose weights add up as those of a batch do."""
    if at.setup.passes.minibatches == 1:
        return update
    return lambda carry, part, trains: update(carry, at.recipe.weigh(part), trains)


def next_state(recipe: Recipe, new: AlgoState, old: AlgoState) -> AlgoState:
    """The state that the recipe's Transforms return, as arrays.

    Raises:
      ValueError: If it has another structure, shape or dtype than the state before. It would be
        promoted or broadcast, and a resumed run, which begins with ``init``, could not read it.
    """
    name, new = f"Recipe {recipe.name!r}", trees.as_arrays(new)
    trees.check_alike(name, "a Transform's state before and after an update", old, new)
    rows = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
    for (path, before), after in rows:
        if before.dtype != after.dtype and jnp.result_type(before, after) != before.dtype:
            raise ValueError(
                f"{name}: {trees.path_str(path)} is {before.dtype} in the state of a Transform's "
                f"init and {after.dtype} after an update; both must be of one dtype."
            )
    return new
