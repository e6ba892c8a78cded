"""Collectors with help: what is asked again, with which message, and what a row is made of."""

import functools
import itertools
import json

import jax
import numpy as np
import pytest
from batches_of_collectors import RecordingSource, ask, outcome, play_batch
from cheap import equal
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation as cur
from jaxrl_llm.curation import (
    DEMONSTRATION,
    HINTED,
    JUDGE,
    OWN,
    Collection,
    Request,
    Response,
)
from jaxrl_llm.curation.collectors.hints.hinted import GuidedGroup, _drawn_alike
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import (
    collector_parts,
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
    responses, r = request.responses, rewards(request, prompt)
    if request.sampled:
        begins = responses or (Response(np.zeros(0, np.int32)),) * request.rollouts
        responses = tuple(
            Response(np.int32([*encode(x.tokens), 100 * number + j]), np.zeros(1))
            for j, x in enumerate(begins)
        )
    else:
        r = [x if y.reward is None else y.reward for x, y in zip(r, responses, strict=True)]
    texts = tuple(f"text {number}.{j}" for j in range(len(r)))
    parts, ones = {"right": np.float32(r)}, np.ones(len(r), np.int32)
    return outcome(
        prompt, r, reward_components=parts, responses=responses, texts=texts, lengths=ones
    )


def encode(text):
    return list(text.encode()) if isinstance(text, str) else list(text)


def decode(tokens):
    return bytes(int(x) for x in tokens).decode()


def play(collector, *, state=None, step=0, rewards=reward_of, data=DATA, change=None):
    """A batch: requests, outcomes, rows, state."""

    def answer(request, number, place):
        done = outcome_of(request, place, number, rewards)
        return change(request, done) if change else done

    state = collector.init(len(data)) if state is None else state
    batch = Collection(P, G, step, data=data, encode=encode, decode=decode)
    rows, state, batch = play_batch(collector, state, batch, answer, key=KEY)
    return list(batch.requests), list(batch.outcomes), rows, state


TIERS = jr.bind(cur.tier_messages, template="{question}: {hint}")
NURL = cur.hinted(cur.ladder(jr.bind(TIERS, column="hints"), plain=1))


def test_messages():
    # Tiers are cumulative and limited.
    row = {"text": "q", "hints": [["a", "b"], "c"]}
    assert TIERS(row) == ("q: a", "q: a b", "q: c")
    assert TIERS(row, most=2) == ("q: a", "q: a b")
    assert TIERS({"text": "{q}", "hints": ["{x}"]}) == ("{q}: {x}",)  # braces are only text
    assert TIERS({"text": "q", "hints": []}) == ()

    # Shares of a solution round half to even.
    row = {"text": "q", "demonstration": "x" * 101}
    shown = cur.share_messages(row, template="{question}{hint}")
    assert [len(text) - 1 for text in shown] == [25, 50, 76]

    # Hints are read from json.
    assert cur.parse_hints('{"level_1": "a", "level_3": " c "}') == ("a", "c")
    deep = '{"level_1":' * 100_000 + "}" * 100_000
    for text in ("", "level_1: a", "{level_1: a}", "[1]", '{"level_1": 3}', "} {", deep):
        assert cur.parse_hints(text) == ()


def no_success(request, prompt):
    return [0.0] * request.rollouts


def hopeless(request, prompt):
    """No message helps with a hard prompt."""
    return (no_success if prompt in HARD else reward_of)(request, prompt)


def one_number(request, outcome):
    """The reward of a rollout without components."""
    return outcome._replace(reward_components={})


def writes(request, outcome):
    """Hints, where they are asked for."""
    written = json.dumps({"level_1": "weak", "level_2": "strong", "level_3": "last"})
    text = f"Here they are:\n```json\n{written}\n```"
    return outcome._replace(texts=(text,)) if request.role == JUDGE else outcome


def row_of(i, *first):
    """Members of a row: these first, the others of request ``i``."""
    return (*first, *((i, j) for j in range(len(first), G)))


WEAK, STRONG, FEW = "question 1: weak 1", "question 1: strong 1", jr.bind(TIERS, most=1)
MADE = cur.self_hints(template="{question} {hint}")
NUMBER = {"change": one_number}


@for_each(
    ("policy", "options", "asked", "rollouts", "members"),
    [
        # Nurl samples all but one again with the clue.
        (cur.ladder(FEW, plain=1), {}, [WEAK], G - 1, ((1, 0), (3, 0), (3, 1), (3, 2))),
        # A ladder stops at the first message that helps, or at the last.
        (cur.ladder(TIERS), {}, [WEAK, STRONG], G, row_of(4)),
        (cur.ladder(FEW), {}, [WEAK], G, row_of(3)),
        # Scaf grpo swaps the success of least help for the first rollout.
        (cur.scaffold(TIERS), {}, [WEAK, STRONG], 1, row_of(1, (4, 0))),
        (cur.scaffold(TIERS), {"rewards": hopeless}, [WEAK, STRONG], 1, row_of(1)),
        (cur.scaffold(TIERS, after="plain"), NUMBER, [WEAK, STRONG, None], 1, row_of(1, (5, 0))),
        (
            *(cur.scaffold(TIERS, after="both"), NUMBER, [WEAK, STRONG, None], 1),
            row_of(1, (5, 0), (4, 0)),
        ),
        # Sage asks the policy for its hints, and again for those that cannot be read.
        (MADE, {"change": writes}, [JUDGE, "question 1 weak", "question 1 strong"], G, row_of(5)),
        (cur.self_hints(attempts=2), {}, [JUDGE, JUDGE], 1, row_of(1)),
    ],
)
def test_what_a_hard_prompt_is_asked_again(policy, options, asked, rollouts, members):
    requests, _, rows, _ = play(cur.hinted(policy), **options)
    later = requests[P:]
    assert [JUDGE if r.role == JUDGE else r.text for r in later] == asked
    # A scaffold samples all its messages at once.
    rounds, at_once = [r.round for r in later if r.sampled], rollouts == 1 and WEAK in asked
    assert rounds == [1 if at_once else n for n in range(1, len(rounds) + 1)]
    assert {r.extends for r in later} == {1} and later[-1].rollouts == rollouts
    assert all(r.role in (JUDGE, HINTED) and not r.train_as_prompt for r in later if r.sampled)
    assert [row.members for row in rows] == [row_of(0), members, row_of(2)]
    if later[0].role == JUDGE:
        assert "question 1" in later[0].text and "solution 1" in later[0].text
        assert later[0].reward(["a", "b"]) == [0.0, 0.0]
    if not later[-1].sampled:  # the success after the plain prompt
        (again,) = later[-1].responses
        assert later[-1].role == DEMONSTRATION and again.tokens.tolist() == [400]
        assert again.reward == 1.0 and again.behavior_logp is None  # of another prompt


def test_when_a_hint_is_given():
    # Ghpo compares the accuracy and not the format.
    def formatted(request, outcome):
        parts = {"accuracy": outcome.rewards, "format": np.ones_like(outcome.rewards)}
        return outcome._replace(rewards=outcome.rewards + 0.5, reward_components=parts)

    ladder = cur.hinted(cur.ladder(cur.share_messages, metric="accuracy"))
    requests, *_ = play(ladder, change=formatted)
    texts = [request.text for request in requests[3:]]
    assert [len(text.rpartition("\n")[2]) for text in texts] == [4, 8, 11]  # of 15 characters
    requests, *_ = play(cur.hinted(cur.ladder(TIERS)), change=formatted)
    assert len(requests) == 3  # the sum is above 0 for all
    with pytest.raises(ValueError, match="has no part 'accuracy'; its parts are: right"):
        play(ladder)

    # Scaf grpo begins after its warmup.
    collector = cur.hinted(cur.scaffold(TIERS, warmup=2))
    assert [len(play(collector, step=step)[0]) for step in (0, 1, 2)] == [3, 3, 5]

    # Levels of sage light move with accuracy.
    collector = cur.hint_levels(TIERS)
    data = DATA[: 2 * P]  # two batches an epoch
    state, seen = collector.init(len(data)), {i: [] for i in range(len(data))}
    for step in range(12):
        requests, _, rows, state = play(collector, state=state, step=step, data=data)
        assert all(len(row.members) == G for row in rows)
        for request in requests:
            seen[request.prompt].append(request.text)
    # Accuracy 0, 0, then 1/2 with the strong hint: up, up, down, up, down.
    assert seen[1][:6] == [None, WEAK, STRONG, WEAK, STRONG, WEAK]
    assert seen[0] == [None] * 6
    assert state["level"][[0, 2, 3]].tolist() == [0, 0, 0]


ladder, scaffold, tiers = cur.ladder, cur.scaffold, cur.tier_messages


@for_each(
    ("collector", "mixes", "apart"),
    [  # several texts in a row, and rows whose rewards are parts of more than one grading
        (cur.hinted(ladder(tiers)), False, False),
        (cur.hinted(ladder(tiers, plain=1)), True, True),
        (cur.hinted(cur.self_hints()), False, False),
        (cur.hinted(cur.self_hints(plain=1)), True, True),
        (cur.hinted(scaffold(tiers)), True, True),
        (cur.hinted(scaffold(tiers, after="plain")), False, True),
        (cur.hinted(cur.examples_in_prompt()), False, True),
        (cur.hinted(cur.hint_share()), False, True),
        (cur.hinted(cur.rethink()), True, False),
        (cur.hinted(cur.rethink(distill=False)), False, False),
        (cur.budgeted((64, 128)), True, True),
        (cur.budgeted((64,)), False, False),
        (cur.in_order(), False, False),
        (cur.refill(cur.informative_groups), False, False),
        (cur.demonstrations(), False, True),
        (cur.demonstrations(reward=1.0), False, False),
        (cur.mixed((cur.in_order(), 0.5), (cur.demonstrations(), 0.5)), False, True),
        (cur.paraphrased(), False, False),
        (cur.partial_rollouts(), False, True),
        (cur.windowed(), False, True),
        (cur.pooled(), False, True),
    ],
)
def test_what_the_rows_of_a_collector_hold(collector, mixes, apart):
    assert needs_of(collector).mixes_texts == mixes
    assert needs_of(collector).grades_apart == apart


def test_adhint():
    # Adhint shows more of the solution of a harder prompt.
    collector = cur.hinted(cur.hint_share(low=0.2, high=0.8, noise=0.0))
    requests, _, rows, _ = play(collector)
    assert [r.rollouts for r in requests] == [2] * 6
    shown = [r.responses[0].tokens for r in requests[3:]]
    # Mean rewards 1/2, 0, 1/2 of two rollouts: 0.5, 0.8, 0.5 of 15 characters.
    assert [len(text) for text in shown] == [8, 12, 8]
    assert shown[0] == "solution 0 is 0"[:8] and requests[3].responses[0].trains is None
    assert rows[0].members == ((0, 0), (0, 1), (3, 0), (3, 1))
    assert collector.needs.slots and not collector.needs.sends_text

    # Adhint draws its noise by step and group.
    collector = cur.hinted(cur.hint_share(high=0.5, noise=0.4))

    def lengths(step):
        requests = play(collector, step=step)[0][3:]
        return [len(r.responses[0].tokens) if r.responses else 0 for r in requests]

    assert lengths(0) == lengths(0) and lengths(0) != lengths(1)

    # A solution may be token ids.
    data = [row | {"demonstration": list(range(10))} for row in DATA]
    collector = cur.hinted(cur.hint_share(low=0.5, high=0.5, noise=0.0))
    requests, *_ = play(collector, data=data)
    assert requests[3].responses[0].tokens.tolist() == [0, 1, 2, 3, 4]


def test_prefixes():
    # Prefixes are prompts of their own.
    collector = cur.prefixed(cuts=2)
    state, every = collector.init(N), []
    for step in range(7):  # 21 requests: each prompt plain and with two cuts
        requests, _, rows, state = play(collector, state=state, step=step)
        every += requests
        assert all(len(row.members) == G for row in rows)
    lengths = {i: [] for i in range(N)}
    for request in every:
        begins = request.responses[:1]
        lengths[request.prompt] += [len(begins[0].tokens) if begins else 0]
        assert len(request.responses) == (G if begins else 0)
        assert not begins or (not begins[0].trains.any() and request.role == HINTED)
    for plain, *cuts in map(sorted, lengths.values()):
        assert plain == 0 and len(cuts) == 2 and all(6 <= n < 12 for n in cuts)
    assert state["epoch"] == 1 and state["index"] == 0
    again, *_ = play(collector, state=state)
    assert all(len(r.responses[0].tokens) in lengths[r.prompt] for r in again if r.responses)

    # Beginnings leave room for a token.
    collector = sized(cur.prefixed(cuts=2), group_size=G, max_new_tokens=4)
    requests, *_ = play(collector)
    requests += play(collector, state=collector.init(N), step=0)[0]
    begun = [len(x.tokens) for request in requests for x in request.responses]
    assert begun and max(begun) == 3
    for wrap in (cur.paraphrased, functools.partial(cur.hint_levels, tiers)):
        wrapped = sized(wrap(source=cur.prefixed(cuts=2)), group_size=G, max_new_tokens=4)
        assert wrapped.source.max_new_tokens == 4
    policy = cur.hint_share(low=0.8, high=0.8, noise=0.0).for_run(G, 4)
    (asked,) = policy.ask(group_of(1, wrong(Request(policy.first(G)))))
    assert [len(x.tokens) for x in asked.responses] == [3] * asked.rollouts


def test_examples_and_second_thoughts():
    # Icpo shows another prompts solution and trains after the plain prompt.
    requests, _, rows, _ = play(cur.hinted(cur.examples_in_prompt(shots=2)))
    assert [r.rollouts for r in requests] == [G - 1] * 3 + [1] * 3
    for p, request in enumerate(requests[3:]):
        assert request.train_as_prompt and request.role == HINTED
        assert request.text.count("Answer: ") == 2 and f"solution {p}" not in request.text
        assert request.text.endswith(f"Question: question {p}")
        assert rows[p].members[-1] == (3 + p, 0) and len(rows[p].members) == G
    other = cur.examples_in_prompt(examples=(("1 + 1", "2"),), shots=3)
    assert "1 + 1" in play(cur.hinted(other))[0][3].text

    # Cog rethinker decomposes then refines and distills what is right.
    def second(request, prompt):
        right = "wrong" in (request.text or "") or prompt not in HARD
        return [float(right and j < 2) for j in range(request.rollouts)]

    collector = cur.hinted(cur.rethink())
    requests, outcomes, rows, _ = play(collector, rewards=second, change=one_number)
    assert [r.role for r in requests[3:]] == [HINTED, HINTED, DEMONSTRATION]
    assert "smaller" in requests[3].text and "text 3.0" in requests[4].text
    assert [x.tokens.tolist() for x in requests[5].responses] == [[400], [401]]
    assert [x.reward for x in requests[5].responses] == [1.0, 1.0]
    assert rows[1].members == (*((4, j) for j in range(G)), (5, 0), (5, 1))
    assert collector.width(G) == 2 * G
    plain = cur.hinted(cur.rethink(distill=False))
    assert plain.width(G) == G and len(play(plain, rewards=second)[0]) == 5


def second_thoughts(request, prompt):
    return [float("wrong" in (request.text or ""))] * request.rollouts


def with_parts(request, outcome):
    return stepwise(request, outcome)._replace(reward_components={"right_steps": outcome.rewards})


def cut_off(request, outcome):
    return outcome._replace(responses=tuple(x._replace(finish=LENGTH) for x in outcome.responses))


@for_each(
    ("policy", "options", "field", "value"),
    [
        (cur.scaffold(TIERS, after="plain"), {}, "reward", None),
        (cur.rethink(), {"rewards": second_thoughts}, "reward", None),
        (cur.repair(separator=";"), {"change": with_parts}, "reward", None),
        (cur.scaffold(TIERS, after="plain"), {"change": cut_off}, "finish", LENGTH),
        (cur.rethink(), {"rewards": second_thoughts, "change": cut_off}, "finish", LENGTH),
    ],
)
def test_a_success_that_trains_after_the_plain_prompt(policy, options, field, value):
    """It is graded again where the reward has components, and ended as it did."""
    requests, *_ = play(cur.hinted(policy), **options)
    given = [getattr(x, field) for r in requests if r.role == DEMONSTRATION for x in r.responses]
    assert given and set(given) == {value}


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
    requests, _, rows, _ = play(cur.hinted(cur.repair(separator=";")), change=stepwise)
    judge, last = requests[3], requests[6]
    assert judge.role == JUDGE and "solution 0 is 0" in judge.text
    assert decode(judge.responses[0].tokens) == "a;b;"  # of the third, which has two right steps
    assert last.role == DEMONSTRATION and not last.sampled and last.text is None
    (repaired,) = last.responses
    assert decode(repaired.tokens) == "a;b;xy" and repaired.reward == 1.0
    assert repaired.version.tolist() == [0] * 4 + [-1] * 2
    equal(repaired.behavior_logp, [-2.0] * 4 + [np.nan] * 2)
    assert rows[0].members == ((0, 0), (0, 1), (6, 0), (0, 3))
    with pytest.raises(ValueError, match="a mapping with 'right_steps'"):
        play(cur.hinted(cur.repair()))

    # Scope may have a judge and a teacher.
    policy = cur.repair(
        judge=lambda question, steps: [0.9, 0.2, 0.8],
        teacher=lambda question, beginning: f"({question} after {beginning})",
        separator=";",
        most=2,
    )
    collector, told = cur.hinted(policy), "a;(question 0 after a;)"
    ends = {"encode": lambda text, ends=False: encode(text) + [0] * ends, "decode": decode}
    batch = Collection(1, G, data=DATA, **ends)
    requests, _ = collector.propose((), None, batch, 1)
    first = stepwise(requests[0], outcome_of(requests[0], 0, 0))
    batch = batch._replace(requests=requests, outcomes=(first,))
    limits = Limits(TextEncoder(jr.testing.ByteTokenizer(), 40, chat=False), 99, 300)
    book = _Book(collector, (), None, [Question(Prompt(DATA[0]["text"]), [1])], None, batch, limits)
    # Complete, whether its end has room or not, so that a run takes it.
    for room, finish in ((99, STOP), (len(told) + 1, STOP), (9, LENGTH)):
        decision, _ = sized(collector, group_size=G, max_new_tokens=room).observe((), batch)
        assert len(decision.requests) == 2
        for request in decision.requests:
            assert decode(request.responses[0].tokens) == f"{told}\0"[:room]
            assert book._responses(request, 0)[0].finish == finish
    # A beginning that fills a response leaves no room to go on.
    full = sized(collector, group_size=G, max_new_tokens=2)
    assert full.observe((), batch)[0].rows is not None
    graded = [outcome_of(r, 0, i, lambda *_, i=i: [i]) for i, r in enumerate(decision.requests)]
    batch = ask(batch, decision.requests)._replace(outcomes=(first, *graded))
    decision, _ = collector.observe((), batch)
    # The second repair alone is right, and takes the place of the second rollout.
    assert decision.rows[0].members == ((0, 0), (2, 0), (0, 2), (0, 3))


def group_of(prompt, *pairs, **options):
    """A group of these requests and outcomes."""
    numbers, (requests, outcomes) = tuple(range(len(pairs))), zip(*pairs, strict=True)
    sizes = (encode, decode, 0, 0, G)
    return GuidedGroup(prompt, DATA, *sizes, numbers, requests, outcomes, **options)


def wrong(request, prompt=1):
    return request, outcome_of(request, prompt, 0, no_success)


@for_each(
    "policy",
    [
        ladder(tiers),
        scaffold(tiers),
        cur.rethink(),
        cur.repair(score=0.5, judge=lambda question, steps: [0.0] * len(steps)),
        cur.self_hints(),
    ],
)
def test_a_message_without_room_is_left_out(policy):
    group = group_of(1, wrong(Request(G)))
    assert policy.ask(group) and not policy.ask(group._replace(takes_text=lambda text: False))


def test_rooms():
    # An answer that has no room in a prompt is not refined.
    group = group_of(0, (Request(G), outcome_of(Request(G), 0, 0)))
    policy = cur.rethink()
    assert len(policy.texts(group)) == 2
    assert len(policy.texts(group._replace(takes_text=lambda text: "is wrong" not in text))) == 1
    assert not policy.texts(group._replace(takes_text=lambda text: False))

    # Hints and examples without room in a prompt are left out. What the policy wrote, or a random
    # solution, must not end the run by its length.
    written = outcome(1, [0], texts=('{"level_1": "weak", "level_2": "' + "x" * 99 + '"}',))
    first, short = wrong(Request(G)), {"takes_text": lambda text: len(text) < 80}
    group = group_of(1, first, (Request(1, role=JUDGE), written), **short)
    assert MADE.texts(group) == ["question 1 weak"]
    (asked,) = cur.examples_in_prompt(shots=3).ask(group_of(1, first, **short))
    assert asked.text.count("Answer: ") == 1 and asked.text.endswith("question 1")

    # Levels ask plainly where no message has room.
    collector = cur.hint_levels(tiers)
    state = collector.init(N)
    state["level"][:], state["accuracy"][:] = 2, 0.2
    batch = Collection(P, G, data=DATA, encode=encode, decode=decode)
    hinted, _ = collector.propose(state, None, batch, P)
    plain, _ = collector.propose(state, None, batch._replace(takes_text=lambda text: False), P)
    assert all(request.text for request in hinted)
    assert all(request.text is None and request.role == OWN for request in plain)

    # More of a group that began with a prefix begins with it, which is no hint of the policy.
    begins = Response(np.int32([7, 8]), trains=np.zeros(2, bool))
    root = Request(G, 3, role=HINTED, responses=(begins,) * G)
    more = more_of(root, 2)
    assert len(more.responses) == 2 and more.responses[0] is begins
    others = (begins, Response(np.int32([9])))
    assert more_of(Request(2, 3, responses=others), 2).responses == ()
    right = outcome_of(root, 0, 0, lambda request, prompt: [0.0, 1.0, 0.0, 1.0])
    for policy in (ladder(tiers, plain=1), scaffold(tiers)):
        assert list(policy.members(group_of(0, (root, right)))) == [(0, j) for j in range(G)]
        assert policy.ask(group_of(1, wrong(root)))[0].text


def drawn(collector, count, seed=0, num_prompts=1000):
    """The prompts of a batch of so many groups."""
    batch, key = Collection(count, G, data=DATA, seed=5), jax.random.key(seed)
    requests, _ = collector.propose(collector.init(num_prompts), key, batch, count)
    return [request.prompt for request in requests]


def mix(*parts):
    return cur.mixed(*((part, 1) for part in parts))


def test_mixtures():
    # A mixture divides a batch by share.
    requests, outcomes, rows, _ = play(mix(cur.in_order(), cur.demonstrations()))
    # Two groups of three for the first by the larger remainder, then one of three and its guide.
    assert [r.rollouts for r in requests] == [G, G, G - 1, 1]
    assert [[i for i, _ in row.members] for row in rows] == [[0] * 4, [1] * 4, [2, 2, 2, 3]]
    assert sorted(x.prompt for x in outcomes[:3]) == [0, 1, 2]  # each prompt once
    mixture = mix(cur.paraphrased(), cur.in_order())
    assert [groups for _, groups, _ in parts_with_sizes(mixture, 6, 4)] == [6, 3, 3, 3]

    # Parts alike draw independently: with one key or seed they would choose the same prompts.
    part = cur.prioritized(cur.learnability)
    draws = [drawn(mix(part, part), 4, seed) for seed in (0, 1, 2, 0)]
    assert all(draw[:2] != draw[2:] for draw in draws) and draws[0] == draws[3]
    assert len({*map(tuple, draws)}) == 3
    epochs = cur.in_epochs()
    prompts = drawn(cur.mixed((mix(epochs, epochs), 2), (epochs, 1)), 30)
    first, second, third = prompts[:10], prompts[10:20], prompts[20:]
    assert first != second != third != first
    assert first == drawn(epochs, 30)[:10]  # the order of the run, as it had alone

    # Parts of a mixture count their rounds and requests, and keep what they propose.
    inner = mix(cur.hinted(cur.ladder(TIERS)), NURL)
    requests, _, rows, _ = play(cur.mixed((cur.in_order(), 1), (inner, 2)), rewards=no_success)
    weak, strong = [[f"question {i}: {x} {i}" for i in (1, 2)] for x in ("weak", "strong")]
    assert [r.text for r in requests] == [None, None, None, *weak, *strong]
    assert [r.extends for r in requests] == [None, None, None, 1, 2, 1, 2]
    assert [row.members[-1] for row in rows] == [(0, 3), (5, 3), (6, 2)]

    class Counted(RecordingSource):
        def propose(self, state, key, collection, count):
            return super().propose(state, key, collection, count)[0], (*state, count)

    collector = cur.mixed((Counted(Request(G)), 1), (Counted(Request(G)), 3))
    requests, state = collector.propose(collector.init(N), KEY, Collection(4, G, data=DATA), 4)
    assert len(requests) == 4 and state == ((1,), (3,))

    # What a mixture proposes ahead is of a part that has groups and asks for more.
    class Never(RecordingSource):
        def propose(self, state, key, collection, count):
            raise AssertionError("it has no groups")

    mixture = cur.mixed((cur.in_order(), 0.9), (Never(None), 0.1))
    requests, _ = mixture.propose(mixture.init(N), KEY, Collection(2, G), 5)
    assert [request.round for request in requests] == [0] * 5
    mixture = mix(cur.refill(cur.informative_groups), cur.prefixed())
    asked = ask(Collection(2, G), (Request(G), Request(G, round=1)))
    requests, _ = mixture.propose(mixture.init(N), KEY, asked, 2)
    assert [request.round for request in requests] == [0, 0]


def test_demonstrations():
    # Luffy adds a demonstration to each group.
    requests, outcomes, rows, _ = play(cur.demonstrations())
    assert [r.rollouts for r in requests] == [G - 1] * 3 + [1] * 3
    assert [r.sampled for r in requests[3:]] == [False] * 3
    assert requests[4].responses == (Response("solution 1 is 1"),)
    assert rows[1].members == ((1, 0), (1, 1), (1, 2), (4, 0))

    # Ampo brings the answers of teachers and probes where a group fails.
    teachers = [["I say 1 now", "it is 1", "dunno"]] * N
    data = [row | {"demonstration": x} for row, x in zip(DATA, teachers, strict=True)]
    collector = cur.demonstrations(count=3, when="failed", probe="answer", reward=1.0)
    requests, outcomes, rows, _ = play(collector, data=data)
    assert [(r.role, r.rollouts) for r in requests[3:]] == [(DEMONSTRATION, 3), (JUDGE, 3)]
    first, second, third = requests[4].responses
    assert decode(first.tokens) == "I say 1" and first.trains.tolist() == [False] * 6 + [True]
    assert decode(second.tokens) == "it is 1" and decode(third.tokens) == "dunno\n1"
    assert rows[1].members == (*((1, j) for j in range(G)), *itertools.product((3, 4), range(3)))
    assert rows[0].members == tuple((0, j) for j in range(G)) and collector.width(G) == G + 6

    # A probe is at most as long as a response.
    collector = cur.demonstrations(when="failed", probe="answer")
    assert sized(collector, group_size=G, max_new_tokens=9) != collector
    assert repr(sized(collector, group_size=G, max_new_tokens=9)) == repr(collector)
    for most, text in ((9, "on 1 is 1"), (5, " is 1")):
        requests, *_ = play(sized(collector, group_size=G, max_new_tokens=most))
        (probe,) = next(r for r in requests if r.role == JUDGE and r.extends == 1).responses
        assert decode(probe.tokens) == text and probe.trains.tolist() == [False] * (most - 1) + [
            True
        ]

    # Demonstrations alone sample nothing.
    collector = cur.only_demonstrations()
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
        (cur.demonstrations(reward=1.0), True),
        (cur.demonstrations(), False),
        (cur.only_demonstrations(reward=1.0), True),
        (cur.only_demonstrations(), False),
        (cur.mixed((cur.in_order(), 0.5), (cur.offline_pairs(), 0.5)), True),
        (cur.judged(), True),
        (cur.judged(judges=0.0), False),
        (cur.predicted(parse=len, reward=len), True),
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


def test_temperatures_and_sizes():
    # The source of downsampled has its group size.
    source = cur.two_phase(lambda budget: 1, max_rollouts=32, first=8)
    collector = cur.downsampled(cur.max_variance_subset, oversample=2, source=source)
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


FAILED = cur.demonstrations(when="failed", probe="answer")
SELF_HINTS, HINT_SHARE = map(cur.hinted, (cur.self_hints(), cur.hint_share()))
MIXED = cur.mixed((NURL, 0.25), (cur.prefixed(), 0.25))


@for_each(
    ("collector", "column", "value", "message"),
    [
        (NURL, "hints", None, "prompt 'q2' has no 'hints' in its row"),
        (NURL, "hints", [3], "must be a list of texts"),
        (SELF_HINTS, "demonstration", None, "prompt 'q2' has no 'demonstration'"),
        (HINT_SHARE, "demonstration", 3.5, "must be a string or a list of token ids"),
        (HINT_SHARE, "demonstration", [1, -2], "has a token id below 0"),
        (cur.hinted(cur.examples_in_prompt()), "demonstration", [1, 2], "must be a string"),
        (cur.demonstrations(), "demonstration", "", "'q2' is empty"),
        (FAILED, "answer", None, "has no 'answer'"),
        (FAILED, "demonstration", [1, 2], "must be texts"),
        (cur.only_demonstrations(), "demonstration", None, "has no 'demonstration'"),
        (MIXED, "hints", None, "prompt 'q2' has no 'hints'"),
        (cur.demonstrations(count=2), "hints", None, "has 1 of 'demonstration'; count is 2"),
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
    "collector",
    [cur.hint_levels(TIERS, source=cur.in_order()), cur.only_demonstrations(source=cur.in_order())],
)
def test_a_source_that_names_no_prompts_is_refused(collector):
    with pytest.raises(ValueError, match="must name its prompts, as in_epochs does"):
        play(collector)


def test_refused_groups():
    # Groups without room for rollouts of the policy are refused.
    pairs = cur.demonstrations(count=2, least_sampled=2)
    pairs.check_sizes([], group_size=4, num_groups=1)
    told = "2 of the data and at least 2 of the policy, so group_size must be at least 4; got 3"
    with pytest.raises(ValueError, match=told):
        pairs.check_sizes([], group_size=3, num_groups=1)
    cur.demonstrations(when="failed").check_sizes([], group_size=1, num_groups=1)
    plain = cur.hinted(cur.examples_in_prompt(count=1))
    plain.check_sizes([], group_size=1, num_groups=1)

    # Groups without room are refused.
    for collector in (cur.demonstrations(count=G), cur.hinted(cur.examples_in_prompt(count=G))):
        with pytest.raises(ValueError, match="count must be below the group's size 4"):
            play(collector)

    # A data set without a trace is refused.
    bare = [{"text": "q", "id": "a"}] * 3
    with pytest.raises(ValueError, match="no prompt has 'demonstration' in its row"):
        cur.prefixed().check_data(bare)
    cur.prefixed().check_data([*bare, DATA[0]])
    requests, *_ = play(cur.prefixed(), data=bare)
    assert all(not request.responses and request.role == OWN for request in requests)
