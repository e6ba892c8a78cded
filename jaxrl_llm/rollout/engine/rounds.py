"""Rounds of groups: rounds that end early, and bounds on the lead of sampling over training.

:func:`sample_round` runs a :class:`~jaxrl_llm.rollout.Generation`. The rest are pure rules for the
host, NumPy in and NumPy out. :func:`roll_budget` and :func:`usable` bound staleness by steps, with
``alpha``, the maximum lead of sampling in batches: 0 or more, fractions allowed;
``corrections.staleness_capacity`` bounds it by versions of the weights. Every function raises
TypeError for steps or versions that are not integers or a mask that is not bool, and ValueError
where shapes differ or a number is NaN or out of its range.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.rollout._inputs import check_sizes, counts, flags, numbers
from jaxrl_llm.rollout.engine.generation import Generation
from jaxrl_llm.rollout.engine.requests import FinishedGroup, Group

# The rounding error allowed in a product before it is rounded to an integer.
_ROUNDING = 1e-9


def sample_round(
    generation: Generation,
    buffered: deque[Group],
    new: Iterator[Group],
    *,
    n: int,
    target: int,
    accept: Callable[[FinishedGroup], bool] | None = None,
) -> Iterator[FinishedGroup]:
    """Yields the first ``n`` groups that finish and are accepted, with ``target`` in flight.

        1. start groups, those of ``buffered`` first, until started - rejected = target
        2. a finished group that is not accepted is dropped, and another one starts
        3. with n accepted, all others go to the end of ``buffered``, with their tokens so far

    The third step also happens if iteration stops early or an error ends it. So

        started = accepted + rejected + put back

    and nothing is sampled again: finished responses do not change, the others continue from their
    last token. Call ``generation.update`` with new weights between two rounds.

    Args:
      generation: A generation without work.
      buffered: Groups of earlier rounds, the oldest first; modified in place.
      new: Groups that have never started; only as many are consumed as start.
      n: How many groups to yield.
      target: How many groups are in flight at one time, at least ``n``.
      accept: Whether to train on a finished group; None accepts all.

    Returns:
      An iterator of finished groups, as they finish; fewer than ``n`` if groups run out.

    Raises:
      ValueError: Also if the engine cannot run a group; then only that group is lost.

    Example:
      >>> import collections, jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> engine = jr.rollout.make_engine(
      ...     model, rows=2, width=2, prompt_length=8, max_new_tokens=8, chunk=2)
      >>> generation = jr.rollout.Generation(engine, params, key=jax.random.key(0))
      >>> new = iter([jr.rollout.Group(id=i, prompt=[i + 1], requests=(2 * i, 2 * i + 1),
      ...                              max_new_tokens=8 - 3 * i) for i in range(3)])
      >>> buffered = collections.deque()
      >>> [x.id for x in jr.rollout.sample_round(generation, buffered, new, n=1, target=2)]
      [1]
      >>> [(x.id, [len(c) for c in x.partial.values()]) for x in buffered]
      [(0, [6, 6])]

    References:
      APRIL (arXiv:2509.18521), CODE reading. Its loop tokenizes the text again when a response
      continues; here token ids are kept. It drops accepted groups beyond ``n`` that finish at the
      same time; here they are put back and train in the next round.
    """
    check_sizes("sample_round", n=n, target=target)
    if target < n:
        raise ValueError(f"sample_round: target {target} is below n {n}.")
    accepted = 0
    try:
        in_flight = _start(generation, buffered, new, target)
        for done in generation:
            try:
                accepts = accept is None or accept(done)
            except BaseException:
                partial = {each.request: each for each in done.completions}
                buffered.append(done.group._replace(partial=partial))
                raise
            if accepts:
                accepted += 1
                yield done
                if accepted == n:
                    return
            else:
                in_flight -= 1
                in_flight += _start(generation, buffered, new, target - in_flight)
    finally:
        buffered.extend(generation.stop())


def _start(generation: Generation, buffered: deque[Group], new: Iterator[Group], most: int) -> int:
    """Submits up to ``most`` groups, buffered ones first, and returns their number."""
    for count in range(most):
        group = buffered.popleft() if buffered else next(new, None)
        if group is None:
            return count
        generation.submit(group)
    return most


def off_policy_fraction(versions, mask, *, current_version: int) -> float:
    """The share of tokens that older weights sampled, as in resumed responses.

        (unmasked tokens of versions from 0 to current_version - 1) / (unmasked tokens);  0 for none

    Args:
      versions: int ``[...]``, the version of the weights that sampled each token; negative where it
        is unknown or no weights of the run sampled, as in a demonstration.
      mask: bool ``[...]``, True = keep; what is masked is not read.
      current_version: The version that samples now.

    Returns:
      A number in [0, 1].

    Example:
      >>> import jaxrl_llm as jr
      >>> mask = [[True, True, True], [True, False, False]]
      >>> jr.rollout.off_policy_fraction([[3, 3, 4], [4, 0, 0]], mask, current_version=4)
      0.5

    References:
      APRIL (arXiv:2509.18521), whose authors report about 0.4.
    """
    versions = np.asarray(versions)
    if versions.size:
        checks.check_integer("off_policy_fraction", versions=versions)
    mask = flags("off_policy_fraction", versions, mask=np.asarray(mask))
    older = (versions >= 0) & (versions < current_version)
    return float(np.sum(mask & older) / max(np.sum(mask), 1))


def roll_budget(steps, *, batch_size: int, alpha: float) -> np.ndarray:
    """The number of prompts that may have started, for a bounded lead of sampling over training.

        ceil(alpha batch_size) + steps * batch_size;   0 before the first step

    A prompt may start while fewer prompts are running or have completed since the run began.
    Aborted prompts count as neither. ``alpha=0`` is synchronous.

    Args:
      steps: int ``[...]``, steps begun so far, the current one included.
      batch_size: Prompts a step trains on, above 0.
      alpha: See the module.

    Returns:
      int64 ``[...]``.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.roll_budget([0, 1, 2], batch_size=8, alpha=0.5).tolist()
      [0, 12, 20]

    References:
      ROLL's scheduler (RollArt, arXiv:2512.22560), CODE reading.
    """
    (steps,) = counts("roll_budget", steps=steps)
    check_sizes("roll_budget", batch_size=batch_size)
    _check_alpha("roll_budget", alpha)
    ahead = math.ceil(alpha * batch_size - _ROUNDING)
    return np.where(steps > 0, ahead + steps * batch_size, 0)


def usable(start_step, *, step: int, alpha: float, batch_size: int | None = None) -> np.ndarray:
    """The prompts that may still train, by the step in which they started.

        start_step >= step - ceil(alpha)

    With ``batch_size`` and a fractional ``alpha``, the oldest of these steps supplies at most
    ``floor(frac(alpha) batch_size)`` prompts, the first ones. Train on the oldest first. Once the
    batch of ``step`` is complete, prompts that are not usable at ``step + 1`` can be dropped, and
    aborted if they are running.

    Args:
      start_step: int ``[N]``, the step in which each prompt started.
      step: The step that trains.
      alpha: See the module.
      batch_size: Prompts a step trains on; None for no bound on the oldest step.

    Returns:
      bool ``[N]``.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.usable([2, 3, 3, 4], step=4, alpha=0.5, batch_size=2).tolist()
      [False, True, False, True]

    References:
      ROLL's scheduler (RollArt, arXiv:2512.22560), CODE reading.
    """
    (start,) = counts("usable", start_step=start_step)
    checks.check_rank("usable", 1, start_step=start)
    checks.check_non_negative("usable", step=step)
    _check_alpha("usable", alpha)
    if batch_size is not None:
        check_sizes("usable", batch_size=batch_size)
    oldest = step - math.ceil(alpha)
    keep = start >= oldest
    if batch_size is not None and alpha % 1:
        share = math.floor(alpha % 1 * batch_size + _ROUNDING)
        keep &= (start > oldest) | (np.cumsum(start == oldest) <= share)
    return keep


def _check_alpha(function: str, alpha: float) -> None:
    checks.check_non_negative(function, alpha=alpha)
    if not math.isfinite(alpha):
        raise ValueError(f"{function}: alpha must be finite; got {alpha}.")


def first_g_finished(finish_time, *, group_size: int) -> np.ndarray:
    """The first rollouts to finish, in groups that sample more than they train on.

        the group_size smallest finish times of each group;   ties by the lower index

    The others need not finish. This favors short responses, which is a bias.

    Args:
      finish_time: ``[..., M]``, when each rollout of a group finished; infinite if it did not.
      group_size: G, rollouts of a group that train, at most M.

    Returns:
      bool ``[..., M]``; fewer than G where fewer have finished.

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
