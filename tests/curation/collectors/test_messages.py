"""Collectors that send a question in several messages."""

import jax
import numpy as np
import pytest
from batches_of_collectors import RecordingSource, play_batch
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import Collection, Outcome
from jaxrl_llm.curation.collectors.messages import budget_message
from jaxrl_llm.curation.collectors.protocol import sized

DATA = [{"text": f"q{n}", "paraphrases": [f"a{n}", f"b{n}", f"c{n}"]} for n in range(8)]
KEY = jax.random.key(0)
HINTS = jr.curation.hint_levels(jr.curation.tier_messages)


def outcome(prompt, rollouts):
    ones = np.ones(rollouts, bool)
    rewards = np.full(rollouts, prompt / 10, np.float32)
    return Outcome(prompt, rewards, ones, ones.astype(np.int32), ~ones, {})


def play(collector, order, *, groups=6, rollouts=5, one_by_one=False):
    """Requests and rows of a batch whose outcomes arrive in an order of their places."""
    state = collector.init(len(DATA))
    collection = Collection(groups, rollouts, data=DATA)
    decision, _ = collector.observe(state, collection)
    requests = ()
    for count in [1] * decision.ask if one_by_one else [decision.ask]:
        seen = collection._replace(requests=requests, outcomes=(None,) * len(requests))
        more, state = collector.propose(state, KEY, seen, count)
        requests += more
    outcomes = [None] * len(requests)
    for place in order(len(requests)):
        assert (
            collector.observe(
                state, collection._replace(requests=requests, outcomes=tuple(outcomes))
            )[0]
            == jr.curation.Decision()
        )
        outcomes[place] = outcome(place // 3, requests[place].rollouts)
    collection = collection._replace(requests=requests, outcomes=tuple(outcomes))
    decision, state = collector.observe(state, collection)
    return requests, decision.rows, state


def backwards(count):
    return range(count - 1, -1, -1)


def test_parts_of_a_group():
    # Each paraphrase is a row.
    requests, rows, _ = play(jr.curation.paraphrased(), range)
    assert [r.rollouts for r in requests] == [5] * 6
    assert [r.extends for r in requests] == [None, 0, 0, None, 3, 3]
    assert [r.text(DATA[4]) for r in requests] == ["a4", "b4", "c4"] * 2
    assert [row.members for row in rows] == [tuple((i, g) for g in range(5)) for i in range(6)]

    # Each budget gets a part of the group.
    collector = jr.curation.budgeted((2, 4, 8), template="{prompt} in {budget}")
    requests, rows, _ = play(collector, range, groups=2)
    assert [r.rollouts for r in requests] == [2, 2, 1] * 2
    assert [r.extends for r in requests] == [None, 0, 0, None, 3, 3]
    assert [r.text(DATA[1]) for r in requests[:3]] == ["q1 in 2", "q1 in 4", "q1 in 8"]
    assert rows[1].members == ((3, 0), (3, 1), (4, 0), (4, 1), (5, 0)) and len(rows) == 2

    # Each part of a group begins with its prefix.
    begins = jr.curation.Response(np.int32([7]), trains=np.zeros(1, bool))
    source = RecordingSource(jr.curation.Request(5, responses=(begins,) * 5))
    collector = jr.curation.budgeted((2, 4, 8), source=source)
    asked, _ = collector.propose((), KEY, Collection(1, 5, data=DATA), 3)
    assert [request.rollouts for request in asked] == [2, 2, 1]
    assert [request.responses for request in asked] == [(begins,) * 2, (begins,) * 2, (begins,)]

    # Told budgets are those of the messages.
    sent = [budget_message("q{budget}", b) for b in (2, 4)]
    told = jr.curation.told_budgets(
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
    source = jr.curation.in_epochs(seed=1)
    collector = jr.curation.paraphrased(source=source)
    requests, rows, state = play(collector, backwards, groups=groups, one_by_one=one_by_one)
    assert [r.extends for r in requests] == [None, 0, 0, None, 3][:groups]
    assert [row.members[0][0] for row in rows] == list(range(groups))
    expected, _ = source.propose(source.init(len(DATA)), KEY, Collection(groups, 5), 3)
    following, _ = source.propose(state, KEY, Collection(groups, 5), 1)
    assert following[0].prompt == expected[-(-groups // 3)].prompt


def test_messages_of_a_part():
    # Stored groups leave a mixture any number of paraphrases.
    mixture = jr.curation.mixed((jr.curation.paraphrased(), 0.75), (jr.curation.in_order(), 0.25))
    collector = sized(
        jr.curation.replayed(capacity=8, share=0.5, source=mixture), group_size=2, max_new_tokens=2
    )

    def answer(request, i):
        if request.responses:
            return outcome(i % 8, 2)._replace(responses=request.responses)
        tokens = (jr.curation.Response(np.int32([i]), np.zeros(1), np.zeros(1)),) * 2
        return outcome(i % 8, 2)._replace(responses=tokens)

    state = collector.init(len(DATA))
    for step in range(3):
        rows, state, _ = play_batch(collector, state, Collection(4, 2, step, data=DATA), answer)
        assert len(rows) == 4

    # All messages of a prompt are sampled as the first.
    source = RecordingSource(jr.curation.Request(5, temperature=0.5))
    collector = jr.curation.budgeted((2, 4, 8), source=source)
    asked, _ = collector.propose((), KEY, Collection(2, 5, data=DATA), 2)
    so_far = Collection(2, 5, data=DATA, requests=asked, outcomes=(None, None))
    later, _ = collector.propose((), KEY, so_far, 4)
    assert {request.temperature for request in (*asked, *later)} == {0.5}
    assert [request.extends for request in later] == [0, None, 3, 3]

    # Messages of a part of a batch extend their own question.
    collector = jr.curation.mixed(
        (jr.curation.in_order(), 0.5), (jr.curation.budgeted((2, 4)), 0.5)
    )
    state = collector.init(len(DATA))
    for counts in ([6], [1] * 6):
        collection = Collection(4, 2, data=DATA)
        assert collector.observe(state, collection)[0].ask == 6
        for count in counts:
            asked, _ = collector.propose(state, KEY, collection, count)
            collection = collection._replace(
                requests=collection.requests + asked,
                outcomes=collection.outcomes + (None,) * count,
            )
        extends = [request.extends for request in collection.requests]
        assert extends == [None, None, None, 2, None, 4]


@for_each("source", [None, jr.curation.prioritized(jr.curation.learnability)])
@for_each("make", [jr.curation.paraphrased, jr.curation.budgeted])
def test_neither_how_many_are_proposed_nor_the_order_of_outcomes_matters(make, source):
    options = {} if make is jr.curation.paraphrased else {"budgets": (1, 2, 3)}
    collector = make(**options, source=source)
    expected = play(collector, range)
    for order, one_by_one in ((backwards, False), (range, True)):
        requests, rows, state = play(collector, order, one_by_one=one_by_one)
        assert requests == expected[0] and rows == expected[1]
        jax.tree.map(np.testing.assert_array_equal, state, expected[2])
    assert len({r.prompt for r in expected[0]} - {None}) == (0 if source is None else 6 // 3) or (
        make is jr.curation.budgeted
    )


@for_each(
    ("call", "error", "words"),
    [
        (lambda: jr.curation.budgeted(()), ValueError, "must ascend from at least 1; got ()"),
        (lambda: jr.curation.budgeted((4, 2)), ValueError, "must ascend from at least 1"),
        (lambda: jr.curation.budgeted((0, 2)), ValueError, "must ascend from at least 1"),
        (lambda: jr.curation.budgeted((1.5,)), TypeError, "budgets must be integers"),
        (lambda: jr.curation.budgeted((1,), template="{prompt}"), ValueError, "must have {prompt}"),
        (lambda: jr.curation.paraphrased(source="x"), TypeError, "source must be a collector"),
        (
            lambda: jr.curation.paraphrased(source=HINTS),
            ValueError,
            "paraphrased: source hint_levels(",
        ),
        (
            lambda: jr.curation.budgeted((1,), source=HINTS),
            ValueError,
            "sends messages of its own, which those of budgeted would replace",
        ),
        (
            lambda: jr.curation.paraphrased().check_data([{"text": "q"}]),
            ValueError,
            "prompt 'q' has None in its column 'paraphrases', where a list of at least two texts",
        ),
        (
            lambda: jr.curation.paraphrased().check_data(
                [DATA[0], {"id": "x", "paraphrases": ["1", "2"]}]
            ),
            ValueError,
            "prompt 'x' has 2 paraphrases, those before it 3",
        ),
        (
            lambda: jr.curation.paraphrased().check_sizes(DATA, group_size=4, num_groups=8),
            ValueError,
            "a batch of 8 prompts does not hold all 3 paraphrases",
        ),
        (
            lambda: jr.curation.budgeted((1, 2, 3)).check_sizes(DATA, group_size=2, num_groups=8),
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
    source = jr.curation.prioritized(jr.curation.learnability)
    assert repr(jr.curation.paraphrased(source=source)) == f"paraphrased(source={source!r})"
    text = "budgeted((1, 2), template='{prompt} {budget}')"
    assert repr(jr.curation.budgeted((1, 2), template="{prompt} {budget}")) == text
