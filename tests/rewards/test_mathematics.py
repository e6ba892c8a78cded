"""Answers of mathematics: the golden pairs, replies in prose, odd texts and random notations."""

import json
import math
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm import rewards
from jaxrl_llm.core import bind
from jaxrl_llm.rewards import RewardError
from jaxrl_llm.rewards.answers import row_check
from jaxrl_llm.rewards.formulas import replied
from jaxrl_llm.rewards.mathematics import equal, vote_text
from jaxrl_llm.rewards.numbers import canonical, rational

KINDS = json.loads((Path(__file__).parents[1] / "golden" / "mathematics.json").read_text())["kinds"]


def boxed(answer, reply):
    return rewards.boxed_math("", rf"\boxed{{{reply}}}", {"answer": answer})


@pytest.mark.of_many
@pytest.mark.parametrize("part", range(4))
def test_golden_pairs_in_both_directions(part):
    assert len(KINDS) == 40 and {len(x[v]) for x in KINDS.values() for v in x} == {5}
    wrong = {"equal": [], "different": []}
    for kind, verdicts in list(KINDS.items())[part::4]:
        for verdict, pairs in verdicts.items():
            for a, b in (x for pair in pairs for x in (pair, pair[::-1])):
                if boxed(a, b) != (verdict == "equal"):
                    wrong[verdict].append((kind, a, b))
    assert not wrong["different"], f"false positives: {wrong['different']}"
    assert not wrong["equal"], f"false negatives: {wrong['equal']}"


@for_each(
    ("reply", "answer", "right"),
    [
        ("The answer is 2x + 3.", "2x+3", 1.0),
        ("The answer is 2x + 3.", "3", 0.0),
        (r"The answer is 0.\overline{3}.", "0", 0.0),
        (r"The answer is 0.\overline{3}.", "1/3", 1.0),
        ("So it is 2 sin x", r"2\sin x", 1.0),
        ("So it is 2 sin x", "2", 0.0),
        ("So x < 2", "2", 0.0),
        ("It is 4 10/3.", "10", 0.0),
        ("We take 4 1/4 cups.", "4.25", 1.0),
        ("It has 1 000 000 cells", "1000000", 1.0),
        ("In 2024 5 people came", "5", 1.0),
        ("The point is (2, 3).", "(2,3)", 1.0),
        ("5 - 9 = \u22124.", "-4", 1.0),
        ("It costs $12 and $15.", "15", 1.0),
        ("**Answer:** 42", "42", 1.0),
        ("Answer: no solution", r"\text{no solution}", 1.0),
        (r"$\boxed{1}$ and $\boxed{2}$", "1,2", 1.0),
        (r"\boxed{1}, no: \boxed{2}", "2", 1.0),
        (r"\boxed{12", "12", 0.0),
        ("The final answer is $1$ or $-1$. I hope", r"\pm 1", 1.0),
        ("It is 10² m", "100", 1.0),
        ("The answer is n(n+1)/2.", r"\frac{n(n+1)}{2}", 1.0),
        ("The answer is n(n+1)/2.", r"\frac{n+1}{2}", 0.0),
        ("So it equals x(x+1).", "x^2+x", 1.0),
        ("So it is n(n-1)(n-2)/6", r"\binom{n}{3}", 1.0),
        ("We get a(b+c) here", "b+c", 0.0),
        ("It is a point (3,4)", "(3,4)", 1.0),
        ("It is the point P(3, 4).", "(3,4)", 1.0),
        ("The answer is (C).", "C", 1.0),
        ("The answer is C.", "C", 1.0),
        ("Answer: C", "C", 1.0),
        ("The answer is **C**", "C", 1.0),
        ("**Answer:** [D]", "D", 1.0),
        ("The answer is (C).", "D", 0.0),
        ("Answer: A) 12", "12", 1.0),
        ("The answer is - 5", "-5", 1.0),
        ("The answer is:\n- 5", "5", 1.0),
        ("Answer: - 2x", "-2x", 1.0),
    ],
)
def test_the_answer_in_prose_is_the_whole_formula(reply, answer, right):
    assert rewards.math_verify("", reply, {"answer": answer}) == right
    assert rewards.reasoning_accuracy("", f"7</think>{reply}", {"answer": answer}) == right


@for_each(
    ("kind", "pairs"),
    {
        "exact decimals": [
            (r"0.1\pi", r"\frac{\pi}{10}"),
            (r"1.2\sqrt3", r"\frac{6\sqrt3}{5}"),
            ("x^{0.5}", r"\sqrt{x}"),
            ("100e^{0.02t}", r"100e^{\frac{t}{50}}"),
            (r"(-\infty,0.1\pi]", r"(-\infty,\frac{\pi}{10}]"),
            ("0.3x", r"\frac{3x}{10}"),
        ],
        "large factorials and sums": [
            (r"1-\frac{1}{2023!}", r"\frac{2023!-1}{2023!}"),
            (r"\frac{3000!}{2999!}", "3000"),
            (r"\binom{100000}{2}", "4999950000"),
            (r"\sum_{k=1}^{1000} k", "500500"),
        ],
        "ratios and times": [("3 : 2 : 1", "3:2:1"), ("3:2", "6:4"), ("12:30", "12:30")],
        "degrees": [
            (r"\sin 30^\circ", "0.5"),
            (r"\tan 45^\circ", "1"),
            (r"\tan(45°)", r"\tan 45^{\circ}"),
            (r"\cos{120^\circ}", "-0.5"),
            (r"\sin^2 30^\circ", r"\frac14"),
            ("sin(30 degrees)", "0.5"),
            (r"45^\circ", "45"),
        ],
        "real roots": [
            (r"\sqrt[3]{-8}", "-2"),
            (r"\sqrt[5]{-32}", "-2"),
            ("x^{2/3}", r"\sqrt[3]{x^2}"),
            (r"\sqrt{ab}", r"\sqrt a\sqrt b"),
            (r"\log_2(xy)", r"\log_2 x+\log_2 y"),
            (r"\ln\frac{x}{y}", r"\ln x-\ln y"),
            (r"\sqrt{-4}", "2i"),
        ],
        "units": [
            (r"9.8 \mathrm{~m/s^2}", "9.8"),
            (r"9.8 \mathrm{~m} / \mathrm{s}^{2}", r"9.8 \text{ m/s}^2"),
            (r"60 \text{ km}/\text{h}", r"60 \text{ km/h}"),
            (r"25^\circ\text{C}", "25"),
            (r"77^{\circ} F", "77°F"),
            (r"3 \text{ cm}^{-1}", "3"),
            (r"3 \Omega", "3"),
        ],
    }.items(),
)
def test_equal_pairs_beyond_the_golden_ones(kind, pairs):
    wrong = [x for a, b in pairs for x in ((a, b), (b, a)) if not equal(*x)]
    assert not wrong, f"false negatives of {kind}: {wrong}"


@for_each(
    ("a", "b"),
    [
        (r"0.1\pi", r"0.11\pi"),
        (r"\frac{1}{3000!}", r"\frac{2}{3000!}"),
        (r"\binom{1000000}{500000}", r"x>\pi"),
        (r"\binom{10^6}{500000}", r"\pi"),
        (r"\sum_{k=0}^{2023} \binom{2023}{k}x^k", r"x>\pi"),
        (r"\prod_{k=1}^{5000}(x+k)", "x"),
        ("3:2:1", "3:1:2"),
        ("1:2:3", "1:3:2"),
        ("4:2:1", "2"),
        ("8:30", "4:15"),
        ("12:30", "0.4"),
        (r"\sin 30^\circ", r"\sin 30"),
        (r"\cos 60^\circ", r"\cos 60"),
        (r"\sqrt{x^2}", "x"),
        (r"\sqrt[3]{-8}", "2"),
        (r"\log_2(xy)", r"\log_2 x-\log_2 y"),
        (r"\ln|x|", r"\ln x"),
        (r"9.8 \mathrm{~m/s^2}", r"9.8 \text{ m/s}"),
        (r"9.8 \mathrm{~m} / \mathrm{s}^{2}", r"9.8 \mathrm{~m} / \mathrm{s}"),
        (r"2\mathrm{i}/\mathrm{e}", "2"),
        (r"25^\circ\text{C}", "25°F"),
    ],
)
def test_different_pairs_beyond_the_golden_ones(a, b):
    equal("1", r"\pi")  # imports
    start = time.process_time()
    assert not equal(a, b) and not equal(b, a)
    assert time.process_time() - start < 10.0


@for_each(
    ("answer", "right", "wrong"),
    [
        ("March 5", ["March 5", "5"], ["6", "March 6"]),
        ("Tuesday at 5 pm", ["Tuesday at 5 pm", "5"], ["Monday at 5 pm"]),
        ("The roots are $1$ and $-1$.", ["1,-1"], ["1"]),
        ("2 hours 30 minutes", None, None),
        ("5 feet 4 inches", None, None),
        ("3 apples and 4 oranges", None, None),
        ("Between 2 and 3", None, None),
        ("The point (3,4) and then 5", None, None),
        ("Page 3 of 10", None, None),
    ],
)
def test_an_answer_of_prose_has_one_formula(answer, right, wrong):
    if right is None:
        with pytest.raises(RewardError, match="readable as mathematics"):
            boxed(answer, answer)
        return
    assert all(boxed(answer, x) == 1.0 for x in right)
    assert not any(boxed(answer, x) for x in wrong)


@for_each(
    "text",
    [
        "\\(" * 9_999,
        "\\[ " * 6_000,
        "\\(x" * 6_000,
        "(" * 20_000,
        "1 " * 20_000,
        "x+" * 20_000,
        "a" * 40_000,
    ],
)
def test_no_reply_takes_long(text):
    start = time.process_time()
    for reply in (text, f"answer: {text}", rf"\boxed{{{text}}}", f"${text}$"):
        rewards.math_verify("", reply, {"answer": "7"})
    assert time.process_time() - start < 10.0


def forms(value, draw):
    """One of the ways to write a rational number that it has."""
    n, d = value.numerator, value.denominator
    sign, n = ("-" if n < 0 else ""), abs(n)
    ways = [rf"{sign}\frac{{{n}}}{{{d}}}", f"{sign}{3 * n}/{3 * d}", rf"\dfrac{{{sign}{n}}}{{{d}}}"]
    if d == 1:
        ways += [
            f"{sign}{n:,}",
            f"{sign}{n}.0",
            f"${sign}{n}$",
            rf"{sign}{n}\text{{ cm}}",
            f"x={sign}{n}",
        ]
        ways += [f"{sign}{n:,}".replace(",", mark) for mark in (r"\,", "{,}", "_", "'")]
    elif n > d:
        whole, over = divmod(n, d)
        ways += [f"{sign}{whole} {over}/{d}", rf"{sign}{whole}\frac{{{over}}}{{{d}}}"]
    if (100 * value).denominator == 1:
        ways += [
            f"{sign}{n / d:.2f}",
            rf"{sign}{100 * n // d}\%",
            f"{sign}{n / d:.1e}" if n / d < 1 else f"{sign}{n / d:.4f}",
        ]
    if math.gcd(d, 10) == 1 and d > 1:
        period = next(k for k in range(1, d) if (10**k - 1) % d == 0)
        whole, over = divmod(n, d)
        ways.append(rf"{sign}{whole}.\overline{{{over * (10**period - 1) // d:0{period}d}}}")
    way = draw(st.sampled_from(ways))
    return way.replace("-", "\u2212") if draw(st.booleans()) and "e" not in way else way


RATIONALS = st.builds(
    Fraction, st.integers(-9999, 9999), st.sampled_from([1, 1, 2, 3, 4, 7, 8, 11, 25, 100])
)


@settings(max_examples=300, deadline=None)
@given(st.data(), RATIONALS, RATIONALS)
def test_numbers_in_random_notations(data, a, b):
    first, again, other = forms(a, data.draw), forms(a, data.draw), forms(b, data.draw)
    assert equal(first, again) and equal(again, first), (first, again)
    if "%" not in first + again:
        assert vote_text(first) == vote_text(again), (first, again)
    if a != b and "%" not in first + other:
        assert vote_text(first) != vote_text(other), (first, other)
    # A percent sign may be left out.
    if a != b and not ({a, 100 * a} & {b, 100 * b}):
        assert not equal(first, other) and not equal(other, first), (first, other)


NONE = [None, "", "  ", math.nan, [], ["4", ""], ["4", None], True, {}]


@for_each(
    ("text", "value"),
    [
        ("5 - -3", 8),
        ("5 + -3", 2),
        ("5---3", 2),
        ("5----3", None),
        ("+-5", -5),
        ("-+-5", None),
        (r"2\cdot--3", 6),
        ("-2^2", -4),
        ("--2^2", 4),
        ("3/-4", Fraction(-3, 4)),
        ("2^{--1}", 2),
        ("5-", None),
    ],
)
def test_a_number_has_at_most_two_signs(text, value):
    read = rational(canonical(text))
    assert (read and read.value) == value


@for_each(
    ("reward", "good", "bad"),
    [
        (rewards.math_verify, ["1/2", 0.5, r"\text{no solution}", "no solution", r"\pi"], ["blue"]),
        (rewards.boxed_math, [r"x \equiv 3 \pmod 5", r"\triangle ABC", "#### 72"], ["the cat sat"]),
        (rewards.reasoning_accuracy, ["4", ["4", "5"]], ["Yes, it is."]),
        (rewards.last_integer, [4, "#### 18", ["4", "5"]], ["7.5"]),
        (rewards.exact_match, ["Rome", 0, ["a", "b"]], []),
        (rewards.f1, ["Rome", "0"], []),
        (rewards.dapo_math, [18, "18"], []),
        (rewards.multiple_choice, ["B", 1], ["Z"]),
        (bind(rewards.exact_match), ["Rome"], []),
        (
            rewards.weighted_sum({"a": (rewards.f1, 1.0), "b": (rewards.think_format, 1.0)}),
            ["x"],
            [],
        ),
    ],
)
def test_rows_are_checked_without_a_reply(reward, good, bad):
    check = row_check(reward)
    for answer in good:
        check({"answer": answer})
    for answer in [*NONE, *bad]:
        with pytest.raises(RewardError):
            check({"answer": answer})


# Kinds whose equal pairs are one vote, and kinds whose other pairs differ in a unit or a name.
ONE_VOTE = (
    "integers; groups of digits; mixed numbers in plain text; mixed numbers in LaTeX; fractions; "
    "decimals; repeating decimals; scientific notation; tiny numbers; currency; degrees; ratios; "
    "units of length and time; units of area, counts; number bases; plus or minus; words"
)
LEFT_OUT = "currency; units of length and time; units of area, counts; degrees; named values"


def test_votes_agree_with_the_grader():
    apart, joined = [], []
    for kind, verdicts in KINDS.items():
        one = kind in ONE_VOTE.split("; ")
        apart += [x for x in verdicts["equal"] if one and vote_text(x[0]) != vote_text(x[1])]
        if kind not in LEFT_OUT.split("; "):
            joined += [x for x in verdicts["different"] if vote_text(x[0]) == vote_text(x[1])]
    assert not apart and not joined


@for_each(
    ("same", "other"),
    [
        (["1/2", "0.5", r"\frac12", "x = .50", r"$\dfrac{2}{4}$", r"0.5\text{ cm}"], "-1/2"),
        (["12%", "12"], "1.2"),
        (["0.5%", "0.005"], "0.5"),
        (["1, 2", r"\{2.0, \frac{3}{3}\}", r"1 \text{ and } 2"], "(1, 2)"),
        (["(1, 1/2)", r"\left(1, 0.5\right)"], "(1/2, 1)"),
        ([r"\text{No solutions}", "no solution"], "0"),
        ([r"3 \sqrt{2}", r"3\sqrt2 \text{ cm}"], r"2\sqrt{3}"),
        (["1 + x"], "2"),
        (["2 3"], "23"),
        (["10^{5000}", r"10 \cdot 10^{4999}"], "10^{5001}"),
        (["x < 2"], "x > 2"),
        (["1" * 3000], "1" * 2999 + "2"),
    ],
)
def test_equal_answers_are_one_vote(same, other):
    for reward, wrap in (
        (rewards.boxed_math, r"So \boxed{{{}}}."),
        (rewards.math_verify, r"It is \boxed{{{}}}."),
        (rewards.reasoning_accuracy, r"7</think>\boxed{{{}}}"),
    ):
        vote = rewards.majority_vote(reward)
        ids = [vote("", wrap.format(x), {})["answer_ids"] for x in (*same, other)]
        assert len(set(ids[:-1])) == 1 and ids[-1] != ids[0] and min(ids) >= 0
    for reply in ("The answer is 0.5.", "Half: $\\frac{1}{2}$"):  # what the grader reads
        vote = rewards.majority_vote(rewards.math_verify)("", reply, {})
        assert vote == rewards.majority_vote(rewards.math_verify)("", "Answer: 1/2", {})


def test_votes_and_pools_pass_on_the_check_of_rows():
    vote = rewards.majority_vote(rewards.boxed_math)
    assert row_check(vote)({}) is None  # a question without an answer
    assert row_check(rewards.think_format) is None
    rows = [{"id": "sum", "answer": "4"}, {"id": "sky", "answer": "blue"}]
    with rewards.math_verify_pool(vote, workers=1, deadline=60.0) as pool:
        with pytest.raises(RewardError, match="boxed_math: metadata"):
            pool.check_row({"answer": ""})
        # An answer of prose ends the scoring and is named.
        told = r"cannot grade prompt 1 \(id 'sky'\): RewardError: boxed_math: .* got 'blue'"
        with pytest.raises(RewardError, match=told):
            rewards.score(pool, ["p"] * 2, [r"\boxed{4}"] * 2, rows)


@for_each(
    ("reply", "answer", "right"),
    [
        ("“Rome”", "Rome", 1.0),
        ("l’avion", "l'avion", 1.0),
        ("Cafe\u0301", "Café", 1.0),
        ("ﬁne", "fine", 1.0),
        ("１２３", "123", 1.0),
        ("New\u00a0York", "new york", 1.0),
        ("\u22125 °C", "-5 °C", 1.0),
        ("1914–1918", "1914-1918", 1.0),
        ("STRASSE", "straße", 1.0),
        ("1½", "1 1/2", 1.0),
        ("zero\u200bwidth", "zerowidth", 1.0),
        ("Café", "Cafe", 0.0),
        ("\u22125", "5", 0.0),
    ],
)
def test_words_are_compared_in_one_form_of_unicode(reply, answer, right):
    assert rewards.exact_match("", reply, {"answer": answer}) == right
    assert (rewards.f1("", reply, {"answer": answer}) == 1.0) == bool(right)


def test_replied_takes_what_the_reply_states():
    assert replied("Of 7 and 8 the answer is 7, as 8 is even.") == "7"
    assert replied("no number") is None
