"""A library of experiences in the prompt that the policy edits itself: training-free GRPO.

A number that is not a positive integer raises ValueError, and an argument that is not a function
where one is required raises TypeError.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core import Array, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.hints.policies import no_reward
from jaxrl_llm.curation.collectors.messages import plain_source
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.protocol import (
    HINTED,
    JUDGE,
    Collection,
    Collector,
    Decision,
    Request,
    Row,
    in_order,
    on_host,
    sized,
    stack_outcomes,
)
from jaxrl_llm.curation.groups import informative_groups
from jaxrl_llm.curation.strategies import Operation, apply_operations

__all__ = [
    "Experiences",
    "experience_message",
    "experience_texts",
    "experienced",
    "parse_operations",
    "review_message",
]


class Experiences(NamedTuple):
    """State of :func:`experienced`: a library of C texts.

    Attributes:
      texts: uint8 ``[C, L]``, UTF-8 of the experiences, the first L bytes of each.
      lengths: int32 ``[C]``, bytes of each; 0 for an empty entry; empty entries come last.
      reviews: int32 ``[]``, groups that the policy has compared so far.
      source: State of the collector that proposes the prompts.
    """

    texts: Array
    lengths: Array
    reviews: Array
    source: Any


def experience_texts(state: Experiences) -> dict[str, str]:
    """The library of a state as texts by id, to use in your own prompts.

    Args:
      state: State of :func:`experienced`, such as ``result.state.collector_state`` of a run.

    Returns:
      Texts by id: G0, G1, ...

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.experience_texts(jr.curation.experienced().init(10))
      {}

    References:
      Training-free GRPO (arXiv:2510.08191): the library is the result of a run.
    """
    texts, lengths = np.asarray(state.texts), np.asarray(state.lengths)
    used = texts[lengths > 0]
    return {
        f"G{i}": bytes(row[:n]).decode(errors="ignore")
        for i, (row, n) in enumerate(zip(used, lengths[lengths > 0], strict=True))
    }


def experience_message(question: str, library: Mapping[str, str]) -> str:
    """A message with the question followed by the experiences.

    Args:
      question: The user's message.
      library: Texts by id.

    Returns:
      A message; only the question if there are no experiences.

    Example:
      >>> import jaxrl_llm as jr
      >>> print(jr.curation.experience_message("1 + 1?", {"G0": "add slowly"}))
      1 + 1?
      <BLANKLINE>
      Experiences that may help:
      G0: add slowly

    References:
      Training-free GRPO (arXiv:2510.08191); the words are ours.
    """
    if not library:
        return question
    lines = "\n".join(f"{name}: {text}" for name, text in library.items())
    return f"{question}\n\nExperiences that may help:\n{lines}"


def review_message(
    question: str, answers: Sequence[str], rewards: Sequence[float], library: Mapping[str, str]
) -> str:
    """A message that asks for the lessons of a group, as operations of :func:`parse_operations`.

    Args:
      question: The user's message.
      answers: Answers of the group.
      rewards: Rewards of the answers.
      library: Texts by id.

    Returns:
      A message.

    Example:
      >>> import jaxrl_llm as jr
      >>> message = jr.curation.review_message("1 + 1?", ["2", "3"], [1.0, 0.0], {})
      >>> message.splitlines()[2:4]
      ['Reward 1: 2', 'Reward 0: 3']

    References:
      Training-free GRPO (arXiv:2510.08191); the words are ours.
    """
    shown = "\n".join(f"Reward {r:g}: {x}" for x, r in zip(answers, rewards, strict=True))
    lines = "\n".join(f"{name}: {text}" for name, text in library.items()) or "none yet"
    return (
        f"{question}\n\n{shown}\n\nExperiences:\n{lines}\n\n"
        "What makes an answer better? Reply in two lines at most: a new experience, 'G0: text' to "
        "change one, 'delete G0', or 'none'."
    )


def parse_operations(
    text: str, library: Mapping[str, str], *, limit: int | None = None
) -> list[Operation]:
    r"""The operations on a library that a reply names, one per line.

        delete G1          out of the library
        G1: text           another text; also "update G1: text"
        add: text          a new experience; also a line that is none of these
        none               nothing

    A line with an unknown id is a new experience if it has a text, else it is ignored.

    Args:
      text: The reply.
      library: Texts by id.
      limit: Maximum number of operations, above 0; None for all.

    Returns:
      A list of :class:`Operation`, for :func:`apply_operations`.

    Raises:
      ValueError: If ``limit`` is not a positive integer.

    Example:
      >>> import jaxrl_llm as jr
      >>> library = {"G0": "check units"}
      >>> operations = jr.curation.parse_operations("G0: check all units\nadd: draw it", library)
      >>> jr.curation.apply_operations(library, operations)
      {'G0': 'check all units', 'G1': 'draw it'}

    References:
      Training-free GRPO (arXiv:2510.08191), where the reply is JSON; lines are ours, so that small
      models can write them.
    """
    if limit is not None:
        checks.check_count("parse_operations", limit=limit)
    operations: list[Operation] = []
    for line in (line.strip() for line in text.splitlines()):
        if not line or line.lower().rstrip(".") == "none":
            continue
        if match := re.fullmatch(r"delete\s+(G\d+)\W*", line, re.IGNORECASE):
            name = match[1].upper()
            if name in library:
                operations.append(Operation("delete", library[name], name))
        elif match := re.fullmatch(r"(?:update\s+)?(G\d+)\s*:(.*)", line, re.IGNORECASE):
            operations.append(Operation("update", match[2].strip(), match[1].upper()))
        else:
            new = re.fullmatch(r"add\s*:(.*)", line, re.IGNORECASE)
            operations.append(Operation("add", new[1].strip() if new else line))
    return [each for each in operations if each.text][:limit]


@dataclasses.dataclass(frozen=True)
class _WithExperiences:
    """The message of a row of the data: as many experiences, the last ones, as there is room."""

    message: Callable
    library: tuple[str, ...]
    takes_text: Callable = dataclasses.field(compare=False)

    def __call__(self, row: Mapping[str, Any]) -> str:
        question, text = str(row["text"]), ""
        for first in range(len(self.library) + 1):
            library = {f"G{i}": x for i, x in enumerate(self.library[first:], first)}
            if self.takes_text(text := self.message(question, library)):
                break
        return text


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Experienced:
    """Made by :func:`experienced`."""

    capacity: int
    length: int
    limit: int
    message: Callable
    review: Callable
    source: Collector

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | Needs(sends_text=True, asks_again=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Experienced":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def width(self, group_size: int) -> int:
        return group_size

    def init(self, num_prompts: int) -> Experiences:
        return Experiences(
            texts=np.zeros((self.capacity, self.length), np.uint8),
            lengths=np.zeros(self.capacity, np.int32),
            reviews=np.zeros((), np.int32),
            source=self.source.init(num_prompts),
        )

    def propose(self, state: Experiences, key, collection: Collection, count: int):
        requests, source = self.source.propose(state.source, key, collection, count)
        if text := self.evaluation_text(state, collection.takes_text):
            requests = tuple(each._replace(text=text, role=HINTED) for each in requests)
        return tuple(requests), state._replace(source=source)

    def evaluation_text(
        self, state: Experiences, takes_text: Callable[[str], bool]
    ) -> Callable[[Mapping[str, Any]], str] | None:
        """The message of a row, for an evaluation as well; None while there is no experience."""
        library = tuple(experience_texts(state).values())
        return _WithExperiences(self.message, library, takes_text) if library else None

    def observe(self, state: Experiences, collection: Collection):
        P, requests = collection.num_groups, collection.requests
        if len(requests) < P:
            return Decision(ask=P - len(requests)), state
        if collection.waiting:
            return Decision(), state
        library = experience_texts(state)
        if len(requests) == P:
            # A question to the policy about each group whose rewards differ.
            groups = stack_outcomes(collection.outcomes, rows=P)
            with on_host():
                differ = informative_groups(groups.rewards, where=groups.where)
            reviews = []
            for p in map(int, np.flatnonzero(np.asarray(differ).any(axis=-1))):
                if text := self._review_text(library, collection, p):
                    place = int(collection.outcome(p).prompt)
                    reviews.append(
                        Request(1, place, round=1, text=text, role=JUDGE, reward=no_reward)
                    )
            if reviews:
                return Decision(requests=tuple(reviews)), state
        replies = [collection.outcome(i).texts[0] for i in range(P, len(requests))]
        operations = [
            each for text in replies for each in parse_operations(text, library, limit=self.limit)
        ]
        part = collection._replace(requests=requests[:P], outcomes=collection.outcomes[:P])
        _, source = self.source.observe(state.source, part)
        texts, lengths = np.zeros_like(state.texts), np.zeros_like(state.lengths)
        newest = list(apply_operations(library, operations).values())[-self.capacity :]
        for i, text in enumerate(newest):
            encoded = text.encode(errors="replace")[: self.length]
            # Without the part of a character that the cut may have left at the end.
            encoded = encoded.decode(errors="ignore").encode()
            texts[i, : len(encoded)] = np.frombuffer(encoded, np.uint8)
            lengths[i] = len(encoded)
        reviewed = np.asarray(state.reviews + len(replies), np.int32)
        rows = [Row(tuple((i, j) for j in range(requests[i].rollouts))) for i in range(P)]
        return Decision(rows=tuple(rows)), Experiences(texts, lengths, reviewed, source)

    def _review_text(self, library: dict[str, str], collection: Collection, p: int) -> str | None:
        """The longest message about a group that there is room for, or None.

        Answers are cut first, then there are the best and the worst alone, and then the first
        experiences are left out.
        """
        outcome = collection.outcome(p)
        question = str(collection.data[int(outcome.prompt)]["text"])
        valid = np.flatnonzero(outcome.where)
        order = valid[np.argsort(-outcome.rewards[valid], kind="stable")]
        names = list(library)
        while True:
            for members in (valid, order[[0, -1]]):
                rewards = [float(outcome.rewards[g]) for g in members]
                room = max(len(outcome.texts[g]) for g in members)
                while room:
                    answers = [outcome.texts[g][:room] for g in members]
                    shown = {name: library[name] for name in names}
                    text = self.review(question, answers, rewards, shown)
                    if collection.takes_text(text):
                        return text
                    room //= 2
            if not names:
                return None
            names = names[(len(names) + 1) // 2 :]

    def __repr__(self) -> str:
        defaults = {"capacity": 32, "length": 512, "limit": 2, "message": experience_message}
        shown = []
        for name, default in (defaults | {"review": review_message}).items():
            if (value := getattr(self, name)) != default:
                shown.append(f"{name}={stable_repr(value)}")
        if self.source != in_order():
            shown.append(f"source={self.source!r}")
        return f"experienced({', '.join(shown)})"


def experienced(
    *,
    capacity: int = 32,
    length: int = 512,
    limit: int = 2,
    message: Callable[[str, Mapping[str, str]], str] = experience_message,
    review: Callable[[str, Sequence[str], Sequence[float], Mapping[str, str]], str] = (
        review_message
    ),
    source: Collector | None = None,
) -> Collector:
    """Adds a library of experiences to every prompt; the policy edits it after each batch.

        P groups, each prompt with the library          -> rewards
        each group whose rewards differ -> one reply of the policy: what do the answers teach?
        library <- apply_operations(library, at most ``limit`` operations of each reply)

    The replies do not train; the recipe decides whether the rollouts do (:func:`no_update`). If the
    library is too long for a prompt, the first experiences are omitted; long answers in a review
    are truncated.

    Args:
      capacity: C, maximum number of experiences; the oldest are removed first.
      length: L, maximum bytes of an experience; longer ones are truncated.
      limit: Maximum operations per reply.
      message: ``(question, library) -> message`` of a rollout; it should begin with the question.
      review: ``(question, answers, rewards, library) -> message``.
      source: The collector that proposes the P prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is :class:`Experiences`.

    Raises:
      TypeError: If a message is not a function.
      ValueError: If a number is not a positive integer, or ``source`` sends messages of its own or
        also decides on groups that have finished.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.experienced(capacity=8)
      experienced(capacity=8)

    References:
      Training-free GRPO (arXiv:2510.08191), at most 2 experiences per group. The released code
      first summarizes each rollout, and merges the operations of a batch by another reply; here
      each review reads the answers, and the operations apply in the order of the groups.
    """
    name = "experienced"
    checks.check_count(name, capacity=capacity, length=length, limit=limit)
    for option, function in {"message": message, "review": review}.items():
        if not callable(function):
            raise TypeError(f"{name}: {option} must be a function; got {function!r}.")
    return _Experienced(
        capacity=capacity,
        length=length,
        limit=limit,
        message=message,
        review=review,
        source=plain_source(name, source),
    )
