"""The last integer of a reply, and numbers that mathematics compares by their digits."""

import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm import rewards
from jaxrl_llm.rewards import last_integer, last_integer_vote

# The last integer of the texts between the bars.
LAST = {
    4: r"4 | The answer is 4. | 4! | 3-4 | x-4 | step-4 | - 4 | +4",
    -4: r"= -4 | =-4 | = - 4 | is -4 | is -4. | a) -4 | -4 | 5 - 9 = -4 | 5 − 9 = −4 | is –4",
    3: r"5 - 3 | 5 -3 | 5- 3 | (2)-3 | 8 – 3 | 1,2,3",
    -3: "5\n-3 | 5 - -3 | 5 - (-3)",
    -7: r"\boxed{-7} | \boxed{- 7}",
    -12: r"**-12** | $-12$",
    1234: r"1,234 | \boxed{1{,}234}",
    -1234567: r"-1,234,567.",
    7: r"007 | 7.00 | 7. Done",
    0: r"0 | -0",
    -5: r"The result is -$5. | so -\$5",
    -1200: r"−£1,200 in all",
    -1234: r"$-1\,234$",
    18: r"#### 18",
    6: r"from $4-$6",
    5: r"12...5",
    345: r"1,2,345",
    567: r"1234,567",
    234: r"1, 234",
    3456: r"2,3456",
}
NONE = ["", "no number", "7.5", "3 + 4 = .5", "version 1.2.3", "9" * 5000, "４"]


@for_each(("text", "value"), [(x, v) for v, texts in LAST.items() for x in texts.split(" | ")])
def test_the_last_integer(text, value):
    assert last_integer("", text, {"answer": value}) == 1.0
    assert last_integer("", text, {"answer": str(value)}) == 1.0
    assert last_integer("", text, {"answer": value + 1}) == 0.0
    if value:
        assert last_integer("", text, {"answer": -value}) == 0.0


@for_each("text", NONE)
def test_no_integer_scores_zero(text):
    for answer in (0, 3, 4, 5, 7):
        assert last_integer("", text, {"answer": answer}) == 0.0


@for_each("answer", ["1,234", "1234.", "−1,234", "so #### 1,234", 1234, 1234.0])
def test_answers_are_read_the_same_way(answer):
    sign = -1 if "−" in str(answer) else 1
    assert last_integer("", f"it is {sign * 1234}", {"answer": answer}) == 1.0


def test_any_of_several_integers_is_right():
    for answer in (("7", "8"), ["so 7", 8.0]):
        for text, right in (("7", 1.0), ("8", 1.0), ("9", 0.0), ("none", 0.0)):
            assert last_integer("", text, {"answer": answer}) == right
            assert last_integer_vote("", text, {"answer": answer})["reward"] == right
            vote = rewards.majority_vote(last_integer)
            assert vote("", text, {"answer": answer})["reward"] == right
    assert last_integer("", "It is 10000000000000000.", {"answer": 1e16}) == 1.0


@given(st.integers(), st.text(alphabet="abc \n=.,:-", max_size=8))
def test_any_integer_after_an_equals_sign(value, before):
    assert last_integer("", f"{before}= {value}", {"answer": value}) == 1.0
    assert last_integer("", f"{before}= {value:,}.", {"answer": value}) == 1.0


# Parts of numbers in several scripts, and what stands around them; all of Unicode takes a second.
PARTS = "0479-+\u2212\u2013,.$\\{}()[] \n\t#*=/^%eAx\xe9\u0663\uff14\xbd\xb2\0"


@given(st.text(st.sampled_from(PARTS), max_size=60))
def test_no_text_raises(text):
    assert last_integer("", text, {"answer": 4}) in (0.0, 1.0)


def test_a_long_completion_is_quick():
    assert last_integer("", "1," * 200_000 + " 4", {"answer": 4}) == 1.0


@for_each(
    "metadata",
    [
        {},
        *({"answer": answer} for answer in (None, "five", True, ("7", "x"), (7, None), (), [True])),
    ],
)
def test_an_answer_without_an_integer(metadata):
    with pytest.raises(ValueError, match="last_integer: metadata\\['answer'\\] must hold"):
        last_integer("", "4", metadata)


MATRIX = r"\begin{pmatrix}%s\\2\end{pmatrix}"


def grades(answer, right, wrong=""):
    """The boxes between the bars are right or wrong for all rewards of mathematics."""
    for reward in (rewards.boxed_math, rewards.math_verify, rewards.reasoning_accuracy):
        for boxes, value in ((right, 1.0), (wrong, 0.0)):
            for box in filter(None, boxes.split(" | ")):
                text = rf"</think>\boxed{{{box}}}"
                assert reward("", text, {"answer": answer}) == value, (reward, box)


@for_each(
    ("answer", "right", "wrong"),
    [
        ("1e-05", r"0.00001 | 1e-5 | 10^{-5}", "e-5 | 0.00002"),
        (1e-05, "0.00001", ""),
        (["3", 1.5e-07], r"1.5 \times 10^{-7}", ""),
        ("0.00001", "1e-05 | 1E-05", "0.00002"),
        ("-1e\u22125", "-0.00001", "0.00001"),
        ("1e+16", "10^{16}", ""),
        ("1e16", "10000000000000000", "10000000000000001"),
        ("(1e-5, .5e2)", "(0.00001, 50)", "(0.00002, 50)"),
        ("6.63e-34", r"6.63 \times 10^{-34} \text{ J s}", ""),
        # Of one digit with a sign, it may be a product with Euler's number.
        ("2e-1", "2e - 1 | -1 + 2e | 2e-1", "e-1"),
        ("3e", "3e", ""),
        ("e^2", "e^2", ""),
        ("1e999999999", "", "2"),
    ],
)
def test_a_number_with_an_exponent_is_one_number(answer, right, wrong):
    grades(answer, right, wrong)


def test_a_number_with_an_exponent_in_prose():
    for text, answer, right in (
        ("It is 1e-05.", "1", 0.0),
        ("It is 1e-05.", "0.00001", 1.0),
        ("It is 1.5E+3, so.", "1500", 1.0),
        ("It is 2.5e-4 m.", 0.00025, 1.0),
    ):
        assert rewards.math_verify("", text, {"answer": answer}) == right
    vote = rewards.majority_vote(rewards.math_verify)
    ids = [vote("", f"It is {x}.", {})["answer_ids"] for x in ("1e-05", "1e-05", "2e-05", "05")]
    assert ids[0] == ids[1] and len(set(ids)) == 3


def test_numbers_with_exponents_are_read_in_linear_time():
    text = "1" * 200_000 + "e " + "1.5e-07 " * 1000 + ".1" * 100_000
    start = time.process_time()
    for reply in (text, f"\\boxed{{{text}}}", f"answer: {text}"):
        rewards.math_verify("", reply, {"answer": "7"})
    assert time.process_time() - start < 5.0


@for_each(
    ("answer", "right", "wrong"),
    [
        (
            r"6.63 \times 10^{-34}",
            r"6.63\times10^{-34} | 0.663 \times 10^{-33} | h = 6.63 \cdot 10^{-34} \text{ J s} | "
            r"6.63e-34 | h = 6.63 \cdot 10^{-34} = 0.663 \cdot 10^{-33}",
            r"0.0 | 1.05 \times 10^{-34} | -6.63 \times 10^{-34} | "
            r"h = 1.05 \cdot 10^{-34} \text{ J s}",
        ),
        (
            "0.0000001",
            r"x = 3 \cdot 10^{-7} = 0.0000001 | \frac{1}{10^7}",
            r"x = y = 3 \cdot 10^{-7} = 0.0000003 | 0.0000003 | 0.0",
        ),
        ("x > 0.0000001", "0.0000001 < x", "0.0000003 < x"),
        ("0.0000001 < x < 2", "0.0000001 < x < 2", "0.0000003 < x < 2"),
        ("x = 0.0000001", "0.0000001", "0.0000003"),
        ("0.0000001, 2", "2, 0.0000001", "0.0000003, 2"),
        ("(0.0000001, 2)", "", "(0.0000003, 2)"),
        (
            r"\begin{pmatrix}0.0000001\\2\end{pmatrix}",
            "",
            r"\begin{pmatrix}0.0000003\\2\end{pmatrix}",
        ),
        ("0.000122", "1/8192", ""),
        ("1/8192", "0.000122", ""),
        ("0.00005%", "0.0000005", "0.0000003"),
        ("0.333333", "1/3", ""),
        ("0", r"0 | 0.0 | \sqrt{2}\sqrt{3}-\sqrt{6} | \sin^2(1) + \cos^2(1) - 1", ""),
        ("0.0", "0 | 0.1+0.2-0.3", ""),
    ],
)
def test_tiny_numbers_are_compared_by_their_digits(answer, right, wrong):
    """The package rounds to six decimals, and drops what is below 1e-15."""
    grades(answer, right, wrong)


def test_math_verify_works_outside_the_main_thread():
    given = []
    thread = threading.Thread(
        target=lambda: given.append(rewards.math_verify("", "$2$", {"answer": "2"}))
    )
    thread.start()
    thread.join()
    assert given == [1.0]


@for_each(
    ("answer", "box"),
    [
        ("$9^{9^{9}}$", "9^{9^{9^{9}}}!"),
        ("9**9**9", "9^{9^{9}}+1"),
        ("1e999999999", "10^{999999999}+1"),
        ("(10^9)!", "(10^9)!+1"),
        (r"\sqrt{2}^{9^{9^9}}", r"\sqrt{2}^{9^{9^9}}+1"),
    ],
)
def test_towers_of_powers_are_not_evaluated(answer, box):
    start = time.process_time()
    assert rewards.boxed_math("", rf"\boxed{{{box}}}", {"answer": answer}) == 0.0
    assert time.process_time() - start < 5.0


@for_each(
    ("completion", "metadata", "expected"),
    [
        ("it is 7", {}, {"reward": 0.0, "answer_ids": 7.0}),
        ("it is 7", {"answer": 7}, {"reward": 1.0, "answer_ids": 7.0}),
        ("it is 7", {"answer": "8"}, {"reward": 0.0, "answer_ids": 7.0}),
        ("= -1", {}, {"reward": 0.0, "answer_ids": 2.0**23 - 1}),
        ("no idea", {}, {"reward": 0.0, "answer_ids": -1.0}),
    ],
)
def test_a_vote_is_the_last_integer(completion, metadata, expected):
    assert last_integer_vote("q", completion, metadata) == expected
    assert np.float32(expected["answer_ids"]) == expected["answer_ids"]


@for_each(
    ("module", "call"),
    [
        ("math_verify", lambda: rewards.math_verify("", "4", {"answer": "4"})),
        ("math_verify", rewards.math_verify_pool),
        ("reasoning_gym", lambda: rewards.reasoning_gym("chain_sum")),
    ],
)
def test_a_missing_package_is_named(monkeypatch, module, call):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"needs the package .*jaxrl_llm\[train\]"):
        call()
