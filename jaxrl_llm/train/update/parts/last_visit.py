"""Entries computed from the last visits to the prompts of a batch.

The policy before the step scores the responses that a memory recalls, over the full vocabulary.
"""

import math
from typing import Any

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.compose import bind
from jaxrl_llm.core.packing import rewritten_rows
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import POLICY, At, Part, Read, Setup, absent
from jaxrl_llm.train.update.rows import padded

_SOURCE = "last_visit"


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe with numbers computed from "last_visit"."""
    del setup
    if not recipe.computed_from(_SOURCE):
        return None
    return Part("last_visit", reads=_reads, amend=_amend)


def _reads(batch: Batch, at: At) -> tuple[Read, ...]:
    names = absent(batch, at.recipe, _SOURCE)
    for name in names:
        if rewritten_rows(batch.packing) is not None:
            raise ValueError(
                f"Recipe {at.recipe.name!r}: {name!r} recalls responses, but not their turns that "
                "the chat template or the environment rewrites."
            )
        if "prompt_ids" not in batch.extras:
            raise ValueError(
                f"Recipe {at.recipe.name!r}: the batch has no prompt_ids in its extras."
            )
    return tuple(Read(POLICY, {_logp(n): "logp"}, rows=bind(_rows, name=n)) for n in names)


def _logp(name: str) -> str:
    """The entry with the log-probabilities of recalled responses, which is not prepared."""
    return f"{name}_logp"


def _recalled(batch: Batch, state: TrainState, at: At, name: str) -> Any:
    memory: Any = at.recipe.computed_from(_SOURCE)[name]
    return memory.recall(
        state.algo_state.controllers[name],
        prompt_ids=batch.extras["prompt_ids"],
        tokens=batch.tokens,
        mask=batch.mask,
        where=batch.where,
    )


def _rows(batch: Batch, at: At, *, name: str) -> tuple[Batch, int]:
    """The recalled responses after the prompts of the batch."""
    recalled = _recalled(batch, at.state, at, name)
    cells = batch.prompt_tokens.shape[-1] + math.prod(recalled.tokens.shape[1:])
    rows, slices = padded(batch, at.slices, cells)
    rows = rows.replace(tokens=recalled.tokens, mask=recalled.mask, support=None, experts=None)
    return rows, slices


def _amend(state: TrainState, batch: Batch, at: At) -> tuple[TrainState, Batch]:
    extras, visits = dict[str, Array](batch.extras), dict(state.algo_state.controllers)
    memories: dict[str, Any] = absent(batch, at.recipe, _SOURCE)
    for name, memory in memories.items():
        recalled = _recalled(batch, state, at, name)
        extras[name], visits[name] = memory.update(extras.pop(_logp(name)), visits[name], recalled)
    algo_state = state.algo_state._replace(controllers=visits)
    return state._replace(algo_state=algo_state), batch.replace(extras=extras)
