"""A collector that first samples plain groups, and then again with help if they fail.

``hinted(policy)`` is the collector; a policy decides, for one group at a time, the next requests
and the rollouts of its row. A policy is a value with

    first(group_size)   -> rollouts of the plain group
    ask(group)          -> further requests for it, none when it is complete
    members(group)      -> its row, as (request, rollout)
    check(row)          -> raises ValueError if the prompt's row of the data lacks what it reads

and ``needs``, the :class:`~jaxrl_llm.curation.Needs` of these requests; with
``width(group_size)`` if its rows may be larger than G, ``check_sizes`` of a collector, and
``first_help``, the index of the first batch with help, if that is not 0. The policies of the field
are in :mod:`~jaxrl_llm.curation.collectors.hints.policies`. The help comes as messages: functions
``row -> (message, ...)`` from the weakest help to the strongest.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.curation.collectors.needs import Needs, needs_of, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    JUDGE,
    Collection,
    Collector,
    Decision,
    Outcome,
    Request,
    Row,
    in_order,
    sized,
)

__all__ = ["hinted", "share_messages", "tier_messages"]

HINT = "{question}\n\nHint: {hint}"
BEGINNING = "{question}\n\nA solution begins with:\n{hint}"


class GuidedGroup(NamedTuple):
    """A group of a batch and its outcomes so far.

    Attributes:
      prompt: Index of its prompt in the data set.
      data: For each prompt, its ``text`` and the columns of its row.
      encode: ``encode(text, ends=False) -> tokens`` of a response.
      decode: ``tokens -> text``.
      place: Index of the group in the batch, from 0.
      step: Index of the batch in the run, from 0.
      group_size: G.
      numbers: Indices of its requests in the batch, the plain one first.
      requests: The same requests, all of which have finished.
      outcomes: Their outcomes.
      takes_text: ``text -> bool``, whether a message is short enough for a prompt.
    """

    prompt: int
    data: Sequence[Mapping[str, Any]]
    encode: Callable[..., Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    place: int
    step: int
    group_size: int
    numbers: tuple[int, ...]
    requests: tuple[Request, ...]
    outcomes: tuple[Outcome, ...]
    takes_text: Callable[[str], bool] = bool

    @property
    def row(self) -> Mapping[str, Any]:
        """The prompt's ``text`` and the columns of its row."""
        return self.data[self.prompt]


class HintPolicy(Protocol):
    """Which help a group gets; see the module."""

    @property
    def needs(self) -> Needs:
        """The needs of its requests."""
        ...

    def first(self, group_size: int) -> int:
        """Rollouts of the plain group."""
        ...

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        """What is asked for next; ``extends`` and ``round`` are set by the collector."""
        ...

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        """The row of a group that asks for no more."""
        ...

    def check(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError if a row of the data has not what the policy reads."""
        ...


@dataclasses.dataclass(frozen=True, repr=False)
class _Hinted:
    """Made by :func:`hinted`."""

    policy: HintPolicy
    source: Collector

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | needs_of(self.policy) | Needs(asks_again=True)

    def width(self, group_size: int) -> int:
        width = getattr(self.policy, "width", None)
        return group_size if width is None else width(group_size)

    def check_data(self, data: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if a row has not what the policy reads."""
        for row in data:
            self.policy.check(row)

    def check_sizes(self, data: Sequence[Mapping[str, Any]], *, group_size: int, num_groups: int):
        """Raises ValueError if the policy needs another number of rollouts."""
        check = getattr(self.policy, "check_sizes", None)
        if check is not None:
            check(data, group_size=group_size, num_groups=num_groups)

    def for_run(self, group_size: int, max_new_tokens: int) -> Collector:
        first = self.policy.first(group_size)
        source = sized(self.source, group_size=first, max_new_tokens=max_new_tokens)
        for_run = getattr(self.policy, "for_run", None)
        policy = self.policy if for_run is None else for_run(group_size, max_new_tokens)
        return dataclasses.replace(self, policy=policy, source=source)

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        first = self.policy.first(collection.group_size)
        return self.source.propose(state, key, collection._replace(group_size=first), count)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        total, requests = collection.num_groups, collection.requests
        if len(requests) < total:
            return Decision(ask=total - len(requests)), state
        if collection.waiting:
            return Decision(), state

        def group(place: int) -> GuidedGroup:
            asked = enumerate(requests)
            numbers = tuple(i for i, each in asked if i == place or each.extends == place)
            outcomes = tuple(x for i in numbers if (x := collection.outcomes[i]) is not None)
            return GuidedGroup(
                prompt=int(outcomes[0].prompt),
                data=collection.data,
                encode=collection.encode,
                decode=collection.decode,
                place=place,
                step=collection.step,
                group_size=collection.group_size,
                numbers=numbers,
                requests=tuple(requests[i] for i in numbers),
                outcomes=outcomes,
                takes_text=collection.takes_text,
            )

        groups = [group(place) for place in range(total)]
        after = requests[-1].round + 1
        asked = [
            _drawn_alike(request, requests[group.place])._replace(extends=group.place, round=after)
            for group in groups
            for request in self.policy.ask(group)
        ]
        if asked:
            return Decision(requests=tuple(asked)), state
        plain = collection._replace(requests=requests[:total], outcomes=collection.outcomes[:total])
        _, learned = self.source.observe(state, plain)
        return Decision(rows=tuple(Row(tuple(self.policy.members(g))) for g in groups)), learned

    def __repr__(self) -> str:
        source = "" if self.source == in_order() else f", source={self.source!r}"
        return f"hinted({self.policy!r}{source})"


def _drawn_alike(request: Request, first: Request) -> Request:
    """A request that is sampled at the temperature of the group's first one, unless it says so."""
    said = request.temperature is not None or request.entropy_stats is not None
    if not request.sampled or request.role == JUDGE or said:
        return request
    return request._replace(temperature=first.temperature, entropy_stats=first.entropy_stats)


def hinted(policy: HintPolicy, *, source: Collector | None = None) -> Collector:
    """Samples plain groups, then samples again with help in the prompt as a policy decides.

        plain groups -> rewards -> policy.ask -> hinted rollouts -> policy.ask ... -> policy.members

    Each round waits for the previous one, so a batch does not depend on timing. The responses train
    after the prompt that they were sampled from, unless the policy decides otherwise.

    Args:
      policy: Such as :func:`~jaxrl_llm.curation.ladder`, :func:`~jaxrl_llm.curation.self_hints`,
        :func:`~jaxrl_llm.curation.scaffold`, :func:`~jaxrl_llm.curation.hint_share`,
        :func:`~jaxrl_llm.curation.examples_in_prompt`, :func:`~jaxrl_llm.curation.rethink` and
        :func:`~jaxrl_llm.curation.repair`.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If ``policy`` is not a policy.
      ValueError: From its ``check_data``, if a row of the data lacks what the policy reads.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.hinted(jr.curation.ladder(jr.curation.tier_messages, plain=1))
      hinted(ladder(tier_messages, plain=1))

    References:
      NuRL (arXiv:2509.25666), SAGE (arXiv:2602.03143), Scaf-GRPO (arXiv:2510.19807), GHPO
      (arXiv:2507.10628), ADHint (arXiv:2512.13095), Cog-Rethinker (arXiv:2510.15979) and SCOPE
      (arXiv:2602.24110), which differ in the policy.
    """
    if not all(callable(getattr(policy, name, None)) for name in ("first", "ask", "members")):
        raise TypeError(f"hinted: policy must be a policy such as ladder; got {policy!r}.")
    return _Hinted(policy, prompt_source("hinted", source))


# What a prompt's row holds


def prompt_name(row: Mapping[str, Any]) -> str:
    """The name of a prompt in messages: its id, or the beginning of its text."""
    return repr(row.get("id") or str(row.get("text", ""))[:40])


def read_column(function: str, row: Mapping[str, Any], column: str) -> Any:
    """A column of a prompt's row.

    Raises:
      ValueError: If the row has none; it names the prompt.
    """
    value = row.get(column)
    if value is None:
        raise ValueError(f"{function}: prompt {prompt_name(row)} has no {column!r} in its row.")
    return value


def read_text(function: str, row: Mapping[str, Any], column: str) -> str:
    """A column of a prompt's row that is a text.

    Raises:
      ValueError: If the row has none, or it is no text; it names the prompt.
    """
    value = read_column(function, row, column)
    if not isinstance(value, str):
        raise ValueError(
            f"{function}: {column!r} of prompt {prompt_name(row)} must be a string; got {value!r}."
        )
    return value


def solution_of(function: str, row: Mapping[str, Any], column: str) -> str | np.ndarray:
    """A solution of a prompt's row: a text, or token ids.

    Raises:
      ValueError: If it is missing, empty, or neither of the two; it names the prompt.
    """
    return as_response(function, row, column, read_column(function, row, column))


def as_response(function: str, row: Mapping[str, Any], column: str, value: Any) -> str | np.ndarray:
    """A text, or token ids as int32.

    Raises:
      ValueError: If the value is neither, or empty; it names the prompt.
    """
    what = f"{function}: {column!r} of prompt {prompt_name(row)}"
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{what} is empty.")
        return value
    tokens = np.asarray(value)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise ValueError(f"{what} must be a string or a list of token ids; got {value!r}.")
    if (tokens < 0).any():
        raise ValueError(f"{what} has a token id below 0.")
    return tokens.astype(np.int32)


def check_ended(function: str, row: Mapping[str, Any], column: str) -> None:
    """Raises ValueError for a completion of `jaxrl-llm sample` that did not end by itself.

    A response of the data gets a stop token, which would be learned in the middle of a sentence.
    """
    if column != "completion" or "num_tokens" not in row:
        return
    finish = row.get("finish")
    if finish is not None and finish != "stop":
        raise ValueError(
            f"{function}: the {column!r} of prompt {prompt_name(row)} has the finish {finish!r}, "
            "so it does not end by itself; keep only rows with the finish 'stop'."
        )


def check_template(function: str, template: str, *names: str) -> None:
    """Raises ValueError unless a template names these fields in braces, and no others."""
    try:
        template.format(**dict.fromkeys(names, ""))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"{function}: a template may have the fields {', '.join(names)} in braces; got "
            f"{template!r}."
        ) from error
    if absent := [name for name in names if f"{{{name}}}" not in template]:
        raise ValueError(f"{function}: the template {template!r} has no {{{absent[0]}}}.")


def tier_messages(
    row: Mapping[str, Any],
    *,
    column: str = "hints",
    most: int | None = None,
    template: str = HINT,
) -> tuple[str, ...]:
    """Messages with the hints of a prompt's row, weakest first.

    A hint that is a list of parts gives a message for each number of its parts: the first, the
    first two, and so on.

    Args:
      row: The prompt's ``text`` and columns.
      column: The column with a list of hints.
      most: Maximum number of messages; None for all.
      template: With ``{question}`` and ``{hint}``.

    Returns:
      The messages; none for an empty list.

    Raises:
      ValueError: If the row has no such column, or it is no list of texts.

    Example:
      >>> import jaxrl_llm as jr
      >>> row = {"text": "6 x 7?", "hints": ["multiply", ["6 x 7 is", "6 + 36"]]}
      >>> jr.curation.tier_messages(row, template="{question} ({hint})")
      ('6 x 7? (multiply)', '6 x 7? (6 x 7 is)', '6 x 7? (6 x 7 is 6 + 36)')

    References:
      The cumulative parts are those of Scaf-GRPO (arXiv:2510.19807).
    """
    function = "tier_messages"
    check_template(function, template, "question", "hint")
    if most is not None:
        checks.check_positive(function, finite=True, most=most)
    tiers = read_column(function, row, column)
    hints: list[str] = []
    for tier in [tiers] if isinstance(tiers, str) else tiers:
        parts = list(tier) if isinstance(tier, list | tuple) else [tier]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(
                f"{function}: {column!r} of prompt {prompt_name(row)} must be a list of texts; got "
                f"{tier!r}."
            )
        hints += [" ".join(parts[: n + 1]) for n in range(len(parts))]
    texts = (template.format(question=row["text"], hint=hint) for hint in hints[:most])
    return tuple(texts)


def share_messages(
    row: Mapping[str, Any],
    *,
    column: str = "demonstration",
    shares: tuple[float, ...] = (0.25, 0.5, 0.75),
    template: str = BEGINNING,
) -> tuple[str, ...]:
    """Messages with increasing shares of a solution.

        solution[: round(length share)], half to even, in characters

    Args:
      row: The prompt's ``text`` and columns.
      column: The column with the solution, a text.
      shares: Shares of the solution, each in [0, 1].
      template: With ``{question}`` and ``{hint}``.

    Returns:
      One message per share.

    Raises:
      ValueError: If the row has no such column, or it is no text.

    Example:
      >>> import jaxrl_llm as jr
      >>> row = {"text": "6 x 7?", "demonstration": "6 x 7 = 42"}
      >>> jr.curation.share_messages(row, shares=(0.5,), template="{question} {hint}")
      ('6 x 7? 6 x 7',)

    References:
      GHPO (arXiv:2507.10628), whose released code counts characters.
    """
    function = "share_messages"
    check_template(function, template, "question", "hint")
    for share in shares:
        checks.check_share(function, shares=share)
    solution = read_text(function, row, column)
    lengths = [round(len(solution) * share) for share in shares]
    return tuple(template.format(question=row["text"], hint=solution[:n]) for n in lengths)
