"""Collectors whose responses advance in segments and continue in later batches."""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.curation.collectors.needs import Needs, needs_of, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    UNFINISHED,
    Collection,
    Collector,
    Decision,
    Request,
    Response,
    Row,
    groups_of,
    in_order,
    joined_outcome,
    sized,
)

__all__ = ["PartialState", "partial_rollouts", "windowed"]


class PartialState(NamedTuple):
    """State of :func:`partial_rollouts`: C groups of G rollouts of at most T tokens; 0 elsewhere.

    Attributes:
      prompts: int32 ``[C]``, indices in the data set, in the order in which groups continue; -1
        where there is no group.
      tokens: int32 ``[C, G, T]``.
      behavior_logp: float32 ``[C, G, T]``, of the policies that sampled.
      model_logp: float32 ``[C, G, T]``, of the plain models that sampled.
      versions: int32 ``[C, G, T]``, of the weights that sampled each token.
      lengths: int32 ``[C, G]``.
      finish: int32 ``[C, G]``, why a rollout ended, or that it has not.
      rewards: float32 ``[C, G]``, rewards of finished rollouts; NaN where not yet graded.
      source: State of the collector of new groups.
    """

    prompts: np.ndarray
    tokens: np.ndarray
    behavior_logp: np.ndarray
    model_logp: np.ndarray
    versions: np.ndarray
    lengths: np.ndarray
    finish: np.ndarray
    rewards: np.ndarray
    source: ArrayTree


class _Group(NamedTuple):
    """A group under way: its first request, and its rollouts as (request, rollout) so far."""

    first: int
    members: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Partial:
    """Made by :func:`partial_rollouts`."""

    segments: int = 8
    oversample: float = 2.0
    max_staleness: int | None = None
    source: Collector = dataclasses.field(default_factory=in_order)
    num_groups: int | None = None
    group_size: int | None = None
    max_new_tokens: int | None = None

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | Needs(
            slots=True, splits_turns=True, asks_again=True, grades_apart=True
        )

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Partial":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(
            self, source=source, group_size=group_size, max_new_tokens=max_new_tokens
        )

    def for_batch(self, num_groups: int) -> "_Partial":
        return dataclasses.replace(self, num_groups=num_groups)

    def init(self, num_prompts: int) -> PartialState:
        if self.num_groups is None or self.group_size is None or self.max_new_tokens is None:
            raise ValueError(
                f"{self!r}: the size of its state is unknown before for_run(group_size, "
                "max_new_tokens) and for_batch(num_groups)."
            )
        groups = (self._in_flight(self.num_groups) - self.num_groups,)
        rollouts = (*groups, self.group_size)
        tokens = (*rollouts, self.max_new_tokens)
        return PartialState(
            prompts=np.full(groups, -1, np.int32),
            tokens=np.zeros(tokens, np.int32),
            behavior_logp=np.zeros(tokens, np.float32),
            model_logp=np.zeros(tokens, np.float32),
            versions=np.zeros(tokens, np.int32),
            lengths=np.zeros(rollouts, np.int32),
            finish=np.zeros(rollouts, np.int32),
            rewards=np.zeros(rollouts, np.float32),
            source=self.source.init(num_prompts),
        )

    def propose(self, state: PartialState, key, collection: Collection, count: int):
        riding, _ = self._riding(state, collection)
        first = len(collection.requests)
        requests = riding[first : first + count]
        if missing := count - len(requests):
            part = collection._replace(
                requests=collection.requests[len(riding) :],
                outcomes=collection.outcomes[len(riding) :],
            )
            new, source = self.source.propose(state.source, key, part, missing)
            for request in new:
                if request != Request(self._size, request.prompt):
                    raise ValueError(
                        f"{self!r}: its source asks for {request!r}; only groups of G rollouts of "
                        "the prompts themselves can go on in a later batch."
                    )
            requests += [self._begin(request) for request in new]
            state = state._replace(source=source)
        return tuple(requests), state

    def observe(self, state: PartialState, collection: Collection) -> tuple[Decision, ArrayTree]:
        target, asked = collection.num_groups, len(collection.requests)
        riding, groups = self._riding(state, collection)
        new = self._in_flight(target) - len(groups)
        if asked < len(riding) + new:
            return Decision(ask=len(riding) + new - asked), state
        if collection.waiting:
            return Decision(), state
        whole = range(self._size)
        groups += [_Group(i, tuple((i, j) for j in whole)) for i in range(len(riding), asked)[:new]]
        # Each group with its rollouts as the later requests have left them.
        by_first = {group.first: group for group in groups}
        for i in range(len(riding) + new, asked):
            group = by_first[collection.requests[i].extends]  # type: ignore[index]
            moved = {at: (i, j) for j, at in enumerate(_unfinished(group, collection))}
            members = tuple(moved.get(place, place) for place in group.members)
            by_first[group.first] = group._replace(members=members)
        groups = list(by_first.values())
        done = [g for g in groups if not _unfinished(g, collection)]
        if len(done) >= target:
            rows = tuple(Row(group.members) for group in done[:target])
            chosen = {group.first for group in done[:target]}
            left = [group for group in groups if group.first not in chosen]
            return Decision(rows=rows), self._stored(state, collection, done[:target], left)
        again = []
        for group in groups:
            if begun := [_response_of(at, collection) for at in _unfinished(group, collection)]:
                latest = max(request for request, _ in group.members)
                number = collection.requests[latest].round + 1
                again.append(self._going_on(Request(1, extends=group.first, round=number), begun))
        return Decision(requests=tuple(again)), state

    @property
    def _size(self) -> int:
        return self.group_size or 0

    @property
    def _segment(self) -> int:
        return -(-(self.max_new_tokens or 0) // self.segments)

    def _in_flight(self, num_groups: int) -> int:
        return groups_of(self.oversample, num_groups, up=True)

    def _begin(self, request: Request) -> Request:
        return request._replace(limit=self._segment, pauses=True)

    def _riding(
        self, state: PartialState, collection: Collection
    ) -> tuple[list[Request], list[_Group]]:
        """The first requests of a batch, and the groups that go on with them."""
        requests: list[Request] = []
        groups = []
        for c in np.flatnonzero(state.prompts >= 0):
            prompt, first = int(state.prompts[c]), len(requests)
            used = np.arange(state.tokens.shape[-1]) < state.lengths[c][:, None]
            oldest = state.versions[c].min(where=used, initial=collection.step)
            most = self.max_staleness
            if most is not None and collection.step - oldest > most:
                requests.append(self._begin(Request(self._size, prompt)))
                groups.append(_Group(first, tuple((first, j) for j in range(self._size))))
                continue
            ended, open_ = [], []
            for j in range(self._size):
                cut, reward = (c, j, slice(int(state.lengths[c, j]))), float(state.rewards[c, j])
                response = Response(
                    tokens=state.tokens[cut],
                    behavior_logp=state.behavior_logp[cut],
                    model_logp=state.model_logp[cut],
                    version=state.versions[cut],
                    finish=int(state.finish[c, j]),
                    reward=None if math.isnan(reward) else reward,
                )
                (open_ if response.finish == UNFINISHED else ended).append(response)
            members = []
            if ended:
                members += [(len(requests), j) for j in range(len(ended))]
                requests.append(Request(len(ended), prompt, responses=tuple(ended), sampled=False))
            if open_:
                members += [(len(requests), j) for j in range(len(open_))]
                requests.append(self._going_on(Request(len(open_), prompt), open_))
            groups.append(_Group(first, tuple(members)))
        return requests, groups

    def _going_on(self, request: Request, beginnings: list[Response]) -> Request:
        longest = max(len(response.tokens) for response in beginnings)
        limit = min(longest + self._segment, self.max_new_tokens or 0)
        begun = tuple(response._replace(reward=None) for response in beginnings)
        return request._replace(rollouts=len(begun), responses=begun, limit=limit, pauses=True)

    def _stored(
        self,
        state: PartialState,
        collection: Collection,
        done: list[_Group],
        left: list[_Group],
    ) -> PartialState:
        """The state after a batch of the groups that are done, with those that are left."""
        stored = jax.tree.map(np.zeros_like, state._replace(source=()))
        prompts = np.full_like(state.prompts, -1)
        for c, group in enumerate(left):
            prompts[c] = collection.outcome(group.first).prompt
            for j, place in enumerate(group.members):
                response = _response_of(place, collection)
                n = len(response.tokens)
                stored.tokens[c, j, :n] = response.tokens
                stored.behavior_logp[c, j, :n] = response.behavior_logp
                stored.model_logp[c, j, :n] = response.model_logp
                stored.versions[c, j, :n] = response.version
                stored.lengths[c, j], stored.finish[c, j] = n, response.finish
                # Components of a reward are not stored, so those rollouts are graded again.
                components = collection.outcome(place[0]).reward_components
                absent = response.reward is None or bool(components)
                stored.rewards[c, j] = np.nan if absent else response.reward
        outcomes = tuple(joined_outcome(group.members, collection) for group in done)
        seen = collection._replace(
            requests=tuple(Request(self._size, int(each.prompt)) for each in outcomes),
            outcomes=outcomes,
        )
        _, source = self.source.observe(state.source, seen)
        return stored._replace(prompts=prompts, source=source)

    def __repr__(self) -> str:
        text = f"segments={self.segments}, oversample={self.oversample}"
        if self.max_staleness is not None:
            text += f", max_staleness={self.max_staleness}"
        if type(self.source) is not type(in_order()):
            text += f", source={self.source!r}"
        return f"partial_rollouts({text})"


class _Windowed(_Partial):
    """Made by :func:`windowed`: room for P groups that go on."""

    @property
    def needs(self) -> Needs:
        # The current version tells what a batch sampled. A response that has not ended has a reward
        # of 0, and no more.
        return super().needs | Needs(fresh_weights=True, lacks_components=True)

    def observe(self, state: PartialState, collection: Collection) -> tuple[Decision, ArrayTree]:
        riding, groups = self._riding(state, collection)
        asked, target = len(collection.requests), collection.num_groups
        wanted = len(riding) + target - len(groups)
        if asked < wanted:
            return Decision(ask=wanted - asked), state
        if collection.waiting:
            return Decision(), state
        new = range(len(riding), asked)
        groups += [_Group(i, tuple((i, j) for j in range(self._size))) for i in new]
        rows = tuple(_row_so_far(group, collection) for group in groups)
        unfinished = [bool(_unfinished(group, collection)) for group in groups]
        done, left = (
            [g for g, goes_on in zip(groups, unfinished, strict=True) if goes_on is wanted]
            for wanted in (False, True)
        )
        return Decision(rows=rows), self._stored(state, collection, done, left)

    def __repr__(self) -> str:
        source = "" if self.source == in_order() else f", source={self.source!r}"
        return f"windowed(segments={self.segments}{source})"


def _row_so_far(group: _Group, collection: Collection) -> Row:
    """A group with a reward of 0 for what has not ended, without what could not be graded."""
    members, rewards = [], []
    for request, j in group.members:
        outcome = collection.outcome(request)
        unfinished = outcome.responses[j].finish == UNFINISHED
        if unfinished or outcome.where[j]:
            members.append((request, j))
            rewards.append(0.0 if unfinished else float(outcome.rewards[j]))
    if not members:
        return Row(group.members, takes_part=False)
    return Row(tuple(members), rewards=tuple(rewards))


def _response_of(place: tuple[int, int], collection: Collection) -> Response:
    return collection.outcome(place[0]).responses[place[1]]


def _unfinished(group: _Group, collection: Collection) -> list[tuple[int, int]]:
    """The rollouts of a group that have not ended."""
    return [at for at in group.members if _response_of(at, collection).finish == UNFINISHED]


def partial_rollouts(
    *,
    segments: int = 8,
    oversample: float = 2.0,
    max_staleness: int | None = None,
    source: Collector | None = None,
) -> Collector:
    """Starts more groups than a batch has; the unfinished ones continue in the next batch.

        in flight = ceil(oversample P) groups: first those of earlier batches, then new ones
        a round   = a segment of T / segments tokens for every rollout that has not ended
        batch     = the first P groups all of whose rollouts have ended; as many rounds as it takes
        the others go on in the next batch, with their tokens, by the weights of that time

    No step waits for the longest response. Rounds are measured in tokens, not in time, so a batch
    depends only on key, state and weights. Finished rollouts are not sampled again and keep their
    rewards; unfinished ones are not graded. Each token has the version of the weights that sampled
    it, and its log-probability under them, which a correction may read; without a correction the
    ratio is to the policy at the start of the step, or, with ``max_staleness``, to the one that
    sampled the token.

    The support of tokens from earlier batches is not stored: their log-probability is the tempered
    one, even if top-k, top-p or min-p truncates.

    Args:
      segments: Number of segments of a response of maximum length.
      oversample: Groups in flight as a multiple of P; above 1.
      max_staleness: A group with a token older than this many updates starts again; None for no
        bound.
      source: The collector that proposes the prompts of new groups; None for :func:`in_order`.

    Returns:
      A collector that decodes in slots; its state is a PartialState.

    Raises:
      TypeError: If ``segments`` or ``max_staleness`` is not an integer.
      ValueError: If an option is out of its range, or ``source`` counts the groups of a batch, as
        :func:`in_epochs` and :func:`staged` do; in a run, if the source requests a number of
        rollouts other than G.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.partial_rollouts(segments=4, max_staleness=2)
      partial_rollouts(segments=4, oversample=2.0, max_staleness=2)

    References:
      APRIL (arXiv:2509.18521), which starts twice the groups (64 for 32), ends a round when enough
      are complete, and stops the others in the middle of a token stream; here they stop at the end
      of a segment. UloRL (arXiv:2507.19766), PAPER, which has 8 segments, one per step, and trains
      on as many responses as have ended; here a step takes segments until P groups have.
    """
    name = "partial_rollouts"
    numbers = {"segments": segments, "max_staleness": max_staleness}
    for option, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name}: {option} must be an integer; got {value!r}.")
    checks.check_positive(name, segments=segments)
    checks.check_non_negative(name, max_staleness=max_staleness)
    checks.check_real(name, finite=True, oversample=oversample)
    if not oversample > 1:
        raise ValueError(f"{name}: oversample must be above 1 and finite; got {oversample!r}.")
    return _Partial(
        segments=segments,
        oversample=float(oversample),
        max_staleness=max_staleness,
        source=_source(name, source),
    )


def _source(name: str, source: Collector | None) -> Collector:
    source = prompt_source(name, source)
    if needs_of(source).counts_groups:
        raise ValueError(
            f"{name}: source {source!r} counts the groups of a batch, but groups end in later "
            "batches here, so prompts would be asked twice and others never; use in_order, whose "
            "passes over the data are the run's."
        )
    return source


def windowed(*, segments: int = 2, source: Collector | None = None) -> Collector:
    """Every batch samples a window of each response, and trains on it before the response ends.

        a batch = P groups; each response that has not ended continues by T / segments tokens
        a group whose responses have all ended is replaced by a new one in the next batch

    A step thus takes the time of a window. The batch has ``unfinished`` and ``versions``:
    ``curation.window_tokens`` are the tokens that were sampled for it. An unfinished response has
    reward 0 and is not graded. A response that ended before the others of its group stays in the
    batch without new tokens.

    Args:
      segments: Number of windows of a response of maximum length.
      source: The collector that proposes the prompts of new groups; None for :func:`in_order`.

    Returns:
      A collector that decodes in slots; its state is a PartialState.

    Raises:
      TypeError: If ``segments`` is not an integer.
      ValueError: If it is not above 0, or ``source`` counts the groups of a batch, as
        :func:`in_epochs` and :func:`staged` do.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.windowed()
      windowed(segments=2)

    References:
      T-PPO (arXiv:2506.15050), PAPER, read through a note: windows of 8k of 24k tokens.
    """
    if isinstance(segments, bool) or not isinstance(segments, int):
        raise TypeError(f"windowed: segments must be an integer; got {segments!r}.")
    checks.check_positive("windowed", segments=segments)
    # Of twice P groups in flight, P are stored.
    return _Windowed(segments=segments, oversample=2.0, source=_source("windowed", source))
