"""Python functions as tools of a policy, and the environment of tasks that are solved with them.

``tool`` makes a tool of a function with types and a docstring; ``call_tool`` makes a call and
returns its answer as a message. If a call is invalid, the policy gets an error message and
continues: an unknown tool, an argument that is missing, unknown or of another type, a function that
raises.

    @jr.environments.tool
    def distance(city: str, unit: Literal["km", "miles"] = "km") -> float:
        "The distance of a city from here."
        return ...

    env = jr.environments.ToolEnv([distance, jr.environments.calculator], jr.rewards.last_integer)
"""

import inspect
import json
import re
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jaxrl_llm.core.compose import in_full
from jaxrl_llm.data.messages import Message, Parsed, ToolCall, ToolSpec
from jaxrl_llm.environments.arithmetic import calculate
from jaxrl_llm.environments.asking import SubagentError
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rewards.sandbox import SandboxError
from jaxrl_llm.rewards.scoring import Reward, split_numbers

_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
_ARTICLES = {
    "string": "a text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def tool(function: Callable[..., Any]) -> ToolSpec:
    """A Python function as a tool; use it as a decorator.

    The schema comes from the signature: str, int, float, bool, list and dict, with or without the
    types of their entries, Literal, Optional and other unions, and defaults. Descriptions come from
    the docstring: the text before ``Args:``, and below it one entry per argument.

    Raises:
      ValueError: If there is no docstring, an argument has no type or one that JSON has not,
        ``Args`` names an argument that is not there, or the signature has ``*`` or ``**``.

    Example:
      >>> @tool
      ... def repeat(text: str, times: int = 2) -> str:
      ...     '''Repeats a text.
      ...
      ...     Args:
      ...       text: What to repeat.
      ...     '''
      ...     return text * times
      >>> repeat.name, repeat.description
      ('repeat', 'Repeats a text.')
      >>> repeat.parameters["properties"]["text"]
      {'type': 'string', 'description': 'What to repeat.'}
      >>> call_tool([repeat], ToolCall("repeat", {"text": "ab"}))["content"]
      'abab'
    """
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"tool: {name} is async; an environment's `step` may await it instead")
    description, entries = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"tool: {name} needs a docstring, the policy reads what it does")
    signature = inspect.signature(function).parameters
    if unknown := entries.keys() - signature.keys():
        raise ValueError(f"tool: `Args` of {name} describes {min(unknown)!r}, which is no argument")
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    for argument, parameter in signature.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool: {name} takes {parameter}, but its arguments must have names")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"tool: `{argument}` of {name} cannot be passed by its name")
        if argument not in hints:
            raise ValueError(f"tool: `{argument}` of {name} has no type")
        schema = _schema(hints[argument], f"`{argument}` of {name}")
        if argument in entries:
            schema["description"] = entries[argument]
        if parameter.default is not parameter.empty:
            schema["default"] = parameter.default
        properties[argument] = schema
    required = [n for n, p in signature.items() if p.default is p.empty]
    parameters = {"type": "object", "properties": properties, "required": required}
    try:
        json.dumps(parameters, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"tool: a default of {name} is not JSON ({error})") from error
    return ToolSpec(name, description, parameters, function)


def call_tool(tools: Sequence[ToolSpec], call: ToolCall, *, limit: int = 4000) -> Message:
    """Makes a call and returns the answer, a message of role "tool".

    A text is passed on unchanged, other results as JSON, or else by ``str``. An error of the call
    becomes the text "Error: ...".

    Args:
      tools: The available tools.
      call: Name and arguments.
      limit: Maximum characters of the answer; a longer answer is truncated with a note.

    Raises:
      SandboxError: If a tool needs a sandbox that cannot run here.
      SubagentError: If a tool asks a subagent and there is none, or it fails.

    Example:
      >>> call_tool([calculator], ToolCall("calculator", {"expression": "(2.5 + 1) * 4"}))
      {'role': 'tool', 'name': 'calculator', 'content': '14'}
      >>> call_tool([calculator], ToolCall("search", {}))["content"]
      'Error: there is no tool "search"; the tools are: calculator'
    """
    try:
        text = _result(tools, call)
    except (SandboxError, SubagentError):
        raise
    except (Exception, SystemExit) as error:
        text = f"Error: {type(error).__name__}: {error}"
    # JSON can spell half of a surrogate pair, which no tokenizer accepts.
    text = text.encode("utf-8", "replace").decode()
    if len(text) > limit:
        text = f"{text[:limit]}\n... ({len(text) - limit} more characters)"
    known = any(spec.name == call.name for spec in tools)
    return {"role": "tool", "name": call.name if known else "unknown", "content": text}


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """An error message about the arguments of a call; None if they are valid.

    It supports these entries of a JSON schema: type, properties, required, items,
    additionalProperties, enum and anyOf. Without additionalProperties, an argument that is not
    among the properties is an error, and such an entry of an object is not.

    Example:
      >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
      >>> check_arguments(schema, {"n": "two"})
      'argument "n" must be an integer, not "two"'
    """
    return _wrong_entry(schema, arguments, others=False, kind=("argument", "arguments"))


class ToolState(NamedTuple):
    """The state of a :class:`ToolEnv`: the task, and the number of turns so far."""

    task: Mapping[str, Any]
    turns: int = 0


class ToolEnv:
    """A task that is solved with tools: the first turn without a call is the answer.

    The reward grades the answer, with the reasoning before it between ``<think>`` tags, as in a run
    without an environment. If this environment ends an episode without an answer, because the turn
    was cut off or the last one made another call, it earns what the reward gives the empty text, at
    most 0. So does an episode that ends at a limit of the run (``length``, ``context``, ``turns``),
    unless the reward asks a subagent: it cannot there, and the episode fails. An invalid call is
    answered by an error message.

    Args:
      tools: The tools that the policy may call.
      reward: ``(prompt, completion, metadata)`` to a number, or to a mapping with "reward" whose
        other numbers go into ``Observation.info``; see ``jr.rewards``.
      max_turns: Maximum turns of the policy, including its answer.
      max_calls: Maximum calls per turn; further calls are rejected.

    Example:
      >>> from jaxrl_llm.rewards import exact_match
      >>> env = ToolEnv([calculator], exact_match)
      >>> state, seen = env.reset({"text": "What is 12 * 12?", "answer": "144"}, seed=0)
      >>> call = ToolCall("calculator", {"expression": "12 * 12"})
      >>> state, seen = env.step(state, Parsed("", calls=(call,)))
      >>> seen.messages[0]["content"], seen.done
      ('144', False)
      >>> state, seen = env.step(state, Parsed("144"))
      >>> seen.reward, seen.done
      (1.0, True)
    """

    def __init__(
        self,
        tools: Sequence[ToolSpec],
        reward: Reward,
        *,
        max_turns: int = 8,
        max_calls: int = 8,
    ) -> None:
        names = [spec.name for spec in tools]
        if double := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"ToolEnv: two tools have the name {min(double)!r}")
        if absent := [spec.name for spec in tools if spec.function is None]:
            raise ValueError(f"ToolEnv: the tool {absent[0]!r} has no function to call")
        if later := [spec.name for spec in tools if inspect.iscoroutinefunction(spec.function)]:
            raise ValueError(f"ToolEnv: the tool {later[0]!r} must not be async")
        if inspect.iscoroutinefunction(reward):
            raise ValueError("ToolEnv: the reward must not be async")
        if max_turns < 1 or max_calls < 1:
            raise ValueError(
                f"ToolEnv: max_turns and max_calls must be positive, got {max_turns}, {max_calls}"
            )
        self.tools = tuple(tools)
        self.reward, self.max_turns, self.max_calls = reward, max_turns, max_calls
        shown = f"tools=[{', '.join(names)}], reward={in_full(reward)}"
        limits = f"max_turns={max_turns}, max_calls={max_calls}"
        self.in_full = f"{type(self).__name__}({shown}, {limits})"

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[ToolState, Observation]:
        """The question, the entry "text" of the task; nothing here is random."""
        return ToolState(task), Observation([{"role": "user", "content": task["text"]}])

    def step(self, state: ToolState, action: Parsed) -> tuple[ToolState, Observation]:
        """The answers of the tools; or the reward, where the turn calls none."""
        state = state._replace(turns=state.turns + 1)
        is_answer = not action.calls and action.error is None
        if is_answer and action.complete:
            reward, info = self._grade(state.task, _completion(action))
            return state, Observation([], reward=reward, done=True, info=info)
        if is_answer or state.turns >= self.max_turns:  # cut off, or a call in the last turn
            return state, Observation([], reward=self._no_answer(state.task), stopped=True)
        messages = [call_tool(self.tools, call) for call in action.calls[: self.max_calls]]
        problem = action.error
        if (extra := len(action.calls) - self.max_calls) > 0:
            problem = f"{extra} calls were not made: at most {self.max_calls} are made in a turn."
        if problem is not None:
            messages.append({"role": "tool", "name": "error", "content": f"Error: {problem}"})
        return state, Observation(messages)

    def truncation_reward(self, state: ToolState, end: str, action: Parsed | None) -> float:
        """What an episode without an answer earns, whichever limit of the run ended it."""
        del end, action
        return self._no_answer(state.task)

    def _grade(self, task: Mapping[str, Any], completion: str) -> tuple[float, dict[str, float]]:
        value = self.reward(task["text"], completion, task)
        return split_numbers(self.reward, value, "the last turn of an episode")

    def _no_answer(self, task: Mapping[str, Any]) -> float:
        try:
            return min(0.0, self._grade(task, "")[0])
        except SubagentError:
            raise
        except Exception:  # a reward need not take an empty text, which the policy did not write
            return 0.0


def _completion(answer: Parsed) -> str:
    """An answer with its reasoning, as one turn has both; reasoning alone is no answer."""
    if not (answer.text and (answer.reasoned or answer.reasoning)):
        return answer.text
    return f"<think>\n{answer.reasoning}\n</think>\n\n{answer.text}"


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring before its first section, and the entries of its ``Args``."""
    head, _, rest = text.partition("\nArgs:\n")
    head = re.split(r"\n(?:Returns|Raises|Example|Examples|Yields|References):", head)[0]
    entries: dict[str, str] = {}
    lines = textwrap.dedent(re.split(r"(?m)^\S", rest)[0]).splitlines()
    name = ""
    for line in lines:
        match = re.match(r"(\w+)(?: *\([^)]*\))?: *(.*)", line)
        if match:
            name = match[1]
            entries[name] = match[2]
        elif name and line.strip():
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return " ".join(head.split()), entries


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type."""
    if hint is Any:
        return {}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(one, where) for one in arguments]}
    kind = _TYPES.get(origin or hint)
    if kind is None:
        raise ValueError(f"tool: {where} has the type {hint!r}, which JSON has not")
    schema: dict[str, Any] = {"type": kind}
    if origin is list:
        schema["items"] = _schema(arguments[0], where)
    if origin is dict:
        if arguments[0] is not str:
            raise ValueError(f"tool: {where} has the type {hint!r}, but keys of JSON are texts")
        if arguments[1] is not Any:
            schema["additionalProperties"] = _schema(arguments[1], where)
    return schema


def _mismatch(schema: Mapping[str, Any], value: Any, where: str) -> str | None:
    """How a value differs from its schema, as a sentence."""
    if "anyOf" in schema:
        problems = [_mismatch(one, value, where) for one in schema["anyOf"]]
        return None if None in problems else problems[0]
    if "enum" in schema:
        # True == 1 in Python, and not in JSON.
        if any(type(one) is type(value) and one == value for one in schema["enum"]):
            return None
        names = ", ".join(map(_short, schema["enum"]))
        return f"{where} must be one of {names}, not {_short(value)}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    accepted = {name: of for of, name in _TYPES.items()} | {"number": (int, float)}
    if kinds and not any(
        kind == "boolean"
        if isinstance(value, bool)
        else kind not in accepted or isinstance(value, accepted[kind])
        for kind in kinds
    ):
        expected = " or ".join(_ARTICLES.get(kind, kind) for kind in kinds)
        return f"{where} must be {expected}, not {_short(value)}"
    if isinstance(value, dict):
        kind = ("entry", "entries")
        return _wrong_entry(schema, value, others=True, kind=kind, of=f" of {where}")
    inner = value if isinstance(value, list) and "items" in schema else ()
    problems = (_mismatch(schema["items"], entry, f"an entry of {where}") for entry in inner)
    return next((problem for problem in problems if problem), None)


def _wrong_entry(
    schema: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    others: bool,
    kind: tuple[str, str],
    of: str = "",
) -> str | None:
    """The first entry of an object that is missing, unknown or wrong, as a sentence.

    ``others`` is whether entries that the schema does not name are valid if it does not say;
    ``kind`` is what an entry and several are called, and ``of`` where they are.
    """
    one, several = kind
    properties = schema.get("properties", {})
    rest = schema.get("additionalProperties", others)
    required = schema.get("required", ())
    for name in required if isinstance(required, list | tuple) else ():
        if name not in values:
            return f'{one} "{name}"{of} is required'
    for name, value in values.items():
        inner = properties.get(name, rest)
        if isinstance(inner, Mapping):
            if problem := _mismatch(inner, value, f"{one} {_short(name)}{of}"):
                return problem
        elif not inner:
            known = ", ".join(properties) or "none"
            return f"there is no {one} {_short(name)}{of}; the {several} are: {known}"
    return None


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= 60 else f"{text[:60]}..."
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else text


def _result(tools: Sequence[ToolSpec], call: ToolCall) -> str:
    """The answer of a tool, or what is wrong with the call."""
    spec = next((spec for spec in tools if spec.name == call.name), None)
    if spec is None or spec.function is None:
        names = ", ".join(spec.name for spec in tools) or "none"
        return f"Error: there is no tool {_short(call.name)}; the tools are: {names}"
    problem = check_arguments(spec.parameters, call.arguments)
    if problem is not None:
        return f"Error: {spec.name}: {problem}"
    value = spec.function(**dict(call.arguments))
    if isinstance(value, str):
        return value
    if inspect.isawaitable(value):
        getattr(value, "close", lambda: None)()
        raise TypeError(f"the tool {spec.name!r} is async; an environment's `step` may await it")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)


@tool
def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
      expression: Numbers, + - * / // % ** and parentheses, such as "(2.5 + 1) * 4".
    """
    return calculate(expression)


@tool
def python(code: str) -> str:
    """Runs a Python program in a sandbox and returns what it prints.

    Args:
      code: The program; only what it prints is seen, and nothing is remembered between calls.
    """
    from jaxrl_llm.rewards.sandbox import run_python

    result = run_python(code)
    text = "\n".join(part.rstrip("\n") for part in (result.stdout, result.stderr) if part)
    if result.ended != "exit":
        return f"{text}\nError: the program was ended ({result.ended})".lstrip("\n")
    return text or f"(nothing printed; exit code {result.exit_code})"
