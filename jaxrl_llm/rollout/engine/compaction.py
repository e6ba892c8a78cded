"""A smaller grid for the last long responses.

A step costs nearly the same however many of its slots are active. When nothing waits any longer and
most slots are idle, those still active are copied into a grid a quarter the size, decode there, and
are copied back.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import Array
from jaxrl_llm.rollout.engine.scheduler import Scheduler, SlotIndex
from jaxrl_llm.rollout.slots import Slots


class Compaction(NamedTuple):
    """Which slots go into a smaller grid of R' rows of W' slots.

    Attributes:
      rows: int32 ``[R']``, the row that each row of the smaller grid copies.
      columns: int32 ``[R', W']``, the column of that row that each slot copies.
      used: bool ``[R', W']``, False for slots that stay idle.
    """

    rows: Array
    columns: Array
    used: Array


def smaller_grid(rows: int, width: int) -> tuple[int, int] | None:
    """A grid ``(rows, width)`` with a quarter of the slots, or None if there are too few of them.

    It has no more rows than before, so that prompts take no more memory. A still smaller one would
    be another program to compile and gain little: below some sixteen slots a step costs what
    reading the weights does.
    """
    if rows * width < 16:
        return None
    slots = rows * width // 4
    rows = min(rows, slots)
    return rows, slots // rows


def compact_slots(slots: Iterable[SlotIndex], grid: tuple[int, int]) -> Compaction | None:
    """Where slots go in a smaller grid ``(rows, width)``, or None if it has not enough rows.

    Slots of one row may be split over several, each with a copy of the prompt.
    """
    rows, width = grid
    siblings: dict[int, list[int]] = {}
    for row, column in sorted(slots):
        siblings.setdefault(row, []).append(column)
    new_rows = [
        (row, columns[i : i + width])
        for row, columns in siblings.items()
        for i in range(0, len(columns), width)
    ]
    if len(new_rows) > rows:
        return None
    compaction = Compaction(
        np.zeros(rows, np.int32), np.zeros(grid, np.int32), np.zeros(grid, bool)
    )
    for i, (row, columns) in enumerate(new_rows):
        compaction.rows[i] = row
        compaction.columns[i, : len(columns)] = columns
        compaction.used[i, : len(columns)] = True
    return compaction


def plan_chunk(
    scheduler: Scheduler, small_grid: tuple[int, int] | None
) -> tuple[int, Compaction | None]:
    """The number of active slots at which the next chunk ends early, and its compaction."""
    slots_in_use = scheduler.active
    active = len(slots_in_use)
    # That many free slots are worth a refill, or the next turns of their responses.
    some = active - max(1, active // 4)
    if scheduler.has_waiting:
        return some, None
    turns = any(scheduler.groups[r].group.follow for r in slots_in_use)
    if small_grid is None:
        return some if turns else 0, None
    slots = small_grid[0] * small_grid[1]
    if active > slots:
        return some if turns else slots, None
    return some if turns else 0, compact_slots(slots_in_use.values(), small_grid)


def decode_compacted(
    decode: Callable[[Slots], Slots], slots: Slots, compaction: Compaction
) -> Slots:
    """``decode``, from slots to slots, of some slots in a smaller grid; the rest are unchanged."""
    rows, columns, used = compaction
    prompts = jax.tree.map(lambda x: x[rows], slots.prompts)
    fields = tuple(slots)[1:]
    small = Slots(prompts, *jax.tree.map(lambda x: x[rows[:, None], columns], fields))
    small = decode(small._replace(active=small.active & used))
    # Idle slots of the smaller grid get a row beyond the end, where writes are dropped.
    back = jnp.where(used, rows[:, None], slots.active.shape[0])

    def put(x: Array, new: Array) -> Array:
        return x.at[back, columns].set(new, mode="drop", unique_indices=True)

    return Slots(slots.prompts, *jax.tree.map(put, fields, tuple(small)[1:]))
