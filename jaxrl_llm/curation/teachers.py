"""Additional texts that the policy scores: as its own teacher, and with reference answers.

The teacher scores the same response after another prompt, which contains a correct response of the
group or the feedback of a grader. These functions run on the host, where a batch is made, as
``Computed("teacher_texts", function, "responses")``.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.reasoning import without_reasoning
from jaxrl_llm.curation.collectors.hints.hinted import prompt_name, read_text

__all__ = ["ReferenceMessages", "answer_texts", "solution_messages"]

TEMPLATE = "{prompt}\n\n{solution}{feedback}Now answer the question at the top, correctly."
SOLUTION = "A right answer to it is:\n\n{solution}\n\n"
FEEDBACK = "An earlier attempt of yours was wrong. What was said of it:\n\n{feedback}\n\n"
BEFORE_ANSWER = "<think>\nNow there's enough information to answer\n</think>\n<answer>\n"


def solution_messages(
    texts: Sequence[Sequence[str]],
    *,
    prompts: Sequence[str],
    rewards: np.ndarray,
    where: np.ndarray,
    feedback: Sequence[Sequence[str | None]] | None = None,
    success: float = 0.5,
    feedback_with_solution: bool = False,
    template: str = TEMPLATE,
    solution_template: str = SOLUTION,
    feedback_template: str = FEEDBACK,
) -> list[list[str | None]]:
    """The question with a correct response of the group, or with feedback on the response.

        solution of i = the first j != i of the group with reward_j >= success
        feedback of i = what the reward says of i, where there is no solution
        message of i  = None without either

    Thinking (``<think> ... </think>`` and other families' forms, see ``core.reasoning``) is removed
    from a solution, and so is all text before a ``</think>`` whose beginning stands in the prompt.

    Args:
      texts: P lists of G responses.
      prompts: P messages of the user.
      rewards: ``[P, G]``.
      where: bool ``[P, G]``, True for responses that take part; others are not used as solutions.
      feedback: P lists of G texts, the entry "feedback" of the reward; None or an empty text for
        no feedback on a response. None for a reward without feedback.
      success: Smallest reward of a correct response.
      feedback_with_solution: Whether feedback is added after a solution as well.
      template: Has the fields ``{prompt}``, ``{solution}`` and ``{feedback}``.
      solution_template: Template of a solution, with the field ``{solution}``.
      feedback_template: Template of feedback, with the field ``{feedback}``.

    Returns:
      P lists of G messages or None.

    Raises:
      ValueError: If shapes disagree.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> messages = jr.curation.solution_messages(
      ...     [["<think>hm</think>4", "5"]], prompts=["2 + 2?"], rewards=np.array([[1.0, 0.0]]),
      ...     where=np.ones((1, 2), bool), template="{prompt} {solution}{feedback}",
      ...     solution_template="Right: {solution}")
      >>> messages
      [[None, '2 + 2? Right: 4']]

    References:
      SDPO (arXiv:2601.20802) and its released code (``success_reward_threshold`` 0.5, a response is
      not its own solution, feedback only without a solution, the first solution of the group); the
      words of the templates are ours. SRPO (arXiv:2604.02288) uses the same prompts.
    """
    rewards, where = np.asarray(rewards), np.asarray(where)
    shape = (len(prompts), len(texts[0]) if len(texts) else 0)
    checks.check_shape("solution_messages", "rewards", rewards, shape)
    checks.check_shape("solution_messages", "where", where, shape)
    messages: list[list[str | None]] = []
    for p, (prompt, group) in enumerate(zip(prompts, texts, strict=True)):
        right = np.flatnonzero(where[p] & (rewards[p] >= success))
        row: list[str | None] = []
        for g in range(len(group)):
            others = [j for j in right if j != g]
            said = (feedback[p][g] or "").strip() if feedback is not None else ""
            said = said if feedback_with_solution or not others else ""
            if not where[p, g] or not (others or said):
                row.append(None)
                continue
            solution = without_reasoning(group[others[0]]).strip() if others else None
            parts = {"prompt": prompt, "solution": "", "feedback": ""}
            if solution is not None:
                parts["solution"] = solution_template.replace("{solution}", solution)
            if said:
                parts["feedback"] = feedback_template.replace("{feedback}", said)
            row.append(_filled(template, parts))
        messages.append(row)
    return messages


@dataclasses.dataclass(frozen=True)
class ReferenceMessages:
    """The question with the solution of the data: ``(texts, prompts, metadata) -> messages``.

    For ``Computed("teacher_texts", ReferenceMessages(), "responses")``. All responses to a prompt
    have the same message.

    Attributes:
      column: Column of the data with the solution, a text.
      template: Has the fields ``{prompt}`` and ``{solution}``, and ``{feedback}``, which is empty.
      solution_template: Template of the solution, with the field ``{solution}``.

    Raises:
      ValueError: In a run, before it samples, if a row has no such text.

    Example:
      >>> import jaxrl_llm as jr
      >>> messages = jr.curation.ReferenceMessages(
      ...     "answer", template="{prompt} {solution}", solution_template="It is {solution}.")
      >>> messages([["3", "4"]], prompts=["2 + 2?"], metadata=[{"answer": "4"}])
      [['2 + 2? It is 4.', '2 + 2? It is 4.']]

    References:
      Yang et al., Self-Distilled RLVR (arXiv:2604.03128), whose teacher reads the reference answer;
      the words of the templates are ours.
    """

    column: str = "demonstration"
    template: str = TEMPLATE
    solution_template: str = SOLUTION

    def __call__(
        self,
        texts: Sequence[Sequence[str]],
        *,
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[list[str]]:
        """P lists of G messages."""
        rows = zip(texts, prompts, metadata, strict=True)
        return [[self._of(prompt, row)] * len(group) for group, prompt, row in rows]

    def check(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError if a prompt's row has no solution."""
        if not read_text("ReferenceMessages", row, self.column).strip():
            raise ValueError(
                f"ReferenceMessages: {self.column!r} of prompt {prompt_name(row)} is empty."
            )

    def _of(self, prompt: str, row: Mapping[str, Any]) -> str:
        self.check(row)
        text = read_text("ReferenceMessages", row, self.column)
        solution = self.solution_template.replace("{solution}", text)
        return _filled(self.template, {"prompt": prompt, "solution": solution, "feedback": ""})


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """The template with these fields; other braces, and those of the parts, stay as they are."""
    return re.sub(r"{(\w+)}", lambda m: parts.get(m[1], m[0]), template)


def answer_texts(
    texts: Sequence[Sequence[str]], *, metadata: Sequence[Mapping], before: str = BEFORE_ANSWER
) -> list[tuple[str, str]]:
    """The reference answer of each prompt, with the text that precedes it in a response.

    As ``Computed("answer_texts", function, "responses")``, the policy scores this text after each
    turn, so that a turn is rewarded for its information about the answer.

    Args:
      texts: P lists of G responses.
      metadata: P mappings with the text "answer".
      before: Text of a response before its answer, such as the end of its thinking.

    Returns:
      P pairs of ``before`` and an answer.

    Raises:
      ValueError: If a prompt has no answer.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.answer_texts([["a", "b"]], metadata=[{"answer": "4"}], before="Answer: ")
      [('Answer: ', '4')]

    References:
      IGPO (arXiv:2510.14967) and its released code, with its words: there the prompt ends with
      ``<think>``, which begins ``before`` here. The closing text of the answer is not scored there
      and is left out here.
    """
    del texts
    for row in metadata:
        answer = row.get("answer")
        if not isinstance(answer, str) or not answer:
            raise ValueError(
                f"answer_texts: prompt {row.get('id')!r} has the answer {answer!r}, where a text "
                "is needed."
            )
    return [(before, row["answer"]) for row in metadata]
