"""How far sampling may run ahead of training, and what of it is then used: rules for the host.

NumPy in and NumPy out. The bound by versions of the weights is ``corrections.staleness_capacity``;
these are bounds by steps.
"""

import math

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.rollout.engine._inputs import counts, numbers

# What a product of two numbers may be off by, where it is rounded to a whole number.
_ROUNDING = 1e-9


def roll_budget(steps, *, batch_size: int, alpha: float) -> np.ndarray:
    """How many prompts may have started by now, for a bounded lead of sampling over training.

        ceil(alpha batch_size) + steps * batch_size;   0 before the first step

    Start a prompt while those under way and those completed, over the whole run, are fewer. Aborted
    ones count as neither. ``alpha=0`` is synchronous.

    Args:
      steps: int ``[...]``, steps begun so far, the current one included.
      batch_size: Prompts a step trains on, above 0.
      alpha: How far sampling may be ahead, in batches; not negative, need not be whole.

    Returns:
      int64 ``[...]``.

    Raises:
      TypeError: If steps are not integers.
      ValueError: If a number is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.roll_budget([0, 1, 2], batch_size=8, alpha=0.5).tolist()
      [0, 12, 20]

    References:
      ROLL's scheduler (RollArt, arXiv:2512.22560), CODE reading.
    """
    (steps,) = counts("roll_budget", steps=steps)
    checks.check_positive("roll_budget", batch_size=batch_size)
    checks.check_non_negative("roll_budget", alpha=alpha)
    ahead = math.ceil(alpha * batch_size - _ROUNDING)
    return np.where(steps > 0, ahead + steps * batch_size, 0)


def usable(start_step, *, step: int, alpha: float, batch_size: int | None = None) -> np.ndarray:
    """Which prompts may still train, by the step in which they started.

        start_step >= step - ceil(alpha)

    With ``batch_size``, and an ``alpha`` that is not whole, the oldest of these steps gives no more
    than ``floor(frac(alpha) batch_size)`` prompts, those that come first. Take the oldest first.
    What is not usable at ``step + 1`` can be dropped, and aborted if it is under way, once the
    batch of ``step`` is complete.

    Args:
      start_step: int ``[N]``, the step in which each prompt started.
      step: The step that trains.
      alpha: As in :func:`roll_budget`.
      batch_size: Prompts a step trains on; None for no bound on the oldest step.

    Returns:
      bool ``[N]``.

    Raises:
      TypeError: If steps are not integers.
      ValueError: If a number is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.usable([2, 3, 3, 4], step=4, alpha=0.5, batch_size=2).tolist()
      [False, True, False, True]

    References:
      ROLL's scheduler (RollArt, arXiv:2512.22560), CODE reading.
    """
    (start,) = counts("usable", start_step=start_step)
    checks.check_rank("usable", 1, start_step=start)
    checks.check_non_negative("usable", step=step, alpha=alpha)
    checks.check_positive("usable", batch_size=batch_size)
    oldest = step - math.ceil(alpha)
    keep = start >= oldest
    if batch_size is not None and alpha % 1:
        share = math.floor(alpha % 1 * batch_size + _ROUNDING)
        keep &= (start > oldest) | (np.cumsum(start == oldest) <= share)
    return keep


def first_g_finished(finish_time, *, group_size: int) -> np.ndarray:
    """Of the rollouts of a group, more than it needs, those that finished first.

        keep the group_size least finish times of each group;   of equal ones the earlier place

    The others need not be waited for. Short responses are favored by it, which is a bias.

    Args:
      finish_time: ``[..., M]``, when each rollout of a group finished; infinite if it did not.
      group_size: G, how many make up the group, at most M.

    Returns:
      bool ``[..., M]``; fewer than G where fewer have finished.

    Raises:
      ValueError: If ``group_size`` is out of its range or a time is NaN.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.first_g_finished([4.0, 1.0, float("inf"), 3.0], group_size=2).tolist()
      [False, True, False, True]

    References:
      ROLL's scheduler (RollArt, arXiv:2512.22560), redundant rollouts.
    """
    function = "first_g_finished"
    times = numbers(function, finish_time=finish_time)
    checks.check_min_rank(function, 1, finish_time=times)
    if not 1 <= group_size <= times.shape[-1]:
        raise ValueError(
            f"{function}: group_size must be from 1 to {times.shape[-1]}; got {group_size}."
        )
    order = np.argsort(times, axis=-1, kind="stable")
    return (np.argsort(order, axis=-1, kind="stable") < group_size) & np.isfinite(times)
