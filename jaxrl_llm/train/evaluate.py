"""The mean reward on held-out questions with a 95% interval, greedy and sampled."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.data.questions import Question
from jaxrl_llm.rewards.scoring import OnError, check_answered
from jaxrl_llm.rollout.backends import texts_of
from jaxrl_llm.train.grading import Grader, sample_rows

_Z = 1.959963984540054  # 97.5% quantile of the normal distribution


class Accuracy(NamedTuple):
    """A mean reward and its 95% interval."""

    mean: float  # over all completions
    low: float
    high: float
    questions: int
    samples: int  # completions of each question
    binary: bool = False  # whether every reward is 0 or 1, so that the mean is an accuracy

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(mean: float, n: float) -> tuple[float, float]:
    """95% interval of a share, by Wilson's score method.

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),   z = 1.96

    Args:
      mean: p, the share of successes, in [0, 1].
      n: Number of independent trials; need not be an integer.

    Returns:
      Lower and upper end, within [0, 1].

    Raises:
      ValueError: If ``mean`` is not in [0, 1] or ``n`` is not above 0.

    Example:
      >>> low, high = wilson(0.5, 40)
      >>> round(low, 4), round(high, 4)
      (0.352, 0.648)

    References:
      Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    checks.check_positive("wilson", n=n)
    if not 0 <= mean <= 1:
        raise ValueError(f"wilson: mean must be in [0, 1]; got {mean:g}.")
    z2 = _Z * _Z
    center = mean + z2 / (2 * n)
    spread = _Z * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    low, high = (center - spread) / (1 + z2 / n), (center + spread) / (1 + z2 / n)
    return max(0.0, min(low, mean)), min(1.0, max(high, mean))


def accuracy(rewards: np.ndarray) -> Accuracy:
    """Mean reward of Q questions with S completions each, with a 95% interval.

    Completions of one question are alike, so they are not Q S independent trials. Rewards within
    [0, 1] take Wilson's interval with the effective number of trials

        n = p (1 - p) / Var(mean),   Var(mean) = var(means of questions) / Q,   Q <= n <= Q S

    and other rewards the normal interval of the means of questions.

    Args:
      rewards: float ``[Q, S]``.

    Example:
      >>> import numpy as np
      >>> print(accuracy(np.array([[1.0], [0.0], [1.0], [1.0]])))
      0.750 [0.301, 0.954]
    """
    checks.check_rank("accuracy", 2, rewards=rewards)
    Q, S = rewards.shape
    if not rewards.size:
        raise ValueError(f"accuracy: there are no rewards; got shape {rewards.shape}.")
    rewards = np.asarray(rewards, np.float64)
    mean, means = float(rewards.mean()), rewards.mean(axis=1)
    variance = float(means.var(ddof=1)) / Q if Q > 1 else 0.0
    if rewards.min() >= 0 and rewards.max() <= 1:
        n = mean * (1 - mean) / variance if variance > 0 else float(Q)
        low, high = wilson(mean, min(max(n, Q), Q * S))
    else:
        half = _Z * math.sqrt(variance)
        low, high = mean - half, mean + half
    return Accuracy(mean, low, high, Q, S, bool(np.isin(rewards, (0.0, 1.0)).all()))


def evaluate(
    sampler: Callable,
    params: ArrayTree,
    key: Array,
    questions: Sequence[Question],
    *,
    reward,
    tokenizer,
    batch_size: int,
    deadline: float | None = None,
    on_error: OnError = "drop",
) -> tuple[Accuracy, list[dict]]:
    """Mean reward of a policy on questions.

    Args:
      sampler: From ``rollout.make_sampler``; its group size is the number of completions.
      params: Parameters of the policy.
      key: A typed key; the same key gives the same evaluation.
      questions: From :func:`~jaxrl_llm.data.encode_prompts`.
      reward: As in training.
      tokenizer: Of the model.
      batch_size: Questions sampled at one time; the last batch is filled up, so that every batch
        has one shape.
      deadline: Seconds that one call of the reward may take, as :func:`~jaxrl_llm.rewards.score`.
      on_error: As there; a response whose call failed counts 0 here unless it is "raise".

    Returns:
      The mean reward, and one record a completion: prompt, completion, reward, id.

    Raises:
      RewardError: If the reward fails, or every call of it.
    """
    checks.check_positive("evaluate", batch_size=batch_size)
    if not questions:
        raise ValueError("evaluate: there are no questions.")
    rows, rewards, graded = [], [], []
    for start in range(0, len(questions), batch_size):
        part = list(questions[start : start + batch_size])
        filled = part + [part[-1]] * (batch_size - len(part))
        rollout = sampler(params, jax.random.fold_in(key, start), [q.tokens for q in filled])
        completions = texts_of(rollout, tokenizer.decode)[: len(part)]
        scores = Grader(reward, deadline, on_error)(part, completions)
        graded.append(scores)
        rewards.append(scores.rewards.reshape(len(part), -1))
        rows += sample_rows(part, completions, scores)
    check_answered(graded, " of the evaluation")
    return accuracy(np.concatenate(rewards)), rows
