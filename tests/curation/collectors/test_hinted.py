"""Collectors with help: what is asked again, with which message, and what a row is made of."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation
from jaxrl_llm.curation import (
    DEMONSTRATION,
    HINTED,
    JUDGE,
    OWN,
    Collection,
    Outcome,
    Request,
    Response,
)
from jaxrl_llm.curation.collectors.hints.hinted import GuidedGroup, _drawn_alike
from jaxrl_llm.curation.collectors.protocol import (
    collector_parts,
    declares,
    more_of,
    parts_with_sizes,
    sized,
)
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.rollout.collect import Limits, _Book
from jaxrl_llm.rollout.types import LENGTH, STOP

P, G, N = 3, 4, 7
KEY = jax.random.key(0)
DATA = [
    {
        "text": f"question {i}",
        "id": f"q{i}",
        "answer": str(i),
        "hints": [f"weak {i}", f"strong {i}"],
        "demonstration": f"solution {i} is {i}",
    }
    for i in range(N)
]
HARD = {1, 4}  # prompts that no plain rollout solves


def reward_of(request, prompt):
    """Right where the prompt is easy, or a strong hint is in the message."""
    solved = prompt not in HARD or "strong" in (request.text or "")
    return [float(solved and j % 2 == 0) for j in range(request.rollouts)]


def outcome_of(request, prompt, number, rewards=reward_of):
    """Responses whose tokens are the numbers of request and rollout."""
    responses = request.responses
    if request.sampled:
        begins = responses or (Response(np.zeros(0, np.int32)),) * request.rollouts
        responses = tuple(
            Response(np.int32([*encode(x.tokens), 100 * number + j]), np.zeros(1))
            for j, x in enumerate(begins)
        )
    r = np.float32(rewards(request, prompt))
    if not request.sampled:
        r = np.float32(
            [x if y.reward is None else y.reward for x, y in zip(r, responses, strict=True)]
        )
    n = len(r)
    texts = tuple(f"text {number}.{j}" for j in range(n))
    where, lengths = np.ones(n, bool), np.ones(n, np.int32)
    return Outcome(prompt, r, where, lengths, ~where, {"right": r}, responses, texts)


def encode(text):
    return list(text.encode()) if isinstance(text, str) else list(text)


def decode(tokens):
    return bytes(int(x) for x in tokens).decode()


def play(collector, *, state=None, step=0, rewards=reward_of, order=None, data=DATA, change=None):
    """Plays a batch: requests, outcomes, rows, state. Outcomes come all at once, or in an order."""
    state = collector.init(len(data)) if state is None else state
    requests, outcomes, prompts, queue = [], [], [], []
    cursor = itertools.count(step * P)
    draw = None if order is None else np.random.default_rng(order)
    for _ in range(200):
        batch = Collection(
            P, G, step, tuple(requests), tuple(outcomes), data, encode=encode, decode=decode
        )
        decision, learned = collector.observe(state, batch)
        if decision.rows is not None:
            return requests, outcomes, decision.rows, learned
        if decision.ask or decision.requests:
            one_by_one = draw is not None
            fresh = []
            if decision.ask and not one_by_one:
                fresh, state = collector.propose(state, KEY, batch, decision.ask)
            for _ in range(decision.ask if one_by_one else 0):
                asked = batch._replace(
                    requests=(*requests, *fresh), outcomes=(*outcomes, *[None] * len(fresh))
                )
                one, state = collector.propose(state, KEY, asked, 1)
                fresh += one
            for request in (*fresh, *decision.requests):
                prompt = request.prompt
                if request.extends is not None:
                    prompt = prompts[request.extends]
                elif prompt is None:
                    prompt = next(cursor) % len(data)
                queue.append(len(requests))
                requests.append(request)
                prompts.append(prompt)
                outcomes.append(None)
        assert queue, "nothing is asked for"
        done = queue if draw is None else [queue[draw.integers(len(queue))]]
        for i in done:
            outcomes[i] = outcome_of(requests[i], prompts[i], i, rewards)
            outcomes[i] = change(requests[i], outcomes[i]) if change else outcomes[i]
        queue = [i for i in queue if outcomes[i] is None]
    raise AssertionError("the batch has no end")


def rewards_of(row, outcomes):
    return [float(outcomes[i].rewards[j]) for i, j in row.members]


TIERS = jr.bind(curation.tier_messages, template="{question}: {hint}")
NURL = curation.hinted(curation.ladder(jr.bind(TIERS, column="hints"), plain=1))


# --- messages --------------------------------------------------------------------------------


def test_messages():
    # Tiers are cumulative and limited.
    row = {"text": "q", "hints": [["a", "b"], "c"]}
    assert TIERS(row) == ("q: a", "q: a b", "q: c")
    assert TIERS(row, most=2) == ("q: a", "q: a b")
    assert TIERS({"text": "{q}", "hints": ["{x}"]}) == ("{q}: {x}",)  # braces are only text
    assert TIERS({"text": "q", "hints": []}) == ()

    # Shares of a solution round half to even.
    row = {"text": "q", "demonstration": "x" * 101}
    shown = curation.share_messages(row, template="{question}{hint}")
    assert [len(text) - 1 for text in shown] == [25, 50, 76]


# --- the ladder ------------------------------------------------------------------------------


def test_ladders():
    # Nurl samples all but one again with the clue.
    collector = curation.hinted(curation.ladder(jr.bind(TIERS, most=1), plain=1))
    requests, outcomes, rows, _ = play(collector)
    assert [r.rollouts for r in requests] == [G, G, G, G - 1]
    assert requests[3].text == "question 1: weak 1" and requests[3].role == HINTED
    assert requests[3].extends == 1 and not requests[3].train_as_prompt
    assert rows[1].members == ((1, 0), (3, 0), (3, 1), (3, 2))
    assert rows[0].members == tuple((0, j) for j in range(G))

    # A ladder stops at the first message that helps.
    requests, outcomes, rows, _ = play(curation.hinted(curation.ladder(TIERS)), step=1)
    # Prompts 3, 4 and 5, of which 4 is hard: weak, then strong.
    assert [r.text for r in requests[3:]] == ["question 4: weak 4", "question 4: strong 4"]
    assert [r.round for r in requests] == [0, 0, 0, 1, 2]
    assert rows[1].members == tuple((4, j) for j in range(G))
    assert rewards_of(rows[1], outcomes) == [1.0, 0.0, 1.0, 0.0]
    weak = curation.hinted(curation.ladder(jr.bind(TIERS, most=1)))
    requests, outcomes, rows, _ = play(weak, step=1)
    assert rows[1].members == tuple((3, j) for j in range(G))  # also where it fails again
    assert not any(rewards_of(rows[1], outcomes))

    # Ghpo compares the accuracy and not the format.
    def formatted(request, outcome):
        parts = {"accuracy": outcome.rewards, "format": np.ones_like(outcome.rewards)}
        return outcome._replace(rewards=outcome.rewards + 0.5, reward_components=parts)

    ladder = curation.ladder(curation.share_messages, metric="accuracy")
    requests, *_ = play(curation.hinted(ladder), change=formatted)
    texts = [request.text for request in requests[3:]]
    assert [len(text.rpartition("\n")[2]) for text in texts] == [4, 8, 11]  # of 15 characters
    requests, *_ = play(curation.hinted(curation.ladder(TIERS)), change=formatted)
    assert len(requests) == 3  # the sum is above 0 for all
    with pytest.raises(ValueError, match="has no part 'accuracy'; its parts are: right"):
        play(curation.hinted(ladder))


# --- hints of the model ----------------------------------------------------------------------


def test_self_hints():
    # Sage asks the policy for its hints.
    written = json.dumps({"level_1": "weak", "level_2": "strong", "level_3": "last"})

    def writes(request, outcome):
        text = f"Here they are:\n```json\n{written}\n```"
        return outcome._replace(texts=(text,)) if request.role == JUDGE else outcome

    collector = curation.hinted(curation.self_hints(template="{question} {hint}"))
    requests, outcomes, rows, _ = play(collector, change=writes)
    assert [r.role for r in requests[3:]] == [JUDGE, HINTED, HINTED]
    assert "question 1" in requests[3].text and "solution 1" in requests[3].text
    assert requests[3].reward(["a", "b"]) == [0.0, 0.0]
    assert [r.text for r in requests[4:]] == ["question 1 weak", "question 1 strong"]
    assert rows[1].members == tuple((5, j) for j in range(G))

    # Sage asks again for hints that cannot be read and gives up.
    requests, _, rows, _ = play(curation.hinted(curation.self_hints(attempts=2)))
    assert [r.role for r in requests[3:]] == [JUDGE, JUDGE]
    assert rows[1].members == tuple((1, j) for j in range(G))

    # Hints are read from json.
    assert curation.parse_hints('{"level_1": "a", "level_3": " c "}') == ("a", "c")
    for text in ("", "level_1: a", "{level_1: a}", "[1]", '{"level_1": 3}', "} {", DEEP):
        assert curation.parse_hints(text) == ()

    # Levels of sage light move with accuracy.
    collector = curation.hint_levels(TIERS)
    data = DATA[: 2 * P]  # two batches an epoch
    state, seen = collector.init(len(data)), {i: [] for i in range(len(data))}
    for step in range(12):
        requests, _, rows, state = play(collector, state=state, step=step, data=data)
        assert all(len(row.members) == G for row in rows)
        for request in requests:
            seen[request.prompt].append(request.text)
    weak, strong = "question 1: weak 1", "question 1: strong 1"
    # Accuracy 0, 0, then 1/2 with the strong hint: up, up, down, up, down.
    assert seen[1][:6] == [None, weak, strong, weak, strong, weak]
    assert seen[0] == [None] * 6
    assert state["level"][[0, 2, 3]].tolist() == [0, 0, 0]


DEEP = '{"level_1":' * 100_000 + "}" * 100_000


# --- scaffolds -------------------------------------------------------------------------------


def test_scaffolds():
    # Scaf grpo swaps the success of least help for the first rollout.
    collector = curation.hinted(curation.scaffold(TIERS))
    requests, outcomes, rows, _ = play(collector)
    assert [(r.rollouts, r.round) for r in requests[3:]] == [(1, 1), (1, 1)]
    assert rows[1].members == ((4, 0), (1, 1), (1, 2), (1, 3))
    assert rewards_of(rows[1], outcomes) == [1.0, 0.0, 0.0, 0.0]
    requests, _, rows, _ = play(collector, rewards=lambda request, prompt: [0.0] * request.rollouts)
    assert rows[1].members == tuple((1, j) for j in range(G))

    # Scaf grpo begins after its warmup.
    collector = curation.hinted(curation.scaffold(TIERS, warmup=2))
    assert [len(play(collector, step=step)[0]) for step in (0, 1, 2)] == [3, 3, 5]


def one_number(request, outcome):
    """The reward of a rollout without components."""
    return outcome._replace(reward_components={})


@for_each(("after", "first"), [("plain", [(5, 0)]), ("both", [(5, 0), (4, 0)])])
def test_scaf_grpo_may_train_the_success_after_the_plain_prompt(after, first):
    collector = curation.hinted(curation.scaffold(TIERS, after=after))
    requests, outcomes, rows, _ = play(collector, change=one_number)
    again = requests[5]
    assert not again.sampled and again.role == DEMONSTRATION and again.text is None
    assert again.responses[0].tokens.tolist() == [400] and again.responses[0].reward == 1.0
    assert again.responses[0].behavior_logp is None  # of another prompt
    assert list(rows[1].members) == [*first, *((1, j) for j in range(len(first), G))]


# --- a solution as the start of the response -------------------------------------------------


@for_each(
    ("policy", "mixes"),
    [
        (curation.ladder(curation.tier_messages), False),
        (curation.ladder(curation.tier_messages, plain=1), True),
        (curation.self_hints(plain=1), True),
        (curation.scaffold(curation.tier_messages), True),
        (curation.scaffold(curation.tier_messages, after="plain"), False),
        (curation.examples_in_prompt(), False),
        (curation.hint_share(), False),
        (curation.rethink(), True),
        (curation.rethink(distill=False), False),
    ],
)
def test_a_policy_that_mixes_texts_in_a_row_says_so(policy, mixes):
    assert declares(curation.hinted(policy), "mixes_texts") == mixes


def test_budgets_mix_texts_if_there_are_several():
    assert declares(curation.budgeted((64, 128)), "mixes_texts")
    assert not declares(curation.budgeted((64,)), "mixes_texts")


@for_each(
    ("collector", "apart"),
    [
        (curation.in_order(), False),
        (curation.refill(curation.informative_groups), False),
        (curation.hinted(curation.ladder(curation.tier_messages)), False),
        (curation.hinted(curation.ladder(curation.tier_messages, plain=1)), True),
        (curation.hinted(curation.self_hints()), False),
        (curation.hinted(curation.rethink()), False),
        (curation.hinted(curation.scaffold(curation.tier_messages)), True),
        (curation.hinted(curation.examples_in_prompt()), True),
        (curation.demonstrations(), True),
        (curation.demonstrations(reward=1.0), False),
        (curation.mixed((curation.in_order(), 0.5), (curation.demonstrations(), 0.5)), True),
        (curation.budgeted((64, 128)), True),
        (curation.budgeted((64,)), False),
        (curation.paraphrased(), False),
        (curation.partial_rollouts(), True),
        (curation.windowed(), True),
        (curation.pooled(), True),
    ],
)
def test_a_collector_whose_rows_are_graded_in_parts_says_so(collector, apart):
    assert declares(collector, "grades_apart") == apart


def test_adhint():
    # Adhint shows more of the solution of a harder prompt.
    collector = curation.hinted(curation.hint_share(low=0.2, high=0.8, noise=0.0))
    requests, _, rows, _ = play(collector)
    assert [r.rollouts for r in requests] == [2] * 6
    shown = [r.responses[0].tokens for r in requests[3:]]
    # Mean rewards 1/2, 0, 1/2 of two rollouts: 0.5, 0.8, 0.5 of 15 characters.
    assert [len(text) for text in shown] == [8, 12, 8]
    assert shown[0] == "solution 0 is 0"[:8] and requests[3].responses[0].trains is None
    assert rows[0].members == ((0, 0), (0, 1), (3, 0), (3, 1))
    assert collector.needs_slots and not collector.sends_text

    # Adhint draws its noise by step and group.
    collector = curation.hinted(curation.hint_share(high=0.5, noise=0.4))

    def lengths(step):
        requests = play(collector, step=step)[0][3:]
        return [len(r.responses[0].tokens) if r.responses else 0 for r in requests]

    assert lengths(0) == lengths(0) and lengths(0) != lengths(1)

    # A solution may be token ids.
    data = [row | {"demonstration": list(range(10))} for row in DATA]
    collector = curation.hinted(curation.hint_share(low=0.5, high=0.5, noise=0.0))
    requests, *_ = play(collector, data=data)
    assert requests[3].responses[0].tokens.tolist() == [0, 1, 2, 3, 4]


def test_prefixes():
    # Prefixes are prompts of their own.
    collector = curation.prefixed(cuts=2)
    state, every = collector.init(N), []
    for step in range(7):  # 21 requests: each prompt plain and with two cuts
        requests, _, rows, state = play(collector, state=state, step=step)
        every += requests
        assert all(len(row.members) == G for row in rows)
    lengths = {i: [] for i in range(N)}
    for request in every:
        n = len(request.responses[0].tokens) if request.responses else 0
        lengths[request.prompt].append(n)
        assert len(request.responses) == (G if n else 0)
        if n:
            assert not request.responses[0].trains.any() and request.role == HINTED
    assert all(len(x) == 3 and sorted(x)[0] == 0 for x in lengths.values())
    assert all(6 <= n < 12 for x in lengths.values() for n in sorted(x)[1:])
    assert state["epoch"] == 1 and state["index"] == 0
    again, _, _, _ = play(collector, state=state)
    cuts = {(r.prompt, len(r.responses[0].tokens)) for r in every if r.responses}
    assert all((r.prompt, len(r.responses[0].tokens)) in cuts for r in again if r.responses)

    # Beginnings leave room for a token.
    collector = sized(curation.prefixed(cuts=2), group_size=G, max_new_tokens=4)
    requests, *_ = play(collector)
    requests += play(collector, state=collector.init(N), step=0)[0]
    begun = [len(x.tokens) for request in requests for x in request.responses]
    assert begun and max(begun) == 3
    wrapped = sized(curation.hint_levels(curation.tier_messages, source=curation.prefixed(cuts=2)),
                    group_size=G, max_new_tokens=4)  # fmt: skip
    assert wrapped.source.max_new_tokens == 4
    asked = sized(curation.paraphrased(source=curation.prefixed()), group_size=G, max_new_tokens=4)
    assert asked.source.max_new_tokens == 4
    policy = curation.hint_share(low=0.8, high=0.8, noise=0.0).for_run(G, 4)
    request = Request(policy.first(G))
    wrong = outcome_of(request, 1, 0, lambda request, prompt: [0.0] * request.rollouts)
    (asked,) = policy.ask(group_of(DATA[1], (wrong,), (request,)))
    assert [len(x.tokens) for x in asked.responses] == [3] * asked.rollouts


# --- examples, second thoughts ---------------------------------------------------------------


def test_examples_and_second_thoughts():
    # Icpo shows another prompts solution and trains after the plain prompt.
    requests, _, rows, _ = play(curation.hinted(curation.examples_in_prompt(shots=2)))
    assert [r.rollouts for r in requests] == [G - 1] * 3 + [1] * 3
    for p, request in enumerate(requests[3:]):
        assert request.train_as_prompt and request.role == HINTED
        assert request.text.count("Answer: ") == 2 and f"solution {p}" not in request.text
        assert request.text.endswith(f"Question: question {p}")
        assert rows[p].members[-1] == (3 + p, 0) and len(rows[p].members) == G
    other = curation.examples_in_prompt(examples=(("1 + 1", "2"),), shots=3)
    assert "1 + 1" in play(curation.hinted(other))[0][3].text

    # Cog rethinker decomposes then refines and distills what is right.
    def second(request, prompt):
        right = "wrong" in (request.text or "") or prompt not in HARD
        return [float(right and j < 2) for j in range(request.rollouts)]

    collector = curation.hinted(curation.rethink())
    requests, outcomes, rows, _ = play(collector, rewards=second, change=one_number)
    assert [r.role for r in requests[3:]] == [HINTED, HINTED, DEMONSTRATION]
    assert "smaller" in requests[3].text and "text 3.0" in requests[4].text
    assert [x.tokens.tolist() for x in requests[5].responses] == [[400], [401]]
    assert [x.reward for x in requests[5].responses] == [1.0, 1.0]
    assert rows[1].members == (*((4, j) for j in range(G)), (5, 0), (5, 1))
    assert collector.width(G) == 2 * G
    plain = curation.hinted(curation.rethink(distill=False))
    assert plain.width(G) == G and len(play(plain, rewards=second)[0]) == 5


def second_thoughts(request, prompt):
    return [float("wrong" in (request.text or ""))] * request.rollouts


def with_parts(request, outcome):
    return stepwise(request, outcome)._replace(reward_components={"right_steps": outcome.rewards})


@for_each(
    ("policy", "options"),
    [
        (curation.scaffold(TIERS, after="plain"), {}),
        (curation.rethink(), {"rewards": second_thoughts}),
        (curation.repair(separator=";"), {"change": with_parts}),
    ],
)
def test_a_success_that_trains_after_the_plain_prompt_has_the_components_of_its_reward(
    policy, options
):
    """It is graded again where the reward has some, as a response with its reward has none."""
    requests, *_ = play(curation.hinted(policy), **options)
    given = [x.reward for r in requests if r.role == DEMONSTRATION for x in r.responses]
    assert given and set(given) == {None}


@for_each(
    ("policy", "options"),
    [
        (curation.scaffold(TIERS, after="plain"), {}),
        (curation.rethink(), {"rewards": second_thoughts}),
    ],
)
def test_a_success_that_trains_after_the_plain_prompt_ended_as_it_did(policy, options):
    def cut(request, outcome):
        cut = tuple(x._replace(finish=LENGTH) for x in outcome.responses)
        return outcome._replace(responses=cut)

    requests, *_ = play(curation.hinted(policy), change=cut, **options)
    given = [x.finish for r in requests if r.role == DEMONSTRATION for x in r.responses]
    assert given and set(given) == {LENGTH}


# --- repairs ---------------------------------------------------------------------------------


def stepwise(request, outcome):
    """Responses of three steps, of which the j-th rollout has j right ones; a repair is right."""
    n = len(outcome.rewards)
    if request.role == OWN:
        tokens = np.int32(list(b"a;b;c"))
        responses = tuple(
            Response(tokens, np.full(5, -float(j)), version=tokens * 0) for j in range(n)
        )
        parts = {"right_steps": np.float32(np.arange(n) % 3)}
        return outcome._replace(
            responses=responses, texts=("a;b;c",) * n, reward_components=parts,
            rewards=np.zeros(n, np.float32),
        )  # fmt: skip
    if request.role == JUDGE:
        begin = request.responses[0].tokens if request.responses else np.zeros(0, np.int32)
        new = Response(np.int32([*begin, 120, 121]), np.zeros(len(begin) + 2))
        rewards = np.ones(1, np.float32)
        return outcome._replace(responses=(new,), rewards=rewards, reward_components={})
    return outcome


def test_scope():
    # Scope continues the right steps and trains after the plain prompt.
    collector = curation.hinted(curation.repair(separator=";"))
    requests, _, rows, _ = play(collector, change=stepwise)
    judge, last = requests[3], requests[6]
    assert judge.role == JUDGE and "solution 0 is 0" in judge.text
    assert decode(judge.responses[0].tokens) == "a;b;"  # of the third, which has two right steps
    assert last.role == DEMONSTRATION and not last.sampled and last.text is None
    (repaired,) = last.responses
    assert decode(repaired.tokens) == "a;b;xy" and repaired.reward == 1.0
    assert repaired.version.tolist() == [0] * 4 + [-1] * 2
    assert repaired.behavior_logp[:4].tolist() == [-2.0] * 4
    assert np.isnan(repaired.behavior_logp[4:]).all()
    assert rows[0].members == ((0, 0), (0, 1), (6, 0), (0, 3))

    # Scope may have a judge and a teacher.
    def judge(question, steps):
        return [0.9, 0.2, 0.8]

    def teacher(question, beginning):
        return f"({question} after {beginning})"

    def encode_ends(text, ends=False):
        return encode(text) + [0] * ends

    policy = curation.repair(judge=judge, teacher=teacher, separator=";", most=2)
    data = DATA
    batch, learned = Collection(1, G, data=data, encode=encode_ends, decode=decode), None
    collector = curation.hinted(policy)
    requests, _ = collector.propose((), None, batch, 1)
    outcome = stepwise(requests[0], outcome_of(requests[0], 0, 0))
    batch = batch._replace(requests=requests, outcomes=(outcome,))
    decision, learned = collector.observe((), batch)
    texts = [decode(r.responses[0].tokens) for r in decision.requests]
    assert texts == ["a;(question 0 after a;)\0"] * 2
    short = sized(collector, group_size=G, max_new_tokens=9)
    texts = [decode(r.responses[0].tokens) for r in short.observe((), batch)[0].requests]
    assert texts == ["a;(question 0 after a;)\0"[:9]] * 2
    # Complete, whether its end has room or not, so that a run takes it.
    limits = Limits(TextEncoder(jr.testing.ByteTokenizer(), 40, chat=False), 99, 300)
    questions = [Question(Prompt(data[0]["text"]), [1])]
    book = _Book(collector, (), None, questions, None, batch, limits)
    for decided, finish in ((decision, STOP), (short.observe((), batch)[0], LENGTH)):
        for request in decided.requests:
            (checked,) = book._responses(request, 0)
            assert checked.finish == finish
    most = sized(collector, group_size=G, max_new_tokens=len("a;(question 0 after a;)") + 1)
    assert most.observe((), batch)[0].requests[0].responses[0].finish == STOP
    # A beginning that fills a response leaves no room to go on.
    full = sized(collector, group_size=G, max_new_tokens=2)
    assert full.observe((), batch)[0].rows is not None
    right, wrong = (
        outcome_of(r, 0, i, rewards=lambda *_, x=x: [x])
        for i, (r, x) in enumerate(zip(decision.requests, (0.0, 1.0), strict=True), 1)
    )
    batch = batch._replace(
        requests=(*requests, *decision.requests), outcomes=(outcome, right, wrong)
    )
    decision, _ = collector.observe((), batch)
    # The second repair alone is right, and takes the place of the second rollout.
    assert decision.rows[0].members == ((0, 0), (2, 0), (0, 2), (0, 3))

    # Scope needs to know the first wrong step.
    with pytest.raises(ValueError, match="a mapping with 'right_steps'"):
        play(curation.hinted(curation.repair()))


def test_rooms():
    # An answer that has no room in a prompt is not refined.
    request = Request(G)
    group = GuidedGroup(0, DATA, encode, decode, 0, 0, G, (0,), (request,),
                        (outcome_of(request, 0, 0),))  # fmt: skip
    policy = curation.rethink()
    assert len(policy.texts(group)) == 2
    short = group._replace(takes_text=lambda text: "is wrong" not in text)
    assert len(policy.texts(short)) == 1
    assert not policy.texts(group._replace(takes_text=lambda text: False))

    # Hints and examples without room in a prompt are left out. What the policy wrote, or a random
    # solution, must not end the run by its length.
    request = Request(G)
    outcome = outcome_of(request, 1, 0)
    written = Outcome(*outcome)._replace(
        texts=('{"level_1": "weak", "level_2": "' + "x" * 99 + '"}',)
    )
    group = GuidedGroup(1, DATA, encode, decode, 0, 0, G, (0, 1),
                        (request, Request(1, role=JUDGE)), (outcome, written),
                        takes_text=lambda text: len(text) < 80)  # fmt: skip
    policy = curation.self_hints(template="{question} {hint}")
    assert policy.texts(group) == ["question 1 weak"]
    plain = group._replace(numbers=(0,), requests=(request,), outcomes=(outcome,))
    assert policy.ask(plain) == ()  # the question for hints has no room either
    (short,) = curation.examples_in_prompt(shots=3).ask(plain)
    assert short.text.count("Answer: ") == 1 and short.text.endswith("question 1")

    # Levels ask plainly where no message has room.
    collector = curation.hint_levels(curation.tier_messages)
    state = collector.init(N)
    state["level"][:], state["accuracy"][:] = 2, 0.2
    batch = Collection(P, G, 0, (), (), DATA, encode=encode, decode=decode)
    hinted, _ = collector.propose(state, None, batch, P)
    plain, _ = collector.propose(state, None, batch._replace(takes_text=lambda text: False), P)
    assert all(request.text for request in hinted)
    assert all(request.text is None and request.role == OWN for request in plain)

    # More of a group that began with a prefix begins with it.
    begins = Response(np.int32([7, 8]), trains=np.zeros(2, bool))
    more = more_of(Request(G, 3, role=HINTED, responses=(begins,) * G), 2)
    assert len(more.responses) == 2 and more.responses[0] is begins
    others = (begins, Response(np.int32([9])))
    assert more_of(Request(2, 3, responses=others), 2).responses == ()


def test_mixtures():
    # The parts of a mixture keep what they propose.
    @dataclasses.dataclass(frozen=True)
    class Counted:
        def init(self, num_prompts):
            return 0

        def propose(self, state, key, collection, count):
            return (Request(G),) * count, state + count

        def observe(self, state, collection):
            asked = len(collection.requests)
            return curation.Decision(ask=collection.num_groups - asked), state

    collector = curation.mixed((Counted(), 1), (Counted(), 3))
    batch = Collection(4, G, data=DATA, encode=encode, decode=decode)
    requests, state = collector.propose(collector.init(N), jax.random.key(0), batch, 4)
    assert len(requests) == 4 and state == (1, 3)

    # A mixture divides a batch by share.
    collector = curation.mixed((curation.in_order(), 0.5), (curation.demonstrations(), 0.5))
    requests, outcomes, rows, _ = play(collector)
    # Two groups of three for the first by the larger remainder, then one of three and its guide.
    assert [r.rollouts for r in requests] == [G, G, G - 1, 1]
    assert [[i for i, _ in row.members] for row in rows] == [[0] * 4, [1] * 4, [2, 2, 2, 3]]
    assert sorted(x.prompt for x in outcomes[:3]) == [0, 1, 2]  # each prompt once

    # Parts of a mixture draw independently. With one key, two parts alike would choose the same
    # prompts, or answers of one stream.
    part = curation.prioritized(curation.learnability)
    collector = curation.mixed((part, 0.5), (part, 0.5))
    state, batch = collector.init(1000), Collection(4, G, data=DATA)
    draws = []
    for step in range(3):
        key = jax.random.key(step)
        requests, _ = collector.propose(state, key, batch, 4)
        prompts = [request.prompt for request in requests]
        assert prompts[:2] != prompts[2:]
        again, _ = collector.propose(state, key, batch, 4)
        assert requests == again
        draws.append(prompts)
    assert len({*map(tuple, draws)}) == 3

    # Parts of a mixture that draw by the seed draw independently. Parts alike begin with equal
    # states, so that one seed would give them the same prompts.
    epochs = curation.in_epochs()
    collector = curation.mixed((curation.mixed((epochs, 1), (epochs, 1)), 2), (epochs, 1))
    batch = Collection(30, G, data=DATA, seed=5)
    requests, _ = collector.propose(collector.init(1000), KEY, batch, 30)
    prompts = [request.prompt for request in requests]
    first, second, third = prompts[:10], prompts[10:20], prompts[20:]
    assert first != second != third != first
    # The first part has the order of the run, as it had alone.
    alone, _ = epochs.propose(epochs.init(1000), KEY, batch, 10)
    assert first == [request.prompt for request in alone]

    # Parts of a mixture count their rounds and requests.
    inner = curation.mixed((curation.hinted(curation.ladder(TIERS)), 1), (NURL, 1))
    collector = curation.mixed((curation.in_order(), 1), (inner, 2))
    requests, _, rows, _ = play(collector, rewards=lambda request, prompt: [0.0] * request.rollouts)
    assert [r.text for r in requests] == [
        None, None, None, "question 1: weak 1", "question 2: weak 2",
        "question 1: strong 1", "question 2: strong 2",
    ]  # fmt: skip
    assert [r.extends for r in requests] == [None, None, None, 1, 2, 1, 2]
    assert [row.members[-1] for row in rows] == [(0, 3), (5, 3), (6, 2)]

    # Parts of a mixture have their groups.
    mixture = curation.mixed((curation.paraphrased(), 0.5), (curation.in_order(), 0.5))
    assert [groups for _, groups, _ in parts_with_sizes(mixture, 6, 4)] == [6, 3, 3, 3]

    # What a mixture proposes ahead is of a part that has groups and asks for more.
    class Never(type(curation.in_order())):
        def propose(self, state, key, collection, count):
            raise AssertionError("it has no groups")

    mixture = curation.mixed((curation.in_order(), 0.9), (Never(), 0.1))
    requests, _ = mixture.propose(mixture.init(N), KEY, Collection(2, G), 5)
    assert [request.round for request in requests] == [0] * 5
    refill = curation.refill(curation.informative_groups)
    mixture = curation.mixed((refill, 0.5), (curation.prefixed(), 0.5))
    asked = Collection(2, G, requests=(Request(G), Request(G, round=1)), outcomes=(None, None))
    requests, _ = mixture.propose(mixture.init(N), KEY, asked, 2)
    assert [request.round for request in requests] == [0, 0]


# --- demonstrations --------------------------------------------------------------------------


def test_demonstrations():
    # Luffy adds a demonstration to each group.
    requests, outcomes, rows, _ = play(curation.demonstrations())
    assert [r.rollouts for r in requests] == [G - 1] * 3 + [1] * 3
    assert [r.sampled for r in requests[3:]] == [False] * 3
    assert requests[4].responses == (Response("solution 1 is 1"),)
    assert rows[1].members == ((1, 0), (1, 1), (1, 2), (4, 0))

    # Ampo brings the answers of teachers and probes where a group fails.
    teachers = [["I say 1 now", "it is 1", "dunno"]] * N
    data = [row | {"demonstration": x} for row, x in zip(DATA, teachers, strict=True)]
    collector = curation.demonstrations(count=3, when="failed", probe="answer", reward=1.0)
    requests, outcomes, rows, _ = play(collector, data=data)
    assert [(r.role, r.rollouts) for r in requests[3:]] == [(DEMONSTRATION, 3), (JUDGE, 3)]
    first, second, third = requests[4].responses
    assert decode(first.tokens) == "I say 1" and first.trains.tolist() == [False] * 6 + [True]
    assert decode(second.tokens) == "it is 1" and decode(third.tokens) == "dunno\n1"
    assert rows[1].members == (*((1, j) for j in range(G)), *itertools.product((3, 4), range(3)))
    assert rows[0].members == tuple((0, j) for j in range(G)) and collector.width(G) == G + 6

    # A probe is at most as long as a response.
    collector = curation.demonstrations(when="failed", probe="answer")
    assert sized(collector, group_size=G, max_new_tokens=9) != collector
    assert repr(sized(collector, group_size=G, max_new_tokens=9)) == repr(collector)
    for most, text in ((9, "on 1 is 1"), (5, " is 1")):
        requests, *_ = play(sized(collector, group_size=G, max_new_tokens=most))
        (probe,) = next(r for r in requests if r.role == JUDGE and r.extends == 1).responses
        assert decode(probe.tokens) == text and probe.trains.tolist() == [False] * (most - 1) + [
            True
        ]

    # Demonstrations alone sample nothing.
    collector = curation.only_demonstrations()
    requests, _, rows, state = play(collector)
    assert all(not r.sampled and r.role == DEMONSTRATION for r in requests)
    assert [len(row.members) for row in rows] == [1] * P
    assert [r.responses[0].tokens for r in requests] == [
        DATA[r.prompt]["demonstration"] for r in requests
    ]
    assert state["index"] == P


@for_each(
    ("collector", "ungraded"),
    [
        (curation.demonstrations(reward=1.0), True),
        (curation.demonstrations(), False),
        (curation.only_demonstrations(reward=1.0), True),
        (curation.only_demonstrations(), False),
        (curation.mixed((curation.in_order(), 0.5), (curation.offline_pairs(), 0.5)), True),
        (curation.judged(), True),
        (curation.judged(judges=0.0), False),
        (curation.predicted(parse=len, reward=len), True),
        (NURL, False),
    ],
)
def test_a_recipe_that_reads_components_needs_all_responses_graded_by_the_run(collector, ungraded):
    recipe = jr.recipes.gdpo()
    if not ungraded:
        assert recipe.replace(collector=collector).collector == collector
        return
    with pytest.raises(ValueError, match="'gdpo' reads reward_components, but the run's reward"):
        recipe.replace(collector=collector)


# --- mixtures --------------------------------------------------------------------------------


# --- bad input -------------------------------------------------------------------------------

SELF_HINTS = curation.hinted(curation.self_hints())
HINT_SHARE = curation.hinted(curation.hint_share())


def group_of(row, outcomes, requests, **options):
    """A group in which every rollout is wrong."""
    numbers = tuple(range(len(requests)))
    return GuidedGroup(0, [row], encode, decode, 0, 0, G, numbers, requests, outcomes, **options)


@for_each(
    "policy",
    [
        curation.ladder(curation.tier_messages),
        curation.scaffold(curation.tier_messages),
        curation.rethink(),
        curation.repair(score=0.5, judge=lambda question, steps: [0.0] * len(steps)),
    ],
    ids=["ladder", "scaffold", "rethink", "repair"],
)
def test_a_message_without_room_is_left_out(policy):
    request = Request(G)
    wrong = outcome_of(request, 1, 0, lambda request, prompt: [0.0] * request.rollouts)
    free = group_of(DATA[1], (wrong,), (request,))
    full = group_of(DATA[1], (wrong,), (request,), takes_text=lambda text: False)
    assert policy.ask(free) and not policy.ask(full)


@for_each(
    "policy",
    [curation.ladder(curation.tier_messages, plain=1), curation.scaffold(curation.tier_messages)],
    ids=["ladder", "scaffold"],
)
def test_a_root_that_began_with_a_prefix_is_no_hint_of_the_policy(policy):
    responses = (Response(np.int32([7]), trains=np.zeros(1, bool)),) * G
    root = Request(G, role=HINTED, responses=responses)
    right = outcome_of(root, 0, 0, lambda request, prompt: [0.0, 1.0, 0.0, 1.0])
    group = group_of(DATA[0], (right,), (root,))
    assert list(policy.members(group)) == [(0, member) for member in range(G)]
    wrong = outcome_of(root, 1, 0, lambda request, prompt: [0.0] * G)
    assert policy.ask(group_of(DATA[1], (wrong,), (root,)))[0].text


def test_temperatures_and_sizes():
    # The source of downsampled has its group size.
    source = curation.two_phase(lambda budget: 1, max_rollouts=32, first=8)
    collector = curation.downsampled(curation.max_variance_subset, oversample=2, source=source)
    sizes = {part: size for part, _, size in parts_with_sizes(collector, 6, 8)}
    assert sizes[collector] == 8 and sizes[source] == 16
    source.check_sizes((), group_size=16, num_groups=6)
    with pytest.raises(ValueError, match="group_size must be above the 8 rollouts"):
        source.check_sizes((), group_size=8, num_groups=6)

    # Hints are sampled at the temperature of their group.
    first = Request(G, 0, temperature=0.7)
    assert _drawn_alike(Request(2, text="a", role=HINTED), first).temperature == 0.7
    assert _drawn_alike(Request(2, text="a", temperature=1.0), first).temperature == 1.0
    assert _drawn_alike(Request(2, text="a", role=JUDGE), first).temperature is None


MIXED = curation.mixed((NURL, 0.25), (curation.prefixed(), 0.25))
FAILED = curation.demonstrations(when="failed", probe="answer")


@for_each(
    ("collector", "column", "value", "message"),
    [
        (NURL, "hints", None, "prompt 'q2' has no 'hints' in its row"),
        (NURL, "hints", [3], "must be a list of texts"),
        (
            curation.hinted(curation.self_hints()),
            "demonstration",
            None,
            "prompt 'q2' has no 'demonstration'",
        ),
        (
            curation.hinted(curation.hint_share()),
            "demonstration",
            3.5,
            "must be a string or a list of token ids",
        ),
        (
            curation.hinted(curation.hint_share()),
            "demonstration",
            [1, -2],
            "has a token id below 0",
        ),
        (
            curation.hinted(curation.examples_in_prompt()),
            "demonstration",
            [1, 2],
            "must be a string",
        ),
        (curation.demonstrations(), "demonstration", "", "'q2' is empty"),
        (FAILED, "answer", None, "has no 'answer'"),
        (FAILED, "demonstration", [1, 2], "must be texts"),
        (curation.only_demonstrations(), "demonstration", None, "has no 'demonstration'"),
        (
            curation.mixed((NURL, 0.25), (curation.prefixed(), 0.25)),
            "hints",
            None,
            "prompt 'q2' has no 'hints'",
        ),
        (curation.demonstrations(count=2), "hints", None, "has 1 of 'demonstration'; count is 2"),
    ],
)
def test_rows_without_what_a_collector_reads_are_named(collector, column, value, message):
    data = [dict(row) for row in DATA]
    data[2][column] = value
    with pytest.raises(ValueError, match=message):
        for part in collector_parts(collector):
            if hasattr(part, "check_data"):
                part.check_data(data)


@for_each(
    ("make", "message"),
    [
        (lambda: curation.hinted(curation.informative_groups), "policy must be a policy"),
        (lambda: curation.ladder("hints"), "messages must be a function"),
        (lambda: curation.ladder(TIERS, plain=-1), "plain"),
        (lambda: curation.scaffold(TIERS, after="hints"), "after"),
        (lambda: curation.self_hints(template="{question}"), "has no {hint}"),
        (lambda: curation.self_hints(question="{question} {solution} {x}"), "may have the fields"),
        (lambda: curation.hint_share(low=0.9, high=0.1), "low must not be above high"),
        (lambda: curation.inpainted(0.5, jr.diffusion.igpo_replace), "hold must be a function"),
        (lambda: curation.examples_in_prompt(count=0), "count must be an integer above 0"),
        (lambda: curation.demonstrations(probe="answer"), "probe='answer' has no effect"),
        (lambda: curation.demonstrations(least_sampled=0), "least_sampled must be"),
        (
            lambda: curation.demonstrations(when="failed", least_sampled=2),
            "least_sampled=2 has no effect with when='failed'",
        ),
        (lambda: curation.hint_levels(TIERS, low=0.5), "low must not be above high"),
        (lambda: curation.mixed(), "at least one part"),
        (lambda: curation.mixed(curation.in_order()), "a collector and its share"),
        (lambda: curation.mixed((curation.in_order(), 0)), "share"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises((TypeError, ValueError)) as error:
        make()
    assert message in str(error.value)


@for_each(
    "collector",
    [
        curation.hint_levels(TIERS, source=curation.in_order()),
        curation.only_demonstrations(source=curation.in_order()),
    ],
)
def test_a_source_that_names_no_prompts_is_refused(collector):
    with pytest.raises(ValueError, match="must name its prompts, as in_epochs does"):
        play(collector)


def test_refused_groups():
    # Groups without room for rollouts of the policy are refused.
    pairs = curation.demonstrations(count=2, least_sampled=2)
    pairs.check_sizes([], group_size=4, num_groups=1)
    told = "2 of the data and at least 2 of the policy, so group_size must be at least 4; got 3"
    with pytest.raises(ValueError, match=told):
        pairs.check_sizes([], group_size=3, num_groups=1)
    curation.demonstrations(when="failed").check_sizes([], group_size=1, num_groups=1)
    plain = curation.hinted(curation.examples_in_prompt(count=1))
    plain.check_sizes([], group_size=1, num_groups=1)

    # Groups without room are refused.
    for collector in (
        curation.demonstrations(count=G),
        curation.hinted(curation.examples_in_prompt(count=G)),
    ):
        with pytest.raises(ValueError, match="count must be below the group's size 4"):
            play(collector)

    # A data set without a trace is refused.
    bare = [{"text": "q", "id": "a"}] * 3
    with pytest.raises(ValueError, match="no prompt has 'demonstration' in its row"):
        curation.prefixed().check_data(bare)
    curation.prefixed().check_data([*bare, DATA[0]])
    requests, *_ = play(curation.prefixed(), data=bare)
    assert all(not request.responses and request.role == OWN for request in requests)
