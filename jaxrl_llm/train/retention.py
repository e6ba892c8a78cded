"""Which checkpoints of a run stay: the last few, and the best by a metric."""

import math
from collections.abc import Mapping, Sequence


def best_of(ratings: Mapping[int, float]) -> int | None:
    """The step of the highest rating, the latest of equal ones; what is no number does not count.

    Example:
      >>> best_of({2: 0.5, 4: 0.75, 6: 0.75, 8: float("nan")})
      6
    """
    known = [step for step, value in ratings.items() if math.isfinite(value)]
    return max(known, key=lambda step: (ratings[step], step), default=None)


def superseded(steps: Sequence[int], ratings: Mapping[int, float], *, keep: int) -> list[int]:
    """The steps that may go: all but the last ``keep`` and the best.

    Args:
      steps: Of the checkpoints, in order.
      ratings: How good they are, where that is known; more is better.
      keep: How many of the last stay, at least one.

    Example:
      >>> superseded([2, 4, 6, 8], {2: 0.5, 4: 0.25}, keep=2)
      [4]
    """
    best = best_of({step: ratings[step] for step in steps if step in ratings})
    return [step for step in steps[:-keep] if step != best]
