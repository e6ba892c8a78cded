"""Verifiers of short answers, sums of rewards, votes, and shaping by length and repetition.

A verifier reads the final part of a reply, behind the reasoning of every family, and has one form
of an answer. ``weighted_sum`` returns its terms; ``majority_vote`` numbers equal answers alike.
"""

import functools
import math
import pickle
import re
import time
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm import rewards
from jaxrl_llm.core import bind
from jaxrl_llm.rewards import RewardError, answer_of, score
from jaxrl_llm.rewards.scoring import name_of

R = rewards
ARC = {"text": list("wxyz"), "label": list("ABCD")}
NUMBERED = {"text": ["Mars", "Venus", "Earth"], "label": ["1", "2", "3"]}
BRACKETED = NUMBERED | {"label": ["(1)", "(2)", "(3)"]}


@for_each(
    ("text", "box"),
    [
        (r"\boxed{4}", "4"),
        (r"\boxed {4}", "4"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} then", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{1}", r"\{1"),
        (r"\boxed{}", ""),
        (r"\boxed{1} \boxed{\frac{2}{3}", None),
        (r"\boxed 4", None),
        ("4", None),
    ],
)
def test_the_last_box_ends_at_its_brace(text, box):
    assert R.boxed_answer(text) == box


LETTERS = {
    "A": r"The answer is \boxed{\text{(A)}}, not B",
    "B": r"""Answer: b | Final Answer: \text{B} | Answer: option B | Answer choice B from the table.
        | B) 42 | A cat sat. B | B. Here C is too small and D needs friction.
        | <think>Answer: A</think>Answer: B""",
    "C": """The answer is (C). | Answer: $C$ | answer is\n\nC | The answer is C because heat rises
        | The answer is C due to friction. | The answer is C. Option A is wrong because
        | The answer is C due to friction; option A is too small.""",
    "D": """**Answer: D** | Option B ignores friction. Option C fails too. So D.
        | Option C fails. D is correct. | correct option: (d)
        | Answer choice C does not fit. The correct option is D.""",
    # The last reads as "Answer: A cat".
    None: """The answer is B cells. | Answer: C major | the answer is a mystery | Answer: E | CAB
        | | The answer is A due to friction.""",
}


@for_each("letter", LETTERS)
def test_the_letter_of_a_choice(letter):
    for text in LETTERS[letter].split("| "):
        assert R.choice_letter(text.strip(), "ABCD") == letter, text


HUGE = "12345678901234567890"  # which no float64 is


CITIES = {"choices": ["Paris", "Lyon"]}
SIGNED = {"answer": "3", "choices": ["-3", "3", "6", "9"]}
NUMBER_2 = {"answer": "2", "choices": NUMBERED}
MARKDOWN = r"""**Answer:** 42 | **Answer: $42$** | Answer: **42** | Answer: *42* | **Answer**: 42
    | __Answer:__ 42 | __Answer: 42__ | *Final answer: 42* | _Answer_: 42 | ***Answer: 42***"""


@for_each(
    ("reward", "metadata", "value", "texts"),
    [
        (R.dapo_math, {"answer": 18.0}, 1.0, "Answer: 18"),
        (R.dapo_math, {"answer": "18.0"}, 1.0, "Answer: 18"),
        (R.dapo_math, {"answer": 18}, -1.0, "Answer: 18" + "\n" * 300),
        (R.dapo_math, {"answer": "1,018"}, -1.0, "Answer: 18"),
        (R.dapo_math, {"answer": "1/2"}, 1.0, "Answer: 1/2"),
        (R.dapo_math, {"answer": "3.7"}, -1.0, "Answer: 3"),
        (R.dapo_math, {"answer": "-1234"}, 1.0, "Answer: -1,234"),
        (R.dapo_math, {"answer": "+5"}, 1.0, "Answer: 5"),
        (R.dapo_math, {"answer": "1e3"}, 1.0, "Answer: 1000"),
        (R.dapo_math, {"answer": "007"}, 1.0, "Answer: 7"),
        (R.dapo_math, {"answer": "0110"}, 1.0, "Answer: 0110"),
        (R.dapo_math, {"answer": "42"}, 1.0, MARKDOWN),
        (R.dapo_math, {"answer": "42"}, 1.0, "So:\n__The final answer: 42__ | **Answer:**\n42"),
        (R.dapo_math, {"answer": "a^*"}, 1.0, "Answer: a^* | *Answer:* a^* | *Answer*: a^*"),
        (R.dapo_math, {"answer": "a^*"}, 1.0, "2*3 is *it*, so the answer: a^*"),
        (R.dapo_math, {"answer": "*"}, 1.0, "Answer: *"),
        (R.dapo_math, {"answer": "__init__"}, 1.0, "__Answer:__ __init__"),
        (R.dapo_math, {"answer": "1e999999999"}, -1.0, "Answer: 1"),
        (R.dapo_math, {"answer": HUGE}, 1.0, f"Answer: {HUGE}"),
        (R.dapo_math, {"answer": HUGE}, -1.0, "Answer: 12345678901234567168"),
        (R.dapo_math, {"answer": "-5"}, 1.0, "Answer: \u22125"),
        (R.dapo_math, {"answer": "\u22125"}, 1.0, "Answer: \u22125 | Answer: -5"),
        (R.f1, {"answer": "Paris"}, 0.0, "<think>Paris</think> Rome"),
        (R.f1, {"answer": ["Paris", "Rome"]}, 2 / 3, "Rome Italy"),
        (R.f1, {"answer": "a"}, 0.0, "the"),
        (R.f1, {"answer": "-5"}, 0.5, "It is -5."),
        (R.exact_match, {"answer": "-5"}, 0.0, "5"),
        (R.exact_match, {"answer": "-5"}, 1.0, "\u22125."),
        (R.exact_match, {"answer": "1.5"}, 0.0, "15"),
        (R.exact_match, {"answer": "it is 1.5"}, 0.0, "It is...1.5!"),
        (R.exact_match, {"answer": "so .. 1.5"}, 1.0, "so, 1.5!"),
        (R.exact_match, {"answer": "1/2"}, 0.0, "12"),
        (R.exact_match, {"answer": "1000"}, 1.0, "$1,000."),
        (R.exact_match, {"answer": ">"}, 0.0, "<"),
        (R.exact_match, {"answer": "a"}, 1.0, "A."),
        (R.exact_match, {"answer": ["Paris", "rome"]}, 1.0, "the Rome."),
        (R.exact_match, {"answer": "Rome"}, 0.0, "Rome Italy"),
        (R.multiple_choice, SIGNED, 1.0, "3"),
        (R.multiple_choice, SIGNED, 0.0, "-3"),
        (R.multiple_choice, {"answer": "B"}, 1.0, "(b) |  b. "),
        (R.multiple_choice, {"answer": 1}, 1.0, "Answer: B"),
        (R.multiple_choice, {"answer": " b "}, 1.0, "Answer: B"),
        (R.multiple_choice, {"answer": "1", "choices": ["1", "2"]}, 1.0, "Answer: A"),
        (R.multiple_choice, {"answer": "Lyon"} | CITIES, 1.0, "Answer: B"),
        (R.multiple_choice, {"answer": "B"} | CITIES, 1.0, "It is Lyon."),
        (R.multiple_choice, {"answer": "B"} | CITIES, 0.0, "Lyon or Paris"),
        (R.multiple_choice, {"answer": "A", "choices": {"a": "x", "b": "y"}}, 0.0, "Answer: E"),
        (R.multiple_choice, {"answer": "C", "choices": ARC}, 1.0, "Answer: C | It is y."),
        (R.multiple_choice, {"answer": "C", "choices": ARC}, 0.0, "Answer: D"),
        (R.multiple_choice, {"answer": "z", "choices": ARC}, 1.0, "Answer: D"),
        (R.multiple_choice, NUMBER_2, 1.0, "Answer: B | So it is (2). | Answer: 2. | Answer: (2)"),
        (R.multiple_choice, NUMBER_2, 1.0, r"Answer: **[2].** | \boxed{(2)}"),
        (R.multiple_choice, NUMBER_2, 0.0, "Answer: A | Answer: (3). | Answer: (-2)"),
        (R.multiple_choice, NUMBER_2, 0.0, "Not 2 but 3. | <think>2</think> 1"),
        (R.multiple_choice, {"answer": "B", "choices": NUMBERED}, 1.0, "Answer: 2"),
        (R.multiple_choice, {"answer": "(2)", "choices": BRACKETED}, 1.0, "Answer: 2)"),
        (R.multiple_choice, {"answer": "1", "choices": NUMBERED}, 1.0, "Mars has 2 moons."),
        (R.think_format, {}, 1.0, "<think></think> | 2?[/THINK]4 | \r\n<think>2?</think>4"),
        (R.think_format, {}, 0.0, "2?</think>4</think>"),
        (R.word_repetition, {}, 0.25, "a b c a b c"),
    ],
)
def test_verifiers(reward, metadata, value, texts):
    for text in texts.split(" | "):
        for function in (reward, pickle.loads(pickle.dumps(reward))):
            found = function("", text, metadata)
            assert found == pytest.approx(value) and isinstance(found, float), text
    for empty in (R.f1, R.exact_match):
        assert empty("", "", {"answer": "A"}) == 0.0


FAMILIES = [
    "<think>{}</think>{}",
    "{}</think>{}",
    "[THINK]{}[/THINK]{}",
    "{}</seed:think>{}",
    "<|START_THINKING|>{}<|END_THINKING|>{}",
    "<|channel>thought\n{}<channel|>{}",
    "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
]


@for_each("family", FAMILIES)
@for_each(
    ("reward", "right", "wrong"),
    [
        (R.last_integer, "It is 4.", "It is 5."),
        (R.dapo_math, "Answer: 4", "Answer: 5"),
        (R.exact_match, "4", "5"),
        (R.f1, "4", "5"),
        (R.boxed_math, r"\boxed{4}", r"\boxed{5}"),
        (R.math_verify, "$4$", "$5$"),
        (R.reasoning_accuracy, "$4$", "$5$"),
    ],
)
def test_a_reward_reads_the_final_part_of_every_family(reward, right, wrong, family):
    if "math" in reward.__name__ or "reason" in reward.__name__:
        pytest.importorskip("math_verify")
    extract = answer_of(reward)
    for thinking, final, value in ((wrong, right, 1.0), (right, wrong, 0.0), (right, "", 0.0)):
        text = family.format(thinking, final)
        assert max(reward("", text, {"answer": "4"}), 0.0) == value, text
        assert extract(text) == extract(f"</think>{final}")
    assert R.think_format("", family.format(right, wrong), {}) == 1.0


@for_each(
    ("reward", "metadata", "message"),
    [
        (R.dapo_math, {}, "dapo_math: metadata['answer'] must be a string, got None"),
        (R.f1, {"answer": []}, "f1: metadata['answer'] must be a string, got []"),
        (R.exact_match, {"answer": True}, "exact_match: metadata['answer'] must be a string"),
        (R.multiple_choice, {"answer": "Z"}, "must be one of the options A, B, C"),
        (R.multiple_choice, {"answer": 2, "choices": ["x", "y"]}, "options A, B or their texts"),
        (R.multiple_choice, {"answer": "x", "choices": ["x", "x"]}, "got 'x'"),
        (R.multiple_choice, {"answer": 0, "choices": ["x"] * 11}, "at most 10 options, got 11"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused(reward, metadata, message):
    with pytest.raises(RewardError) as caught:
        reward("", "Answer: A", metadata)
    assert message in str(caught.value)


@for_each("run", [" ", "(", "\\boxed{", "$", "answer ", "\\text{", "A ", "=", "{"])
def test_no_text_takes_long(run):
    text = "answer" + run * 20_000
    start = time.process_time()
    for reward in (R.boxed_math, R.math_verify, R.dapo_math, R.multiple_choice, R.f1):
        for reply in (text, rf"\boxed{{{run * 900}}}"):
            answer_of(reward)(reply)
    R.think_format("", text, {})
    assert time.process_time() - start < 10.0


def test_boxes_are_graded_as_mathematics():
    pytest.importorskip("math_verify")
    assert R.boxed_math("", r"5, so \boxed{0.5}", {"answer": r"\frac{1}{2}"}) == 1.0
    assert R.boxed_math("", "0.5", {"answer": "0.5"}) == 0.0
    assert R.reasoning_accuracy("", "<think>3</think> 0.5", {"answer": "1/2"}) == 1.0
    assert R.reasoning_accuracy("", "<think>3 0.5", {"answer": "1/2"}) == 0.0
    for reward in (R.boxed_math, R.reasoning_accuracy):
        with pytest.raises(RewardError, match=f"{reward.__name__}: metadata"):
            reward("", "no box", {"answer": ""})


@for_each("text", [r"\boxed{}", r"\boxed{ }", "Answer: $", "no answer"])
def test_an_empty_answer_is_no_vote(text):
    for verifier in (R.boxed_math, R.dapo_math):
        assert R.majority_vote(verifier)("", text, {})["answer_ids"] == -1.0


def test_a_reply_that_names_an_option_by_its_label_or_its_text_votes_for_that():
    vote = R.majority_vote(R.multiple_choice)
    ids = [
        vote("", text, {})["answer_ids"]
        for text in (
            "Answer: 2",
            "<think>3</think>So \\boxed{2}",
            "Answer: Lyon",
            "Answer: B",
            "(b)",
        )
    ]
    assert min(ids) >= 0 and ids[0] == ids[1] and ids[3] == ids[4] and len(set(ids)) == 3
    assert vote("", "None of the 4 options is right.", {})["answer_ids"] == -1


SUM = R.weighted_sum({"right": (R.dapo_math, 1.0), "format": (R.think_format, 0.25)})


@for_each("absent", [math.nan, None, {"reward": math.nan}])
def test_a_term_that_does_not_apply_is_not_in_the_sum(absent):
    terms = {"a": (lambda p, c, m: absent, 1.0), "b": (lambda p, c, m: 2.0, 0.5)}
    value = R.weighted_sum(terms)("", "", {})
    assert value["reward"] == 1.0 and math.isnan(value["a"]) and value["b"] == 2.0
    assert math.isnan(R.weighted_sum({"a": terms["a"]})("", "", {})["reward"])
    with pytest.raises(RewardError, match="weighted_sum: 'c' returns 'two', not a number"):
        R.weighted_sum({"c": (lambda p, c, m: "two", 1.0)})("", "", {})


def vowels(prompt, completion, metadata):
    share = sum(x in "aeiou" for x in completion) / len(completion)
    if metadata.get("returns"):
        return share


async def awaited(prompt, completion, metadata):
    return vowels(prompt, completion, metadata)


@for_each(
    ("returned", "said"),
    [
        (
            [0, 0, 0, 0],
            "term 'vowels' did not apply to 4 of 4 responses, .*None or NaN; .*`return`",
        ),
        ([0, 1, 0, 0], "term 'vowels' did not apply to 3 of 4 responses"),
        ([0, 1, 1, 0], None),
        ([1, 1, 1, 1], None),
    ],
)
@for_each("pooled", [False, True])
def test_a_term_without_a_return_is_told_once_with_its_counts(returned, said, pooled):
    total = R.weighted_sum({"vowels": (vowels, 1.0), "words": (R.word_repetition, 0.5)})
    reward = SimpleNamespace(
        score_batch=lambda *rows: [total(*row) for row in zip(*rows, strict=True)],
        weights_of_sum=total.weights_of_sum, told_absent=total.told_absent,
    ) if pooled else total  # fmt: skip
    rows = [{"returns": x} for x in returned]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            score(reward, ["q"] * 4, ["seashell"] * 4, rows)
    told = [str(x.message) for x in caught]
    assert len(told) == (said is not None) and all(re.search(said, text) for text in told)


def test_the_error_of_a_term_names_it_with_the_line_of_the_users_code():
    line = vowels.__code__.co_firstlineno + 1
    total = R.weighted_sum({"words": (R.word_repetition, 1.0), "vow": (vowels, 1.0)})
    where = rf"\(term 'vow', .*test_verifiers\.py:{line}\)"
    message = rf"raised ZeroDivisionError on prompt 1: division by zero {where}\.$"
    with pytest.raises(RewardError, match=message) as error:
        score(total, ["q"] * 2, ["a", ""], [{"returns": True}] * 2)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    nested = R.weighted_sum({"outer": (total, 1.0)})
    with pytest.raises(RewardError, match=r"\(term 'vow', term 'outer', .*test_verifiers\.py:"):
        score(nested, ["q"], [""], [{}])
    # Of an error within this package, the line of the user's code that called it.
    broken = lambda p, c, m: R.last_integer(p, None, m)  # noqa: E731
    line = broken.__code__.co_firstlineno
    with pytest.raises(RewardError, match=rf"\(.*test_verifiers\.py:{line}\)\.$"):
        score(broken, ["q"], ["4"], [{"answer": "4"}])
    with pytest.raises(
        RewardError, match=r"ZeroDivisionError.*: division by zero \(.*fiers\.py:\d"
    ):
        score(awaited, ["q"], [""], [{}], on_error="raise")


def test_a_weighted_sum_returns_its_terms():
    text = "<think>1</think>\nAnswer: 4"
    value = SUM("", text, {"answer": 4})
    assert value == {"reward": 1.25, "right": 1.0, "format": 1.0}
    assert repr(SUM) == "weighted_sum(right + 0.25 format)" and answer_of(SUM)(text) == "4"
    assert pickle.loads(pickle.dumps(SUM))("", "4", {"answer": 4})["reward"] == -1.0
    scores = score(SUM, ["q"] * 2, [text, "Answer: 4"], [{"answer": 4}] * 2)
    np.testing.assert_allclose(scores.rewards, [1.25, 1.0])
    assert sorted(scores.reward_components) == ["format", "reward", "right"]
    vote = R.weighted_sum({"vote": (R.majority_vote(R.dapo_math), 2.0)})
    assert sorted(vote("", text, {})) == ["answer_ids", "reward", "vote"]


async def slow(prompt, completion, metadata):
    return 1.0


class Batched:
    def __call__(self, prompt, completion, metadata):
        return 1.0

    def score_batch(self, prompts, completions, metadata):
        return [1.0] * len(prompts)


ROW = {"answer": "x"}


def unnamed(prompt, completion, metadata):
    return {"right": 1.0}


def of_verl(data_source, solution_str, ground_truth):
    return float(solution_str == ground_truth)


def sum_of(reward, name="f", weight=1.0):
    return R.weighted_sum({name: (reward, weight)})


@for_each(
    ("call", "error", "message"),
    [
        (lambda: R.weighted_sum({}), ValueError, "there are no terms"),
        (lambda: sum_of(R.f1, "reward"), ValueError, "the name 'reward'"),
        (lambda: sum_of(R.f1, weight=0.0), ValueError, "the weight of 'f'"),
        (lambda: sum_of(R.f1, weight=np.nan), ValueError, "must be finite"),
        (lambda: sum_of(Batched()), TypeError, "a reward of one completion"),
        (lambda: sum_of(of_verl), TypeError, "; of_verl takes"),
        (lambda: sum_of(slow)("", "", {}), TypeError, "'f' is async"),
        (lambda: sum_of(unnamed)("", "", {}), RewardError, "without an entry"),
        (lambda: R.majority_vote(R.think_format), ValueError, "think_format names none"),
        (lambda: R.majority_vote(), ValueError, "there is no verifier"),
        (lambda: R.majority_vote(Batched(), answer=str), TypeError, "grade one completion"),
        (lambda: R.majority_vote(unnamed, answer=str)("", "", ROW), RewardError, "without an en"),
    ],
)
def test_what_cannot_be_composed_is_refused(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


@for_each(
    ("verifier", "same", "other"),
    [
        (R.last_integer, ("so 1,000", "= 1000."), "1001"),
        (R.dapo_math, ("Answer: 1,000", "answer: $1000$"), "Answer: 1001"),
        (R.boxed_math, (r"\boxed{\dfrac12}", r"\boxed{\frac{1}{2}}"), r"\boxed{2}"),
        (R.boxed_math, (r"\boxed{-5}", "\\boxed{\u22125}"), r"\boxed{5}"),
        (R.math_verify, (r"\boxed{7}", "Answer: 7"), "it is 8"),
        (R.math_verify, ("it is -7", "it is \u22127"), "it is 7"),
        (R.reasoning_accuracy, ("<think></think>7", r"</think>\boxed{7}"), "</think>8"),
        (R.f1, ("the Rome!", "rome"), "Paris"),
        (R.exact_match, ("the Rome!", "rome"), "Paris"),
        (R.multiple_choice, ("Answer: A", "(A)"), "B"),
        (SUM, ("Answer: 4", "Answer: $4$"), "Answer: 5"),
    ],
)
def test_every_verifier_votes_without_answers(verifier, same, other):
    vote = R.majority_vote(verifier)
    ids = [vote("", text, {"answer": None})["answer_ids"] for text in (*same, other)]
    assert ids[0] == ids[1] != ids[2] and all(0 <= x < 2**23 for x in ids)
    scores = score(vote, ["q"] * 4, [*same, other, "<think>"], [{}] * 4)
    answers = np.int32(scores.reward_components["answer_ids"])
    if verifier not in (R.f1, R.exact_match):  # any text answers those
        assert answers[3] == -1
    trained = R.majority_rewards(jnp.zeros(4), answer_ids=jnp.array(answers))
    assert trained.tolist()[:3] == [1.0, 1.0, 0.0] and not scores.rewards.any()
    assert pickle.loads(pickle.dumps(vote))("", same[0], {})["answer_ids"] == ids[0]


@R.extracts(str.strip)
def within(prompt, completion, metadata, *, tol=0.0, scale=1.0):
    return float(abs(float(completion) - metadata["answer"]) * scale <= tol)


def test_bound_options_hide_neither_the_extractor_nor_the_name():
    both = functools.partial(bind(within, tol=0.1), scale=2.0)
    for bound in (bind(within, tol=0.1), functools.partial(within, tol=0.1), both):
        assert answer_of(bound) is str.strip and name_of(bound) == "within"
        vote = R.majority_vote(bound)
        assert repr(vote) == "majority_vote(within)"
        assert vote("", " 4 ", {})["answer_ids"] == vote("", "4", {})["answer_ids"]
        assert vote("", "4.05", {"answer": 4})["reward"] == 1.0
    assert name_of(bind(R.code_stdio, total=50.0)) == "code_stdio"
    assert answer_of(bind(R.code_stdio, total=50.0)) is None


def test_repetition_reads_runs_of_the_response_alone():
    tokens = jnp.array([[1, 2, 9, 1, 2, 3], [1, 2, 1, 2, 1, 2]])
    mask = jnp.array([[True, True, False, True, True, True], [True] * 6])
    # The token of an environment parts two runs: 12 | 12 23, of which one is repeated.
    out = jax.jit(lambda t, m: R.repetition_penalty(t, m, ngram=2))(tokens, mask)
    np.testing.assert_allclose(out, [-1 / 3, -3 / 5], rtol=1e-6)
    rng = np.random.default_rng(0)
    tokens, lengths = rng.integers(0, 4, (3, 5, 40)), rng.integers(0, 41, (3, 5))
    mask = np.arange(40) < lengths[..., None]
    ours = R.repetition_penalty(jnp.array(tokens), jnp.array(mask), max_penalty=-2.0)
    for place in np.ndindex(3, 5):
        row = tokens[place][: lengths[place]].tolist()
        runs = list(zip(row, row[1:], row[2:], strict=False))
        wanted = -2.0 * (1 - len(set(runs)) / len(runs)) if runs else 0.0
        assert ours[place] == pytest.approx(wanted, abs=1e-6)
    where = jnp.array([[True, False]])
    shaped = R.repetition_rewards(
        jnp.array([[1.0, jnp.nan]]),
        jnp.ones((1, 2, 4), int),
        jnp.ones((1, 2, 4), bool),
        where=where,
    )
    assert shaped.tolist() == [[0.5, 0.0]]


def test_length_rewards_of_a_batch():
    mask = jnp.arange(8) < jnp.array([[2, 8, 4, 6]]).T[None, :, 0, None]
    r, where = jnp.array([[1.0, 1.0, 0.0, jnp.nan]]), jnp.array([[True, True, True, False]])
    group = R.group_length_rewards(r, mask, weight=0.5, where=where)
    np.testing.assert_allclose(group, [[1.25, 0.75, 0.0, 0.0]])
    alone = R.group_length_rewards(jnp.ones((1, 4)), mask, where=jnp.zeros((1, 4), bool))
    assert alone.tolist() == [[0.0] * 4]
    cosine = R.cosine_length_rewards(r, mask, max_length=8, exceeded=-10.0, where=where)
    np.testing.assert_allclose(
        cosine[0], [0.75 + 0.25 * np.cos(np.pi / 4), -10.0, -0.75, 0.0], rtol=1e-6
    )
    budgets = jnp.array([[4.0, 4.0, 4.0, jnp.nan]])
    out = R.budget_rewards(r, mask, budgets=budgets, form="max", coef=0.125, where=where)
    np.testing.assert_allclose(out, [[0.75, 0.0, 0.0, 0.0]])
    for function in (
        R.group_length_rewards,
        lambda r, m: R.cosine_length_rewards(r, m, max_length=8),
    ):
        assert jnp.isnan(function(r, mask)[0, 3])


PAIR, TOKENS, MASK = jnp.ones(2), jnp.ones((2, 4), int), jnp.ones((2, 4), bool)
BAD_SHAPING = """
ValueError:
    R.repetition_penalty(TOKENS, MASK, max_penalty=1.0)  # .*must be 0 or below; got 1
    R.repetition_penalty(TOKENS, MASK, ngram=0)  # .*ngram must be above 0
    R.repetition_rewards(PAIR, TOKENS, MASK[:1])  # .*mask must have shape
    R.cosine_length_reward(PAIR > 0, PAIR, max_length=0)  # .*max_length must be above
    R.cosine_length_rewards(PAIR, MASK, max_length=4, min_right=2.0)
    # .*min_right must not exceed max_right; got 2 and 1
    R.budget_rewards(PAIR, MASK, budgets=jnp.ones(3))  # .*budgets must have shape
    R.budget_rewards(PAIR, MASK, budgets=PAIR, form="soft")  # .*form
    R.group_length_rewards(PAIR, MASK, weight=-1.0)  # .*weight
TypeError:
    R.repetition_penalty(TOKENS * 1.0, MASK)  # .*tokens must hold
    R.cosine_length_reward(PAIR, PAIR, max_length=4)  # .*correct must be bool
"""


@for_each(("error", "call", "message"), bad_calls(BAD_SHAPING))
def test_bad_shaping_is_refused(error, call, message):
    raises(error, call, f"!{call.strip()[2:10]}{message}", globals())


@for_each(
    ("answer", "right", "wrong"),
    [
        (r"2\pi", r"\boxed{2\pi}", r"\boxed{2}"),
        ("(1, 2)", r"\boxed{(1,2)}", r"\boxed{2}"),
        ("1,-2", r"\boxed{-2,1}", r"\boxed{1}"),
        ("3, 5, 7", r"\boxed{3,5,7}", r"\boxed{7}"),
        ("3,4", r"\boxed{3, 4}", r"\boxed{3.4}"),
        ("1 and 2", r"\boxed{1,2}", r"\boxed{2}"),
        ("-2 + 7i", r"\boxed{7i-2}", r"\boxed{7}"),
        ("2x + 3", r"\boxed{3+2x}", r"\boxed{3}"),
        ("y = 2x + 3", r"\boxed{y=2x+3}", r"\boxed{3}"),
        ("1 < x < 3", r"\boxed{1<x<3}", r"\boxed{3}"),
        ("4!", r"\boxed{24}", r"\boxed{4}"),
        ("5x", r"\boxed{5x}", r"\boxed{5}"),
        ("2 pi", r"\boxed{2\pi}", r"\boxed{2}"),
        ("2 sin x", r"\boxed{2\sin x}", r"\boxed{2}"),
        ("1,234.50", r"\boxed{1234.5}", r"\boxed{234.5}"),
        ("12 in", r"\boxed{12}", r"\boxed{12in}"),
        ("$12.50", r"\boxed{12.5}", r"\boxed{50}"),
        ("18 dollars", r"\boxed{18}", r"\boxed{8}"),
        ("#### 72", r"\boxed{72}", r"\boxed{2}"),
        ("1 000", r"\boxed{1000}", r"\boxed{0}"),
        ("3/4", r"\boxed{0.75}", r"\boxed{4}"),
        ("12%", r"\boxed{12\%}", r"\boxed{2}"),
        ("12 km/h", r"\boxed{12}", r"\boxed{2}"),
        ("10 L", r"\boxed{10\text{ L}}", r"\boxed{1}"),
        ("5 N", r"\boxed{5}", r"\boxed{6}"),
        ("€5", r"\boxed{5}", r"\boxed{6}"),
    ],
)
def test_a_bare_answer_is_not_its_last_number(answer, right, wrong):
    pytest.importorskip("math_verify")
    for reward in (R.math_verify, R.boxed_math):
        assert reward("", right, {"answer": answer}) == 1.0
        assert reward("", wrong, {"answer": answer}) == 0.0
        assert reward("", right, {"answer": ("77", answer)}) == 1.0
        assert reward("", wrong, {"answer": ["77", answer]}) == 0.0


def test_a_long_answer_is_normalized_in_a_time_that_is_linear():
    """The patterns of ``normalize_math`` are quadratic, so a long text keeps its commands."""
    short, long = (rf"\text{{a}}{'1' * digits}" for digits in (10, 20_000))
    assert rewards.normalize_math(short) == f"a{'1' * 10}"
    assert rewards.normalize_math(long) == long
