"""What collectors of trees share: rounds of requests that go on from beginnings of responses.

A round of a group waits for the round before of the same group, and its requests stand behind those
of the groups before it, so that they do not depend on timing. What a response begins with is not
sampled again, and keeps the numbers of its first sampling.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.curation.agents import entropy_branches
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    UNFINISHED,
    Collection,
    Collector,
    Decision,
    Request,
    Row,
    in_order,
    joined_outcome,
    on_host,
)

# What a rule may name of the responses of a group, as arrays [n, T].
STATISTICS = {"old_entropy": "entropy", "old_logp": "model_logp", "behavior_logp": "behavior_logp"}

# Of a tree that goes on from places within responses.
NEEDS_OF_TREES = Needs(slots=True, splits_turns=True, asks_again=True, grades_apart=True)


def go_on(
    collection: Collection,
    rounds: int,
    more: Callable[[int, list[int]], Sequence[Request]],
    grows: Callable[[Request], bool] | None = None,
) -> Decision | None:
    """The next decision: requests, or none while groups are awaited; None after the last round.

    Args:
      collection: Of the batch; its groups are asked for first.
      rounds: After the first one, at most.
      more: ``more(group, places)`` are the next requests of a group after those of the round
        before, by their places.
      grows: Whether the next round of a group waits for a request and goes on from it; None for
        all.
    """
    groups, requests = collection.num_groups, collection.requests
    if (missing := groups - len(requests)) > 0:
        return Decision(ask=missing)
    number, group = 1, -1
    if len(requests) > groups:
        number, group = requests[-1].round, group_of(requests, len(requests) - 1)
    asked: list[Request] = []
    while True:
        group += 1
        if group == groups:
            number, group = number + 1, 0
        if number > rounds:
            return Decision(requests=tuple(asked)) if asked or collection.waiting else None
        before = [
            i
            for i, request in enumerate(requests)
            if request.round == number - 1
            and group_of(requests, i) == group
            and (grows is None or grows(request))
        ]
        # A request that is about to be asked for has not finished either.
        waits = any(
            x.extends == group and x.round == number - 1 and (grows is None or grows(x))
            for x in asked
        )
        if waits or any(collection.outcomes[i] is None for i in before):
            return Decision(requests=tuple(asked))
        new = more(group, before) if before else ()
        asked += [request._replace(extends=group, round=number) for request in new]


def group_of(requests: Sequence[Request], place: int) -> int:
    """The group of a request: the first ones are of one each."""
    extends = requests[place].extends
    return place if extends is None else extends


def begun_length(root: Request) -> int:
    """Tokens with which the responses of a group begin before any is sampled, as after a prefix."""
    return max((len(response.tokens) for response in root.responses), default=0)


def paused(request: Request, tokens: int, *, root: Request, length: int | None) -> Request:
    """A request whose responses pause after so many tokens, not counting those of a prefix.

    Args:
      request: Of the group.
      tokens: At least 1.
      root: The first request of the group.
      length: T, at which responses end; None for no bound.
    """
    limit = begun_length(root) + tokens
    return request._replace(limit=limit if length is None else min(limit, length), pauses=True)


def rule_arrays(collection: Collection, places: list[int], size: int, length: int, names) -> dict:
    """The responses of finished requests as arrays of ``size`` rows, for a rule.

    Tokens that were not sampled in these requests have mask False.
    """
    responses = [y for i in places for y in collection.outcome(i).responses]
    if missing := [n for n in names if any(getattr(y, STATISTICS[n]) is None for y in responses)]:
        raise ValueError(f"the rule reads {missing[0]}, which the responses do not have.")
    out = {name: np.zeros((size, length), np.float32) for name in names}
    out["mask"] = np.zeros((size, length), bool)
    out["lengths"] = np.zeros(size, np.int32)
    out["unfinished"] = np.zeros(size, bool)
    begun = []
    for request in (collection.requests[i] for i in places):
        begun += [len(y.tokens) for y in request.responses] or [0] * request.rollouts
    for row, (response, start) in enumerate(zip(responses, begun, strict=True)):
        n = len(response.tokens)
        for name in names:
            out[name][row, :n] = np.nan_to_num(getattr(response, STATISTICS[name]))  # NaN: unknown
        out["mask"][row, start:n] = True
        out["lengths"][row] = n
        out["unfinished"][row] = response.finish == UNFINISHED
    return out


def finished_members(collection: Collection) -> list[list[tuple[int, int]]]:
    """The finished responses of each group, in the order in which they were asked for."""
    members: list[list[tuple[int, int]]] = [[] for _ in range(collection.num_groups)]
    for i in range(len(collection.requests)):
        for j, response in enumerate(collection.outcome(i).responses):
            if response.finish != UNFINISHED:
                members[group_of(collection.requests, i)].append((i, j))
    return members


def as_groups(collection: Collection, members: Sequence[Sequence[tuple[int, int]]]) -> Collection:
    """What the source of a tree observes: one request and outcome a group, of these members.

    A beginning that paused has no reward, and what goes on from it is not another group.
    """
    requests, outcomes = [], []
    for group, row in enumerate(members):
        requests.append(collection.requests[group]._replace(rollouts=len(row)))
        outcomes.append(joined_outcome(row, collection) if row else collection.outcome(group))
    return collection._replace(requests=tuple(requests), outcomes=tuple(outcomes))


def complete_batch(
    source: Collector,
    state: ArrayTree,
    collection: Collection,
    members: Sequence[Sequence[tuple[int, int]]],
) -> tuple[Decision, ArrayTree]:
    """The rows of a batch whose groups have these members, and the state of the source after it."""
    _, learned = source.observe(state, as_groups(collection, members))
    return Decision(rows=tuple(Row(tuple(row)) for row in members)), learned


def call_repr(factory: Callable, made: Collector) -> str:
    """A collector as a call of the function that made it, without options at their defaults.

    Args:
      factory: Whose options are keyword-only, with defaults, and fields of what it makes.
      made: By it.
    """
    defaults = {**(factory.__kwdefaults__ or {}), "source": in_order()}
    values = {name: getattr(made, name) for name in defaults}
    text = [f"{name}={value!r}" for name, value in values.items() if value != defaults[name]]
    return f"{factory.__name__}({', '.join(text)})"


def branch_counts(
    collection: Collection,
    group: int,
    number: int,
    first: np.ndarray,
    now: np.ndarray,
    *,
    slots: int,
    branches: int,
    prob: float,
    weight: float,
    where: np.ndarray | None = None,
) -> np.ndarray:
    """How many branches rows get that have become more uncertain than they began.

    Args:
      collection: Of the batch; the draws depend on its seed and step, the group and
        the round.
      group, number: Of the round.
      first, now: float32 ``[n]``, entropies of the rows.
      slots: Branches that there is room for.
      branches, prob, weight: See ``curation.entropy_branches``.
      where: bool ``[n]``, rows that may branch; None for all.
    """
    with on_host():
        key = jax.random.fold_in(jax.random.key(collection.seed), collection.step)
        key = jax.random.fold_in(key, group)
        draws = jax.random.uniform(jax.random.fold_in(key, number), (len(first), branches))
        taken = entropy_branches(
            jnp.asarray(first),
            jnp.asarray(now),
            draws,
            slots=slots,
            prob=prob,
            weight=weight,
            where=None if where is None else jnp.asarray(where),
        )
        return np.asarray(taken).sum(axis=-1)


def check_branching(
    name: str, counts: dict[str, int | None], *, prob: float, weight: float, scale: float
) -> None:
    """Raises unless the options of a collector that branches by entropy are in their ranges."""
    check_counts(name, counts)
    checks.check_share(name, prob=prob)
    checks.check_non_negative(name, finite=True, weight=weight)
    checks.check_positive(name, finite=True, scale=scale)


def check_counts(name: str, options: dict[str, int | None]) -> None:
    """Raises unless the options that are not None are integers above 0."""
    for option, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: {option} must be an integer; got {value!r}.")
        checks.check_positive(name, **{option: value})
