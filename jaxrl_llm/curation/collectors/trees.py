"""Collectors that go on from beginnings of responses: some fork, and some end early.

Both work in rounds. A round of a group waits for the round before of the same group, and its
requests stand behind those of the groups before it, so that they do not depend on timing. What a
response begins with is not sampled again, and keeps the numbers of its first sampling.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import ArrayTree, call_with, checks
from jaxrl_llm.core.compose import accepted, stable_repr
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Request,
    Response,
    Row,
    in_order,
    on_host,
    sized,
)
from jaxrl_llm.curation.trees.pruning import (
    ScoreBins,
    quality_loss,
    score_bins_init,
    score_bins_update,
    score_rates,
    survival_rates,
    systematic_survivors,
)

# ``finish`` of a response that paused at the limit of its request, as in ``rollout.UNFINISHED``.
PAUSED = 4

# What a rule may name of the responses of a group, as arrays [n, T].
_STATISTICS = {"old_entropy": "entropy", "old_logp": "model_logp", "behavior_logp": "behavior_logp"}


def beginning(response: Response, length: int) -> Response:
    """The first tokens of a response, with their numbers, for a request that goes on from them.

    Args:
      response: Of an outcome.
      length: How many, from 0 to all.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> whole = jr.curation.Response(np.array([5, 6, 7]), np.array([-0.1, -0.2, -0.3]))
      >>> beginning(whole, 2).behavior_logp.tolist()
      [-0.1, -0.2]
    """

    def cut(x: np.ndarray | None) -> np.ndarray | None:
        return None if x is None else x[:length]

    return response._replace(
        tokens=response.tokens[:length],
        behavior_logp=cut(response.behavior_logp),
        model_logp=cut(response.model_logp),
        version=cut(response.version),
        trains=cut(response.trains),
        entropy=cut(response.entropy),
        finish=PAUSED,
        reward=None,
    )


def _go_on(collection: Collection, rounds: int, more: Callable) -> tuple[list[Request], bool]:
    """The requests that can be asked for now, and whether they are the last.

    ``more(group, requests)`` is the next request of a group after those of the round before, by
    their places, or None.
    """
    groups, requests = collection.num_groups, collection.requests
    number, group = 1, -1
    if len(requests) > groups:
        number, group = requests[-1].round, _group_of(requests, len(requests) - 1)
    asked: list[Request] = []
    while True:
        group += 1
        if group == groups:
            number, group = number + 1, 0
        if number > rounds:
            return asked, True
        before = [
            i
            for i, request in enumerate(requests)
            if request.round == number - 1 and _group_of(requests, i) == group
        ]
        # A request that is about to be asked for has not finished either.
        waits = any(x.extends == group and x.round == number - 1 for x in asked)
        if waits or any(collection.outcomes[i] is None for i in before):
            return asked, False
        if before and (request := more(group, before)) is not None:
            asked.append(request._replace(extends=group, round=number))


def _group_of(requests: Sequence[Request], place: int) -> int:
    """The group of a request: the first ones are of one each."""
    extends = requests[place].extends
    return place if extends is None else extends


def _arrays(collection: Collection, places: list[int], size: int, length: int, names) -> dict:
    """The responses of finished requests as arrays of ``size`` rows, for a rule.

    Tokens that were not sampled in these requests have mask False.
    """
    responses = [y for i in places for y in collection.outcome(i).responses]
    if missing := [n for n in names if any(getattr(y, _STATISTICS[n]) is None for y in responses)]:
        raise ValueError(f"the rule reads {missing[0]}, which the responses do not have.")
    out = {name: np.zeros((size, length), np.float32) for name in names}
    out["mask"] = np.zeros((size, length), bool)
    out["lengths"] = np.zeros(size, np.int32)
    out["unfinished"] = np.zeros(size, bool)
    # How many tokens each response began with.
    begun = []
    for request in (collection.requests[i] for i in places):
        begun += [len(y.tokens) for y in request.responses] or [0] * request.rollouts
    for row, (response, start) in enumerate(zip(responses, begun, strict=True)):
        n = len(response.tokens)
        for name in names:
            out[name][row, :n] = getattr(response, _STATISTICS[name])
        out["mask"][row, start:n] = True
        out["lengths"][row] = n
        out["unfinished"][row] = response.finish == PAUSED
    return out


def _finished_members(collection: Collection) -> list[list[tuple[int, int]]]:
    """The finished responses of each group, in the order in which they were asked for."""
    members: list[list[tuple[int, int]]] = [[] for _ in range(collection.num_groups)]
    for i in range(len(collection.requests)):
        for j, response in enumerate(collection.outcome(i).responses):
            if response.finish != PAUSED:
                members[_group_of(collection.requests, i)].append((i, j))
    return members


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Forked:
    """Made by :func:`forked`."""

    rule: Callable
    forks: int
    branches: int
    rounds: int
    segment: int | None
    source: Collector
    length: int | None = None
    needs_slots = True

    @property
    def records_entropy(self) -> bool:
        return "old_entropy" in accepted(self.rule)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Forked":
        if group_size < self._leaves:
            raise ValueError(
                f"{self!r}: a tree has {self._leaves} leaves, more than a group of {group_size}."
            )
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        segment = self.segment
        if segment is not None:
            # The last round samples to the end of a response.
            segment = min(segment, max(1, max_new_tokens // (self.rounds + 1)))
        return dataclasses.replace(self, source=source, length=max_new_tokens, segment=segment)

    @property
    def _leaves(self) -> int:
        """Leaves of a tree, at most."""
        if self.segment is not None:
            return (self.forks * self.branches) ** self.rounds
        return sum((self.forks * self.branches) ** r for r in range(self.rounds + 1))

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        trees, rest = divmod(collection.group_size, self._leaves)
        size = collection._replace(group_size=trees + (rest if self.segment is None else 0))
        requests, state = self.source.propose(state, key, size, count)
        return tuple(self._limited(x, 0) for x in requests), state

    def _limited(self, request: Request, number: int) -> Request:
        if self.segment is None or number == self.rounds:
            return request
        return request._replace(limit=self.segment * (number + 1), pauses=True)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        if (missing := collection.num_groups - len(collection.requests)) > 0:
            return Decision(ask=missing), state

        def more(group: int, before: list[int]) -> Request | None:
            """The forks of the responses of a round."""
            if self.length is None:
                raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")
            responses = [y for i in before for y in collection.outcome(i).responses]
            names = [name for name in _STATISTICS if name in accepted(self.rule)]
            arrays = _arrays(collection, before, collection.group_size, self.length, names)
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
                    if place > n or (place == n and response.finish != PAUSED):
                        raise ValueError(
                            f"{self!r}: the rule forks a response of {n} tokens before token "
                            f"{place}."
                        )
                    begins += [beginning(response, int(place))] * self.branches
            if not begins:
                return None
            return self._limited(Request(len(begins), responses=tuple(begins)), number + 1)

        asked, last = _go_on(collection, self.rounds, more)
        if asked or not last or collection.waiting:
            return Decision(requests=tuple(asked)), state
        _, learned = self.source.observe(state, collection)
        rows = tuple(Row(tuple(members)) for members in _finished_members(collection))
        return Decision(rows=rows), learned

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
    branches: int = 2,
    rounds: int = 1,
    segment: int | None = None,
    source: Collector | None = None,
) -> Collector:
    """Asks for a few responses of each prompt, then for branches of them at tokens of a rule.

        round 0: roots;   round r: at each fork of a response of round r - 1, `branches` more

    A branch has the tokens before the fork in common with its parent and samples the rest. The
    group are the leaves: all responses that ended. Without a ``segment`` responses are complete
    before they fork, and a root has ``1 + forks branches + ...`` leaves, ``(forks branches)^r`` for
    round r. With one, a response pauses after ``segment`` tokens in each round but the last, so
    that it can fork at its end: ``(forks branches)^rounds`` leaves. A group of G has as many trees
    as it has room for; without a segment, roots that do not fork fill it.

    ``packing="tree"`` trains on the unique tokens of such a group.

    Args:
      rule: int32 ``[n, forks]``: the places of tokens before which each response forks, -1 for
        none. It names what it takes of the responses of the last round: ``mask`` bool ``[n, T]``
        (True for the tokens that they sampled themselves), ``old_entropy``, ``old_logp`` and
        ``behavior_logp`` ``[n, T]``, ``lengths`` and ``unfinished`` (whether they paused) ``[n]``,
        ``count`` (= forks). Such as :func:`~jaxrl_llm.curation.top_entropy_forks` and, with a
        segment, :func:`~jaxrl_llm.curation.segment_forks`.
      forks: Of a response, at most.
      branches: Of a fork.
      rounds: How often responses fork.
      segment: Tokens after which responses pause in each round but the last; at most
        ``max_new_tokens / (rounds + 1)``.
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
    options = {"forks": forks, "branches": branches, "rounds": rounds, "segment": segment}
    _check_counts(name, options)
    return _Forked(
        rule=rule,
        forks=forks,
        branches=branches,
        rounds=rounds,
        segment=segment,
        source=in_order() if source is None else source,
    )


def _check_counts(name: str, options: dict[str, int | None]) -> None:
    for option, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: {option} must be an integer; got {value!r}.")
        checks.check_positive(name, **{option: value})


class SurvivalRule(NamedTuple):
    """Which beginnings go on, where that is learned from how others ended; host side.

    Both functions name what they take of the beginnings of a group: ``mask`` bool ``[n, T]``,
    ``old_entropy``, ``old_logp`` and ``behavior_logp`` ``[n, T]``, ``lengths`` and ``unfinished``
    ``[n]``, ``step`` (of the run) and ``key`` (of step and group).

    Attributes:
      init: ``init() -> state``, a pytree of arrays.
      keep: ``keep(state, **named) -> bool [n]``, True for those that go on; what has ended is part
        of the group in any case.
      learn: ``learn(state, **named) -> state``, which may name ``rewards`` and ``where`` ``[n]``
        too, True for those that have one.
    """

    init: Callable
    keep: Callable
    learn: Callable


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Pruned:
    """Made by :func:`pruned`."""

    rule: Any  # a function or a SurvivalRule
    limit: int | None
    first: int | None
    source: Collector
    length: int | None = None
    needs_slots = True

    @property
    def records_entropy(self) -> bool:
        return any("old_entropy" in accepted(x) for x in self._functions)

    @property
    def _functions(self) -> tuple[Callable, ...]:
        learned = isinstance(self.rule, SurvivalRule)
        return (self.rule.keep, self.rule.learn) if learned else (self.rule,)

    def width(self, group_size: int) -> int:
        return self.first or group_size

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Pruned":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        limit = max(1, max_new_tokens // 4) if self.limit is None else self.limit
        if limit >= max_new_tokens:
            raise ValueError(
                f"{self!r}: limit must be below the {max_new_tokens} tokens of a response."
            )
        return dataclasses.replace(self, source=source, length=max_new_tokens, limit=limit)

    def init(self, num_prompts: int) -> ArrayTree:
        rule = self.rule.init() if isinstance(self.rule, SurvivalRule) else ()
        return {"rule": rule, "source": self.source.init(num_prompts)}

    def propose(self, state, key, collection: Collection, count: int):
        if self.length is None:
            raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")
        size = collection._replace(group_size=self.width(collection.group_size))
        requests, source = self.source.propose(state["source"], key, size, count)
        limited = tuple(x._replace(limit=self.limit, pauses=True) for x in requests)
        return limited, state | {"source": source}

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        if (missing := collection.num_groups - len(collection.requests)) > 0:
            return Decision(ask=missing), state

        def more(group: int, before: list[int]) -> Request | None:
            alive = self._survivors(state["rule"], collection, group)
            responses = collection.outcome(group).responses
            begins = tuple(beginning(responses[j], len(responses[j].tokens)) for j in alive)
            return Request(len(begins), responses=begins) if begins else None

        asked, last = _go_on(collection, 1, more)
        if asked or not last or collection.waiting:
            return Decision(requests=tuple(asked)), state
        rule, members = state["rule"], _finished_members(collection)
        if isinstance(self.rule, SurvivalRule):
            for group, row in enumerate(members):
                # From the rewards of those that ended, early or not.
                alive = self._survivors(state["rule"], collection, group)
                rewards = np.zeros(len(collection.outcome(group).responses), np.float32)
                where = np.zeros(rewards.shape, bool)
                for i, j in row:
                    place, outcome = j if i == group else alive[j], collection.outcome(i)
                    rewards[place], where[place] = outcome.rewards[j], outcome.where[j]
                with on_host():
                    context = self._context(collection, group)
                    context |= {"rewards": rewards, "where": where}
                    rule = call_with(self.rule.learn, rule, context=context)
                rule = jax.tree.map(np.asarray, rule)
        _, source = self.source.observe(state["source"], collection)
        rows = tuple(Row(tuple(row)) for row in members)
        return Decision(rows=rows), {"rule": rule, "source": source}

    def _context(self, collection: Collection, group: int) -> dict:
        """What a rule may name of the beginnings of a group."""
        names = [n for n in _STATISTICS if any(n in accepted(x) for x in self._functions)]
        size = len(collection.outcome(group).responses)
        arrays = _arrays(collection, [group], size, self.length or 0, names)
        key = jax.random.fold_in(jax.random.key(collection.step), group)
        return arrays | {"key": key, "step": np.int32(collection.step)}

    def _survivors(self, state, collection: Collection, group: int) -> list[int]:
        """Which of the beginnings of a group go on."""
        with on_host():
            context = self._context(collection, group)
            if isinstance(self.rule, SurvivalRule):
                keep = np.asarray(call_with(self.rule.keep, state, context=context))
            else:
                keep = np.asarray(call_with(self.rule, context=context))
        unfinished = context["unfinished"]
        if keep.shape != unfinished.shape or keep.dtype != bool:
            raise ValueError(
                f"{self!r}: the rule must return bool {unfinished.shape}; got shape {keep.shape} "
                f"of {keep.dtype}."
            )
        if not (keep | ~unfinished).any():
            raise ValueError(f"{self!r}: the rule drops all rollouts of group {group}.")
        return np.flatnonzero(keep & unfinished).tolist()

    def __repr__(self) -> str:
        text = stable_repr(self.rule)
        for option in ("limit", "first"):
            if getattr(self, option) is not None:
                text += f", {option}={getattr(self, option)}"
        if self.source != in_order():
            text += f", source={self.source!r}"
        return f"pruned({text})"


def pruned(
    rule: Callable | SurvivalRule,
    *,
    limit: int | None = None,
    first: int | None = None,
    source: Collector | None = None,
) -> Collector:
    """Samples the beginnings of responses; a rule says which of them go on.

        round 0: `first` beginnings of `limit` tokens;   round 1: those that the rule keeps go on

    A group is what ended, early or not. What is dropped costs `limit` tokens and is not graded.

    Args:
      rule: Bool ``[n]``, True for those that go on; it names what it takes, see
        :class:`SurvivalRule`. Such a record, as of :func:`quality_survivors`, learns from rewards.
      limit: Tokens of a beginning, below those of a response; None for a quarter of them.
      first: Beginnings of a group, and the width of the batch; None for G.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of the rule and of ``source``.

    Raises:
      TypeError: If ``rule`` is no function, or a number no integer.
      ValueError: If a number is not above 0.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> def likely(old_logp):
      ...     return old_logp.mean(-1) > -1.0
      >>> jr.curation.pruned(likely, limit=64)
      pruned(likely, limit=64)

    References:
      ARRoL (arXiv:2603.24840).
    """
    name = "pruned"
    if not callable(rule) and not isinstance(rule, SurvivalRule):
        raise TypeError(f"{name}: rule must be a function or a SurvivalRule; got {rule!r}.")
    _check_counts(name, {"limit": limit, "first": first})
    return _Pruned(
        rule=rule, limit=limit, first=first, source=in_order() if source is None else source
    )


class QualityState(NamedTuple):
    """State of :func:`quality_survivors`: NumPy arrays.

    Attributes:
      head: float32 ``[5]``, a bias and weights of four statistics of a beginning.
      bins: How often beginnings of each score ended well.
    """

    head: np.ndarray
    bins: ScoreBins


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QualityRule:
    """The functions of :func:`quality_survivors`."""

    share: float
    balance: float
    warmup: int
    num_bins: int
    learning_rate: float

    def init(self) -> QualityState:
        bins = jax.tree.map(np.asarray, score_bins_init(bins=self.num_bins))
        return QualityState(np.zeros(5, np.float32), bins)

    def keep(self, state, old_logp, old_entropy, mask, unfinished, key, step):
        if step < self.warmup:
            return np.ones(unfinished.shape, bool)
        scores = _scores(state.head, old_logp, old_entropy, mask)
        count = round(self.share * len(unfinished)) - int((~unfinished).sum())
        if count <= 0:
            return ~unfinished
        rates = score_rates(state.bins, scores)
        rates = survival_rates(rates, keep=self.share, balance=self.balance, where=unfinished)
        return systematic_survivors(key, rates, count=count, where=unfinished)

    def learn(self, state, old_logp, old_entropy, mask, rewards, where):
        def loss(head):
            logits = _features(old_logp, old_entropy, mask) @ head
            return quality_loss(logits, rewards, where=where)

        scores = _scores(state.head, old_logp, old_entropy, mask)
        bins = score_bins_update(state.bins, scores, rewards, where=where)
        slope = jax.grad(loss)(jnp.asarray(state.head))
        return QualityState(state.head - self.learning_rate * slope, bins)


def _features(old_logp, old_entropy, mask):
    """``[n, 5]``: 1, and mean and extreme of log-probabilities and entropies."""
    n = jnp.maximum(jnp.sum(mask, axis=-1), 1)

    def mean(x):
        return jnp.sum(jnp.where(mask, x, 0.0), axis=-1) / n

    least = jnp.min(jnp.where(mask, old_logp, 0.0), axis=-1)
    most = jnp.max(jnp.where(mask, old_entropy, 0.0), axis=-1)
    return jnp.stack([jnp.ones_like(least), mean(old_logp), least, mean(old_entropy), most], -1)


def _scores(head, old_logp, old_entropy, mask):
    return jax.nn.sigmoid(_features(old_logp, old_entropy, mask) @ head)


def quality_survivors(
    *,
    share: float = 0.5,
    balance: float = 0.5,
    warmup: int = 20,
    bins: int = 20,
    learning_rate: float = 0.1,
) -> SurvivalRule:
    """Beginnings that go on so that good and bad ends balance, by a score that learns online.

        score = sigmoid(head . statistics of the beginning),   q = score_rates(score)
        share of the group goes on, each with about survival_rates(q)

    What ended early counts as part of the share.

    Args:
      share: Share of a group that goes on, in (0, 1].
      balance: Share of good ones among them, in [0, 1].
      warmup: Steps of the run in which all go on, not negative.
      bins: Of the scores.
      learning_rate: Of the head, one step of gradient descent a group, above 0.

    Returns:
      A :class:`SurvivalRule`, whose state is a :class:`QualityState`.

    Raises:
      ValueError: If a share is outside its range, or a number negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.quality_survivors().init().head.shape
      (5,)

    References:
      ARRoL (arXiv:2603.24840), ABSTRACT reading. There the head reads the policy's hidden state at
      token 512; here mean and extreme of the log-probabilities and entropies of the beginning,
      which the sampler records.
    """
    name = "quality_survivors"
    checks.check_share(name, zero=False, share=share)
    checks.check_share(name, balance=balance)
    checks.check_non_negative(name, warmup=warmup)
    checks.check_positive(name, bins=bins, learning_rate=learning_rate)
    rule = _QualityRule(
        share=share, balance=balance, warmup=warmup, num_bins=bins, learning_rate=learning_rate
    )
    return SurvivalRule(rule.init, rule.keep, rule.learn)
