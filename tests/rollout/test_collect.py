"""Collectors played on a backend of numbers, and on the sampler of a tiny model."""

import dataclasses
import math
import types
from functools import partial

import jax
import numpy as np
import pytest
from rollout.collecting import Numbers, collected, rollout_of
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import (
    Decision,
    Request,
    Response,
    Row,
    in_order,
    prioritized,
    refill,
    two_phase,
)
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import sized
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout.backends import Asked, Graded, SamplerBackend
from jaxrl_llm.rollout.collect import Limits, _content, mean_reward

P, G, N = 3, 4, 50
KEY = jax.random.key(0)
QUESTIONS = [Question(Prompt(f"prompt {i}", id=str(i)), [1, 2, 3 + i % 5]) for i in range(N)]


def solvable(place):
    """Whether the rewards of a prompt differ: of two in five."""
    return place % 5 in (1, 4)


def graded(asked):
    """A group whose tokens are the numbers of its requests."""
    n = len(asked.requests)
    rewards = np.float32(np.arange(n) % 2 if solvable(asked.question) else np.ones(n))
    tokens = np.repeat(np.int32(asked.requests)[:, None], 2, axis=1)
    rollout = rollout_of(QUESTIONS[asked.question].tokens, tokens)
    scores = Scores(rewards, {"right": rewards}, np.zeros(n, bool))
    return Graded(rollout, [str(i) for i in asked.requests], scores)


class Shuffled(Numbers):
    """Finishes what is queued one by one, with scores that a function of both may change."""

    def __init__(self, seed=0, *, spare=0, change=None):
        super().__init__(seed, spare=spare)
        self.change = change

    def finish(self, asked):
        done = graded(asked)
        scores = done.scores if self.change is None else self.change(asked, done.scores)
        return done._replace(scores=scores)


play = partial(collected, questions=QUESTIONS, groups=(P, G))


def more_where_mixed(accuracy):
    """Three more where some are right."""
    return np.where((accuracy > 0) & (accuracy < 1), 3, 0)


def one_more_each(rewards, where, budget):
    """One more of each group, as long as the budget of a round allows it."""
    return np.full(len(rewards), int(budget >= len(rewards)))


COLLECTORS = {
    "in_order": in_order(),
    "refill": refill(jr.curation.informative_groups),
    "refill_oversampled": refill(jr.curation.informative_groups, oversample=2.5),
    "refill_bounded": refill(jr.curation.informative_groups, max_rounds=1),
    "refill_nothing": refill(lambda rewards: np.zeros(rewards.shape, bool), max_rounds=2),
    "prioritized": prioritized(jr.curation.learnability),
    "two_phase": two_phase(more_where_mixed, max_rollouts=6, first=2),
    "three_rounds": two_phase(one_more_each, max_rollouts=5, first=2, rounds=2),
    "refill_by_length": refill(lambda rewards, lengths: lengths > 1),
}


@for_each(
    ("name", "places", "asked"),
    [
        ("in_order", [0, 1, 2], 3),
        ("refill", [1, 4, 6], 7),  # the third that differs is the seventh in the order
        ("refill_oversampled", [1, 4, 6], 8),
        ("refill_bounded", [0, 1, 2], 3),
        ("refill_nothing", [0, 1, 2], 6),
        ("refill_by_length", [0, 1, 2], 3),
    ],
)
def test_worked_batches(name, places, asked):
    batch = play(COLLECTORS[name], Shuffled(0))
    assert (batch.places, batch.groups, batch.in_order) == (places, asked, asked)
    takes_part = [name != "refill_nothing" and (name != "refill_bounded" or i == 1) for i in places]
    np.testing.assert_array_equal(batch.where, np.repeat([takes_part], G, 0).T)
    assert [q.prompt.id for q in batch.questions] == [str(i) for i in places]
    numbers = [[int(text) for text in group] for group in batch.texts]
    np.testing.assert_array_equal(batch.rollout.tokens[..., 0], numbers)
    np.testing.assert_array_equal(batch.scores.rewards, batch.scores.reward_components["right"])


def test_prioritized_prefers_what_it_believes_to_be_half_solved():
    collector = COLLECTORS["prioritized"]
    state, seen = collector.init(N), []
    for step in range(100):
        batch = play(collector, Shuffled(step), state=state, step=step, key=jax.random.key(step))
        state, seen = batch.state, seen + batch.places
        assert batch.in_order == 0 and len(set(batch.places)) == P
    # Of two in five prompts the rewards differ: 1/2 there, 1 elsewhere.
    assert np.mean([solvable(place) for place in seen[-120:]]) > 0.65
    counts = np.bincount(seen, minlength=N)
    np.testing.assert_allclose(state.alpha + state.beta, 2 + G * counts)
    half = np.array([solvable(place) for place in range(N)])
    np.testing.assert_allclose(state.beta, np.where(half, 1 + G / 2 * counts, 1))


def test_a_new_prompt_has_first_rollouts_that_do_not_train():
    collector = prioritized(jr.curation.learnability, prior=(0.5, 0.5), retain=0.875, first=8)
    fresh = collector.init(N)
    # Prompt 7 is the one that has been visited.
    alpha, beta = fresh.alpha.copy(), fresh.beta.copy()
    alpha[7], beta[7] = 3.0, 3.0
    state, collection = fresh._replace(alpha=alpha, beta=beta), jr.curation.Collection(N, 2)
    requests, _ = collector.propose(state, KEY, collection, N)
    assert [x.rollouts for x in requests] == [2 if x.prompt == 7 else 10 for x in requests]
    outcomes = []
    for request in requests:
        n = request.rollouts
        rewards = np.zeros(n, np.float32)
        rewards[: 3 if n > 2 else 0], rewards[-1] = 1.0, 1.0  # of the first 8 three are right
        where = np.ones(n, bool)
        if request.prompt == 9:
            where[2:8] = False  # graded are two of the first, both right
        if request.prompt == 5:
            where[:8] = False
        lengths, cut = np.full(n, 4, np.int32), np.zeros(n, bool)
        outcomes.append(jr.curation.Outcome(request.prompt, rewards, where, lengths, cut, {}))
    done = collection._replace(requests=requests, outcomes=tuple(outcomes))
    decision, belief = collector.observe(state, done)
    rows = {x.prompt: row for x, row in zip(requests, decision.rows, strict=True)}
    place = {x.prompt: i for i, x in enumerate(requests)}
    assert rows[7].members == ((place[7], 0), (place[7], 1)) and rows[7].segments == ((), ())
    assert rows[4].members == ((place[4], 8), (place[4], 9))
    assert rows[4].segments == (((0, 0.375),),) * 2
    assert rows[9].segments == (((0, 1.0),),) * 2 and rows[5].segments == ((), ())
    # N0 = 8: 3.111 and 4.889 of 3 in 8, 6.667 and 1.333 of 2 in 2; then one right and one wrong.
    for prompt, start in {4: (3.11111, 4.88889), 9: (6.66667, 1.33333), 5: (0.5, 0.5)}.items():
        got = belief.alpha[prompt], belief.beta[prompt]
        # A belief returns to its prior as it forgets.
        np.testing.assert_allclose(got, 0.875 * np.array(start) + 0.125 * 0.5 + 1, rtol=1e-5)
    np.testing.assert_allclose((belief.alpha[7], belief.beta[7]), (3.6875, 3.6875))


def test_a_batch_larger_than_the_data_begins_again():
    collector = prioritized(jr.curation.learnability)
    small = jr.curation.Collection(5, G)
    requests, _ = collector.propose(collector.init(2), KEY, small, 5)
    places = [request.prompt for request in requests]
    assert sorted(places[:2]) == [0, 1] and places == (places[:2] * 3)[:5]


def given(make, **options):
    """A collector with these options and what else it needs."""
    needed = {
        prioritized: {"score": jr.curation.learnability},
        two_phase: {"allocate": more_where_mixed, "max_rollouts": 8},
        refill: {"rule": jr.curation.informative_groups},
    }
    return make(**needed[make] | options)


@for_each(
    ("make", "options", "error", "message"),
    [
        (prioritized, {"score": None}, TypeError, "score must be a function; got None"),
        (prioritized, {"choose": "best"}, ValueError, "choose must be one of 'weight', 'top'"),
        (prioritized, {"retain": 1.5}, ValueError, "retain must be in [0, 1]"),
        (prioritized, {"candidates": 0}, ValueError, "candidates must be above 0"),
        (prioritized, {"prior": (0.0, 1.0)}, ValueError, "must be above 0"),
        (prioritized, {"first": -1}, ValueError, "first must be an integer above 0; got -1"),
        (prioritized, {"first": 8}, ValueError, "first=8 needs a retain below 1"),
        (two_phase, {"allocate": None}, TypeError, "allocate must be a function; got None"),
        (two_phase, {"max_rollouts": 2.0}, TypeError, "max_rollouts must be an integer; got 2.0"),
        (two_phase, {"first": 0}, ValueError, "first must be above 0"),
        (two_phase, {"first": 9}, ValueError, "first must be at most max_rollouts 8; got 9"),
        (two_phase, {"rounds": True}, TypeError, "rounds must be an integer; got True"),
        (refill, {"max_rounds": 0}, ValueError, "max_rounds must be above 0; got 0"),
        (refill, {"max_rounds": 2.0}, TypeError, "max_rounds must be an integer; got 2.0"),
        (refill, {"oversample": 0.5}, ValueError, "must be from 1 to max_rounds 10; got 0.5"),
        (refill, {"oversample": 11.0}, ValueError, "oversample must be from 1 to max_rounds 10"),
        (refill, {"oversample": float("nan")}, ValueError, "oversample must be from 1"),
        (refill, {"rule": "all"}, TypeError, "rule must be a function; got 'all'"),
    ],
)
def test_options_of_collectors(make, options, error, message):
    with pytest.raises(error) as raised:
        given(make, **options)
    assert make.__name__ in str(raised.value) and message in str(raised.value)


@for_each(
    ("reward", "score", "message"),
    [
        (1.5, jr.curation.learnability, "rewards must be in [0, 1]; prompt"),
        (1.0, lambda rates: rates * np.nan, "the score is NaN for every prompt"),
    ],
)
def test_what_beliefs_cannot_take_is_one_sentence(reward, score, message):
    generous = Shuffled(change=lambda asked, scores: scores._replace(rewards=np.full(G, reward)))
    with pytest.raises(ValueError) as error:
        play(prioritized(score), generous)
    assert message in str(error.value)


class Wandering:
    """Asks for a group that it did not propose, so that the numbers of those ahead shift."""

    needs = jr.curation.Needs(asks_ahead=True)

    def init(self, num_prompts):
        return ()

    def propose(self, state, key, collection, count):
        return (Request(G),) * count, state

    def observe(self, state, collection):
        asked = len(collection.requests)
        if asked == 0:
            return Decision(ask=1), state
        if collection.waiting:
            return Decision(), state
        if asked == 1:
            return Decision(requests=(Request(2),)), state
        if asked == 2:
            return Decision(ask=P), state
        return Decision(rows=tuple(Row(((i, 0),)) for i in range(2, 2 + P))), state


@for_each("spare", [0, 1, 2, 3, 5, 9])
def test_what_was_sampled_ahead_in_vain_is_sampled_again(spare):
    backend = Shuffled(0, spare=spare)
    batch = play(Wandering(), backend)
    assert batch.rollout.tokens[:, 0, 0].tolist() == [6, 10, 14] and batch.groups == 2 + P


@for_each(
    ("collector", "parts"),
    [
        (prioritized(lambda rates: rates[:3]), ["(50,)", "(3,)"]),
        (refill(lambda rewards: rewards.any(-1)), ["refill(<lambda>, max_rounds=10)", "(3, 4)"]),
    ],
)
def test_a_score_or_rule_of_the_wrong_shape_is_refused(collector, parts):
    with pytest.raises(ValueError) as error:
        play(collector, Shuffled(0))
    assert all(part in str(error.value) for part in parts)


def test_more_rollouts_go_to_the_groups_that_the_allocator_names():
    batch = play(COLLECTORS["two_phase"], Shuffled(0))
    assert batch.places == [0, 1, 2] and (batch.groups, batch.rollouts) == (3, 9)
    np.testing.assert_array_equal(batch.where.sum(-1), [2, 5, 2])
    assert batch.rollout.tokens[1, :, 0].tolist() == [2, 3, 6, 7, 8, 0]
    batch = play(COLLECTORS["three_rounds"], Shuffled(0))
    # P G = 12 rollouts: 6 first, then 6 // 2 and 3 more.
    np.testing.assert_array_equal(batch.where.sum(-1), [4, 4, 4])
    assert batch.rollout.tokens[..., 0].tolist() == [
        [0, 1, 6, 9, 0],
        [2, 3, 7, 10, 0],
        [4, 5, 8, 11, 0],
    ]


@for_each(
    ("allocate", "message"),
    [
        (lambda accuracy: np.full(3, -1), "gives group 0, which has 2 rollouts, -1 more"),
        (lambda accuracy: np.arange(3) * 4, "gives group 2, which has 2 rollouts, 8 more; from 0"),
        (lambda accuracy: np.ones(3), "must return 3 integers; got shape (3,) of float64"),
        (lambda accuracy: np.ones(2, int), "must return 3 integers; got shape (2,)"),
    ],
)
def test_allocators_that_make_no_batch_are_refused(allocate, message):
    backend = Shuffled(0)
    with pytest.raises(ValueError) as error:
        play(two_phase(allocate, max_rollouts=6, first=2), backend)
    assert message in str(error.value) and backend.closed


def test_the_mean_reward_is_of_all_groups_that_were_asked_for():
    batch = play(COLLECTORS["refill"], Shuffled(0))
    assert batch.reward == pytest.approx((4 * 1.0 + 3 * 0.5) / 7)
    assert float(batch.scores.rewards.mean()) == 0.5
    assert math.isnan(mean_reward([]))  # of a batch whose sampled requests have all to finish


def test_rollouts_without_a_reward_take_no_part():
    def fail_one(asked, scores):
        failed = np.arange(G) == asked.question
        return scores._replace(failed=failed, rewards=scores.rewards * ~failed)

    batch = play(in_order(), Shuffled(change=fail_one))
    np.testing.assert_array_equal(batch.where, np.arange(G) != np.arange(P)[:, None])
    assert batch.failures == 3 and batch.scores.failures == 3
    assert batch.reward == pytest.approx((3 + 1 + 3) / 9)


def test_a_reward_of_zero_after_a_failure_takes_part_and_nan_components_stay():
    def zero_one(asked, scores):
        zeroed = np.arange(G) == asked.question
        parts = {"style": np.where(zeroed, np.nan, np.float32(asked.question))}
        rewards = scores.rewards * ~zeroed
        return scores._replace(zeroed=zeroed, reward_components=parts, rewards=rewards)

    batch = play(in_order(), Shuffled(change=zero_one))
    assert batch.where.all() and batch.failures == 3
    same = np.arange(G) == np.arange(P)[:, None]
    style = batch.scores.reward_components["style"].reshape(P, G)
    np.testing.assert_array_equal(style, np.where(same, np.nan, np.arange(P)[:, None]))
    assert batch.reward == pytest.approx((3 + 1 + 3) / 12)


def odd(**functions):
    """A collector with the functions of ``in_order`` but for these."""
    plain = in_order()
    names = ("init", "propose", "observe")
    return types.SimpleNamespace(**{n: functions.get(n, getattr(plain, n)) for n in names})


def decide(*rows):
    def observe(state, collection):
        if not collection.requests:
            return Decision(ask=P), state
        return (Decision() if collection.waiting else Decision(rows=rows)), state

    return observe


WHOLE = tuple(Row(((i, 0),)) for i in range(P))


@for_each(
    ("functions", "message"),
    [
        ({"observe": lambda s, c: (Decision(), s)}, "neither completes the batch of 3 groups nor"),
        ({"propose": lambda s, k, c, n: ((Request(G),), s)}, "proposes 1 groups, but 3 are needed"),
        ({"propose": lambda s, k, c, n: ((Request(0),) * n, s)}, "asks for 0 rollouts"),
        ({"propose": lambda s, k, c, n: ((Request(G, N),) * n, s)}, "asks for prompt 50"),
        ({"propose": lambda s, k, c, n: ((Request(G, extends=3),) * n, s)}, "of request 3 in req"),
        ({"observe": decide(*WHOLE[:2])}, "decides on 2 rows; a batch has 3"),
        ({"observe": decide(*WHOLE[:2], Row(()))}, "row 2 has 0 members; a group has 1 to 4"),
        ({"observe": decide(*WHOLE[:2], Row(((7, 0),)))}, "row 2 names request 7, which has not"),
        ({"observe": decide(*WHOLE[:2], Row(((2, 4),)))}, "row 2 names rollout 4 of request 2"),
        ({"observe": decide(*WHOLE[:2], Row(((1, 0), (2, 0))))}, "row 2 mixes the prompts"),
    ],
)
def test_a_collector_that_makes_no_batch_is_refused(functions, message):
    backend = Shuffled(0)
    with pytest.raises(ValueError) as error:
        play(odd(**functions), backend)
    assert message in str(error.value) and backend.closed


def grade(questions, texts):
    """Rewards that differ within a group for prompts of an even last token."""
    rows = [
        (i % 2 if question.tokens[-1] % 2 == 0 else 1)
        for question, group in zip(questions, texts, strict=True)
        for i, _ in enumerate(group)
    ]
    return Scores(np.float32(rows), {}, np.zeros(len(rows), bool))


@for_each("sizes", [(4, 4, 4), (9, 1, 2)])
def test_groups_of_any_size_are_sampled_in_rows(tiny, sizes):
    model, params = tiny
    sample = jr.rollout.make_sampler(model, max_new_tokens=2, group_size=G)

    def round_of(prompts, ids):
        return jax.device_get(sample(params, KEY, prompts, request_ids=ids))

    backend = SamplerBackend(
        round_of, QUESTIONS, decode=str, grade=grade, num_groups=P, group_size=G
    )
    first = np.cumsum([0, *sizes])
    asked = [Asked(i, tuple(range(first[i], first[i + 1]))) for i in range(3)]
    backend.submit(asked)
    done = {}
    while len(done) < 3:
        done |= backend.wait()
    for each in asked:
        one = sample(
            params,
            KEY,
            [QUESTIONS[each.question].tokens] * 3,
            request_ids=np.resize(each.requests, (3, G)),
        )
        n = len(each.requests)
        tokens = np.asarray(one.tokens).reshape(12, -1)[:n]
        np.testing.assert_array_equal(done[each].rollout.tokens[0], tokens)
        assert len(done[each].texts) == len(done[each].scores.rewards) == n


@dataclasses.dataclass(frozen=True)
class OnceEach:
    """Each prompt once; there are no more than those of the data."""

    size: int

    def init(self, num_prompts):
        return ()

    def propose(self, state, key, collection, count):
        places = range(self.size)[len(collection.requests) :][:count]
        return tuple(Request(collection.group_size, place) for place in places), state

    def observe(self, state, collection):
        return in_order().observe(state, collection)


def rounds_of_numbers(size, rounds, grade):
    """The sampler's backend for so many groups; the tokens are the numbers of the requests."""

    def round_of(prompts, ids):
        rounds.append(ids[:, 0].tolist())
        tokens = np.repeat(np.int32(ids)[..., None], 2, axis=-1)
        one = [rollout_of(*each) for each in zip(prompts, tokens, strict=True)]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *one)

    more = {"decode": str, "grade": grade}
    return SamplerBackend(round_of, QUESTIONS, num_groups=size, group_size=G, **more)


def test_a_source_with_few_prompts_left_completes_its_batch():
    """The sampler has seven rows to spare, and one prompt is left to sample ahead."""

    def not_the_third(rewards):
        return np.broadcast_to((np.arange(len(rewards)) != 2)[:, None], rewards.shape)

    rounds, size = [], 8
    backend = rounds_of_numbers(size, rounds, grade)
    collector = refill(not_the_third, max_rounds=2, source=OnceEach(10))
    batch = collected(collector, backend, questions=QUESTIONS[:10], groups=(size, G))
    assert batch.places == [0, 1, 3, 4, 5, 6, 7, 8] and batch.where.all()
    # Of the second round, two rows are of groups, and the others repeat the first.
    assert rounds[1] == [8 * G, 9 * G] + [8 * G] * 6 and len(rounds) == 2


def test_a_replayed_batch_samples_and_grades_only_what_it_needs():
    """Stored groups leave half of the sampler's rows empty."""

    def mixed_grade(questions, texts):
        graded.extend(questions)
        sizes = [g for group in texts for g in range(len(group))]
        rewards = np.float32(np.arange(len(sizes)) % 2)
        return Scores(rewards, {}, np.zeros(len(sizes), bool))

    graded, rounds, size = [], [], 8
    collector = sized(
        jr.curation.replayed(capacity=size, share=0.5),
        group_size=G,
        max_new_tokens=2,
        num_groups=size,
    )
    limits = Limits(TextEncoder(jr.testing.ByteTokenizer(), 30, chat=False), 2, 259)
    state, needed = None, []
    for step in range(2):
        backend = rounds_of_numbers(size, rounds, mixed_grade)
        options = {"state": state, "step": step, "limits": limits}
        batch = collected(collector, backend, questions=QUESTIONS, groups=(size, G), **options)
        state = batch.state
        needed.append((len(graded), batch.tokens))
        graded.clear()
    assert needed == [(8, 8 * G * 2), (4, 4 * G * 2)] and len(rounds) == 2


def test_what_is_built_of_refill_samples_ahead():
    one = refill(jr.curation.informative_groups)
    for collector in (one, jr.curation.replayed(capacity=4, share=0.5, source=one)):
        assert needs_of(collector).asks_ahead
    for collector in (in_order(), jr.curation.predicted(len, len), jr.curation.judged()):
        assert not needs_of(collector).asks_ahead


@for_each("together", [True, False])
def test_the_same_draws_are_asked_for_once(together):
    class Twice(type(in_order())):
        def observe(self, state, collection):
            asked = len(collection.requests)
            if asked < P or None in collection.outcomes[:P]:
                return super().observe(state, collection)
            again = (Request(1, extends=0, draws_of=(0,)),)
            return Decision(requests=again * 2 if together else again), state

    with pytest.raises(ValueError) as error:
        play(Twice(), Shuffled(0))
    assert "asks twice for the draws of rollouts (0,) of request 0" in str(error.value)


def test_requests_that_differ_in_an_array_are_not_the_same():
    def content(tokens):
        request = Request(1, 0, responses=(Response(tokens),), sampled=False)
        return _content(request, request.responses)

    assert content(np.int32([1, 2])) == content(np.int32([1, 2]))
    assert content(np.int32([1, 2])) != content(np.int32([1, 3]))
    assert _content(Request(2, 3), ()) == b"" != _content(Request(2, 3, limit=4), ())


def test_a_collector_reads_what_ends_a_response():
    class OtherEnd(jr.testing.ByteTokenizer):
        """Ends turns with a token that it does not name as EOS, as many base models do."""

        eos_ids = (258,)

    seen = set()

    class Reading(type(in_order())):
        def observe(self, state, collection):
            seen.add(collection.stop_ids)
            return super().observe(state, collection)

    for chat, ends in ((True, (258, 257)), (False, (258,))):
        limits = Limits(TextEncoder(OtherEnd(), 30, chat=chat), 2, 259)
        play(Reading(), Shuffled(0), limits=limits)
        assert seen == {ends}
        seen.clear()
