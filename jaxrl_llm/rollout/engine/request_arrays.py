"""What enters an engine's slots, as host arrays of the shape of its grid."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxrl_llm.rollout.engine.partial import resume_budget
from jaxrl_llm.rollout.engine.requests import Completion, Group
from jaxrl_llm.rollout.engine.scheduler import Begin, Place
from jaxrl_llm.rollout.slots import Requests, Tokens

if TYPE_CHECKING:
    from jaxrl_llm.rollout.engine.engine import Engine


def prompt_arrays(engine: "Engine", groups: Mapping[int, Group]) -> tuple[np.ndarray, ...]:
    """Prompts by row, as :func:`~jaxrl_llm.rollout.slots.put_prompts` takes them."""
    take = np.zeros(engine.rows, bool)
    tokens = np.full((engine.rows, engine.prompt_length), engine.pad_id, np.int32)
    length, adapter = np.ones(engine.rows, np.int32), np.zeros(engine.rows, np.int32)
    for row, group in groups.items():
        take[row], length[row], adapter[row] = True, len(group.prompt), group.adapter
        tokens[row, : len(group.prompt)] = group.prompt
    return take, tokens, length, adapter


def request_arrays(
    engine: "Engine", starts: Sequence[Begin], *, segment: int | None
) -> tuple[np.ndarray, Requests]:
    """Requests by slot, as :func:`~jaxrl_llm.rollout.slots.start` takes them.

    Args:
      engine: The engine.
      starts: What starts.
      segment: The most tokens that a response takes from here on.
    """
    grid = (engine.rows, engine.width)
    take, ids, limit = np.zeros(grid, bool), np.zeros(grid, np.int32), np.ones(grid, np.int32)
    settings = {k: np.full(grid, v, np.float32) for k, v in engine.draw.settings.items()}
    most = np.array([each.group.limits[each.request] for each in starts], np.int64)
    known = np.array([len(each.group.begun.get(each.request, ())) for each in starts], np.int64)
    ends = known + resume_budget(known, max_new_tokens=most, segment=segment)
    for (place, request, group, _), end in zip(starts, ends, strict=True):
        take[place], ids[place], limit[place] = True, request, end
        for option, value in group.group.settings.items():
            settings[option][place] = value
    return take, Requests(ids, limit, settings)


def begun_arrays(
    engine: "Engine", begun: Mapping[Place, Completion]
) -> tuple[np.ndarray, Tokens, np.ndarray]:
    """Responses by slot, as :func:`~jaxrl_llm.rollout.slots.resume` takes them."""
    grid = (engine.rows, engine.width)
    take, length = np.zeros(grid, bool), np.zeros(grid, np.int32)
    room = (*grid, engine.max_new_tokens)
    out = jax.tree.map(lambda x: np.zeros((*room, *x.shape), x.dtype), engine.draw.blank)
    for place, each in begun.items():
        take[place], length[place] = True, len(each)
        for buffer, new in zip(jax.tree.leaves(out), jax.tree.leaves(each.out), strict=True):
            buffer[place][: len(each)] = new
    return take, out, length


def row_arrays(engine: "Engine", rows: Iterable[int], sizes: Sequence[int]) -> list[np.ndarray]:
    """Rows as :func:`~jaxrl_llm.rollout.decode.fill_prompts` takes them.

    Args:
      engine: The engine.
      rows: The rows, distinct.
      sizes: How many of each part of the grid an array may hold, ascending; what is more than the
        last of them goes into further arrays.

    Returns:
      Arrays int32 ``[S, k]``, filled up with what is beyond the end; at least one.
    """
    size, most = engine.rows // engine.shards, sizes[-1]
    parts: list[list[int]] = [[] for _ in range(engine.shards)]
    for row in rows:
        parts[row // size].append(row % size)
    arrays = []
    for start in range(0, max(1, *map(len, parts)), most):
        taken = [part[start : start + most] for part in parts]
        longest = max(map(len, taken))
        array = np.full((engine.shards, min(n for n in sizes if n >= longest)), size, np.int32)
        for places, part in zip(array, taken, strict=True):
            places[: len(part)] = part
        arrays.append(array)
    return arrays


def place_array(engine: "Engine", place: Place) -> np.ndarray:
    """A slot as :func:`~jaxrl_llm.rollout.slots.copy_slot` takes it."""
    size = engine.rows // engine.shards
    array = np.tile(np.array([size, 0], np.int32), (engine.shards, 1))
    array[place[0] // size] = place[0] % size, place[1]
    return array
