"""Solved examples before prompts whose rollouts have all failed: XRPO's in-context seeding."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core import Array, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.two_phase import Memory
from jaxrl_llm.curation.prompts.embeddings import hashed_words
from jaxrl_llm.curation.prompts.similarity import nearest_solved

__all__ = ["SolvedExamples", "seeded_message", "solved_examples"]


class SolvedExamples(NamedTuple):
    """State of :func:`solved_examples`: the latest solution of each of up to C prompts.

    Attributes:
      prompts: int32 ``[C]``, places in the data set; -1 for none.
      texts: uint8 ``[C, L]``, UTF-8 of the solutions, the first L bytes of each.
      lengths: int32 ``[C]``, bytes of each.
      next: int32 ``[]``, which entry is replaced next.
    """

    prompts: Array
    texts: Array
    lengths: Array
    next: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Solved:
    """Made by :func:`solved_examples`."""

    capacity: int
    length: int
    threshold: float

    def init(self, num_prompts: int) -> SolvedExamples:
        size = min(self.capacity, num_prompts)
        return SolvedExamples(
            prompts=np.full(size, -1, np.int32),
            texts=np.zeros((size, self.length), np.uint8),
            lengths=np.zeros(size, np.int32),
            next=np.zeros((), np.int32),
        )

    def read(self, state: SolvedExamples) -> dict[str, Any]:
        del state
        return {}

    def learn(
        self,
        state: SolvedExamples,
        *,
        prompts: np.ndarray,
        rewards: np.ndarray,
        where: np.ndarray,
        texts: Sequence[Sequence[str]],
    ) -> SolvedExamples:
        places, bytes_, lengths = (np.array(x) for x in state[:3])
        following = int(state.next)
        solved = (rewards > self.threshold) & where
        for p in np.flatnonzero(solved.any(axis=-1)):
            encoded = texts[p][int(np.argmax(solved[p]))].encode()[: self.length]
            if (at := np.flatnonzero(places == prompts[p])).size:
                row = int(at[0])
            else:
                row, following = following, (following + 1) % len(places)
            places[row], lengths[row] = prompts[p], len(encoded)
            bytes_[row] = 0
            bytes_[row, : len(encoded)] = np.frombuffer(encoded, np.uint8)
        return SolvedExamples(places, bytes_, lengths, np.array(following, np.int32))

    def __repr__(self) -> str:
        text = f"capacity={self.capacity}, length={self.length}"
        if self.threshold != 0.5:
            text += f", threshold={self.threshold}"
        return f"solved_examples({text})"


def solved_examples(*, capacity: int = 1024, length: int = 4096, threshold: float = 0.5) -> Memory:
    """A memory of right responses, for the message of prompts that fail: :func:`seeded_message`.

    Args:
      capacity: C, maximum number of stored prompts; the oldest entry is replaced first.
      length: L, maximum bytes of a solution, above 0; longer ones are truncated.
      threshold: A reward above it counts as right.

    Returns:
      A Memory with :class:`SolvedExamples`, for :func:`~jaxrl_llm.curation.two_phase`.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.solved_examples(capacity=8, length=16).init(100).texts.shape
      (8, 16)

    References:
      XRPO (arXiv:2510.06672), whose corpus of solved problems fills during training.
    """
    name = "solved_examples"
    checks.check_count(name, capacity=capacity, length=length)
    checks.check_real(name, finite=True, threshold=threshold)
    return _Solved(capacity=capacity, length=length, threshold=float(threshold))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SeededMessage:
    """Made by :func:`seeded_message`."""

    count: int
    threshold: float | None
    embed: Callable

    def __call__(
        self,
        *,
        prompts: np.ndarray,
        rewards: np.ndarray,
        where: np.ndarray,
        memory: SolvedExamples,
        data: Sequence[Mapping[str, Any]],
        takes_text: Callable[[str], bool] = bool,
    ) -> list[str | None]:
        known = memory.prompts >= 0
        failed = where.any(axis=-1) & ~((rewards > 0) & where).any(axis=-1)
        if not known.any() or not failed.any():
            return [None] * len(prompts)
        absent = np.zeros_like(self.embed(""))
        corpus = np.stack(
            [self.embed(data[q]["text"]) if q >= 0 else absent for q in memory.prompts]
        )

        def message(prompt: int) -> str | None:
            question, shown = data[prompt]["text"], ""
            nearest = nearest_solved(
                self.embed(question),
                corpus,
                count=min(self.count, len(corpus)),
                where=known & (memory.prompts != prompt),
                threshold=self.threshold,
            )
            for row in (int(row) for row in np.asarray(nearest) if row >= 0):
                solution = bytes(memory.texts[row, : memory.lengths[row]]).decode(errors="ignore")
                text = data[memory.prompts[row]]["text"]
                longer = f"{shown}Problem: {text}\nSolution: {solution}\n\n"
                if takes_text(_message(question, longer)):
                    shown = longer
            return _message(question, shown) if shown else None

        pairs = zip(prompts, failed, strict=True)
        return [message(int(prompt)) if fails else None for prompt, fails in pairs]

    def __repr__(self) -> str:
        text = f"count={self.count}"
        if self.threshold is not None:
            text += f", threshold={self.threshold}"
        if self.embed is not hashed_words:
            text += f", embed={stable_repr(self.embed)}"
        return f"seeded_message({text})"


def _message(question: str, examples: str) -> str:
    """It begins as the question does, so that both kinds of rollouts share a row."""
    return f"{question}\n\nSolved problems:\n\n{examples}Problem: {question}"


def seeded_message(
    *, count: int = 2, threshold: float | None = None, embed: Callable = hashed_words
) -> Callable:
    """The message of a prompt whose rollouts have all failed: its own, with solved problems.

        the count nearest_solved of the memory's problems, each with its solution

    A prompt with a reward above 0, or without a neighbor, has its own message; an example that does
    not fit is omitted.

    Args:
      count: K, number of examples, above 0.
      threshold: Smallest cosine similarity of an example, in [-1, 1]; None for no bound.
      embed: ``text -> [D]``, such as :func:`~jaxrl_llm.curation.hashed_words` or an encoder.

    Returns:
      The option ``text`` of :func:`~jaxrl_llm.curation.two_phase` with :func:`solved_examples`.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.seeded_message(count=2)
      seeded_message(count=2)

    References:
      XRPO (arXiv:2510.06672) with K = 2, PAPER. The words of the message, the embedding, and
      training the rollouts as responses to the message that they were sampled from are ours.
    """
    checks.check_count("seeded_message", count=count)
    if threshold is not None and not -1 <= threshold <= 1:
        raise ValueError(f"seeded_message: threshold must be in [-1, 1]; got {threshold!r}.")
    return _SeededMessage(count=count, threshold=threshold, embed=embed)
