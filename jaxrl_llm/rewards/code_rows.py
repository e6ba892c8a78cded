"""The tests of a row of data about code: read, checked without a reply, and compared with results.

A test that no code can pass is a fault of the data. It raises `RewardError`, which names the test;
the caller names the row. ``code_stdio.check_row`` and ``code_asserts.check_row`` see of it what
shows without a reply, so a run can read its data before the first step.
"""

import ast
import json
import keyword
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from jaxrl_llm.core.runtime.files import parse_json
from jaxrl_llm.rewards.sandbox import _LONGEST_INPUT as LONGEST_INPUT
from jaxrl_llm.rewards.sandbox import LONGEST_CODE
from jaxrl_llm.rewards.scoring import RewardError

_TOLERANCE = Decimal("1e-6")  # of the checkers of contests, absolute or relative
# No leading zeros or signs but "-", which a format, a version or a date may mean; no nan, inf, hex.
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"-?[0-9]+")
_NAMES = ("func_name", "fn_name", "entry_point")
_PROTECT = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")


class StdioTests(NamedTuple):
    """The tests of a row for `code_stdio`.

    Attributes:
      pairs: The input and the expected output of each test.
      function: The function that the tests call; None for programs that read and print.
      listed: Whether each expected result is the one item of a list, as APPS may write it.
    """

    pairs: list[tuple[str, str]]
    function: str | None
    listed: bool = False


def same_words(printed: str, expected: str) -> bool:
    """Whether a program printed what a test expects; see :func:`code_stdio` for the rule."""
    words, wanted = printed.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(wanted)):
        return False
    if _INTEGER.fullmatch(wanted) and ("e" in word.lower() or _INTEGER.fullmatch(word)):
        return False  # a count is written with its digits
    return _close(Decimal(word), Decimal(wanted))


def _close(value: Decimal, wanted: Decimal) -> bool:
    """Within 1e-6, or within 1e-6 of a number that is not whole: a large count must be exact."""
    whole = wanted == wanted.to_integral_value()
    return abs(value - wanted) <= _TOLERANCE * (1 if whole else max(Decimal(1), abs(wanted)))


def same_value(value: Any, wanted: Any) -> bool:
    """Whether the result of a function, read from JSON, is what a test expects."""
    if isinstance(wanted, list) and isinstance(value, list):
        return len(value) == len(wanted) and all(map(same_value, value, wanted))
    if isinstance(wanted, dict) and isinstance(value, dict):
        return value.keys() == wanted.keys() and all(
            same_value(value[k], wanted[k]) for k in wanted
        )
    both = [value, wanted]
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in both)
    if value == wanted or not numbers or all(isinstance(x, int) for x in both):
        return value == wanted
    decimals = [Decimal(x) for x in both]  # an integer may exceed all floats
    return all(x.is_finite() for x in decimals) and _close(*decimals)


def same_result(printed: str, expected: str, *, listed: bool = False) -> bool:
    """:func:`same_value` of two JSON texts; a reply may have written the first.

    With ``listed`` the one item of the expected list is right too.
    """
    try:
        value, wanted = parse_json(printed), json.loads(expected)
        return same_value(value, wanted) or (listed and same_value(value, wanted[0]))
    except (ValueError, RecursionError):
        return False


def _from_json(value: Any, *, otherwise: Any = None) -> Any:
    """A column that may be written as JSON; ``otherwise`` for a text that is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return otherwise


def stdio_tests(metadata: Mapping[str, Any]) -> StdioTests:
    """The tests of a row for `code_stdio`.

    Raises:
      RewardError: If there are none, or no code can pass one.
    """
    tests = _from_json(metadata.get("tests"))
    named: Any = metadata
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        named, inputs, outputs = {**metadata, **tests}, tests["inputs"], tests["outputs"]
        lists = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)
        if not lists or len(inputs) != len(outputs):
            raise RewardError(
                "code_stdio: 'inputs' and 'outputs' of metadata['tests'] must be lists of one "
                f"length, got {inputs!r:.50} and {outputs!r:.50}"
            )
        tests = [{"input": a, "output": b} for a, b in zip(inputs, outputs, strict=True)]
    wrong = RewardError(
        "code_stdio: metadata['tests'] must be a list of mappings with the texts 'input' and "
        "'output', or a mapping with their lists 'inputs' and 'outputs', got "
        f"{str(metadata.get('tests'))[:100]!r}"
    )
    if not (isinstance(tests, Sequence) and tests and all(isinstance(x, Mapping) for x in tests)):
        raise wrong
    function, listed = _function(named, tests), False
    pairs = [(test.get("input"), test.get("output")) for test in tests]
    if all(isinstance(given, list | tuple) for given, _ in pairs):
        pairs, listed = _with_texts(pairs, function)
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise wrong
    for number, (stdin, expected) in enumerate(pairs, 1):
        if not expected.strip():
            raise RewardError(
                f"code_stdio: test {number} of {len(pairs)}, {stdin!r:.100}, expects no output, "
                "which code that does nothing would pass"
            )
        fault = _fault(stdin, expected, function)
        if fault:
            raise _unpassable("code_stdio", number, len(pairs), f"{stdin!r:.100}", fault)
    nothing = ("null", "[null]") if listed else ("null",)
    if function and all(expected.strip() in nothing for _, expected in pairs):
        raise RewardError(
            "code_stdio: every test expects null, which a function that does nothing returns"
        )
    return StdioTests(pairs, function, listed)


def _with_texts(
    pairs: Sequence[tuple[Any, Any]], function: str | None
) -> tuple[list[tuple[Any, Any]], bool]:
    """Tests whose inputs are lists, as in APPS, with texts; and whether each result is in a list.

    The list has the arguments of a call, or the lines of an input.
    """
    if function is None:
        if not all(isinstance(line, str) for lines, _ in pairs for line in lines):
            raise RewardError(
                "code_stdio: the inputs in metadata['tests'] are lists of arguments, and there is "
                "no 'fn_name' of the function to call with them"
            )
        return [(_lines(given), _lines(expected)) for given, expected in pairs], False
    texts = []
    for number, (arguments, expected) in enumerate(pairs, 1):
        where, first = f"test {number} of {len(pairs)}", next(iter(arguments), None)
        if isinstance(first, Mapping) and first and all(_INTEGER.fullmatch(str(x)) for x in first):
            raise RewardError(
                f"code_stdio: {where} passes a mapping with numbers as keys, which JSON cannot hold"
            )
        try:
            texts.append(("\n".join(map(json.dumps, arguments)), json.dumps(expected)))
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardError(
                f"code_stdio: {where} has a value that is not JSON: {error}"
            ) from error
    return texts, all(isinstance(x, list | tuple) and len(x) == 1 for _, x in pairs)


def _lines(value: Any) -> Any:
    """The text of a list of lines; anything else as it is."""
    is_list = isinstance(value, list | tuple) and all(isinstance(x, str) for x in value)
    return "\n".join(value) if is_list else value


def _function(row: Mapping[str, Any], tests: Sequence[Mapping[str, Any]]) -> str | None:
    """The function that the tests call, as LiveCodeBench and APPS name it; None for programs."""
    kinds = {test.get("testtype") for test in tests}
    if not kinds <= {None, "stdin", "functional"} or len(kinds) > 1:
        raise RewardError(
            "code_stdio: the 'testtype' of all tests must be 'stdin', or of all 'functional'; got "
            f"{', '.join(sorted(map(repr, kinds)))}"
        )
    (kind,) = kinds
    if kind == "stdin":
        return None
    inner = _from_json(row.get("metadata"))
    inner = inner if isinstance(inner, Mapping) else {}
    names = _NAMES if kind else _NAMES[:2]  # an entry point alone does not make tests of calls
    name = next((x for source in (row, inner) for key in names if (x := source.get(key))), None)
    if name is None and kind is None:
        return None
    if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)):
        raise RewardError(
            "code_stdio: tests that call a function need its name in the row, as 'func_name', or "
            f"in the column 'metadata' of LiveCodeBench; got {name!r:.100}"
        )
    return name


def _fault(stdin: str, expected: str, function: str | None) -> str:
    """Why no code can pass a test, or an empty text."""
    if len(stdin) + LONGEST_CODE > LONGEST_INPUT:
        room = LONGEST_INPUT - LONGEST_CODE
        return f"its input has {len(stdin):,} characters, and there is room for {room:,}"
    for what, text in (("input", stdin), ("output", expected)):
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"its {what} is not valid Unicode"
    if function is None:
        return ""
    lines = stdin.strip("\n").split("\n") if stdin.strip() else []
    for what, text in (*(("input", line) for line in lines), ("output", expected)):
        try:
            parse_json(text)
        except ValueError:
            return f"its {what} {text!r:.60} is not JSON"
    return ""


def _unpassable(function: str, number: int, count: int, test: str, why: str) -> RewardError:
    return RewardError(f"{function}: no code can pass test {number} of {count}, {test}: {why}")


class AssertTests(NamedTuple):
    """The tests of a row for `code_asserts`, as `grade` of `_calls.py` reads them."""

    setup: str
    tests: list[str]
    entry_point: str

    def unpassable(self, number: int, why: str) -> RewardError:
        """The error for a test that no code can pass; the first has number 1."""
        test = f"{self.tests[number - 1]!r:.100}"
        return _unpassable("code_asserts", number, len(self.tests), test, why)


def assert_tests(metadata: Mapping[str, Any]) -> AssertTests:
    """The setup, tests and entry point of a row for `code_asserts`.

    Raises:
      RewardError: If there are no tests, or one asserts nothing, or it shows without a reply that
        no code can pass one.
    """
    tests = _from_json(metadata.get("tests"), otherwise=[metadata.get("tests")])
    setup, entry_point = metadata.get("setup") or "", metadata.get("entry_point") or ""
    if not (isinstance(tests, Sequence) and tests and all(isinstance(x, str) for x in tests)):
        raise RewardError(
            "code_asserts: metadata['tests'] must be a string or a list of strings, got "
            f"{str(metadata.get('tests'))[:100]!r}"
        )
    row = AssertTests(setup, list(tests), entry_point)
    size = len(json.dumps(row._asdict()))
    if size > LONGEST_INPUT - LONGEST_CODE:  # a prompt goes with them
        raise RewardError(
            f"code_asserts: the tests have {size:,} characters as JSON, and there is room for "
            f"{LONGEST_INPUT - LONGEST_CODE:,}"
        )
    fault, _ = _parsed(setup)
    if fault:
        raise RewardError(f"code_asserts: no code can pass the tests: the setup {fault}")
    calls_check = len(tests) == 1 and re.search(r"^def check\(", tests[0], re.MULTILINE)
    for number, text in enumerate(tests, 1):
        fault, program = _parsed(text, called=("check",) if calls_check else ())
        if fault:
            raise row.unpassable(number, f"it {fault}")
        if not calls_check and all(map(_cannot_fail, program.body)):
            raise RewardError(
                f"code_asserts: test {number} of {len(tests)}, {text[:100]!r}, asserts nothing "
                "when it runs, so any code would pass it; call its functions, or put what it "
                "defines into 'setup'"
            )
    if not calls_check:
        return row
    if not (isinstance(entry_point, str) and entry_point):
        raise RewardError("code_asserts: tests that define check need an 'entry_point'")
    return AssertTests(f"{setup}\n{tests[0]}", ["check(candidate)"], entry_point)


def _parsed(text: str, called: Sequence[str] = ()) -> tuple[str, ast.Module]:
    """What is wrong with code of a test whatever the reply is, or an empty text; and the code."""
    try:
        program = ast.parse(text)
        compile(text, "test", "exec", dont_inherit=True)  # also sees a return outside a function
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"is not Python: {error}", ast.Module([], [])
    for module in _imports(program, called):
        if module.partition(".")[0] not in sys.stdlib_module_names:
            return f"imports {module!r}, which the sandbox does not have", program
    return "", program


def _imports(program: ast.Module, called: Sequence[str]) -> Iterator[str]:
    """The modules that code imports when it runs, also in the functions that it names.

    Imports behind a condition, and those whose error is caught, may not matter.
    """
    functions = {x.name: x for x in program.body if isinstance(x, ast.FunctionDef)}
    todo: list[ast.AST] = [x for x in program.body if x not in functions.values()]
    todo += [functions.pop(name) for name in called if name in functions]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.Name) and node.id in functions:
            todo.append(functions.pop(node.id))
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Match | ast.Lambda):
            node = node.subject if isinstance(node, ast.Match) else getattr(node, "test", None)
            todo += [node] if node is not None else []
        elif isinstance(node, ast.Try):
            todo += [*(() if _catches_imports(node) else node.body), *node.finalbody]
        elif not (isinstance(node, ast.With) and "suppress" in "".join(map(ast.dump, node.items))):
            todo += ast.iter_child_nodes(node)


def _catches_imports(node: ast.Try) -> bool:
    kinds = [handler.type for handler in node.handlers]
    return any(kind is None or any(name in ast.dump(kind) for name in _PROTECT) for kind in kinds)


def _cannot_fail(statement: ast.stmt) -> bool:
    """Whether a statement only defines, imports or names something."""
    if isinstance(statement, ast.If):  # if __name__ == "__main__", which no test is
        return "__name__" in ast.dump(statement.test)
    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        return not any(isinstance(x, ast.Call | ast.Await) for x in ast.walk(statement))
    inert = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return isinstance(statement, inert | ast.Import | ast.ImportFrom | ast.Pass)
