"""Rollouts that go on from prefixes: which are asked for, and the values that a row has of them."""

import functools

import numpy as np
import pytest
from batches_of_collectors import outcome, play_batch
from cheap import close

from jaxrl_llm import curation as cur
from jaxrl_llm.curation import Collection, Response, valued
from jaxrl_llm.curation.collectors.protocol import sized

G, T, N = 2, 8, 10
NEWLINE = 9
SIZES = {"group_size": G, "max_new_tokens": T}
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


def played(rule, *after, tokens=GROUPS, sizes=SIZES, **options):
    """What is asked for after the groups finished, and the rows; it ends as ``after`` says."""
    collector = valued(rule, **options)
    collector = sized(collector, **sizes) if sizes else collector

    def answer(request, number, place):
        groups = [functools.partial(finished, place, x, [1.0, 0.0]) for x in tokens]
        return (*groups, *(functools.partial(finished, place, *x) for x in after))[number]()

    batch = Collection(len(tokens), G, decode=decode)
    rows, _, batch = play_batch(collector, collector.init(N), batch, answer, order=0)
    return batch.requests[len(tokens) :], rows


def test_values():
    # Each prefix of a group is asked for once and goes on from its tokens.
    rewards = [1, 1, 0, 0.5, 9, 0.25], [True] * 4 + [False, True]
    after = ([[1]] * 6, *rewards), ([[1]] * 3, [0, 1, 0])
    requests, (first, second) = played(cur.line_starts, *after, rollouts=3)
    assert [(x.extends, x.round, x.rollouts) for x in requests] == [(0, 1, 6), (1, 1, 3)]
    begins = [[y.tokens.tolist() for y in x.responses] for x in requests]
    assert begins == [[[]] * 3 + [[1, 2, NEWLINE]] * 3, [[]] * 3]
    close(requests[0].responses[3].model_logp, [-0.1, -0.2, -0.9])
    assert all(x.sampled and x.limit is None for x in requests)
    # The values are mean rewards and what goes on is no member.
    assert first.members == ((0, 0), (0, 1)) and second.members == ((1, 0), (1, 1))
    lines = ((0, pytest.approx(2 / 3)), (3, pytest.approx(0.375)))
    assert first.segments == (lines, lines)
    assert second.segments == (((0, pytest.approx(1 / 3)),),) * 2


def test_segments():
    # A response whose prefix has no value takes no part.
    tokens = [[[1, NEWLINE, 3], [1, 2]], [[4], [5]]]
    after = ([[1]] * 2, [1, 1], [True, False]), ([[1]], [1], [False])
    _, (first, second) = played(cur.line_starts, *after, tokens=tokens, rollouts=1)
    assert first.members == ((0, 1),) and first.segments == (((0, 1.0),),)
    assert second.members == ((1, 0), (1, 1)) and not second.takes_part

    # Uncertain tokens cut and a certain response has no segment.
    def rule(old_logp, mask, count):
        return cur.spo_cutpoints(old_logp, mask, count=count, rho=0.7, interval=1)

    # The probability of a token t is exp(-t / 10): below 0.7 from 4 on.
    options, tokens = {"rollouts": 1, "segments": 2}, [[[1, 4, 1, 5, 6], [1, 2]]]
    requests, (row,) = played(rule, ([[1]] * 2, [0.5, 1.0]), tokens=tokens, **options)
    assert [y.tokens.tolist() for y in requests[0].responses] == [[1], [1, 4, 1]]
    assert row.segments == (((1, 0.5), (3, 1.0)), ())
    # Nothing to value: the batch is complete.
    requests, (row,) = played(rule, tokens=[[[1], [2]]], **options)
    assert not requests and row.segments == ((), ())


def test_bad_input_and_how_it_prints():
    with pytest.raises(ValueError, match="needs the sizes of a run"):
        played(cur.line_starts, sizes=None)
    for rule, words in (
        (lambda mask: np.zeros((3, 1), int), r"must return integers \[2, n\]"),
        (lambda mask: np.zeros((2, 1)), r"must return integers \[2, n\]"),
        (lambda mask: np.array([[0], [9]]), "begins segments at tokens"),
        (lambda mask: np.array([[2, 1], [0, -1]]), "they must rise"),
    ):
        with pytest.raises(ValueError, match=words):
            played(rule)
    made = valued(cur.line_starts, segments=4, source=cur.in_epochs())
    assert repr(made).startswith("valued(line_starts, rollouts=9, segments=4, source=in_epochs(")
