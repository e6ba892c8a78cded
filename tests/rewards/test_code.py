"""Replies of code, graded in sandboxes.

- ``from_code_block`` takes the last closed block of Python, as CommonMark reads fences.
- ``code_stdio`` compares what a program prints word by word; counts are exact, other numbers within
  1e-6. It reads the rows of LiveCodeBench and APPS, calls of functions included.
- ``code_asserts`` runs tests in one sandbox and the code in another: plain data passes between them
  exactly, objects stay where they are, exceptions arrive as the nearest of Python's own.
- A test that no code can pass is an error of the row; no value of the code is one.
"""

import json
import re
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rows import for_each

from jaxrl_llm.core import bind
from jaxrl_llm.rewards import (
    RewardError,
    SandboxResult,
    VerifierPool,
    code,
    code_asserts,
    code_rows,
    code_stdio,
    from_code_block,
    score,
)

DOUBLE = "```python\ndef double(x):\n    return x + x\n```"


def apps(inputs, outputs, fn_name="double"):
    """The column "input_output" of APPS as the tests of a row."""
    return {"tests": {"fn_name": fn_name, "inputs": inputs, "outputs": outputs}}


def passes(code: str, *tests: str, seconds: float = 5.0, **metadata) -> list[bool]:
    reply = f"So:\n```python\n{code}\n```\n"
    tested = code_asserts("", reply, {"tests": list(tests), **metadata}, seconds=seconds)
    return tested["test_passes"]


def test_many_failing_tests_leave_room_for_the_verdicts_of_the_rest():
    tests = ["assert double(0) == 1"] * 400 + ["assert double(0) == 0"] * 100
    found = passes("def double(x): return 2 * x", *tests, seconds=60.0)
    assert found == [False] * 400 + [True] * 100


def test_all_tests_of_a_program_together_have_a_limit(bubblewrap):
    """Else one sampled loop would exceed the deadline of the call, whose value is then lost."""
    tests = [{"input": str(n), "output": str(n)} for n in range(200)]
    start = time.monotonic()
    loop, limits = "```python\nwhile True: pass\n```", {"seconds": 0.5, "total": 0.5}
    found = code_stdio("", loop, {"tests": tests}, **limits)
    assert time.monotonic() - start < 50 and found["test_passes"] == [False] * 200
    with pytest.raises(ValueError, match="code_stdio: total must be above 0"):
        code_stdio("", "```\n```", {"tests": tests}, total=0.0)


@pytest.fixture
def timed(monkeypatch):
    """Runs of programs that echo their input, on a clock that they alone move."""

    def of(needed, *, start=0.0, wrong=None):
        clock = [0.0]

        def run_python(code, *, stdin, seconds, **limits):
            clock[0] += start + min(needed, seconds)
            ended = "exit" if needed <= seconds else "time"
            printed = "wrong" if stdin == wrong else stdin
            return SandboxResult(printed if ended == "exit" else "", "", 0, ended)

        monkeypatch.setattr(code, "run_python", run_python)
        monkeypatch.setattr(code, "time", SimpleNamespace(monotonic=lambda: clock[0]))

        def grade(count, **options):
            tests = [{"input": str(n), "output": str(n)} for n in range(count)]
            return code_stdio("", DOUBLE, {"tests": tests}, **options)

        return grade

    return of


@for_each("partial", [False, True])
def test_a_program_that_passes_until_the_time_is_over_is_not_wrong(timed, partial):
    """200 tests of 0.25 s, each far below its limit, take longer than all of them may."""
    grade = timed(0.25)
    passed = {"reward": 1.0, "test_passes": [True] * 200}
    assert grade(200, total=51.0, partial=partial) == passed
    for total in (45.0, 45.1):  # of which the last test is cut off within its own limit
        with pytest.raises(TimeoutError, match="180 of 200 tests passed, none failed, and the"):
            grade(200, total=total, partial=partial)
    found = timed(0.25, wrong="7")(200, total=45.0, partial=partial)
    assert found["test_passes"] == [n != 7 and n < 180 for n in range(200)]
    assert found["reward"] == (179 / 200 if partial else 0.0)


def test_a_test_has_its_seconds_where_they_are_more_than_45(timed):
    grade, late = timed(50.0, start=0.5), {"seconds": 60.0}
    assert grade(1, **late) == {"reward": 1.0, "test_passes": [True]}
    with pytest.raises(TimeoutError, match="1 of 2 tests passed, none failed, and the 60 s of"):
        grade(2, **late)
    assert grade(2, **late, total=150.0)["test_passes"] == [True, True]
    grade = timed(70.0, start=0.5)
    assert [grade(n, **late)["test_passes"] for n in (1, 2)] == [[False], [False, False]]
    with pytest.raises(ValueError, match="total must not be below seconds, .* got 1 s and 5 s"):
        grade(1, seconds=5.0, total=1.0)


PROMPT = "Write double(x)."
# A test that no code can pass, with what is said of it, and whether it shows without a reply.
IMPOSSIBLE = {
    "import nothing_such": ("it imports 'nothing_such', which the sandbox does not have", True),
    "from . import other\nassert double(1) == 2": ("it imports '.', which", True),
    "def t():\n    import pandas\n    assert double(1) == 2\nt()": ("it imports 'pandas'", True),
    "with open('x') as f:\n    import yaml\nassert double(1)": ("it imports 'yaml'", True),
    "assert double(1) == (": ("it is not Python", True),
    "assert double(1) == 2\nreturn": ("it is not Python: 'return' outside function", True),
    "def t(x, x): pass\nassert double(1) == 2": ("it is not Python: duplicate argument", True),
    "from math import nothing\nassert double(1) == 2": ("it fails with ImportError", False),
    "def t():\n    from os import nix\nassert double(1) == 2\nt()": (
        "it fails with ImportError: cannot import name 'nix'", False),
    "if double(1) == 2:\n    import nothing_such": ("it fails with ModuleNotFoundError", False),
    "assert double(n) == 2": ("it reads 'n', which neither it, the prompt nor the code", False),
    "def t(x=TWO):\n    assert double(1) == x\nt()": ("it reads 'TWO', which", False),
    "def t():\n    n = n + 1\n    assert double(n) == 2\nt()": ("UnboundLocalError", False),
    "assert double(lambda x: x) == 2": ("a test passes a function to the candidate", False),
}  # fmt: skip


@for_each("test", IMPOSSIBLE)
def test_what_no_code_can_pass_is_an_error_of_the_row(bubblewrap, test):
    said, static = IMPOSSIBLE[test]
    row = {"tests": ["assert double(1) == 2", test, "assert double(2) == 4"]}
    whole = f"code_asserts: no code can pass test 2 of 3, {re.escape(repr(test)[:40])}.*{said}"
    with pytest.raises(RewardError, match=whole):
        code_asserts(PROMPT, DOUBLE, row, partial=static)
    if static:
        with pytest.raises(RewardError, match=whole):
            code_asserts.check_row(row)
    else:
        code_asserts.check_row(row)


@for_each(
    "code, test, right",
    [
        # A reply without the function is wrong, whatever else the test reads.
        ("def twice(x): return 2 * x", "assert double(n) == 2", False),
        # What the prompt names is the reply's to define; a module of the library is Python's.
        ("def double(x): return 2 * x", "assert double(Write) == 2", False),
        ("def double(x): return 2 * x", "assert math.isclose(double(0.1), 0.2)", True),
        # Imports that need not run, and names that a wrong answer leaves unset.
        ("def double(x): return 2 * x",
         "try:\n    import numpy as n\nexcept ImportError:\n    n = 1\nassert double(n)", True),
        ("def double(x): return 2 * x", "def t():\n    import numpy\nassert double(1) == 2", True),
        ("def double(x): return 2 * x", "if double(1) != 2:\n    import numpy", True),
        ("def double(x): return []", "for n in double(1):\n    m = n\nassert m == 1", False),
        ("def double(x): raise NameError('x')", "assert double(1) == 2", False),
        ("def double(x): import nothing_such", "assert double(1) == 2", False),
    ],
)  # fmt: skip
def test_what_some_code_can_pass_is_no_error_of_the_row(bubblewrap, code, test, right):
    row = {"tests": [test]}
    code_asserts.check_row(row)
    found = code_asserts(PROMPT, f"```\n{code}\n```", row)
    assert found["test_passes"] == [right]


def test_a_setup_that_no_code_can_pass_is_an_error_of_the_row(bubblewrap):
    code, test = "def double(x): return 2 * x", "assert double(1) == 2"
    for setup, said in {
        "import nothing_such": "the setup imports 'nothing_such'",
        "from math import nothing": "the setup fails with ImportError",
        "half = 1 / 0": "the setup fails with ZeroDivisionError",
        "half = (": "the setup is not Python",
    }.items():
        with pytest.raises(RewardError, match=f"no code can pass .*{said}"):
            passes(code, test, setup=setup)
    refused = "try:\n    double(len)\nexcept TypeError:\n    pass\nelse:\n    assert False"
    assert passes(code, test, refused) == [True, True]
    # A setup that calls the code fails with that code.
    assert passes(code, test, setup="triple(1)") == [False]
    assert passes(code, test, setup="half = 0.5") == [True]


@for_each(
    "text, code",
    [
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n and\n```py\nb\n\n```", "b\n\n"),
        ("```python\na\n```\nIt prints\n```text\n4\n```", "a\n"),
        ("```text\n```python\n```", None),
        ("```python\na\n```\n```python\nb", None),  # cut off in the last block
        ("````python\n```\na\n```\n````", "```\na\n```\n"),
        ("~~~\na\n```\n~~~", "a\n```\n"),
        ("<think>```\na\n```</think>\n```Python 3\nb\n```", "b\n"),
        ("<think>```\na\n```</think> none", None),
        # CommonMark removes as many spaces of each line as the fence has.
        ("  ```python title='x'\n  a\n  ```", "a\n"),
        ("1. Solution:\n   ```python\n   if x:\n       y\n\n   ```", "if x:\n    y\n\n"),
        ("  ```\na\n b\n   c\n\td\n ```", "a\nb\n c\n\td\n"),
        ("10. Solution:\n    ```python\n    if x:\n        y\n    ```", "if x:\n    y\n"),
        ("- So:\n    - This:\n\n      ```\n      a\n      ```\n    Done.", "a\n"),
        ("- So:\n\t```\n\tif x:\n\t\ty\n\n\t```", "if x:\n\ty\n\n"),
        # Fences in a docstring are within a function, so they are at least 4 spaces deeper.
        ("```\ndef f():\n    ```\n    4\n    ```\n```", "def f():\n    ```\n    4\n    ```\n"),
        ("```\ndef f():\n\t```\n\t4\n\t```\n```", "def f():\n\t```\n\t4\n\t```\n"),
        ("\t```\n\tdef f():\n\t\t```\n\t\t```\n\t```", "def f():\n\t```\n\t```\n"),
        ("  ```\n  a\n  ```\n```\n  b\n```", "  b\n"),
        ("print(4)", None),
        ("", None),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
    ],
)
def test_the_last_block_of_python_is_the_code(text, code):
    assert from_code_block(text) == code


def test_extraction_takes_linear_time():
    from_code_block("```" + "`" * 10**6 + "\n" + "```x`\n" * 10**5 + " " * 10**6)
    for run in (" ", "\t", "x", "x "):
        from_code_block(f"```{run * 10**5}`\n{run * 10**5}```\n{run * 10**5}`")


def test_what_a_program_prints_is_compared_by_words(bubblewrap):
    tests = [("2", "4"), ("3", " 9 \n"), ("4", "8\n\n")]
    reply = "```\nx = int(input())\nprint('', 2 * x, '\\n')\n```"
    forms = (
        [{"input": a, "output": b} for a, b in tests],
        {"inputs": [a for a, _ in tests], "outputs": [b for _, b in tests]},
    )
    for form in (*forms, json.dumps(forms[1])):
        graded = code_stdio("", reply, {"tests": form})
        assert graded == {"reward": 0.0, "test_passes": [True, False, True]}
    graded = code_stdio("", reply, {"tests": forms[0]}, partial=True)
    assert graded["reward"] == pytest.approx(2 / 3)
    right = {"tests": forms[0][:1]}
    assert code_stdio("", reply, right) == {"reward": 1.0, "test_passes": [True]}
    # A right answer does not count if the program then fails, or never ends.
    for after in ("1 / 0", "import sys; sys.exit(1)", "while True: pass"):
        reply = f"```\nprint(4, flush=True)\n{after}\n```"
        assert code_stdio("", reply, right, seconds=0.5)["test_passes"] == [False]
    assert code_stdio("", "4", right)["test_passes"] == [False]


SAME_WORDS = """0.5 0.50 | 0.30000000000000004 0.3 | 0.6666666666666666 0.666667 | 1e-05 0.00001
    -0.0 0.0 | .5 0.5 | 3 3.000000 | 2.9999999999999996 3 | 4.0 4 | 10000000 1e7 | nan nan
    1234567.1 1234567.9"""  # 6.5e-7 of it, as a contest's checker has it
# Counts are exact, also written as floats; what only some parsers call a number is text.
OTHER_WORDS = """0.66666 0.666667 | 0.00002 0.00001 | 4.1 4 | 1000000.5 1000002.5 | 10000001 1e7
    10000001.0 10000000.0 | 9007199254740992.0 9007199254740993 | 1e+16 10000000000000000
    50000000000000000 50000000000000001 | 7 007 | +4 4 | -0 0 | 1.02 01.02 | nan NaN | nan 0.5
    inf Infinity | 1e999 inf | inf 1e999 | 0x10 16 | 1_000.5 1000.5 | 1,000.5 1000.5
    \u0663.5 3.5 | 1e99999 1e99998 | 1/2 0.5 | yes YES | True 1"""


def test_words_that_differ_as_texts_may_be_one_number():
    for text, same in ((SAME_WORDS, True), (OTHER_WORDS, False)):
        for pair in text.replace("\n", "|").split("|"):
            assert code_rows.same_words(*pair.split()) == same, pair
    # Words are compared one by one.
    assert code_rows.same_words("1 0.50 x\n", "1\n0.5   x")
    for printed, expected in (("1 0.5", "1 0.5 0.5"), ("x 0.5", "y 0.5"), ("", "0")):
        assert not code_rows.same_words(printed, expected)


METHOD = (
    "class Solution:\n    def __init__(self):\n        self.calls = 0\n"
    "    def scaled(self, numbers: List[int], by: int) -> List[float]:\n"
    "        print('debugging')\n        self.calls += 1\n"
    "        return [x * by * self.calls for x in numbers]"
)
FUNCTION = "from __future__ import annotations\ndef scaled(numbers, by):\n"


@for_each(
    "code, right",
    [
        (METHOD, [True, True, True]),
        (FUNCTION + "    return tuple(x * by for x in numbers)", [True, True, True]),
        (FUNCTION + "    return [x * by + 1e-9 for x in numbers]", [True, True, True]),
        (FUNCTION + "    return [x * by + 1e-3 for x in numbers]", [False, True, False]),
        (FUNCTION + "    return {x * by for x in numbers}", [False, False, False]),
        (FUNCTION + "    print(0.25 * by)\n    print([0.25 * by, 0.5 * by])", [False] * 3),
        ("class Solution:\n    def other(self): pass\n" + FUNCTION[35:] + "    return []",
         [False, True, False]),
        ("class Solution:\n    def scaled(self, numbers): return [2, 4.0]", [False] * 3),
        ("import os\nos.write(1, b'[]')\ndef scaled(numbers, by): os._exit(0)", [False] * 3),
        ("def scaled(numbers, by", [False] * 3),
    ],
)  # fmt: skip
def test_functional_tests_of_livecodebench(bubblewrap, code, right):
    tests = [
        {"input": "[1, 2]\n2", "output": "[2, 4]", "testtype": "functional"},
        {"input": "[]\n7\n", "output": "[]", "testtype": "functional"},
        {"input": "[0.25, 0.5]\n3", "output": "[0.75, 1.50]", "testtype": "functional"},
    ]
    forms = [
        {"tests": json.dumps(tests), "metadata": '{"func_name": "scaled"}'},
        {"tests": tests, "func_name": "scaled"},
        {"tests": {"inputs": [x["input"] for x in tests], "outputs": [x["output"] for x in tests],
                   "fn_name": "scaled"}},
    ]  # fmt: skip
    for row in forms if code == METHOD else forms[:1]:
        code_stdio.check_row(row)
        assert code_stdio("", f"```python\n{code}\n```", row)["test_passes"] == right


@for_each(
    ("code", "inputs", "outputs", "right"),
    [
        ("def double(x): return 2 * x", [[1], ["a\nb"], [[0.25]]], [2, "a\nba\nb", [0.25, 0.25]],
         [True] * 3),
        ("def double(x): return 2 * x", [[1], ["a"]], [[2], ["aa"]], [True] * 2),
        ("def double(x): return [2 * x]", [[1], ["a"]], [[2], ["ab"]], [True, False]),
        # Of a list of two none is right alone, nor of a list beside a result that is none.
        ("def double(x): return 2 * x", [[1], [2]], [[2, 3], [4]], [False] * 2),
        ("def double(x): return 2 * x", [[1], [2]], [[2], 4], [False, True]),
        ("class Solution:\n def double(self, x, y=0): return (x, y)", [[1, 2], [3, {"a": 1}]],
         [[1, 2], [3, {"a": 1}]], [True] * 2),
        ("def double(): return {1: [True, None]}", [[], []], [{"1": [True, None]}, {}],
         [True, False]),
    ],
)  # fmt: skip
def test_calls_of_apps(bubblewrap, code, inputs, outputs, right):
    rows = [apps(inputs, outputs), {"tests": json.dumps(apps(inputs, outputs)["tests"])}]
    rows.append({"tests": {"inputs": inputs, "outputs": outputs}, "fn_name": "double"})
    for row in rows:
        code_stdio.check_row(row)
        assert code_stdio("", f"```python\n{code}\n```", row)["test_passes"] == right


def test_lines_of_apps(bubblewrap):
    row = apps([["2", "1 2"], ["1", "5"]], [["3", "2"], "5\n1"], fn_name=None)
    code = "n = int(input())\nprint(sum(map(int, input().split())))\nprint(n)"
    assert code_stdio("", f"```python\n{code}\n```", row)["test_passes"] == [True, True]


def test_results_of_functions_are_compared_as_json():
    same = """3 3 | 3.0 3 | 2.9999999999999996 3 | true true | "a" "a"
        {"1":0.30000000000000004} {"1":0.3} | [[1,2],[0.5]] [[1,2],[0.50]]"""
    other = """false true | "1.0" 1.0 | null [] | NaN 0.5 | 9007199254740993 9007199254740992
        [1,[2]] [1,[2,2]]"""
    for text, equal in ((same, True), (other, False)):
        for pair in text.replace("\n", "|").split("|"):
            assert code_rows.same_result(*pair.split()) == equal, pair
    huge = "1" + "0" * 400
    for pair in ((huge, "0.5"), ("0.5", huge), ("[" * 100_000, "[]"), ("", "[]")):
        assert not code_rows.same_result(*pair)


def test_assertions_run_with_calls_of_another_process(bubblewrap):
    double = "def double(x):\n    return x + x"
    assert passes(double, "assert double(2) == 4", "assert double('a') == 'ab'") == [True, False]
    # All kinds of plain data pass both ways.
    data = [None, True, 1, 2**99, -1.5, "é\0", b"\xff", (1, (2,)), {1, 2}, frozenset([3]), range(2)]
    data += [{(1, 2): [3]}, 1j, [], float("inf"), -(2**63), 2**63]
    echo = "def echo(x, *, y=None):\n    return [x, y, type(x).__name__]"
    tests = [
        f"from math import inf\nx = {x!r}\nassert echo(x, y=x) == [x, x, type(x).__name__]"
        for x in data
    ]
    assert passes(echo, *tests) == [True] * len(data)
    # Exceptions, iterators, constants, setup, and names that tests define.
    code = "LIMIT = 3\ndef count(x):\n    if x > LIMIT:\n        raise KeyError(x)\n"
    code += "    return iter(range(x))"
    tests = [
        "assert list(count(2)) == [0, 1] and LIMIT == 3",
        "try:\n    list(count(4))\n    assert False\nexcept KeyError:\n    pass",
        "with raises(KeyError):\n    count(5)",
        "for n in numbers:\n    assert sum(count(n)) == n * (n - 1) // 2",
        "assert undefined(1)",
    ]
    setup = (
        "import contextlib\nnumbers = [1, 2, 3]\n@contextlib.contextmanager\ndef raises(kind):\n"
        "    try:\n        yield\n    except kind:\n        return\n    raise AssertionError"
    )
    assert passes(code, *tests, setup=setup) == [True, True, True, True, False]
    # Objects stay where they are: tests call them, and pass them back.
    code = (
        "class Stack:\n    def __init__(self):\n        self.items = []\n"
        "    def push(self, x):\n        self.items.append(x)\n        return self\n"
        "    def __getitem__(self, n):\n        return self.items[n]\n"
        "def size(stack):\n    return len(stack.items)"
    )
    test = "s = Stack()\ns.push(1).push([2])\n"
    test += "assert size(s) == 2 and s.items == [1, [2]] and s[1] == [2]"
    assert passes(code, test, "assert Stack() == Stack()", "assert Stack()") == [True, False, False]


def test_exceptions_arrive_as_the_nearest_of_pythons_own(bubblewrap):
    code = (
        "import decimal, json, statistics\n"
        "class EmptyError(ValueError): pass\n"
        "class Odd(Exception): pass\n"
        "class Stop(StopIteration): pass\n"
        "class Both(Odd, KeyError): pass\n"
        "def f(kind):\n    raise {'empty': EmptyError, 'odd': Odd, 'stop': Stop, 'both': Both}"
        "[kind]('why')\n"
        "def undecodable(x): return x.decode()\n"
        "def group(): raise ExceptionGroup('why', [ValueError()])\n"
        "def quit(): raise SystemExit(0)"
    )
    calls = {
        "json.loads('{')": "ValueError",
        "statistics.mean([])": "ValueError",
        "decimal.Decimal('x')": "ArithmeticError",
        "f('empty')": "ValueError",
        "f('odd')": "Exception",
        "f('stop')": "Exception",
        "f('both')": "KeyError",
        "f('none')": "KeyError",
        "undecodable(b'\\xff')": "UnicodeError",
        "group()": "Exception",
        "quit()": "RuntimeError",
        "undecodable(3)": "AttributeError",
    }
    tests = [
        f"try:\n    {call}\nexcept {kind}:\n    pass\nelse:\n    assert False"
        for call, kind in calls.items()
    ]
    assert passes(code, *tests) == [True] * len(tests)
    exact = "try:\n    f('{}')\nexcept Exception as error:\n    assert repr(error) == {!r}"
    tests = [
        exact.format("empty", "ValueError('why')"),
        exact.format("odd", "Exception('why')"),
        exact.format("stop", "Exception('why')"),
    ]
    assert passes(code, *tests) == [True] * 3
    other = "try:\n    f('empty')\nexcept (KeyError, RuntimeError):\n    pass"
    assert passes(code, other) == [False]


def test_iterators_of_the_candidate_make_items_when_a_test_takes_them(bubblewrap):
    code = (
        "made = []\n"
        "def seen(): return made\n"
        "def naturals():\n    n = 0\n    while True:\n        made.append(n)\n        yield n\n"
        "        n += 1\n"
        "def count(n):\n    for x in range(n):\n        yield x\n    return 'done'\n"
        "def broken():\n    yield 1\n    raise ValueError('why')\n"
        "def echo():\n    x = None\n    while True:\n        x = yield x\n"
        "def pairs(): return ((n, count(n)) for n in range(3))\n"
        "def total(items): return sum(items)\n"
        "class Down:\n    def __init__(self, top):\n        self.top = top\n"
        "    def __iter__(self):\n        self.n = self.top\n        return self\n"
        "    def __next__(self):\n        if self.n == 0:\n            raise StopIteration\n"
        "        self.n -= 1\n        return self.n\n"
        "    def double(self):\n        self.top *= 2\n        return self"
    )
    tests = [
        # An endless one is as long as the test reads it, and does nothing before.
        "x = naturals()\nassert [next(x) for _ in range(3)] == [0, 1, 2] == seen()",
        "import itertools\nassert list(itertools.islice(naturals(), 4)) == [0, 1, 2, 3]",
        "for a, b in zip('xyz', naturals()):\n    assert 'xyz'[b] == a",
        # A finite one is as it was.
        "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6 and [*count(0)] == []",
        "assert sorted(count(3)) == [0, 1, 2] and 2 in count(3) and 3 not in count(3)",
        "x = count(3)\nassert next(x) == 0 and list(x) == [1, 2] and list(x) == []",
        "assert list(count(2) or []) == [0, 1] and next(count(0), 'none') == 'none'",
        "a, b = count(2)\nassert (a, b) == (0, 1) and dict(zip('a', count(1))) == {'a': 0}",
        "x = count(0)\ntry:\n    next(x)\nexcept StopIteration as end:\n"
        "    assert end.value == 'done'\nelse:\n    assert False",
        "x = broken()\nassert next(x) == 1\ntry:\n    next(x)\nexcept ValueError:\n    pass\n"
        "else:\n    assert False",
        "assert [(n, list(x)) for n, x in pairs()] == [(0, []), (1, [0]), (2, [0, 1])]",
        # It goes back as itself, and keeps its methods and attributes.
        "x = count(5)\nassert next(x) == 0 and total(x) == 10 and list(x) == []",
        "assert total(2 * n for n in count(3)) == 6 and total(map(abs, count(3))) == 3",
        "x = echo()\nnext(x)\nassert x.send(3) == 3 and x.send('a') == 'a'",
        "x = Down(2)\nassert x.top == 2 and list(x) == [1, 0] and list(x) == [1, 0] and x.n == 0",
        "x = iter(Down(2).double())\nassert iter(x) is x and next(x) == 3 and x.n == 3",
        "assert count(3) == [0, 1, 2]",
    ]
    assert passes(code, *tests) == [True] * (len(tests) - 1) + [False]


def test_iterators_and_views_of_a_test_reach_the_candidate(bubblewrap):
    code = (
        "def take(items): return [x for x in items]\n"
        "def first(items): return next(items)\n"
        "def cut(x, part): return x[part]\n"
        "class Row:\n    def __getitem__(self, key): return list(range(9))[key]"
    )
    tests = [
        "assert take(x * x for x in [1, 2]) == [1, 4]",
        "x = {'a': 1, 'b': 2}\nassert take(x.keys()) == ['a', 'b'] and take(x.values()) == [1, 2]",
        "assert take({'a': 1}.items()) == [('a', 1)] and take([iter('ab')]) != []",
        "assert take(iter([1, 2])) == [1, 2] and take(map(str, (1, 2))) == ['1', '2']",
        "assert first(iter([5, 6])) == 5 and first(zip('ab', 'cd')) == ('a', 'c')",
        "assert cut([1, 2, 3], slice(1, None)) == [2, 3] and Row()[1:6:2] == [1, 3, 5]",
    ]
    assert passes(code, *tests) == [True] * len(tests)


@for_each(
    "test, setup, what",
    [
        ("assert f(Point(1)) == 1", "class Point:\n    def __init__(self, x): self.x = x", "Point"),
        ("assert f([{'a': (date(2020, 1, 1),)}]) == 1", "from datetime import date", "date"),
        ("assert f(1, key=Decimal('1.5')) == 1", "from decimal import Decimal", "Decimal"),
        ("assert f(x for x in [object()]) == 1", "", "object"),
        ("out = []\nf(out.append)\nassert out == [1]", "", "builtin_function_or_method"),
        ("assert f(int) == 1", "", "type"),
        ("assert f(1) == 1\nassert f(StringIO('x')) == 'x'", "from io import StringIO", "StringIO"),
        ("assert f(count()) == 1", "from itertools import count", "count of 1048576 or more items"),
    ],
)
def test_an_argument_that_is_not_plain_data_is_an_error_of_the_row(bubblewrap, test, setup, what):
    with pytest.raises(
        RewardError, match=f"no code can pass test 2 of 2, .*: a test passes a {what}"
    ):
        passes("def f(x, key=None): return x", "assert f(1) == 1", test, setup=setup)


def test_no_value_of_the_candidate_is_an_error_of_the_row(bubblewrap):
    """A wrong completion must not end a run."""
    answers = {
        "a generator": "(n for n in range(3))",
        "an endless iterator": "__import__('itertools').repeat(1)",
        "an iterator": "iter([1, 2])",
        "an object": "object()",
        "a list": "[1, 2]",
        "a mapping": "{'items': print}",
        "a class": "ValueError",
        "a view": "{1: 2}.items()",
    }
    tests = [
        "assert g(f()) == 5",
        "assert g([f(), {1: f()}]) == 5",
        "assert g(f) == 5",
        "assert g(f().append) == 5",
        "assert g(f().items) == 5",
        "assert g(iter(f())) == 5",
        "assert g(zip(f(), 'ab')) == 5",
        "assert f()[1:] == [5]",
        "try:\n    h()\nexcept ValueError as error:\n    assert g(error) == 5",
    ]
    reads = "assert g(1) == 0"
    for answer in answers.values():
        code = f"def f(): return {answer}\ndef g(x): return 0\ndef h(): raise ValueError"
        assert passes(code, reads, *tests, reads) == [True, *[False] * len(tests), True]
    # Here what the test makes of the answer has no end.
    code = "def f():\n    while True:\n        yield 1\ndef g(x): return 0"
    assert passes(code, "assert g(map(str, f())) == 0", seconds=1.0) == [False]


@for_each(
    "reply",
    [
        ["raised", ["KeyError", 3, None, "UnicodeDecodeError", "print", "Gone", "__doc__"], None],
        ["raised", [], "why"],
        ["raised", 3, "why"],
        ["raised", "ValueError", "why"],
        ["raised", ["Unpassable", "StopIteration", "SystemExit", "KeyboardInterrupt"], "why"],
        ["raised"],
        ["value", {"n": 0}],
        ["value", {"n": 1e400}],
        ["value", {"n": "x"}],
        ["value", {"n": 10**30}],
        ["value", {"l": 3}],
        ["value", {"l": [{"n": 0}]}],
        ["value", {"p": [1]}],
        ["value", {"d": [[{"n": 0}, 1]]}],
        ["value", {"t": [{"n": 0}, 1]}],
        ["value", {"t": [True]}],
        ["value", {"t": [True, {"n": -1}]}],
        ["value", 3],
        [],
        None,
    ],
)
def test_replies_that_no_server_of_ours_sends_fail_tests(bubblewrap, reply):
    """The candidate can write to the pipe, in the place of `serve`."""
    line = json.dumps(reply) + "\n"
    code = f"import os\ndef f(x=1):\n    os.write(4, {line!r}.encode())\n    return iter([1])\n"
    code += "class Bad:\n    def __iter__(self): return f()\n    def __next__(self): return f()\n"
    code += "def bad(): return Bad()"
    tests = [
        "assert list(f()) == [2]",
        "assert list(bad()) == [2]",
        "assert f(map(f, f())) == 2",
    ]
    for test in tests:
        assert passes(code, test) == [False]


def test_the_pipe_of_the_answers_is_the_fourth_descriptor(bubblewrap):
    """Else the replies above would reach nobody."""
    line = json.dumps(["value", [2]]) + "\n"
    code = f"import os\ndef f():\n    os.write(4, {line!r}.encode())\n    return [1]\n"
    assert passes(code, "assert list(f()) == [2]", "assert list(f()) == [1]") == [True, True]


def test_long_iterators_come_in_batches(bubblewrap):
    code = (
        "def count(n):\n    for x in range(n):\n        yield x\n"
        "def broken(n):\n    yield from count(n)\n    raise ValueError('why')\n"
        "class Up:\n    def __iter__(self):\n        self.n = 0\n        return self\n"
        "    def __next__(self):\n        self.n += 1\n        return self.n\n"
    )
    tests = [
        "assert sum(count(100_000)) == 4999950000",
        "x = count(3000)\nassert [next(x) for _ in range(1000)] == list(range(1000))\n"
        "assert list(x) == list(range(1000, 3000)) and list(x) == []",
        "x, made = broken(700), []\ntry:\n    for y in x:\n        made.append(y)\n"
        "except ValueError as error:\n    assert len(made) == 700 and str(error) == 'why'\n"
        "else:\n    assert False",
        # None of a class, which may begin again.
        "x = iter(Up())\nassert [next(x) for _ in range(300)][-1] == x.n == 300\n"
        "assert next(iter(x)) == 1",
    ]
    assert passes(code, *tests, seconds=60.0) == [True] * 4


def test_integers_of_any_length_pass_both_ways(bubblewrap):
    """Python neither writes nor reads more than 4,300 decimal digits."""
    power = "def f(n=5000, sign=1): return sign * 10**n"
    tests = ["assert f() == 10**5000", "assert f() % 7 == pow(10, 5000, 7)"]
    tests += ["assert f(sign=-1) == -(10**5000)", "assert f(sign=10**5000) == 10**10_000"]
    assert passes(power, *tests, "assert f() == 10**4999") == [True] * 4 + [False]
    code = "def g(x): return {-x: [x, range(x)], 'same': x == 7**9000}"
    assert passes(code, "x = 7**9000\nassert g(x) == {-x: [x, range(x)], 'same': True}") == [True]


def test_the_forms_of_humaneval_and_mbpp(bubblewrap):
    check = "def check(candidate):\n    for n in range(50):\n        assert candidate(n) == 2 * n"
    row = {"tests": check, "entry_point": "double"}
    assert code_asserts("", DOUBLE, row) == {"reward": 1.0, "test_passes": [True]}
    assert code_asserts("", "```\ndouble = 3\n```", row)["reward"] == 0.0
    # A function that has the name of one of Python's is the candidate's only if the row says so.
    total = "def sum(a, b):\n    return a - b"
    assert passes(total, "assert sum(5, 3) == 2", entry_point="sum") == [True]
    assert passes("def abs(x):\n    return 0", "assert abs(-1) == 0") == [False]


def test_code_that_ends_early_or_late_fails_what_it_does_not_answer(bubblewrap):
    third = "def f(x):\n    if x == 3:\n        import os\n        os._exit(0)\n    return x"
    quiet = "try:\n    f(3)\nexcept BaseException:\n    pass"
    one = "assert f(1) == 1"
    assert passes(third, one, quiet, one) == [True, False, False]
    assert passes(third.replace("os._exit(0)", "while True: pass"), one, quiet, seconds=1.0) == [
        True,
        False,
    ]
    # A test that asks nothing of code that does not even load.
    assert passes("import sys\nsys.exit(0)", "assert True") == [False]
    assert passes("def f(", "assert True") == [False]
    # An iteration of the test does not end by an exception of the candidate.
    stop = "def f(x):\n    raise StopIteration"
    assert passes(stop, "assert all(map(lambda x: f(x) == x, [1, 2]))") == [False]


@pytest.mark.parametrize("pooled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_results_of_tests_reach_a_batch_and_a_pool(bubblewrap, pooled):
    row = {"tests": ["assert double(2) == 4", "assert double(0) == 1"], "id": 7}
    reward = bind(code_asserts, partial=True)
    pool = VerifierPool(reward, workers=1, deadline=60.0) if pooled else nullcontext(reward)
    with pool as verifier:
        scores = score(verifier, ["p"] * 2, [DOUBLE, "none"], [row] * 2)
    assert scores.rewards.tolist() == [0.5, 0.0]
    assert [x.tolist() for x in scores.details["test_passes"]] == [[1, 0], [0, 0]]


PAIR = {"input": "1", "output": "1"}
CALL = {**PAIR, "testtype": "functional"}
PYTEST = "import pytest\n\ndef test_double():\n    assert double(2) == 4"


def test_a_list_of_tests_may_be_json(bubblewrap):
    row = {"tests": json.dumps(["assert double(2) == 4", "assert double(3) == 9"])}
    assert code_asserts("", DOUBLE, row)["test_passes"] == [True, False]


STDIO = [
    ({}, "must be a list of mappings .* got 'None'"),
    ({"tests": []}, "must be a list"),
    ({"tests": "no json"}, "must be a list"),
    ({"tests": "[" * 100_000}, "must be a list"),
    ({"tests": [{"input": "1"}]}, "must be a list"),
    ({"tests": {"inputs": ["1"], "outputs": []}}, "must be lists of one length"),
    ({"tests": {"inputs": 1, "outputs": 1}}, "must be lists of one length, got 1 a"),
    ({"tests": {"inputs": [], "outputs": []}}, "must be a list of mappings"),
    (apps([[1, 2]], [3], fn_name=None), "lists of arguments, and there is no 'fn_na"),
    (apps([[1], "2"], [3, 4]), "must be a list of mappings"),
    (apps([[1], [{"2": 3}]], [3, 4]), "test 2 of 2 passes a mapping with numbers"),
    (apps([[1], [{1, 2}]], [3, 4]), "test 2 of 2 has a value that is not JSON: .*set"),
    (apps([[1], [2]], [[None], [None]]), "every test expects null"),
    (apps([["x" * 2**24]], [1]), "its input has 16,777,218 characters"),
    ({"tests": [{"input": "", "output": " "}]}, "test 1 of 1, '', expects no output"),
    ({"tests": [PAIR, {**PAIR, "input": "\ud800"}]}, "2 of 2, .*: its input is not valid Unicode"),
    ({"tests": [{**PAIR, "output": "\ud800"}]}, "its output is not valid Unicode"),
    ({"tests": [{**PAIR, "input": "x" * 2**24}]}, "its input has 16,777,216 char"),
    ({"tests": [PAIR, CALL]}, "'testtype' of all"),
    ({"tests": [{**PAIR, "testtype": "call"}]}, "'testtype' of all .*got 'call'"),
    ({"tests": [CALL]}, "need its name .* got None"),
    ({"tests": [CALL], "metadata": "no json"}, "need its name .* got None"),
    ({"tests": [PAIR], "func_name": "a b"}, "need its name in the row.*'a b'"),
    (
        {"tests": [PAIR, {**PAIR, "input": "1\n[2"}], "func_name": "f"},
        r"2 of 2.* '\[2' is not JSON",
    ),
    ({"tests": [{**PAIR, "output": "x"}], "func_name": "f"}, "output 'x' is not J"),
    ({"tests": [{**PAIR, "output": "null"}], "func_name": "f"}, "expects null"),
]
ASSERTS = [
    (None, "must be a string or a list of strings, got 'None'"),
    ([1], "must be a string or a list"),
    ("null", "must be a string or a list of strings, got 'null'"),
    (["assert ("], r"test 1 of 1, 'assert \(': it is not Python"),
    (["assert f('" + "x" * 2**24 + "')"], "characters as JSON"),
    ("def check(candidate): pass", "need an 'entry_point'"),
    ("", "asserts nothing when it runs"),
    ("# double(2) == 4", "asserts nothing when it runs"),
    ("'double(2) == 4'", "asserts nothing when it runs"),
    (["assert double(2) == 4", PYTEST], "test 2 of 2, .* imports 'pytest', which the sandbox"),
    (["assert double(2) == 4", PYTEST[15:]], "test 2 of 2, .* assert"),
    ("if __name__ == '__main__':\n    assert 0", "asserts nothing"),
]


@for_each(
    "reward, row, message",
    [(code_stdio, *row) for row in STDIO]
    + [(code_asserts, {"tests": tests}, message) for tests, message in ASSERTS],
)
def test_rows_that_cannot_be_graded(reward, row, message):
    for read in (lambda: reward("", DOUBLE, row), lambda: reward.check_row(row)):
        with pytest.raises(RewardError, match=message):
            read()
