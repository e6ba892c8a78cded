"""pass@k and maj@k of evaluated questions, with bootstrap intervals over the questions.

Shared arguments:
  ``right``: ``[Q, S]``, bool or a share in [0, 1]: whether each of S completions is correct.
  ``where``: bool ``[Q, S]``, True for graded completions; None for all.
  ``k``: At most S. A question with fewer than k graded completions gives NaN.

All functions use NumPy in float64, on the host. All raise ValueError for a wrong shape or k.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.train.evaluation.intervals import wilson

RESAMPLES = 2000
_MOST = 1000  # completions, so that binomial coefficients are finite


class AtK(NamedTuple):
    """pass@k or maj@k of a set of questions, with a 95% interval."""

    name: str  # such as "pass@4"
    mean: float
    low: float
    high: float
    questions: int  # those with k graded completions

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(right: np.ndarray, k: int, *, where: np.ndarray | None = None) -> np.ndarray:
    """Unbiased estimate of the probability that at least one of k completions is correct.

        1 - C(n - c, k) / C(n, k)

    for n graded completions, c of them correct: the share of sets of k with a correct completion.

    Args:
      right, k, where: See the module; ``right`` is bool here.

    Returns:
      float64 ``[Q]``.

    Example:
      >>> import numpy as np
      >>> from jaxrl_llm.train import pass_at_k
      >>> pass_at_k(np.array([[True, False, False, False]]), 2).tolist()
      [0.5]

    References:
      Codex (arXiv:2107.03374).
    """
    right, where = _check("pass_at_k", right, k, where)
    checks.check_bool("pass_at_k", right=right)
    graded, wrong = where.sum(-1), (where & ~right).sum(-1)
    return np.array(
        [
            1.0 - math.comb(int(w), k) / math.comb(int(n), k) if n >= k else math.nan
            for n, w in zip(graded, wrong, strict=True)
        ]
    )


def majority_at_k(
    right: np.ndarray, answers: np.ndarray, k: int, *, where: np.ndarray | None = None
) -> np.ndarray:
    """The probability that the majority answer of k completions is correct.

        mean over all sets of k of [the most common answer is right]

    Ties are broken at random. A completion without an answer has no vote; a set without any answer
    is wrong. The result is exact for any k, by counting sets.

    Args:
      right, k, where: See the module.
      answers: int ``[Q, S]``: equal integers for equal answers to a question, below 0 for none.

    Returns:
      float64 ``[Q]``.

    Example:
      >>> import numpy as np
      >>> from jaxrl_llm.train import majority_at_k
      >>> right, answers = np.array([[True, True, False]]), np.array([[7, 7, 5]])
      >>> [majority_at_k(right, answers, k).round(3).tolist() for k in (1, 3)]
      [[0.667], [1.0]]

    References:
      Self-consistency (arXiv:2203.11171).
    """
    right, where = _check("majority_at_k", right, k, where)
    answers = np.asarray(answers)
    if answers.shape != right.shape or answers.dtype.kind not in "iu":
        raise ValueError(
            f"majority_at_k: answers must hold integers of shape {right.shape}, got "
            f"{answers.dtype} of shape {answers.shape}."
        )
    values = np.full(len(right), math.nan)
    for row, (is_right, answer, graded) in enumerate(zip(right, answers, where, strict=True)):
        total = int(graded.sum())
        if total < k:
            continue
        names, counts = np.unique(answer[graded & (answer >= 0)], return_counts=True)
        silent, votes = total - int(counts.sum()), counts.tolist()
        wins = 0.0
        for place, name in enumerate(names):
            share = float(np.mean(is_right[graded & (answer == name)]))
            if share:
                others = tuple(sorted(votes[:place] + votes[place + 1 :]))
                wins += share * _wins(votes[place], others, silent, k)
        values[row] = min(wins, 1.0)
    return values


@functools.lru_cache(maxsize=4096)
def _wins(count: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """The probability that an answer of `count` completions wins among k; ties break at random."""
    total, won = count + sum(others) + silent, 0.0
    for votes in range(1, min(count, k) + 1):
        # ways[t, n]: sets of n other completions in which t answers tie and none has more votes.
        ways = np.zeros((k // votes, k - votes + 1))
        ways[0] = [math.comb(silent, n) for n in range(k - votes + 1)]
        for other in others:
            more = np.zeros_like(ways)
            for n in range(min(votes, other + 1, ways.shape[1])):
                more[:, n:] += math.comb(other, n) * ways[:, : ways.shape[1] - n]
            if votes <= other and votes < ways.shape[1]:
                more[1:, votes:] += math.comb(other, votes) * ways[:-1, :-votes]
            ways = more
        drawn = ways[:, -1] / np.arange(1, len(ways) + 1)
        won += math.comb(count, votes) * drawn.sum()
    return won / math.comb(total, k)


def bootstrap(
    values: np.ndarray, *, resamples: int = RESAMPLES, key: jax.Array | None = None
) -> tuple[float, float]:
    """95% interval of a mean over questions, by the percentiles of resampled means.

    Args:
      values: float ``[Q]``; NaN entries are ignored.
      resamples: Number of sets of Q questions drawn with replacement.
      key: A typed key; None for a fixed key, so that equal values give equal intervals.

    Returns:
      Lower and upper bounds of the interval.

    Raises:
      ValueError: If there are no values, or ``resamples`` is not positive.

    Example:
      >>> import numpy as np
      >>> from jaxrl_llm.train import bootstrap
      >>> bootstrap(np.array([0.5, 0.5]))
      (0.5, 0.5)

    References:
      Efron, Bootstrap methods: another look at the jackknife, 1979.
    """
    checks.check_positive("bootstrap", resamples=resamples)
    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    if not values.size:
        raise ValueError("bootstrap: there are no values.")
    key = jax.random.key(0) if key is None else key
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
    means = [values[rng.integers(0, len(values), len(values))].mean() for _ in range(resamples)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def at_k(
    right: np.ndarray,
    ks: Sequence[int],
    *,
    answers: np.ndarray | None = None,
    where: np.ndarray | None = None,
    resamples: int = RESAMPLES,
) -> tuple[AtK, ...]:
    """pass@k for each k, and maj@k if there are answers.

    If all questions have one value, resamples are all equal, so the interval is Wilson's. A k for
    which no question has enough graded completions is left out, with a warning.

    Args:
      right, where: See the module; ``right`` is bool.
      ks: Values of k.
      answers: As in :func:`majority_at_k`; None for no maj@k.
      resamples: As in :func:`bootstrap`.

    Example:
      >>> import numpy as np
      >>> from jaxrl_llm.train.evaluation.at_k import at_k
      >>> print(*at_k(np.array([[True, False]] * 3), [1, 2]))
      0.500 [0.125, 0.875] 1.000 [0.439, 1.000]
    """
    results = []
    for k in ks:
        named = {f"pass@{k}": pass_at_k(right, k, where=where)}
        if np.isnan(named[f"pass@{k}"]).all():
            warnings.warn(
                f"pass@{k}: no question has {k} graded completions, since calls of the reward "
                "failed; it is left out.",
                stacklevel=2,
            )
            continue
        if answers is not None:
            named[f"maj@{k}"] = majority_at_k(right, answers, k, where=where)
        for name, values in named.items():
            enough = ~np.isnan(values)
            mean, count = float(values[enough].mean()), int(enough.sum())
            low, high = bootstrap(values, resamples=resamples)
            if low == high:  # Equal values: all resamples are equal.
                low, high = wilson(mean, count)
            results.append(AtK(name, mean, low, high, count))
    return tuple(results)


def check_k(ks: Sequence[int], samples: int, *, function: str = "pass_at_k") -> None:
    """Raises ValueError unless each k is a number of ``samples`` completions of a question.

    An evaluation calls it before it samples. ``function`` is named in the message.
    """
    for k in ks:
        if isinstance(k, bool) or k != int(k) or not 1 <= k <= samples:
            raise ValueError(
                f"{function}: k must be an integer from 1 to the {samples} completions of a "
                f"question; got {k!r}."
            )
    if ks and samples > _MOST:
        raise ValueError(f"{function}: a question has at most {_MOST} completions; got {samples}.")


def _check(
    function: str, right: np.ndarray, k: int, where: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    checks.check_rank(function, 2, right=right)
    right = np.asarray(right)
    where = np.ones(right.shape, bool) if where is None else np.asarray(where)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, right=right, where=where)
    check_k([k], right.shape[1], function=function)
    return right, where
