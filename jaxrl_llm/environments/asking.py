"""Questions to a second policy, a subagent, from within a step of an environment or a tool.

    @jr.environments.tool
    def delegate(question: str) -> str:
        "Asks an assistant a question and returns its answer."
        return jr.environments.ask(question)

A recipe with a ``subagent``, such as :func:`jaxrl_llm.recipes.m_grpo`, trains both: the policy that
plays the episode, and the subagent on its answers.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from jaxrl_llm.data.messages import Message

Check = Callable[[str], float]

_subagent: ContextVar[Callable[[Sequence[Message], Check | None], str] | None] = ContextVar(
    "subagent", default=None
)


class SubagentError(RuntimeError):
    """A question that got no answer, for a reason that is not the question's."""


class NoSubagentError(SubagentError):
    """A question where no subagent answers."""


def ask(question: str | Sequence[Message], *, check: Check | None = None) -> str:
    """The answer of the subagent to a question; waits for it.

    Call it from ``step`` of an environment or from a tool, in the thread that was called, one
    question after the other. Answers are drawn at the run's temperature; those to other questions
    of the batch come from the same decoding.

    Args:
      question: A message of the user, or several messages, the last of which it answers.
      check: ``check(answer)``, a number from 0 to 1 for the form of the answer, which the rewards
        of the subagent read (``rewards.call_rewards``); None for 1.

    Raises:
      NoSubagentError: If no subagent answers: the recipe of the run has none, or the step is called
        outside of a run.
      SubagentError: If the subagent fails, a check fails or gives another number, or another
        thread of the step asks.

    Example:
      >>> from jaxrl_llm.environments import ask, answered_by
      >>> with answered_by(lambda messages, check: messages[-1]["content"].upper()):
      ...     ask("who is there?")
      'WHO IS THERE?'
    """
    answer = _subagent.get()
    if answer is None:
        raise NoSubagentError(
            "ask: no subagent answers; use a recipe that has one, such as m_grpo, or answered_by "
            "outside of a run."
        )
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    return answer(messages, check)


@contextlib.contextmanager
def answered_by(
    answer: Callable[[Sequence[Message], Check | None], str] | None,
) -> Iterator[None]:
    """A context in which a function answers the questions of this thread, such as in a test.

    Args:
      answer: ``answer(messages, check)`` returns the answer to the last message; ``check`` is that
        of :func:`ask`. With None, no subagent answers.

    Example:
      >>> import jaxrl_llm as jr
      >>> def answer(messages, check):
      ...     return str(len(messages[-1]["content"]))
      >>> with jr.environments.answered_by(answer):
      ...     jr.environments.ask("four")
      '4'
    """
    token = _subagent.set(answer)
    try:
        yield
    finally:
        _subagent.reset(token)


Answer = str | tuple[type[Exception], tuple]
"""The answer to a question, or the type and the arguments of what its ``ask`` raised."""


@contextlib.contextmanager
def recorded(earlier: Sequence[Answer] = ()) -> Iterator[list[Answer]]:
    """A context that lists the answers to its questions.

    Args:
      earlier: Answers to the first questions, which the subagent is not asked.

    Example:
      >>> from jaxrl_llm.environments.asking import answered_by, ask, recorded
      >>> with answered_by(lambda messages, check: "new"), recorded(["old"]) as answers:
      ...     ask("first?"), ask("second?"), answers
      ('old', 'new', ['old', 'new'])
    """
    subagent, answers = _subagent.get(), list[Answer]()

    def answer(messages: Sequence[Message], check: Check | None) -> str:
        n = len(answers)
        if n < len(earlier):
            answers.append(earlier[n])
        else:
            try:
                with answered_by(subagent):
                    answers.append(ask(messages, check=check))
            except Exception as error:
                answers.append((type(error), error.args))
                raise
        given = answers[n]
        if isinstance(given, tuple):
            kind, arguments = given
            raise kind(*arguments)
        return given

    with answered_by(answer):
        yield answers
