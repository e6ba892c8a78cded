"""A smaller grid for the last long responses.

A step costs nearly the same however many of its slots are active. When no response waits for a slot
and most slots are idle, those still active are copied into a grid a quarter the size, decode there,
and are copied back.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.scatter import scattered
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


def compact_slots(slots: Iterable[tuple[int, int]], grid: tuple[int, int]) -> Compaction | None:
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


def compact_active(active: Array, grid: tuple[int, int]) -> Compaction:
    """Where the active slots go in a smaller grid, as :func:`compact_slots`, under ``jit``.

    Args:
      active: bool ``[R, W]``; its slots fit: :func:`rows_for` is at most the rows of the grid.
      grid: Rows and width of the smaller grid.
    """
    (rows, width), (R, W) = grid, active.shape
    columns = jnp.argsort(~active, axis=1, stable=True).astype(jnp.int32)
    count = jnp.sum(active, axis=1, dtype=jnp.int32)
    blocks = -(-count // width)
    rank = jnp.arange(W)
    # Row and column of each slot in the smaller grid; beyond it, where writes are dropped.
    to = (jnp.cumsum(blocks) - blocks)[:, None] + rank // width
    to = jnp.where(rank < count[:, None], to, rows), jnp.broadcast_to(rank % width, (R, W))
    of = jnp.broadcast_to(jnp.arange(R, dtype=jnp.int32)[:, None], (R, W))
    return Compaction(
        rows=jnp.zeros(rows, jnp.int32).at[to[0]].set(of, mode="drop"),
        columns=jnp.zeros(grid, jnp.int32).at[to].set(columns, mode="drop"),
        used=jnp.zeros(grid, bool).at[to].set(True, mode="drop"),
    )


def rows_for(active: Array, width: int) -> Array:
    """The number of rows of ``width`` slots that active slots ``[R, W]`` need: one prompt each."""
    return jnp.sum(-(-jnp.sum(active, axis=1, dtype=jnp.int32) // width))


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

    def put(x: Array, new: Array, row: Array, column: Array) -> Array:
        return x.at[row, column].set(new, mode="drop", unique_indices=True)

    new = jax.tree.map(
        lambda x, new: scattered(put, x, new, back, columns), fields, tuple(small)[1:]
    )
    return Slots(slots.prompts, *new)
