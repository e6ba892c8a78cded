"""Parsing of a turn: its text, its reasoning and its tool calls, which are JSON.

Two forms of a call are supported:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>     Qwen, Hermes, SmolLM
    {"name": "add", "parameters": {"a": 1, "b": 2}}                           Llama 3

The first may occur anywhere, several times, and may contain a list. The second is the full turn,
with or without ``<|python_tag|>`` before it. The JSON parser decides where a call ends, so an
argument may contain ``</tool_call>``. If a call is malformed, the policy gets a message with the
reason.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.core.reasoning import split_reply
from jaxrl_llm.data.messages import Parsed, ToolCall

MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
"""Markup for parsing a turn; in some vocabularies these are special tokens."""

_OPEN, _CLOSE, _, _, _PYTHON = MARKUP
_SHAPE = 'A tool call must be a JSON object with "name", a text, and "arguments", an object.'
_BARE_CALL = re.compile(r'\{\s*"(name|type|function)"\s*:')
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"[\s;]*")
_MAX_DIGITS = 1000
_MAX_DEPTH = 64  # Python follows some thousand levels, of which the code around takes a part


def parse_turn(text: str, *, complete: bool = True, thinking: bool = False) -> Parsed:
    """Parses a turn.

    Reasoning is the text between an opening tag at the start, such as ``<think>``, and the first
    closing tag, or in channels as of gpt-oss the messages before the final one; calls in it are
    ignored. Reasoning that does not end is the whole turn.

    Args:
      text: Text of the turn, including markup, without its stop token.
      complete: Whether it ended with its stop token.
      thinking: Whether the prompt has already written the opening tag.

    Example:
      >>> turn = parse_turn('Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
      >>> turn.text, turn.calls
      ('Hm.', (ToolCall(name='add', arguments={'a': 1}),))
      >>> parse_turn('<tool_call>{"name": "add"</tool_call>').error
      "A tool call is not valid JSON: Expecting ',' delimiter at character 14."
    """
    reasoning, final = split_reply(text, opened=thinking)
    ended, rest, reasoning = None not in (reasoning, final), final or "", reasoning or ""
    values, rest, error = _tagged(rest) if _OPEN in rest else _bare(rest)
    calls = []
    for value in values:
        call = _call(value)
        error = error or (_SHAPE if call is None else None)
        calls += [] if call is None else [call]
    return Parsed(rest.strip(), reasoning.strip(), tuple(calls), error, complete, ended)


def _tagged(text: str) -> tuple[list[Any], str, str | None]:
    """JSON values between ``<tool_call>`` tags, the text outside, and the first error."""
    values: list[Any] = []
    outside, at, error = [], 0, None
    while (start := text.find(_OPEN, at)) >= 0:
        outside.append(text[at:start])
        try:
            value, at = _decode(text, start + len(_OPEN))
            at = _skip(_SPACE, text, at)
            if not text.startswith(_CLOSE, at):
                raise ValueError(f"The JSON of a tool call must be followed by {_CLOSE}.")
            at += len(_CLOSE)
            values += value if isinstance(value, list) else [value]
        except ValueError as problem:
            error = error or str(problem)
            close = text.find(_CLOSE, start)
            at = len(text) if close < 0 else close + len(_CLOSE)
    return values, "".join([*outside, text[at:]]), error


def _bare(text: str) -> tuple[list[Any], str, str | None]:
    """Calls that are all of a turn; text that has another shape is text."""
    body = text.strip()
    marked = body.startswith(_PYTHON)
    body = body.removeprefix(_PYTHON).lstrip()
    if not (marked or _BARE_CALL.match(body)):
        return [], text, None
    values: list[Any] = []
    at = 0
    try:
        while at < len(body):
            value, at = _decode(body, at)
            values.append(value)
            at = _skip(_SEPARATOR, body, at)
    except ValueError as error:
        # After an object that is no call, the rest is text; before any object, a call went wrong.
        meant = any(map(_arguments, values)) if values else '"name"' in body
        return ([], "", str(error)) if marked or meant else ([], text, None)
    keys = [_arguments(value) for value in values]
    if marked or all(named and _call(value) for named, value in zip(keys, values, strict=True)):
        return values, "", None
    return [], text, None


def _arguments(value: Any) -> set[str]:
    """The keys of a value under which a call has its arguments."""
    return {"parameters", "arguments"} & _function(value).keys()


def _decode(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place of a text, and where it ends; ValueError tells what is wrong."""
    at = _skip(_SPACE, text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
        level = [value]
        for _ in range(_MAX_DEPTH):
            level = [x for outer in level for x in _inner(outer)]
        if any(isinstance(x, dict | list) for x in level):
            raise RecursionError
        return value, end
    except json.JSONDecodeError as error:
        raise ValueError(
            f"A tool call is not valid JSON: {error.msg} at character {max(error.pos - at, 0)}."
        ) from error
    except RecursionError as error:
        raise ValueError("The JSON of a tool call is nested too deeply.") from error


def _inner(value: Any) -> Iterable[Any]:
    """The values in a JSON object or list."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _function(value: Any) -> Mapping[str, Any]:
    """What names the function: the value, or its entry "function" as in OpenAI's API."""
    inner = value.get("function") if isinstance(value, Mapping) else None
    outer = value if isinstance(value, Mapping) else {}
    return inner if isinstance(inner, Mapping) else outer


def _call(value: Any) -> ToolCall | None:
    function = _function(value)
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):  # as in OpenAI's API
        try:
            arguments, end = _decode(arguments, 0)
        except ValueError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"A number in a tool call has more than {_MAX_DIGITS} digits.")
    return int(digits)


def _float(digits: str) -> float:
    if len(digits) > _MAX_DIGITS or not math.isfinite(value := float(digits)):
        raise ValueError(f"The number {digits[:20]} in a tool call is too large.")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} in a tool call is not JSON.")


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_constant)
