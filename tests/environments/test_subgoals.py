"""Turns of a switch, a subgoal and an action: what they are made of, and who asks for them."""

import dataclasses

import pytest
from rows import for_each

from jaxrl_llm.environments import NumberGuess, Parsed, Subgoals, token_roles, turn_parts
from jaxrl_llm.testing import check_env

TURN = "<switch>SWITCH</switch>\n<subgoal>halve it</subgoal>\n<action>{}</action>"


@for_each(
    ("switch", "begins"),
    [
        ("<switch>SWITCH</switch>", True),
        ("<switch> switch </switch>", True),
        ("<switch>maybe</switch>", True),
        ("<switch>keep</switch>", False),
        ("<switch> </switch>", False),
        ("<switch>SWITCH", False),
        ("", False),
    ],
)
def test_what_keeps_and_what_switches(switch, begins):
    assert turn_parts(switch + "<subgoal>x</subgoal>").switch is begins


def test_the_first_block_of_a_tag_counts():
    parts = turn_parts("a<action>one</action><action>two</action><subgoal> tea\n</subgoal>")
    assert (parts.action, parts.subgoal) == ("one", "tea")
    assert parts.spans == {1: (1, 21), 2: (41, 65)}
    assert turn_parts("go").action is None and turn_parts("<subgoal></subgoal>").subgoal == ""


def decode(tokens):
    return "".join(PIECES[i] for i in tokens)


PIECES = (
    *("<swi", "tch>SWITCH</switch><sub", "goal>", "tea", "</subgoal>", " "),
    *("<action>go", "</action>", ""),
)


def test_tokens_are_of_the_part_in_which_their_text_stands():
    # The second token lies across the switch and the subgoal.
    assert token_roles(range(9), decode=decode).tolist() == [3, 2, 2, 2, 2, 0, 1, 1, 0]
    assert token_roles([3, 5, 8], decode=decode).tolist() == [1, 1, 1]
    # Without an action block, all but the subgoal; a stop token alone is an action.
    assert token_roles([5, 0, 1, 2, 3, 4, 8], decode=decode).tolist() == [1, 3, 2, 2, 2, 2, 1]
    assert token_roles([8], decode=decode).tolist() == [1]
    assert token_roles([], decode=decode).tolist() == []


def test_a_draft_in_the_reasoning_is_no_part():
    draft = "<switch>SWITCH</switch><subgoal>run</subgoal><action>east</action>"
    turn = f"<think>\n{draft}</think>\n<subgoal>rest</subgoal><action>wait</action>"
    parts = turn_parts(turn, reasoning=draft)
    assert parts[:3] == (False, "rest", "wait")
    assert [turn[slice(*parts.spans[role])] for role in (2, 1)] == [
        "<subgoal>rest</subgoal>",
        "<action>wait</action>",
    ]
    roles = token_roles(list(turn.encode()), decode=read, reasoning=draft)
    taken = {role: read(list(turn.encode()[i] for i in (roles == role).nonzero()[0]))
             for role in (1, 2, 3)}  # fmt: skip
    assert taken == {1: "<action>wait</action>", 2: "<subgoal>rest</subgoal>", 3: ""}
    # A template may have changed the reasoning, so that it is not in the text.
    assert turn_parts("<action>go</action>", reasoning="as the template wrote it").action == "go"
    # Of reasoning that has not ended nothing is read, and without a block all is the action.
    assert turn_parts(draft, reasoning=draft) == (False, None, None, {})
    assert (token_roles(list(draft.encode()), decode=read, reasoning=draft) == 1).all()


def read(tokens):
    return bytes(tokens).decode()


def test_the_inner_environment_gets_the_action_and_the_policy_sees_its_subgoal():
    env = Subgoals(NumberGuess(), penalty=0.5)
    state, seen = env.reset({"secret": 3}, 0)
    first = seen.messages[0]["content"]
    assert first.startswith("number from 1 to 7?\nCurrent subgoal: None\n") and "<action>" in first
    state, seen = env.step(state, Parsed(TURN.format("4, not 5")))
    assert seen.messages[0]["content"] == "high\nCurrent subgoal: halve it"
    assert seen.info == {"right": 0.0, "number": 1.0, "valid": 1.0, "switch": 1.0}
    assert seen.state == "1-4"
    # Of what has no blocks all is the action; it costs, and the subgoal stays.
    state, seen = env.step(state, Parsed("then 3"))
    assert seen.done and seen.reward == 0.5 and seen.info["valid"] == 0
    assert state.subgoal == "halve it"


@dataclasses.dataclass(frozen=True)
class Costly(NumberGuess):
    """A limit of the run costs as much as the last number of the turn, or as 9."""

    def truncation_reward(self, state, end, action):
        return -9.0 if action is None else -float(action.text)


def test_a_limit_of_the_run_earns_what_it_earns_inside():
    for env, costs in ((Costly(), (-4.0, -5.0, -9.0)), (NumberGuess(), (0.0, 0.0, 0.0))):
        env = Subgoals(env)
        state, _ = env.reset({"secret": 3}, 0)
        turns = (Parsed(TURN.format("4")), Parsed("5"), None)
        ends = ("length", "length", "context")
        assert tuple(map(env.truncation_reward, (state,) * 3, ends, turns)) == costs


class Later(NumberGuess):
    """A game that answers later."""

    async def step(self, state, action):
        return NumberGuess.step(self, state, action)


@for_each("env", [NumberGuess(), Later()])
def test_the_laws_of_environments(env):
    check_env(Subgoals(env), [{"secret": 3}], [TURN.format(5), "2"])


def test_a_penalty_is_not_negative():
    with pytest.raises(ValueError, match="Subgoals: penalty must not be negative"):
        Subgoals(NumberGuess(), penalty=-1.0)
