"""A collector that values prefixes of responses by rollouts that continue them."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.core import ArrayTree, call_with
from jaxrl_llm.core.compose import accepted, stable_repr
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Request,
    Response,
    Row,
    beginning,
    in_order,
    on_host,
    sized,
)
from jaxrl_llm.curation.collectors.trees.rounds import (
    NEEDS_OF_TREES,
    STATISTICS,
    check_counts,
    go_on,
    rule_arrays,
)

__all__ = ["valued"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Valued:
    """Made by :func:`valued`."""

    rule: Callable
    rollouts: int
    segments: int | None
    source: Collector
    length: int | None = None

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | NEEDS_OF_TREES | Needs(values_prefixes=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Valued":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source, length=max_new_tokens)

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        return self.source.propose(state, key, collection, count)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        def more(group: int, before: list[int]) -> tuple[Request, ...]:
            """The rollouts that go on from the prefixes of a group."""
            responses = collection.outcome(before[0]).responses
            begins: list[Response] = []
            for row, place in _prefixes(responses, self._starts(collection, group)).values():
                begins += [beginning(responses[row], place)] * self.rollouts
            if not begins:
                return ()
            asked = collection.requests[group]
            return (asked._replace(rollouts=len(begins), responses=tuple(begins), prompt=None),)

        if (decision := go_on(collection, 1, more)) is not None:
            return decision, state
        groups, requests = collection.num_groups, collection.requests
        rows = []
        for group in range(groups):
            later = [i for i in range(groups, len(requests)) if requests[i].extends == group]
            rows.append(self._row(collection, group, later))
        seen = collection._replace(
            requests=requests[:groups], outcomes=collection.outcomes[:groups]
        )
        _, learned = self.source.observe(state, seen)
        return Decision(rows=tuple(rows)), learned

    def _starts(self, collection: Collection, group: int) -> list[list[int]]:
        """The first tokens of the segments of each response."""
        if self.length is None:
            raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")
        named = accepted(self.rule)
        outcome = collection.outcome(group)
        size = len(outcome.responses)
        names = [name for name in STATISTICS if name in named]
        context = rule_arrays(collection, [group], size, self.length, names)
        if "breaks" in named:
            every = {int(token) for response in outcome.responses for token in response.tokens}
            breaking = {token for token in every if "\n" in collection.decode([token])}
            breaks = np.zeros((size, self.length), bool)
            for row, response in zip(breaks, outcome.responses, strict=True):
                row[: len(response.tokens)] = [int(token) in breaking for token in response.tokens]
            context["breaks"] = breaks
        context["count"] = self.segments or self.length
        with on_host():
            places = np.asarray(call_with(self.rule, context=context))
        if places.ndim != 2 or len(places) != size or places.dtype.kind not in "iu":
            raise ValueError(
                f"{self!r}: the rule must return integers [{size}, n]; got shape {places.shape} "
                f"of {places.dtype}."
            )
        starts = [[int(place) for place in row if place >= 0] for row in places]
        for row, response in zip(starts, outcome.responses, strict=True):
            if row != sorted(set(row)) or (row and row[-1] >= len(response.tokens)):
                raise ValueError(
                    f"{self!r}: the rule begins segments at tokens {row} of a response of "
                    f"{len(response.tokens)} tokens; they must rise and lie in it."
                )
        return starts

    def _row(self, collection: Collection, group: int, later: list[int]) -> Row:
        """The responses of a group with the values of their prefixes."""
        responses, starts = collection.outcome(group).responses, self._starts(collection, group)
        values: dict[bytes, float] = {}
        if later:
            outcome = collection.outcome(later[0])
            for i, prefix in enumerate(_prefixes(responses, starts)):
                mine = slice(i * self.rollouts, (i + 1) * self.rollouts)
                if (where := outcome.where[mine]).any():
                    values[prefix] = float(outcome.rewards[mine][where].mean())
        members, segments = [], []
        for j, (response, row) in enumerate(zip(responses, starts, strict=True)):
            prefixes = [_prefix(response, place) for place in row]
            # Where the reward failed on all that goes on from a prefix, its value is not known.
            if all(prefix in values for prefix in prefixes):
                members.append((group, j))
                known = [values[prefix] for prefix in prefixes]
                segments.append(tuple(zip(row, known, strict=True)))
        if not members:
            return Row(tuple((group, j) for j in range(len(responses))), takes_part=False)
        return Row(tuple(members), segments=tuple(segments))

    def __repr__(self) -> str:
        text = f"{stable_repr(self.rule)}, rollouts={self.rollouts}"
        if self.segments is not None:
            text += f", segments={self.segments}"
        if self.source != in_order():
            text += f", source={self.source!r}"
        return f"valued({text})"


def _prefix(response: Response, place: int) -> bytes:
    """What stands before a token, to compare by."""
    return np.asarray(response.tokens[:place], np.int32).tobytes()


def _prefixes(
    responses: tuple[Response, ...], starts: list[list[int]]
) -> dict[bytes, tuple[int, int]]:
    """The prefixes of a group, each once, with a response that begins with it and its length."""
    prefixes: dict[bytes, tuple[int, int]] = {}
    for row, (response, places) in enumerate(zip(responses, starts, strict=True)):
        for place in places:
            prefixes.setdefault(_prefix(response, place), (row, place))
    return prefixes


def valued(
    rule: Callable,
    *,
    rollouts: int = 9,
    segments: int | None = None,
    source: Collector | None = None,
) -> Collector:
    """Samples continuations of prefixes of each response; their mean reward is the prefix's value.

        P groups of G -> the first tokens of segments, by the rule -> `rollouts` for each prefix
        value of a prefix = mean reward of its continuations

    The continuations do not train. Prefixes that responses of a group share, such as the prompt,
    are valued once. The batch has ``segment_ids``, ``segment_where`` and
    ``prefix_values``, see :func:`jaxrl_llm.advantages.segment_advantages`. A response takes no part
    if the reward failed for all continuations of one of its prefixes.

    Args:
      rule: Function that returns int32 ``[n, C]``: the first tokens of segments, ascending, -1 for
        none. Its parameters may be, of the responses: ``mask`` bool ``[n, T]``, ``breaks`` (whether
        a token's text has a line break), ``old_entropy``, ``old_logp`` and ``behavior_logp`` ``[n,
        T]``, ``lengths`` ``[n]``, ``count`` (= segments). Such as
        :func:`~jaxrl_llm.curation.line_starts`, :func:`~jaxrl_llm.curation.stretch_starts` and
        :func:`~jaxrl_llm.curation.spo_cutpoints`.
      rollouts: Number of rollouts for each prefix.
      segments: C, maximum segments of a response; None for no limit.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If ``rule`` is no function, or a number no integer.
      ValueError: If a number is not above 0; in a run, if the rule returns what are no places.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.valued(jr.curation.line_starts)
      valued(line_starts, rollouts=9)

    References:
      VinePPO (arXiv:2410.01679), 9 rollouts from each line; SPO-chain (arXiv:2505.23564). There
      each response values its prompt separately; here tokens continue, and text is not tokenized
      again.
    """
    name = "valued"
    if not callable(rule):
        raise TypeError(f"{name}: rule must be a function; got {rule!r}.")
    check_counts(name, {"rollouts": rollouts, "segments": segments})
    return _Valued(
        rule=rule, rollouts=rollouts, segments=segments, source=prompt_source(name, source)
    )
