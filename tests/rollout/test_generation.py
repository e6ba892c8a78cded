"""Stopping, going on, new weights, forks and ends: what happens between two chunks."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.forwards import logits_of
from rollout.groups import assert_same, by_request, draw_groups
from rows import for_each

from jaxrl_llm.rollout import Completion, Group, off_policy_fraction, sample_round
from jaxrl_llm.rollout.types import CANCELLED, LENGTH, STOP, UNFINISHED


def lengths(groups):
    return {r: len(c) for g in groups for r, c in g.partial.items()}


def bits(completions):
    return {
        r: (c.finish, [x.tobytes() for x in jax.tree.leaves(c.out)]) for r, c in completions.items()
    }


@pytest.fixture(scope="module")
def long_ones(reference):
    """``long_ones(prompt, n)``: requests whose responses to a prompt take all 24 tokens."""

    def long_ones(prompt, n):
        groups = [Group(i, prompt, tuple(range(6 * i, 6 * i + 6))) for i in range(12)]
        result = [r for r, c in reference(groups).items() if len(c) == 24]
        return tuple(result[:n])

    return long_ones


# Stopping and going on.


def test_an_interrupted_loop_resumes_bit_for_bit(engine, generate):
    groups = draw_groups(7)
    reference = by_request(list(generate(engine, *groups)))
    generation = generate(engine, *groups)
    result = [next(iter(generation))]
    for done in generation:
        result.append(done)
        if len(result) == 3:
            break
    generation.step()
    result += list(generation)
    assert bits(by_request(result)) == bits(reference)
    assert list(generation) == [] and generation.stop() == []


def test_stopped_groups_resume_in_another_engine(engine, make, generate, reference):
    groups, elsewhere = draw_groups(8), {"rows": 1, "width": 4, "chunk": 16, "block": 128}
    generation, result, known = generate(engine, *groups), [], {}
    # Stopped again and again, each time with all that had begun.
    for steps in (1, 0, 2, 1):
        for _ in range(steps):
            generation.step()
        rest = generation.stop()
        now = lengths(rest)
        assert all(now[r] >= n for r, n in known.items())
        known = now
        generation.submit(*rest)
    rest = generation.stop()
    assert lengths(rest) == known
    assert {c.finish for g in rest for c in g.partial.values()} == {LENGTH, STOP, UNFINISHED}
    result = list(generate(make(**elsewhere, entropy=True), *rest))
    assert sorted(done.id for done in result) == sorted(g.id for g in groups)
    assert_same(by_request(result), reference(groups))


def test_stop_returns_groups_in_the_order_of_their_start(engine, generate, long_ones):
    groups = [Group(i, [65], (r,), max_new_tokens=24 - i) for i, r in enumerate(long_ones([65], 6))]
    generation = generate(engine, *groups[::-1])
    generation.step()
    rest = generation.stop()
    # Two rows: the two longest have begun, the others wait behind them, the longest first.
    assert [g.id for g in rest] == [0, 1, 2, 3, 4, 5]
    assert list(lengths(rest).values()) == [4, 4]
    # What has begun goes before what is longer.
    generation.submit(*rest[2:], *rest[1::-1])
    generation.step()
    rest = generation.stop()
    assert [g.id for g in rest] == [1, 0, 2, 3, 4, 5]
    assert list(lengths(rest).values()) == [8, 8]
    # A group of which siblings wait keeps its place before one that is under way as a whole.
    large = Group("large", [65], tuple(range(900, 905)), expected=30)
    generation = generate(engine, groups[0], large)
    generation.step()
    assert [g.id for g in generation.stop()] == ["large", 0]


def test_finished_siblings_are_not_sampled_again(engine, tiny, generate):
    group = Group("a", [65, 66], tuple(range(5)), max_new_tokens=(2, 24, 3, 24, 24))
    generation = generate(engine, group)
    generation.step()
    (rest,) = generation.stop()
    ended = {r: c for r, c in rest.partial.items() if c.finish != UNFINISHED}
    assert set(ended) >= {0, 2} and len(ended) < 5
    # Under other weights: what had ended stays as it was.
    other = jax.tree.map(lambda x: x * 1.3, tiny[1])
    result = by_request(list(generate(engine, rest, params=other, version=1)))
    assert all(result[r] is c for r, c in ended.items())
    assert any(1 in c.out.version for c in result.values())
    # A group of which all has ended needs no slot.
    finished = group._replace(partial=result)
    generation = generate(engine, finished, params=other)
    (done,) = generation
    assert done.completions == tuple(result[r] for r in range(5)) and done.group == group


# New weights.


def test_new_weights_keep_the_tokens_and_read_them_again(tiny, engine, generate, long_ones):
    model, params = tiny
    other = jax.tree.map(lambda x: x * 1.5, params)
    prompt, requests = list(b"words"), long_ones(list(b"words"), 5)
    group = Group("a", prompt, requests)
    old = by_request(list(generate(engine, group)))
    generation = generate(engine, group)
    for _ in range(3):
        generation.step()
    generation.update(other, version=3)
    result = by_request(list(generation))
    logits = jax.jit(logits_of, static_argnums=0)
    for request, completion in result.items():
        n, out = 12, completion.out
        assert out.version.tolist() == [0] * n + [3] * (len(completion) - n)
        assert out.tokens[:n].tolist() == old[request].tokens[:n].tolist()
        # All behind is what the new weights predict of all before, whoever sampled it.
        sequence = np.zeros(len(prompt) + 24, np.int32)
        sequence[: len(prompt) + len(completion)] = [*prompt, *out.tokens]
        plain = logits(model, other, sequence[None, None])[0, 0, len(prompt) - 1 :]
        plain = plain[: len(completion)]
        logp = jax.nn.log_softmax(plain)[np.arange(len(completion)), out.tokens]
        np.testing.assert_allclose(out.model_logp[n:], logp[n:], atol=1e-4)
        assert np.abs(out.model_logp[:n] - logp[:n]).max() > 0.1
    share = off_policy_fraction(out.version, np.ones(len(out.version), bool), current_version=3)
    assert share == pytest.approx(12 / len(out.version))


# Segments.


def test_segments_split_a_response_over_rounds(engine, generate, reference):
    groups = draw_groups(7, seed=4)
    generation = generate(engine, *groups, segment=7)
    result, had, rounds = [], {}, 0
    while groups:
        result += list(generation)
        groups = generation.stop()
        now = lengths(groups)
        for group in groups:
            assert any(c.finish == UNFINISHED for c in group.partial.values())
            for request, completion in group.partial.items():
                if completion.finish == UNFINISHED:
                    assert now[request] - had.get(request, 0) == 7
        had, rounds = now, rounds + 1
        generation.submit(*groups)
    # 24 tokens are four parts of at most 7.
    assert rounds == 4
    assert_same(by_request(result), reference(draw_groups(7, seed=4)))


def test_a_paused_request_can_be_cancelled(engine, generate, long_ones):
    requests = long_ones([65], 2)
    group = Group("a", [65], requests, max_new_tokens=(24, 3))
    generation = generate(engine, group, segment=5)
    assert list(generation) == []
    generation.cancel(requests[0])
    (done,) = generation
    assert [(len(c), c.finish) for c in done.completions] == [(5, CANCELLED), (3, LENGTH)]


# Rounds.


def test_groups_that_finish_together_train_in_the_next_round(make, generate, long_ones):
    requests = long_ones([65], 6)
    groups = [Group(i, [65], requests[2 * i : 2 * i + 2], max_new_tokens=6) for i in range(3)]
    generation = generate(make(rows=3, width=2, chunk=2, block=5))
    buffered, new = deque(), iter(groups)
    (first,) = sample_round(generation, buffered, new, n=1, target=3)
    assert [len(c) for c in first.completions] == [6, 6]
    # The two others have all their tokens; nothing is decoded for them again.
    assert [len(g.partial) for g in buffered] == [2, 2]
    assert all(c.finish == LENGTH for g in buffered for c in g.partial.values())
    before = generation.slots
    done = [*sample_round(generation, buffered, new, n=2, target=2)]
    assert {first.id, *(x.id for x in done)} == {0, 1, 2} and generation.slots is before


def test_an_interrupted_round_puts_its_groups_back(engine, generate):
    groups = draw_groups(6, seed=6)
    buffered, new = deque(groups[:2]), iter(groups[2:])
    generation = generate(engine)
    for _ in sample_round(generation, buffered, new, n=3, target=4):
        break
    assert len(buffered) == 3 and len(list(new)) == 2

    def broken(done):
        raise OSError("no judge")

    with pytest.raises(OSError, match="no judge"):
        list(sample_round(generation, buffered, iter(()), n=1, target=2, accept=broken))
    assert len(buffered) == 3 and generation.stop() == []
    for options, message in (
        ({"n": 0, "target": 1}, "n must be above 0"),
        ({"n": 3, "target": 2}, "target 2 is below n 3"),
    ):
        with pytest.raises(ValueError, match=message):
            list(sample_round(generation, buffered, iter(()), **options))


# Ends that somebody asks for.


def test_cancelled_responses_keep_their_tokens(engine, generate, reference, long_ones):
    first, second, *others = long_ones([65], 5)
    groups = [Group("a", [65], (first, second, *others)), Group("b", [70], (100, 101))]
    groups += [Group("c", [71], (102, 103)), Group("d", [72], (104,))]
    generation = generate(engine, *groups)
    generation.step()
    waiting = others[-1]
    with pytest.raises(KeyError, match="request 777 is unknown or has ended"):
        generation.cancel(first, 777)
    generation.cancel(first, waiting, first)
    generation.step()
    generation.cancel(second)
    # A whole group that has not begun.
    generation.cancel(104)
    with pytest.raises(KeyError, match="request 104 is unknown or has ended"):
        generation.cancel(104)
    result, expected = by_request(list(generation)), reference(groups)
    for request, n in ((first, 4), (second, 8), (waiting, 0), (104, 0)):
        completion, free = result.pop(request), expected.pop(request)
        assert completion.finish == CANCELLED
        assert completion.tokens.tolist() == free.tokens[:n].tolist()
    assert len(result) == 6
    assert_same(result, expected)


def test_a_row_whose_siblings_are_all_cancelled_is_free_again(engine, generate, long_ones):
    # Six of nine are under way in two rows and end with the first chunk; three wait.
    requests = long_ones([65], 9)
    generation = generate(engine, Group("a", [65], requests, max_new_tokens=4))
    generation.step()
    generation.cancel(*requests[6:])
    (done,) = generation
    assert [c.finish for c in done.completions] == [LENGTH] * 6 + [CANCELLED] * 3
    generation.submit(*(Group(i, [66], (900 + i,)) for i in range(3)))
    assert sorted(done.id for done in generation) == [0, 1, 2]


@pytest.mark.parametrize("busy", [1, 3])
def test_a_fork_is_a_new_request_with_the_tokens_so_far(engine, generate, long_ones, busy):
    # With three requests in its three slots, the fork goes to the other row.
    source, *others = long_ones([65], busy)
    group = Group("a", [65], (source, *others), max_new_tokens=20)
    generation = generate(engine, group)
    generation.step()
    assert generation.fork(source, 500)
    (done,) = generation
    assert done.group.requests == (source, *others, 500)
    result = by_request([done])
    copy = result.pop(500)
    # It equals a request of its id that begins with these tokens.
    begun = Completion(500, jax.tree.map(lambda x: x[:4], result[source].out), UNFINISHED)
    fresh = Group("b", [65], (500,), max_new_tokens=20, partial={500: begun})
    assert_same({500: copy}, by_request(list(generate(engine, fresh))))
    assert copy.tokens[:4].tolist() == result[source].tokens[:4].tolist()
    assert copy.tokens.tolist() != result[source].tokens.tolist()
    # And the others have not noticed.
    assert_same(result, by_request(list(generate(engine, group))))


def test_a_fork_keeps_the_numbers_that_its_source_has_used(engine, generate, long_ones):
    (source,) = long_ones([65], 1)
    generation = generate(engine)
    generation.submit(Group("a", [65], (source,)))
    generation.step()
    (begun,) = generation.stop()
    generation.submit(begun._replace(left={source: 5}))
    generation.admit()
    assert generation.fork(source, 500)
    (stopped,) = generation.stop()
    assert stopped.left == {source: 5, 500: 5}


def test_impossible_forks(engine, generate):
    generation = generate(engine, Group("a", [65], (0, 1, 2)), Group("b", [66], (3, 4, 5)))
    generation.admit()
    assert generation.fork(0, 9) is False
    with pytest.raises(KeyError, match="request 9 is not decoding"):
        generation.fork(9, 10)
    with pytest.raises(ValueError, match="request 3 is in use"):
        generation.fork(0, 3)
    with pytest.raises(ValueError, match="request -1 is in use, or not an integer"):
        generation.fork(0, -1)


# What is told.


def test_every_token_is_reported_once_and_in_order(engine, generate):
    reported = {}

    def on_tokens(group, request, start, out):
        assert out.tokens.shape == out.entropy.shape == out.version.shape
        reported.setdefault((group, request), []).append((start, out))

    groups = draw_groups(8, seed=7)
    generation = generate(engine, *groups, on_tokens=on_tokens)
    generation.step()
    rest = generation.stop()
    generation.submit(*rest)
    result = by_request(list(generation))
    assert {request for _, request in reported} == set(result)
    for (group, request), news in reported.items():
        reference = jax.tree.map(lambda *parts: np.concatenate(parts), *[out for _, out in news])
        assert [start for start, _ in news] == np.cumsum(
            [0, *[len(out.tokens) for _, out in news]]
        ).tolist()[:-1]
        jax.tree.map(np.testing.assert_array_equal, reference, result[request].out)
        assert request in next(g.requests for g in groups if g.id == group)
    assert max(map(len, reported.values())) > 3


def test_a_callback_may_cancel_and_fork(engine, generate, long_ones):
    first, second = long_ones([65], 2)
    reported = []

    def on_tokens(group, request, start, out):
        if request == first and start == 0:
            assert generation.fork(first, 500)
            generation.cancel(second)
        reported.extend([start] if request == 500 else [])

    group = Group("a", [65], (first, second), max_new_tokens=9)
    generation = generate(engine, group, on_tokens=on_tokens)
    (done,) = generation
    assert [c.request for c in done.completions] == [first, second, 500]
    assert done.completions[1].finish == CANCELLED and len(done.completions[1]) == 4
    # Of the copy nothing is told that its source was told of.
    assert reported[0] == 4


def test_a_callback_that_raises_gets_no_token_twice(engine, generate, long_ones):
    reported, requests = [], long_ones([65], 3)

    def on_tokens(group, request, start, out):
        reported.append((request, start))
        if len(reported) == 2:
            raise OSError("full")

    generation = generate(engine, Group("a", [65], requests), on_tokens=on_tokens)
    with pytest.raises(OSError, match="full"):
        list(generation)
    (done,) = generation
    assert [len(c) for c in done.completions] == [24] * 3
    assert sorted(reported) == sorted((r, start) for r in requests for start in range(0, 24, 4))


# Stop strings.


def text(ids):
    return "".join(chr(97 + i % 26) for i in ids)


def test_stop_strings_cut_at_the_token_that_completes_them(engine, generate, reference):
    groups = draw_groups(16, seed=8)
    stops = ("ab", "q", "zz")
    generation = generate(engine, *groups, stop_strings=stops, decode_text=text)
    for _ in range(4):
        generation.step()
        assert generation.slots.active.sum() == len(generation.decoding)
    generation.submit(*generation.stop())
    result, expected = by_request(list(generation)), reference(groups)
    cut = 0
    for request, completion in result.items():
        free = expected[request].tokens.tolist()
        ends = [n for n in range(1, len(free) + 1) if any(s in text(free[:n]) for s in stops)]
        n = ends[0] if ends else len(free)
        assert completion.tokens.tolist() == free[:n]
        assert completion.finish == (STOP if ends else expected[request].finish)
        np.testing.assert_allclose(
            completion.out.behavior_logp, expected[request].out.behavior_logp[:n], atol=1e-5
        )
        cut += bool(ends)
    assert 3 < cut < len(result)


@for_each(
    ("options", "error", "message"),
    [
        ({"stop_strings": ("a",)}, ValueError, "stop_strings and decode_text must be set together"),
        ({"decode_text": text}, ValueError, "stop_strings and decode_text must be set together"),
        ({"stop_strings": ("a", ""), "decode_text": text}, ValueError, "a stop string is empty"),
        ({"stop_strings": "abc", "decode_text": text}, TypeError, "stop_strings must be a"),
        ({"segment": 0}, ValueError, "segment must be above 0"),
        ({"version": 2**40}, ValueError, "version must be from 0 to"),
    ],
)
def test_bad_options_of_a_generation(engine, generate, options, error, message):
    with pytest.raises(error, match=message):
        generate(engine, **options)


def test_an_update_with_another_number_of_deltas(engine, generate, tiny):
    with pytest.raises(ValueError, match="update: the number of deltas must stay 1"):
        generate(engine).update(tiny[1], version=1, deltas=(jnp.zeros((1, 2, 2)), 1.0))


# All at once.
