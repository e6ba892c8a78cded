"""Rewards of completions, and records of rollouts as text.

Shared arguments: ``questions``, P questions; ``completions``, P groups of G texts.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from jaxrl_llm.core.runtime import processes, watchdog
from jaxrl_llm.data.questions import Question
from jaxrl_llm.environments.protocol import truncation_reward_of
from jaxrl_llm.rewards import BatchReward, Scores
from jaxrl_llm.rewards.answers import row_check
from jaxrl_llm.rewards.scoring import (
    OnError,
    check_arguments,
    grade,
    has_patience,
    join_scores,
    name_of,
)
from jaxrl_llm.rollout.episodes import EPISODES, EpisodeOptions
from jaxrl_llm.rollout.types import FAILED
from jaxrl_llm.train.data.reward_values import check_stated

T = TypeVar("T")

OnNonFinite = Literal["raise", "warn"]
"""Treatment of a response whose logits are non-finite: `ValueError`, or a warning."""


@dataclass(frozen=True)
class Grader:
    """The reward of a run.

    Attributes:
      reward: As in ``TrainConfig``.
      deadline: Seconds that one call may take; None for the default of that kind of reward.
      on_error: How a failed call is handled, as in :func:`~jaxrl_llm.rewards.score`.
    """

    reward: Any
    deadline: float | None = None
    on_error: OnError = "drop"

    def __call__(
        self, questions: Sequence[Question], completions: Sequence[Sequence[str]]
    ) -> Scores:
        """Rewards ``[P * G]`` of P groups of completions; every process grades its share.

        A group in which every call fails raises no error here:
        :func:`~jaxrl_llm.rewards.scoring.check_answered` checks the batch.

        Raises:
          RewardError: If the reward fails; the error names the prompt.
          ProcessError: If the reward failed in another process.
        """
        share = processes.portion(len(questions))
        local = processes.together(lambda: self.local(questions[share], completions[share]))
        return join_scores(local)

    def local(self, questions: Sequence[Question], completions: Sequence[Sequence[str]]) -> Scores:
        """Like ``__call__``, but this process grades all completions; empty for no groups."""
        if not questions:
            return Scores(np.zeros(0, np.float32), {}, np.zeros(0, bool))
        rows = [
            (q, text) for q, group in zip(questions, completions, strict=True) for text in group
        ]
        return grade(
            self.reward,
            [question.prompt.text for question, _ in rows],
            [text for _, text in rows],
            [question.prompt.metadata for question, _ in rows],
            deadline=self.deadline,
            on_error=self.on_error,
            watch=watchdog.SHARED,
        )


def check_finite(
    function: str,
    finish: np.ndarray,
    questions: Sequence[Question],
    *,
    on_non_finite: OnNonFinite = "raise",
) -> None:
    """Raises ValueError, or warns, if a response ended with non-finite logits.

    Args:
      function: Named in the message.
      finish: int ``[P, G]``, as in :class:`~jaxrl_llm.rollout.Rollout`.
      questions: See the module; the message names the first with such a response.
      on_non_finite: "raise" or "warn".
    """
    broken = (finish == FAILED).any(axis=-1)
    if not broken.any():
        return
    name = questions[int(np.argmax(broken))].prompt.name
    text = f"{function}: the logits of a response to prompt {name!r} are non-finite."
    if on_non_finite == "raise":
        raise ValueError(text)
    warnings.warn(text, stacklevel=3)


def sample_rows(
    questions: Sequence[Question],
    completions: Sequence[Sequence[str]],
    scores: Scores,
    messages: Sequence[Sequence[str | None]] | None = None,
) -> list[dict]:
    """One record per completion: id, prompt, text, reward, and ``reward/NAME`` for each detail.

    Details that are texts or lists of numbers are recorded as the reward returned them, or None if
    the call failed. The record of an episode has ``end`` and ``turn_rewards``, and ``error`` if the
    episode failed. ``messages`` replace the messages of the questions; None keeps the originals.
    """
    messages = [[None] * len(group) for group in completions] if messages is None else messages
    texts = [
        (question.prompt, text, message or question.prompt.text)
        for question, group, sent in zip(questions, completions, messages, strict=True)
        for text, message in zip(group, sent, strict=True)
    ]
    rewards = {"reward": scores.rewards}
    rewards |= {f"reward/{name}": x for name, x in scores.reward_components.items()}
    none = [None] * len(texts)
    ends = [
        {}
        if each is None
        else {"end": each.end, "turn_rewards": [turn.reward for turn in each.turns]}
        | ({"error": each.error} if each.error else {})
        for each in scores.details.get(EPISODES, none)
    ]
    return [
        {"id": prompt.id, "prompt": message, "completion": text}
        | {name: float(x[i]) for name, x in rewards.items()}
        | {
            f"reward/{name}": x[i].tolist() if isinstance(x[i], np.ndarray) else x[i]
            for name, x in scores.details.items()
            if name != EPISODES
        }
        | ends[i]
        for i, (prompt, text, message) in enumerate(texts)
    ]


def spread_rows(rows: Sequence[T], groups: int, count: int) -> list[T]:
    """At most ``count`` records of a batch, from as many groups as possible, in order.

    ``rows`` come from :func:`sample_rows`, group after group; all groups have equal size.

    Example:
      >>> spread_rows(["a0", "a1", "b0", "b1", "c0", "c1"], 3, 2)
      ['a0', 'b0']
      >>> spread_rows(["a0", "a1", "b0", "b1", "c0", "c1"], 3, 4)
      ['a0', 'a1', 'b0', 'c0']
    """
    size = len(rows) // groups
    each, rest = divmod(min(count, len(rows)), groups)
    places = {(group, member) for group in range(groups) for member in range(each)}
    places |= {(i * groups // rest, each) for i in range(rest)}
    return [rows[group * size + member] for group, member in sorted(places)]


def check_grading(config: Any, recipe: Any) -> None:
    """Raises unless a reward, an environment or the data give the rewards that a recipe takes.

    Raises as well if an option of grading has no effect.
    """
    if config.environment is None:
        _check_reward(config, recipe)
    else:
        _check_environment(config)
    if (graded := config.environment or config.reward) is not None:
        check_stated(recipe, graded)
    if config.data.unreadable != "refuse" and row_check(config.reward) is None:
        whose = "without a reward"
        if config.reward is not None:
            whose = f"with {name_of(config.reward)}, which has no check_row"
        raise ValueError(f"data: unreadable has no effect {whose}.")
    if recipe.needs.head:
        _check_head(config, recipe)


def _check_reward(config: Any, recipe: Any) -> None:
    """Raises unless a reward or the data grade the responses, and its options have an effect."""
    graded = callable(config.reward) or isinstance(config.reward, BatchReward)
    if not graded and not (config.reward is None and config.has_rewards):
        needs = ""
        if config.reward is None:
            name = recipe.name
            needs = f" The data give no rewards to recipe {name!r}; set reward or environment."
        raise TypeError(f"config: reward must be callable; got {config.reward!r}.{needs}")
    if callable(config.reward):
        check_arguments("config", config.reward)
    if config.reward is None and config.reward_deadline is not None:
        raise ValueError("config: reward_deadline has no effect without a reward.")
    if config.reward is None and config.reward_on_error != "drop":
        raise ValueError("config: reward_on_error has no effect without a reward.")
    if config.episodes != EpisodeOptions():
        raise ValueError("config: episodes has no effect without an environment.")
    if config.reward_deadline is not None and has_patience(config.reward):
        raise ValueError(
            "config: reward_deadline has no effect on a reward that has its own, such as a "
            "VerifierPool; set the deadline there."
        )


def _check_environment(config: Any) -> None:
    """Raises unless an environment can be played, and the options of a reward are unused."""
    env = config.environment
    if not all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        raise TypeError(f"config: environment must have reset and step; got {env!r}.")
    limit = truncation_reward_of(env)
    if limit is not None and not callable(limit):
        raise TypeError(
            f"config: truncation_reward of an environment must be a function; got {limit!r}."
        )
    if not isinstance(getattr(env, "tools", None), Sequence):
        raise TypeError(f"config: environment must have a sequence `tools`; got {env!r}.")
    for option, default, why in (
        ("reward", None, ", which gives the rewards"),
        ("reward_deadline", None, "; set episodes.seconds"),
        ("reward_on_error", "drop", ", since a failed episode is always left out of its batch"),
    ):
        if getattr(config, option) != default:
            raise ValueError(f"config: {option} has no effect with an environment{why}.")


def _check_head(config: Any, recipe: Any) -> None:
    """Raises ValueError for options that a reward model has no use for."""
    what = f"has no effect: recipe {recipe.name!r} trains a reward model, which writes no text"
    for option in ("reward", "environment"):
        if getattr(config, option) is not None:
            raise ValueError(f"config: {option} {what}.")
    if config.sampling.temperature != 1.0:
        raise ValueError(f"sampling: temperature {what}.")
