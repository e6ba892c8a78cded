"""A collector whose policy predicts properties of its solutions, and trains on both.

An argument that is not a function where one is required raises TypeError.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.hints.policies import no_reward
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    JUDGE,
    Collection,
    Collector,
    Decision,
    Outcome,
    Request,
    Row,
    on_host,
)

__all__ = ["predict_message", "predicted"]

PREDICT_TEMPLATE = (
    "{prompt}\n\nDo not solve this. Think about 8 attempts of yours, then reply with JSON: "
    '{{"math_notion": [concepts not named above], "pass_rate": 0 to 8, "solution_length": tokens}}'
)


def predict_message(prompt: str, *, template: str = PREDICT_TEMPLATE) -> str:
    """A message that asks for a prediction of the solutions of a question.

    Args:
      prompt: The user's message.
      template: With ``{prompt}``; further braces are doubled.

    Returns:
      A message that asks for the format of ``rewards.parse_meta_answer``.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.predict_message("1 + 1?", template="{prompt} Predict.")
      '1 + 1? Predict.'

    References:
      MASA (arXiv:2510.03259), the keys of the released code; the words are ours.
    """
    return template.format(prompt=prompt)


@dataclasses.dataclass(frozen=True)
class _Task:
    """The message of a row of the data."""

    message: Callable[[str], str]

    def __call__(self, row: Mapping[str, Any]) -> str:
        return self.message(str(row["text"]))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Predicted:
    """Made by :func:`predicted`."""

    parse: Callable
    reward: Callable
    message: Callable
    gate: Callable | None
    cutoff: Callable | None
    max_new_tokens: int | None = None

    @property
    def needs(self) -> Needs:
        cuts = self.cutoff is not None
        return Needs(
            sends_text=True,
            # Without rounds too: its rows set the rewards of predictions, which their requests
            # leave at 0.
            asks_again=True,
            lacks_components=True,
            slots=cuts,
            splits_turns=cuts,
        )

    @property
    def _first(self) -> bool:
        """Whether predictions come before solutions."""
        return self.gate is not None or self.cutoff is not None

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Predicted":
        del group_size
        return dataclasses.replace(self, max_new_tokens=max_new_tokens)

    def check_sizes(self, data: Sequence[Mapping], *, group_size: int, num_groups: int) -> None:
        """Raises ValueError unless a batch has room for a question and its prediction."""
        del data, group_size
        if num_groups < 2:
            raise ValueError(
                f"{self!r}: a question and its prediction are two groups; prompts_per_step must be "
                f"at least 2, got {num_groups}."
            )

    def init(self, num_prompts: int) -> ArrayTree:
        del num_prompts
        return {name: np.zeros((), np.int32) for name in ("predictions", "parsed", "gated")}

    def propose(self, state, key, collection: Collection, count: int):
        del key
        size, groups = collection.group_size, collection.num_groups
        plain, tasks = Request(size), groups // 2
        # What predictions earn is known once there are solutions: observe puts it into their rows.
        task = Request(size, text=_Task(self.message), role=JUDGE, reward=no_reward)
        first = len(collection.requests)
        places = range(first, first + count)
        if not (self._first and tasks):
            questions = groups - tasks
            wanted = [
                task._replace(extends=i - questions) if questions <= i < groups else plain
                for i in places
            ]
            return tuple(wanted), state
        solutions: list[Request] = []
        if len(collection.outcomes) >= tasks and None not in collection.outcomes[:tasks]:
            keep, limits = self._control(collection, tasks)
            solutions = [Request(size, extends=i, limit=limits[i]) for i in range(tasks) if keep[i]]
        wanted = [task if i < tasks else plain for i in places]
        for n, i in enumerate(places):
            if tasks <= i < tasks + len(solutions):
                wanted[n] = solutions[i - tasks]
        return tuple(wanted), state

    def _answers(self, outcome: Outcome) -> list:
        return [self.parse(text) for text in outcome.texts]

    def _control(self, collection: Collection, tasks: int) -> tuple[list[bool], list[int | None]]:
        """Which questions are solved, and the tokens of their longest solutions."""
        answers = [self._answers(collection.outcome(i)) for i in range(tasks)]
        keep, limits = [True] * tasks, [None] * tasks
        with on_host():
            if self.gate is not None:
                rate = np.array([[each.rate for each in group] for group in answers], np.float32)
                there = ~np.isnan(rate)
                keep = np.asarray(self.gate(np.nan_to_num(rate), where=there)).tolist()
            if self.cutoff is not None:
                length = np.array([[x.length for x in group] for group in answers], np.float32)
                # A negative length is no prediction.
                there = length >= 0
                limits = self.cutoff(
                    np.where(there, length, 0.0), max_length=self.max_new_tokens, where=there
                )
                limits = np.asarray(limits).tolist()
        return keep, [None if n == self.max_new_tokens else n for n in limits]

    def observe(self, state, collection: Collection):
        groups, requests = collection.num_groups, collection.requests
        tasks = groups // 2
        first = self._first and tasks  # a part of a batch may have room for one question alone
        if (missing := (tasks if first else groups) - len(requests)) > 0:
            return Decision(ask=missing), state
        if collection.waiting:
            return Decision(), state
        solved, offset = range(tasks), groups - tasks
        if first:
            solved, offset = np.flatnonzero(self._control(collection, tasks)[0]).tolist(), 0
            if (missing := groups - 2 * tasks + len(solved) + tasks - len(requests)) > 0:
                return Decision(ask=missing), state
        # The request that solves the question of each task.
        solutions = {i: tasks + n if first else i for n, i in enumerate(solved)}
        rows = {
            i: Row(tuple((i, j) for j in range(request.rollouts)))
            for i, request in enumerate(requests)
        }
        parsed = 0
        for i in range(tasks):
            answers = self._answers(collection.outcome(offset + i))
            parsed += sum(not math.isnan(each.rate) for each in answers)
            row = rows[offset + i]
            if i not in solutions:
                rows[offset + i] = row._replace(takes_part=False)
                continue
            solution = collection.outcome(solutions[i])
            with on_host():
                rewards = self.reward(
                    answers,
                    problem=str(collection.data[int(solution.prompt)]["text"]),
                    texts=solution.texts,
                    rewards=solution.rewards,
                    lengths=solution.lengths,
                    where=solution.where,
                )
            checks.check_shape(repr(self), "the reward's result", rewards, (len(answers),))
            rows[offset + i] = row._replace(
                takes_part=bool(solution.where.any()), rewards=tuple(map(float, rewards))
            )
        fillers = [rows[i]._replace(takes_part=False) for i in range(tasks) if i not in solutions]
        state = {
            "predictions": np.int32(state["predictions"] + tasks * collection.group_size),
            "parsed": np.int32(state["parsed"] + parsed),
            "gated": np.int32(state["gated"] + len(fillers)),
        }
        state = {name: np.asarray(value) for name, value in state.items()}
        return Decision(rows=(*rows.values(), *fillers)), state

    def __repr__(self) -> str:
        text = f"{stable_repr(self.parse)}, {stable_repr(self.reward)}"
        if self.message is not predict_message:
            text += f", message={stable_repr(self.message)}"
        for name in ("gate", "cutoff"):
            if (value := getattr(self, name)) is not None:
                text += f", {name}={stable_repr(value)}"
        return f"predicted({text})"


def predicted(
    parse: Callable,
    reward: Callable,
    *,
    message: Callable[[str], str] = predict_message,
    gate: Callable | None = None,
    cutoff: Callable | None = None,
) -> Collector:
    """The policy predicts its solutions of a question; solutions and predictions train.

        P - P // 2 groups of questions -> rewards
        P // 2 groups of predictions   -> reward(predictions, solutions of the same question)

    With ``gate`` or ``cutoff`` the predictions come first, and determine which questions are solved
    and how long a solution may be. A question that is not solved takes no part, nor do its
    predictions, which cannot be scored; it is not replaced. With an odd P the last question has no
    prediction and is treated as one whose predictions cannot be parsed: it is solved without a
    cutoff.

    Args:
      parse: ``text -> answer``, with numbers ``rate`` and ``length``, NaN if missing; such as
        ``rewards.parse_meta_answer``.
      reward: Function that returns the rewards of the K answers of a question; its parameters may
        be ``problem`` and, of the solutions, ``texts``, ``rewards``, ``lengths`` and ``where``;
        such as ``rewards.meta_answer_rewards``.
      message: ``question -> message``.
      gate: ``(rate [n, K], where) -> keep [n]``, such as
        :func:`~jaxrl_llm.curation.predictive_gate`; None solves all.
      cutoff: ``(length [n, K], max_length, where) -> tokens [n]``, such as
        :func:`~jaxrl_llm.curation.length_cutoff`; a longer solution ends there. The run decodes in
        slots then. None for no limit but the run's.

    Returns:
      A collector; its state counts predictions, those with a pass rate, and questions not solved.

    Raises:
      TypeError: If an option that must be a function is not.
      ValueError: In a run, if a batch has fewer than two groups.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.predicted(jr.rewards.parse_meta_answer, jr.rewards.meta_answer_rewards)
      predicted(parse_meta_answer, meta_answer_rewards)

    References:
      MASA (arXiv:2510.03259): as many predictions as solutions, in separate groups. Gate and cutoff
      are those of its efficient form, NOTES; the released code does not have them. Not replacing
      unsolved questions is ours.
    """
    options = {"parse": parse, "reward": reward, "message": message}
    options |= {k: v for k, v in {"gate": gate, "cutoff": cutoff}.items() if v is not None}
    for option, value in options.items():
        if not callable(value):
            raise TypeError(f"predicted: {option} must be a function; got {value!r}.")
    return _Predicted(parse=parse, reward=reward, message=message, gate=gate, cutoff=cutoff)
