"""Plays a batch of a collector, with the answers of a function in place of a sampler."""

import dataclasses

import jax
import numpy as np

from jaxrl_llm import curation


@dataclasses.dataclass(frozen=True)
class RecordingSource:
    """A source that asks for one request again and again, and keeps what it is shown to learn."""

    request: curation.Request
    seen: list = dataclasses.field(default_factory=list)

    def init(self, num_prompts):
        return ()

    def propose(self, state, key, collection, count):
        return (self.request,) * count, state

    def observe(self, state, collection):
        self.seen.append(collection)
        return curation.Decision(), state


def play_batch(collector, state, collection, answer, *, order=None, one_by_one=False):
    """Rows, state and the collection; outcomes ``answer(request, i)`` in some order of arrival."""
    rng = np.random.default_rng(order)
    while True:
        decision, after = collector.observe(state, collection)
        if decision.rows is not None:
            return decision.rows, after, collection
        requests = decision.requests
        if decision.ask:
            count = 1 if one_by_one else decision.ask
            requests, state = collector.propose(state, jax.random.key(3), collection, count)
        if requests:
            collection = collection._replace(
                requests=collection.requests + tuple(requests),
                outcomes=collection.outcomes + (None,) * len(requests),
            )
            continue
        waiting = [i for i, x in enumerate(collection.outcomes) if x is None]
        assert waiting, "nothing is asked for and nothing is sampled"
        outcomes = list(collection.outcomes)
        for i in waiting if order is None else [rng.choice(waiting)]:
            outcomes[i] = answer(collection.requests[i], i)
        collection = collection._replace(outcomes=tuple(outcomes))
