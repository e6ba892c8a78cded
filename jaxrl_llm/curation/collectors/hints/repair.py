"""A hint policy that repairs wrong rollouts: their right steps with a new continuation.

``threshold`` and ``metric`` are those of :mod:`~jaxrl_llm.curation.collectors.hints.policies`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.reasoning import Continuation
from jaxrl_llm.curation.collectors.hints.hinted import GuidedGroup, HintPolicy, read_text
from jaxrl_llm.curation.collectors.hints.policies import HintedPolicy, check_policy, of_role
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    DEMONSTRATION,
    JUDGE,
    Outcome,
    Request,
    Response,
    beginning,
    on_host,
)
from jaxrl_llm.curation.hints import first_bad_step

__all__ = ["repair"]

# The ``finish`` of a response that was cut, as in rollout.types.
_LENGTH = 0

FINISH = "{question}\n\nThis is a solution:\n{solution}\n\nWrite it in words of yours."


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Repair(HintedPolicy):
    """Made by :func:`repair`."""

    judge: Callable[[str, Sequence[str]], Sequence[float]] | None = None
    teacher: Callable[[str, str], str] | None = None
    steps: str = "right_steps"
    separator: str = "\n\n"
    score: float = 0.5
    least: int = 0
    most: int = 1
    column: str = "demonstration"
    max_new_tokens: int | None = dataclasses.field(default=None, repr=False)  # of the run

    name = "repair"

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(slots=True, splits_turns=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Repair":
        del group_size
        return dataclasses.replace(self, max_new_tokens=max_new_tokens)

    def check(self, row: Mapping[str, Any]) -> None:
        if self.teacher is None:
            read_text(self.name, row, self.column)

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        judged, plain = of_role(group, JUDGE), group.outcomes[0]
        if of_role(group, DEMONSTRATION):
            return ()
        if judged:
            # What was continued with the solution in the prompt trains after the plain one.
            new = zip(self._chosen(group), (x for _, x in judged if self._right(x)), strict=False)
            done = []
            for (i, length), outcome in new:
                end = outcome.responses[0]
                # A response with its reward has no components: it is graded again if there are any.
                reward = None if outcome.reward_components else float(outcome.rewards[0])
                joined = _joined(beginning(plain.responses[i], length), end.tokens[length:])
                done.append(joined._replace(finish=end.finish, reward=reward))
            return [Request(1, responses=(x,), sampled=False, role=DEMONSTRATION) for x in done]
        requests = []
        for i, length in self._chosen(group):
            begins = beginning(plain.responses[i], length)
            if self.teacher is None:
                text = FINISH.format(question=group.row["text"], solution=group.row[self.column])
                if not group.takes_text(text):
                    return ()
                responses = (begins,) if length else ()
                requests.append(Request(1, text=text, responses=responses, role=JUDGE))
                continue
            shown = group.decode([int(x) for x in begins.tokens])
            text = self.teacher(group.row["text"], shown)
            end = group.encode(Continuation(text) if length else text, ends=True)
            response = _joined(begins, np.int32(end))
            most = self.max_new_tokens
            if most is not None and len(response.tokens) > most:
                # It is complete, without the end that has no room.
                response = beginning(response, most)._replace(finish=_LENGTH)
            requests.append(Request(1, responses=(response,), sampled=False, role=DEMONSTRATION))
        return requests

    def _right(self, outcome: Outcome) -> bool:
        return bool(outcome.where[0] and self.rewards(outcome)[0] > self.threshold)

    def _chosen(self, group: GuidedGroup) -> list[tuple[int, int]]:
        """The rollouts that are repaired, with how many of their tokens stay.

        Once their continuations are known, those whose continuation is right.
        """
        plain = group.outcomes[0]
        wrong = np.flatnonzero(plain.where & (self.rewards(plain) <= self.threshold))
        places = []
        for i in wrong:
            parts = plain.texts[i].split(self.separator)
            # How many steps there are before the first wrong one.
            if self.judge is not None:
                scores = np.asarray(self.judge(group.row["text"], parts), np.float32)
                if scores.shape != (len(parts),):
                    raise ValueError(
                        f"{self!r}: the judge must return {len(parts)} scores; got shape "
                        f"{scores.shape}."
                    )
                with on_host():
                    right = int(first_bad_step(scores, threshold=self.score))
            elif self.steps in plain.reward_components:
                known = plain.reward_components[self.steps][i]
                right = max(int(known), 0) if np.isfinite(known) else 0
            else:
                raise ValueError(
                    f"{self!r}: the reward must return a mapping with {self.steps!r}, how many "
                    "steps come before the first wrong one, or the policy have a judge."
                )
            if self.least <= right < len(parts):
                before = self.separator.join(parts[:right]) + (self.separator if right else "")
                places.append((-right, int(i), len(before)))
        chosen = []
        for _, i, characters in sorted(places)[: self.most]:
            # Halving finds how many first tokens are at most so many characters.
            tokens = [int(x) for x in plain.responses[i].tokens]
            low, high = 0, len(tokens)
            while low < high:
                middle = (low + high + 1) // 2
                if len(group.decode(tokens[:middle])) <= characters:
                    low = middle
                else:
                    high = middle - 1
            if self.max_new_tokens is None or low < self.max_new_tokens:  # room to go on
                chosen.append((i, low))
        if judged := of_role(group, JUDGE):
            pairs = zip(chosen, judged, strict=True)
            chosen = [place for place, (_, outcome) in pairs if self._right(outcome)]
        return chosen

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        row = [(group.numbers[0], member) for member in range(group.group_size)]
        pairs = zip(self._chosen(group), of_role(group, DEMONSTRATION), strict=False)
        for (i, _), (number, outcome) in pairs:
            if self._right(outcome):
                row[i] = (number, 0)
        return row


def _joined(first: Response, tokens: np.ndarray) -> Response:
    """A response and tokens of another writer after it, of which nothing is known."""
    n, m = len(first.tokens), len(tokens)

    def known(name: str, absent: Any, dtype: Any) -> np.ndarray:
        x = getattr(first, name)
        x = np.full(n, absent, dtype) if x is None else x
        return np.concatenate([np.asarray(x, dtype), np.full(m, absent, dtype)])

    return Response(
        np.concatenate([first.tokens, tokens]).astype(np.int32),
        behavior_logp=known("behavior_logp", np.nan, np.float32),
        model_logp=known("model_logp", np.nan, np.float32),
        version=known("version", -1, np.int32),
    )


def repair(
    *,
    judge: Callable[[str, Sequence[str]], Sequence[float]] | None = None,
    teacher: Callable[[str, str], str] | None = None,
    steps: str = "right_steps",
    separator: str = "\n\n",
    score: float = 0.5,
    least: int = 0,
    most: int = 1,
    column: str = "demonstration",
    threshold: float = 0.0,
    metric: str | None = None,
) -> HintPolicy:
    """Rewrites a wrong rollout from its first wrong step on, and uses the result if it is right.

        repaired = tokens before the first wrong step + continuation, replacing the rollout

    The policy's tokens have log-probabilities; the continuation has none and version -1. The
    continuation is the teacher's, or the policy's with the solution in its prompt.

    Args:
      judge: ``(question, steps) -> scores``, of a process reward model; None to read ``steps``. It
        is called several times with the same arguments and must be deterministic.
      teacher: ``(question, beginning) -> continuation``; None for the policy itself.
      steps: The reward component that counts the steps before the first wrong one.
      separator: Text between steps.
      score: Smallest score of a right step; only with a judge.
      least: Minimum right steps of a rollout to repair.
      most: Maximum repairs per group, of the rollouts with the most right steps.
      column: The column with the solution that the policy sees.
      threshold, metric: See the module.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      TypeError: If ``judge`` or ``teacher`` is not a function.
      ValueError: If a number is out of its range; in a run, if the reward lacks the component.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.repair(most=2)
      repair(most=2)

    References:
      SCOPE (arXiv:2602.24110), ABSTRACT reading: the choice and number of repaired rollouts are
      ours, and so is a policy that continues with the solution in its prompt.
    """
    name = "repair"
    for option, function in {"judge": judge, "teacher": teacher}.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name}: {option} must be a function; got {function!r}.")
    checks.check_non_negative(name, finite=True, least=least)
    checks.check_positive(name, finite=True, most=most)
    if not separator:
        raise ValueError(f"{name}: separator must not be empty.")
    checks.check_real(name, finite=True, score=score)
    check_policy(name, threshold, metric)
    return _Repair(
        judge=judge,
        teacher=teacher,
        steps=steps,
        separator=separator,
        score=score,
        least=int(least),
        most=int(most),
        column=column,
        threshold=threshold,
        metric=metric,
    )
