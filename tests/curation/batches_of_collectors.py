"""Plays batches of a collector, with the answers of a function in place of a sampler."""

import dataclasses

import jax
import numpy as np
from cheap import equal

from jaxrl_llm import curation as cur

KEY = jax.random.key(3)


@dataclasses.dataclass(frozen=True)
class RecordingSource:
    """A source that asks for one request for each group, and keeps what it is shown to learn."""

    request: cur.Request
    seen: list = dataclasses.field(default_factory=list)

    def init(self, num_prompts):
        return ()

    def propose(self, state, key, collection, count):
        size, begins = collection.group_size, self.request.responses[:1]
        return (self.request._replace(rollouts=size, responses=begins * size),) * count, state

    def observe(self, state, collection):
        self.seen.append(collection)
        return cur.in_order().observe(state, collection)


def outcome(prompt, rewards, **changes):
    """A group that has finished with these rewards."""
    rewards = np.float32(rewards)
    there = np.ones(len(rewards), bool)
    lengths = [len(y.tokens) for y in changes.get("responses", ())] or 3 * there
    plain = cur.Outcome(prompt, rewards, there, np.int32(lengths), ~there, {})
    return plain._replace(**changes)


def ask(collection, requests):
    """The collection with requests that wait for their outcomes."""
    return collection._replace(
        requests=collection.requests + tuple(requests),
        outcomes=collection.outcomes + (None,) * len(requests),
    )


def place_of(collection, number):
    """The prompt of a request: its own, that of its root, or the next in the order of the data."""
    request = collection.requests[number]
    if request.extends is not None:
        return place_of(collection, request.extends)
    if request.prompt is not None:
        return request.prompt
    before = collection.requests[:number]
    place = sum(r.prompt is None and r.extends is None for r in before)
    place += collection.step * collection.num_groups
    return place % len(collection.data) if collection.data else place


def play_batch(collector, state, collection, answer, *, order=None, one_by_one=False, key=KEY):
    """Rows, state and the collection; outcomes ``answer(request, number, place)`` in some order."""
    rng = np.random.default_rng(order)
    for _ in range(400):
        decision, after = collector.observe(state, collection)
        if decision.rows is not None:
            return decision.rows, after, collection
        for count in [1] * decision.ask if one_by_one else [decision.ask] * (decision.ask > 0):
            requests, state = collector.propose(state, key, collection, count)
            collection = ask(collection, requests)
        collection = ask(collection, decision.requests)
        if decision.ask or decision.requests:
            continue
        waiting = [i for i, x in enumerate(collection.outcomes) if x is None]
        assert waiting, "nothing is asked for and nothing is sampled"
        outcomes = list(collection.outcomes)
        for i in waiting if order is None else [rng.choice(waiting)]:
            outcomes[i] = answer(collection.requests[i], i, place_of(collection, i))
        collection = collection._replace(outcomes=tuple(outcomes))
    raise AssertionError("a batch without an end")


def play_alike(play, state, steps):
    """The batches of ``play(state, step, **timing)``, which are the same whatever the timing."""
    states, batches = [state] * 4, []
    timings = ({}, {"one_by_one": True}, {"order": 0}, {"order": 1, "one_by_one": True})
    for step in range(steps):
        played = [play(x, step, **timing) for x, timing in zip(states, timings, strict=True)]
        states = [after for _, after, _ in played]
        rows, after, collection = played[0]
        for its_rows, its_state, its_collection in played[1:]:
            assert its_rows == rows and short(its_collection) == short(collection)
            jax.tree.map(equal, its_state, after)
        members = [member for row in rows for member in row.members]
        assert len(set(members)) == len(members)
        batches.append(played[0])
    # The state is arrays of fixed shapes, as a checkpoint stores it.
    kinds = [jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype), x) for x in (state, after)]
    assert kinds[0] == kinds[1]
    return batches


def short(collection):
    """The requests without arrays and functions."""
    return [r._replace(responses=(), reward=None) for r in collection.requests]
