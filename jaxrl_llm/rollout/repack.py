"""Fewer slots for the tail: the last long responses go on in a smaller grid.

A step costs nearly the same however many of its slots are active. When nothing waits any longer and
most slots are idle, those still active move together into a grid a quarter the size.
"""

from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_llm.core.axes import Array
from jaxrl_llm.rollout.slots import Slots


def smaller_grids(rows: int, width: int) -> tuple[tuple[int, int], ...]:
    """The grids ``(rows, width)`` that a grid shrinks to, one after the other.

    Each has a quarter of the slots of the one before, and never more rows than it, so that the
    prompts take no more memory. Nothing is gained below four slots.
    """
    grids = []
    while rows * width >= 16:
        slots = rows * width // 4
        rows = min(rows, slots)
        width = slots // rows
        grids.append((rows, width))
    return tuple(grids)


def pack(active: Sequence[int], grid: tuple[int, int]) -> list[list[tuple[int, int]]] | None:
    """Which slots move into which row of a smaller grid, or None if they do not fit.

    Args:
      active: int ``[R]``, how many slots of each row have to move.
      grid: Rows and width of the smaller grid.

    Returns:
      For each row of the smaller grid, the row it comes from and which of the active slots there,
      counted from 0; a row's slots may be split over several rows, each with a copy of the prompt.
    """
    rows, width = grid
    packed = [
        [(row, i) for i in range(start, min(start + width, count))]
        for row, count in enumerate(active)
        for start in range(0, count, width)
    ]
    return packed if len(packed) <= rows else None


def repack(slots: Slots, rows: Array, columns: Array, keep: Array) -> Slots:
    """Slots of another grid, copied from these.

    Args:
      slots: The slots.
      rows: int32 ``[R']``, from which row each new row comes.
      columns: int32 ``[R', W']``, from which of its columns each new slot comes.
      keep: bool ``[R', W']``, False for new slots that stay idle.
    """
    prompts = jax.tree.map(lambda x: x[rows], slots.prompts)
    moved = jax.tree.map(lambda x: x[rows[:, None], columns], tuple(slots)[1:])
    packed = Slots(prompts, *moved)
    return packed._replace(active=packed.active & keep)


def indices(
    packed: list[list[tuple[int, int]]], grid: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of :func:`repack` for slots given by row and column, a list a new row."""
    rows = np.zeros(grid[0], np.int32)
    columns, keep = np.zeros(grid, np.int32), np.zeros(grid, bool)
    for new, places in enumerate(packed):
        rows[new] = places[0][0]
        for i, (_, column) in enumerate(places):
            columns[new, i], keep[new, i] = column, True
    return rows, columns, keep
