"""Verifiers of programs: by the output of a reply's code, or by assertions on its functions.

Both run the code of the last fenced block in the sandbox, and grade it outside of that process:
the code sees the inputs of a test, never the expected results. Any error of the code, including a
limit, is a failed test. If the sandbox cannot run they raise `SandboxError`, which ends a run.

A test that no code can pass is a fault of the data and raises `RewardError`, with ``partial`` too,
in one sentence that names the test; the message of a run names the row. What shows without a reply
is also raised by the attribute ``check_row(metadata)`` of both, before a run begins.

    reward = 1[every test passes], or the share of tests that pass with partial=True
    test_passes = whether each test passes, for `verpo`

One call takes up to `total` seconds, so use a `VerifierPool` with a longer deadline:
``VerifierPool(rewards.code_stdio, workers=8, deadline=60.0)``. On the command line, it is in one.

Shared arguments:
  prompt: Read only for the names that it has; see :func:`code_asserts`.
  completion: The reply; see :func:`from_code_block`. A reply without a block fails every test.
  metadata: The row of the data, with its tests.
  seconds, memory, processes: Limits of :func:`run_python`, for each run.
  partial: Whether the reward is the share of tests that pass.
"""

import functools
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.core import checks
from jaxrl_llm.rewards.answers import without_thinking
from jaxrl_llm.rewards.code_rows import assert_tests, same_result, same_words, stdio_tests
from jaxrl_llm.rewards.sandbox import LONGEST_CODE, Limits, Program, run_programs, run_python

_CALLS = Path(__file__).with_name("_calls.py").read_text(encoding="utf-8")
_FUNCTION = Path(__file__).with_name("_function.py").read_text(encoding="utf-8")
# Possessive, so that a line of spaces or of letters takes linear time.
_FENCE = re.compile(r"([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^`]*+$")
_PYTHON = ("", "python", "python3", "py", "py3")
_MEMORY = 512 * 2**20
_LEAST_OUTPUT = 64 * 2**10


def from_code_block(text: str) -> str | None:
    r"""The code of the last fenced block of Python, after the thinking.

    A block without a language counts as Python; blocks of other languages are skipped. The white
    space before the fence, as in an item of a list, is removed from each line. A fence at column 4
    or deeper, as in a docstring of the program, does not close the block; nor, where the block
    begins there itself, does one that is 4 columns deeper than it.

    Args:
      text: The reply.

    Returns:
      The lines of the block; None if there is none, or if the last block is not closed because the
      reply was cut off.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.from_code_block("So:\n```python\nprint(4)\n```\nIt prints 4.")
      'print(4)\n'
    """
    block: str | None = None
    lines: list[str] = []
    indent, fence, language = "", "", ""
    for line in without_thinking(text).splitlines(keepends=True):
        match = _FENCE.match(line.rstrip())
        if not fence:
            if match:
                indent, fence, language, lines = match[1], match[2], match[3].lower(), []
        elif (
            match
            and match[2].startswith(fence)
            and not match[3]
            and _columns(match[1]) < (4 if _columns(indent) < 4 else _columns(indent) + 4)
        ):
            if language in _PYTHON:
                block = "".join(lines)
            fence = ""
        else:
            lines.append(line[len(os.path.commonprefix([indent, line])) :])
    return None if fence and language in _PYTHON else block


def _columns(space: str) -> int:
    """The width of white space, with the tabs of Markdown."""
    return len(space.expandtabs(4))


def code_stdio(
    prompt: str,
    completion: str,
    metadata: Mapping[str, Any],
    *,
    seconds: float = 5.0,
    memory: int = _MEMORY,
    processes: int = 16,
    total: float | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    r"""Whether a program prints what each test expects of its input.

        passes_n = 1[exit status 0, and printed words = expected words]

    Words are separated by white space; lines do not matter, letter case does. Each test runs in a
    new process. Words that differ as texts are equal if both are decimal numbers, x printed and y
    expected, and

        y has a point or an exponent:  |x - y| <= 1e-6 max(1, |y|);  1e-6 if y is a whole number
        y is an integer:               |x - y| <= 1e-6, and x has a point and no exponent

    so that a count is exact, however large. NaN, infinities, hexadecimal numbers, a leading zero or
    plus sign, and digits of other scripts or with separators are texts.

    Tests may also call a function, as those of LiveCodeBench for LeetCode do: the input has one
    argument a line, as JSON, and the output is the result as JSON. The function is a method of
    ``class Solution`` or stands alone, and may use the names of the standard library that
    LiveCodeBench imports for it. A tuple counts as a list, and a float as a number above.

    Args:
      prompt, completion, seconds, memory, processes, partial: As above.
      total: Seconds of all tests together; None is 45, or ``seconds`` if that is more. If they run
        out, the rest of the tests fail where one has failed; where all have passed, the call fails.
      metadata: "tests" is a list of mappings with "input" and "output", or a mapping with the lists
        "inputs" and "outputs"; either may be written as JSON. Tests with the "testtype"
        "functional" call the function "func_name" of the row, or of its column "metadata" as
        LiveCodeBench has it; so do tests without a "testtype" if the row has such a name, or the
        mapping a "fn_name". Inputs that are lists, as in APPS, have the arguments of a call, and
        the output is the result, or a list with the result alone if all outputs are such lists;
        without a function they have the lines of the input.

    Returns:
      ``{"reward": ..., "test_passes": [...]}``.

    Raises:
      RewardError: If there are no such tests; a test expects no output, which a program that does
        nothing would pass; or no code can pass a test: its input is longer than the sandbox takes,
        a text is not valid Unicode, or what a function gets or returns is not JSON.
      TimeoutError: If every test passed until ``total`` ran out, so that the program may be right.
        In a :class:`VerifierPool` this is a failed call; outside of one it ends a run.
      ValueError: If ``total`` is below ``seconds``.
      SandboxError: If the sandbox cannot run here.

    Example:
      >>> from jaxrl_llm import rewards
      >>> tests = [{"input": "2", "output": "4"}, {"input": "3", "output": "9"}]
      >>> reply = "```python\nprint(2 * int(input()))\n```"
      >>> try:
      ...     passes = rewards.code_stdio("", reply, {"tests": tests})["test_passes"]
      ... except rewards.SandboxError:  # no bubblewrap here
      ...     passes = [True, False]
      >>> passes
      [True, False]

    References:
      APPS (arXiv:2105.09938), CodeContests (arXiv:2203.07814) and LiveCodeBench
      (arXiv:2403.07974), CODE reading. The tolerance is that of most contests' own checkers. For
      every number, integers too, APPS has ``numpy.allclose`` (1e-8 + 1e-5 |y|), and CodeContests,
      which also ignores letter case, 1e-5. LiveCodeBench compares each line as exact decimals, so
      that 0.1 + 0.2 is not 0.3, and results with ``==``; NeMo Gym adds 1e-6 to it.
    """
    del prompt
    total = max(45.0, seconds) if total is None else total
    checks.check_positive("code_stdio", total=total)
    if total < seconds:
        raise ValueError(
            "code_stdio: total must not be below seconds, which one test may take; got "
            f"{total:g} s and {seconds:g} s."
        )
    tests, function, listed = stdio_tests(metadata)
    code, end = from_code_block(completion), time.monotonic() + total
    if code is None or (function and len(code) > LONGEST_CODE):
        return _graded([False] * len(tests), partial=partial)
    program, files, same = code, {}, same_words
    if function:
        program, files = f"{_FUNCTION}\ncall({function!r})\n", {"solution.py": code}
        same = functools.partial(same_result, listed=listed)
    passes: list[bool] = []
    for stdin, expected in tests:
        # The first test has all of its seconds, whatever has passed since `end` was set.
        left = end - time.monotonic() if passes else total
        result = None
        if left > 0:
            result = run_python(
                program,
                stdin=stdin,
                files=files,
                seconds=min(seconds, left),
                memory=memory,
                output=max(_LEAST_OUTPUT, 4 * len(expected)),
                processes=processes,
            )
        if result is None or (left < seconds and result.ended == "time"):
            if all(passes):
                raise TimeoutError(
                    f"code_stdio: {len(passes)} of {len(tests)} tests passed, none failed, and the "
                    f"{total:g} s of all tests ran out; increase total, or give fewer tests"
                )
            break
        ran = result.ended == "exit" and result.exit_code == 0
        passes.append(ran and same(result.stdout, expected))
    return _graded([*passes, *[False] * (len(tests) - len(passes))], partial=partial)


def code_asserts(
    prompt: str,
    completion: str,
    metadata: Mapping[str, Any],
    *,
    seconds: float = 5.0,
    memory: int = _MEMORY,
    processes: int = 16,
    partial: bool = False,
) -> dict[str, Any]:
    r"""Whether assertions about a reply's functions hold.

        passes_n = 1[test n ran to its end without an exception]

    Tests run in one sandbox and the code in another, which answers calls of its definitions. Names
    that tests read, and that neither the tests nor Python define, refer to the candidate, or else
    to a module of the standard library. Results
    come back as plain data: None, numbers, texts, bytes, ranges, lists, tuples, sets and mappings;
    an iterator makes each item when a test takes it. Any other object stays in the candidate's
    process, where tests call it and read its attributes; a test that compares it fails. Arguments
    are such data too, views and iterators, so none can be a function. They are passed by value: a
    test does not see changes that the code makes to them.

    Args:
      prompt, completion, seconds, memory, processes, partial: As above; one run has all tests, and
        tests after a limit is reached fail.
      metadata: "tests" is a list of texts of assertions, which may be encoded as JSON, or one text;
        a test that defines ``check`` (as in HumanEval) is called with the candidate. "setup" is
        code that runs before the tests, and "entry_point" names the function that tests may call
        ``candidate``.

    Returns:
      ``{"reward": ..., "test_passes": [...]}``.

    Raises:
      RewardError: If there are no such tests, or a test asserts nothing at its top level, as a test
        of pytest or unittest that nobody calls; or if no code can pass a test or the setup: it is
        not valid Python; it imports what the sandbox does not have; it reads a name before it sets
        it, or one that neither the prompt nor a reply has that does define the entry point, or
        another name of the tests; it passes the code an argument of another kind. After the code
        has answered in a test, an argument of another kind that may be a part of an answer only
        fails that test.
      SandboxError: If the sandbox cannot run here.

    Example:
      >>> from jaxrl_llm import rewards
      >>> reply = "```python\ndef double(x):\n    return x + x\n```"
      >>> tests = ["assert double(2) == 4", "assert double(3) == 9"]
      >>> try:
      ...     passes = rewards.code_asserts("", reply, {"tests": tests})["test_passes"]
      ... except rewards.SandboxError:  # no bubblewrap here
      ...     passes = [True, False]
      >>> passes
      [True, False]

    References:
      HumanEval (arXiv:2107.03374) and MBPP (arXiv:2108.07732), whose harnesses run the tests in the
      candidate's process.
    """
    row = assert_tests(metadata)
    code = from_code_block(completion)
    if code is None or len(code) > LONGEST_CODE:
        return _graded([False] * len(row.tests), partial=partial)
    nonce = secrets.token_hex(16)
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    grader = Program(
        f"{_CALLS}\ngrade({nonce!r}, 3, 4)\n",
        stdin=json.dumps({**row._asdict(), "prompt": prompt if len(prompt) < 2**17 else ""}),
        descriptors=(ask, answered),
    )
    candidate = Program(
        f"{_CALLS}\nserve('/tmp/solution.py', 3, 4)\n",
        files={"solution.py": code},
        descriptors=(asked, answer),
    )
    limits = Limits(seconds, memory, max(_LEAST_OUTPUT, 64 * len(row.tests)), processes)
    printed = run_programs([grader, candidate], limits)[0].stdout
    verdicts = [line.removeprefix(f"{nonce} ") for line in printed.splitlines() if nonce in line]
    for number, verdict in enumerate(verdicts, 1):
        if verdict not in ("0", "1"):
            raise row.unpassable(number, verdict)
    passed = [verdict == "1" for verdict in verdicts[: len(row.tests)]]
    return _graded([*passed, *[False] * (len(row.tests) - len(passed))], partial=partial)


def _graded(passes: list[bool], *, partial: bool) -> dict[str, Any]:
    reward = sum(passes) / len(passes) if partial else float(all(passes))
    return {"reward": reward, "test_passes": passes}


def _check_stdio(metadata: Mapping[str, Any]) -> None:
    stdio_tests(metadata)


def _check_asserts(metadata: Mapping[str, Any]) -> None:
    assert_tests(metadata)


code_stdio.check_row = _check_stdio  # type: ignore[attr-defined]
code_asserts.check_row = _check_asserts  # type: ignore[attr-defined]
