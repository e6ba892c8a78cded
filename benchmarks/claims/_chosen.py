"""The setting of a grid that is best on a third of the seeds, and the other seeds, which count.

A best setting at the end of its grid would say that the grid is too narrow: the run then fails, and
the grid is to be widened before anything is published.
"""

from collections.abc import Sequence

import numpy as np


def counted(seeds: int) -> slice:
    """The seeds that a measure is taken on: all but the first third."""
    return slice(seeds // 3, None)


def best(name: str, grid: Sequence[float], scores, *, quick: bool = False) -> int:
    """The place of the setting with the greatest mean score on the first third of the seeds.

    Args:
        name: What is chosen, for the error.
        grid: Its settings, in order.
        scores: ``[settings, seeds]``, greater is better.
        quick: Without the check of the ends, which few seeds may well prefer.
    """
    scores = np.asarray(scores, np.float64)
    return highest(name, grid, scores[:, : scores.shape[1] // 3].mean(-1), quick=quick)


def highest(name: str, grid: Sequence[float], means, *, quick: bool = False) -> int:
    """The place of the setting with the greatest mean score, ``means [settings]``; see the module.

    Raises:
      ValueError: If it is at an end of the grid.
    """
    # A setting whose runs diverge is never the best.
    place = int(np.argmax(np.where(np.isnan(means), -np.inf, means)))
    if not quick and place in (0, len(grid) - 1):
        raise ValueError(f"{name}: the best of {list(grid)} is {grid[place]:g}, at its end.")
    return place
