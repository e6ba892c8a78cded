"""Rollouts that are cut short and go on in a later round: pure rules for the host.

NumPy in and NumPy out. What a loss makes of tokens of several versions of the weights is the
business of ``corrections``.
"""

from typing import NamedTuple

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.rollout.engine._inputs import counts, flags, numbers
from jaxrl_llm.rollout.types import LENGTH, STOP, UNFINISHED


def pick_groups(buffered, new, *, in_flight: int, target: int) -> np.ndarray:
    """Which groups to start: those that were cut short first, then new ones.

        the first max(target - in_flight, 0) of: buffered groups, oldest first; new groups

    Call it at the start of a round, and again when a group was rejected. More groups are in flight
    than a round needs (32 and 64, say), so that none waits for the slowest.

    Args:
      buffered: int ``[B]``, groups cut short in earlier rounds, in the order in which they came
        back.
      new: int ``[N]``, groups that never started, in the order of the data.
      in_flight: How many were started in this round, less those rejected; finished ones count.
      target: How many should be in flight.

    Returns:
      int64 ``[n]``: entries of ``buffered``, then of ``new``.

    Raises:
      TypeError: If groups are not integers.
      ValueError: If a number is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.pick_groups([7, 3], [10, 11, 12], in_flight=1, target=4).tolist()
      [7, 3, 10]

    References:
      APRIL (arXiv:2509.18521), CODE reading. The released loop takes ``target`` groups at a time,
      whenever fewer are in flight than the round needs.
    """
    checks.check_non_negative("pick_groups", in_flight=in_flight, target=target)
    queue = np.concatenate(counts("pick_groups", buffered=buffered, new=new))
    return queue[: max(target - in_flight, 0)]


class Split(NamedTuple):
    """Places of groups at the end of a round.

    Attributes:
      train: int ``[k]``, the groups that train, in the order in which they finished.
      recycle: int ``[m]``, those that go back to the buffer whole, in the order of their start.
    """

    train: np.ndarray
    recycle: np.ndarray


def split_round(finish_time, accepted, *, n: int) -> Split:
    """Ends a round: the first ``n`` groups that are good train, all others that may still be go on.

        train   = the n groups that finished first among those accepted
        recycle = all that did not finish, and what was accepted beyond n
        the rest finished and was rejected: it is dropped

    A group is finished when all its rollouts are. A recycled group keeps the tokens of every
    rollout and the rewards of those that ended; nothing of it is sampled again.

    Args:
      finish_time: ``[N]``, when each group of the round finished, in any unit; infinite if it did
        not.
      accepted: bool ``[N]``, True for groups worth training on (such as rewards that differ); read
        of finished ones only.
      n: How many groups a round trains on.

    Returns:
      :class:`Split`; ``train`` is shorter than ``n`` if not enough were accepted.

    Raises:
      TypeError: If ``accepted`` is not bool.
      ValueError: If shapes differ, a time is NaN or ``n`` is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> inf, yes = float("inf"), True
      >>> split = jr.rollout.split_round([5.0, inf, 2.0, 3.0], [yes, yes, yes, False], n=1)
      >>> split.train.tolist(), split.recycle.tolist()
      ([2], [0, 1])

    References:
      APRIL (arXiv:2509.18521), CODE reading. The released loop drops groups beyond ``n`` that
      finish at the same moment; here they train in the next round.
    """
    times = numbers("split_round", finish_time=finish_time)
    checks.check_rank("split_round", 1, finish_time=times)
    checks.check_non_negative("split_round", n=n)
    accepted = flags("split_round", times, accepted=np.asarray(accepted))
    done = np.isfinite(times)
    order = np.argsort(times, kind="stable")
    train = order[(done & accepted)[order]][:n]
    waits = ~done | accepted
    waits[train] = False
    return Split(train, np.flatnonzero(waits))


def resume_budget(length, *, max_new_tokens, segment: int | None = None) -> np.ndarray:
    """How many tokens a rollout may take when it goes on.

        max(max_new_tokens - length, 0), at most ``segment``

    Where it is 0 the rollout has ended by its length. With a ``segment``, a long response is made
    over several rounds, a part in each.

    Args:
      length: int ``[...]``, tokens it has.
      max_new_tokens: int or ``[...]``, the most it may have.
      segment: The most it may take in one round, above 0; None for no such limit.

    Returns:
      int64 ``[...]``.

    Raises:
      TypeError: If counts are not integers.
      ValueError: If a count is negative, shapes do not fit or ``segment`` is not above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.resume_budget([0, 90, 100], max_new_tokens=100, segment=25).tolist()
      [25, 10, 0]

    References:
      APRIL (arXiv:2509.18521); UloRL (arXiv:2507.19766) for segments, of which it has 8.
    """
    function = "resume_budget"
    length, limit = counts(function, length=length, max_new_tokens=max_new_tokens)
    if limit.shape not in ((), length.shape):
        raise ValueError(
            f"{function}: max_new_tokens must be one number or have the shape of length "
            f"{length.shape}; got {limit.shape}."
        )
    checks.check_positive(function, segment=segment)
    left = np.maximum(limit - length, 0)
    return left if segment is None else np.minimum(left, segment)


def segment_status(length, stopped, *, max_new_tokens: int) -> np.ndarray:
    """What has become of each rollout after a segment: ended, cut off, or to be continued.

        STOP where it stopped;  else LENGTH where length >= max_new_tokens;  else UNFINISHED

    The unfinished go on in the next round, before new prompts start; only the others train.

    Args:
      length: int ``[...]``, tokens it has over all its segments.
      stopped: bool ``[...]``, True where the last token is a stop token.
      max_new_tokens: The most it may have, over all segments.

    Returns:
      int32 ``[...]``, values of ``Rollout.finish``: 1 stopped, 0 cut off, 4 unfinished.

    Raises:
      TypeError: If counts are not integers or ``stopped`` is not bool.
      ValueError: If shapes differ, or a count is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> stopped = [False, True, False]
      >>> jr.rollout.segment_status([16, 16, 64], stopped, max_new_tokens=64).tolist()
      [4, 1, 0]

    References:
      UloRL (arXiv:2507.19766), PAPER reading.
    """
    (length,) = counts("segment_status", length=length)
    checks.check_positive("segment_status", max_new_tokens=max_new_tokens)
    stopped = flags("segment_status", length, stopped=np.asarray(stopped))
    ended = np.where(length >= max_new_tokens, LENGTH, UNFINISHED)
    return np.where(stopped, STOP, ended).astype(np.int32)


def off_policy_fraction(versions, mask, *, current_version: int) -> float:
    """The share of tokens that older weights sampled, as those of resumed rollouts are.

        (kept tokens of versions below current_version) / (kept tokens);   0 for none

    Args:
      versions: int ``[...]``, the version of the weights that sampled each token.
      mask: bool ``[...]``, True = keep; what is masked is not read.
      current_version: The version that samples now.

    Returns:
      A number in [0, 1].

    Raises:
      TypeError: If versions are not integers or ``mask`` is not bool.
      ValueError: If the shapes differ.

    Example:
      >>> import jaxrl_llm as jr
      >>> mask = [[True, True, True], [True, False, False]]
      >>> jr.rollout.off_policy_fraction([[3, 3, 4], [4, 0, 0]], mask, current_version=4)
      0.5

    References:
      APRIL (arXiv:2509.18521), whose authors find about 0.4.
    """
    versions = np.asarray(versions)
    if versions.size:
        checks.check_integer("off_policy_fraction", versions=versions)
    mask = flags("off_policy_fraction", versions, mask=np.asarray(mask))
    return float(np.sum(mask & (versions < current_version)) / max(np.sum(mask), 1))
