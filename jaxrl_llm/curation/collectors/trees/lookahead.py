"""A collector whose responses branch at uncertain tokens and drop branches that become similar.

The tree of a group grows greedily, by a segment of tokens per round. It is a function of the
finished requests: each round is processed once, and its result is cached by identity.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    UNFINISHED,
    Collection,
    Collector,
    Decision,
    Outcome,
    Request,
    Response,
    beginning,
    more_of,
    on_host,
    sized,
)
from jaxrl_llm.curation.collectors.trees.rounds import (
    NEEDS_OF_TREES,
    begun_length,
    call_repr,
    check_counts,
    complete_batch,
    go_on,
    group_of,
    paused,
)
from jaxrl_llm.curation.trees.forks import edit_distance, rouge_l, suffix_match, tree_rollouts

__all__ = ["lookahead"]

# ``finish`` of a response that ended by its length or with a stop token, as in ``rollout.types``.
_CUT, _STOPPED = 0, 1


class _Branch(NamedTuple):
    """A row of a tree.

    Attributes:
      parent: The row that it left, by its number; -1 for the root.
      birth: The place of the token at which they differ.
      response: Its tokens so far.
      seen: How many of them may no longer branch.
    """

    parent: int
    birth: int
    response: Response
    seen: int


class _Tree(NamedTuple):
    """The rows of a group after a round.

    Attributes:
      rows: By number, in the order of their birth.
      goes_on: Those whose next tokens the next round samples, in its order.
      length: Tokens up to which it has grown, not counting those of a prefix.
      complete: Whether it grows no further.
      source: What it is of: the outcome of the round, and the tree before it.
    """

    rows: dict[int, _Branch]
    goes_on: tuple[int, ...]
    length: int
    complete: bool
    source: tuple[Outcome, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Lookahead:
    """Made by :func:`lookahead`."""

    min_prob: float
    max_gap: float
    ages: tuple[int, ...]
    max_distance: float | None
    min_suffix: float | None
    min_overlap: float | None
    segment: int | None
    limit: int | None
    starts: tuple[int, ...]
    shares: tuple[float, ...]
    source: Collector
    length: int | None = None
    # The last tree of each group and round, by both.
    grown: dict[tuple[int, int], _Tree] = dataclasses.field(
        default_factory=dict, init=False, compare=False
    )

    @property
    def needs(self) -> Needs:
        probes = Needs(varies_temperature=True, records_runner_up=True)
        return needs_of_sources(self.source) | NEEDS_OF_TREES | probes

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Lookahead":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        limit = max(1, max_new_tokens // 2) if self.limit is None else self.limit
        if limit > max(max_new_tokens - 1, 1):
            raise ValueError(
                f"{self!r}: limit must be below the {max_new_tokens} tokens of a response."
            )
        ages = tuple(sorted({min(age, limit) for age in self.ages}))
        segment = min(ages[-1] if self.segment is None else self.segment, limit)
        return dataclasses.replace(
            self, source=source, length=max_new_tokens, limit=limit, ages=ages, segment=segment
        )

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def _leaves(self, collection: Collection) -> int:
        """How many rollouts of a group come from its tree."""
        return _count(collection.step, collection.group_size, self.starts, self.shares)

    def propose(self, state, key, collection: Collection, count: int):
        if self.length is None:
            raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")
        if not self._leaves(collection):
            return self.source.propose(state, key, collection, count)
        size = collection._replace(group_size=1)
        requests, state = self.source.propose(state, key, size, count)
        return tuple(self._greedy(x, self.segment or 1, x) for x in requests), state

    def _greedy(self, request: Request, tokens: int, root: Request) -> Request:
        """A request of a tree that grows to so many tokens."""
        return paused(request, tokens, root=root, length=self.length)._replace(temperature=0.0)

    @staticmethod
    def _drawn(root: Request, rollouts: int, responses: tuple[Response, ...] = ()) -> Request:
        """More rollouts of a group that do not grow, sampled to their end."""
        request = more_of(root, rollouts, responses)
        return request._replace(temperature=None, limit=None, pauses=False)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        groups, requests = collection.num_groups, collection.requests
        leaves = self._leaves(collection)
        plain = collection.group_size - leaves
        if leaves and plain and len(requests) == groups:
            roots = enumerate(requests)
            return Decision(
                requests=tuple(self._drawn(x, plain)._replace(extends=g) for g, x in roots)
            ), state

        def more(group: int, before: list[int]) -> tuple[Request, ...]:
            tree = self._tree(collection, group, requests[before[0]].round)
            begins = [_unsure(tree.rows[row].response) for row in tree.goes_on]
            if not tree.complete:
                tokens = min(tree.length + (self.segment or 1), self.limit or 1)
                request = more_of(requests[group], len(begins), tuple(begins))
                return (self._greedy(request, tokens, requests[group]),)
            # It grows no further: each of its rows is sampled to its end. Where the root has
            # ended, what is missing begins as the root did.
            root = tree.rows[0].response
            begun = begun_length(requests[group])
            copied = root if root.finish == UNFINISHED else beginning(root, begun)
            begins += [_unsure(copied)] * (leaves - len(tree.rows))
            ended = [x.response for x in tree.rows.values() if x.response.finish != UNFINISHED]
            endings = []
            if begins:
                endings.append(self._drawn(requests[group], len(begins), tuple(begins)))
            if ended:
                responses = tuple(_unsure(x)._replace(reward=None) for x in ended)
                request = self._drawn(requests[group], len(ended), responses)
                endings.append(request._replace(sampled=False, entropy_stats=None))
            return tuple(endings)

        rounds = 1 + math.ceil((self.limit or 1) / (self.segment or 1))
        if (decision := go_on(collection, rounds, more, _grows)) is not None:
            return decision, state
        self.grown.clear()
        members: list[list[tuple[int, int]]] = [[] for _ in range(groups)]
        for i, request in enumerate(requests):
            if not _grows(request):
                members[group_of(requests, i)] += [(i, j) for j in range(request.rollouts)]
        return complete_batch(self.source, state, collection, members)

    def _tree(self, collection: Collection, group: int, number: int) -> _Tree:
        """The tree of a group after a round: branches leave, and those that are alike end."""
        requests = enumerate(collection.requests)
        place = group
        if number:
            place = next(
                i for i, x in requests if (x.extends, x.round) == (group, number) and _grows(x)
            )
        outcome = collection.outcome(place)
        before = self._tree(collection, group, number - 1) if number else None
        tree = self.grown.get((group, number))
        if tree is not None and tree.source[0] is outcome and tree.source[1] is before:
            return tree
        leaves = self._leaves(collection)
        if before is None:
            begun = begun_length(collection.requests[group])
            rows, goes_on, length = {0: _Branch(-1, 0, outcome.responses[0], begun)}, (0,), 0
        else:
            rows, goes_on, length = dict(before.rows), before.goes_on, before.length
            for row, response in zip(goes_on, outcome.responses, strict=True):
                rows[row] = rows[row]._replace(response=response)
        end = min(length + (self.segment or 1), self.limit or 1)
        fresh = max(rows) + 1
        for at, alike, row in self._events(rows, goes_on):
            if row not in rows:
                continue  # it ended before
            if alike:
                ended = {row}
                for child, branch in rows.items():  # children stand behind their parents
                    ended |= {child} if branch.parent in ended else set()
                rows = {n: branch for n, branch in rows.items() if n not in ended}
            elif len(rows) < leaves:
                response = _other(rows[row].response, at, collection.stop_ids, self.length)
                rows[fresh] = _Branch(row, at, response, at + 1)
                fresh += 1
        # What goes on from here has been looked at; a new branch has not been sampled.
        for row in goes_on:
            if row in rows:
                rows[row] = rows[row]._replace(seen=len(rows[row].response.tokens))
        open_rows = tuple(n for n, x in rows.items() if x.response.finish == UNFINISHED)
        old = all(
            x.parent < 0 or x.response.finish != UNFINISHED or x.seen >= x.birth + self.ages[-1]
            for x in rows.values()
        )
        full = len(rows) == leaves and old
        complete = full or not open_rows or end >= (self.limit or 1)
        tree = _Tree(rows, open_rows, end, complete, (outcome, before))
        self.grown[group, number] = tree
        return tree

    def _events(
        self, rows: dict[int, _Branch], goes_on: tuple[int, ...]
    ) -> list[tuple[int, bool, int]]:
        """Places where rows may branch, and where branches are alike, as (place, alike, row).

        At one place rows branch first, in their order.
        """
        events = []
        for number in goes_on:
            branch = rows[number]
            response = branch.response
            if response.runner_up_logp is None or response.model_logp is None:
                raise ValueError(f"{self!r} reads runner_up_logp, which the responses do not have.")
            first, second = np.exp(response.model_logp), np.exp(response.runner_up_logp)
            splits = (second > self.min_prob) & (first - second < self.max_gap)
            places = np.flatnonzero(splits[branch.seen :]) + branch.seen
            events += [(int(place), False, number) for place in places]
        for age in self.ages:
            due = []
            for number, branch in rows.items():
                end = branch.birth + age
                if branch.parent < 0:
                    continue
                # Compared in the round in which both have come that far, a last stop token apart.
                pair = branch, rows[branch.parent]
                reached = [len(x.response.tokens) - (x.response.finish == _STOPPED) for x in pair]
                if min(x.seen for x in pair) < end <= min(reached):
                    due.append((number, branch.birth, end))
            if not due:
                continue
            room = power_of_two(len(rows))  # stretches of tokens
            mine, theirs = np.zeros((2, room, age), np.int32)
            for i, (number, start, end) in enumerate(due):
                mine[i] = rows[number].response.tokens[start:end]
                theirs[i] = rows[rows[number].parent].response.tokens[start:end]
            alike = np.zeros(room, bool)
            with on_host():
                if self.max_distance is not None:
                    alike |= np.asarray(_distance(mine, theirs)) < self.max_distance * age
                if self.min_suffix is not None:
                    alike |= np.asarray(_suffix(mine, theirs)) > self.min_suffix
                if self.min_overlap is not None:
                    alike |= np.asarray(_overlap(mine, theirs)) > self.min_overlap
            events += [(end - 1, True, n) for (n, _, end), x in zip(due, alike, strict=False) if x]
        return sorted(events)

    def __repr__(self) -> str:
        return call_repr(lookahead, self)


@functools.lru_cache(maxsize=8)
def _count(step: int, group_size: int, starts: tuple[int, ...], shares: tuple[float, ...]) -> int:
    """How many rollouts of a group come from its tree."""
    with on_host():
        counts = tree_rollouts(np.int32(step), group_size=group_size, starts=starts, shares=shares)
    return int(counts)


_distance, _suffix, _overlap = map(jax.jit, (edit_distance, suffix_match, rouge_l))


def _grows(request: Request) -> bool:
    """Whether a request is of a tree that grows."""
    return request.temperature == 0.0 and request.pauses


def _unsure(response: Response) -> Response:
    """The response without the log-probabilities of the greedy policy that wrote it."""
    return response._replace(behavior_logp=None)


def _other(
    response: Response, place: int, stop_ids: tuple[int, ...], length: int | None
) -> Response:
    """The beginning of a response with the second token in place of the one at a place.

    It has ended where that is a stop token, or the last of ``length`` tokens.
    """
    start = beginning(response, place)

    def add(name: str, value) -> np.ndarray | None:
        x = getattr(start, name)
        return None if x is None else np.append(x, np.asarray(value, x.dtype))

    token, logp = response.runner_up[place], response.runner_up_logp[place]  # type: ignore[index]
    version = None if response.version is None else response.version[place]
    finish = _CUT if place + 1 == length else UNFINISHED
    return start._replace(
        tokens=add("tokens", token),
        behavior_logp=None,
        model_logp=add("model_logp", logp),
        version=add("version", version),
        trains=add("trains", True),
        entropy=None,
        nodes=add("nodes", -1),
        runner_up=add("runner_up", 0),
        runner_up_logp=add("runner_up_logp", -np.inf),
        finish=_STOPPED if int(token) in stop_ids else finish,
    )


def lookahead(
    *,
    min_prob: float = 0.25,
    max_gap: float = 0.15,
    ages: tuple[int, ...] = (20, 30, 50),
    max_distance: float | None = 0.4,
    min_suffix: float | None = None,
    min_overlap: float | None = None,
    segment: int | None = None,
    limit: int | None = None,
    starts: tuple[int, ...] = (0, 100, 200, 300),
    shares: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25),
    source: Collector | None = None,
) -> Collector:
    """Grows a greedy tree that branches at uncertain tokens; its leaves then sample to their ends.

        a row branches where p_2 > min_prob and p_1 - p_2 < max_gap, with the second token
        a branch ends where its r tokens and its parent's are similar, r in ages
        round(share G) leaves; share = that of the last start <= step; the others sample plainly

    A tree grows until it has all its leaves and each is older than the last of ``ages``, or until
    ``limit`` tokens. Missing leaves are copies of the root, which sample on independently. The
    tokens of a tree are not drawn from the policy, so their ``behavior_logp`` is not known.
    Responses that ended while the tree grew are graded again as leaves.

    Tokens are sampled by a segment per round: a branch of a segment catches up in the next one, and
    the bound on leaves counts those of earlier segments first. With ``segment=1`` all rows advance
    together.

    Args:
      min_prob: Smallest probability of the second token.
      max_gap: Largest difference of the first two probabilities.
      ages: Numbers of tokens after which a branch is compared; at most ``limit`` in a run.
      max_distance: Edit distance over r below which two rows are similar; None for no such rule.
      min_suffix: Common suffix above which they are similar, see
        :func:`~jaxrl_llm.curation.suffix_match`; None for no such rule.
      min_overlap: :func:`~jaxrl_llm.curation.rouge_l` above which they are similar; None for no
        such rule.
      segment: Tokens per round; None for the last of ``ages``.
      limit: Tokens up to which a tree grows, below those of a response; None for half of them.
      starts: Steps of the run, rising from 0.
      shares: Share of a group that comes from its tree from each of them on.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If a number of tokens is no integer.
      ValueError: If a number is out of its range, or no rule compares.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.lookahead(ages=(8,), max_distance=0.5)
      lookahead(ages=(8,), max_distance=0.5)

    References:
      LATR (arXiv:2510.24302), the released code, with two candidates and ``sample_nk="none"``. It
      advances by a token, ends the tree when 98% of all groups' leaves exist, has no limit unless
      it is set, and copies a root even if that has ended; here missing leaves then start from the
      prompt.
    """
    name = "lookahead"
    ages, starts, shares = tuple(ages), tuple(starts), tuple(shares)
    numbers = {"segment": segment, "limit": limit} | {f"ages[{i}]": x for i, x in enumerate(ages)}
    check_counts(name, numbers)
    if not ages:
        raise ValueError(f"{name}: ages must name at least one.")
    checks.check_share(name, min_prob=min_prob, max_gap=max_gap)
    checks.check_share(
        name, max_distance=max_distance, min_suffix=min_suffix, min_overlap=min_overlap
    )
    if all(x is None for x in (max_distance, min_suffix, min_overlap)):
        raise ValueError(f"{name}: one of the three rules must be on; all are None.")
    _count(0, 1, starts, shares)
    return _Lookahead(
        min_prob=min_prob,
        max_gap=max_gap,
        ages=ages,
        max_distance=max_distance,
        min_suffix=min_suffix,
        min_overlap=min_overlap,
        segment=segment,
        limit=limit,
        starts=starts,
        shares=shares,
        source=prompt_source(name, source),
    )
