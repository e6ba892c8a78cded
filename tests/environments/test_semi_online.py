"""Recorded episodes of an expert."""

import pytest
from rows import for_each

from jaxrl_llm.data.parsing import parse_turn
from jaxrl_llm.environments import Parsed, SemiOnline
from jaxrl_llm.testing import check_env

ROW = {"text": "Buy tea.", "observations": ["a", "b", "c", "d"], "actions": ["w", "x", "y", "z"]}


def play(env, replies):
    state, seen = env.reset(ROW, 0)
    told = [seen.messages[0]["content"]]
    observations = []
    for reply in replies:
        state, seen = env.step(state, Parsed(reply))
        observations.append(seen)
        told += [m["content"] for m in seen.messages]
    return told, observations


@for_each(
    ("limit", "instead", "ends"),
    [
        (0, [None], (False, True)),
        (1, ["w", None, None], (False, True)),
        (2, ["w", None, "y", None], (True, False)),
        (None, ["w", None, "y", None], (True, False)),
    ],
)
def test_the_expert_stands_in_up_to_a_limit(limit, instead, ends):
    told, seen = play(SemiOnline(limit=limit), ["no", " X ", "no", "no"][: len(instead)])
    # What comes next is what the expert saw, whatever was said.
    assert told == ["Buy tea.\na", "b", "c", "d"][: len(instead)]
    assert [each.instead for each in seen] == instead
    assert (seen[-1].done, seen[-1].stopped) == ends
    assert [each.info["expert_match"] for each in seen] == [0, 1, 0, 0][: len(instead)]
    assert [round(each.reward, 6) for each in seen] == [0.1, 1.0, 0.1, 0.1][: len(instead)]


def test_half_a_grade_is_no_match_and_a_reply_that_breaks_off_has_no_form():
    env = SemiOnline(lambda reply, action: 0.5 if reply else 0.0)
    state, _ = env.reset(ROW, 0)
    _, seen = env.step(state, Parsed("to", complete=False))
    assert seen.reward == pytest.approx(0.45) and seen.instead == "w"
    assert seen.info == {"expert_match": 0.0, "grade": 0.5}


@for_each(
    "turn",
    [
        '<tool_call>{"name": "tap", "arguments": {"x": 1, "y": 2}}</tool_call>',
        '{"name": "tap", "arguments": {"x": 1, "y": 2}}',
        "<think>where?</think>go in",
    ],
)
def test_the_experts_own_turn_matches(turn):
    env = SemiOnline()
    state, _ = env.reset({"observations": ["a", "b"], "actions": [turn, "x"]}, 0)
    _, seen = env.step(state, parse_turn(turn))
    assert seen.info["expert_match"] == 1.0 and seen.instead is None
    _, seen = env.step(state, parse_turn(turn.replace("2", "3").replace("in", "out")))
    assert seen.info["expert_match"] == 0.0


@for_each("turn", ['<tool_call>{"action": "click", "x": 1}</tool_call>', "<think>hm</think>"])
def test_an_expert_turn_of_another_form_is_matched_by_nothing_empty(turn):
    for reply in ('<tool_call>{"action": "wait"}</tool_call>', "", turn):
        state, _ = SemiOnline().reset({"observations": ["a", "b"], "actions": [turn, "x"]}, 0)
        assert SemiOnline().step(state, parse_turn(reply))[1].info["expert_match"] == 0.0


def test_it_obeys_the_laws_of_environments():
    check_env(SemiOnline(limit=1), [ROW], ["w", "no", "y"])


def test_bad_rows_and_options():
    for row in ({}, {"actions": ["a"]}, {"actions": "ab", "observations": "ab"}):
        with pytest.raises(ValueError, match="as many 'observations'"):
            SemiOnline().reset(row, 0)
    with pytest.raises(ValueError, match="limit must not be negative"):
        SemiOnline(limit=-1)
    state, _ = SemiOnline(lambda reply, action: 2.0).reset(ROW, 0)
    with pytest.raises(ValueError, match=r"grade must be in \[0, 1\]; got 2"):
        SemiOnline(lambda reply, action: 2.0).step(state, Parsed("w"))
    with pytest.raises(ValueError, match="form must be"):
        SemiOnline(form=1.5)
