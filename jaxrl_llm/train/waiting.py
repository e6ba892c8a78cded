"""Rollouts that are finished and not yet trained on, as a checkpoint keeps them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.core.support import Support
from jaxrl_llm.data import Cursor
from jaxrl_llm.recipes import Batch
from jaxrl_llm.rewards.scoring import name_of
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.checkpoint.serialization import Extras
from jaxrl_llm.train.gather import Gathered, next_questions
from jaxrl_llm.train.setup import Parts
from jaxrl_llm.train.state import TrainState


def pack(parts: Parts, batches: Sequence[Gathered]) -> Extras | None:
    """Batches as what a checkpoint takes; None if there are none."""
    if not batches:
        return None
    names = [field.name for field in dataclasses.fields(Batch)]
    arrays, notes = [], []
    for each in batches:
        arrays.append(_given({name: getattr(each.batch, name) for name in names}))
        notes.append({k: x for k, x in each._asdict().items() if k != "batch"})
    return Extras(arrays, {"run": _marks(parts), "batches": notes})


def unpack(arrays: dict[str, Any], notes: dict[str, Any]) -> Gathered:
    """The inverse of :func:`pack`, of one batch.

    Raises:
      ValueError: If it does not fit together.
      TypeError: Likewise.
    """
    notes = notes | {"cursor": Cursor(*notes["cursor"])}
    if "support" in arrays:
        arrays = arrays | {"support": Support(**arrays["support"])}
    return Gathered(batch=Batch(**arrays).check(), **notes)


def restored(
    checkpoints: Checkpoints, parts: Parts, state: TrainState, say: Callable[[str], Any]
) -> list[Gathered]:
    """The batches that the checkpoint of a state kept, if this run would have made them.

    The first that it would not have made is left out with all behind it: their questions are
    sampled anew. It may be of another recipe or of weights that are now too old.

    Args:
      checkpoints: The one that was restored last; nothing if none was.
      parts: Of the run.
      state: As it was restored.
      say: Told how many are left out.
    """
    beside = checkpoints.restore_extras()
    if beside is None:
        return []
    given = beside.notes["batches"]
    found: list[Gathered] = []
    cursor = state.data_cursor
    for arrays, notes in zip(beside.arrays, given, strict=True):
        try:
            batch = unpack(arrays, notes)
        except (LookupError, TypeError, ValueError):
            break
        _, cursor = next_questions(parts, cursor)
        place = (int(state.step) + len(found), cursor)
        if (batch.number, batch.cursor) != place or not _fits(batch, beside.notes["run"], parts):
            break
        found.append(batch)
    if left := len(given) - len(found):
        say(
            f"{left} of {len(given)} batches of rollouts in the checkpoint do not fit this "
            "configuration; their questions are sampled anew."
        )
    return found


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """What is not None, a support as the dict that it is read back as."""
    plain = {k: _given(x._asdict()) if isinstance(x, Support) else x for k, x in fields.items()}
    return {name: x for name, x in plain.items() if x is not None}


def _fits(batch: Gathered, run: dict[str, str], parts: Parts) -> bool:
    """Whether a batch of that kind of run may be trained on in this one."""
    most = parts.config.asynchrony.max_staleness
    return run == _marks(parts) and most > 0 and batch.numbers["staleness_max"] <= most


def _marks(parts: Parts) -> dict[str, str]:
    """What a batch depends on beside its questions and the weights."""
    config = parts.config
    return {
        "recipe": repr(parts.recipe),
        "reward": name_of(config.reward),
        "sampling": repr(config.sampling),
    }
