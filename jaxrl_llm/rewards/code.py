"""Verifiers of programs: by the output of a reply's code, or by assertions on its functions.

Both run the code of the last fenced block in the sandbox, and grade it outside of that process:
the code sees the inputs of a test, never the expected results. Any error of the code, including a
limit, is a failed test. If the sandbox cannot run they raise `SandboxError`, which ends a run.

    reward = 1[every test passes], or the share of tests that pass with partial=True
    test_passes = whether each test passes, for `verpo`

One call takes up to `total` seconds, so use a `VerifierPool` with a longer deadline:
``VerifierPool(rewards.code_stdio, workers=8, deadline=60.0)``. On the command line, it is in one.

Shared arguments:
  prompt: Not read.
  completion: The reply; see :func:`from_code_block`. A reply without a block fails every test.
  metadata: The row of the data, with its tests.
  seconds, memory, processes: Limits of :func:`run_python`, for each run.
  partial: Whether the reward is the share of tests that pass.
"""

import ast
import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.core import checks
from jaxrl_llm.core.runtime.files import parse_json
from jaxrl_llm.rewards.answers import without_thinking
from jaxrl_llm.rewards.sandbox import LONGEST_CODE, Limits, Program, run_programs, run_python
from jaxrl_llm.rewards.scoring import RewardError

_CALLS = Path(__file__).with_name("_calls.py").read_text(encoding="utf-8")
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

    Words are separated by white space. Each test runs in a new process.

    Args:
      prompt, completion, seconds, memory, processes, partial: As above.
      total: Seconds of all tests together; None is 45, or ``seconds`` if that is more. If they run
        out, the rest of the tests fail where one has failed; where all have passed, the call fails.
      metadata: "tests" is a list of mappings with "input" and "output", or a mapping with the lists
        "inputs" and "outputs"; either may be written as JSON.

    Returns:
      ``{"reward": ..., "test_passes": [...]}``.

    Raises:
      RewardError: If there are no such tests, or a test expects no output, which a program that
        does nothing would pass.
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
      APPS (arXiv:2105.09938) and CodeContests (arXiv:2203.07814) are graded in this way.
    """
    del prompt
    total = max(45.0, seconds) if total is None else total
    checks.check_positive("code_stdio", total=total)
    if total < seconds:
        raise ValueError(
            "code_stdio: total must not be below seconds, which one test may take; got "
            f"{total:g} s and {seconds:g} s."
        )
    tests = _stdio_tests(metadata)
    code, end = from_code_block(completion), time.monotonic() + total
    if code is None:
        return _graded([False] * len(tests), partial=partial)
    passes: list[bool] = []
    for stdin, expected in tests:
        # The first test has all of its seconds, whatever has passed since `end` was set.
        left = end - time.monotonic() if passes else total
        result = None
        if left > 0:
            result = run_python(
                code,
                stdin=stdin,
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
        right = result.stdout.split() == expected.split()
        passes.append(result.ended == "exit" and result.exit_code == 0 and right)
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
    that tests read, and that neither the tests nor Python define, refer to the candidate. Results
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
      RewardError: If there are no such tests, or a test is not valid Python, or asserts nothing at
        its top level, as a test of pytest or unittest that nobody calls; or if the setup fails
        whatever the code is, or a test passes it an argument of another kind (with ``partial``, if
        all tests do; else such a test fails). After the code has answered in a test, an argument of
        another kind that may be a part of an answer only fails that test.
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
    del prompt
    job = _assert_tests(metadata)
    tests: Sequence[str] = job["tests"]
    code = from_code_block(completion)
    if code is None or len(code) > LONGEST_CODE:
        return _graded([False] * len(tests), partial=partial)
    nonce = secrets.token_hex(16)
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    grader = Program(
        f"{_CALLS}\ngrade({nonce!r}, 3, 4)\n", stdin=json.dumps(job), descriptors=(ask, answered)
    )
    candidate = Program(
        f"{_CALLS}\nserve('/tmp/solution.py', 3, 4)\n",
        files={"solution.py": code},
        descriptors=(asked, answer),
    )
    limits = Limits(seconds, memory, max(_LEAST_OUTPUT, 64 * len(tests)), processes)
    printed = run_programs([grader, candidate], limits)[0].stdout
    verdicts = [line.removeprefix(f"{nonce} ") for line in printed.splitlines() if nonce in line]
    impossible = [verdict for verdict in verdicts if verdict not in ("0", "1")]
    if impossible and (not partial or len(impossible) == len(tests)):
        raise RewardError(f"code_asserts: no code can pass the tests, since {impossible[0]}")
    return _graded(
        [verdict == "1" for verdict in [*verdicts, *["0"] * len(tests)][: len(tests)]],
        partial=partial,
    )


def _graded(passes: list[bool], *, partial: bool) -> dict[str, Any]:
    reward = sum(passes) / len(passes) if partial else float(all(passes))
    return {"reward": reward, "test_passes": passes}


def _stdio_tests(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Inputs and outputs of ``metadata["tests"]``."""
    tests = metadata.get("tests")
    if isinstance(tests, str):
        try:
            tests = parse_json(tests)
        except ValueError:
            tests = None
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        inputs, outputs = tests["inputs"], tests["outputs"]
        if len(inputs) == len(outputs):
            tests = [{"input": a, "output": b} for a, b in zip(inputs, outputs, strict=True)]
    if not (
        isinstance(tests, Sequence)
        and tests
        and all(isinstance(test, Mapping) for test in tests)
        and all(isinstance(test.get(name), str) for test in tests for name in ("input", "output"))
    ):
        raise RewardError(
            "code_stdio: metadata['tests'] must be a list of mappings with the texts 'input' and "
            f"'output', got {str(metadata.get('tests'))[:100]!r}"
        )
    if any(not test["output"].split() for test in tests):
        raise RewardError(
            "code_stdio: a test expects no output, which a program that does nothing would pass"
        )
    return [(test["input"], test["output"]) for test in tests]


def _cannot_fail(statement: ast.stmt) -> bool:
    """Whether a statement only defines, imports or names something."""
    if isinstance(statement, ast.If):  # if __name__ == "__main__", which no test is
        return "__name__" in ast.dump(statement.test)
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        return not any(isinstance(x, ast.Call | ast.Await) for x in ast.walk(statement))
    inert = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return isinstance(statement, inert | ast.Import | ast.ImportFrom | ast.Pass)


def _assert_tests(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The setup, tests and entry point of a row, as `grade` reads them."""
    tests, setup = metadata.get("tests"), metadata.get("setup") or ""
    entry_point = metadata.get("entry_point") or ""
    if isinstance(tests, str):
        try:
            tests = parse_json(tests)
        except ValueError:
            tests = [tests]
    if not (isinstance(tests, Sequence) and tests and all(isinstance(x, str) for x in tests)):
        raise RewardError(
            "code_asserts: metadata['tests'] must be a string or a list of strings, got "
            f"{str(metadata.get('tests'))[:100]!r}"
        )
    programs = []
    for text in (setup, *tests):
        try:
            programs.append(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RewardError(f"code_asserts: {text[:100]!r} is not Python: {error}") from error
    if len(tests) == 1 and re.search(r"^def check\(", tests[0], re.MULTILINE):
        if not entry_point:
            raise RewardError("code_asserts: tests that define check need an 'entry_point'")
        setup, tests = f"{setup}\n{tests[0]}", ["check(candidate)"]
        programs = []
    for text, program in zip(tests, programs[1:], strict=False):
        if all(map(_cannot_fail, program.body)):
            raise RewardError(
                f"code_asserts: the test {text[:100]!r} asserts nothing when it runs, so any code "
                "would pass it; call its functions, or put what it defines into 'setup'"
            )
    return {"setup": setup, "tests": list(tests), "entry_point": entry_point}
