"""A collector that mixes stored groups of earlier batches with fresh ones."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, call_with, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.curation.collectors.needs import Needs, needs_of, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import evaluation_text_of
from jaxrl_llm.curation.collectors.protocol import (
    OWN,
    REPLAYED,
    Collection,
    Collector,
    Decision,
    Request,
    Response,
    Row,
    check_is_group,
    collector_parts,
    for_batch_of,
    in_order,
    on_host,
    sized,
    width_of,
)
from jaxrl_llm.curation.mixing import mix_source_mask
from jaxrl_llm.curation.replay import (
    ReplayBuffer,
    replay_add,
    replay_fresh,
    replay_init,
    replay_sample,
)

__all__ = ["ReplayedState", "StoredGroups", "replayed", "stored_request"]


class StoredGroups(NamedTuple):
    """The items of a buffer: groups of at most G rollouts of at most T tokens; 0 elsewhere.

    Attributes:
      tokens: int32 ``[C, G, T]``.
      trains: bool ``[C, G, T]``, False for tokens that are only context.
      behavior_logp: float32 ``[C, G, T]``, of the policy that sampled.
      model_logp: float32 ``[C, G, T]``, of the plain model that sampled.
      versions: int32 ``[C, G, T]``, of the weights that sampled each token.
      lengths: int32 ``[C, G]``.
      finish: int32 ``[C, G]``.
      rewards: float32 ``[C, G]``; NaN where the response is graded again.
      sizes: int32 ``[C]``, rollouts of each group.
    """

    tokens: np.ndarray
    trains: np.ndarray
    behavior_logp: np.ndarray
    model_logp: np.ndarray
    versions: np.ndarray
    lengths: np.ndarray
    finish: np.ndarray
    rewards: np.ndarray
    sizes: np.ndarray


class ReplayedState(NamedTuple):
    """State of :func:`replayed`: NumPy arrays.

    Attributes:
      buffer: Its items are :class:`StoredGroups`.
      source: State of the collector of fresh groups.
    """

    buffer: ReplayBuffer
    source: ArrayTree


def stored_request(
    buffer: ReplayBuffer, place: int, *, version: int, max_staleness: int | None = None
) -> Request:
    """A request for a stored group, as it was sampled and, unless it is graded again, rewarded.

    Args:
      buffer: Buffer of :func:`replayed`.
      place: Index in the buffer, from 0.
      version: Version of the weights being trained.
      max_staleness: Largest age in versions; None for no bound.

    Returns:
      A :class:`Request` of role ``REPLAYED``.

    Raises:
      ValueError: If the place is empty or its group too old.

    Example:
      >>> import jaxrl_llm as jr
      >>> collector = jr.curation.replayed(capacity=2, share=0.5).for_run(4, 16)
      >>> jr.curation.stored_request(collector.init(10).buffer, 0, version=3)
      Traceback (most recent call last):
      ...
      ValueError: stored_request: place 0 of the buffer is empty.

    References:
      None; the bound is AReaL's (arXiv:2505.24298).
    """
    order, stored = buffer.order, int(buffer.versions[place])
    if order[place] < 0:
        raise ValueError(f"stored_request: place {place} of the buffer is empty.")
    if max_staleness is not None and version - stored > max_staleness:
        raise ValueError(
            f"stored_request: the group at place {place} was sampled by version {stored} of the "
            f"weights, {version - stored} before version {version}; max_staleness is "
            f"{max_staleness}."
        )
    items = buffer.items
    responses = []
    for member in range(int(items.sizes[place])):
        cut = (place, member, slice(int(items.lengths[place, member])))
        reward = float(items.rewards[place, member])
        responses.append(
            Response(
                tokens=items.tokens[cut],
                behavior_logp=items.behavior_logp[cut],
                model_logp=items.model_logp[cut],
                version=items.versions[cut],
                trains=items.trains[cut],
                finish=int(items.finish[place, member]),
                reward=None if math.isnan(reward) else reward,
            )
        )
    return Request(
        rollouts=len(responses),
        prompt=int(buffer.prompt_ids[place]),
        responses=tuple(responses),
        sampled=False,
        role=REPLAYED,
    )


def store_groups(
    buffer: ReplayBuffer,
    groups: Sequence[Sequence[Response]],
    *,
    prompts: Sequence[int],
    scores: np.ndarray,
    evict: Literal["oldest", "lowest"] = "oldest",
    unique: bool = False,
) -> ReplayBuffer:
    """The buffer with more groups, all of whose responses have rewards; NaN to grade them again.

    Args:
      buffer: Of :func:`replayed`.
      groups: n groups; one that is larger or longer than the buffer's is left out.
      prompts: n places in the data set.
      scores: float32 ``[n]``.
      evict, unique: See :func:`~jaxrl_llm.curation.replay_add`.
    """
    _, size, length = buffer.items.tokens.shape
    where = [
        len(group) <= size and all(len(response.tokens) <= length for response in group)
        for group in groups
    ]
    versions = [_oldest(group) for group in groups]
    spare = (0, power_of_two(len(groups)) - len(groups))
    numbers = np.pad(np.arange(1, len(groups) + 1, dtype=np.int32), spare)
    with on_host():
        # The rule moves the numbers of groups, and the groups follow.
        places = replay_add(
            buffer._replace(items=np.zeros(len(buffer.order), np.int32)),
            numbers,
            prompt_ids=np.pad(np.asarray(prompts, np.int32), spare),
            version=np.pad(np.asarray(versions, np.int32), spare),
            scores=np.pad(np.asarray(scores, np.float32), spare),
            where=np.pad(np.asarray(where, bool), spare),
            evict=evict,
            unique=unique,
        )
    moved = jax.tree.map(np.asarray, places)
    items = jax.tree.map(np.copy, buffer.items)
    for place in np.flatnonzero(moved.items):
        for array in items:
            array[place] = 0
        group = groups[moved.items[place] - 1]
        items.sizes[place] = len(group)
        for member, response in enumerate(group):
            count = len(response.tokens)
            cut = (place, member, slice(count))
            items.tokens[cut] = response.tokens
            items.trains[cut] = True if response.trains is None else response.trains
            items.behavior_logp[cut] = response.behavior_logp
            plain = response.model_logp
            items.model_logp[cut] = response.behavior_logp if plain is None else plain
            items.versions[cut] = _versions(response)
            items.lengths[place, member] = count
            items.finish[place, member] = response.finish
            items.rewards[place, member] = response.reward
    return moved._replace(items=items)


def _oldest(group: Sequence[Response]) -> int:
    """The oldest version that sampled a token; -1 if none was sampled, as of observations."""
    versions = np.concatenate([_versions(response) for response in group])
    sampled = versions[versions >= 0]
    return int(sampled.min()) if sampled.size else -1


def _versions(response: Response) -> np.ndarray:
    if response.version is None:
        return np.zeros(len(response.tokens), np.int32)
    return np.asarray(response.version)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Replayed:
    """Made by :func:`replayed`."""

    capacity: int
    share: float | None = None
    draw: str = "count"
    replace: Callable | None = None
    store: Callable | None = None
    score: Callable | None = None
    priority: Callable | None = None
    evict: Literal["oldest", "lowest"] = "oldest"
    unique: bool = False
    max_staleness: int | None = None
    start: int = 0
    until: int | None = None
    regrade: bool = False
    source: Collector = dataclasses.field(default_factory=in_order)
    group_size: int | None = None
    max_new_tokens: int | None = None

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | Needs(
            asks_again=True, stores_responses=True, lacks_components=not self.regrade
        )

    @property
    def first_help(self) -> int:
        return self.start

    def check_sizes(self, data: Sequence[Mapping], *, group_size: int, num_groups: int) -> None:
        """Raises ValueError if no group of a batch can be a stored one."""
        del data, group_size
        if self.share is not None:
            most = num_groups - 1  # one at least is fresh
            groups = most if self.draw == "each" else min(round(self.share * num_groups), most)
            check_is_group(self, "share", self.share, groups=groups, num_groups=num_groups)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Replayed":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        size = width_of(source, group_size)
        return dataclasses.replace(
            self, source=source, group_size=size, max_new_tokens=max_new_tokens
        )

    def for_batch(self, num_groups: int) -> "_Replayed":
        return dataclasses.replace(self, source=for_batch_of(self.source, num_groups))

    def width(self, group_size: int) -> int:
        return width_of(self.source, group_size)

    @property
    def evaluation_text(self) -> Callable:
        """That of the source, if it has one."""
        return evaluation_text_of(self.source)

    def init(self, num_prompts: int) -> ReplayedState:
        if self.group_size is None or self.max_new_tokens is None:
            raise ValueError(
                f"{self!r}: the size of its buffer is unknown before "
                "for_run(group_size, max_new_tokens)."
            )
        rollouts, tokens = (self.group_size,), (self.group_size, self.max_new_tokens)
        item = StoredGroups(
            tokens=np.zeros(tokens, np.int32),
            trains=np.zeros(tokens, bool),
            behavior_logp=np.zeros(tokens, np.float32),
            model_logp=np.zeros(tokens, np.float32),
            versions=np.zeros(tokens, np.int32),
            lengths=np.zeros(rollouts, np.int32),
            finish=np.zeros(rollouts, np.int32),
            rewards=np.zeros(rollouts, np.float32),
            sizes=np.zeros((), np.int32),
        )
        with on_host():
            buffer = jax.tree.map(np.asarray, replay_init(item, capacity=self.capacity))
        return ReplayedState(buffer, self.source.init(num_prompts))

    def propose(self, state: ReplayedState, key, collection: Collection, count: int):
        first, total = len(collection.requests), self._count(state, collection)
        with on_host():
            key = jax.random.wrap_key_data(np.asarray(jax.random.key_data(key)))
            sample = replay_sample(
                jax.random.fold_in(key, 0),
                state.buffer._replace(items=()),
                count=self.capacity,
                weights=self._weights(state, collection),
            )
        # The places of this batch in the order in which they are drawn.
        index = np.asarray(sample.index)
        drawn = index[index >= 0].tolist()
        part, places = _part(collection, total)
        used = sum(map(_stored, collection.requests))
        replay = [False] * count
        if self.replace is not None:
            replay = [self.source.observe(state.source, part)[0].rows is not None] * count
        elif used < total:
            # They stand behind what the source asks for first.
            start = self._first_ask(state, part)
            replay = [start <= i < start + total for i in range(first, first + count)]
        left = iter(drawn[used:])
        stored = partial(
            stored_request,
            state.buffer,
            version=collection.step,
            max_staleness=self.max_staleness,
        )
        # Beyond what is asked for, more may be proposed than there are.
        taken = [next(left, None) if each else None for each in replay]
        requests = [None if place is None else stored(place) for place in taken]
        fresh, source = self.source.propose(state.source, key, part, requests.count(None))
        places += [i for i, each in enumerate(requests, first) if each is None]
        following = iter(_in_batch(fresh, places))
        filled = tuple(next(following) if each is None else each for each in requests)
        return filled, state._replace(source=source)

    def observe(self, state: ReplayedState, collection: Collection):
        requests, total = collection.requests, self._count(state, collection)
        stored = [i for i, request in enumerate(requests) if _stored(request)]
        part, places = _part(collection, total)
        if len(stored) < total:
            return Decision(ask=self._first_ask(state, part) + total - len(requests)), state
        decision, learned = self.source.observe(state.source, part)
        if decision.rows is None:
            return decision._replace(requests=_in_batch(decision.requests, places)), state
        kept = rows = [
            row._replace(members=tuple((places[i], j) for i, j in row.members))
            for row in decision.rows
        ]
        if self.replace is not None:
            passing = _passing(self, "replace", self.replace, rows, collection)
            kept = [r for r, passes in zip(rows, passing, strict=True) if passes and r.takes_part]
            available = int(np.count_nonzero(self._weights(state, collection)))
            missing = min(len(rows) - len(kept), available) - len(stored)
            if missing > 0:
                return Decision(ask=missing), state
            # Rows without a stored replacement stay.
            spare = len(rows) - len(kept) - len(stored)
            kept = kept + [row for row in rows if row not in kept][:spare]
        if any(collection.outcomes[i] is None for i in stored):
            return Decision(), state
        full = [Row(tuple((i, j) for j in range(requests[i].rollouts))) for i in stored]
        batch = sorted([*kept, *full], key=lambda row: row.members[0])
        buffer = self._add(state.buffer, rows, collection)
        return Decision(rows=tuple(batch)), ReplayedState(buffer, learned)

    def _count(self, state, collection: Collection) -> int:
        """How many groups of a batch are stored ones; 0 with ``replace``, which asks for them last.

        It does not depend on the key, which ``observe`` does not have.
        """
        if self.share is None:
            return 0
        asked = sum(map(_stored, collection.requests))
        if asked and collection.waiting < len(collection.requests):
            return asked  # all were asked for before any group finished
        groups = collection.num_groups
        available = int(np.count_nonzero(self._weights(state, collection)))
        wanted = round(self.share * groups)
        if available and self.draw == "each":
            with on_host():
                key = jax.random.fold_in(jax.random.key(collection.seed), collection.step)
                mask = mix_source_mask(key, prompts=groups, probability=self.share)
            wanted = int(np.count_nonzero(mask))
        return min(wanted, available, groups - 1)  # one at least is fresh

    def _first_ask(self, state, part: Collection) -> int:
        """How many groups the source asks for at first."""
        nothing = part._replace(requests=(), outcomes=())
        return self.source.observe(state.source, nothing)[0].ask

    def _weights(self, state, collection: Collection) -> np.ndarray:
        """What each place is drawn by, 0 for those that cannot be: float32 ``[C]``.

        Ages are those at the update: the batch of a step trains the weights of that version.
        """
        buffer = state.buffer
        weights = np.ones(self.capacity, np.float32)
        ended = self.until is not None and collection.step >= self.until
        if ended or collection.step < self.start:
            return np.zeros_like(weights)
        with on_host():
            able = replay_fresh(buffer, version=collection.step, max_lag=self.max_staleness)
            if self.priority is not None:
                context = {
                    "scores": buffer.scores,
                    "order": buffer.order,
                    "versions": buffer.versions,
                    "version": collection.step,
                    "where": able,
                }
                weights = np.asarray(call_with(self.priority, context=context), np.float32)
                checks.check_shape(repr(self), "the priority's result", weights, able.shape)
        return np.where(np.asarray(able) & (weights > 0), weights, 0.0)

    def _add(self, buffer: ReplayBuffer, rows: list[Row], collection: Collection) -> ReplayBuffer:
        """The buffer with the fresh groups of the batch."""
        requests = collection.requests
        own = [
            row
            for row in rows
            if row.takes_part
            and all(_plain(requests[i]) and collection.outcome(i).where[j] for i, j in row.members)
        ]
        if self.store is not None:
            keep = _passing(self, "store", self.store, own, collection)
            own = [row for row, passes in zip(own, keep, strict=True) if passes]
        if not own:
            return buffer
        groups = []
        for row in own:
            group = []
            for i, j in row.members:
                outcome = collection.outcome(i)
                if len(outcome.responses) != requests[i].rollouts:
                    raise ValueError(f"{self!r}: the outcome of request {i} has no responses.")
                reward = math.nan if self.regrade else float(outcome.rewards[j])
                group.append(outcome.responses[j]._replace(reward=reward))
            groups.append(group)
        scores = np.zeros(len(own), np.float32)
        if self.score is not None:
            rewards, where = _rewards(own, collection)
            mean = rewards.sum(-1, where=where, keepdims=True) / where.sum(-1, keepdims=True)
            spread = np.sqrt(
                ((rewards - mean) ** 2).sum(-1, where=where, keepdims=True)
                / np.maximum(where.sum(-1, keepdims=True) - 1, 1)
            )
            signal = np.where(where, (rewards - mean) / (spread + 1e-6), 0.0)
            context = {"rewards": rewards, "where": where, "advantages": np.float32(signal)}
            with on_host():
                scores = np.asarray(call_with(self.score, context=context), np.float32)
            checks.check_shape(repr(self), "the score's result", scores, (len(own),))
        prompts = [int(collection.outcome(row.members[0][0]).prompt) for row in own]
        if self.max_staleness is not None:  # what can never be drawn again leaves its place
            old = collection.step - np.asarray(buffer.versions) > self.max_staleness
            buffer = buffer._replace(order=np.where(old, -1, buffer.order))
        return store_groups(
            buffer, groups, prompts=prompts, scores=scores, evict=self.evict, unique=self.unique
        )

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("group_size", "max_new_tokens") or value == field.default:
                continue
            if field.name == "source" and value == in_order():
                continue
            shown.append(f"{field.name}={stable_repr(value) if callable(value) else repr(value)}")
        return f"replayed({', '.join(shown)})"


def _plain(request: Request) -> bool:
    """Whether the responses follow the prompt itself, as a stored group does when it comes back."""
    return request.role == OWN and request.text is None and not request.prompt_tokens


def _stored(request: Request) -> bool:
    """Whether this collector brings a group; a stored response of a source extends a request."""
    return request.role == REPLAYED and request.extends is None


def _in_batch(requests: Sequence[Request], places: Sequence[int]) -> tuple[Request, ...]:
    """Requests of the source, whose requests have these places in the batch."""
    return tuple(
        each if each.extends is None else each._replace(extends=places[each.extends])
        for each in requests
    )


def _part(collection: Collection, total: int) -> tuple[Collection, list[int]]:
    """The batch as its source sees it, without stored groups, and the places of its requests.

    ``total`` of the groups are stored ones; those that replace fresh groups are not counted.
    """
    requests = collection.requests
    places = [i for i, request in enumerate(requests) if not _stored(request)]
    number = {place: i for i, place in enumerate(places)}
    part = collection._replace(
        num_groups=collection.num_groups - total,
        requests=tuple(
            each if each.extends is None else each._replace(extends=number[each.extends])
            for each in (requests[i] for i in places)
        ),
        outcomes=tuple(collection.outcomes[i] for i in places),
    )
    return part, places


def _rewards(rows: Sequence[Row], collection: Collection) -> tuple[np.ndarray, np.ndarray]:
    """Rewards of the members of rows, and which there are: ``[n, G]``."""
    shape = (len(rows), max(len(row.members) for row in rows))
    rewards, where = np.zeros(shape, np.float32), np.zeros(shape, bool)
    for p, row in enumerate(rows):
        for g, (i, j) in enumerate(row.members):
            outcome = collection.outcome(i)
            rewards[p, g], where[p, g] = outcome.rewards[j], outcome.where[j]
        if row.rewards is not None:
            rewards[p, : len(row.members)] = row.rewards
    return rewards, where


def _passing(collector, option: str, rule, rows: Sequence[Row], collection) -> np.ndarray:
    """Which rows a rule keeps any rollout of: bool ``[n]``."""
    if not rows:
        return np.zeros(0, bool)
    rewards, where = _rewards(rows, collection)
    with on_host():
        keep = call_with(rule, rewards, context={"rewards": rewards, "where": where})
    checks.check_shape(repr(collector), f"the result of {option}", keep, rewards.shape)
    checks.check_bool(repr(collector), **{option: keep})
    return (np.asarray(keep) & where).any(axis=-1)


def replayed(
    *,
    capacity: int,
    share: float | None = None,
    draw: Literal["count", "each"] = "count",
    replace: Callable | None = None,
    store: Callable | None = None,
    score: Callable | None = None,
    priority: Callable | None = None,
    evict: Literal["oldest", "lowest"] = "oldest",
    unique: bool = False,
    max_staleness: int | None = None,
    start: int = 0,
    until: int | None = None,
    regrade: bool = False,
    source: Collector | None = None,
) -> Collector:
    """Trains on stored groups of earlier batches: a part of each batch, or for dropped groups.

        a part of a batch:  round(share P) stored groups and P - round(share P) fresh ones
        with ``replace``:   P fresh groups; stored ones replace those that the rule drops
        buffer <- fresh groups of the batch, once it is complete

    A stored group has the tokens, rewards and ``behavior_logp`` of the weights that sampled it, and
    it stays in the buffer. If there are fewer stored groups than needed, fresh ones are requested,
    or dropped ones remain. A batch has at least one fresh group, and each stored one at most once.

    Args:
      capacity: C, groups in the buffer.
      share: Share of the groups of a batch that are stored ones, above 0 and below 1; in a run, at
        least one group.
      draw: "count" for that share of every batch; "each" draws for each group with that
        probability whether it is a stored one.
      replace: ``rewards [n, G] -> keep [n, G]``, such as
        :func:`~jaxrl_llm.curation.informative_groups`, in place of ``share``.
      store: The same for groups to store; None for all. Only groups that were sampled after the
        prompt itself are stored, so none with a hint or another message.
      score: Scores ``[n]`` of new groups from ``rewards``, ``where`` and ``advantages`` (GRPO's),
        ``[n, G]``, such as :func:`~jaxrl_llm.curation.replay_scores`.
      priority: Weights ``[C]`` of draws from ``scores``, ``order``, ``versions``, ``version`` and
        ``where``, such as :func:`~jaxrl_llm.curation.replay_priorities`; None for equal ones.
      evict: Groups that a full buffer removes: the "oldest", or those of the "lowest" score.
      unique: Whether a prompt has at most one group in the buffer, its last one.
      max_staleness: Groups that are older than this many versions of the weights are not drawn.
      start: The step from which groups are replayed; they are stored from the beginning.
      until: The step from which no group is replayed, above ``start``.
      regrade: Whether stored responses are graded again, for a recipe that reads more of the run's
        reward than one number, such as components, answers or the rewards of steps, for which the
        buffer has no room.
      source: The collector of fresh groups, without another :func:`replayed` in it; None for
        :func:`in_order`. With ``share`` it is asked for fewer groups than a batch has, which
        :func:`partial_rollouts` and :func:`windowed` do not support.

    Returns:
      A collector; its state is a :class:`ReplayedState`.

    Raises:
      TypeError: If an option that must be a function is not.
      ValueError: If not exactly one of ``share`` and ``replace`` is set, an option is out of its
        range or has no effect, or the source values prefixes, replays stored groups itself, helps
        every group or, with ``share``, does not support batches of fewer groups.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.replayed(share=0.5, capacity=512, max_staleness=8)
      replayed(capacity=512, share=0.5, max_staleness=8)

    References:
      DOTS (arXiv:2506.05316), Skywork R1V2 (arXiv:2504.16656), ReMix (arXiv:2507.06892) and TRL's
      GRPO with a replay buffer, which differ in share, priority and bounds.
    """
    name = "replayed"
    checks.check_count(name, capacity=capacity)
    if (share is None) == (replace is None):
        raise ValueError(f"{name}: give one of share and replace; got {share!r} and {replace!r}.")
    if share is not None and not 0.0 < share < 1.0:
        raise ValueError(f"{name}: share must be above 0 and below 1; got {share!r}.")
    checks.check_option(name, "draw", draw, ("count", "each"))
    checks.check_option(name, "evict", evict, ("oldest", "lowest"))
    if share is None and draw != "count":
        raise ValueError(f"{name}: draw has no effect with replace.")
    rules = {"replace": replace, "store": store, "score": score, "priority": priority}
    for option, rule in rules.items():
        if rule is not None and not callable(rule):
            raise TypeError(f"{name}: {option} must be a function; got {rule!r}.")
    if evict == "lowest" and score is None:
        raise ValueError(f"{name}: evict='lowest' needs a score.")
    checks.check_non_negative(name, max_staleness=max_staleness)
    checks.check_non_negative(name, start=start)
    checks.check_positive(name, until=until)
    if until is not None and until <= start:
        raise ValueError(f"{name}: until must be above start {start}; got {until}.")
    source = in_order() if source is None else source
    if needs_of(source).values_prefixes:
        raise ValueError(
            f"{name}: source {source!r} values prefixes of its responses, but the buffer stores no "
            "segments of responses."
        )
    if any(isinstance(part, _Replayed) for part in collector_parts(source)):
        raise ValueError(
            f"{name}: source {source!r} also replays stored groups, which cannot be told apart "
            "from those of this collector; leave one of the two out."
        )
    if needs_of(source).helps_every_group:
        raise ValueError(
            f"{name}: source {source!r} gives every group a text, a hint or a response of the "
            "data, but only groups that were sampled after the prompt itself are stored, so none "
            "would be replayed; use a source without such help, such as in_epochs."
        )
    if share is not None and for_batch_of(source, 1) != source:
        raise ValueError(
            f"{name}: with share, source {source!r} is asked for fewer groups than a batch has, "
            "but its state is made for one number of groups; use replace or another source."
        )
    return _Replayed(
        capacity=capacity,
        share=None if share is None else float(share),
        draw=draw,
        replace=replace,
        store=store,
        score=score,
        priority=priority,
        evict=evict,
        unique=unique,
        max_staleness=max_staleness,
        start=start,
        until=until,
        regrade=regrade,
        source=source,
    )
