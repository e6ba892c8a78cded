"""Collectors that send a question in several messages."""

import functools

import jax
import numpy as np
import pytest
from batches_of_collectors import RecordingSource, ask, outcome, play_alike, play_batch
from rows import for_each

from jaxrl_llm import curation as cur
from jaxrl_llm.curation import Collection
from jaxrl_llm.curation.collectors.messages import budget_message
from jaxrl_llm.curation.collectors.protocol import sized

DATA = [{"text": f"q{n}", "paraphrases": [f"a{n}", f"b{n}", f"c{n}"]} for n in range(8)]
KEY = jax.random.key(0)


def answer(request, number, place):
    return outcome(place, np.full(request.rollouts, place / 10), responses=request.responses)


def play(collector, state=None, step=0, *, groups=6, rollouts=5, **timing):
    state = collector.init(len(DATA)) if state is None else state
    batch = Collection(groups, rollouts, step, data=DATA)
    return play_batch(collector, state, batch, answer, key=KEY, **timing)


def test_parts_of_a_group():
    # Each paraphrase is a row.
    rows, _, batch = play(cur.paraphrased())
    requests = batch.requests
    assert [r.rollouts for r in requests] == [5] * 6
    assert [r.extends for r in requests] == [None, 0, 0, None, 3, 3]
    assert [r.text(DATA[4]) for r in requests] == ["a4", "b4", "c4"] * 2
    assert [row.members for row in rows] == [tuple((i, g) for g in range(5)) for i in range(6)]

    # Each budget gets a part of the group.
    collector = cur.budgeted((2, 4, 8), template="{prompt} in {budget}")
    rows, _, batch = play(collector, groups=2)
    requests = batch.requests
    assert [r.rollouts for r in requests] == [2, 2, 1] * 2
    assert [r.extends for r in requests] == [None, 0, 0, None, 3, 3]
    assert [r.text(DATA[1]) for r in requests[:3]] == ["q1 in 2", "q1 in 4", "q1 in 8"]
    assert rows[1].members == ((3, 0), (3, 1), (4, 0), (4, 1), (5, 0)) and len(rows) == 2

    # Each part of a group begins with its prefix.
    begins = cur.Response(np.int32([7]), trains=np.zeros(1, bool))
    source = RecordingSource(cur.Request(5, responses=(begins,) * 5))
    collector = cur.budgeted((2, 4, 8), source=source)
    asked, _ = collector.propose((), KEY, Collection(1, 5, data=DATA), 3)
    assert [request.rollouts for request in asked] == [2, 2, 1]
    assert [request.responses for request in asked] == [(begins,) * 2, (begins,) * 2, (begins,)]

    # Told budgets are those of the messages.
    sent = [budget_message("q{budget}", b) for b in (2, 4)]
    told = cur.told_budgets(
        [["x"] * 4],
        prompts=["q{budget}"],
        messages=[[sent[1], sent[0], None, "else"]],
        budgets=(2, 4),
        unlimited=9,
    )
    assert told.tolist() == [[4, 2, 9, 9]] and told.dtype == np.float32


@for_each("groups", [1, 2, 4, 5])
@for_each("one_by_one", [False, True])
def test_a_part_of_a_batch_may_end_within_the_paraphrases_of_a_question(groups, one_by_one):
    source = cur.in_epochs(seed=1)
    collector = cur.paraphrased(source=source)
    rows, state, batch = play(collector, order=1, groups=groups, one_by_one=one_by_one)
    assert [r.extends for r in batch.requests] == [None, 0, 0, None, 3][:groups]
    assert [row.members[0][0] for row in rows] == list(range(groups))
    expected, _ = source.propose(source.init(len(DATA)), KEY, Collection(groups, 5), 3)
    following, _ = source.propose(state, KEY, Collection(groups, 5), 1)
    assert following[0].prompt == expected[-(-groups // 3)].prompt


def test_messages_of_a_part():
    # Stored groups leave a mixture any number of paraphrases.
    mixture = cur.mixed((cur.paraphrased(), 0.75), (cur.in_order(), 0.25))
    collector = sized(
        cur.replayed(capacity=8, share=0.5, source=mixture), group_size=2, max_new_tokens=2
    )

    def stored(request, number, place):
        one = cur.Response(np.int32([number]), np.zeros(1), np.zeros(1))
        return outcome(place, [0.1, 0.1], responses=request.responses or (one,) * 2)

    state = collector.init(len(DATA))
    for step in range(3):
        rows, state, _ = play_batch(collector, state, Collection(4, 2, step, data=DATA), stored)
        assert len(rows) == 4

    # All messages of a prompt are sampled as the first.
    source = RecordingSource(cur.Request(5, temperature=0.5))
    collector = cur.budgeted((2, 4, 8), source=source)
    asked, _ = collector.propose((), KEY, Collection(2, 5, data=DATA), 2)
    later, _ = collector.propose((), KEY, ask(Collection(2, 5, data=DATA), asked), 4)
    assert {request.temperature for request in (*asked, *later)} == {0.5}
    assert [request.extends for request in later] == [0, None, 3, 3]

    # Messages of a part of a batch extend their own question.
    collector = cur.mixed((cur.in_order(), 0.5), (cur.budgeted((2, 4)), 0.5))
    state = collector.init(len(DATA))
    for counts in ([6], [1] * 6):
        collection = Collection(4, 2, data=DATA)
        assert collector.observe(state, collection)[0].ask == 6
        for count in counts:
            asked, _ = collector.propose(state, KEY, collection, count)
            collection = ask(collection, asked)
        extends = [request.extends for request in collection.requests]
        assert extends == [None, None, None, 2, None, 4]


@for_each("source", [None, cur.prioritized(cur.learnability)])
@for_each("make", [cur.paraphrased, cur.budgeted])
def test_the_laws_of_collectors(make, source):
    options = {} if make is cur.paraphrased else {"budgets": (1, 2, 3)}
    collector = make(**options, source=source)
    timed = functools.partial(play, collector)
    ((_, _, batch),) = play_alike(timed, collector.init(len(DATA)), 1)
    named = {r.prompt for r in batch.requests} - {None}
    assert len(named) == (0 if source is None else 6 // 3) or make is cur.budgeted


@for_each(
    ("call", "error", "words"),
    [
        (
            lambda: cur.paraphrased().check_data([DATA[0], {"id": "x", "paraphrases": ["1", "2"]}]),
            ValueError,
            "prompt 'x' has 2 paraphrases, those before it 3",
        ),
        (
            lambda: cur.paraphrased().check_sizes(DATA, group_size=4, num_groups=8),
            ValueError,
            "a batch of 8 prompts does not hold all 3 paraphrases",
        ),
        (
            lambda: cur.budgeted((1, 2, 3)).check_sizes(DATA, group_size=2, num_groups=8),
            ValueError,
            "a group of 2 rollouts is less than one for each of the 3 budgets",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


def test_they_print_what_differs():
    source = cur.prioritized(cur.learnability)
    assert repr(cur.paraphrased(source=source)) == f"paraphrased(source={source!r})"
    text = "budgeted((1, 2), template='{prompt} {budget}')"
    assert repr(cur.budgeted((1, 2), template="{prompt} {budget}")) == text
