"""Prompts near a target rate: what is predicted, what is asked for, and what trains."""

import dataclasses

import jax
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import OWN, REPLAYED, Collection, Outcome, Response, replayed, targeted
from jaxrl_llm.curation.collectors.protocol import sized

P, G, T, N, R = 4, 2, 5, 13, 5
DATA = [{"text": f"question {i}"} for i in range(N)]


def angle(text):
    """Prompts of near numbers are near each other."""
    turn = 3.0 * int(text.split()[1]) / N
    return np.array([np.cos(turn), np.sin(turn)], np.float32)


def rate(place):
    return [0.0, 0.5, 0.5, 1.0][place * 4 // N]


def outcome(request, place, number, step, failed=False):
    if request.responses:
        responses = request.responses
        rewards = np.float32([each.reward for each in responses])
    else:
        logp = np.full(2, -0.5, np.float32)
        tokens = np.full(2, 100 * step + number, np.int32)
        size = request.rollouts
        responses = (Response(tokens, logp, logp, np.full(2, step, np.int32)),) * size
        rewards = np.float32([rate(place) >= 0.5, rate(place) >= 1.0])[:size]
    return Outcome(
        prompt=place,
        rewards=rewards,
        where=np.full(len(rewards), not failed),
        lengths=np.full(len(rewards), 2, np.int32),
        truncated=np.zeros(len(rewards), bool),
        reward_components={},
        responses=responses,
    )


def started(**options):
    collector = targeted(references=R, embed=angle, **options)
    collector = sized(collector, group_size=G, max_new_tokens=T, num_groups=P)
    return collector, collector.init(N)


def ask(collection, requests):
    return collection._replace(
        requests=collection.requests + tuple(requests),
        outcomes=collection.outcomes + (None,) * len(requests),
    )


def play(collector, state, step, *, together=True, last_first=False, failed=()):
    collection = Collection(P, G, step, data=DATA, version=step)
    key = jax.random.fold_in(jax.random.key(1), step)
    for _ in range(60):
        decision, learned = collector.observe(state, collection)
        if decision.rows is not None:
            return collection, decision.rows, learned
        for count in [decision.ask] if together else [1] * decision.ask:
            more, state = collector.propose(state, key, collection, count)
            collection = ask(collection, more)
        collection = ask(collection, decision.requests)
        if decision.ask or decision.requests:
            continue
        waits = [i for i, done in enumerate(collection.outcomes) if done is None]
        i = waits[-1 if last_first else 0]
        done = list(collection.outcomes)
        request = collection.requests[i]
        first = request if request.extends is None else collection.requests[request.extends]
        done[i] = outcome(request, first.prompt, i, step, i in failed)
        collection = collection._replace(outcomes=tuple(done))
    raise AssertionError("a batch without an end")


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
    first, rows, state = play(collector, state, 0)
    assert len(first.requests) == R + P and [r.rollouts for r in first.requests] == [G] * (R + P)
    places = [request.prompt for request in first.requests[:R]]
    assert len(set(places)) == R
    rates = np.array([rate(place) for place in places])
    expected = predicted(places, rates)
    np.testing.assert_allclose(state.rates, expected, atol=2e-5)
    order = np.argsort(np.abs(expected - 0.5), kind="stable")
    # The two steps of the round take turns.
    assert [request.prompt for request in first.requests[R:]] == order[0::2][:P].tolist()
    second, _, state = play(collector, state, 1)
    assert [request.prompt for request in second.requests] == order[1::2][:P].tolist()
    # The references do not train.
    assert [row.members for row in rows] == [((R + i, 0), (R + i, 1)) for i in range(P)]
    third, _, after = play(collector, state, 2)
    assert len(third.requests) == R + P
    assert [request.prompt for request in third.requests[:R]] != places
    assert int(state.drawn_at) == 0 and int(after.drawn_at) == 2

    # Replay begins with the second round.
    collector, state = started(source=replayed(capacity=16, share=0.5, unique=True, start=2))
    roles = []
    for step in range(4):
        batch, rows, state = play(collector, state, step)
        roles.append([request.role for request in batch.requests])
        assert len(rows) == P
        fresh = [x.prompt for x in batch.requests[-P:] if x.role == OWN]
        assert len(set(fresh)) == len(fresh)
    half = [OWN] * 2 + [REPLAYED] * 2
    assert roles == [[OWN] * (R + P), [OWN] * P, [OWN] * R + half, half]
    assert int(state.source.buffer.added) == P + P + 2 + 2  # references are not stored

    # Messages of a question stay with it.
    collector, state = started(source=jr.curation.budgeted((1, 2)))
    batch, _, state = play(collector, state, 0)
    asked = batch.requests[R:]
    assert [x.extends for x in asked] == [y for p in range(P) for y in (None, R + 2 * p)]
    assert [x.prompt for x in asked[::2]] == state.order[::2][:P].tolist()


def test_a_temperature_draws_as_often_as_the_softmax_says():
    collector, state = started(temperature=0.3)
    batch, _, _ = play(collector, state, 0)
    references = Collection(P, G, 0, batch.requests[:R], batch.outcomes[:R], data=DATA)
    draws, counts = 200, np.zeros(N)
    for seed in range(draws):
        (request,), drawn = collector.propose(state, jax.random.key(seed), references, 1)
        counts[request.prompt] += 1
    logits = -np.abs(np.float64(drawn.rates) - 0.5) / 0.3
    probs = np.exp(logits) / np.exp(logits).sum()
    assert (np.abs(counts / draws - probs) <= 4 * np.sqrt(probs * (1 - probs) / draws)).all()


SOURCES = {
    "in_order": None,
    "budgeted": jr.curation.budgeted((1, 2)),
    "replayed": replayed(capacity=6, share=0.5),
    "refill": jr.curation.refill(jr.curation.informative_groups, max_rounds=3),
    "two_phase": jr.curation.two_phase(
        lambda rewards: np.full(len(rewards), 1), max_rollouts=3, first=G
    ),
}


@for_each("source", SOURCES)
def test_a_batch_does_not_depend_on_timing_or_on_how_many_are_proposed(source):
    def play_all(resume=None, **options):
        collector, state = started(source=SOURCES[source])
        batches = []
        for step in range(4):
            if step == resume:
                collector, _ = started(source=SOURCES[source])
                state = jax.tree.map(np.copy, state)
            batch, rows, state = play(collector, state, step, **options)
            batches.append((rows, [each._replace(responses=()) for each in batch.requests]))
        return batches, state

    first, state = play_all()
    for options in ({"together": False}, {"last_first": True}, {"resume": 3}):
        again, other = play_all(**options)
        assert again == first
        jax.tree.map(np.testing.assert_array_equal, state, other)
    for rows, requests in first:
        members = [member for row in rows for member in row.members]
        assert len(rows) == P and len(set(members)) == len(members)
        begins = [row.members[0] for row in rows]
        assert begins == sorted(begins) and len(requests) <= R + 3 * P


def test_predictions():
    # A reference whose grader failed tells nothing.
    collector, state = started(temperature=1e-6)
    batch, _, state = play(collector, state, 0, failed=(1, 2))
    places = [request.prompt for request in batch.requests[:R]]
    stay = [0, 3, 4]
    rates = np.array([rate(places[i]) for i in stay])
    if np.ptp(rates):
        np.testing.assert_allclose(
            state.rates, predicted([places[i] for i in stay], rates), atol=2e-5
        )
    else:
        np.testing.assert_allclose(state.rates, rates[0])

    # Predictions of the callers own are used.
    asked = []

    def predict(queries, references, reference_rates, *, where):
        asked.append((queries.shape, references.shape, reference_rates.shape, where.all()))
        return np.linspace(0.0, 1.0, N)

    collector, state = started(temperature=1e-6, predict=predict)
    *_, state = play(collector, state, 0)
    assert asked == [((N, 2), (R, 2), (R,), True)]
    steps = np.diff(state.rates)  # a line of it, through the references
    np.testing.assert_allclose(steps, steps[0], rtol=1e-3)

    # All prompts are references where there are few.
    collector = targeted(references=256)
    state = collector.init(N)
    batch, rows, _ = play(collector, state, 0)
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
        _, _, state = play(of_batch, state, step)
    assert texts == [row["text"] for row in DATA]


def test_an_adapter_predicts_and_is_told_by_its_numbers():
    adapter = jr.curation.rate_adapter_init(jax.random.key(3), size=2, hidden=4, layers=1)
    collector, state = started(temperature=1e-6, adapter=adapter)
    batch, _, state = play(collector, state, 0)
    places = np.array([request.prompt for request in batch.requests[:R]])
    x, measured = np.stack([angle(row["text"]) for row in DATA]), np.float32([*map(rate, places)])
    expected = jr.curation.adapted_rates(x, x[places], measured, adapter)
    expected = jr.curation.linear_recalibration(expected, places, measured)
    np.testing.assert_allclose(state.rates, expected, rtol=1e-5)
    other = jax.tree.map(lambda leaf: leaf + 1e-6, adapter)
    first, copy, changed = (
        targeted(adapter=each) for each in (adapter, jax.tree.map(np.array, adapter), other)
    )
    assert first == copy != changed and repr(first) == repr(copy) != repr(changed)
    assert jr.recipes.dots(adapter=adapter) == jr.recipes.dots(adapter=adapter)
    assert ", adapter=RateAdapter(" in repr(first)
    with pytest.raises(ValueError, match="targeted: predict=.* has no effect with an adapter"):
        targeted(adapter=adapter, predict=jr.curation.attention_rates)
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
    source = jr.curation.prioritized(jr.curation.learnability)
    with pytest.raises(ValueError, match="the source must take them in the order of the data"):
        play(*started(source=source), 0)
    for name, value in {"references": 0, "every": 0, "target": 1.5, "temperature": 0.0}.items():
        with pytest.raises(ValueError, match=f"targeted: {name}"):
            targeted(**{name: value})
    for name in ("embed", "predict"):
        with pytest.raises(TypeError, match=f"targeted: {name} must be a function"):
            targeted(**{name: 3})
    with pytest.raises(ValueError, match="until must be above start 2; got 1"):
        replayed(capacity=2, share=0.5, start=2, until=1)

    # It prints what differs.
    source = replayed(capacity=8, share=0.5, start=2)
    shown = repr(targeted(references=8, every=1, target=0.3, embed=angle, source=source))
    assert shown == (
        "targeted(references=8, every=1, target=0.3, embed=angle, "
        "source=replayed(capacity=8, share=0.5, start=2))"
    )
