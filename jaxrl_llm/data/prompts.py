"""Prompts, sets of prompts, and the split into training and evaluation."""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from jaxrl_llm.core import checks
from jaxrl_llm.core.compose import stable_repr


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
      text: The user's message, before any chat template.
      answer: The right answer as a text, or several texts any of which is right, if there is one.
      metadata: Fields that a reward may read. "answer" and "id" are added to it, and "messages"
        if there are any.
      id: Name of the prompt in messages and tables; may be empty.
      messages: The conversation whose last message is the text; None if the text is the first.
      place: Where its row is, for messages, such as "line 2 of rows.jsonl"; may be empty.
    """

    text: str
    answer: str | tuple[str, ...] | None = None
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    id: str = ""
    messages: Sequence[Mapping[str, Any]] | None = field(default=None, hash=False)
    place: str = field(default="", repr=False, compare=False)

    def __post_init__(self):
        metadata = {"answer": None, **self.metadata, "id": self.id}
        if self.answer is not None:
            metadata["answer"] = self.answer
        if self.messages is not None:
            metadata["messages"] = list(self.messages)
        object.__setattr__(self, "metadata", metadata)

    @property
    def name(self) -> str:
        """How messages name it: its id, or the beginning of its text."""
        return self.id or self.text[:40]

    @property
    def where(self) -> str:
        """Its name and its place, for messages: ``'rows.jsonl:1' (line 2 of rows.jsonl)``."""
        return f"{self.name!r} ({self.place})" if self.place else repr(self.name)

    @property
    def content(self) -> str:
        """The content that identifies it: the text, with the messages before it, if any."""
        return self.text if self.messages is None else json.dumps(list(self.messages), default=str)


def row_text(prompt: Prompt) -> str:
    """What identifies a prompt with its metadata, but for its name; equal in every process."""

    def plain(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{k!r}: {plain(v)}' for k, v in value.items()))}}}"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(plain, value)))}}}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(plain, value))}]"
        return stable_repr(value)

    metadata = {key: value for key, value in prompt.metadata.items() if key != "id"}
    return f"{prompt.content}\0{plain(metadata)}"


def texts_of_rows(prompts: Iterable[Prompt]) -> set[str]:
    """The texts that several rows have, which differ in their metadata: games of an environment."""
    rows = {row_text(prompt): prompt.content for prompt in prompts}
    return {text for text, count in Counter(rows.values()).items() if count > 1}


class PromptSet(Sequence[Prompt]):
    """An immutable sequence of prompts that is never empty and knows its source.

    An empty sequence, or an empty text, raises ValueError. ``source`` is for messages.

    Example:
      >>> from jaxrl_llm.data import Prompt, PromptSet
      >>> prompts = PromptSet([Prompt("1 + 1 =", "2", id="a"), Prompt("2 + 2 =", "4", id="b")])
      >>> len(prompts), prompts[1].answer, prompts[:1].texts
      (2, '4', ('1 + 1 =',))
    """

    def __init__(self, prompts: Iterable[Prompt], *, source: str = "prompts"):
        self._prompts, self.source = tuple(prompts), source
        if not self._prompts:
            raise ValueError(f"PromptSet: {source} is empty; it has no prompts.")
        for prompt in self._prompts:
            if not prompt.text.strip():
                raise ValueError(f"PromptSet: prompt {prompt.id!r} of {source} has no text.")

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> "PromptSet": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return PromptSet(self._prompts[index], source=self.source)
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptSet) and self._prompts == other._prompts

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PromptSet({len(self)} prompts from {self.source})"

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts, in order."""
        return tuple(prompt.text for prompt in self)


def split_distinct(
    prompts: Iterable[Prompt],
    *,
    held_out: float = 0.2,
    seed: int = 0,
    keep_repeats: bool = False,
    by_row: bool = False,
) -> tuple[PromptSet, PromptSet]:
    """Splits the distinct texts, so that no question is in both sets.

        held out = the round(held_out * D) texts of smallest hash(seed, text), of D distinct ones

    Both sets contain each of their texts once, at its first occurrence, in the order of `prompts`.
    The side of a text hardly depends on the other texts: a set generated with another seed is split
    almost in the same way.

    Args:
      prompts: A `PromptSet` or any prompts; repeats of a text are dropped, unless kept.
      held_out: Share of the distinct texts to hold out, above 0 and below 1; at least one text
        goes to each side.
      seed: Seed of the choice of held-out texts.
      keep_repeats: Whether to keep all prompts of a text, which differ in their metadata, on one
        side.
      by_row: Whether prompts of one text with other metadata are different questions, such as the
        games of an environment, instead of repeats.

    Returns:
      `(train, held_out)`.

    Raises:
      ValueError: If there are fewer than two distinct texts.

    Example:
      >>> from jaxrl_llm.data import Prompt, split_distinct
      >>> repeated = [Prompt(f"{i % 10} + 1 =") for i in range(50)]
      >>> train, held_out = split_distinct(repeated)
      >>> len(train), len(held_out), set(train.texts) & set(held_out.texts)
      (8, 2, set())
    """
    checks.check_share("split_distinct", zero=False, one=False, held_out=held_out)
    checks.check_seed("split_distinct", seed=seed)
    source = getattr(prompts, "source", "prompts")
    prompts, distinct, others, equal = list(prompts), dict[str, list[Prompt]](), 0, 0
    several = texts_of_rows(prompts) if by_row else ()
    for prompt in prompts:
        name = row_text(prompt) if prompt.content in several else prompt.content
        same = distinct.setdefault(name, [])
        if keep_repeats or not same:
            same.append(prompt)
        else:
            differs = row_text(prompt) != row_text(same[0])
            others, equal = others + differs, equal + (not differs)
    if len(distinct) < 2:
        raise ValueError(
            f"split_distinct: {source} has {len(distinct)} distinct text; a split needs at least "
            "two."
        )
    if others:
        warnings.warn(
            f"split_distinct: {others} prompts of {source} are left out: the same text comes "
            "before them with another answer or other columns.",
            stacklevel=2,
        )
    if by_row and 2 * equal >= len(prompts):  # a generator repeats some
        warnings.warn(
            f"split_distinct: {equal} prompts of {source} are left out: the same row comes before "
            "them. If rows that differ in their ids alone are different games, add a column that "
            "tells them apart.",
            stacklevel=2,
        )

    def rank(text: str) -> bytes:
        return hashlib.sha256(f"{seed}\0{text}".encode()).digest()

    count = min(max(round(held_out * len(distinct)), 1), len(distinct) - 1)
    out = set(sorted(distinct, key=rank)[:count])
    train = [x for text, same in distinct.items() if text not in out for x in same]
    others = [x for text, same in distinct.items() if text in out for x in same]
    return PromptSet(train, source=source), PromptSet(others, source=f"held-out {source}")
