"""A collector of plain texts to learn, such as pretraining texts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxrl_llm.core import ArrayTree
from jaxrl_llm.core.reasoning import Continuation
from jaxrl_llm.curation.collectors.hints.hinted import prompt_name, read_text
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    TEXT,
    Collection,
    Collector,
    Decision,
    Request,
    Response,
    in_order,
)

__all__ = ["plain_texts"]

# How a response ended, as in rollout.types.
_LENGTH, _STOP = 0, 1


@dataclasses.dataclass(frozen=True, repr=False)
class _PlainTexts:
    """Made by :func:`plain_texts`."""

    column: str
    max_new_tokens: int | None = None  # of the run

    needs: ClassVar[Needs] = Needs(
        sets_prompts=True,
        brings_responses=True,
        brings_texts=True,
        samples_nothing=True,
        helps_every_group=True,
    )

    def for_run(self, group_size: int, max_new_tokens: int) -> "_PlainTexts":
        del group_size
        return dataclasses.replace(self, max_new_tokens=max_new_tokens)

    def check_data(self, data: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if a row has no text."""
        for row in data:
            if not read_text("plain_texts", row, self.column):
                raise ValueError(
                    f"plain_texts: {self.column!r} of prompt {prompt_name(row)} is empty."
                )

    def init(self, num_prompts: int) -> ArrayTree:
        """The row of the next text."""
        del num_prompts
        return np.zeros((), np.int32)

    def propose(self, state, key, collection: Collection, count: int):
        del key
        size, first = collection.group_size, len(collection.requests)
        groups = range(first, first + count)
        return tuple(self._group(int(state) + i * size, collection) for i in groups), state

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        decision, _ = in_order().observe((), collection)
        if decision.rows is not None:
            used = collection.group_size * len(collection.requests)
            state = np.asarray((int(state) + used) % len(collection.data), np.int32)
        return decision, state

    def _group(self, first: int, collection: Collection) -> Request:
        places = [(first + i) % len(collection.data) for i in range(collection.group_size)]
        responses = tuple(self._response(collection.data[place], collection) for place in places)
        return Request(
            len(responses),
            prompt=places[0],
            responses=responses,
            sampled=False,
            role=TEXT,
            prompt_tokens=tuple(collection.stop_ids[:1]) or (0,),
        )

    def _response(self, row: Mapping[str, Any], collection: Collection) -> Response:
        # A document ends as the one before it did, not as a turn of a chat.
        tokens = [*collection.encode(Continuation(row[self.column])), *collection.stop_ids[:1]]
        cut = np.asarray(tokens, np.int32)[: self.max_new_tokens]
        return Response(cut, finish=_STOP if len(cut) == len(tokens) else _LENGTH, reward=0.0)

    def __repr__(self) -> str:
        return f"plain_texts({'' if self.column == 'pretraining' else f'column={self.column!r}'})"


def plain_texts(*, column: str = "pretraining") -> Collector:
    """Texts of the data after the stop token, which separates documents, without a prompt.

        group = G texts of the next G rows, each truncated to the maximum length

    They have no log-probabilities and reward 0; the batch has them as ``texts``, and
    ``Recipe.text_coef`` is the weight of their loss. Use it in :func:`mixed`, since a batch of only
    texts learns no task.

    Args:
      column: The column with a text in each row; the rows are read in order, repeatedly.

    Returns:
      A collector; its state is the row of the next text.

    Raises:
      ValueError: If ``column`` is empty; in a run, if a row has no text.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.mixed((jr.curation.in_order(), 0.5), (jr.curation.plain_texts(), 0.5))
      mixed((in_order(), 0.5), (plain_texts(), 0.5))

    References:
      The loss on texts of the pretraining in InstructGPT (arXiv:2203.02155) and MiniLLM
      (arXiv:2306.08543), whose texts are blocks of one length.
    """
    if not column:
        raise ValueError("plain_texts: column must not be empty.")
    return _PlainTexts(column)
