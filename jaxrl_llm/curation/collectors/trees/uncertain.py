"""A collector whose responses branch where their entropy has risen."""

import dataclasses

import numpy as np

from jaxrl_llm.core import ArrayTree
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    UNFINISHED,
    Collection,
    Collector,
    Decision,
    Request,
    beginning,
    more_of,
    sized,
)
from jaxrl_llm.curation.collectors.trees.rounds import (
    NEEDS_OF_TREES,
    begun_length,
    branch_counts,
    call_repr,
    check_branching,
    complete_batch,
    finished_members,
    go_on,
    paused,
    rule_arrays,
)

__all__ = ["entropy_branched"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _EntropyBranched:
    """Made by :func:`entropy_branched`."""

    first: int | None
    segment: int | None
    branches: int
    prob: float
    weight: float
    tokens: int
    scale: float
    source: Collector
    length: int | None = None

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | NEEDS_OF_TREES | Needs(records_entropy=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_EntropyBranched":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        segment = self.segment or max(1, max_new_tokens // 4)
        first = self.first or max(1, group_size // 2)
        if segment >= max_new_tokens:
            raise ValueError(
                f"{self!r}: segment must be below the {max_new_tokens} tokens of a response."
            )
        if first > group_size:
            raise ValueError(f"{self!r}: first must be at most a group of {group_size}.")
        return dataclasses.replace(
            self, source=source, length=max_new_tokens, segment=segment, first=first
        )

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def _sizes(self) -> tuple[int, int, int]:
        """First rollouts, tokens of a segment and of a response, in a run."""
        if self.length is None or self.first is None or self.segment is None:
            raise ValueError(f"{self!r} needs the sizes of a run, for_run(...).")
        return self.first, self.segment, self.length

    def propose(self, state, key, collection: Collection, count: int):
        first, segment, length = self._sizes()
        size = collection._replace(group_size=first)
        requests, state = self.source.propose(state, key, size, count)
        return tuple(paused(x, segment, root=x, length=length) for x in requests), state

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        _, segment, length = self._sizes()
        rounds = (length - 1) // segment

        def more(group: int, before: list[int]) -> tuple[Request, ...]:
            """The responses that go on, their branches, and in the end what a group lacks."""
            number = collection.requests[before[0]].round
            responses = [y for i in before for y in collection.outcome(i).responses]
            live = [j for j, y in enumerate(responses) if y.finish == UNFINISHED]
            ended = sum(
                y.finish != UNFINISHED
                for i, x in enumerate(collection.requests)
                if (i == group or x.extends == group) and collection.outcomes[i] is not None
                for y in collection.outcome(i).responses
            )
            slots = collection.group_size - ended - len(live)
            rows = [*live, *self._branches(collection, group, before, live, slots)]
            begins = tuple(beginning(responses[j], len(responses[j].tokens)) for j in rows)
            left = slots - (len(rows) - len(live))
            last = number + 1 == rounds
            asked = []
            root = collection.requests[group]._replace(limit=None, pauses=False)
            if begins:
                request = more_of(root, len(begins), begins)
                if not last:
                    tokens = segment * (number + 2)
                    request = paused(request, tokens, root=root, length=length)
                asked.append(request)
            if left and (last or not live):
                asked.append(more_of(root, left))
            return tuple(asked)

        decision = go_on(collection, rounds, more, lambda request: bool(request.limit))
        if decision is not None:
            return decision, state
        return complete_batch(self.source, state, collection, finished_members(collection))

    def _branches(
        self, collection: Collection, group: int, before: list[int], live: list[int], slots: int
    ) -> list[int]:
        """The rows that get another branch, as often as they get one."""
        if not live or slots < 1:
            return []
        size = collection.group_size
        arrays = rule_arrays(collection, before, size, self.length or 0, ["old_entropy"])
        entropy, mask = arrays["old_entropy"], arrays["mask"]
        places = np.arange(mask.shape[1]) - begun_length(collection.requests[group])
        beginning_of = (places >= 0) & (places < (self.segment or 0))

        def of_first(mask: np.ndarray) -> np.ndarray:
            taken = mask & (np.cumsum(mask, axis=1) <= self.tokens)
            return (entropy * taken).sum(axis=1, dtype=np.float32) / np.float32(self.scale)

        number = collection.requests[before[0]].round
        counts = branch_counts(
            collection,
            group,
            number,
            of_first(np.broadcast_to(beginning_of, mask.shape)),
            of_first(mask),
            slots=slots,
            branches=self.branches,
            prob=self.prob,
            weight=self.weight,
            where=arrays["unfinished"],
        )
        return np.repeat(np.arange(size), counts).tolist()

    def __repr__(self) -> str:
        return call_repr(entropy_branched, self)


def entropy_branched(
    *,
    first: int | None = None,
    segment: int | None = None,
    branches: int = 1,
    prob: float = 0.5,
    weight: float = 0.2,
    tokens: int = 20,
    scale: float = 11.9,
    source: Collector | None = None,
) -> Collector:
    """Samples part of a group; responses branch at random, more often where entropy has risen.

        after each segment a response is branched with probability
        clip(prob + weight (H - H_first), 0, 1)
        H = sum of the first `tokens` entropies of the segment, over scale

    H_first is that of the first segment of the response. A branch shares all tokens so far with its
    response and continues independently. Once all responses of a group have ended, or in the last
    segment, the missing responses are sampled from the prompt.

    Args:
      first: Responses before any branch; None for half of the group.
      segment: Tokens after which responses may branch, below those of a response; None for a
        quarter of them.
      branches: Maximum branches of a response at once.
      prob: Base probability, in [0, 1].
      weight: Weight of an increase of entropy, not negative.
      tokens: Number of first tokens whose entropy counts.
      scale: In nats, above 0; the log of the size of the vocabulary, 11.9 for 151,936.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If a number is no integer.
      ValueError: If a number is out of its range; in a run, if ``first`` is more than a group or
        ``segment`` not below a response.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.entropy_branched(segment=64)
      entropy_branched(segment=64)

    References:
      ARPO (arXiv:2507.19849), the released code: 8 first responses of 16, a branch at a time after
      each answer of a tool, the 10 likeliest tokens. Segments of a text and the entropy of all
      tokens are ours, and that what a group lacks is sampled at once; there H_first of a branch is
      that of its first turn after the branch.
    """
    name = "entropy_branched"
    counts = {"first": first, "segment": segment, "branches": branches, "tokens": tokens}
    check_branching(name, counts, prob=prob, weight=weight, scale=scale)
    return _EntropyBranched(
        first=first,
        segment=segment,
        branches=branches,
        prob=prob,
        weight=weight,
        tokens=tokens,
        scale=scale,
        source=prompt_source(name, source),
    )
