"""Hint policies that sample a failed group repeatedly: one message after another.

``messages``, ``threshold`` and ``metric`` are those of
:mod:`~jaxrl_llm.curation.collectors.hints.policies`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.runtime.files import parse_json
from jaxrl_llm.curation.collectors.hints.hinted import (
    HINT,
    GuidedGroup,
    HintPolicy,
    check_template,
    read_column,
)
from jaxrl_llm.curation.collectors.hints.policies import (
    HintedPolicy,
    Messages,
    check_policy,
    no_reward,
    of_role,
)
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    DEMONSTRATION,
    HINTED,
    JUDGE,
    Request,
    Response,
    on_host,
)
from jaxrl_llm.curation.hints import distilled_where, hint_slots

__all__ = ["ladder", "parse_hints", "rethink", "self_hints"]

ASK_FOR_HINTS = (
    "{question}\n\nSolution: {solution}\n\nWrite three hints, each more detailed, none with the "
    "answer, as JSON with the keys level_1, level_2 and level_3."
)
DECOMPOSE = (
    "{question}\n\nDivide this problem into smaller problems, solve each of them, and put the "
    "results together."
)
REFINE = (
    "{question}\n\nThis solution is wrong:\n{answer}\n\nExplain what is wrong with it, and solve "
    "the problem."
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Ladder(HintedPolicy):
    """Made by :func:`ladder`."""

    messages: Messages
    plain: int = 0

    name = "ladder"

    @property
    def needs(self) -> Needs:
        return Needs(sends_text=True, mixes_texts=self.plain > 0, grades_apart=self.plain > 0)

    def check(self, row: Mapping[str, Any]) -> None:
        self.messages(row)

    def texts(self, group: GuidedGroup) -> Sequence[str]:
        """The messages that there are for a group, and room."""
        return [text for text in self.messages(group.row) if group.takes_text(text)]

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        hinted = of_role(group, HINTED)
        latest = hinted[-1][1] if hinted else group.outcomes[0]
        if self.plain >= group.group_size or not self.failed(latest):
            return ()
        texts = self.texts(group)[len(hinted) : len(hinted) + 1]
        size = group.group_size - self.plain
        return [Request(size, text=text, role=HINTED) for text in texts]

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        hinted, size = of_role(group, HINTED), group.group_size
        plain = min(self.plain, size)
        with on_host():
            trigger = np.asarray(bool(hinted))
            slots = np.asarray(hint_slots(trigger, group_size=size, plain=plain))
        first, last = group.numbers[0], hinted[-1][0] if hinted else group.numbers[0]
        return [(last, g - plain) if slots[g] else (first, g) for g in range(size)]


def ladder(
    messages: Messages, *, plain: int = 0, threshold: float = 0.0, metric: str | None = None
) -> HintPolicy:
    """Tries one message after another until a rollout is right; the last group is the row.

    Args:
      messages: See the module.
      plain: Rollouts of the plain group that remain in the row; the rest are sampled again.
      threshold, metric: See the module.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      TypeError: If ``messages`` is not a function.
      ValueError: If ``plain`` is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.ladder(jr.bind(jr.curation.tier_messages, most=1), plain=1)  # NuRL
      ladder(tier_messages(most=1), plain=1)

    References:
      NuRL (arXiv:2509.25666) with one message and ``plain=1``; GHPO (arXiv:2507.10628) with
      :func:`~jaxrl_llm.curation.share_messages`, which compares only the accuracy.
    """
    if not callable(messages):
        raise TypeError(f"ladder: messages must be a function; got {messages!r}.")
    checks.check_non_negative("ladder", finite=True, plain=plain)
    check_policy("ladder", threshold, metric)
    return _Ladder(messages=messages, plain=int(plain), threshold=threshold, metric=metric)


# Hints that the model writes


def parse_hints(text: str, *, levels: int = 3) -> tuple[str, ...]:
    """Hints of a JSON object with the keys ``level_1``, ``level_2`` and so on; none without them.

    The object may occur anywhere in the text.

    Args:
      text: The model's reply.
      levels: Number of keys to read.

    Returns:
      The nonempty hints, weakest first.

    Raises:
      ValueError: If ``levels`` is not above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.parse_hints('Here: {"level_1": "add", "level_2": "6 + 36"}')
      ('add', '6 + 36')

    References:
      The format is that of SAGE (arXiv:2602.03143), whose code also reads JSON with comments.
    """
    checks.check_positive("parse_hints", levels=levels)
    start, end = text.find("{"), text.rfind("}")
    if not 0 <= start < end:
        return ()
    try:
        value = parse_json(text[start : end + 1])
    except ValueError:
        return ()
    if not isinstance(value, dict):
        return ()
    hints = [value.get(f"level_{level + 1}") for level in range(levels)]
    return tuple(hint.strip() for hint in hints if isinstance(hint, str) and hint.strip())


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _SelfHints(_Ladder):
    """Made by :func:`self_hints`."""

    messages: Messages = ()  # type: ignore[assignment]
    parse: Callable[[str], Sequence[str]] = parse_hints
    column: str = "demonstration"
    question: str = ASK_FOR_HINTS
    template: str = HINT
    attempts: int = 3

    name = "self_hints"

    def check(self, row: Mapping[str, Any]) -> None:
        read_column(self.name, row, self.column)

    def texts(self, group: GuidedGroup) -> Sequence[str]:
        written = [self.parse(outcome.texts[0]) for _, outcome in of_role(group, JUDGE)]
        hints = next((tuple(each) for each in written if each), ())
        texts = (self.template.format(question=group.row["text"], hint=hint) for hint in hints)
        return [text for text in texts if group.takes_text(text)]  # the policy wrote them

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        asked = len(of_role(group, JUDGE))
        if self.texts(group) or not self.failed(group.outcomes[0]) or asked == self.attempts:
            return super().ask(group)
        row = group.row
        text = self.question.format(question=row["text"], solution=row[self.column])
        if not group.takes_text(text):
            return ()
        return [Request(1, text=text, role=JUDGE, reward=no_reward)]


def self_hints(
    *,
    parse: Callable[[str], Sequence[str]] = parse_hints,
    column: str = "demonstration",
    question: str = ASK_FOR_HINTS,
    template: str = HINT,
    attempts: int = 3,
    plain: int = 0,
    threshold: float = 0.0,
    metric: str | None = None,
) -> HintPolicy:
    """:func:`ladder` with hints that the policy itself writes when a group has failed.

    It sees the solution and writes all levels at once; if they cannot be parsed, it is asked again.
    A group without hints does not change.

    Args:
      parse: ``text -> hints``, weakest first; none if they cannot be parsed.
      column: The column with the solution.
      question: The message to the model, with ``{question}`` and ``{solution}``.
      template: The message with a hint, with ``{question}`` and ``{hint}``.
      attempts: Maximum number of attempts.
      plain, threshold, metric: As in :func:`ladder`.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      TypeError: If ``parse`` is not a function.
      ValueError: If a template or a number is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.self_hints(attempts=1)
      self_hints(attempts=1)

    References:
      SAGE (arXiv:2602.03143) and its released code; the wording of the messages is ours.
    """
    name = "self_hints"
    if not callable(parse):
        raise TypeError(f"{name}: parse must be a function; got {parse!r}.")
    check_template(name, question, "question", "solution")
    check_template(name, template, "question", "hint")
    checks.check_count(name, attempts=attempts)
    checks.check_non_negative(name, finite=True, plain=plain)
    check_policy(name, threshold, metric)
    return _SelfHints(
        parse=parse,
        column=column,
        question=question,
        template=template,
        attempts=attempts,
        plain=int(plain),
        threshold=threshold,
        metric=metric,
    )


# Two ways of thinking again


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Rethink(_Ladder):
    """Made by :func:`rethink`."""

    messages: Messages = ()  # type: ignore[assignment]
    decompose: str = DECOMPOSE
    refine: str = REFINE
    distill: bool = True

    name = "rethink"

    @property
    def needs(self) -> Needs:
        # Demonstrations train after the plain prompt.
        return super().needs | Needs(mixes_texts=self.distill)

    def width(self, group_size: int) -> int:
        return 2 * group_size if self.distill else group_size

    def check(self, row: Mapping[str, Any]) -> None:
        """Every row will do."""

    def texts(self, group: GuidedGroup) -> Sequence[str]:
        question, outcome = group.row["text"], group.outcomes[-1]
        present = np.flatnonzero(outcome.where)
        answer = outcome.texts[present[0]] if present.size else ""
        refine = self.refine.format(question=question, answer=answer)
        # Without an answer that has room in a prompt there is nothing to refine.
        steps = [self.decompose.format(question=question), refine]
        return list(itertools.takewhile(group.takes_text, steps))

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        hinted = of_role(group, HINTED)
        if (asked := super().ask(group)) or not self.distill or not hinted:
            return asked
        if of_role(group, DEMONSTRATION):
            return ()
        outcome = hinted[-1][1]
        with on_host():
            right = distilled_where(
                self.rewards(outcome),
                np.int32(len(hinted)),
                where=np.asarray(outcome.where),
                threshold=self.threshold,
            )
        # A response with its reward has no components, so it is graded again if there are any.
        chosen = tuple(
            Response(
                outcome.responses[i].tokens,
                finish=outcome.responses[i].finish,
                reward=None if outcome.reward_components else float(outcome.rewards[i]),
            )
            for i in np.flatnonzero(right)
        )
        if not chosen:
            return ()
        return [Request(len(chosen), responses=chosen, sampled=False, role=DEMONSTRATION)]

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        row = list(super().members(group))
        for number, outcome in of_role(group, DEMONSTRATION):
            row += [(number, member) for member in range(len(outcome.rewards))]
        return row


def rethink(
    *,
    decompose: str = DECOMPOSE,
    refine: str = REFINE,
    distill: bool = True,
    threshold: float = 0.0,
    metric: str | None = None,
) -> HintPolicy:
    """Asks failed groups to decompose the problem, and if they fail again, to refine an answer.

    Args:
      decompose: The first message, with ``{question}``.
      refine: The second, with ``{question}`` and ``{answer}``, the first available rollout.
      distill: Whether the right answers of both stages also join the row after the plain prompt,
        as demonstrations; the row may then have 2 G members.
      threshold, metric: See the module.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      ValueError: If a template lacks its fields.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.rethink(distill=False)
      rethink(distill=False)

    References:
      Cog-Rethinker (arXiv:2510.15979), ABSTRACT reading: one wrong answer is used for its full
      group; the paper's memory of past decompositions is omitted, and the wording is ours.
    """
    check_template("rethink", decompose, "question")
    check_template("rethink", refine, "question", "answer")
    check_policy("rethink", threshold, metric)
    return _Rethink(
        decompose=decompose, refine=refine, distill=distill, threshold=threshold, metric=metric
    )
