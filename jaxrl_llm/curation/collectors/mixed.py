"""A collector that divides a batch between several others by share."""

import dataclasses

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, checks
from jaxrl_llm.curation.collectors.needs import Needs, needs_of, needs_of_sources
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Request,
    Row,
    collector_parts,
    for_batch_of,
    on_host,
    sized,
    width_of,
)

__all__ = ["mixed"]


@dataclasses.dataclass(frozen=True, repr=False)
class _Mixed:
    """Made by :func:`mixed`."""

    sources: tuple[Collector, ...]
    shares: tuple[float, ...]

    @property
    def needs(self) -> Needs:
        nothing = all(needs_of(source).samples_nothing for source in self.sources)
        return needs_of_sources(*self.sources) | Needs(asks_again=True, samples_nothing=nothing)

    def width(self, group_size: int) -> int:
        return max(width_of(source, group_size) for source in self.sources)

    def for_run(self, group_size: int, max_new_tokens: int) -> Collector:
        sources = tuple(
            sized(x, group_size=group_size, max_new_tokens=max_new_tokens) for x in self.sources
        )
        return dataclasses.replace(self, sources=sources)

    def for_batch(self, num_groups: int) -> Collector:
        counts = self.groups_of_sources(num_groups)
        return dataclasses.replace(self, sources=tuple(map(for_batch_of, self.sources, counts)))

    def init(self, num_prompts: int) -> ArrayTree:
        return tuple(source.init(num_prompts) for source in self.sources)

    def groups_of_sources(self, num_groups: int) -> list[int]:
        """How many groups of a batch each source has: the largest remainders get what is left."""
        exact = np.array(self.shares) / sum(self.shares) * num_groups
        counts = np.floor(exact + 1e-9).astype(int)
        left = num_groups - counts.sum()
        counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
        return counts.tolist()

    def _part_ahead(self, num_groups: int) -> int:
        """The last part that has groups, of those that ask for more if there are any."""
        present = [k for k, n in enumerate(self.groups_of_sources(num_groups)) if n]
        return max(present, key=lambda k: (needs_of(self.sources[k]).asks_ahead, k))

    def propose(self, state, key, collection: Collection, count: int):
        asks = [decision.ask for decision, _ in self._decisions(state, collection)]
        # What is proposed beyond what is asked for only keeps a sampler busy.
        if (surplus := count - sum(asks)) > 0:
            asks[self._part_ahead(collection.num_groups)] += surplus
        requests: list[Request] = []
        states = list(state)
        # Parts alike that share a key would choose the same prompts.
        with on_host():
            key = jax.random.wrap_key_data(np.asarray(jax.random.key_data(key)))
            keys = [jax.random.fold_in(key, k) for k in range(len(self.sources))]
        for k, ask in enumerate(asks):
            if number := min(ask, count - len(requests)):
                part, numbers = self._part(collection, k)
                proposed, states[k] = self.sources[k].propose(state[k], keys[k], part, number)
                first = len(collection.requests) + len(requests)
                numbers += range(first, first + number)
                requests += [self._of_part(request, k, numbers) for request in proposed]
        return tuple(requests), tuple(states)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        if collection.waiting:  # what a part asks for next must not depend on timing
            # What all ask for at first may be proposed one at a time, by a collector around this.
            nothing = collection._replace(requests=(), outcomes=())
            first = sum(decision.ask for decision, _ in self._decisions(state, nothing))
            return Decision(ask=max(first - len(collection.requests), 0)), state
        return self._decide(state, collection)

    def _decide(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        """As :meth:`observe`, of requests that are still proposed one at a time as well."""
        decisions = self._decisions(state, collection)
        if all(decision.rows is not None for decision, _ in decisions):
            rows: list[Row] = []
            for k, (decision, _) in enumerate(decisions):
                _, numbers = self._part(collection, k)
                for row in decision.rows or ():
                    members = tuple((numbers[i], member) for i, member in row.members)
                    rows.append(row._replace(members=members))
            rows.sort(key=lambda row: _asked(collection, row.members[0][0]))
            return Decision(rows=tuple(rows)), tuple(learned for _, learned in decisions)
        requests: list[Request] = []
        for k, (decision, _) in enumerate(decisions):
            _, numbers = self._part(collection, k)
            requests += [self._of_part(request, k, numbers) for request in decision.requests]
        ask = sum(decision.ask for decision, _ in decisions)
        return Decision(ask=ask, requests=tuple(requests)), state

    def _decisions(self, state, collection: Collection) -> list[tuple[Decision, ArrayTree]]:
        """What each source decides on its part of the batch."""
        decisions = []
        for k, source in enumerate(self.sources):
            part, _ = self._part(collection, k)
            if part.num_groups:
                decide = source._decide if isinstance(source, _Mixed) else source.observe
                decisions.append(decide(state[k], part))
            else:
                decisions.append((Decision(rows=()), state[k]))
        return decisions

    def _part(self, collection: Collection, k: int) -> tuple[Collection, list[int]]:
        """The batch as a source sees it, and the numbers of its requests.

        Which source a request is of stands in its round, beside the round that the source counts.
        """
        total = len(self.sources)
        numbers = [i for i, each in enumerate(collection.requests) if each.round % total == k]
        local = {number: i for i, number in enumerate(numbers)}
        requests = []
        for number in numbers:
            request = collection.requests[number]
            extends = None if request.extends is None else local[request.extends]
            requests.append(request._replace(round=request.round // total, extends=extends))
        # Counted with the collectors inside, so that also the parts of nested mixtures differ. The
        # first part has the run's seed, as it would have alone.
        before = sum(1 for source in self.sources[:k] for _ in collector_parts(source))
        seed = collection.seed
        if before:
            seed = int(np.random.SeedSequence((seed, before)).generate_state(1)[0])
        part = collection._replace(
            seed=seed,
            num_groups=self.groups_of_sources(collection.num_groups)[k],
            requests=tuple(requests),
            outcomes=tuple(collection.outcomes[i] for i in numbers),
        )
        return part, numbers

    def _of_part(self, request: Request, k: int, numbers: list[int]) -> Request:
        """A request of a source, whose requests have these numbers in the batch."""
        extends = None if request.extends is None else numbers[request.extends]
        return request._replace(round=request.round * len(self.sources) + k, extends=extends)

    def __repr__(self) -> str:
        pairs = zip(self.sources, self.shares, strict=True)
        return f"mixed({', '.join(f'({source!r}, {share:g})' for source, share in pairs)})"


def _asked(collection: Collection, request: int) -> int:
    """The request that first asked for the prompt of another."""
    extends = collection.requests[request].extends
    return request if extends is None else _asked(collection, extends)


def mixed(*parts: tuple[Collector, float]) -> Collector:
    """A batch whose groups come from several collectors, by share.

        P_k = P share_k / sum of shares, rounded by the largest remainders

    The rows are in the order of their requests, at first that of the parts, whose draws are
    independent unless they set the same ``seed``. Prompts in the order of the data go to the part
    that requests next, so each is used once.

    Args:
      *parts: A collector and its share, above 0, each.

    Returns:
      A collector; its state is a tuple of the parts' states.

    Raises:
      TypeError: If a part is not a pair of a collector and a number.
      ValueError: If there is no part, or a share is not above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.mixed((jr.curation.in_order(), 0.75), (jr.curation.prefixed(), 0.25))
      mixed((in_order(), 0.75), (prefixed(cuts=3, low=0.4, high=0.8), 0.25))

    References:
      None: batches of several sources, for example with demonstrations in some of the groups.
    """
    if not parts:
        raise ValueError("mixed: there must be at least one part.")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and hasattr(part[0], "propose")):
            raise TypeError(f"mixed: a part must be a collector and its share; got {part!r}.")
        checks.check_positive("mixed", finite=True, share=part[1])
    return _Mixed(tuple(source for source, _ in parts), tuple(float(x) for _, x in parts))
