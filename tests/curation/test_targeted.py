"""Prompts near a target rate: what is predicted, what is asked for, and what trains."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from batches_of_collectors import outcome, play_alike, play_batch
from cheap import close
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation as cur
from jaxrl_llm.curation import OWN, REPLAYED, Collection, Response, replayed, targeted
from jaxrl_llm.curation.collectors.protocol import sized

P, G, T, N, R = 4, 2, 5, 13, 5
DATA = [{"text": f"question {i}"} for i in range(N)]


def angle(text):
    """Prompts of near numbers are near each other."""
    turn = 3.0 * int(text.split()[1]) / N
    return np.array([np.cos(turn), np.sin(turn)], np.float32)


def rate(place):
    return [0.0, 0.5, 0.5, 1.0][place * 4 // N]


def answer(request, number, place, *, step=0, failed=()):
    if request.responses:
        responses = request.responses
        rewards = [each.reward for each in responses]
    else:
        logp, tokens = np.full(2, -0.5, np.float32), np.full(2, 100 * step + number, np.int32)
        one = Response(tokens, logp, logp, np.full(2, step, np.int32))
        responses = (one,) * request.rollouts
        rewards = [rate(place) >= 0.5, rate(place) >= 1.0][: request.rollouts]
    where = np.full(len(rewards), number not in failed)
    return outcome(place, rewards, where=where, responses=responses)


def started(**options):
    collector = targeted(references=R, embed=angle, **options)
    collector = sized(collector, group_size=G, max_new_tokens=T, num_groups=P)
    return collector, collector.init(N)


def play(collector, state, step, *, failed=(), **timing):
    replies = functools.partial(answer, step=step, failed=failed)
    key = jax.random.fold_in(jax.random.key(1), step)
    batch = Collection(P, G, step, data=DATA, version=step)
    return play_batch(collector, state, batch, replies, key=key, **timing)


def predicted(places, rates):
    """The paper's prediction in float64: attention to the references, then a line."""
    x = np.float64([angle(row["text"]) for row in DATA])
    x *= np.sqrt(2) / np.linalg.norm(x, axis=-1, keepdims=True)
    scores = x @ x[places].T / np.sqrt(2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    at = weights @ rates / weights.sum(axis=-1)
    slope, shift = np.polyfit(at[places], rates, 1)
    return slope * at + shift


def test_rounds():
    # A round takes the prompts predicted nearest to the target.
    collector, state = started(temperature=1e-6)
    rows, state, first = play(collector, state, 0)
    assert len(first.requests) == R + P and [r.rollouts for r in first.requests] == [G] * (R + P)
    places = [request.prompt for request in first.requests[:R]]
    assert len(set(places)) == R
    rates = np.array([rate(place) for place in places])
    expected = predicted(places, rates)
    close(state.rates, expected, atol=2e-5)
    order = np.argsort(np.abs(expected - 0.5), kind="stable")
    # The two steps of the round take turns.
    assert [request.prompt for request in first.requests[R:]] == order[0::2][:P].tolist()
    _, state, second = play(collector, state, 1)
    assert [request.prompt for request in second.requests] == order[1::2][:P].tolist()
    # The references do not train.
    assert [row.members for row in rows] == [((R + i, 0), (R + i, 1)) for i in range(P)]
    _, after, third = play(collector, state, 2)
    assert len(third.requests) == R + P
    assert [request.prompt for request in third.requests[:R]] != places
    assert int(state.drawn_at) == 0 and int(after.drawn_at) == 2

    # Replay begins with the second round.
    collector, state = started(source=replayed(capacity=16, share=0.5, unique=True, start=2))
    roles = []
    for step in range(4):
        rows, state, batch = play(collector, state, step)
        roles.append([request.role for request in batch.requests])
        assert len(rows) == P
        fresh = [x.prompt for x in batch.requests[-P:] if x.role == OWN]
        assert len(set(fresh)) == len(fresh)
    half = [OWN] * 2 + [REPLAYED] * 2
    assert roles == [[OWN] * (R + P), [OWN] * P, [OWN] * R + half, half]
    assert int(state.source.buffer.added) == P + P + 2 + 2  # references are not stored

    # Messages of a question stay with it.
    collector, state = started(source=cur.budgeted((1, 2)))
    _, state, batch = play(collector, state, 0)
    asked = batch.requests[R:]
    assert [x.extends for x in asked] == [y for p in range(P) for y in (None, R + 2 * p)]
    assert [x.prompt for x in asked[::2]] == state.order[::2][:P].tolist()


SOURCES = {
    "in_order": None,
    "budgeted": cur.budgeted((1, 2)),
    "replayed": replayed(capacity=6, share=0.5),
    "refill": cur.refill(cur.informative_groups, max_rounds=3),
    "two_phase": cur.two_phase(lambda rewards: np.full(len(rewards), 1), max_rollouts=3, first=G),
}


@for_each("source", SOURCES)
def test_the_laws_of_collectors(source):
    collector, state = started(source=SOURCES[source])
    for rows, _, collection in play_alike(functools.partial(play, collector), state, 4):
        begins = [row.members[0] for row in rows]
        assert len(rows) == P and begins == sorted(begins)
        assert len(collection.requests) <= R + 3 * P


def test_predictions():
    # A reference whose grader failed tells nothing.
    collector, state = started(temperature=1e-6)
    _, state, batch = play(collector, state, 0, failed=(1, 2))
    places = [request.prompt for request in batch.requests[:R]]
    stay = [0, 3, 4]
    rates = np.array([rate(places[i]) for i in stay])
    if np.ptp(rates):
        close(state.rates, predicted([places[i] for i in stay], rates), atol=2e-5)
    else:
        close(state.rates, rates[0])

    # Predictions of the callers own are used.
    asked = []

    def predict(queries, references, reference_rates, *, where):
        asked.append((queries.shape, references.shape, reference_rates.shape, where.all()))
        return np.linspace(0.0, 1.0, N)

    collector, state = started(temperature=1e-6, predict=predict)
    _, state, _ = play(collector, state, 0)
    assert asked == [((N, 2), (R, 2), (R,), True)]
    steps = np.diff(state.rates)  # a line of it, through the references
    close(steps, steps[0], rtol=1e-3)

    # All prompts are references where there are few.
    collector = targeted(references=256)
    state = collector.init(N)
    rows, _, batch = play(collector, state, 0)
    assert sorted(request.prompt for request in batch.requests[:N]) == list(range(N))
    assert len(batch.requests) == N + P and len(rows) == P

    # Texts are embedded once a run.
    texts = []

    def embed(text):
        texts.append(text)
        return angle(text)

    collector = targeted(references=R, embed=embed, every=1)
    state = collector.init(N)
    for step in range(2):
        # As a run does.
        of_batch = sized(collector, group_size=G, max_new_tokens=T, num_groups=P)
        _, state, _ = play(of_batch, state, step)
    assert texts == [row["text"] for row in DATA]


def test_an_adapter_predicts_and_is_told_by_its_numbers():
    adapter = cur.rate_adapter_init(jax.random.key(3), size=2, hidden=4, layers=1)
    collector, state = started(temperature=1e-6, adapter=adapter)
    _, state, batch = play(collector, state, 0)
    places = np.array([request.prompt for request in batch.requests[:R]])
    x, measured = np.stack([angle(row["text"]) for row in DATA]), np.float32([*map(rate, places)])
    expected = cur.adapted_rates(x, x[places], measured, adapter)
    expected = cur.linear_recalibration(expected, places, measured)
    close(state.rates, expected, rtol=1e-5)
    other = jax.tree.map(lambda leaf: leaf + 1e-6, adapter)
    first, copy, changed = (
        targeted(adapter=each) for each in (adapter, jax.tree.map(np.array, adapter), other)
    )
    assert first == copy != changed and repr(first) == repr(copy) != repr(changed)
    assert jr.recipes.dots(adapter=adapter) == jr.recipes.dots(adapter=adapter)
    assert ", adapter=RateAdapter(" in repr(first)
    with pytest.raises(ValueError, match="targeted: predict=.* has no effect with an adapter"):
        targeted(adapter=adapter, predict=cur.attention_rates)
    with pytest.raises(TypeError, match="targeted: adapter must be a RateAdapter; got tuple"):
        targeted(adapter=tuple(adapter))


def test_mistakes():
    # What cannot be is said.
    collector, state = started()

    def reject(text, **changes):
        with pytest.raises(ValueError, match=text):
            play(dataclasses.replace(collector, **changes), state, 0)

    reject("an embedding must have shape", embed=lambda text: np.zeros(len(text)))
    reject("result of predict", predict=lambda q, r, rates, where: rates)
    reject("predicted rate is not finite", predict=lambda q, r, x, where: np.full(N, np.nan))
    source = cur.prioritized(cur.learnability)
    with pytest.raises(ValueError, match="the source must take them in the order of the data"):
        play(*started(source=source), 0)
    # It prints what differs.
    source = replayed(capacity=8, share=0.5, start=2)
    shown = repr(targeted(references=8, every=1, target=0.3, embed=angle, source=source))
    assert shown == (
        "targeted(references=8, every=1, target=0.3, embed=angle, "
        "source=replayed(capacity=8, share=0.5, start=2))"
    )
