"""Responses that advance in segments and go on in later batches, on a backend of numbers."""

import dataclasses

import jax
import numpy as np
import pytest
from rollout.collecting import Numbers, collected, rollout_of
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import Request, in_order, partial_rollouts, prioritized
from jaxrl_llm.curation.collectors import protocol
from jaxrl_llm.curation.collectors.protocol import sized
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout import Rollout
from jaxrl_llm.rollout.backends import Asked, Graded
from jaxrl_llm.rollout.begun import count_begun
from jaxrl_llm.rollout.collect import Limits
from jaxrl_llm.rollout.types import LENGTH, STOP, UNFINISHED
from jaxrl_llm.train.metrics import rollout_metrics

P, G, T, N = 2, 2, 8, 40
KEY = jax.random.key(0)
QUESTIONS = [Question(Prompt(f"prompt {i}", id=str(i)), [1, 2, 3 + i % 5]) for i in range(N)]
LIMITS = Limits(TextEncoder(jr.testing.ByteTokenizer(), 9), T, 10_000)


def length(place, member):
    """Of the response before its limit: short, of a full segment, or longer than T."""
    return (1, 2, 7, 3, 99, 4)[(3 * place + 2 * member) % 6]


class Segments(Numbers):
    """Writes its place, the member and the version into each token, and finishes in any order."""

    def __init__(self, seed=0, version=0, grades=None):
        super().__init__(seed)
        self.version, self.grades = version, grades

    def finish(self, asked):
        n, request = len(asked.requests), asked.request
        arrays = {k: np.zeros((1, n, T), np.float32) for k in ("behavior_logp", "model_logp")}
        tokens, version = np.zeros((1, n, T), np.int32), np.full((1, n, T), self.version)
        mask, finish = np.zeros((1, n, T), bool), np.zeros((1, n), np.int32)
        rewards = np.zeros(n, np.float32)
        for i in range(n):
            begin = asked.responses[i] if asked.responses else None
            first = 0 if begin is None else len(begin.tokens)
            member = int(begin.tokens[0]) % 10 if first else i
            limit = first if not request.sampled else request.limit or T
            end = min(length(asked.question, member), limit) if request.sampled else first
            tokens[0, i, :end] = asked.question * 10 + member
            mask[0, i, :end] = True
            arrays["behavior_logp"][0, i, :end] = -1 - self.version
            if first:
                arrays["behavior_logp"][0, i, :first] = begin.behavior_logp
                version[0, i, :first] = begin.version
            if not request.sampled:
                finish[0, i] = begin.finish
            elif end == length(asked.question, member):
                finish[0, i] = STOP
            else:
                finish[0, i] = UNFINISHED if request.pauses and end < T else LENGTH
            given = None if begin is None else begin.reward
            rewards[i] = 0.5 + member if given is None else given
            if self.grades is not None and given is None and finish[0, i] != UNFINISHED:
                self.grades.append((asked.question, member))
        fields = {"finish": finish, "version": version.astype(np.int32)}
        rollout = rollout_of(QUESTIONS[asked.question].tokens, tokens[0], mask, **fields, **arrays)
        return Graded(rollout, [""] * n, Scores(rewards, {}, finish[0] == UNFINISHED))


def collector_of(**options):
    collector = partial_rollouts(**{"segments": 4, "oversample": 2.0} | options)
    return sized(collector, group_size=G, max_new_tokens=T, num_groups=P)


def play(collector, state, step, first, backend=None, **options):
    options |= {"state": state, "first": first, "step": step, "version": step, "limits": LIMITS}
    options |= {"questions": QUESTIONS, "groups": (P, G), "key": jax.random.fold_in(KEY, step)}
    return collected(collector, backend or Segments(step, version=step), **options)


def run(collector, steps, *, seed=0, state=None, first=0, start=0, grades=None):
    """Batches one after the other; each begins where the one before ended."""
    state = collector.init(N) if state is None else state
    batches = []
    for step in range(start, steps):
        batch = play(collector, state, step, first, Segments(seed + step, step, grades))
        batches.append(batch)
        state, first = batch.state, first + batch.in_order
    return batches, first


def test_finish_is_the_samplers():
    assert protocol.UNFINISHED == UNFINISHED


def test_worked_batches():
    # Lengths of the two responses: prompt 0: 1 7; 1: 3 4; 2: 1 7; 3: 3 4; 4: 1 7; 5: 3 4; ...
    assert [[length(p, m) for m in range(2)] for p in range(4)] == [[1, 7], [3, 4]] * 2
    batches, taken = run(collector_of(), 3)
    # 4 in flight: after two segments of 2 tokens 1 and 3 have ended, and 0 and 2 go on.
    assert [batch.places for batch in batches] == [[1, 3], [0, 2], [4, 5]]
    assert [batch.in_order for batch in batches] == [4, 2, 2] and taken == 8
    first, second, third = (batch.rollout for batch in batches)
    assert first.mask.sum(-1).tolist() == [[3, 4], [3, 4]] and (first.version == 0).all()
    # The four tokens of the first batch, then three of the weights of the second.
    assert second.mask.sum(-1).tolist() == [[1, 7], [1, 7]]
    assert second.version[0, 1].tolist() == [0] * 4 + [1] * 4
    assert second.behavior_logp[0, 1].tolist() == [-1] * 4 + [-2] * 3 + [0]
    assert second.tokens[0, :, 0].tolist() == [0, 1] and second.tokens[1, :, 0].tolist() == [20, 21]
    assert batches[1].continued == 2 * (1 + 4)
    # Prompts 4 and 5 began in the second batch; 5 had ended there.
    assert batches[1].state.prompts.tolist() == [4, 5]
    assert third.mask.sum(-1).tolist() == [[1, 7], [3, 4]]
    assert third.version[0, 1].tolist() == [1] * 4 + [2] * 4 and (third.version[1] == 1)[:, 0].all()


@for_each("options", [{}, {"segments": 1}, {"oversample": 1.5, "segments": 8}])
def test_no_prompt_is_lost_or_trained_twice(options):
    collector = collector_of(**options)
    batches, taken = run(collector, 12)
    trained = [place for batch in batches for place in batch.places]
    waiting = batches[-1].state.prompts
    assert sorted(trained + waiting[waiting >= 0].tolist()) == list(range(taken))
    for batch in batches:
        for p, place in enumerate(batch.places):
            want = [min(length(place, member), T) for member in range(G)]
            assert sorted(batch.rollout.mask[p].sum(-1).tolist()) == sorted(want)
        assert batch.where.all() and (batch.rollout.finish != UNFINISHED).all()
        assert (batch.roles == 0).all() and batch.known is None


def test_each_response_is_graded_once():
    grades = []
    batches, _ = run(collector_of(), 6, grades=grades)
    assert len(grades) == len(set(grades))
    assert batches[1].scores.rewards.tolist() == [0.5, 1.5, 0.5, 1.5]


def test_stale_groups_begin_again():
    batches, taken = run(collector_of(max_staleness=0), 3)
    # 0 and 2 begin again in the second batch, 4 and 5 in the third.
    assert [batch.places for batch in batches] == [[1, 3], [0, 2], [5, 7]]
    for step, batch in enumerate(batches):
        assert (batch.rollout.version[batch.rollout.mask] == step).all() and batch.continued == 0
    trained = [place for batch in batches for place in batch.places]
    waiting = batches[-1].state.prompts
    assert sorted(trained + waiting[waiting >= 0].tolist()) == list(range(taken))


def test_a_source_learns_from_the_groups_that_trained():
    source = prioritized(jr.curation.learnability, prior=(2.0, 1.0))
    collector = collector_of(source=source)
    state = collector.init(N)

    class Halves(Segments):
        def finish(self, asked):
            done = super().finish(asked)
            return done._replace(
                scores=done.scores._replace(rewards=np.float32([0.5] * len(done.texts)))
            )

    batch = play(collector, state, 0, 0, Halves())
    seen = batch.state.source.alpha + batch.state.source.beta - 3
    assert sorted(np.flatnonzero(seen)) == sorted(batch.places) and seen.sum() == P * G
    assert batch.in_order == 0


def test_groups_that_go_on_are_proposed_first():
    collector = collector_of()
    batches, first = run(collector, 1)
    state = batches[0].state
    empty = jr.curation.Collection(P, G, 1, version=1)
    at_once, _ = collector.propose(state, KEY, empty, 5)
    # Of each group that goes on: what has ended, then what has not.
    assert [(each.prompt, each.sampled, each.limit) for each in at_once] == [
        (0, False, None),
        (0, True, 6),
        (2, False, None),
        (2, True, 6),
        (None, True, 2),
    ]


@for_each(
    ("options", "error", "message"),
    [
        ({"segments": 2.5}, TypeError, "segments must be an integer; got 2.5"),
        ({"segments": 0}, ValueError, "segments must be above 0"),
        ({"oversample": 1.0}, ValueError, "oversample must be above 1 and finite; got 1.0"),
        ({"max_staleness": -1}, ValueError, "max_staleness"),
    ],
)
def test_options(options, error, message):
    with pytest.raises(error) as raised:
        partial_rollouts(**options)
    assert message in str(raised.value)


def test_a_source_of_other_groups_is_refused():
    class Hints:
        init = staticmethod(in_order().init)
        observe = staticmethod(in_order().observe)

        def propose(self, state, key, collection, count):
            return (Request(G, text="help"),) * count, state

    collector = collector_of(source=Hints())
    with pytest.raises(ValueError, match="only groups of G rollouts of the prompts themselves"):
        play(collector, collector.init(N), 0, 0)


def test_its_state_has_the_sizes_of_a_run():
    collector = partial_rollouts(max_staleness=1)
    assert repr(collector) == "partial_rollouts(segments=8, oversample=2.0, max_staleness=1)"
    with pytest.raises(ValueError, match="the size of its state is unknown before for_run"):
        collector.init(N)
    assert collector_of().init(N).tokens.shape == (P, G, T)


@for_each(
    "collector",
    [
        partial_rollouts(segments=4),
        partial_rollouts(segments=8, oversample=1.5),
        jr.curation.windowed(segments=4),
        jr.curation.windowed(segments=1),
    ],
    ids=repr,
)
def test_what_goes_on_counts_once(collector):
    """In the batch in which it began: a prompt of the data is one group of G rollouts."""
    made = sized(collector, group_size=G, max_new_tokens=T, num_groups=P)
    batches, _ = run(made, 6)
    for batch in batches:
        assert (batch.groups, batch.rollouts) == (batch.in_order, G * batch.in_order)
    # More rollouts began than were asked to go on.
    assert sum(batch.rollouts for batch in batches) <= G * (6 * P + 2 * P)


def test_a_batch_in_which_nothing_ended_has_no_sampled_reward():
    """The first window of long responses; their batch has a reward of 0."""
    made = sized(jr.curation.windowed(segments=8), group_size=G, max_new_tokens=T, num_groups=P)
    questions = [n for n in range(N) if min(length(n, 0), length(n, 1)) > 1][:P]
    batch = play(made, made.init(N), 0, 0, next_places=lambda count: questions)
    metrics = rollout_metrics(batch, batch.rollout, ages=None)
    assert np.isnan(batch.reward) and "sampled_reward" not in metrics
    assert all(np.isfinite(value) for value in metrics.values())
    later = run(made, 3)[0][-1]
    assert rollout_metrics(later, later.rollout, ages=None)["sampled_reward"] == later.reward > 0


def test_the_first_to_continue_a_pause_is_the_same_rollout():
    """Another one is a fork, as is one from an earlier place or from the data."""

    def asked(number, begins=(), **changes):
        responses = tuple(
            protocol.Response(np.int32(x), version=np.zeros(len(x), np.int32), finish=UNFINISHED)
            for x in begins
        )
        request = Request(len(begins) or 2, responses=responses, **changes)
        return Asked(0, tuple(range(number, number + request.rollouts)), request, None, responses)

    root = asked(0, pauses=True, limit=2)
    rollout = Rollout(
        *(None,) * len(Rollout._fields),
    )._replace(
        tokens=np.int32([[[1, 2], [1, 3]]]),
        mask=np.ones((1, 2, 2), bool),
        finish=np.int32([[UNFINISHED, STOP]]),
    )
    finished = {root: Graded(rollout, ["", ""], Scores(np.zeros(2), {}, np.zeros(2, bool)))}
    for begins, forks in (
        ([[1, 2]], 0),
        ([[1, 2], [1, 2]], 1),
        ([[1, 2], [1]], 1),
        ([[1, 3]], 1),
        ([[1], [2]], 2),
    ):
        more = asked(2, begins, extends=0)
        assert count_begun([root, more], finished) == (1, 2 + forks), begins
    assert count_begun([asked(0, [[5, 6], [7]])], {}) == (0, 0)  # of an earlier batch
    told = asked(0, [[5, 6]])
    unknown = tuple(x._replace(version=None) for x in told.responses)
    assert count_begun([dataclasses.replace(told, responses=unknown)], {}) == (1, 1)
