"""TRL's environment classes: prompts, answers of tools and rewards as its trainer makes them."""

import json
import pickle
import sys
from pathlib import Path

import pytest
from rows import for_each

from jaxrl_llm.data.rendering import encode_chat
from jaxrl_llm.environments import (
    NoSubagentError,
    Parsed,
    SubagentError,
    ToolCall,
    TRLEnv,
    answered_by,
    ask,
)
from jaxrl_llm.rewards import SandboxError
from jaxrl_llm.testing import ByteTokenizer, check_env

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
DATA = json.loads((GOLDEN / "trl_environment.json").read_text())
sys.path.insert(0, str(GOLDEN))
from trl_class import EPISODES, ROW, Shop  # noqa: E402

sys.path.remove(str(GOLDEN))


def reply(calls):
    calls = tuple(ToolCall(call["name"], call["arguments"]) for call in calls)
    return Parsed("" if calls else "That is it.", calls=calls)


@for_each("k", range(len(EPISODES)))
def test_an_episode_is_what_the_trainer_of_trl_makes(k):
    turns, most = EPISODES[k]
    expected = DATA["episodes"][k]
    env = TRLEnv(Shop, call_turns=most)
    state, seen = env.reset(ROW, 0)
    assert list(seen.messages) == expected["prompt"]
    answers, rewards = [], []
    for calls in turns:
        assert not (seen.done or seen.stopped)
        state, seen = env.step(state, reply(calls))
        answers += seen.messages
        rewards.append(seen.reward)
    assert (seen.done, seen.stopped) == (not turns[-1], bool(turns[-1]))
    assert len(turns) == expected["turns"]
    assert rewards == [0.0] * (len(turns) - 1) + [expected["reward"]]
    if k == 5:  # TRL answers async methods after all others; ours keep the order of the calls
        assert answers == expected["answers"][::-1] != expected["answers"]
    else:
        assert answers == expected["answers"]


def test_tools_are_those_that_transformers_shows():
    tools = TRLEnv(Shop).tools
    assert [tool.name for tool in tools] == [tool["name"] for tool in DATA["tools"]]
    for ours, theirs in zip(tools, DATA["tools"], strict=True):
        assert ours.description == theirs["description"] and ours.function is None
        assert ours.parameters.get("required", []) == theirs["parameters"].get("required", [])
        properties = theirs["parameters"]["properties"]
        assert ours.parameters["properties"].keys() == properties.keys()
        for name, schema in properties.items():
            mine = ours.parameters["properties"][name]
            assert {key: mine[key] for key in schema} == schema


def test_an_instance_is_made_once_to_read_its_methods_and_closed():
    made, closed = [], []

    class Session(Shop):
        def __init__(self):
            made.append(self)

        def close(self):
            closed.append(self)

    env = TRLEnv(Session)
    assert env.tools == env.tools
    assert made == closed and len(made) == 1


def test_obeys_the_laws_of_an_environment():
    replies = [*map(reply, EPISODES[0][0]), Parsed("", error="not JSON")]
    check_env(TRLEnv(Shop, call_turns=2), [ROW], replies)


def test_an_episode_that_a_limit_of_the_run_ends_is_scored_too():
    class Hard(Shop):
        def get_reward(self):
            return -1

    class Later(Hard):
        async def get_reward(self):
            return -1

    for cls in (Hard, Later):
        env = TRLEnv(cls)
        state, _ = env.reset(ROW, 0)
        assert env.truncation_reward(state, "length", Parsed("a", complete=False)) == -1
        assert env.truncation_reward(state, "turns", None) == -1


def test_a_call_that_cannot_be_read_is_told_and_the_episode_goes_on():
    env = TRLEnv(Shop)
    _, seen = env.step(env.reset(ROW, 0)[0], Parsed("", error="not JSON"))
    (message,) = seen.messages
    assert message == {"role": "tool", "name": "unknown", "content": "{'error': 'not JSON'}"}
    assert not seen.done


@for_each("name", ["sell<eos>", "\ud83d", "a b"])
def test_a_name_that_no_template_could_write_is_unknown(name):
    """Else the policy could end its episode, which is then dropped in place of scored."""
    env = TRLEnv(Shop)
    state, _ = env.reset(ROW, 0)
    state, seen = env.step(state, Parsed("", calls=(ToolCall(name, {}),)))
    (message,) = seen.messages
    assert message["name"].encode("utf-8", "replace") == b"unknown" and not seen.done
    assert message["content"] == str({"error": f"Tool {name} not found."})
    tokenizer = ByteTokenizer()
    assert encode_chat(tokenizer, tokenizer.chat, seen.messages)
    assert env.step(state, Parsed("done"))[1].done
    for kept in ("sell", "_hidden", "functions.sell-2"):
        _, seen = env.step(env.reset(ROW, 0)[0], Parsed("", calls=(ToolCall(kept, {}),)))
        assert seen.messages[0]["name"] == kept


def test_reset_gets_the_columns_that_it_names():
    class Named(Shop):
        def reset(self, seed, prompt):
            self.basket = []
            return f" {seed} {prompt[0]['content']}"

    _, seen = TRLEnv(Named).reset({"text": "x", "answer": None}, 4)
    assert seen.messages[0]["content"] == "x 4 x"


def test_a_class_that_lacks_a_method_is_refused():
    class Bare:
        def reset(self, **columns):
            return None

    with pytest.raises(ValueError, match="TRLEnv: Bare has no method 'get_reward'"):
        TRLEnv(Bare).reset({}, 0)


@for_each("error", [SandboxError("no bwrap"), SubagentError("no subagent answers")])
def test_what_is_no_fault_of_the_call_ends_the_episode(error):
    class Broken(Shop):
        def run(self) -> str:
            """Runs it."""
            raise error

    env = TRLEnv(Broken)
    state, _ = env.reset(ROW, 0)
    with pytest.raises(type(error), match=str(error)):
        env.step(state, Parsed("", calls=(ToolCall("run", {}),)))


class Team:
    """Delegates: its answers are those of a subagent."""

    def reset(self):
        self.heard = []
        return "begin"

    def delegate(self, question: str) -> str:
        """Asks.

        Args:
            question: What to ask.
        """
        try:
            self.heard.append(ask(question))
        except SubagentError:
            if question == "half":
                return "\ud83d"
            if question != "fails":
                raise
            self.heard.append("no answer")
        return " ".join(self.heard)

    def get_reward(self):
        return len(self.heard)


def delegates(*questions):
    return Parsed("", calls=tuple(ToolCall("delegate", {"question": x}) for x in questions))


def test_an_answer_with_half_a_character_is_a_text():
    env = TRLEnv(Team)
    _, seen = env.step(env.reset(ROW, 0)[0], delegates("half"))
    assert seen.messages[0]["content"].encode() == b"?"


def test_actions_that_are_taken_again_do_not_ask_again():
    asked = []

    def answer(messages, check):
        asked.append(messages[-1]["content"])
        if asked[-1] == "fails":
            raise SubagentError("it fails")
        return str(len(asked))

    env = TRLEnv(Team, live=0)
    with answered_by(answer):
        start, _ = env.reset(ROW, 0)
        state, seen = env.step(start, delegates("a", "fails"))
        state, seen = env.step(state, delegates("b"))
        state, seen = env.step(state, delegates("c"))
        assert asked == ["a", "fails", "b", "c"]
        assert seen.messages[0]["content"] == "1 no answer 3 4"
        # A branch of its first turn hears other answers, and each goes on with those it heard.
        other, seen = env.step(start, delegates("a", "fails"))
        assert seen.messages[1]["content"] == "5 no answer"
        assert state.actions[:1] == other.actions
        state, other = (env.step(x, delegates("d"))[0] for x in (state, other))
        assert len(asked) == 8
    # Without a subagent, as after a resume: what was heard is in the state.
    ends = [env.step(pickle.loads(pickle.dumps(x)), Parsed("done"))[1] for x in (state, other)]
    assert [seen.reward for seen in ends] == [5.0, 3.0]
    with pytest.raises(NoSubagentError, match="no subagent answers"):
        env.step(state, delegates("e"))


def test_waiting_instances_are_those_that_heard_the_same_answers():
    words = iter("abcdef")
    env = TRLEnv(Team)
    with answered_by(lambda messages, check: next(words)):
        start, _ = env.reset(ROW, 0)
        states = [env.step(start, delegates("x"))[0] for _ in range(2)]
        seen = [env.step(state, delegates("y"))[1] for state in reversed(states)]
    assert [x.messages[0]["content"] for x in seen] == ["b c", "a d"]
