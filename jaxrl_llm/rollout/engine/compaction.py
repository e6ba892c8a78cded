"""Fewer slots for the tail: the last long responses decode together in a smaller grid.

A step costs nearly the same however many of its slots are active. When nothing waits any longer and
most slots are idle, those still active are copied into a grid a quarter the size, decode there, and
go back to where they were.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.axes import Array
from jaxrl_llm.rollout.engine.scheduler import Board, Place
from jaxrl_llm.rollout.slots import Slots


class Packing(NamedTuple):
    """Which slots go into a smaller grid.

    Attributes:
      rows: int32 ``[R']``, from which row each row of it comes.
      columns: int32 ``[R', W']``, from which of its columns each slot comes.
      keep: bool ``[R', W']``, False for slots that stay idle.
    """

    rows: Array
    columns: Array
    keep: Array


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


def pack(places: Iterable[Place], grid: tuple[int, int]) -> Packing | None:
    """How slots fit into a smaller grid, or None if they do not.

    Slots of one row may be split over several, each with a copy of the prompt.

    Args:
      places: Row and column of each slot.
      grid: Rows and width of the smaller grid.
    """
    rows, width = grid
    siblings: dict[int, list[int]] = {}
    for row, column in sorted(places):
        siblings.setdefault(row, []).append(column)
    parts = [
        (row, columns[i : i + width])
        for row, columns in siblings.items()
        for i in range(0, len(columns), width)
    ]
    if len(parts) > rows:
        return None
    packing = Packing(np.zeros(rows, np.int32), np.zeros(grid, np.int32), np.zeros(grid, bool))
    for i, (row, columns) in enumerate(parts):
        packing.rows[i] = row
        packing.columns[i, : len(columns)] = columns
        packing.keep[i, : len(columns)] = True
    return packing


def next_grid(board: Board, grid: tuple[int, int] | None) -> tuple[int, Packing | None]:
    """With how many active slots the next chunk may end early, and how they fit a smaller grid.

    Args:
      board: Who is where.
      grid: The smaller grid of :func:`smaller_grid`.
    """
    active = len(board.held)
    if board.crowded:
        return active - max(1, active // 4), None  # That many free slots are worth a look.
    if grid is None:
        return 0, None
    slots = grid[0] * grid[1]
    return (slots, None) if active > slots else (0, pack(board.held.values(), grid))


def decode_packed(decode: Callable[[Slots], Slots], slots: Slots, packing: Packing) -> Slots:
    """``decode`` of some slots in a smaller grid; the others stay as they are.

    Args:
      decode: Slots to slots.
      slots: The slots.
      packing: Which of them, from :func:`pack`.
    """
    rows, columns, keep = packing
    prompts = jax.tree.map(lambda x: x[rows], slots.prompts)
    own = tuple(slots)[1:]
    small = Slots(prompts, *jax.tree.map(lambda x: x[rows[:, None], columns], own))
    small = decode(small._replace(active=small.active & keep))
    # What is only there to fill the grid is sent beyond its end, and dropped.
    back = jnp.where(keep, rows[:, None], slots.active.shape[0])

    def put(x: Array, new: Array) -> Array:
        return x.at[back, columns].set(new, mode="drop", unique_indices=True)

    return Slots(slots.prompts, *jax.tree.map(put, own, tuple(small)[1:]))
