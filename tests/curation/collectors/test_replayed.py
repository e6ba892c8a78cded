"""Stored groups among fresh ones: what is drawn, what is stored, and what never happens."""

import dataclasses

import jax
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import (
    OWN,
    REPLAYED,
    Collection,
    Outcome,
    Request,
    Response,
    in_order,
    replayed,
)
from jaxrl_llm.curation.collectors import replayed as replayed_module
from jaxrl_llm.curation.collectors.protocol import sized

P, G, T, N = 4, 2, 5, 10
KEY = jax.random.key(3)


def for_run(collector):
    return sized(collector, group_size=G, max_new_tokens=T)


def response(step, request, member):
    """Tokens that name their rollout."""
    size = 2 + (request + member) % (T - 1)
    tokens = np.full(size, 100 * step + 10 * request + member, np.int32)
    logp = np.float32(-0.1 * (1 + member) * np.ones(size))
    return Response(tokens, logp, logp - 1, np.full(size, step, np.int32), np.ones(size, bool))


def outcome(step, number, request, place, reward, parts=()):
    if request.responses:
        responses = request.responses
        # What comes without its reward is graded again.
        rewards = np.float32([1.0 if x.reward is None else x.reward for x in responses])
    else:
        responses = tuple(response(step, number, j) for j in range(request.rollouts))
        rewards = np.float32(reward(step, number)[: request.rollouts])
    return Outcome(
        prompt=place if request.prompt is None else request.prompt,
        rewards=rewards,
        where=np.ones(len(rewards), bool),
        lengths=np.array([len(each.tokens) for each in responses], np.int32),
        truncated=np.zeros(len(rewards), bool),
        reward_components={name: rewards for name in parts},
        responses=tuple(responses),
    )


def differ(step, number):
    return [0.0, 1.0]


def some_differ(step, number):
    return [0.0, float((step + number) % 3 > 0)]


def ask(collection, requests):
    return collection._replace(
        requests=collection.requests + tuple(requests),
        outcomes=collection.outcomes + (None,) * len(requests),
    )


def play(
    collector, state, step, *, reward=differ, together=True, order=None, version=None, parts=()
):
    """One batch: its decision, the requests and the outcomes, and the state after it."""
    version = step if version is None else version
    collection = Collection(P, G, step, version=version)
    key = jax.random.fold_in(KEY, step)
    for _ in range(40):
        decision, learned = collector.observe(state, collection)
        if decision.rows is not None:
            return decision, collection, learned
        for count in [decision.ask] if together else [1] * decision.ask:
            requests, state = collector.propose(state, key, collection, count)
            collection = ask(collection, requests)
        collection = ask(collection, decision.requests)
        if decision.ask or decision.requests:
            continue
        waits = [i for i, done in enumerate(collection.outcomes) if done is None]
        which = waits[0] if order is None else waits[order % len(waits)]
        done = list(collection.outcomes)
        request, place_of = collection.requests[which], (step * P + which) % N
        if request.extends is not None:
            place_of = done[request.extends].prompt
        done[which] = outcome(step, which, request, place_of, reward, parts)
        collection = collection._replace(outcomes=tuple(done))
    raise AssertionError("a batch without an end")


def run(collector, steps, **options):
    state, batches = collector.init(N), []
    for step in range(steps):
        decision, collection, state = play(collector, state, step, **options)
        batches.append((decision, collection))
    return batches, state


def roles(batch):
    decision, collection = batch
    return [collection.requests[row.members[0][0]].role for row in decision.rows]


def test_half_of_a_batch_is_stored():
    # Half of a batch is stored once there is enough.
    batches, state = run(for_run(replayed(capacity=8, share=0.5)), 4)
    assert roles(batches[0]) == [OWN] * 4
    assert all(roles(batch) == [OWN] * 2 + [REPLAYED] * 2 for batch in batches[1:])
    # 4 + 2 + 2 + 2 fresh groups went into 8 places, the newest stay.
    assert int(state.buffer.added) == 10
    assert sorted(state.buffer.order.tolist()) == list(range(2, 10))

    # A stored group comes back as it was sampled.
    batches, _ = run(for_run(replayed(capacity=8, share=0.5)), 3)
    sampled = {}
    for step, (_, collection) in enumerate(batches):
        for i, (request, done) in enumerate(
            zip(collection.requests, collection.outcomes, strict=True)
        ):
            if request.role == OWN:
                sampled[done.responses[0].tokens[0]] = (step, i, done)
                continue
            assert not request.sampled and request.rollouts == G
            past, number, first = sampled[request.responses[0].tokens[0]]
            assert past < step and request.prompt == first.prompt
            for j, stored in enumerate(request.responses):
                expected = response(past, number, j)
                for name in ("tokens", "behavior_logp", "model_logp", "version", "trains"):
                    np.testing.assert_array_equal(getattr(stored, name), getattr(expected, name))
                assert stored.reward == first.rewards[j]


@pytest.mark.of_many
@pytest.mark.parametrize(
    "collector",
    [
        replayed(capacity=6, share=0.5),
        replayed(capacity=6, share=0.4, draw="each", until=5),
        replayed(capacity=6, replace=jr.curation.informative_groups, max_staleness=2),
        replayed(capacity=6, share=0.5, source=jr.curation.refill(jr.curation.informative_groups)),
        replayed(
            capacity=6,
            share=0.5,
            source=jr.curation.two_phase(
                lambda rewards: np.full(len(rewards), 1), max_rollouts=3, first=2
            ),
        ),
        replayed(capacity=6, share=0.5, source=jr.curation.pooled(capacity=6)),
        replayed(
            capacity=6,
            replace=jr.curation.informative_groups,
            source=jr.curation.pooled(capacity=6),
        ),
    ],
    ids=["share", "each", "replace", "refill", "two_phase", "pooled", "pooled replaced"],
)
def test_a_batch_does_not_depend_on_timing_or_on_how_many_are_proposed(collector):
    collector = for_run(collector)

    def play_all(**options):
        batches, state = run(collector, 5, reward=some_differ, **options)
        return [
            (decision, [each._replace(responses=()) for each in collection.requests])
            for decision, collection in batches
        ], state

    first, state = play_all()
    for options in ({"together": False}, {"order": 1}, {"order": 2, "together": False}):
        again, other = play_all(**options)
        assert again == first
        jax.tree.map(np.testing.assert_array_equal, state, other)
    for decision, requests in first:
        members = [member for row in decision.rows for member in row.members]
        assert len(decision.rows) == P and len(set(members)) == len(members)
        begins = [row.members[0] for row in decision.rows]
        assert begins == sorted(begins)
        assert len(requests) <= 10 * P
    orders = state.buffer.order[state.buffer.order >= 0]
    assert len(set(orders.tolist())) == len(orders)
    tokens = [group[0, 0] for group in state.buffer.items.tokens if group.any()]
    assert len(set(tokens)) == len(tokens) > 2  # no rollout twice


@for_each("options", [{"share": 0.5}, {"replace": jr.curation.informative_groups}])
def test_a_source_may_bring_stored_responses_of_its_own(options):
    """A success of ``pooled`` is one more request for a prompt of the batch, no stored group."""
    source = jr.curation.pooled(capacity=N)
    collector = for_run(replayed(capacity=8, source=source, **options))
    batches, _ = run(collector, 8, reward=lambda step, number: [0.0, float(step < 3)])
    successes = 0
    for decision, collection in batches:
        requests = collection.requests
        rows = [[requests[i] for i, _ in row.members] for row in decision.rows]
        successes += sum(any(each.extends is not None for each in row) for row in rows)
        # A row is a stored group as a whole or holds a success beside fresh rollouts.
        for row in rows:
            stored = [each.role == REPLAYED and each.extends is None for each in row]
            assert all(stored) or not any(stored)
    assert successes > 0 and any(REPLAYED in roles(batch) for batch in batches)


def test_a_group_with_parts_of_its_reward_is_graded_again():
    """A buffer has no room for them, and a recipe that reads them would have none."""
    collector = for_run(replayed(capacity=8, share=0.5, regrade=True))
    batches, state = run(collector, 3, parts=("right", "short"))
    for batch in batches[1:]:
        assert roles(batch) == [OWN] * 2 + [REPLAYED] * 2
        stored = [r for r in batch[1].requests if r.role == REPLAYED]
        assert all(each.reward is None for r in stored for each in r.responses)
    filled = state.buffer.order >= 0
    assert np.isnan(state.buffer.items.rewards[filled]).all()
    _, kept = run(for_run(replayed(capacity=8, share=0.5)), 3, parts=("right", "short"))
    assert np.isfinite(kept.buffer.items.rewards[kept.buffer.order >= 0]).all()
    for collector in (replayed(capacity=8, share=0.5), jr.curation.windowed()):
        with pytest.raises(ValueError, match=r"reads reward_components, .*replayed needs regrade"):
            jr.recipes.gdpo().replace(collector=collector)
    jr.recipes.gdpo().replace(collector=replayed(capacity=8, share=0.5, regrade=True))


@for_each("make", [jr.curation.partial_rollouts, jr.curation.windowed])
def test_a_source_whose_groups_go_on_has_room_for_those_of_a_whole_batch(make):
    source = make(segments=2)
    collector = replayed(capacity=4, replace=jr.curation.informative_groups, source=source)
    sizes = {"group_size": G, "max_new_tokens": T, "num_groups": P}
    made = sized(collector, **sizes)
    expected = sized(source, **sizes).init(N)
    jax.tree.map(np.testing.assert_array_equal, made.init(N).source, expected)
    batches, _ = run(made, 3, reward=some_differ)
    assert all(len(decision.rows) == P for decision, _ in batches)


def test_refused_sources():
    # A source of as many groups as a batch has no share.
    for source in (
        jr.curation.partial_rollouts(),
        jr.curation.mixed((jr.curation.windowed(), 0.5), (in_order(), 0.5)),
    ):
        with pytest.raises(ValueError, match="made for one number of groups; use replace") as e:
            replayed(capacity=4, share=0.5, source=source)
        assert "\n" not in str(e.value)
    # What only passes the size on is no such source.
    mixture = jr.curation.mixed((in_order(), 0.5), (jr.curation.in_epochs(), 0.5))
    made = replayed(capacity=4, share=0.5, source=mixture)
    assert all(len(d.rows) == P for d, _ in run(for_run(made), 3)[0])

    # A source that values prefixes is refused.
    source = jr.curation.valued(jr.bind(jr.curation.stretch_starts, length=3))
    with pytest.raises(ValueError, match="the buffer stores no segments of responses"):
        replayed(capacity=4, share=0.5, source=source)

    # Other mistakes are refused.
    with pytest.raises(TypeError, match="store must be a function; got 3"):
        replayed(capacity=4, share=0.5, store=3)
    with pytest.raises(ValueError, match="unknown before for_run"):
        replayed(capacity=4, share=0.5).init(N)
    wrong = for_run(replayed(capacity=4, share=0.5, priority=lambda scores: scores[:1]))
    with pytest.raises(ValueError, match="the priority's result"):
        run(wrong, 1)

    # It prints what differs.
    text = "replayed(capacity=8, replace=informative_groups, source=refill("
    collector = replayed(
        capacity=8,
        replace=jr.curation.informative_groups,
        source=jr.curation.refill(jr.curation.informative_groups),
    )
    assert repr(for_run(collector)).startswith(text)
    assert dataclasses.is_dataclass(collector)


@for_each("options", [{"share": 0.5}, {"replace": jr.curation.informative_groups}])
def test_a_source_that_replays_groups_itself_is_refused(options):
    inner = replayed(capacity=4, share=0.5)
    for source in (inner, jr.curation.mixed((inner, 0.5), (in_order(), 0.5))):
        with pytest.raises(ValueError, match="replayed: source .* also replays stored groups"):
            replayed(capacity=4, source=source, **options)


@for_each("options", [{"share": 0.5}, {"replace": jr.curation.informative_groups}])
def test_a_source_that_helps_every_group_is_refused(options):
    """Only groups that were sampled after the prompt itself are stored, so none would be."""
    budgeted, paraphrased = jr.curation.budgeted((2, 4)), jr.curation.paraphrased()
    for source in (
        budgeted,
        paraphrased,
        jr.curation.mixed((budgeted, 0.5), (paraphrased, 0.5)),
        jr.curation.downsampled(jr.curation.resample_on_correct, source=budgeted),
        jr.curation.demonstrations(),
        jr.curation.hinted(jr.curation.hint_share()),
        jr.curation.hinted(jr.curation.examples_in_prompt()),
        jr.curation.only_demonstrations(),
        jr.curation.offline_pairs(),
        jr.curation.plain_texts(),
        jr.curation.mixed((jr.curation.offline_pairs(), 0.5), (budgeted, 0.5)),
    ):
        with pytest.raises(ValueError, match="replayed: source .* gives every group a text, a"):
            replayed(capacity=4, source=source, **options)
    # Some of their groups have no help.
    replayed(capacity=4, source=jr.curation.demonstrations(when="failed"), **options)
    offline = jr.curation.mixed((jr.curation.offline_pairs(), 0.5), (in_order(), 0.5))
    replayed(capacity=4, source=offline, **options)
    # Groups without a text can be stored.
    replayed(capacity=4, source=jr.curation.mixed((budgeted, 0.5), (in_order(), 0.5)), **options)
    replayed(capacity=4, source=jr.curation.experienced(), **options)


def test_what_takes_places():
    # Stored groups take the places of dull ones.
    collector = for_run(
        replayed(
            capacity=8,
            replace=jr.curation.informative_groups,
            store=jr.curation.informative_groups,
        )
    )
    batches, state = run(collector, 3, reward=some_differ)
    # Group number i of step s differs unless s + i divides by 3: 0 and 3 of the first batch.
    assert roles(batches[0]) == [OWN] * 4  # nothing is stored yet, so the dull ones stay
    assert [len(collection.requests) for _, collection in batches] == [4, 5, 5]
    for batch in batches[1:]:
        assert roles(batch) == [OWN] * 3 + [REPLAYED]
    assert (state.buffer.items.rewards[state.buffer.order >= 0].std(axis=-1) > 0).all()
    assert int(state.buffer.added) == 2 + 3 + 3

    # Groups too old are not drawn and an explicit request is refused.
    collector = for_run(replayed(capacity=8, share=0.5, max_staleness=2))
    batches, state = run(collector, 3)
    decision, collection, _ = play(collector, state, 4)
    old = [r for r in collection.requests if r.role == REPLAYED]
    assert all(r.responses[0].version[0] == 2 for r in old) and old
    decision, collection, _ = play(collector, state, 5)
    assert all(request.role == OWN for request in collection.requests)
    place = int(np.argmin(state.buffer.versions))
    with pytest.raises(ValueError) as error:
        jr.curation.stored_request(state.buffer, place, version=7, max_staleness=2)
    assert str(error.value) == (
        f"stored_request: the group at place {place} was sampled by version 0 of the weights, 7 "
        "before version 7; max_staleness is 2."
    )
    with pytest.raises(ValueError, match="place 1 of the buffer is empty"):
        jr.curation.stored_request(collector.init(N).buffer, 1, version=0)


def test_draws():
    # The draw follows the priority.
    def newest(order):
        return np.float32(order == order.max())

    collector = for_run(replayed(capacity=8, share=0.5, priority=newest))
    batches, _ = run(collector, 4)
    for step, batch in enumerate(batches[1:], 1):
        # A single group has a weight, the last one that was stored; fresh ones fill the batch.
        assert roles(batch) == [OWN] * 3 + [REPLAYED]
        stored = batch[1].requests[-1]
        assert stored.responses[0].version[0] == step - 1

    # Each group is a stored one with the probability and until a step.
    options = {"capacity": 16, "share": 0.4, "draw": "each", "until": 20}
    batches, _ = run(for_run(replayed(**options)), 25)
    counts = [roles(batch).count(REPLAYED) for batch in batches]
    assert set(counts[1:20]) <= {0, 1, 2, 3} and len(set(counts[1:20])) > 2
    assert 0.25 < np.mean(counts[1:20]) / P < 0.55
    assert counts[0] == 0 and counts[20:] == [0] * 5


def test_scores():
    # Scores decide who stays.
    def mean(rewards):
        return rewards.mean(axis=-1)

    collector = for_run(replayed(capacity=2, share=0.5, score=mean, evict="lowest", unique=False))
    _, state = run(collector, 3, reward=lambda step, number: [step + 0.1 * number] * 2)
    np.testing.assert_allclose(np.sort(state.buffer.scores), [2.0, 2.1], rtol=1e-6)

    # Scores that none exceeds leave when they are too old. A full buffer of the best groups takes
    # others once those can no longer be drawn.
    options = {"capacity": 2, "share": 0.5, "evict": "lowest", "max_staleness": 2}
    collector = for_run(replayed(score=lambda rewards: rewards.std(axis=-1), **options))
    batches, state = run(collector, 12)
    assert [REPLAYED in roles(batch) for batch in batches] == 4 * [False, True, True]
    assert state.buffer.versions.tolist() == [9, 9]


def test_what_is_stored():
    # What cannot be stored is left out.
    collector = for_run(replayed(capacity=4, share=0.5))
    state = collector.init(N)
    _, collection, _ = play(collector, state, 0)
    failed = collection.outcomes[1]._replace(where=np.array([True, False]))
    long = response(0, 2, 0)._replace(tokens=np.zeros(T + 1, np.int32))
    outcomes = list(collection.outcomes)
    outcomes[1] = failed
    outcomes[2] = outcomes[2]._replace(responses=(long, long))
    _, learned = collector.observe(state, collection._replace(outcomes=tuple(outcomes)))
    assert sorted(learned.buffer.order.tolist()) == [-1, -1, 0, 1]

    # Only what follows the plain prompt is stored.
    collector = for_run(replayed(capacity=4, share=0.5))
    state = collector.init(N)
    _, collection, _ = play(collector, state, 0)
    requests = list(collection.requests)
    requests[1] = requests[1]._replace(text="in other words")
    requests[2] = requests[2]._replace(prompt_tokens=(5,))
    _, learned = collector.observe(state, collection._replace(requests=tuple(requests)))
    assert sorted(learned.buffer.order.tolist()) == [-1, -1, 0, 1]
    assert sorted(learned.buffer.prompt_ids[learned.buffer.order >= 0].tolist()) == [0, 3]

    # The version of a stored group is that of its oldest sampled token. Observations and prefixes
    # have none.
    store = replayed_module.store_groups
    empty = for_run(replayed(capacity=4, share=0.5)).init(N).buffer

    def version_of(*versions):
        tokens = np.arange(len(versions), dtype=np.int32)
        logp = np.zeros(len(versions), np.float32)
        one = Response(tokens, logp, logp, np.int32(versions), reward=1.0)
        stored = store(empty, [[one]], prompts=[0], scores=np.zeros(1, np.float32))
        return int(stored.versions[stored.order >= 0][0])

    assert [version_of(5, -1, 7), version_of(-1, 6), version_of(-1, -1)] == [5, 6, -1]


BAD = {
    "neither": (dict(capacity=4), "replayed: give one of share and replace; got None and None."),
    "share": (dict(capacity=4, share=1.0), "share must be above 0 and below 1; got 1.0."),
    "draw": (dict(capacity=4, replace=len, draw="each"), "draw has no effect with replace."),
    "capacity": (dict(capacity=0, share=0.5), "capacity must be an integer above 0; got 0."),
    "lowest": (dict(capacity=4, share=0.5, evict="lowest"), "evict='lowest' needs a score."),
    "until": (dict(capacity=4, share=0.5, until=0), "until must be above 0"),
}


@for_each("name", BAD)
def test_bad_options_are_refused(name):
    options, message = BAD[name]
    with pytest.raises(ValueError) as error:
        replayed(**options)
    assert message in str(error.value)


def test_ages():
    # A stored group ages until the update whatever samples. Asynchronous sampling uses weights
    # older than those that the batch trains.
    collector = for_run(replayed(capacity=8, share=0.5, max_staleness=2))
    _, state = run(collector, 3)
    _, collection, _ = play(collector, state, 4, version=2)
    old = [r for r in collection.requests if r.role == REPLAYED]
    assert old and all(r.responses[0].version[0] == 2 for r in old)
    _, collection, learned = play(collector, state, 5, version=3)
    assert all(request.role == OWN for request in collection.requests)
    # What is too old leaves its place to the groups of the batch, whose tokens name their step.
    there = learned.buffer.order >= 0
    assert (learned.buffer.items.tokens[there, 0, 0] >= 500).all()

    # A source is told as many groups when it proposes as when it learns.
    proposed, observed = [], []

    @dataclasses.dataclass(frozen=True)
    class Source:
        def init(self, num_prompts):
            return ()

        def propose(self, state, key, collection, count):
            proposed.append(collection.num_groups)
            return (Request(G),) * count, state

        def observe(self, state, collection):
            observed.append(collection.num_groups)
            return in_order().observe((), collection)

    collector = for_run(replayed(capacity=8, share=0.5, source=Source()))
    state, ends = collector.init(N), []
    for step in range(2):
        _, _, state = play(collector, state, step, together=False)
        ends.append(observed[-1])
    assert ends == [4, 2] and proposed == [4] * 4 + [2] * 4
