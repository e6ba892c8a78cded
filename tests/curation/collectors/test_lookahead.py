"""Trees that look ahead: against rows that advance token by token under the pure rules."""

import dataclasses
import functools
import hashlib
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches_of_collectors import RecordingSource, outcome, play_alike, play_batch
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import HINTED, Collection, Request, Response, lookahead
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import UNFINISHED, sized

P, G, T, V, STOP = 3, 6, 14, 6, 5
RULES = {"min_prob": 0.2, "max_gap": 0.2, "ages": (3, 4), "max_distance": 0.5, "limit": 10}
STEPWISE = lookahead(**RULES, segment=1)
ROUNDS = lookahead(**RULES, starts=(0, 1, 2), shares=(1.0, 0.5, 0.0))
COPIES = lookahead(min_prob=0.9, ages=(2,), limit=4)


@cache
def probs(prompt, prefix):
    """Of the next token: a model that forgets all but two tokens, so that branches meet again."""
    text = f"{prompt} {prefix[-2:]} {len(prefix) // 5}"
    seed = int(hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), 16)
    logits = 1.5 * np.random.default_rng(seed).normal(size=V)
    logits[STOP] -= 1.0 if len(prefix) > 4 else 9.0
    return np.float32(np.exp(logits) / np.exp(logits).sum())


def sample(request, prompt, member, seed):
    """Greedy or drawn tokens, with their runners-up."""
    begin = request.responses[member] if request.responses else Response(np.zeros(0, np.int32))
    tokens, limit = begin.tokens.tolist(), request.limit or T
    assert STOP not in tokens and len(tokens) < limit
    first = len(tokens)
    rng, recorded = np.random.default_rng([seed, member]), []
    while len(tokens) < limit and (not tokens or tokens[-1] != STOP):
        p = probs(prompt, tuple(tokens))
        token = int(p.argmax()) if request.temperature == 0.0 else int(rng.integers(V))
        other = np.where(np.arange(V) == token, -1.0, p)
        recorded.append((np.log(p[token]), other.argmax(), np.log(other.max())))
        tokens.append(token)
    logp, second, second_logp = map(np.array, zip(*recorded, strict=True))

    def joined(name, new, dtype, fill):
        old = getattr(begin, name)
        return np.append(np.full(first, fill) if old is None else old, new).astype(dtype)

    n = len(tokens) - first
    pauses = request.pauses and limit < T
    finish = 1 if tokens[-1] == STOP else UNFINISHED if pauses else 0
    return Response(
        np.int32(tokens),
        behavior_logp=joined("behavior_logp", np.zeros(n), np.float32, np.nan),
        model_logp=joined("model_logp", logp, np.float32, np.nan),
        version=joined("version", np.full(n, 4), np.int32, -1),
        finish=finish,
        nodes=joined("nodes", np.full(n, 1000 * seed + member), np.int32, -1),
        runner_up=joined("runner_up", second, np.int32, 0),
        runner_up_logp=joined("runner_up_logp", second_logp, np.float32, np.nan),
    )


def answer(request, number, place):
    responses = request.responses
    if request.sampled:
        responses = tuple(sample(request, place, j, number) for j in range(request.rollouts))
    where = np.array([y.finish != UNFINISHED for y in responses])
    return outcome(place, 0.0 * where, where=where, responses=responses)


def play(collector, state=(), step=0, **timing):
    collector = sized(collector, group_size=G, max_new_tokens=T)
    batch = Collection(P, G, step=step, stop_ids=(STOP,))
    return play_batch(collector, state, batch, lambda r, i, p: answer(r, i, p % P), **timing)


prune = jax.jit(
    jr.curation.lookahead_prune, static_argnames=("ages", "max_distance", "min_suffix", "eos_id")
)
candidates = jax.jit(
    partial(jr.curation.branch_candidates, candidates=2), static_argnames=("min_prob", "max_gap")
)


def step_by_step(prompt, leaves, *, min_prob, max_gap, ages, limit, **rules):
    """The tree of a prompt, one token of all rows at a time, by the pure rules."""
    rows, parents, birth = [[]], [-1], [0]
    for step in range(limit):
        done = np.array([STOP in row for row in rows] + [True] * (16 - len(rows)))
        p = np.zeros((16, V), np.float32)
        for i, row in enumerate(rows):
            p[i] = probs(prompt, tuple(row))
        out = candidates(p, min_prob=min_prob, max_gap=max_gap, done=done)
        keep = jr.curation.branch_capacity(
            out.keep[: len(rows)], jnp.zeros(len(rows), int), capacity=leaves
        )
        tokens, new = np.asarray(out.tokens), []
        for i in range(len(rows)):
            if keep[i, 1]:
                new.append((rows[i] + [int(tokens[i, 1])], i))
        for i, row in enumerate(rows):
            row.append(STOP if done[i] else int(tokens[i, 0]))
        rows, birth = rows + [x for x, _ in new], birth + [step] * len(new)
        parents += [i for _, i in new]
        size = 16 - len(rows)
        padded = np.array([x + [0] * (limit - len(x)) for x in rows] + [[0] * limit] * size)
        drop = prune(
            padded,
            np.array(parents + [-1] * size),
            np.array(birth + [0] * size),
            step + 1,
            ages=ages,
            eos_id=STOP,
            **rules,
        )
        gone = set(np.flatnonzero(drop).tolist())
        for i, parent in enumerate(parents):
            gone |= {i} if parent in gone else set()
        left = [i for i in range(len(rows)) if i not in gone]
        new_place = {old: i for i, old in enumerate(left)} | {-1: -1}
        parents = [new_place[parents[i]] for i in left]
        rows, birth = [rows[i] for i in left], [birth[i] for i in left]
        ended = [STOP in row for row in rows]
        old = [
            b < 0 or e or step + 1 >= s + max(ages)
            for b, e, s in zip(parents, ended, birth, strict=True)
        ]
        if all(ended) or (len(rows) == leaves and all(old)):
            break
    return [tuple(row[: row.index(STOP) + 1] if STOP in row else row) for row in rows]


@pytest.mark.of_many
@pytest.mark.parametrize(
    "rules", [{"max_distance": 0.5}, {"max_distance": None, "min_suffix": 0.4}]
)
def test_rounds_of_one_token_are_the_papers_tree(rules):
    options = {**RULES, "max_distance": None} | rules
    rows, _, collection = play(lookahead(**options, segment=1))
    pruned = 0
    for p, row in enumerate(rows):
        expected = step_by_step(p, G, **options)
        endings = [r for r in collection.requests[P:] if r.extends == p and r.temperature is None]
        leaves = [tuple(y.tokens.tolist()) for r in endings for y in r.responses]
        assert len(row.members) == G == len(leaves)
        # What is missing are copies of the root.
        for leaf in expected:
            leaves.remove(leaf)
        assert all(leaf in (expected[0], ()) for leaf in leaves)
        greedy = [r for r in collection.requests if r.extends == p and r.temperature == 0.0]
        sizes = [r.rollouts for r in greedy]
        pruned += any(b < a for a, b in zip(sizes, sizes[1:], strict=False))
    assert pruned  # some rows were dropped, and others have branched
    assert any(len(set(leaves)) > 2 for leaves in [step_by_step(p, G, **options) for p in range(P)])


@for_each("collector", [STEPWISE, ROUNDS, COPIES], ids=["step", "rounds", "copies"])
def test_the_laws_of_collectors(collector):
    for rows, state, collection in play_alike(functools.partial(play, collector), (), 3):
        assert state == () and len(collection.requests) <= P * 14
        for p, row in enumerate(rows):
            assert len(row.members) == G
            for i, j in row.members:
                response = collection.outcomes[i].responses[j]
                assert (i if i < P else collection.requests[i].extends) == p
                ended = response.finish != UNFINISHED and response.tokens[-1] == STOP
                assert ended or len(response.tokens) == T


def test_trees():
    # The share of a tree falls and the rest is sampled plainly.
    for step, leaves in ((0, 6), (1, 3), (2, 0)):
        _, _, collection = play(ROUNDS, step=step)
        first = collection.requests[:P]
        if leaves:
            assert {(r.rollouts, r.temperature, r.limit, r.pauses) for r in first} == {
                (1, 0.0, 4, True)
            }
        else:
            assert {(r.rollouts, r.temperature, r.limit) for r in first} == {(6, None, None)}
            assert len(collection.requests) == P
        plain = [r for r in collection.requests[P:] if r.sampled and not r.responses]
        assert [(r.rollouts, r.extends) for r in plain] == (
            [(3, p) for p in range(P)] if leaves == 3 else []
        )

    # Tokens of a tree have no log probability of the sampler.
    rows, _, collection = play(ROUNDS)
    shared = 0
    for row in rows:
        for i, j in row.members:
            request = collection.requests[i]
            response = collection.outcomes[i].responses[j]
            n = len(request.responses[j].tokens)
            assert request.responses[j].behavior_logp is None
            assert np.isfinite(response.model_logp).all()  # of the second token too
            if request.sampled:
                assert np.isfinite(response.behavior_logp[n:]).all()
        nodes = [collection.outcomes[i].responses[j].nodes for i, j in row.members]
        shared += len({int(x[0]) for x in nodes}) < G
    assert shared == P  # one rollout sampled the first token of many

    # A tree behind a prefix ends with the last token. Where there is room for one token, the
    # branch that leaves there has ended as well.
    begins = Response(np.zeros(T - 1, np.int32))
    source = RecordingSource(Request(1, responses=(begins,)))
    collector = lookahead(min_prob=0.0, max_gap=1.0, ages=(2,), source=source)
    rows, _, collection = play(collector)
    assert [len(row.members) for row in rows] == [G] * P
    assert {x.limit for x in collection.requests if x.pauses} == {T}
    ended = [x for x in collection.requests if not x.sampled]
    assert [x.rollouts for x in ended] == [2] * P
    assert {(len(y.tokens), y.finish) for x in ended for y in x.responses} <= {(T, 0), (T, 1)}
    left = [y for x in collection.requests if x.sampled for y in x.responses]
    assert all(len(y.tokens) == T - 1 for y in left)


def test_mistakes():
    # It says what slots must do and prints what differs.
    needs = needs_of(STEPWISE)
    assert needs.slots and needs.varies_temperature and needs.records_runner_up
    assert not needs.records_entropy
    assert repr(lookahead()) == "lookahead()"
    assert repr(COPIES) == "lookahead(min_prob=0.9, ages=(2,), limit=4)"
    schedule = {"starts": (0, 10, 20, 80, 200), "shares": (1.0, 0.75, 0.5, 0.25, 0.0)}
    assert jr.recipes.latr().collector == lookahead(**schedule)

    with pytest.raises(ValueError, match="limit must be below the 14 tokens"):
        sized(lookahead(limit=14), group_size=G, max_new_tokens=T)
    with pytest.raises(ValueError, match="needs the sizes of a run"):
        lookahead().propose((), jax.random.key(0), Collection(P, G), 1)
    blank = Response(np.int32([1, 2]), finish=UNFINISHED)
    group = outcome(0, [0], responses=(blank,))
    collector = sized(STEPWISE, group_size=G, max_new_tokens=T)
    start = Collection(1, G, stop_ids=(STOP,))
    requests, _ = collector.propose((), jax.random.key(0), start, 1)
    with pytest.raises(ValueError, match="reads runner_up_logp, which the responses do not have"):
        collector.observe((), start._replace(requests=requests, outcomes=(group,)))


def test_the_source_learns_of_the_leaves_and_what_goes_on_has_its_message():
    source = RecordingSource(Request(G, text="a hint", role=HINTED))

    collector = dataclasses.replace(ROUNDS, source=source)
    rows, _, collection = play(collector, step=1)
    assert {(x.text, x.role) for x in collection.requests} == {("a hint", HINTED)}
    assert {x.temperature for x in collection.requests[P:] if not x.pauses} == {None}
    (learned,) = source.seen
    assert [(x.rollouts, x.extends) for x in learned.requests] == [(G, None)] * P
    for row, group in zip(rows, learned.outcomes, strict=True):
        own = [collection.outcomes[i].responses[j] for i, j in row.members]
        assert len(group.rewards) == G and group.where.all()
        assert all(x is y for x, y in zip(group.responses, own, strict=True))
