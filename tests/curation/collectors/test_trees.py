"""Responses that fork and beginnings that end early: which requests, and which leaves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches_of_collectors import RecordingSource, outcome, play_alike, play_batch
from cheap import equal
from rows import for_each

from jaxrl_llm import curation as cur
from jaxrl_llm.curation import HINTED, Collection, Request, Response, forked, pruned
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import UNFINISHED, sized
from jaxrl_llm.curation.collectors.trees.rounds import branch_counts, rule_arrays
from jaxrl_llm.rollout.backends import tokens_of
from jaxrl_llm.rollout.slots import Tokens

P, G, T, N = 3, 6, 8, 10


def for_run(collector, size=G):
    return sized(collector, group_size=size, max_new_tokens=T)


def sample(request, place, member):
    """A response: what it began with, then tokens that name their request; most end before T."""
    begin = request.responses[member] if request.responses else None
    start = 0 if begin is None else len(begin.tokens)
    seed = 101 * place + 7 * member + 13 * (request.round + 1) + start
    limit = T if request.limit is None else request.limit
    length = max(start + 1, min(limit, start + 2 + seed % T))
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 9, length).astype(np.int32)
    entropy = rng.random(length).astype(np.float32)
    logp = -rng.random(length).astype(np.float32)
    if begin is not None:
        tokens[:start], entropy[:start], logp[:start] = (
            begin.tokens,
            begin.entropy,
            begin.model_logp,
        )
    ended = length < limit or not (request.pauses and limit < T)
    version = np.full(length, 4, np.int32)
    trains = np.ones(length, bool)
    finish = 1 if ended else UNFINISHED
    return Response(tokens, logp, logp, version, trains, entropy, finish)


def answer(request, number, place):
    responses = tuple(sample(request, place, j) for j in range(request.rollouts))
    where = np.array([y.finish != UNFINISHED for y in responses])
    rewards = where * np.array([y.tokens.sum() % 2 for y in responses])
    return outcome(place, rewards, where=where, responses=responses)


def play(collector, state=None, step=0, *, size=G, **timing):
    state = collector.init(N) if state is None else state
    return play_batch(collector, state, Collection(P, size, step=step), answer, **timing)


def leaves(requests):
    """The tokens of each response that requests begin with."""
    return [tuple(y.tokens) for r in requests for y in r.responses]


def likely(old_logp, mask, unfinished):
    mean = (old_logp * mask).sum(-1) / np.maximum(mask.sum(-1), 1)
    return mean > np.median(mean)


TOP = cur.top_entropy_forks
SEGMENTS = forked(cur.segment_forks, forks=1, rounds=2, segment=2)
COLLECTORS = {
    "forked": forked(TOP, forks=1, branches=2),
    "rounds": forked(TOP, forks=1, branches=1, rounds=2),
    "segments": SEGMENTS,
    "entropy": cur.entropy_branched(segment=2, first=3, scale=1.0, tokens=2),
    "pruned": pruned(likely, limit=3),
    "quality": pruned(cur.quality_survivors(warmup=1), limit=3, first=8),
}


@pytest.mark.of_many
@pytest.mark.parametrize("name", COLLECTORS)
def test_the_laws_of_collectors(name):
    collector = for_run(COLLECTORS[name])
    batches = play_alike(functools.partial(play, collector), collector.init(N), 3)
    for rows, _, collection in batches:
        # Every response that ended is in the batch, and none twice.
        ended = [
            (i, j)
            for i, x in enumerate(collection.outcomes)
            for j, y in enumerate(x.responses)
            if y.finish != UNFINISHED
        ]
        assert sorted(m for row in rows for m in row.members) == ended
        assert all(0 < len(row.members) <= G + 2 * (name == "quality") for row in rows)
        for p, row in enumerate(rows):
            assert {i if i < P else collection.requests[i].extends for i, _ in row.members} == {p}
    if name == "quality":
        state = batches[-1][1]
        assert np.any(state["rule"].head) and state["rule"].bins.count.sum() > 0


def test_where_trees_fork():
    # A root forks before its tokens of most entropy.
    collector = for_run(forked(TOP, forks=1, branches=2))
    _, _, collection = play(collector)
    assert [r.rollouts for r in collection.requests[:P]] == [2] * P  # two trees of three leaves
    for p in range(P):
        more = collection.requests[P + p]
        assert (more.extends, more.round, more.rollouts) == (p, 1, 4)
        roots = collection.outcomes[p].responses
        for k, begin in enumerate(more.responses):
            root = roots[k // 2]
            place = int(np.argmax(root.entropy))
            for field in ("tokens", "behavior_logp", "model_logp", "version", "entropy"):
                equal(getattr(begin, field), getattr(root, field)[:place])

    # Roots without a complete tree do not fork.
    collector = for_run(forked(TOP, forks=1, branches=2), 8)
    rows, _, collection = play(collector, size=8)
    assert [r.rollouts for r in collection.requests] == [4] * P + [4] * P
    assert [len(row.members) for row in rows] == [8] * P

    # A rule that forks nowhere leaves the roots.
    collector = for_run(forked(nothing, forks=1, branches=2))
    rows, _, collection = play(collector)
    assert len(collection.requests) == P and [len(row.members) for row in rows] == [2] * P


def test_segments_and_splits():
    # A segment forks at its end and inner nodes are no leaves.
    collector = for_run(SEGMENTS, 4)
    rows, _, collection = play(collector, size=4)
    assert [r.limit for r in collection.requests[:P]] == [2] * P
    for i, request in enumerate(collection.requests[P:], P):
        assert request.limit == (4 if request.round == 1 else None) and request.rollouts % 2 == 0
        before = [
            y
            for j, r in enumerate(collection.requests[:i])
            if r.round == request.round - 1 and (j if j < P else r.extends) == request.extends
            for y in collection.outcomes[j].responses
            if y.finish == UNFINISHED
        ]
        assert leaves([request]) == [tuple(y.tokens) for y in before for _ in range(2)]
    finishes = {collection.outcomes[i].responses[j].finish for r in rows for i, j in r.members}
    assert finishes == {1}

    # Branches split at scheduled depths, into as many as there is room for.
    for size, splits, roots, ends in (
        (4, 2, 2, [4]),  # at 0 into two, at 4 of 8 tokens each into two
        (6, 2, 3, [4]),
        (8, None, 2, [2, 4]),
        (4, (2, 5), 1, [2, 5]),
    ):
        rows, _, collection = play(for_run(cur.branched(splits=splits), size), size=size)
        assert [(r.rollouts, r.limit) for r in collection.requests[:P]] == [(roots, ends[0])] * P
        for p, row in enumerate(rows):
            rounds = [r for r in collection.requests if r.extends == p]
            assert [r.limit for r in rounds] == [*ends[1:], None][: len(rounds)]
            assert len(row.members) <= size
            for request in rounds:
                assert leaves([request])[::2] == leaves([request])[1::2]
    # As wide as there is room for, in segments; or with a width for each split.
    wide = cur.branched(splits=3, branches=None, segment=2)
    for size, branches, segment in ((8, 2, (2, 4)), (27, 3, (2, 4)), (30, 3, (2, 4))):
        made = for_run(wide, size)
        assert (made.branches, made.segment) == (branches, segment)
    assert for_run(wide, 6).segment == (2,)  # there is no room for three splits
    assert for_run(wide, 3) == for_run(cur.branched(), 3) == cur.in_order()
    long = cur.branched(splits=3, branches=None, segment=30)
    long = sized(long, group_size=216, max_new_tokens=1024)
    assert (long.branches, long.segment, long.rounds) == (6, (30, 60), 2)
    rows, _, collection = play(for_run(cur.branched(branches=(2, 3, 2)), 12), size=12)
    assert [r.rollouts for r in collection.requests[:P]] == [2] * P
    for request in collection.requests[P:]:
        width, texts = {1: 3, 2: 2}[request.round], leaves([request])
        assert texts[::width] == texts[width - 1 :: width] and len(texts) % width == 0
    assert all(len(row.members) <= 12 for row in rows)
    assert repr(cur.branched(splits=3, branches=3)) == "branched(splits=3, branches=3)"


def test_the_score_of_beginnings_learns_who_ends_well():
    rule = cur.quality_survivors(warmup=0, learning_rate=1.0)
    state, rng = rule.init(), np.random.default_rng(0)
    mask, unfinished = np.ones((8, 4), bool), np.ones(8, bool)
    good = np.arange(8) < 4

    def beginnings():
        level = np.where(good, -0.2, -2.0)[:, None]
        return (level + 0.1 * rng.normal(size=(8, 4))).astype(np.float32)

    entropy = np.zeros((8, 4), np.float32)
    for _ in range(30):
        state = rule.learn(state, beginnings(), entropy, mask, good.astype(np.float32), good | True)
    bins = state.bins
    assert bins.count.sum() == 240
    keys = jax.random.split(jax.random.key(0), 16)

    def how_often():
        each = [rule.keep(state, beginnings(), entropy, mask, unfinished, k, 0) for k in keys]
        return np.sum(each, axis=0)

    kept = how_often()
    assert kept.sum() == 16 * 4
    # Half of those that go on end well.
    assert 24 <= kept[good].sum() <= 40
    # Where most end well, the others go on more often.
    good = np.arange(8) < 6
    kept = how_often()
    assert kept[6:].mean() > 1.3 * kept[:6].mean()


@for_each("ended", [0, 1])
def test_a_small_share_of_a_group_is_one_response(ended):
    rule = cur.quality_survivors(warmup=0, share=0.1)
    numbers = np.full((4, 3), -0.5, np.float32)
    unfinished = np.arange(4) >= ended
    key = jax.random.key(0)
    keep = np.asarray(
        rule.keep(rule.init(), numbers, -numbers, numbers < 0, unfinished, key, np.int32(0))
    )
    # One that ended early is part of the share.
    assert (keep | ~unfinished).sum() == 1


def test_what_it_says():
    # What the slots must do is said.
    collector = COLLECTORS["forked"]
    assert needs_of(collector).slots and needs_of(collector).records_entropy
    assert not needs_of(SEGMENTS).records_entropy
    assert needs_of(COLLECTORS["quality"]).records_entropy
    assert not needs_of(COLLECTORS["pruned"]).records_entropy

    # Bad input is one sentence.
    beyond = lambda lengths: (lengths + 1)[..., None]  # noqa: E731
    cases = {
        "before token": forked(beyond, forks=1),
        r"must return integers \(6, 2\); got shape \(6, 1\)": forked(beyond, forks=2),
        "the rule drops all rollouts of group": pruned(lambda lengths: lengths < 0, limit=1),
        "the rule must return bool": pruned(lambda lengths: lengths, limit=1),
    }
    for message, collector in cases.items():
        collector = for_run(collector)
        with pytest.raises(ValueError, match=message):
            play(collector)
    with pytest.raises(ValueError, match="needs the sizes of a run"):
        play(pruned(likely))
    blank = Response(np.array([1, 2], np.int32))
    group = outcome(0, [0, 0], responses=(blank,) * 2)
    collection = Collection(1, G, requests=(Request(2),), outcomes=(group,))
    with pytest.raises(ValueError, match="the rule reads old_entropy, which the responses do not"):
        for_run(COLLECTORS["forked"]).observe((), collection)

    # They print what differs.
    assert repr(COLLECTORS["rounds"]) == "forked(top_entropy_forks, forks=1, branches=1, rounds=2)"
    assert repr(SEGMENTS) == "forked(segment_forks, forks=1, branches=2, rounds=2, segment=2)"
    assert repr(pruned(likely, limit=3, first=8)) == "pruned(likely, limit=3, first=8)"
    assert dataclasses.replace(SEGMENTS) == SEGMENTS


def nothing(lengths):
    return jnp.full((*lengths.shape, 1), -1, jnp.int32)


def prefixed(length):
    """A source whose responses begin with so many tokens of the data."""
    values = np.zeros(length, np.float32)
    begins = Response(np.full(length, 3), model_logp=values, entropy=values)
    return RecordingSource(Request(G, responses=(begins,) * G))


@for_each("begun", [4, T - 1])
@for_each("name", COLLECTORS)
def test_tokens_after_which_a_tree_pauses_do_not_count_a_prefix(name, begun):
    limits = []
    for source in (None, prefixed(begun)):
        collector = COLLECTORS[name]
        if source is not None:
            collector = dataclasses.replace(collector, source=source)
        collector = for_run(collector)
        rows, _, collection = play(collector)
        limits.append({x.round: x.limit for x in collection.requests if x.pauses})
    plain, moved = limits
    assert moved == {n: min(x + begun, T) for n, x in plain.items() if n in moved}
    assert not plain or 0 in moved
    for row in rows:
        for i, j in row.members:
            assert (collection.outcomes[i].responses[j].tokens[:begun] == 3).all()


@for_each("begun", [0, 2])
def test_responses_branch_where_entropy_has_risen(begun):
    collector = cur.entropy_branched(segment=2, first=2, prob=0.0, scale=0.1)
    if begun:
        collector = dataclasses.replace(collector, source=prefixed(begun))
    collector = for_run(collector)
    rows, _, collection = play(collector, step=1)
    branched = 0
    for p, row in enumerate(rows):
        assert len(row.members) == G
        mine = [p] + [i for i, r in enumerate(collection.requests) if r.extends == p]
        for i in mine:
            request = collection.requests[i]
            if max((len(y.tokens) for y in request.responses), default=0) <= begun:
                continue
            # Of the round before, all that had not ended, and copies of those that rose.
            texts = [tuple(y.tokens) for y in request.responses]
            before = [j for j in mine if collection.requests[j].round == request.round - 1]
            live = [
                y for j in before for y in collection.outcome(j).responses if y.finish == UNFINISHED
            ]
            assert texts[: len(live)] == [tuple(y.tokens) for y in live]
            for text in texts[len(live) :]:
                (source,) = [y for y in live if tuple(y.tokens) == text]
                sampled = source.entropy[begun + 2 * (request.round - 1) :]
                assert sampled.sum() > source.entropy[begun : begun + 2].sum()
                branched += 1
    assert branched
    never = for_run(cur.entropy_branched(segment=2, first=2, prob=0.0, weight=0.0))
    rows, _, collection = play(never)
    for request in collection.requests:
        texts = [tuple(y.tokens) for y in request.responses]
        assert len(set(texts)) == len(texts)
    assert all(len(row.members) == G for row in rows)
    text = "entropy_branched(segment=2, weight=0.5)"
    assert repr(cur.entropy_branched(segment=2, weight=0.5)) == text


@for_each("name", COLLECTORS)
def test_what_goes_on_is_as_its_root_and_the_source_learns_of_one_group_a_prompt(name):
    request = Request(G, text="a hint", role=HINTED, temperature=0.5)
    request = request if name != "quality" else request._replace(rollouts=8)
    source = RecordingSource(request)
    rows, _, collection = play(for_run(dataclasses.replace(COLLECTORS[name], source=source)))
    later = collection.requests[P:]
    assert later and all(x.prompt is None for x in later)
    told = {(x.text, x.role, x.temperature) for x in collection.requests}
    assert told == {("a hint", HINTED, 0.5)}
    assert all(x.limit is None and not x.pauses for x in later if x.round == later[-1].round)
    (learned,) = source.seen
    assert [x.rollouts for x in learned.requests] == [len(row.members) for row in rows]
    for row, group in zip(rows, learned.outcomes, strict=True):
        own = [collection.outcomes[i].responses[j] for i, j in row.members]
        assert group.where.all() and all(x is y for x, y in zip(group.responses, own, strict=True))


def test_draws_and_rules():
    # Draws depend on the seed of the run and the step.
    keys = []

    def watched(key, mask):
        keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        return np.ones(len(mask), bool)

    collector = for_run(pruned(watched, limit=3))
    for seed, step in ((0, 0), (0, 0), (1, 0), (0, 1)):
        batch = Collection(P, G, step=step, seed=seed)
        play_batch(collector, collector.init(N), batch, lambda x, i, _: answer(x, i, i % P))
    each = [keys[i : i + P] for i in range(0, len(keys), P)]
    assert len({tuple(x) for x in each}) == 3 and each[0] == each[1]

    def counts(seed):
        ones = np.ones(64, np.float32)
        place = Collection(P, G, seed=seed)
        options = {"slots": 64, "branches": 1, "prob": 0.5, "weight": 0.0}
        return branch_counts(place, 0, 0, ones, ones, **options).tolist()

    assert counts(0) == counts(0) != counts(1)

    # Rules read 0 where an entropy is not known. Tokens of an earlier batch have none.
    found = answer(Request(2), 0, 0)
    first = found.responses[0]
    entropy = np.append(np.nan, first.entropy[1:]).astype(np.float32)
    found = found._replace(responses=(first._replace(entropy=entropy), found.responses[1]))
    collection = Collection(1, 2, requests=(Request(2),), outcomes=(found,))
    read = rule_arrays(collection, [0], 2, T, ["old_entropy"])["old_entropy"]
    assert read[0, 0] == 0 and np.isfinite(read).all()
    carried = first._replace(entropy=None)
    blank = Tokens(*(np.zeros(()) for _ in range(6)))
    assert np.isnan(tokens_of(carried, blank).entropy).all()
    equal(tokens_of(first._replace(entropy=entropy), blank).entropy, entropy)

    # What a rule drops is neither sampled on nor in the batch.
    collector = for_run(pruned(likely, limit=3))
    rows, _, collection = play(collector)
    assert [r.limit for r in collection.requests[:P]] == [3] * P
    assert all(r.pauses for r in collection.requests[:P])
    for p in range(P):
        first = collection.outcomes[p].responses
        mean = np.array([y.model_logp.mean() for y in first])
        ended = np.array([y.finish != UNFINISHED for y in first])
        goes_on = [first[j] for j in np.flatnonzero((mean > np.median(mean)) & ~ended)]
        more = leaves(r for r in collection.requests[P:] if r.extends == p)
        assert more == [tuple(y.tokens) for y in goes_on]
        assert len(rows[p].members) == ended.sum() + len(goes_on)
