"""A pool of successes: how many rollouts a prompt gets, and what takes the place of a failure."""

import jax
import numpy as np
import pytest
from batches_of_collectors import RecordingSource, outcome, play_alike, play_batch
from cheap import equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import OWN, REPLAYED, Collection, Request, Response, pooled
from jaxrl_llm.curation.collectors.protocol import TurnStart, sized

P, G, T, N = 3, 8, 4, 6


def started(**options):
    collector = sized(pooled(**options), group_size=G, max_new_tokens=T, num_groups=P)
    return collector, collector.init(N)


def play(collector, state, step, rewards, **timing):
    def answer(request, number, place):
        if request.responses:
            assert request.responses[0].reward is None
            return outcome(place, [1.0], responses=request.responses)
        logp = np.full(2, -0.5, np.float32)
        responses = tuple(
            Response(np.array([1000 * step + 10 * number + j] * 2), logp, logp, np.full(2, step))
            for j in range(request.rollouts)
        )
        return outcome(place, rewards(step, place)[: request.rollouts], responses=responses)

    batch = Collection(P, G, step, version=step)
    return play_batch(collector, state, batch, answer, key=jax.random.key(step), **timing)


def by_prompt(*rates):
    """Rewards of which the first ones of each prompt are 1."""
    return lambda step, place: np.arange(G) < round(rates[place % len(rates)] * G)


def test_rollouts_fall_with_success():
    # Prompts that succeed get fewer rollouts.
    collector, state = started()
    rates = (0.5, 0.75, 1.0, 0.625, 0.875, 0.0)
    sizes = {}
    for step in range(4):
        rows, state, batch = play(collector, state, step, by_prompt(*rates))
        for i, request in enumerate(batch.requests[:P]):
            sizes.setdefault(request.prompt, []).append(request.rollouts)
            mean = batch.outcomes[i].rewards.mean()
            assert rows[i].takes_part == (0 < mean < 1)
    # int(9 / rate - 7) from 0.6 on, else 8; a prompt never seen has 8.
    assert sizes == {0: [8, 8], 1: [8, 5], 2: [8, 2], 3: [8, 7], 4: [8, 3], 5: [8, 8]}
    assert len(state.recent) == N and (state.count > 8).all()

    # Fewer rollouts begin with the prefix of their group.
    begins = Response(np.int32([7]), trains=np.zeros(1, bool))

    collector, state = started(source=RecordingSource(Request(G, 1, responses=(begins,))))
    state = state._replace(recent=state.recent + 1, count=state.count + G)
    (request,), _ = collector.propose(state, jax.random.key(0), Collection(P, G), 1)
    assert request.rollouts == 2 and request.responses == (begins,) * 2


def fails_later(step, place):
    return np.arange(G) == 2 if step < 2 else np.zeros(G)


def test_successes():
    # A stored success takes the place of the first failure.
    collector, state = started()
    for step in range(2):
        _, state, batch = play(collector, state, step, fails_later)
        assert [r.role for r in batch.requests] == [OWN] * P
    assert sorted(state.pool.prompt_ids.tolist()[:N]) == list(range(N))
    rows, after, batch = play(collector, state, 2, fails_later)
    assert [r.role for r in batch.requests] == [OWN] * P + [REPLAYED] * P
    for p, row in enumerate(rows):
        assert row.members == ((P + p, 0), *((p, j) for j in range(1, G))) and row.takes_part
        stored = batch.requests[P + p]
        assert stored.extends == p and not stored.sampled and stored.rollouts == 1
        (response,) = stored.responses
        assert response.tokens[0] % 10 == 2 and response.version[0] in (0, 1)
        equal(response.behavior_logp, np.float32([-0.5, -0.5]))
    # A success of the pool is neither stored again nor counted.
    assert int(after.pool.added) == int(state.pool.added) == N
    assert after.count.sum() - state.count.sum() == P * G

    # A failure without a stored success does not train.
    collector, state = started()
    rows, _, batch = play(collector, state, 0, lambda step, place: np.zeros(G))
    assert len(batch.requests) == P and not any(row.takes_part for row in rows)

    # An old success stays out.
    collector, state = started(max_staleness=1)
    for step in range(2):
        _, state, _ = play(collector, state, step, fails_later)
    rows, _, batch = play(collector, state, 2, fails_later)
    prompts, stored = [r.prompt for r in batch.requests[:P]], state.pool.prompt_ids.tolist()
    young = [2 - state.pool.versions[stored.index(prompt)] <= 1 for prompt in prompts]
    replayed = [batch.requests[r.extends].prompt for r in batch.requests[P:]]
    assert replayed == [prompt for prompt, there in zip(prompts, young, strict=True) if there]
    assert [row.takes_part for row in rows] == young

    # A success ages until the update whatever samples.
    rows, _, batch = play(collector, state, 3, fails_later)
    assert len(batch.requests) == P and not any(row.takes_part for row in rows)
    early = Collection(P, G, 3, batch.requests, batch.outcomes, version=2)
    assert collector.observe(state, early)[0].requests == ()


def episodes(place, rewards, *, turns=2, prompt=(1, 2)):
    """An outcome of two episodes of so many turns, after a prompt of these tokens."""
    logp, starts = np.zeros(3, np.float32), (TurnStart(1),) * (turns - 1)
    response = Response(np.arange(3), logp, logp, np.zeros(3, int), np.array([True, False, True]))
    responses = (response._replace(turn_starts=starts),) * 2
    return outcome(place, rewards, responses=responses, prompt_tokens=prompt)


@for_each("same", [True, False])
def test_a_stored_episode_has_its_reward_and_the_prompt_of_now(same):
    """It stays out where the environment begins otherwise; a task gets the turns of its longest."""
    collector = sized(pooled(), group_size=2, max_new_tokens=T, num_groups=1)
    state = collector.init(1)
    place = Collection(1, 2, plays=True)
    for turns in (3, 2):
        requests, _ = collector.propose(state, jax.random.key(0), place, 1)
        assert requests[0].turns == (None if turns == 3 else 3)
        done = place._replace(requests=requests, outcomes=(episodes(0, [0.0, 1.0], turns=turns),))
        _, state = collector.observe(state, done)
    assert state.turns.tolist() == [3]
    failed = episodes(0, [0.0, 0.0], prompt=(1, 2) if same else (1, 3))
    decision, _ = collector.observe(state, done._replace(outcomes=(failed,)))
    if not same:
        assert decision.requests == () and not decision.rows[0].takes_part
        return
    (stored,) = decision.requests[0].responses
    assert stored.reward == 1.0 and stored.trains.tolist() == [True, False, True]


def test_the_laws_of_collectors():
    def rewards(step, place):
        return (np.arange(G) + place + step) % 4 == 0 if (step + place) % 3 else np.zeros(G)

    collector, state = started(capacity=4)
    batches = play_alike(
        lambda state, step, **timing: play(collector, state, step, rewards, **timing), state, 5
    )
    assert any(r.role == REPLAYED for _, _, batch in batches for r in batch.requests)
    assert all(len(rows) == P and len(b.requests) <= 2 * P for rows, _, b in batches)


def test_mistakes():
    # What cannot be is said.
    collector, state = started(source=jr.curation.in_order())
    with pytest.raises(ValueError, match="the source must name its prompts"):
        collector.propose(state, jax.random.key(0), Collection(P, G), 1)
    assert repr(pooled(high=4, threshold=0.5)) == "pooled(capacity=1024, high=4, threshold=0.5)"

    # It is no source of prompts.
