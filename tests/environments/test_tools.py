import json
import sys
import types
from typing import Any, Literal, Optional

import pytest
from rows import for_each

from jaxrl_llm.data.parsing import parse_turn
from jaxrl_llm.environments import (
    NoSubagentError,
    Parsed,
    ToolCall,
    ToolEnv,
    ToolSpec,
    answered_by,
    calculator,
    call_tool,
    python,
    tool,
)
from jaxrl_llm.environments.asking import ask as ask_subagent
from jaxrl_llm.environments.tools import check_arguments
from jaxrl_llm.rewards import (
    SandboxError,
    check_sandbox,
    dapo_math,
    last_integer,
    reasoning_accuracy,
    sandbox,
    think_format,
    weighted_sum,
)
from jaxrl_llm.testing import check_env


@tool
def search(
    query: str,
    count: int = 3,
    weights: list[float] | None = None,
    unit: Literal["km", "miles"] = "km",
    exact: bool = False,
    options: dict[str, int] = {},  # noqa: B006
    anything: Any = None,
    size: Optional[float] = None,  # noqa: UP045
) -> dict:
    """Searches
    the index.

    It is small.

    Args:
      query: What to search: words,
        or phrases.
      count (int): How many: 1 to 9.
      unit: Of distances.

    Returns:
      The rows.
    """
    return {"query": query, "count": count, "weights": weights}


def ask(name, arguments, tools=(search, calculator)):
    message = call_tool(tools, ToolCall(name, arguments))
    assert message["role"] == "tool"
    return message["content"]


def test_a_schema_from_signature_and_docstring():
    assert search.name == "search"
    assert search.description == "Searches the index. It is small."
    assert search.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to search: words, or phrases."},
            "count": {"type": "integer", "description": "How many: 1 to 9.", "default": 3},
            "weights": {
                "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}],
                "default": None,
            },
            "unit": {"enum": ["km", "miles"], "description": "Of distances.", "default": "km"},
            "exact": {"type": "boolean", "default": False},
            "options": {
                "type": "object",
                "additionalProperties": {"type": "integer"},
                "default": {},
            },
            "anything": {"default": None},
            "size": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        },
        "required": ["query"],
    }


def fake(name, function, text="Adds.", **types):
    function.__name__, function.__doc__, function.__annotations__ = name, text, types
    return function


async def later(a: int):
    """Adds."""


@for_each(
    ("function", "message"),
    [
        (fake("bare", lambda a: a, None, a=int), "bare needs a docstring"),
        (fake("untyped", lambda a: a), "`a` of untyped has no type"),
        (fake("raw", lambda a: a, a=bytes), "`a` of raw has the type .*bytes"),
        (fake("many", lambda *a: a, a=int), "must have names"),
        (fake("placed", lambda a, /: a, a=int), "cannot be passed by its name"),
        (fake("odd", lambda a=float("nan"): a, a=float), "a default of odd is not JSON"),
        (fake("keyed", lambda a: a, a=dict[int, str]), "keys of JSON are texts"),
        (fake("b", lambda a: a, "Adds.\n\nArgs:\n  b: The other.\n", a=int), "describes 'b', wh"),
        (later, "later is async"),
    ],
)
def test_functions_that_are_no_tools(function, message):
    with pytest.raises(ValueError, match=message):
        tool(function)


def test_answers():
    assert json.loads(ask("search", {"query": "a", "weights": [1, 2.5]})) == {
        "query": "a",
        "count": 3,
        "weights": [1, 2.5],
    }
    assert ask("calculator", {"expression": "1/3 + 2/3"}) == "1"
    # No text, no JSON, no UTF-8, no end.
    odd = ToolSpec(
        "odd", "", {"properties": {"n": {}}}, lambda n: [1, {2}, "\ud800", "a" * 9000][n]
    )
    assert ask("odd", {"n": 0}, [odd]) == "1"
    assert ask("odd", {"n": 1}, [odd]) == "{2}"
    assert ask("odd", {"n": 2}, [odd]) == "?"
    assert ask("odd", {"n": 3}, [odd]) == "a" * 4000 + "\n... (5000 more characters)"


@for_each(
    ("name", "arguments", "message"),
    [
        ("serach", {}, 'there is no tool "serach"; the tools are: search, calculator'),
        ("x" * 9000, {}, "there is no tool"),
        ("search", {}, 'search: argument "query" is required'),
        ("search", {"query": 3}, 'argument "query" must be a text, not 3'),
        ("search", {"query": "a", "count": "3"}, '"count" must be an integer, not "3"'),
        ("search", {"query": "a", "count": True}, "must be an integer, not true"),
        ("search", {"query": "a", "count": 1.5}, "must be an integer, not 1.5"),
        ("search", {"query": "a", "exact": 1}, "must be true or false, not 1"),
        ("search", {"query": "a", "unit": "m"}, '"unit" must be one of "km", "miles", not "m"'),
        ("search", {"query": "a", "weights": 1}, '"weights" must be a list, not 1'),
        ("search", {"query": "a", "weights": [1, "b"]}, 'an entry of argument "weights" must be'),
        ("search", {"query": "a", "options": {"b": "c"}}, 'entry "b" of argument "options" must'),
        ("search", {"query": "a", "limit": 1}, 'there is no argument "limit"; the arguments are'),
        ("calculator", {"expression": "9**9**9"}, "Error: ValueError: the power is too large"),
    ],
)
def test_the_policy_is_told_what_is_wrong(name, arguments, message):
    text = ask(name, arguments)
    assert text.startswith("Error: ") and message in text and len(text) < 300


def test_a_schema_says_which_entries_an_object_has():
    number = {"type": "number"}
    object_of = {"type": "object", "additionalProperties": number}
    check = check_arguments
    assert check(object_of, {"x": 1.5}) is None
    assert check(object_of, {"x": "a"}) == 'argument "x" must be a number, not "a"'
    assert check(object_of | {"additionalProperties": True}, {"x": "a"}) is None
    for closed in ({"type": "object"}, object_of | {"additionalProperties": False}):
        assert "there is no argument" in str(check(closed, {"x": 1}))
    place = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

    def inner(options, value):
        return check({"properties": {"at": place | options}}, {"at": value})

    assert inner({}, {}) == 'entry "city" of argument "at" is required'
    assert inner({}, {"city": 1}) == 'entry "city" of argument "at" must be a text, not 1'
    assert inner({}, {"city": "Rome", "x": "a"}) is None
    rest = {"additionalProperties": number}
    assert inner(rest, {"city": "Rome", "x": 1}) is None
    assert "must be a number" in str(inner(rest, {"city": "Rome", "x": "a"}))
    message = 'there is no entry "x" of argument "at"; the entries are: city'
    assert inner({"additionalProperties": False}, {"city": "Rome", "x": 1}) == message


def test_a_tool_that_raises_or_exits_ends_nothing():
    def stop(n: int):
        """Ends."""
        if n == 0:
            raise KeyError("x")
        if n == 1:
            sys.exit(3)
        return 10**5000

    assert ask("stop", {"n": 0}, [tool(stop)]) == "Error: KeyError: 'x'"
    assert ask("stop", {"n": 1}, [tool(stop)]) == "Error: SystemExit: 3"
    assert ask("stop", {"n": 2}, [tool(stop)]).startswith("Error: ValueError: Exceeds the limit")


def test_adversarial_calls_are_answered():
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    hostile = ["\ud800", "\x00", "a" * 10_000, 10**300, -(10**300), 1e308, None, [], {}, deep]
    hostile += ["__import__('os')", "(" * 500, "9" * 999, "1/" * 400 + "0", "1e-999999999", "\n"]
    for value in hostile:
        for arguments in ({"query": value}, {"expression": value}, {"query": "a", "count": value}):
            for name in ("search", "calculator"):
                text = ask(name, arguments)
                assert len(text) < 4100
                text.encode()


def graded(prompt, completion, metadata):
    right = completion == metadata["answer"]
    return {"reward": float(right), "length": len(completion), "share": float("nan"), "note": "x"}


TASK = {"text": "12 * 12?", "answer": "144"}
CALL = ToolCall("calculator", {"expression": "12 * 12"})


def begin(reward=graded, **options):
    env = ToolEnv([calculator], reward, **options)
    return env, env.reset(TASK, seed=0)[0]


def test_an_async_tool_is_no_answer():
    async def later():
        return 1

    spec = ToolSpec("later", "Later.", {"type": "object", "properties": {}}, later)
    with pytest.raises(ValueError, match="ToolEnv: the tool 'later' must not be async"):
        ToolEnv([spec], graded)
    assert "the tool 'later' is async" in call_tool([spec], ToolCall("later", {}))["content"]


def test_an_episode_with_a_tool():
    env = ToolEnv([calculator], graded, max_turns=3)
    start, seen = env.reset(TASK, seed=0)
    assert seen.messages == [{"role": "user", "content": "12 * 12?"}]
    state, seen = env.step(start, Parsed("", calls=(CALL,)))
    assert [m["content"] for m in seen.messages] == ["144"] and not seen.done
    # A state is a value: the same step from it is the same.
    assert env.step(start, Parsed("", calls=(CALL,))) == (state, seen)
    _, seen = env.step(state, Parsed("144"))
    assert (seen.reward, seen.done, seen.info) == (1.0, True, {"length": 3.0})
    _, seen = env.step(state, Parsed("12"))
    assert (seen.reward, seen.done) == (0.0, True)
    # Without an entry "reward" it is the sum, as for single turns.
    env = ToolEnv([calculator], lambda *_: {"right": 1.0, "brief": 0.5})
    _, seen = env.step(start, Parsed("144"))
    assert (seen.reward, seen.info) == (1.5, {"right": 1.0, "brief": 0.5})


def test_the_reward_reads_the_reasoning_as_in_a_run_without_an_environment():
    pytest.importorskip("math_verify", reason="the package is an extra")

    def earned(reward, turn, **options):
        env = ToolEnv([calculator], reward)
        state, _ = env.reset({"text": "2 + 2?", "answer": "4"}, seed=0)
        return env.step(state, parse_turn(turn, **options))[1].reward

    both = weighted_sum({"right": (reasoning_accuracy, 1.0), "format": (think_format, 0.5)})
    for reward, value in ((reasoning_accuracy, 1.0), (think_format, 1.0), (both, 1.5)):
        assert earned(reward, "<think>2</think> 4") == value
        assert earned(reward, "2 </think> 4", thinking=True) == value
        # Qwen3 writes an empty part where it does not think.
        assert earned(reward, "<think>\n\n</think>\n\n4") == value
        assert earned(reward, "</think>\n\n4", thinking=True) == value
        # Reasoning that does not end has no answer, and plain text has no reasoning.
        assert earned(reward, "<think>2, so 4") == earned(reward, "2, so 4", thinking=True) == 0.0
        assert earned(reward, "4") == 0.0
    for reward, wrong in ((last_integer, 0.0), (dapo_math, -1.0)):
        assert earned(reward, "<think>Answer: 5</think> Answer: 4") == 1.0
        assert earned(reward, "<think>Answer: 4</think> Answer: 5") == wrong
        assert earned(reward, "<think>Answer: 4") == wrong
        assert earned(reward, "<think>Answer: 4</think>") == wrong
        assert earned(reward, "Answer: 4") == 1.0


def test_no_answer_earns_no_more_than_a_wrong_one():
    calls = []

    def needs_text(prompt, completion, metadata):
        calls.append(completion)
        return float(completion.splitlines()[-1] == "144")

    cut = Parsed("144", complete=False)
    for reward, value in ((dapo_math, -1.0), (last_integer, 0.0), (needs_text, 0.0)):
        env, state = begin(reward, max_turns=1)
        for action in (cut, Parsed("Answer: 144", calls=(CALL,))):
            _, seen = env.step(state, action)
            assert (seen.reward, seen.done, seen.stopped, seen.info) == (value, False, True, {})
        # Nor does an episode that a limit of the run ends.
        assert env.truncation_reward(state, "length", cut) == value
        assert env.truncation_reward(state, "turns", None) == value
    assert calls == [""] * 4
    check_env(begin(dapo_math)[0], [TASK], ["144", Parsed("", calls=(CALL,))])


def test_no_answer_is_graded_by_a_subagent_where_one_answers():
    def judged(prompt, completion, metadata):
        return -float(ask_subagent(f"How wrong is {completion!r}?"))

    env, state = begin(judged, max_turns=1)
    with answered_by(lambda messages, check: "2"):
        assert env.step(state, Parsed("144", complete=False))[1].reward == -2
    with pytest.raises(NoSubagentError):
        env.step(state, Parsed("144", complete=False))


def test_what_is_unfinished_earns_nothing():
    env, state = begin(lambda *_: 1.0, max_turns=2)
    _, seen = env.step(state, Parsed("144", complete=False))
    assert (seen.reward, seen.done, seen.stopped) == (0.0, False, True)
    state, seen = env.step(state, Parsed("", error="A tool call is not valid JSON."))
    assert seen.messages[0]["content"] == "Error: A tool call is not valid JSON."
    assert not seen.stopped
    _, seen = env.step(state, Parsed("", calls=(CALL,)))
    assert (seen.reward, seen.done, seen.stopped) == (0.0, False, True)
    _, seen = env.step(state, Parsed("144"))
    assert (seen.reward, seen.done) == (1.0, True)


def test_calls_beside_a_malformed_one_and_too_many():
    env, state = begin(graded, max_calls=2)
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    _, seen = env.step(state, parse_turn(f"{call}<tool_call>{{</tool_call>"))
    assert [m["content"][:9] for m in seen.messages] == ["2", "Error: A "]
    _, seen = env.step(state, parse_turn(call * 5))
    assert [m["content"] for m in seen.messages[:2]] == ["2", "2"]
    assert seen.messages[2]["content"].startswith("Error: 3 calls were not made: at most 2")


@for_each(
    ("options", "message"),
    [
        ({"tools": [calculator, calculator]}, "two tools have the name 'calculator'"),
        ({"tools": [ToolSpec("a", "", {})]}, "the tool 'a' has no function"),
        ({"max_turns": 0}, "must be positive, got 0, 8"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ToolEnv(**{"tools": [calculator], "reward": graded, **options})


def test_the_python_tool_answers_with_what_is_printed(monkeypatch):
    results = {
        "print(1)": ("1\n", "", 0, "exit", "1"),
        "1/0": ("", "ZeroDivisionError\n", 1, "exit", "ZeroDivisionError"),
        "pass": ("", "", 0, "exit", "(nothing printed; exit code 0)"),
        "loop": ("a\n", "", None, "time", "a\nError: the program was ended (time)"),
    }

    def run_python(code):
        names = ("stdout", "stderr", "exit_code", "ended")
        return types.SimpleNamespace(**dict(zip(names, results[code], strict=False)))

    sandbox = types.ModuleType("sandbox")
    sandbox.run_python = run_python
    monkeypatch.setitem(sys.modules, "jaxrl_llm.rewards.sandbox", sandbox)
    for code, result in results.items():
        assert ask("python", {"code": code}, [python]) == result[-1]


def test_the_python_tool_runs_in_the_sandbox(monkeypatch):
    try:
        check_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))
    answers = [
        ask("python", {"code": x}, [python]) for x in ("print(6 * 7)", "open('/etc/passwd')")
    ]
    assert answers[0] == "42" and answers[1].endswith("or directory: '/etc/passwd'")
    sandbox._engine.cache_clear()
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="needs Linux"):  # the policy could do nothing about it
        ask("python", {"code": "print(1)"}, [python])
