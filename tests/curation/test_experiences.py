"""A library of experiences: what stands in a prompt, what a reply changes, what never happens."""

import dataclasses
import functools

import jax
from batches_of_collectors import ask, outcome, play_alike, play_batch
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation as cur
from jaxrl_llm.curation import HINTED, JUDGE, OWN, Collection, experienced
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
    assert cur.parse_operations(reply, LIBRARY, limit=2) == operations


def answer(request, number, place, replies=()):
    if request.role == JUDGE:
        return outcome(place, request.reward([replies[number]]), texts=(replies[number],))
    texts = tuple(f"answer {place}.{g}" for g in range(request.rollouts))
    return outcome(place, [[0, 0], [1, 0], [0, 1]][place % 3], texts=texts)


def play(collector, state, step, replies, *, room=10_000, **timing):
    """The reviews of a batch, which follow its P requests, have these replies in order."""
    said = dict(enumerate(replies, P))
    batch = Collection(P, G, step, data=DATA, takes_text=lambda text: len(text) <= room)
    replied = functools.partial(answer, replies=said)
    return play_batch(collector, state, batch, replied, key=jax.random.key(step), **timing)


def messages(batch):
    """What each request says, for the rows of the data in order."""
    return [
        r.text(DATA[i]) if callable(r.text) else r.text for i, r in enumerate(batch.requests[:P])
    ]


def test_replies_change_the_library_that_the_next_prompts_have():
    collector = experienced()
    state = collector.init(N)
    rows, state, first = play(collector, state, 0, ["add: draw\nadd: count\nadd: dropped", "read"])
    # Groups 1 and 2 of 3 have rewards that differ; nothing stands in the first prompts.
    assert [r.role for r in first.requests] == [OWN] * 3 + [JUDGE] * 2
    assert [r.prompt for r in first.requests] == [None] * 3 + [1, 2]
    assert [r.rollouts for r in first.requests] == [G] * 3 + [1] * 2
    assert first.requests[3].text.startswith(
        "question 1\n\nReward 1: answer 1.0\nReward 0: answer 1.1\n"
    )
    assert [row.members for row in rows] == [tuple((i, j) for j in range(G)) for i in range(P)]
    assert cur.experience_texts(state) == {"G0": "draw", "G1": "count", "G2": "read"}
    _, state, second = play(collector, state, 1, ["delete G0", "G2: read twice\nnone"])
    assert [r.role for r in second.requests] == [HINTED] * 3 + [JUDGE] * 2
    assert messages(second)[1] == (
        "question 1\n\nExperiences that may help:\nG0: draw\nG1: count\nG2: read"
    )
    assert "Experiences:\nG0: draw\n" in second.requests[3].text
    assert cur.experience_texts(state) == {"G0": "count", "G1": "read twice"}
    assert int(state.reviews) == 4


def test_the_laws_of_collectors():
    def timed(state, step, **timing):
        replies = [f"step {step}, reply {i}" for i in range(P)]
        return play(collector, state, step, replies, **timing)

    collector = experienced(capacity=3)
    _, state, _ = play_alike(timed, collector.init(N), 4)[-1]
    assert state.texts.shape == (3, 512) and len(cur.experience_texts(state)) == 3


def test_bounds():
    # The library is bounded and its texts are valid.
    collector = experienced(capacity=2, length=5)
    state = collector.init(N)
    _, state, _ = play(collector, state, 0, ["first\nsecond", "öäü and more"])
    assert cur.experience_texts(state) == {"G0": "secon", "G1": "öä"}
    _, state, _ = play(collector, state, 1, ["none", "none"])
    assert cur.experience_texts(state) == {"G0": "secon", "G1": "öä"}

    # What there is no room for is left out.
    collector = experienced()
    state = collector.init(N)
    _, state, _ = play(collector, state, 0, ["x" * 90 + "\nshort", "none"])
    *_, batch = play(collector, state, 1, [], room=60)  # no review has room
    assert messages(batch)[0] == "question 0\n\nExperiences that may help:\nG1: short"
    assert len(batch.requests) == P
    # A review that has no room loses the first experiences, and its answers are cut before.
    for room, begin, whole in ((300, "answer 4.0", 1), (290, "answe", 1), (210, "answer 4.0", 0)):
        *_, batch = play(collector, state, 1, ["none", "none"], room=room)
        review = batch.requests[P].text
        assert len(review) <= room and f"Reward 1: {begin}\n" in review
        assert "G1: short" in review and ("x" * 90 in review) == whole

    # Nothing is asked about groups that agree.
    collector = experienced()
    state = collector.init(N)
    collection = ask(Collection(P, G, 0, data=DATA), [cur.Request(G)] * P)
    done = [answer(collection.requests[0], 0, 3) for _ in range(P)]
    decision, after = collector.observe(state, collection._replace(outcomes=tuple(done)))
    assert len(decision.rows) == P and int(after.reviews) == 0


def test_mistakes():
    # What cannot be is said.
    shown = repr(experienced(capacity=4, review=cur.review_message))
    assert shown == "experienced(capacity=4)"
    assert dataclasses.replace(experienced(), limit=2) == experienced()

    # It is no source of prompts.


def stats(entropy, mask):
    return jr.advantages.entropy_signal(entropy, mask).stats


@for_each(
    "wrap",
    [
        lambda source: cur.downsampled(cur.resample_on_correct, source=source),
        lambda source: cur.replayed(capacity=2, share=0.5, source=source),
        lambda source: cur.targeted(references=2, source=source),
        lambda source: cur.entropy_temperature(stats, source=source),
    ],
    ids=["downsampled", "replayed", "targeted", "entropy_temperature"],
)
def test_an_evaluation_has_the_library_of_a_source(wrap):
    inner = experienced(capacity=4)
    _, library, _ = play(inner, inner.init(N), 0, ["add: draw", "none"])
    rule = cur.resample_on_correct
    outer = cur.downsampled(rule, source=wrap(inner))
    outer = sized(outer, group_size=G, max_new_tokens=4)
    state = outer.init(N)
    assert outer.evaluation_text(state, bool) is None
    state = state._replace(source=state.source._replace(source=library))
    message = outer.evaluation_text(state, bool)(DATA[1])
    assert message == "question 1\n\nExperiences that may help:\nG0: draw"
    assert not hasattr(wrap(cur.in_order()), "evaluation_text")
