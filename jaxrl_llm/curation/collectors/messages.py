"""Collectors that send one question in several messages: as paraphrases, or with budgets."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.curation.collectors.needs import Needs, needs_of, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Request,
    Row,
    in_order,
    more_of,
    resized,
    sized,
)

__all__ = ["budgeted", "paraphrased", "told_budgets"]

BUDGET_TEMPLATE = "{prompt}\n\nAnswer within {budget} tokens."


class _Paraphrase(NamedTuple):
    """The n-th paraphrase of a row."""

    place: int

    def __call__(self, row: Mapping[str, Any]) -> str:
        return row["paraphrases"][self.place]


class _Budget(NamedTuple):
    """The message of a row with a budget."""

    budget: int
    template: str

    def __call__(self, row: Mapping[str, Any]) -> str:
        return budget_message(row["text"], self.budget, template=self.template)


def plain_source(name: str, source: Collector | None) -> Collector:
    """:func:`prompt_source`, for a collector that sends messages of its own.

    Raises:
      ValueError: If the source sends messages as well, which would be lost.
    """
    source = prompt_source(name, source)
    if needs_of(source).sends_text:
        raise ValueError(
            f"{name}: source {source!r} sends messages of its own, which those of {name} would "
            "replace; use a source that sends the prompts themselves, such as in_epochs."
        )
    return source


@dataclasses.dataclass(frozen=True)
class SeveralMessages:
    """Requests each prompt of a source once per message; made by the functions below."""

    source: Collector

    @property
    def needs(self) -> Needs:
        """Those of the source, for requests with messages."""
        return needs_of_sources(self.source) | Needs(
            sends_text=True, helps_every_group=True, asks_again=True
        )

    def for_run(self, group_size: int, max_new_tokens: int) -> "SeveralMessages":
        """Passes the sizes of a run to the source."""
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def init(self, num_prompts: int) -> ArrayTree:
        """The state of the source."""
        return self.source.init(num_prompts)

    def _messages(self, collection: Collection) -> list[tuple[Any, int]]:
        """The texts sent with a prompt, and the rollouts of each text."""
        raise NotImplementedError

    def propose(self, state, key, collection: Collection, count: int):
        """The next messages, those of a prompt one behind the other."""
        messages = self._messages(collection)
        each, first = len(messages), len(collection.requests)
        begun, ended = -(-first // each), -(-(first + count) // each)
        proposed: tuple[Request, ...] = ()
        if ended > begun:
            seen = collection._replace(
                requests=collection.requests[::each], outcomes=collection.outcomes[::each]
            )
            proposed, state = self.source.propose(state, key, seen, ended - begun)
        requests = []
        for i in range(first, first + count):
            group, place = divmod(i, each)
            text, rollouts = messages[place]
            if place:  # sampled as the first message of the prompt is
                root = i - place
                asked = requests[root - first] if root >= first else collection.requests[root]
                requests.append(more_of(asked, rollouts)._replace(extends=root, text=text))
            else:
                requests.append(resized(proposed[group - begun], rollouts)._replace(text=text))
        return tuple(requests), state

    def _observe(self, state, collection: Collection, wanted: int):
        """Asks for so many messages; the decision, the state and whether all have finished."""
        if (missing := wanted - len(collection.requests)) > 0:
            return Decision(ask=missing), state, False
        if collection.waiting:
            return Decision(), state, False
        return Decision(), self.source.observe(state, collection)[1], True


@dataclasses.dataclass(frozen=True, repr=False)
class _Paraphrased(SeveralMessages):
    """Made by :func:`paraphrased`."""

    def _messages(self, collection: Collection):
        count = len(collection.data[0]["paraphrases"])
        return [(_Paraphrase(n), collection.group_size) for n in range(count)]

    def check_data(self, data: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError unless all rows have the same number of paraphrases."""
        counts = []
        for row in data:
            texts, name = row.get("paraphrases"), row.get("id") or row["text"][:40]
            listed = isinstance(texts, list | tuple) and all(isinstance(x, str) for x in texts)
            if not listed or len(texts) < 2:
                raise ValueError(
                    f"{self!r}: prompt {name!r} has {texts!r:.80} in its column 'paraphrases', "
                    "where a list of at least two texts is needed."
                )
            if counts and len(texts) != counts[0]:
                raise ValueError(
                    f"{self!r}: prompt {name!r} has {len(texts)} paraphrases, those before it "
                    f"{counts[0]}."
                )
            counts.append(len(texts))

    def check_sizes(self, data: Sequence[Mapping], *, group_size: int, num_groups: int) -> None:
        """Raises ValueError unless a batch holds all paraphrases of each of its questions."""
        del group_size
        if num_groups % (count := len(data[0]["paraphrases"])):
            raise ValueError(
                f"{self!r}: a batch of {num_groups} prompts does not hold all {count} paraphrases "
                "of each question; prompts_per_step must be a multiple."
            )

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        # A part of a batch may end within the paraphrases of its last question.
        decision, state, done = self._observe(state, collection, collection.num_groups)
        if not done:
            return decision, state
        requests = enumerate(collection.requests)
        rows = (Row(tuple((i, g) for g in range(request.rollouts))) for i, request in requests)
        return Decision(rows=tuple(rows)), state

    def __repr__(self) -> str:
        return f"paraphrased({'' if self.source == in_order() else f'source={self.source!r}'})"


@dataclasses.dataclass(frozen=True, repr=False)
class _Budgeted(SeveralMessages):
    """Made by :func:`budgeted`."""

    budgets: tuple[int, ...]
    template: str = BUDGET_TEMPLATE

    @property
    def needs(self) -> Needs:
        several = len(self.budgets) > 1
        return super().needs | Needs(mixes_texts=several, grades_apart=several)

    def _messages(self, collection: Collection):
        group, each = collection.group_size, len(self.budgets)
        counts = [group // each + (n < group % each) for n in range(each)]
        texts = [_Budget(budget, self.template) for budget in self.budgets]
        return list(zip(texts, counts, strict=True))

    def check_sizes(self, data: Sequence[Mapping], *, group_size: int, num_groups: int) -> None:
        """Raises ValueError if a group has fewer rollouts than there are budgets."""
        del data, num_groups
        if group_size < len(self.budgets):
            raise ValueError(
                f"{self!r}: a group of {group_size} rollouts is less than one for each of the "
                f"{len(self.budgets)} budgets."
            )

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        each = len(self.budgets)
        decision, state, done = self._observe(state, collection, collection.num_groups * each)
        if not done:
            return decision, state
        rows = []
        for first in range(0, len(collection.requests), each):
            places = range(first, first + each)
            sizes = [collection.requests[i].rollouts for i in places]
            members = [(i, g) for i, n in zip(places, sizes, strict=True) for g in range(n)]
            rows.append(Row(tuple(members)))
        return Decision(rows=tuple(rows)), state

    def __repr__(self) -> str:
        text = f"{self.budgets}"
        if self.template != BUDGET_TEMPLATE:
            text += f", template={self.template!r}"
        if self.source != in_order():
            text += f", source={self.source!r}"
        return f"budgeted({text})"


def paraphrased(*, source: Collector | None = None) -> Collector:
    """Requests all paraphrases of each question: one row of the batch each.

        rows n N to n N + N - 1 = the N paraphrases of question n, G rollouts each

    The data's column ``paraphrases`` is a list of N texts, with the same N for every row; P is a
    multiple of N. As a part of :func:`mixed` inside :func:`replayed`, its rows may end within the
    paraphrases of a question. The responses are graded as responses to the question, and train on
    the prompt that they answer.

    Args:
      source: The collector that proposes the questions; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If the source is not a collector.
      ValueError: If the source sends messages of its own, or also decides on groups that have
        finished.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.paraphrased()
      paraphrased()

    References:
      Con-RAG, PS-GRPO (arXiv:2510.04392): six paraphrases of four rollouts. PAPER reading.
    """
    return _Paraphrased(plain_source("paraphrased", source))


def budgeted(
    budgets: Sequence[int],
    *,
    template: str = BUDGET_TEMPLATE,
    source: Collector | None = None,
) -> Collector:
    """Tells the rollouts of a group different budgets of tokens.

        a group of G = G / k rollouts for each of k budgets; if k does not divide G, the first
                       budgets get one more

    The budget is part of the user's message, which the rollouts train on.

    Args:
      budgets: Tokens, ascending.
      template: Template of the message, with ``{prompt}`` and ``{budget}``.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If a budget is not an integer or the source not a collector.
      ValueError: If there are none, they do not ascend from 1, the template lacks a field, or the
        source sends messages of its own or also decides on groups that have finished.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.budgeted((512, 1024, 2048, 2560))
      budgeted((512, 1024, 2048, 2560))

    References:
      HBPO (arXiv:2507.15844): 512, 1024, 2048 and 2560 of 4096 tokens. There the sentence is at the
      beginning of the response, after the tag of its reasoning.
    """
    name = "budgeted"
    budgets = tuple(budgets)
    if not all(isinstance(b, int | np.integer) and not isinstance(b, bool) for b in budgets):
        raise TypeError(f"{name}: budgets must be integers; got {budgets}.")
    budgets = tuple(int(b) for b in budgets)
    if not budgets or any(b <= a for a, b in zip((0, *budgets), budgets, strict=False)):
        raise ValueError(f"{name}: budgets must ascend from at least 1; got {budgets}.")
    if "{prompt}" not in template or "{budget}" not in template:
        raise ValueError(f"{name}: template must have {{prompt}} and {{budget}}; got {template!r}.")
    return _Budgeted(plain_source(name, source), budgets, template)


def budget_message(prompt: str, budget: int, *, template: str = BUDGET_TEMPLATE) -> str:
    """The message that asks for a response of at most so many tokens."""
    return template.replace("{budget}", str(budget)).replace("{prompt}", prompt)


def told_budgets(
    texts: Sequence[Sequence[str]],
    *,
    prompts: Sequence[str],
    messages: Sequence[Sequence[str | None]],
    budgets: Sequence[int],
    unlimited: float,
    template: str = BUDGET_TEMPLATE,
) -> np.ndarray:
    """The budget that each rollout was told, as :func:`budgeted` sends them.

        budgets[p, g] = the b whose message is that of the rollout

    For ``Computed("budgets", ..., "responses")``.

    Args:
      texts: P lists of G responses.
      prompts: P messages of the user.
      messages: The messages sent instead, P lists of G; None for the prompt itself.
      budgets: Tokens.
      unlimited: Value for a rollout without a budget.
      template: Template of the message.

    Returns:
      float32 ``[P, G]``.

    Raises:
      ValueError: If ``unlimited`` is not above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.told_budgets(
      ...     [["a", "b"]], prompts=["q"], messages=[["q in 4", None]], budgets=(2, 4),
      ...     unlimited=8, template="{prompt} in {budget}").tolist()
      [[4.0, 8.0]]

    References:
      HBPO (arXiv:2507.15844) and its released code, which reads the number from the text.
    """
    checks.check_positive("told_budgets", unlimited=unlimited)
    told = np.full((len(texts), len(texts[0])), unlimited, np.float32)
    for p, prompt in enumerate(prompts):
        sent = {budget_message(prompt, b, template=template): b for b in budgets}
        for g, message in enumerate(messages[p]):
            told[p, g] = sent.get(message, unlimited) if message is not None else unlimited
    return told
