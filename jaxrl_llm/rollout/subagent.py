"""A second policy that answers the questions of environments while episodes are played."""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.threads import LAUNCHING, wait_for_one
from jaxrl_llm.data.messages import Message
from jaxrl_llm.environments.asking import SubagentError
from jaxrl_llm.rollout.types import FAILED, Rollout

# Questions of one episode; their numbers are part of the numbers of requests.
_MOST = 64
# Seconds that a question waits for others, which are then answered with it.
_GATHER = 0.01
# Held by the thread of an environment that samples. The end of the program takes it for good: a
# device call in a thread that ends with the program would abort it.
_SAMPLING = threading.Lock()
_ENDS_WITHIN = 60.0  # seconds
atexit.register(_SAMPLING.acquire, timeout=_ENDS_WITHIN)


class CallRecord(NamedTuple):
    """A question and its answer, a training row of the subagent.

    Attributes:
      row: The question and the sampled answer, with P and G of 1.
      text: The answer.
      form: Its score by the check of the question, or 1.
    """

    row: Rollout
    text: str
    form: float = 1.0


@dataclass(eq=False)
class _Question:
    request: int
    prompt: tuple[int, ...]
    answered: threading.Event = field(default_factory=threading.Event)
    result: Any = None


class SubagentPlayer:
    """Answers questions of several threads, those that wait at one time in one batch.

    An answer depends on the key, the weights, the question and the number of its episode, not on
    the others in its batch.

    Args:
      sampler: From :func:`~jaxrl_llm.rollout.make_sampler`, of one response per prompt, with
        ``prompt_length`` as its only bucket.
      params, key: Parameters of the subagent, and the key of the batch.
      renderer: From ``data.make_renderer``.
      decode: Text of token ids.
      rows: Number of questions in a batch.
      prompt_length: Maximum number of tokens of a question.
    """

    def __init__(
        self,
        sampler: Any,
        params: ArrayTree,
        key: Array,
        *,
        renderer: Any,
        decode: Callable[[list[int]], str],
        rows: int,
        prompt_length: int,
    ):
        self._sampler, self._params, self._key = sampler, params, key
        self._renderer, self._decode = renderer, decode
        self._rows, self._room = rows, prompt_length
        self._waiting: list[_Question] = []
        self._lock = threading.Lock()
        # Before a deadline of the environment runs.
        program = sampler.compile_for(params, key, [[0]] * rows)
        wait_for_one([program])
        program.result()

    def ask(
        self, request: int, number: int, messages: Sequence[Message], check: Callable | None
    ) -> CallRecord:
        """The answer to question ``number`` of the episode of a request.

        Raises:
          ValueError: If the question is longer than ``prompt_length``, or an episode asks more than
            64.
          SubagentError: If sampling or the check fails.
        """
        prompt = tuple(self._renderer.prompt(messages, ()))
        if len(prompt) > self._room:
            raise ValueError(
                f"a question to the subagent has {len(prompt)} tokens, more than the "
                f"{self._room} of subagent.prompt_length."
            )
        if number >= _MOST:
            raise ValueError(f"an episode asks its subagent more than {_MOST} questions.")
        question = _Question(request * _MOST + number, prompt)
        with self._lock:
            self._waiting.append(question)
        time.sleep(_GATHER)
        while not question.answered.is_set():
            with _SAMPLING:  # whoever comes first answers those that wait
                if not question.answered.is_set():
                    self._answer()
        if isinstance(error := question.result, BaseException):
            name = type(error).__name__
            raise SubagentError(f"ask: the subagent failed with {name}: {error}") from error
        row = question.result
        if (row.finish == FAILED).any():
            raise SubagentError("ask: the subagent's logits are not finite.")
        text = self._decode(row.tokens[row.mask].tolist())
        return CallRecord(row, text, 1.0 if check is None else _form(check, text))

    def _answer(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting[: self._rows], self._waiting[self._rows :]
        try:
            results: list[Any] = self._sampled(batch)
        except BaseException as error:
            results = [error] * len(batch)
        for question, result in zip(batch, results, strict=True):
            question.result = result
            question.answered.set()

    def _sampled(self, batch: Sequence[_Question]) -> list[Rollout]:
        blank = self._rows - len(batch)
        prompts = [list(question.prompt) for question in batch] + [[0]] * blank
        ids = np.array([question.request for question in batch] + [0] * blank, np.int64)
        with LAUNCHING:
            rollout = self._sampler(self._params, self._key, prompts, request_ids=ids[:, None])
        rollout = processes.to_host(rollout)
        return [jax.tree.map(lambda x, i=i: x[i : i + 1], rollout) for i in range(len(batch))]


def _form(check: Callable, text: str) -> float:
    """The number that a check gives an answer."""
    try:
        form = float(check(text))
    except Exception as error:
        name = type(error).__name__
        raise SubagentError(f"ask: the check failed with {name}: {error}") from error
    if not 0 <= form <= 1:
        raise SubagentError(f"ask: the check of an answer must give 0 to 1; got {form}.")
    return form
