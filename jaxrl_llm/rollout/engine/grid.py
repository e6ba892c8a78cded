"""Which waiting requests take which free slots: pure rules for the host.

The slots are a grid of R rows and W slots a row. A row holds the keys and values of one prompt, and
each of its slots one sibling at a time; a group with more siblings than slots streams through.
"""

from typing import NamedTuple

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.rollout.engine._inputs import counts, numbers


class Starts(NamedTuple):
    """Requests that start now, one entry each, siblings of a row together.

    Attributes:
      group: int ``[n]``, which group.
      sibling: int ``[n]``, which of its waiting requests: 0 is the next.
      row: int ``[n]``, the row of the slot.
      slot: int ``[n]``, the slot in its row.
      prefill: bool ``[n]``, True for the first entry of a row that has to take in the prompt.
    """

    group: np.ndarray
    sibling: np.ndarray
    row: np.ndarray
    slot: np.ndarray
    prefill: np.ndarray


def pick_next(waiting, expected, row_group, busy, *, max_new_groups: int | None = None) -> Starts:
    """Which waiting requests take which free slots of a grid whose rows hold one prompt each.

        1. free slots of a row under way:   siblings of the group that the row holds
        2. free rows:                       groups that have no row yet, longest expected first
        3. rows still free:                 a further row for groups with siblings left, one after
                                            the other, longest expected first

    A row is free when none of its slots is busy and its group has no sibling left for it. A prompt
    is therefore taken in once, and again only where a row would otherwise stay empty.

    Args:
      waiting: int ``[N]``, how many requests of each group have not started.
      expected: ``[N]``, how long the responses of each group are expected to be; any unit.
      row_group: int ``[R]``, the group whose prompt each row holds; -1 for none.
      busy: bool ``[R, W]``, True for slots that are decoding.
      max_new_groups: The most groups that may get their first row, such as what staleness leaves
        (``corrections.staleness_capacity``); None for any number.

    Returns:
      :class:`Starts`; empty arrays where nothing can start.

    Raises:
      TypeError: If counts are not integers or ``busy`` is not bool.
      ValueError: If shapes do not fit, a number is out of its range, or a slot is busy in a row
        that holds no prompt.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> busy = np.array([[True, False], [False, False]])
      >>> starts = jr.rollout.pick_next([1, 3, 2], [9, 5, 7], [0, -1], busy)
      >>> list(zip(starts.group.tolist(), starts.row.tolist(), starts.slot.tolist()))
      [(0, 0, 1), (2, 1, 0), (2, 1, 1)]

    References:
      None; ours.
    """
    function = "pick_next"
    waiting, expected, row_group, busy = _check_grid(function, waiting, expected, row_group, busy)
    checks.check_non_negative(function, max_new_groups=max_new_groups)
    left, blank = waiting.copy(), np.zeros(0, np.int64)
    parts = [Starts(blank, blank, blank, blank, blank.astype(bool))]

    def take(row: int, group: int, prefill: bool) -> None:
        slots = np.flatnonzero(~busy[row])[: left[group]]
        n = len(slots)
        siblings = waiting[group] - left[group] + np.arange(n)
        first = prefill & (np.arange(n) == 0)
        parts.append(Starts(np.full(n, group), siblings, np.full(n, row), slots, first))
        left[group] -= n

    for row in np.flatnonzero((row_group >= 0) & ~busy.all(axis=1)):
        take(row, row_group[row], prefill=False)
    taken = busy.any(axis=1)
    taken[np.concatenate([part.row for part in parts])] = True
    rows = np.flatnonzero(~taken).tolist()

    order = np.argsort(-expected, kind="stable")
    has_row = np.zeros(len(left), bool)
    has_row[row_group[taken]] = True
    groups = order[~has_row[order] & (left[order] > 0)][:max_new_groups]
    has_row[groups] = True
    while rows and (left[has_row] > 0).any():
        for group in groups[: len(rows)]:
            take(rows.pop(0), group, prefill=True)
        groups = order[has_row[order] & (left[order] > 0)]
    return Starts(*map(np.concatenate, zip(*parts, strict=True)))


def _check_grid(function: str, waiting, expected, row_group, busy):
    """The arrays of :func:`pick_next` as NumPy's, or an error that names what is wrong."""
    (waiting,) = counts(function, waiting=waiting)
    expected = numbers(function, expected=expected)
    row_group, busy = np.asarray(row_group), np.asarray(busy)
    checks.check_rank(function, 1, waiting=waiting, row_group=row_group)
    checks.check_same_shape(function, waiting=waiting, expected=expected)
    checks.check_bool(function, busy=busy)
    checks.check_rank(function, 2, busy=busy)
    checks.check_shape(function, "row_group", row_group, busy.shape[:1])
    if row_group.size:
        checks.check_integer(function, row_group=row_group)
        if not (row_group.min() >= -1 and row_group.max() < len(waiting)):
            raise ValueError(
                f"{function}: row_group must be -1 or one of the {len(waiting)} groups; got "
                f"{row_group.tolist()}."
            )
    for row in np.flatnonzero(busy.any(axis=1) & (row_group < 0))[:1]:
        raise ValueError(f"{function}: row {row} has a busy slot but holds no prompt.")
    return waiting, expected, row_group.astype(np.int64), busy
