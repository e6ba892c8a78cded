"""Rollouts that go on from prefixes: which are asked for, and the values that a row has of them."""

import jax
import numpy as np
import pytest
from batches_of_collectors import outcome
from cheap import close

from jaxrl_llm import curation as cur
from jaxrl_llm.curation import Collection, Response, valued
from jaxrl_llm.curation.collectors.protocol import sized

G, T, N = 2, 8, 10
NEWLINE = 9
GROUPS = [[[1, 2, NEWLINE, 3, 4], [1, 2, NEWLINE, 5]], [[NEWLINE], [7, 8]]]


def finished(prompt, tokens, rewards, where=None):
    responses = tuple(
        Response(np.int32(x), -np.ones(len(x)), -np.float32(x) / 10, np.zeros(len(x), np.int32))
        for x in tokens
    )
    done = outcome(prompt, rewards, responses=responses, texts=("",) * len(tokens))
    return done if where is None else done._replace(where=np.array(where))


def decode(tokens):
    return "".join("a\n" if t == NEWLINE else "b" for t in tokens)


def first_round(collector, tokens=GROUPS):
    """The collection after the groups finished, and what is asked for then."""
    collection = Collection(len(tokens), G, decode=decode)
    state = collector.init(N)
    assert collector.observe(state, collection)[0].ask == len(tokens)
    requests, state = collector.propose(state, jax.random.key(0), collection, len(tokens))
    outcomes = tuple(finished(i, x, [1.0, 0.0]) for i, x in enumerate(tokens))
    collection = collection._replace(requests=requests, outcomes=outcomes)
    return state, collection, collector.observe(state, collection)[0].requests


def for_run(collector):
    return sized(collector, group_size=G, max_new_tokens=T)


def test_values():
    # Each prefix of a group is asked for once and goes on from its tokens.
    collector = for_run(valued(cur.line_starts, rollouts=3))
    _, _, requests = first_round(collector)
    assert [(x.extends, x.round, x.rollouts) for x in requests] == [(0, 1, 6), (1, 1, 3)]
    begins = [[y.tokens.tolist() for y in x.responses] for x in requests]
    assert begins == [[[]] * 3 + [[1, 2, NEWLINE]] * 3, [[]] * 3]
    begun = requests[0].responses[3]
    close(begun.model_logp, [-0.1, -0.2, -0.9])
    assert all(x.sampled and x.limit is None for x in requests)

    # The values are mean rewards and what goes on is no member.
    collector = for_run(valued(cur.line_starts, rollouts=3))
    state, collection, requests = first_round(collector)
    collection = collection._replace(requests=collection.requests + requests)
    waiting = collection._replace(outcomes=(*collection.outcomes, None, None))
    assert collector.observe(state, waiting)[0] == (0, None, ())
    after = [
        finished(0, [[1]] * 6, [1, 1, 0, 0.5, 9, 0.25], [True] * 4 + [False, True]),
        finished(1, [[1]] * 3, [0, 1, 0]),
    ]
    done = collection._replace(outcomes=(*collection.outcomes, *after))
    decision, _ = collector.observe(state, done)
    first, second = decision.rows
    assert first.members == ((0, 0), (0, 1)) and second.members == ((1, 0), (1, 1))
    lines = ((0, pytest.approx(2 / 3)), (3, pytest.approx(0.375)))
    assert first.segments == (lines, lines)
    assert second.segments == (((0, pytest.approx(1 / 3)),),) * 2


def test_segments():
    # A response whose prefix has no value takes no part.
    collector = for_run(valued(cur.line_starts, rollouts=1))
    tokens = [[[1, NEWLINE, 3], [1, 2]], [[4], [5]]]
    state, collection, requests = first_round(collector, tokens)
    after = [finished(0, [[1]] * 2, [1, 1], [True, False]), finished(1, [[1]], [1], [False])]
    done = collection._replace(
        requests=collection.requests + requests, outcomes=(*collection.outcomes, *after)
    )
    first, second = collector.observe(state, done)[0].rows
    assert first.members == ((0, 1),) and first.segments == (((0, 1.0),),)
    assert second.members == ((1, 0), (1, 1)) and not second.takes_part

    # Uncertain tokens cut and a certain response has no segment.
    def rule(old_logp, mask, count):
        return cur.spo_cutpoints(old_logp, mask, count=count, rho=0.7, interval=1)

    collector = for_run(valued(rule, rollouts=1, segments=2))
    # The probability of a token t is exp(-t / 10): below 0.7 from 4 on.
    state, collection, requests = first_round(collector, [[[1, 4, 1, 5, 6], [1, 2]]])
    assert [y.tokens.tolist() for y in requests[0].responses] == [[1], [1, 4, 1]]
    done = collection._replace(
        requests=collection.requests + requests,
        outcomes=(*collection.outcomes, finished(0, [[1]] * 2, [0.5, 1.0])),
    )
    (row,) = collector.observe(state, done)[0].rows
    assert row.segments == (((1, 0.5), (3, 1.0)), ())
    # Nothing to value: the batch is complete.
    state, collection, requests = first_round(collector, [[[1], [2]]])
    assert not requests
    (row,) = collector.observe(state, collection)[0].rows
    assert row.segments == ((), ())


def test_bad_input_and_how_it_prints():
    with pytest.raises(ValueError, match="needs the sizes of a run"):
        first_round(valued(cur.line_starts))
    for rule, words in (
        (lambda mask: np.zeros((3, 1), int), r"must return integers \[2, n\]"),
        (lambda mask: np.zeros((2, 1)), r"must return integers \[2, n\]"),
        (lambda mask: np.array([[0], [9]]), "begins segments at tokens"),
        (lambda mask: np.array([[2, 1], [0, -1]]), "they must rise"),
    ):
        with pytest.raises(ValueError, match=words):
            first_round(for_run(valued(rule)))
    made = valued(cur.line_starts, segments=4, source=cur.in_epochs())
    assert repr(made).startswith("valued(line_starts, rollouts=9, segments=4, source=in_epochs(")
