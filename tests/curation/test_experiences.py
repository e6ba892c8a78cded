"""A library of experiences: what stands in a prompt, what a reply changes, what never happens."""

import dataclasses

import jax
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import HINTED, JUDGE, OWN, Collection, Outcome, experienced
from jaxrl_llm.curation import Operation as Op
from jaxrl_llm.curation.collectors.protocol import sized

P, G, N = 3, 2, 9
DATA = [{"text": f"question {i}"} for i in range(N)]
LIBRARY = {"G0": "check units", "G1": "guess"}


@for_each(
    ("reply", "operations"),
    [
        ("none", []),
        ("None.\n\n", []),
        ("add: draw a figure", [Op("add", "draw a figure")]),
        ("draw a figure", [Op("add", "draw a figure")]),
        ("G1: guess twice", [Op("update", "guess twice", "G1")]),
        ("update g0 :  check  ", [Op("update", "check", "G0")]),
        ("delete G1.", [Op("delete", "guess", "G1")]),
        ("delete G7\nG7: new", [Op("update", "new", "G7")]),
        ("add:\nG1:\n", []),
        ("a\nb\nc", [Op("add", "a"), Op("add", "b")]),
    ],
)
def test_a_reply_names_operations_line_by_line(reply, operations):
    assert jr.curation.parse_operations(reply, LIBRARY, limit=2) == operations


def outcome(request, place, reply, failed=False):
    if request.role == JUDGE:
        rewards, texts = np.float32(request.reward([reply])), (reply,)
    else:
        rewards = np.float32([[0, 0], [1, 0], [0, 1]][place % 3])
        texts = tuple(f"answer {place}.{g}" for g in range(request.rollouts))
    return Outcome(
        prompt=place,
        rewards=rewards,
        where=np.full(len(texts), not failed),
        lengths=np.full(len(texts), 3, np.int32),
        truncated=np.zeros(len(texts), bool),
        reward_components={},
        texts=texts,
    )


def play(collector, state, step, replies, *, together=True, order=0, room=10_000):
    replies = iter(replies)
    said = {}
    collection = Collection(P, G, step, data=DATA, takes_text=lambda text: len(text) <= room)
    for _ in range(30):
        decision, learned = collector.observe(state, collection)
        if decision.rows is not None:
            return collection, decision.rows, learned
        asked = []
        for count in [decision.ask] if together else [1] * decision.ask:
            more, state = collector.propose(state, jax.random.key(step), collection, count)
            asked += more
            collection = ask(collection, more)
        collection = ask(collection, decision.requests)
        for i, request in enumerate(collection.requests):
            if request.role == JUDGE and i not in said:
                said[i] = next(replies)
        if decision.ask or decision.requests:
            continue
        waits = [i for i, done in enumerate(collection.outcomes) if done is None]
        i, done = waits[order % len(waits)], list(collection.outcomes)
        request = collection.requests[i]
        place = (step * P + i) % N if request.prompt is None else request.prompt
        done[i] = outcome(request, place, said.get(i))
        collection = collection._replace(outcomes=tuple(done))
    raise AssertionError("a batch without an end")


def ask(collection, requests):
    return collection._replace(
        requests=collection.requests + tuple(requests),
        outcomes=collection.outcomes + (None,) * len(requests),
    )


def messages(batch):
    """What each request says, for the rows of the data in order."""
    return [
        r.text(DATA[i]) if callable(r.text) else r.text for i, r in enumerate(batch.requests[:P])
    ]


def test_replies_change_the_library_that_the_next_prompts_have():
    collector = experienced()
    state = collector.init(N)
    first, rows, state = play(collector, state, 0, ["add: draw\nadd: count\nadd: dropped", "read"])
    # Groups 1 and 2 of 3 have rewards that differ; nothing stands in the first prompts.
    assert [r.role for r in first.requests] == [OWN] * 3 + [JUDGE] * 2
    assert [r.prompt for r in first.requests] == [None] * 3 + [1, 2]
    assert [r.rollouts for r in first.requests] == [G] * 3 + [1] * 2
    assert first.requests[3].text.startswith(
        "question 1\n\nReward 1: answer 1.0\nReward 0: answer 1.1\n"
    )
    assert [row.members for row in rows] == [tuple((i, j) for j in range(G)) for i in range(P)]
    assert jr.curation.experience_texts(state) == {"G0": "draw", "G1": "count", "G2": "read"}
    second, _, state = play(collector, state, 1, ["delete G0", "G2: read twice\nnone"])
    assert [r.role for r in second.requests] == [HINTED] * 3 + [JUDGE] * 2
    assert messages(second)[1] == (
        "question 1\n\nExperiences that may help:\nG0: draw\nG1: count\nG2: read"
    )
    assert "Experiences:\nG0: draw\n" in second.requests[3].text
    assert jr.curation.experience_texts(state) == {"G0": "count", "G1": "read twice"}
    assert int(state.reviews) == 4


def test_a_batch_does_not_depend_on_timing_or_on_how_many_are_proposed():
    def play_all(**options):
        collector = experienced(capacity=3)
        state, batches = collector.init(N), []
        for step in range(4):
            replies = [f"step {step}, reply {i}" for i in range(P)]
            batch, rows, state = play(collector, state, step, replies, **options)
            batches.append((rows, [r._replace(reward=None) for r in batch.requests]))
        return batches, state

    first, state = play_all()
    for options in ({"together": False}, {"order": 1}, {"order": -1}):
        again, other = play_all(**options)
        assert again == first
        jax.tree.map(np.testing.assert_array_equal, state, other)
    assert state.texts.shape == (3, 512) and len(jr.curation.experience_texts(state)) == 3


def test_bounds():
    # The library is bounded and its texts are valid.
    collector = experienced(capacity=2, length=5)
    state = collector.init(N)
    *_, state = play(collector, state, 0, ["first\nsecond", "öäü and more"])
    assert jr.curation.experience_texts(state) == {"G0": "secon", "G1": "öä"}
    *_, state = play(collector, state, 1, ["none", "none"])
    assert jr.curation.experience_texts(state) == {"G0": "secon", "G1": "öä"}

    # What there is no room for is left out.
    collector = experienced()
    state = collector.init(N)
    *_, state = play(collector, state, 0, ["x" * 90 + "\nshort", "none"])
    batch, *_ = play(collector, state, 1, [], room=60)  # no review has room
    assert messages(batch)[0] == "question 0\n\nExperiences that may help:\nG1: short"
    assert len(batch.requests) == P
    # A review that has no room loses the first experiences, and its answers are cut before.
    for room, answer, whole in ((300, "answer 4.0", 1), (290, "answe", 1), (210, "answer 4.0", 0)):
        batch, *_ = play(collector, state, 1, ["none", "none"], room=room)
        review = batch.requests[P].text
        assert len(review) <= room and f"Reward 1: {answer}\n" in review
        assert "G1: short" in review and ("x" * 90 in review) == whole

    # Nothing is asked about groups that agree.
    collector = experienced()
    state = collector.init(N)
    collection = ask(Collection(P, G, 0, data=DATA), [jr.curation.Request(G)] * P)
    done = [outcome(collection.requests[0], 3, "") for _ in range(P)]
    decision, after = collector.observe(state, collection._replace(outcomes=tuple(done)))
    assert len(decision.rows) == P and int(after.reviews) == 0


def test_mistakes():
    # What cannot be is said.
    for name in ("capacity", "length", "limit"):
        with pytest.raises(ValueError, match=f"experienced: {name}"):
            experienced(**{name: 0})
    for name in ("message", "review"):
        with pytest.raises(TypeError, match=f"experienced: {name} must be a function"):
            experienced(**{name: 3})
    hints = jr.curation.hint_levels(jr.curation.tier_messages)
    with pytest.raises(ValueError, match="which those of experienced would replace"):
        experienced(source=hints)
    with pytest.raises(ValueError, match="parse_operations: limit"):
        jr.curation.parse_operations("a", {}, limit=0)
    shown = repr(experienced(capacity=4, review=jr.curation.review_message))
    assert shown == "experienced(capacity=4)"
    assert dataclasses.replace(experienced(), limit=2) == experienced()

    # It is no source of prompts.
    with pytest.raises(ValueError, match="source must ask for each group once"):
        jr.curation.refill(jr.curation.informative_groups, source=experienced())


def stats(entropy, mask):
    return jr.advantages.entropy_signal(entropy, mask).stats


@for_each(
    "wrap",
    [
        lambda source: jr.curation.downsampled(jr.curation.resample_on_correct, source=source),
        lambda source: jr.curation.replayed(capacity=2, share=0.5, source=source),
        lambda source: jr.curation.targeted(references=2, source=source),
        lambda source: jr.curation.entropy_temperature(stats, source=source),
    ],
    ids=["downsampled", "replayed", "targeted", "entropy_temperature"],
)
def test_an_evaluation_has_the_library_of_a_source(wrap):
    inner = experienced(capacity=4)
    *_, library = play(inner, inner.init(N), 0, ["add: draw", "none"])
    rule = jr.curation.resample_on_correct
    outer = jr.curation.downsampled(rule, source=wrap(inner))
    outer = sized(outer, group_size=G, max_new_tokens=4)
    state = outer.init(N)
    assert outer.evaluation_text(state, bool) is None
    state = state._replace(source=state.source._replace(source=library))
    message = outer.evaluation_text(state, bool)(DATA[1])
    assert message == "question 1\n\nExperiences that may help:\nG0: draw"
    assert not hasattr(wrap(jr.curation.in_order()), "evaluation_text")
