"""A collector whose episodes branch after answers of the environment."""

import dataclasses

import numpy as np

from jaxrl_llm.core import ArrayTree
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Request,
    Response,
    beginning,
    more_of,
    sized,
)
from jaxrl_llm.curation.collectors.trees.rounds import (
    branch_counts,
    call_repr,
    check_branching,
    complete_batch,
    finished_members,
    go_on,
)

__all__ = ["turn_branched"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _TurnBranched:
    """Made by :func:`turn_branched`."""

    first: int | None
    branches: int
    prob: float
    weight: float
    tokens: int
    scale: float
    source: Collector

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | Needs(
            slots=True,
            environment=True,
            asks_again=True,
            grades_apart=True,
            records_entropy=self.weight > 0,
        )

    def for_run(self, group_size: int, max_new_tokens: int) -> "_TurnBranched":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        first = self.first or max(1, group_size // 2)
        if first > group_size:
            raise ValueError(f"{self!r}: first must be at most a group of {group_size}.")
        return dataclasses.replace(self, source=source, first=first)

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        if self.first is None:
            raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")
        size = collection._replace(group_size=self.first)
        return self.source.propose(state, key, size, count)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        def more(group: int, before: list[int]) -> tuple[Request, ...]:
            """Branches of the last episodes, or what the group lacks from its beginning."""
            requests = collection.requests
            sizes = [x.rollouts for i, x in enumerate(requests) if group in (i, x.extends)]
            left = collection.group_size - sum(sizes)
            if left < 1:
                return ()
            begins = self._branches(collection, group, before, left)
            return (more_of(requests[group], len(begins) or left, begins),)

        if (decision := go_on(collection, collection.group_size, more)) is not None:
            return decision, state
        return complete_batch(self.source, state, collection, finished_members(collection))

    def _branches(
        self, collection: Collection, group: int, before: list[int], left: int
    ) -> tuple[Response, ...]:
        """Beginnings of episodes that branch, the earliest turns first."""
        points: list[tuple[int, Response, int]] = []
        for i in before:
            begun = collection.requests[i].responses or (None,) * collection.requests[i].rollouts
            for begin, response in zip(begun, collection.outcome(i).responses, strict=True):
                first = 0 if begin is None else len(begin.tokens)
                starts = [x.length for x in response.turn_starts or ()]
                points += [(t, response, n) for t, n in enumerate(starts) if n > first]
        if not points:
            return ()
        points.sort(key=lambda point: point[0])
        entropy = [(self._entropy(y, 0), self._entropy(y, n)) for _, y, n in points]
        first_entropy, now = np.array(entropy, np.float32).T
        number = collection.requests[before[0]].round
        counts = branch_counts(
            collection,
            group,
            number,
            first_entropy,
            now,
            slots=left,
            branches=self.branches,
            prob=self.prob,
            weight=self.weight,
        )
        return tuple(
            beginning(response, n)
            for (_, response, n), count in zip(points, counts.tolist(), strict=True)
            for _ in range(count)
        )

    def _entropy(self, response: Response, start: int) -> float:
        """Of the first tokens of the turn that begins behind ``start`` tokens, over the scale."""
        if self.weight <= 0 or response.entropy is None:
            return 0.0
        end = min(start + self.tokens, len(response.tokens))
        trains = np.ones(end, bool) if response.trains is None else response.trains[:end]
        sampled = np.logical_and.accumulate(trains[start:end])
        return float(np.nansum(response.entropy[start:end][sampled]) / self.scale)

    def __repr__(self) -> str:
        return call_repr(turn_branched, self)


def turn_branched(
    *,
    first: int | None = None,
    branches: int = 1,
    prob: float = 0.5,
    weight: float = 0.2,
    tokens: int = 20,
    scale: float = 11.9,
    source: Collector | None = None,
) -> Collector:
    """Plays part of a group; turns branch, more often if a reply made the policy uncertain.

        a turn after a reply is branched with probability clip(prob + weight (H - H_first), 0, 1)
        H = sum of the first `tokens` entropies of the turn, over scale

    H_first is that of the first turn of the episode. A branch shares everything before the turn
    with its episode, including the state of the environment, and samples the turn again. Branches
    may branch too. Once no turn branches, the missing episodes are played from the beginning.

    Args:
      first: Episodes before any branch; None for half of the group.
      branches: Maximum branches of a turn at once.
      prob: Base probability, in [0, 1].
      weight: Weight of an increase of entropy, not negative; with 0 no entropy is recorded.
      tokens: Number of first tokens whose entropy counts.
      scale: In nats, above 0; the log of the size of the vocabulary, 11.9 for 151,936.
      source: The collector that proposes the tasks; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``. It needs an environment.

    Raises:
      TypeError: If a number is no integer.
      ValueError: If a number is out of its range; in a run, if ``first`` is more than a group.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.turn_branched(first=4)
      turn_branched(first=4)

    References:
      ARPO (arXiv:2507.19849), the released code: 8 first rollouts of 16, a branch at a time after
      each answer of a tool, the 10 likeliest tokens. There branches are drawn while episodes go on;
      here once they have ended, turn by turn, with the same chances. The entropy is of all tokens.
    """
    name = "turn_branched"
    counts = {"first": first, "branches": branches, "tokens": tokens}
    check_branching(name, counts, prob=prob, weight=weight, scale=scale)
    return _TurnBranched(
        first=first,
        branches=branches,
        prob=prob,
        weight=weight,
        tokens=tokens,
        scale=scale,
        source=prompt_source(name, source),
    )
