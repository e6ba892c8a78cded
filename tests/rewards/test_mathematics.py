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
    ("reply", "right", "wrong"),
    [
        ("The answer is 2x + 3.", "2x+3", "3"),
        (r"The answer is 0.\overline{3}.", "1/3", "0"),
        ("So it is 2 sin x", r"2\sin x", "2"),
        ("So x < 2", "x<2", "2"),
        ("It is 4 10/3.", None, "10"),
        ("We take 4 1/4 cups.", "4.25", "4"),
        ("It has 1 000 000 cells", "1000000", "0"),
        ("In 2024 5 people came", "5", "20245"),
        ("The point is (2, 3).", "(2,3)", "3"),
        ("5 - 9 = \u22124.", "-4", "4"),
        ("It costs $12 and $15.", "15", "12"),
        ("**Answer:** 42", "42", "2"),
        ("Answer: no solution", r"\text{no solution}", "0"),
        (r"$\boxed{1}$ and $\boxed{2}$", "1,2", None),
        (r"\boxed{1}, no: \boxed{2}", "2", "1"),
        (r"\boxed{12", None, "12"),
        ("The final answer is $1$ or $-1$. I hope", r"\pm 1", "1"),
        ("It is 10² m", "100", "102"),
        ("The answer is n(n+1)/2.", r"\frac{n(n+1)}{2}", r"\frac{n+1}{2}"),
        ("So it equals x(x+1).", "x^2+x", "x+1"),
        ("So it is n(n-1)(n-2)/6", r"\binom{n}{3}", "1/3"),
        ("We get a(b+c) here", None, "b+c"),
        ("It is a point (3,4)", "(3,4)", "4"),
        ("It is the point P(3, 4).", "(3,4)", "4"),
        ("The answer is (C).", "C", "D"),
        ("The answer is **C**", "C", "D"),
        ("**Answer:** [D]", "D", "C"),
        ("Answer: A) 12", "12", None),
        ("The answer is - 5", "-5", "5"),
        ("The answer is:\n- 5", "5", "-5"),
        ("Answer: - 2x", "-2x", "2x"),
    ],
)
def test_the_answer_in_prose_is_the_whole_formula(reply, right, wrong):
    for answer, value in ((right, 1.0), (wrong, 0.0)):
        if answer is not None:
            assert rewards.math_verify("", reply, {"answer": answer}) == value
            assert rewards.reasoning_accuracy("", f"7</think>{reply}", {"answer": answer}) == value


# Pairs beyond the golden ones: the last column differs, the others are one.
BEYOND = r"""
0.1\pi = \frac{\pi}{10} != 0.11\pi
1.2\sqrt3 = \frac{6\sqrt3}{5}
x^{0.5} = \sqrt{x}
100e^{0.02t} = 100e^{\frac{t}{50}}
(-\infty,0.1\pi] = (-\infty,\frac{\pi}{10}]
0.3x = \frac{3x}{10}
1-\frac{1}{2023!} = \frac{2023!-1}{2023!}
\frac{3000!}{2999!} = 3000
\binom{100000}{2} = 4999950000
\sum_{k=1}^{1000} k = 500500
\frac{1}{3000!} != \frac{2}{3000!}
\binom{1000000}{500000} != x>\pi
\binom{10^6}{500000} != \pi
\sum_{k=0}^{2023} \binom{2023}{k}x^k != x>\pi
\prod_{k=1}^{5000}(x+k) != x
3 : 2 : 1 = 3:2:1 != 3:1:2
3:2 = 6:4
12:30 = 12:30 != 0.4
1:2:3 != 1:3:2
4:2:1 != 2
8:30 != 4:15
\sin 30^\circ = 0.5 != \sin 30
\tan 45^\circ = 1
\tan(45°) = \tan 45^{\circ}
\cos{120^\circ} = -0.5
\sin^2 30^\circ = \frac14
sin(30 degrees) = 0.5
45^\circ = 45
\cos 60^\circ != \cos 60
\sqrt[3]{-8} = -2 != 2
\sqrt[5]{-32} = -2
x^{2/3} = \sqrt[3]{x^2}
\sqrt{ab} = \sqrt a\sqrt b
\log_2(xy) = \log_2 x+\log_2 y != \log_2 x-\log_2 y
\ln\frac{x}{y} = \ln x-\ln y
\sqrt{-4} = 2i
\sqrt{x^2} != x
\ln|x| != \ln x
9.8 \mathrm{~m/s^2} = 9.8 != 9.8 \text{ m/s}
9.8 \mathrm{~m} / \mathrm{s}^{2} = 9.8 \text{ m/s}^2 != 9.8 \mathrm{~m} / \mathrm{s}
60 \text{ km}/\text{h} = 60 \text{ km/h}
25^\circ\text{C} = 25 != 25°F
77^{\circ} F = 77°F
3 \text{ cm}^{-1} = 3
3 \Omega = 3
2\mathrm{i}/\mathrm{e} != 2
"""


@for_each("line", BEYOND.strip().splitlines())
def test_pairs_beyond_the_golden_ones(line):
    line, _, other = line.partition(" != ")
    a, _, b = line.partition(" = ")
    assert not b or (equal(a, b) and equal(b, a))
    if other:
        start = time.process_time()
        assert not equal(a, other) and not equal(other, a)
        assert time.process_time() - start < 10.0


def test_an_answer_of_prose_has_one_formula():
    for answer, right, wrong in (
        ("March 5", ["March 5", "5"], ["6", "March 6"]),
        ("Tuesday at 5 pm", ["Tuesday at 5 pm", "5"], ["Monday at 5 pm"]),
        ("The roots are $1$ and $-1$.", ["1,-1"], ["1"]),
    ):
        assert all(boxed(answer, x) == 1.0 for x in right)
        assert not any(boxed(answer, x) for x in wrong)
    for answer in (
        *("2 hours 30 minutes", "3 apples and 4 oranges", "Between 2 and 3", "Page 3 of 10"),
        "The point (3,4) and then 5",
    ):
        with pytest.raises(RewardError, match="readable as mathematics"):
            boxed(answer, answer)


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


SAME_WORDS = """“Rome”=Rome | l’avion=l'avion | Cafe\u0301=Café | ﬁne=fine | １２３=123 | 1½=1 1/2
New\u00a0York=new york | \u22125 °C=-5 °C | 1914–1918=1914-1918 | STRASSE=straße
zero\u200bwidth=zerowidth"""
OTHER_WORDS = "Café=Cafe | \u22125=5"


@for_each(
    ("reply", "answer", "right"),
    [
        (*pair.split("="), right)
        for text, right in ((SAME_WORDS, 1.0), (OTHER_WORDS, 0.0))
        for pair in text.replace("\n", " | ").split(" | ")
    ],
)
def test_words_are_compared_in_one_form_of_unicode(reply, answer, right):
    assert rewards.exact_match("", reply, {"answer": answer}) == right
    assert (rewards.f1("", reply, {"answer": answer}) == 1.0) == bool(right)
