"""Collectors written as generators: they ask for groups, wait, and return the rows of the batch."""

import dataclasses
from collections.abc import Callable, Generator
from typing import Any, Self

from jaxrl_llm.core import ArrayTree
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Outcome,
    Request,
    Row,
    full_row,
    in_order,
    sized,
)

__all__ = ["GroupHandle", "OpenBatch", "from_generator"]


@dataclasses.dataclass(eq=False)
class GroupHandle:
    """A requested group.

    Attributes:
      index: Of its request in the batch.
      request: Its request; None until it has been sent.
      outcome: Its results; None until it has finished.
    """

    index: int
    request: Request | None = None
    outcome: Outcome | None = None

    def row(self, takes_part: bool = True) -> Row:
        """All its rollouts as a row of the batch.

        Raises ValueError if the group has not finished.
        """
        if self.request is None or self.outcome is None:
            raise ValueError(
                f"from_generator: group {self.index} has not finished; wait for its outcome with "
                "yield before its row."
            )
        return full_row(self.index, self.request.rollouts, takes_part)


class OpenBatch:
    """A batch in the making, as a generator sees it.

    Attributes:
      collection: The batch so far, with the data and the sizes of the run.
      groups: All groups so far, in the order of their requests.
    """

    def __init__(self, collection: Collection, memo: dict[int, tuple[Outcome, Any]]):
        self.collection, self._memo = collection, memo
        self.groups: list[GroupHandle] = []
        self._unsent: list[Request | None] = []  # None for the next group of the source

    @property
    def num_groups(self) -> int:
        """P, groups of the batch."""
        return self.collection.num_groups

    @property
    def group_size(self) -> int:
        """G, rollouts of a group."""
        return self.collection.group_size

    def ask(self, count: int) -> list[GroupHandle]:
        """The next ``count`` groups of the source."""
        return [self._add(None) for _ in range(count)]

    def request(self, request: Request) -> GroupHandle:
        """A group of this request, such as more rollouts of an earlier group."""
        return self._add(request)

    def once(self, function: Callable[[list[Outcome]], list], groups: list[GroupHandle]) -> list:
        """``function(outcomes) -> results``, called only with the outcomes that it has not seen.

        The groups have finished. Results are remembered until the batch is complete.
        """
        outcomes = [group.outcome for group in groups if group.outcome is not None]
        new = [x for x in outcomes if id(x) not in self._memo]
        results = function(new) if new else []
        self._memo |= {id(x): (x, result) for x, result in zip(new, results, strict=True)}
        return [self._memo[id(x)][1] for x in outcomes]

    def decision(self) -> Decision:
        """The requests that have not been sent: those of one kind, since the order must hold."""
        kinds = [request is None for request in self._unsent]
        same = kinds.index(not kinds[0]) if len(set(kinds)) == 2 else len(kinds)
        if kinds and kinds[0]:
            return Decision(ask=same)
        return Decision(requests=tuple(r for r in self._unsent[:same] if r is not None))

    def _add(self, request: Request | None) -> GroupHandle:
        index, sent = len(self.groups), self.collection
        if index < len(sent.requests):
            group = GroupHandle(index, sent.requests[index], sent.outcomes[index])
        else:
            self._unsent.append(request)
            group = GroupHandle(index)
        self.groups.append(group)
        return group


Collect = Callable[[OpenBatch], Generator[None, None, list[Row]]]


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class GeneratorCollector:
    """A collector whose method ``collect`` is a generator; each ``observe`` runs it from its start.

    Attributes:
      source: The collector that proposes the groups of ``ask``.
    """

    source: Collector
    memo: dict = dataclasses.field(default_factory=dict, init=False, compare=False)  # of ``once``

    @property
    def needs(self) -> Needs:
        """The needs of the source, and of the generator's own requests."""
        return needs_of_sources(self.source) | Needs(asks_again=True) | self.also

    @property
    def also(self) -> Needs:
        """What the requests and rows of the generator need of a run."""
        return Needs()

    def collect(self, batch: OpenBatch) -> Generator[None, None, list[Row]]:
        """Asks for groups, waits by ``yield``, and returns the rows; see :func:`from_generator`."""
        raise NotImplementedError

    def for_run(self, group_size: int, max_new_tokens: int) -> Self:
        """The collector with the sizes of a run."""
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def init(self, num_prompts: int) -> ArrayTree:
        """The state of the source."""
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        """The next groups of the source."""
        return self.source.propose(state, key, collection, count)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        """What the generator asks for, or the rows that it returned."""
        if not collection.requests:
            self.memo.clear()
        batch = OpenBatch(collection, self.memo)
        run, seen = self.collect(batch), -1
        try:
            while len(batch.groups) > seen:  # as far as the outcomes lead
                seen = len(batch.groups)
                next(run)
        except StopIteration as end:
            self.memo.clear()
            return self._complete(state, collection, end.value)
        return batch.decision(), state

    def _complete(self, state, collection: Collection, rows: list[Row]):
        """The decision, and the source's state.

        The source learns from the groups up to the last of the batch: which of those behind it have
        finished depends on timing. A batch with a row that does not train has waited for all.
        """
        count = max(request for row in rows for request, _ in row.members) + 1
        if not all(row.takes_part for row in rows):
            count = len(collection.requests)
        part = collection._replace(
            requests=collection.requests[:count], outcomes=collection.outcomes[:count]
        )
        return Decision(rows=tuple(rows)), self.source.observe(state, part)[1]

    def of_source(self) -> str:
        """The source as a last argument, for ``repr``; empty for the default."""
        return "" if self.source == in_order() else f", source={self.source!r}"


@dataclasses.dataclass(frozen=True, repr=False)
class _FromGenerator(GeneratorCollector):
    """Made by :func:`from_generator`."""

    function: Collect
    requests: Needs

    @property
    def also(self) -> Needs:
        return self.requests

    def collect(self, batch: OpenBatch) -> Generator[None, None, list[Row]]:
        return self.function(batch)

    def __repr__(self) -> str:
        needs = "" if self.requests == Needs() else f", needs={self.requests!r}"
        return f"from_generator({stable_repr(self.function)}{needs}{self.of_source()})"


def from_generator(
    collect: Collect, *, needs: Needs | None = None, source: Collector | None = None
) -> Collector:
    """A collector from a generator that asks for groups, waits, and returns the rows of the batch.

    ``collect(batch)`` gets an :class:`OpenBatch`. ``batch.ask(count)`` and ``batch.request(...)``
    return handles of groups, whose ``outcome`` is None until they have finished. ``yield`` waits
    until another group may have finished, so it belongs into a loop that looks again. The returned
    list has one row for each of the P groups, as of ``group.row()``.

    The generator runs from its start whenever groups have finished, with the same handles. It must
    depend on nothing but ``batch``, and on which groups have finished but not on their order.

    Args:
      collect: The generator function; with options, through :func:`jaxrl_llm.bind`.
      needs: What requests of its own need of a run, such as ``Needs(sends_text=True)`` if they have
        a text; None for nothing.
      source: The collector that proposes the groups of ``ask``; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If ``collect`` is not a function, or ``needs`` not a record of needs.
      ValueError: If the source requests more after groups have finished.

    Example:
      >>> import jaxrl_llm as jr
      >>> def twice_if_all_fail(batch):
      ...     groups = batch.ask(batch.num_groups)
      ...     while any(group.outcome is None for group in groups):
      ...         yield
      ...     failed = [group for group in groups if group.outcome.rewards.max() == 0]
      ...     others = batch.ask(len(failed))
      ...     while any(group.outcome is None for group in others):
      ...         yield
      ...     rest = [group for group in groups if group not in failed]
      ...     return [group.row() for group in rest + others]
      >>> collector = jr.curation.from_generator(twice_if_all_fail)
      >>> collection = jr.curation.Collection(num_groups=2, group_size=4)
      >>> collector.observe(collector.init(10), collection)[0]
      Decision(ask=2, rows=None, requests=())
    """
    if not callable(collect):
        raise TypeError(f"from_generator: collect must be a function; got {collect!r}.")
    if not isinstance(needs, Needs | None):
        raise TypeError(f"from_generator: needs must be a curation.Needs; got {needs!r}.")
    source = prompt_source("from_generator", source)
    return _FromGenerator(collect, needs or Needs(), source=source)
