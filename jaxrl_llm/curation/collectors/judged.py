"""A collector that turns the rollouts of its batch into judging and refining tasks.

A share out of its range raises ValueError, and an argument that is not a function where one is
required raises TypeError.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    JUDGE,
    Collection,
    Collector,
    Decision,
    Request,
    Row,
    check_is_group,
    groups_of,
    on_host,
    stack_outcomes,
)
from jaxrl_llm.curation.recycling import NONE, POINT, cap_items, judge_items

__all__ = ["judge_message", "judged", "refine_message"]

_VERDICTS = {1: ("no", "yes"), 2: ("first", "second")}


def judge_message(question: str, answers: Sequence[str]) -> str:
    """A message that asks whether an answer is right, or which of two is.

    Args:
      question: The user's message.
      answers: One or two.

    Returns:
      A message; it asks for "yes" or "no", or for "first" or "second".

    Example:
      >>> import jaxrl_llm as jr
      >>> print(jr.curation.judge_message("1 + 1?", ["2"]))
      1 + 1?
      <BLANKLINE>
      Answer:
      2
      <BLANKLINE>
      Is this answer right? Reply yes or no.

    References:
      SPARK (arXiv:2509.22624); the words are ours.
    """
    shown = "\n\n".join(f"Answer:\n{answer}" for answer in answers)
    asks = "Is this answer right? Reply yes or no."
    if len(answers) == 2:
        asks = "Which answer is right? Reply first or second."
    return f"{question}\n\n{shown}\n\n{asks}"


def refine_message(question: str, answers: Sequence[str]) -> str:
    """The question again, with a wrong answer.

    Args:
      question: The user's message.
      answers: The wrong one.

    Returns:
      A message.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.refine_message("1 + 1?", ["3"]).splitlines()[-1]
      'This answer is wrong. Write a right one.'

    References:
      SPARK (arXiv:2509.22624); the words are ours.
    """
    return f"{question}\n\nAnswer:\n{answers[0]}\n\nThis answer is wrong. Write a right one."


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """1 for a text whose last verdict is the right one of two words, else 0."""

    words: tuple[str, str]
    label: int

    def __call__(self, texts: Sequence[str]) -> list[float]:
        # A word of its own, which "know" and "seconds" do not hold.
        verdict = re.compile(rf"\b(?:{'|'.join(self.words)})\b")
        last = [verdict.findall(text.lower())[-1:] for text in texts]
        return [float(words == [self.words[self.label]]) for words in last]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Judged:
    """Made by :func:`judged`."""

    judges: float
    refines: float
    point: float
    judge: Callable
    refine: Callable

    @property
    def needs(self) -> Needs:
        return Needs(sends_text=True, asks_again=True, lacks_components=self.judges > 0)

    def check_sizes(self, data: Sequence[Mapping], *, group_size: int, num_groups: int) -> None:
        """Raises ValueError if a share of the groups is less than one of them."""
        del data, group_size
        for option, share in (("judges", self.judges), ("refines", self.refines)):
            if share:
                groups = groups_of(share, num_groups)
                check_is_group(self, option, share, groups=groups, num_groups=num_groups)

    def width(self, group_size: int) -> int:
        return group_size

    def init(self, num_prompts: int) -> ArrayTree:
        del num_prompts
        return {"judged": np.zeros((), np.int32), "refined": np.zeros((), np.int32)}

    def _counts(self, collection: Collection) -> tuple[int, int, int]:
        """Groups of questions, of judging and of refining."""
        groups = collection.num_groups
        judges, refines = groups_of(self.judges, groups), groups_of(self.refines, groups)
        return groups - judges - refines, judges, refines

    def propose(self, state, key, collection: Collection, count: int):
        plain = Request(collection.group_size)
        questions, judges, refines = self._counts(collection)
        first = len(collection.requests)
        following = [i - questions for i in range(first, first + count)]
        if first + count <= questions or None in collection.outcomes[:questions]:
            return (plain,) * count, state
        # Tasks of judging, then of refining, each made of one group of questions.
        tasks: list[Request] = []
        outcomes = [collection.outcome(i) for i in range(questions)]
        groups = stack_outcomes(outcomes, rows=questions)
        with on_host():
            key = jax.random.wrap_key_data(np.asarray(jax.random.key_data(key)))
            draw, *caps = jax.random.split(key, 3)
            # A wrong response that was cut off has no answer to judge.
            answered = ~groups.truncated | (groups.rewards > 0)
            items = judge_items(
                draw, groups.rewards, answered=answered, where=groups.where, point=self.point
            )
            items = jax.tree.map(np.asarray, items)
            judged = np.asarray(cap_items(caps[0], items.kind != NONE, count=judges))
            refined = np.asarray(cap_items(caps[1], items.reflect >= 0, count=refines))
        for flags, is_judge in ((judged, True), (refined, False)):
            for p in np.flatnonzero(flags):
                shown = [items.first[p], items.second[p]] if is_judge else [items.reflect[p]]
                answers = [outcomes[p].texts[g] for g in shown if g >= 0]
                place = int(outcomes[p].prompt)
                message = self.judge if is_judge else self.refine
                text = message(str(collection.data[place]["text"]), answers)
                if not collection.takes_text(text):  # too long for a prompt
                    continue
                request = Request(collection.group_size, place, text=text)
                if is_judge:
                    kind = POINT if len(answers) == 1 else POINT + 1
                    reward = _Verdict(_VERDICTS[kind], int(items.label[p]))
                    request = request._replace(role=JUDGE, reward=reward)
                tasks.append(request)
        return tuple(tasks[i] if 0 <= i < len(tasks) else plain for i in following), state

    def observe(self, state, collection: Collection):
        questions, requests = self._counts(collection)[0], collection.requests
        if len(requests) < questions:
            return Decision(ask=questions - len(requests)), state
        if collection.waiting:
            return Decision(), state
        if len(requests) < collection.num_groups:
            return Decision(ask=collection.num_groups - len(requests)), state
        rows = [
            Row(tuple((i, j) for j in range(request.rollouts)))
            for i, request in enumerate(requests)
        ]
        judged = sum(request.role == JUDGE for request in requests)
        refined = sum(request.text is not None for request in requests) - judged
        state = {
            "judged": np.int32(state["judged"] + judged),
            "refined": np.int32(state["refined"] + refined),
        }
        return Decision(rows=tuple(rows)), jax.tree.map(np.asarray, state)

    def __repr__(self) -> str:
        text = f"judges={self.judges}, refines={self.refines}"
        if self.point != 0.3:
            text += f", point={self.point}"
        for name, default in (("judge", judge_message), ("refine", refine_message)):
            if (message := getattr(self, name)) is not default:
                text += f", {name}={stable_repr(message)}"
        return f"judged({text})"


def judged(
    *,
    judges: float = 0.25,
    refines: float = 0.25,
    point: float = 0.3,
    judge: Callable[[str, Sequence[str]], str] = judge_message,
    refine: Callable[[str, Sequence[str]], str] = refine_message,
) -> Collector:
    """Verified rollouts become tasks with known answers for the policy that wrote them.

        (1 - judges - refines) P groups of questions -> rewards
        at most judges P groups judge an answer, or compare two: reward 1 for the right verdict
        at most refines P groups refine a wrong answer: the reward of the question

    If there are fewer tasks, further questions replace them. Each group gives at most one task of a
    kind (:func:`~jaxrl_llm.curation.judge_items`).

    Args:
      judges: Share of groups that judge, in [0, 1); in a run, at least one group or 0.
      refines: The same of groups that refine; together with ``judges`` below 1.
      point: Probability of judging a single answer of a group with right and wrong ones.
      judge: ``(question, answers) -> message``, for one answer or two; the verdict is the last
        word "yes" or "no", or "first" or "second", of a response.
      refine: ``(question, [answer]) -> message``.

    Returns:
      A collector; its state counts the tasks.

    Raises:
      TypeError: If a message is not a function.
      ValueError: If a share is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.judged(judges=0.5, refines=0.0)
      judged(judges=0.5, refines=0.0)

    References:
      SPARK (arXiv:2509.22624), 64 prompts and at most 32 tasks of each kind. The released code
      samples its tasks after the update on the prompts, in the same cycle; here they are in one
      batch. It shows half of the wrong answers without their reasoning, and no response to a judge
      from which it could not extract an answer: here, no wrong one that was cut off.
    """
    name = "judged"
    checks.check_share(name, judges=judges, refines=refines, point=point)
    if judges + refines > 1 - 1e-9:  # a batch has no groups of questions
        raise ValueError(f"{name}: judges + refines must be below 1; got {judges:g} + {refines:g}.")
    for option, message in {"judge": judge, "refine": refine}.items():
        if not callable(message):
            raise TypeError(f"{name}: {option} must be a function; got {message!r}.")
    return _Judged(
        judges=float(judges), refines=float(refines), point=point, judge=judge, refine=refine
    )
