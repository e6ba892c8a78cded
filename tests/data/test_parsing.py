"""A turn as text, reasoning and calls; what is wrong with a call is told and never raised."""

import json
import random

from rows import for_each

from jaxrl_llm.data.messages import Parsed, ToolCall
from jaxrl_llm.data.parsing import parse_turn

ADD = '{"name": "add", "arguments": {"a": 1}}'


def tagged(text):
    return f"<tool_call>{text}</tool_call>"


def nested(depth):
    """A call with a list in lists."""
    value = "[" * depth + "]" * depth
    return tagged('{"name": "f", "arguments": {"a": ' + value + "}}")


def test_an_answer_that_begins_with_an_object_is_text():
    text = '{"name": "Ada", "age": 36} is the record.'
    assert parse_turn(text) == Parsed(text)


@for_each(
    "text",
    [
        tagged(ADD),
        f"<tool_call>\n{ADD}\n</tool_call>\n",
        tagged(ADD.replace("arguments", "parameters")),
        tagged(f"[{ADD}]"),
        tagged('{"name": "add", "arguments": "{\\"a\\": 1}"}'),
        tagged(f'{{"type": "function", "function": {ADD}}}'),
        ADD,
        f"<|python_tag|>{ADD}",
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
    ],
)
def test_forms_of_a_call(text):
    assert parse_turn(text) == Parsed("", calls=(ToolCall("add", {"a": 1}),))


def test_text_around_several_calls():
    turn = parse_turn(f"First {tagged(ADD)} then {tagged('[' + ADD + ', ' + ADD + ']')} done.")
    assert turn.text == "First  then  done."
    assert len(turn.calls) == 3 and turn.error is None
    assert len(parse_turn(f"{ADD}; {ADD}".replace("arguments", "parameters")).calls) == 2


def test_json_decides_where_a_call_ends():
    code = 'print("</tool_call><tool_call>")'
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    assert parse_turn(f"a {tagged(call)} b").calls == (ToolCall("python", {"code": code}),)


def test_reasoning_comes_first_and_makes_no_calls():
    turn = parse_turn(f"<think>\n{tagged(ADD)}\n</think>\n\nSo 3.")
    assert turn == Parsed("So 3.", tagged(ADD), reasoned=True)
    assert parse_turn("Hm.</think>3", thinking=True) == Parsed("3", "Hm.", reasoned=True)
    assert parse_turn("<think>\n\n</think>\n\n3") == Parsed("3", reasoned=True)
    assert parse_turn("Hm.</think>3").text == "Hm.</think>3"
    assert parse_turn("3 <think>Hm.</think>").text == "3 <think>Hm.</think>"
    # What is cut off while it thinks has no text.
    assert parse_turn("<think>\nHm", complete=False) == Parsed("", "Hm", complete=False)


@for_each(
    "text",
    ["", "4", '{"answer": 4}', '{"name": "Bob", "age": 4}', "{4}", '{"name"', "a " + ADD, "{" * 99],
)
def test_text_that_is_no_call(text):
    if text == '{"name"':
        assert parse_turn(text) == Parsed(text)
    assert parse_turn(text) == Parsed(text.strip())


@for_each(
    ("text", "message"),
    [
        (tagged('{"name": "add", "arguments": {'), "Expecting property name"),
        (tagged('{"name": "add" "arguments": {}}'), "Expecting ',' delimiter at character 15"),
        (f"<tool_call>{ADD}", "must be followed by </tool_call>"),
        ("<tool_call>", "Expecting value at character 0"),
        (tagged(f"{ADD} {ADD}"), "must be followed by </tool_call>"),
        (tagged("add(1)"), "not valid JSON"),
        (tagged("3"), "must be a JSON object with"),
        (tagged('{"name": 3, "arguments": {}}'), "must be a JSON object with"),
        (tagged('{"name": "f", "arguments": [1]}'), "must be a JSON object with"),
        (tagged('{"name": "f", "arguments": "1 +"}'), "must be a JSON object with"),
        (tagged('{"name": "f", "arguments": ' + "[" * 10_000), "nested too deeply"),
        (tagged('{"a":' * 10_000 + "1" + "}" * 10_000), "nested too deeply"),
        (nested(63), "nested too deeply"),
        (tagged('{"arguments": {"a": ' + "9" * 10_000 + "}}"), "more than 1000 digits"),
        (tagged('{"name": "f", "arguments": {"a": 1e999}}'), "too large"),
        (tagged('{"name": "f", "arguments": {"a": NaN}}'), "NaN in a tool call is not JSON"),
        (ADD + " and now I wait", "not valid JSON"),
        ('{"name": "add", "parameters": {"a": 1}', "not valid JSON"),
        ("<|python_tag|>brave_search.call(query='a')", "not valid JSON"),
        ("<|python_tag|>3", "must be a JSON object with"),
    ],
)
def test_what_is_wrong_with_a_call(text, message):
    turn = parse_turn(text)
    assert turn.calls == () and turn.error is not None
    assert message in turn.error and len(turn.error) < 200 and "\n" not in turn.error


def test_good_calls_beside_a_bad_one_are_made():
    turn = parse_turn(f"{tagged(ADD)}{tagged('{')}{tagged('3')}{tagged(ADD)} so")
    assert [call.name for call in turn.calls] == ["add", "add"]
    assert "not valid JSON" in turn.error and turn.text == "so"


def test_ten_kilobytes_of_noise_never_raise():
    random.seed(0)
    pieces = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", ADD, "{", "}"]
    pieces += ['"name": ', '"', "\\", "[", "]", ",", ":", "1e9", "\ud800", "\x00", "\n", " ", "é"]
    for _ in range(200):
        turn = parse_turn("".join(random.choices(pieces, k=2000)))
        assert isinstance(turn, Parsed)
        assert all(isinstance(call.arguments, dict) for call in turn.calls)


def test_arguments_may_be_nested():
    parsed = parse_turn(nested(62))
    assert parsed.error is None and len(parsed.calls) == 1
