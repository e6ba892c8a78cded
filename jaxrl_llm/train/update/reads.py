"""What models compute of a batch before its update: one forward pass for each model and rows."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_llm.core.axes import Array
from jaxrl_llm.recipes import AlgoState, Batch
from jaxrl_llm.train.batches import map_microbatches
from jaxrl_llm.train.models.denoising import tell_temperature
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import At, Part, Read

_FIELDS = ("old_logp", "behavior_logp", "ref_logp")


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
