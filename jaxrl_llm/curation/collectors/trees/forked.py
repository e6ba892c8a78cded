"""A collector whose responses fork: leaves of trees, in rounds."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.core import ArrayTree, call_with
from jaxrl_llm.core.compose import accepted, stable_repr
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    UNFINISHED,
    Collection,
    Collector,
    Decision,
    Request,
    beginning,
    in_order,
    more_of,
    on_host,
    sized,
)
from jaxrl_llm.curation.collectors.trees.rounds import (
    NEEDS_OF_TREES,
    STATISTICS,
    check_counts,
    complete_batch,
    finished_members,
    go_on,
    paused,
    rule_arrays,
)

__all__ = ["forked"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Forked:
    """Made by :func:`forked`."""

    rule: Callable
    forks: int
    branches: int | tuple[int, ...]
    rounds: int
    segment: int | tuple[int, ...] | None
    source: Collector
    length: int | None = None

    @property
    def needs(self) -> Needs:
        entropy = Needs(records_entropy="old_entropy" in accepted(self.rule))
        return needs_of_sources(self.source) | NEEDS_OF_TREES | entropy

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Forked":
        if group_size < self._leaves:
            raise ValueError(
                f"{self!r}: a tree has {self._leaves} leaves, more than a group of {group_size}."
            )
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        segment = self.segment
        if isinstance(segment, tuple) and segment[-1] >= max_new_tokens:
            raise ValueError(
                f"{self!r}: segment must end below the {max_new_tokens} tokens of a response."
            )
        if isinstance(segment, int):
            # The last round samples to the end of a response.
            segment = min(segment, max(1, max_new_tokens // (self.rounds + 1)))
        return dataclasses.replace(self, source=source, length=max_new_tokens, segment=segment)

    @property
    def _leaves(self) -> int:
        """Leaves of a tree, at most."""
        sizes = [1]
        for number in range(self.rounds):
            sizes.append(sizes[-1] * self.forks * self._branches(number))
        return sum(sizes) if self.segment is None else sizes[-1]

    def _branches(self, number: int) -> int:
        """Of a fork of a response of round ``number``."""
        return self.branches[number] if isinstance(self.branches, tuple) else self.branches

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        trees, rest = divmod(collection.group_size, self._leaves)
        size = collection._replace(group_size=trees + (rest if self.segment is None else 0))
        requests, state = self.source.propose(state, key, size, count)
        return tuple(self._limited(x, 0, x) for x in requests), state

    def _limited(self, request: Request, number: int, root: Request) -> Request:
        if self.segment is None:
            return request
        if number == self.rounds:
            return request._replace(limit=None, pauses=False)
        ends = self.segment
        limit = ends[number] if isinstance(ends, tuple) else ends * (number + 1)
        return paused(request, limit, root=root, length=self.length)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        def more(group: int, before: list[int]) -> tuple[Request, ...]:
            """The forks of the responses of a round."""
            if self.length is None:
                raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")
            responses = [y for i in before for y in collection.outcome(i).responses]
            names = [name for name in STATISTICS if name in accepted(self.rule)]
            arrays = rule_arrays(collection, before, collection.group_size, self.length, names)
            with on_host():
                context = arrays | {"count": self.forks}
                places = np.asarray(call_with(self.rule, context=context))
            shape = (collection.group_size, self.forks)
            if places.shape != shape or places.dtype.kind not in "iu":
                raise ValueError(
                    f"{self!r}: the rule must return integers {shape}; got shape {places.shape} of "
                    f"{places.dtype}."
                )
            number = collection.requests[before[0]].round
            # Roots beyond the complete trees do not fork.
            forking = responses if number else responses[: collection.group_size // self._leaves]
            begins = []
            for row, response in enumerate(forking):
                n = len(response.tokens)
                for place in places[row]:
                    if place < 0:
                        continue
                    if place > n or (place == n and response.finish != UNFINISHED):
                        raise ValueError(
                            f"{self!r}: the rule forks a response of {n} tokens before token "
                            f"{place}."
                        )
                    begins += [beginning(response, int(place))] * self._branches(number)
            if not begins:
                return ()
            root = collection.requests[group]
            request = more_of(root, len(begins), tuple(begins))
            return (self._limited(request, number + 1, root),)

        if (decision := go_on(collection, self.rounds, more)) is not None:
            return decision, state
        return complete_batch(self.source, state, collection, finished_members(collection))

    def __repr__(self) -> str:
        text = f"{stable_repr(self.rule)}, forks={self.forks}, branches={self.branches}"
        if self.rounds != 1:
            text += f", rounds={self.rounds}"
        if self.segment is not None:
            text += f", segment={self.segment}"
        if self.source != in_order():
            text += f", source={self.source!r}"
        return f"forked({text})"


def forked(
    rule: Callable,
    *,
    forks: int = 2,
    branches: int | Sequence[int] = 2,
    rounds: int = 1,
    segment: int | Sequence[int] | None = None,
    source: Collector | None = None,
) -> Collector:
    """Samples a few responses of each prompt, then branches of them at tokens of a rule.

        round 0: roots;   round r: at each fork of a response of round r - 1, `branches` more

    A branch shares the tokens before the fork with its parent and samples the rest. The group
    consists of the leaves: all responses that ended. Without a ``segment`` responses are complete
    before they fork, and a root has ``1 + forks branches + ...`` leaves, ``(forks branches)^r`` for
    round r. With one, a response pauses after ``segment`` tokens in each round but the last, so
    that it can fork at its end: ``(forks branches)^rounds`` leaves. A group of G has as many trees
    as fit; without a segment, roots that do not fork fill it.

    ``packing="tree"`` trains on the unique tokens of such a group.

    Args:
      rule: int32 ``[n, forks]``: the places of tokens before which each response forks, -1 for
        none. Its parameters may be, of the responses of the last round: ``mask`` bool ``[n, T]``
        (True for the tokens that they sampled themselves), ``old_entropy``, ``old_logp`` and
        ``behavior_logp`` ``[n, T]``, ``lengths`` and ``unfinished`` (whether they paused) ``[n]``,
        ``count`` (= forks). Such as :func:`~jaxrl_llm.curation.top_entropy_forks` and, with a
        segment, :func:`~jaxrl_llm.curation.segment_forks`.
      forks: Maximum forks of a response.
      branches: Branches of a fork; or one number per round.
      rounds: Number of rounds of forks.
      segment: Tokens after which responses pause in each round but the last, at most
        ``max_new_tokens / (rounds + 1)``; or the lengths at which they pause, rising, one of each
        of these rounds.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If ``rule`` is no function, or a number no integer.
      ValueError: If a number is not above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.forked(jr.curation.top_entropy_forks)
      forked(top_entropy_forks, forks=2, branches=2)

    References:
      ETTRL (arXiv:2508.11356): 12 roots, 2 forks of 2 branches, 60 leaves. BranchGRPO
      (arXiv:2509.06040) for segments.
    """
    name = "forked"
    if not callable(rule):
        raise TypeError(f"{name}: rule must be a function; got {rule!r}.")
    options: dict[str, int | None] = {"forks": forks, "rounds": rounds}
    if isinstance(branches, Sequence):
        branches = tuple(branches)
        check_counts(name, {f"branches[{i}]": x for i, x in enumerate(branches)})
        if len(branches) != rounds:
            raise ValueError(
                f"{name}: branches must be one number, or {rounds}, one a round; got {branches}."
            )
    else:
        options["branches"] = branches
    if isinstance(segment, Sequence):
        segment = tuple(segment)
        check_counts(name, {f"segment[{i}]": x for i, x in enumerate(segment)})
        if len(segment) != rounds or list(segment) != sorted(set(segment)):
            raise ValueError(
                f"{name}: segment must have {rounds} rising lengths, one a round; got {segment}."
            )
    else:
        options["segment"] = segment
    check_counts(name, options)
    return _Forked(
        rule=rule,
        forks=forks,
        branches=branches,
        rounds=rounds,
        segment=segment,
        source=prompt_source(name, source),
    )
