"""Stored groups among fresh ones: what is drawn, what is stored, and what never happens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from batches_of_collectors import RecordingSource, outcome, play_alike, play_batch
from cheap import close, equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation as cur
from jaxrl_llm.curation import OWN, REPLAYED, Collection, Request, Response, in_order, replayed
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


def differ(step, number):
    return [0.0, 1.0]


def some_differ(step, number):
    return [0.0, float((step + number) % 3 > 0)]


def play(collector, state, step, *, reward=differ, version=None, parts=(), **timing):
    """One batch: its rows, the state after it, and the collection."""

    def answer(request, number, place):
        if request.responses:  # what comes without its reward is graded again
            responses = request.responses
            rewards = [1.0 if x.reward is None else x.reward for x in responses]
        else:
            responses = tuple(response(step, number, j) for j in range(request.rollouts))
            rewards = reward(step, number)[: request.rollouts]
        done = outcome(place % N, rewards, responses=responses)
        return done._replace(reward_components=dict.fromkeys(parts, done.rewards))

    batch = Collection(P, G, step, version=step if version is None else version)
    key = jax.random.fold_in(KEY, step)
    return play_batch(collector, state, batch, answer, key=key, **timing)


def run(collector, steps, **options):
    state, batches = collector.init(N), []
    for step in range(steps):
        rows, state, collection = play(collector, state, step, **options)
        batches.append((rows, collection))
    return batches, state


def roles(batch):
    rows, collection = batch
    return [collection.requests[row.members[0][0]].role for row in rows]


BUDGET = cur.two_phase(lambda rewards: np.full(len(rewards), 1), max_rollouts=3, first=2)
INFORMATIVE, HALF = cur.informative_groups, {"capacity": 8, "share": 0.5}


@pytest.mark.of_many
@pytest.mark.parametrize(
    "options",
    [
        {"share": 0.5},
        {"share": 0.4, "draw": "each", "until": 5},
        {"replace": INFORMATIVE, "max_staleness": 2},
        {"share": 0.5, "source": cur.refill(INFORMATIVE)},
        {"share": 0.5, "source": BUDGET},
        {"replace": INFORMATIVE, "source": cur.pooled(capacity=6)},
    ],
    ids=["share", "each", "replace", "refill", "two_phase", "pooled"],
)
def test_the_laws_of_collectors(options):
    collector = for_run(replayed(capacity=6, **options))
    timed = functools.partial(play, collector, reward=some_differ)
    batches = play_alike(timed, collector.init(N), 5)
    for rows, state, collection in batches:  # noqa: B007
        begins = [row.members[0] for row in rows]
        assert len(rows) == P and begins == sorted(begins) and len(collection.requests) <= 10 * P
    orders = state.buffer.order[state.buffer.order >= 0]
    assert len(set(orders.tolist())) == len(orders)
    tokens = [group[0, 0] for group in state.buffer.items.tokens if group.any()]
    assert len(set(tokens)) == len(tokens) > 2  # no rollout twice


def test_half_of_a_batch_is_stored():
    # Half of a batch is stored once there is enough.
    batches, state = run(for_run(replayed(**HALF)), 4)
    assert roles(batches[0]) == [OWN] * 4
    assert all(roles(batch) == [OWN] * 2 + [REPLAYED] * 2 for batch in batches[1:])
    # 4 + 2 + 2 + 2 fresh groups went into 8 places, the newest stay.
    assert int(state.buffer.added) == 10
    assert sorted(state.buffer.order.tolist()) == list(range(2, 10))

    # A stored group comes back as it was sampled.
    batches, _ = run(for_run(replayed(**HALF)), 3)
    sampled = {}
    pairs = [x for _, batch in batches for x in zip(batch.requests, batch.outcomes, strict=True)]
    for request, done in pairs:
        if request.role == OWN:
            sampled[done.responses[0].tokens[0]] = done
            continue
        assert not request.sampled and request.rollouts == G
        first = sampled[request.responses[0].tokens[0]]  # of an earlier batch
        assert request.prompt == first.prompt
        assert [x.reward for x in request.responses] == first.rewards.tolist()
        for stored, expected in zip(request.responses, first.responses, strict=True):
            for name in ("tokens", "behavior_logp", "model_logp", "version", "trains"):
                equal(getattr(stored, name), getattr(expected, name))


@for_each("options", [{"share": 0.5}, {"replace": INFORMATIVE}])
def test_a_source_may_bring_stored_responses_of_its_own(options):
    """A success of ``pooled`` is one more request for a prompt of the batch, no stored group."""
    source = cur.pooled(capacity=N)
    collector = for_run(replayed(capacity=8, source=source, **options))
    batches, _ = run(collector, 8, reward=lambda step, number: [0.0, float(step < 3)])
    successes = 0
    for its_rows, collection in batches:
        requests = collection.requests
        rows = [[requests[i] for i, _ in row.members] for row in its_rows]
        successes += sum(any(each.extends is not None for each in row) for row in rows)
        # A row is a stored group as a whole or holds a success beside fresh rollouts.
        for row in rows:
            stored = [each.role == REPLAYED and each.extends is None for each in row]
            assert all(stored) or not any(stored)
    assert successes > 0 and any(REPLAYED in roles(batch) for batch in batches)


def test_a_group_with_parts_of_its_reward_is_graded_again():
    """A buffer has no room for them, and a recipe that reads them would have none."""
    collector = for_run(replayed(**HALF, regrade=True))
    batches, state = run(collector, 3, parts=("right", "short"))
    for batch in batches[1:]:
        assert roles(batch) == [OWN] * 2 + [REPLAYED] * 2
        stored = [r for r in batch[1].requests if r.role == REPLAYED]
        assert all(each.reward is None for r in stored for each in r.responses)
    filled = state.buffer.order >= 0
    assert np.isnan(state.buffer.items.rewards[filled]).all()
    _, kept = run(for_run(replayed(**HALF)), 3, parts=("right", "short"))
    assert np.isfinite(kept.buffer.items.rewards[kept.buffer.order >= 0]).all()
    for collector in (replayed(**HALF), cur.windowed()):
        with pytest.raises(ValueError, match=r"reads reward_components, .*replayed needs regrade"):
            jr.recipes.gdpo().replace(collector=collector)
    jr.recipes.gdpo().replace(collector=replayed(**HALF, regrade=True))


@for_each("make", [cur.partial_rollouts, cur.windowed])
def test_a_source_whose_groups_go_on_has_room_for_those_of_a_whole_batch(make):
    source = make(segments=2)
    collector = replayed(capacity=4, replace=INFORMATIVE, source=source)
    sizes = {"group_size": G, "max_new_tokens": T, "num_groups": P}
    made = sized(collector, **sizes)
    expected = sized(source, **sizes).init(N)
    jax.tree.map(equal, made.init(N).source, expected)
    batches, _ = run(made, 3, reward=some_differ)
    assert all(len(rows) == P for rows, _ in batches)


def test_refused_sources():
    # A source of as many groups as a batch has no share.
    for source in (cur.partial_rollouts(), cur.mixed((cur.windowed(), 0.5), (in_order(), 0.5))):
        with pytest.raises(ValueError, match="made for one number of groups; use replace") as e:
            replayed(capacity=4, share=0.5, source=source)
        assert "\n" not in str(e.value)
    # What only passes the size on is no such source.
    mixture = cur.mixed((in_order(), 0.5), (cur.in_epochs(), 0.5))
    made = replayed(capacity=4, share=0.5, source=mixture)
    assert all(len(rows) == P for rows, _ in run(for_run(made), 3)[0])

    # A source that values prefixes is refused.
    source = cur.valued(jr.bind(cur.stretch_starts, length=3))
    with pytest.raises(ValueError, match="the buffer stores no segments of responses"):
        replayed(capacity=4, share=0.5, source=source)

    # Other mistakes are refused.
    wrong = for_run(replayed(capacity=4, share=0.5, priority=lambda scores: scores[:1]))
    with pytest.raises(ValueError, match="the priority's result"):
        run(wrong, 1)

    # It prints what differs.
    text = "replayed(capacity=8, replace=informative_groups, source=refill("
    collector = replayed(capacity=8, replace=INFORMATIVE, source=cur.refill(INFORMATIVE))
    assert repr(for_run(collector)).startswith(text)
    assert dataclasses.is_dataclass(collector)


BUDGETED, OFFLINE = cur.budgeted((2, 4)), cur.offline_pairs()


def mix(*parts):
    return cur.mixed(*((part, 0.5) for part in parts))


@for_each("options", [{"share": 0.5}, {"replace": INFORMATIVE}])
def test_a_source_that_replays_or_helps_every_group_is_refused(options):
    """Only groups that were sampled after the prompt itself are stored, so none would be."""
    inner = replayed(capacity=4, share=0.5)
    for source in (inner, mix(inner, in_order())):
        with pytest.raises(ValueError, match="replayed: source .* also replays stored groups"):
            replayed(capacity=4, source=source, **options)
    for source in (
        BUDGETED,
        mix(BUDGETED, cur.paraphrased()),
        cur.downsampled(cur.resample_on_correct, source=BUDGETED),
        cur.demonstrations(),
        cur.hinted(cur.hint_share()),
        cur.hinted(cur.examples_in_prompt()),
        cur.only_demonstrations(),
        OFFLINE,
        cur.plain_texts(),
        mix(OFFLINE, BUDGETED),
    ):
        with pytest.raises(ValueError, match="replayed: source .* gives every group a text, a"):
            replayed(capacity=4, source=source, **options)
    # Some of their groups have no help, or no text.
    some = (mix(OFFLINE, in_order()), mix(BUDGETED, in_order()), cur.experienced())
    for source in (cur.demonstrations(when="failed"), *some):
        replayed(capacity=4, source=source, **options)


def test_what_takes_places():
    # Stored groups take the places of dull ones.
    collector = for_run(replayed(capacity=8, replace=INFORMATIVE, store=INFORMATIVE))
    batches, state = run(collector, 3, reward=some_differ)
    # Group number i of step s differs unless s + i divides by 3: 0 and 3 of the first batch.
    assert roles(batches[0]) == [OWN] * 4  # nothing is stored yet, so the dull ones stay
    assert [len(collection.requests) for _, collection in batches] == [4, 5, 5]
    for batch in batches[1:]:
        assert roles(batch) == [OWN] * 3 + [REPLAYED]
    assert (state.buffer.items.rewards[state.buffer.order >= 0].std(axis=-1) > 0).all()
    assert int(state.buffer.added) == 2 + 3 + 3

    # An explicit request for a group that is too old is refused.
    collector = for_run(replayed(**HALF, max_staleness=2))
    _, state = run(collector, 3)
    place = int(np.argmin(state.buffer.versions))
    with pytest.raises(ValueError) as error:
        cur.stored_request(state.buffer, place, version=7, max_staleness=2)
    assert str(error.value) == (
        f"stored_request: the group at place {place} was sampled by version 0 of the weights, 7 "
        "before version 7; max_staleness is 2."
    )
    with pytest.raises(ValueError, match="place 1 of the buffer is empty"):
        cur.stored_request(collector.init(N).buffer, 1, version=0)


def test_draws():
    # The draw follows the priority.
    def newest(order):
        return np.float32(order == order.max())

    collector = for_run(replayed(**HALF, priority=newest))
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
    close(np.sort(state.buffer.scores), [2.0, 2.1], rtol=1e-6)

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
    _, _, collection = play(collector, state, 0)
    failed = collection.outcomes[1]._replace(where=np.array([True, False]))
    long = response(0, 2, 0)._replace(tokens=np.zeros(T + 1, np.int32))
    outcomes = list(collection.outcomes)
    outcomes[1] = failed
    outcomes[2] = outcomes[2]._replace(responses=(long, long))
    _, learned = collector.observe(state, collection._replace(outcomes=tuple(outcomes)))
    assert sorted(learned.buffer.order.tolist()) == [-1, -1, 0, 1]

    # Only what follows the plain prompt is stored.
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


def test_ages():
    # A stored group ages until the update whatever samples. Asynchronous sampling uses weights
    # older than those that the batch trains.
    collector = for_run(replayed(**HALF, max_staleness=2))
    _, state = run(collector, 3)
    _, _, collection = play(collector, state, 4, version=2)
    old = [r for r in collection.requests if r.role == REPLAYED]
    assert old and all(r.responses[0].version[0] == 2 for r in old)
    _, learned, collection = play(collector, state, 5, version=3)
    assert all(request.role == OWN for request in collection.requests)
    # What is too old leaves its place to the groups of the batch, whose tokens name their step.
    there = learned.buffer.order >= 0
    assert (learned.buffer.items.tokens[there, 0, 0] >= 500).all()

    # A source is told as many groups when it proposes as when it learns.
    source, ends = Counting(Request(G)), []
    collector = for_run(replayed(**HALF, source=source))
    state = collector.init(N)
    for step in range(2):
        _, state, _ = play(collector, state, step, one_by_one=True)
        ends.append(source.seen[-1].num_groups)
    assert ends == [4, 2] and source.proposed == [4] * 4 + [2] * 4


@dataclasses.dataclass(frozen=True)
class Counting(RecordingSource):
    proposed: list = dataclasses.field(default_factory=list)

    def propose(self, state, key, collection, count):
        self.proposed.append(collection.num_groups)
        return super().propose(state, key, collection, count)
