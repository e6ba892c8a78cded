"""Each law of an environment: one that breaks it is refused, and told which."""

import asyncio
import itertools
import random

import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.environments import (
    NumberGuess,
    Observation,
    Parsed,
    Replay,
    ToolSpec,
    answered_by,
    ask,
)
from jaxrl_llm.testing import check_env


class Broken(NumberGuess):
    """A game whose observations a test changes."""

    change = staticmethod(lambda seen: seen)
    opening = staticmethod(lambda seen: seen)

    def reset(self, task, seed):
        state, seen = super().reset(task, seed)
        return state, self.opening(seen)

    def step(self, state, action):
        state, seen = super().step(state, action)
        return state, self.change(seen)


def message(role="user", content="x"):
    return [{"role": role, "content": content}]


@for_each(
    ("change", "reason"),
    [
        (lambda s: s._replace(messages=message("assistant")), "has the role 'assistant'"),
        (lambda s: s._replace(messages=message("system")), "has the role 'system'"),
        (lambda s: s._replace(messages=message(content=None)), "content is None, not a text"),
        (lambda s: s._replace(messages=[], done=False), "goes on without a message"),
        (lambda s: s._replace(reward=float("nan")), "reward is nan, not a finite number"),
        (lambda s: s._replace(reward=None), "reward is None, not a finite number"),
        (lambda s: s._replace(info={"x": float("inf")}), "x is inf, not a finite number"),
        (lambda s: s._replace(info={"x": 1e39}), r"x is 1e\+39, not a finite number"),
        (lambda s: s._replace(info={1: 0.5}), "info has the name 1, not a text"),
        (
            lambda s: s._replace(reward=float("nan"), info={"reward": 1.0}),
            "reward is nan, not a finite number",
        ),
        (lambda s: s._replace(done=1), "not bool"),
        (lambda s: s._replace(done=True, stopped=True), "both done and stopped"),
        (lambda s: s._replace(state=3), "state is 3, not a text or None"),
        (
            lambda s: s._replace(reward=random.random()),
            "second step with the same state and action",
        ),
    ],
)
def test_an_observation_of_a_step_that_breaks_a_law(change, reason):
    env = Broken()
    object.__setattr__(env, "change", change)
    with pytest.raises(AssertionError, match=f"^check_env: task 0, seed 0, turn 0: .*{reason}"):
        check_env(env, [{}], ["1"])


@for_each(
    ("change", "reason"),
    [
        (lambda s: s._replace(messages=message("assistant")), "has the role 'assistant'"),
        (lambda s: s._replace(done=True), "has ended before its first turn"),
        (lambda s: s._replace(reward=1.0), "reset earns 1.0"),
        (lambda s: s._replace(messages=message(content=str(random.random()))), "second reset"),
    ],
)
def test_an_observation_of_reset_that_breaks_a_law(change, reason):
    env = Broken()
    object.__setattr__(env, "opening", change)
    with pytest.raises(AssertionError, match=f"^check_env: task 0, seed 0, reset: .*{reason}"):
        check_env(env, [{}], ["1"])


def test_a_reset_that_hides_what_it_draws():
    class Drawn(NumberGuess):
        def reset(self, task, seed):
            return super().reset(task, next(seeds))

    def secret(seed):
        return NumberGuess().step(NumberGuess().reset({}, seed)[0], Parsed("4"))[1]

    other = next(n for n in range(20) if secret(n) != secret(0))
    seeds = itertools.cycle((0, other))
    with pytest.raises(AssertionError, match="turn 0: a second reset to this task and seed leads"):
        check_env(Drawn(), [{}], ["4"])


class Listing:
    """A state that step changes in place; ends after three turns."""

    tools = ()

    def reset(self, task, seed):
        return [], Observation(message("system") + message())

    def step(self, state, action):
        state.append(action.text)
        return state, Observation(message(content=str(len(state))), done=len(state) == 3)


def test_a_step_that_changes_its_argument():
    with pytest.raises(AssertionError, match="step changes its argument"):
        check_env(Listing(), [{}], ["a"])


def test_a_state_that_does_not_pickle():
    class Closure(Listing):
        def reset(self, task, seed):
            return (lambda: 0), Observation(message())

    with pytest.raises(AssertionError, match="turn 0: the state cannot be pickled"):
        check_env(Closure(), [{}], ["a"])


class Told(Listing):
    """A step is a function of all texts so far."""

    def __init__(self, told):
        self.told = told

    def step(self, state, action):
        texts = [*state, action.text]
        return texts, self.told(texts)


@for_each(
    ("told", "replies", "reason"),
    [
        (lambda texts: "You lose.", "a", "turn 0: it gave a str, not an Observation"),
        # It goes on after its end, and after an end that only one of the replies reaches.
        (
            lambda texts: Observation(message(), done=len(texts) == 2),
            "a",
            "turn 1, .*: the episode has ended, .* must return",
        ),
        (
            lambda texts: Observation(message(), done=texts == ["b"]),
            "ab",
            "turn 0, reply 'b': the episode has ended",
        ),
        (
            lambda texts: Observation([], reward=np.nan if texts[-1] == "b" else 1.0, done=True),
            "ab",
            "turn 0, reply 'b': reward is nan, not a finite",
        ),
    ],
)
def test_every_reply_at_a_state_is_checked(told, replies, reason):
    with pytest.raises(AssertionError, match=reason):
        check_env(Told(told), [{}], list(replies))


class Limited(Listing):
    """What a limit costs is a law that a test changes."""

    def step(self, state, action):
        state = [*state, action.text]
        return state, Observation(message(content=str(len(state))), done=len(state) >= 3)

    def truncation_reward(self, state, end, action):
        CALLS.append((len(state), end, action))
        return LAW[0](state)


CALLS, LAW = [], [len]


def test_what_a_limit_earns():
    CALLS.clear()
    LAW[0] = lambda state: -float(len(state))
    check_env(Limited(), [{}], ["a"], seeds=(0,))
    cut = Parsed("a", complete=False)
    expected = [(0, "length", cut)]
    for n in (1, 2):
        expected += [(n, "length", cut), (n, "context", None), (n, "turns", None)]
    assert CALLS[::2] == CALLS[1::2] == expected

    class Awaited(Limited):
        async def truncation_reward(self, state, end, action):
            return Limited.truncation_reward(self, state, end, action)

    check_env(Awaited(), [{}], ["a"])


@for_each(
    ("law", "reason"),
    [
        (lambda state: None, "truncation_reward is None, not a finite number"),
        (lambda state: float("nan"), "truncation_reward is nan, not a finite number"),
        (lambda state: random.random(), "a second truncation_reward of the same state differs"),
        (lambda state: state.append("x") or 0.0, "truncation_reward changes its state"),
    ],
)
def test_a_limit_that_breaks_a_law(law, reason):
    LAW[0] = law
    place = "task 0, seed 0, turn 0, length"
    with pytest.raises(AssertionError, match=f"^check_env: {place}: {reason}"):
        check_env(Limited(), [{}], ["a"])


def test_a_live_instance_is_compared_with_one_that_has_replayed_its_actions():
    class Dice:
        def step(self, action):
            return Observation(message(content=str(random.random())))

        def close(self):
            pass

    class Shared(Replay):
        """Its instances share the global generator."""

        def start(self, task, seed):
            random.seed(seed)
            return Dice(), Observation(message())

    with pytest.raises(AssertionError, match="a second step with the same state"):
        check_env(Shared(), [{}], ["a"])


def test_an_async_step_and_parsed_replies():
    class Async(NumberGuess):
        async def step(self, state, action):
            return NumberGuess.step(self, state, action)

    check_env(Async(), [{"secret": 2}], [Parsed("2"), "3"])

    async def notebook():  # which has a loop that runs
        check_env(Async(), [{"secret": 2}], [Parsed("2"), "3"])

    asyncio.run(notebook())


def test_a_step_that_awaits_by_itself_may_be_checked_in_a_notebook():
    class Waits(NumberGuess):
        def step(self, state, action):
            asyncio.run(asyncio.sleep(0))
            return super().step(state, action)

    async def notebook():
        check_env(Waits(), [{"secret": 2}], ["2", "3"])

    asyncio.run(notebook())


def test_a_step_may_ask_a_subagent():
    class Asks(NumberGuess):
        def step(self, state, action):
            return super().step(state, action._replace(text=ask("which number?")))

    with answered_by(lambda messages, check: "12"):
        check_env(Asks(), [{"secret": 2}], ["2", "3"])


@for_each(
    ("tools", "reason"),
    [
        ([ToolSpec("a", "", {"type": "object"})] * 2, "two have one name"),
        ([ToolSpec("a", "", {"type": "array"})], "the schema of 'a' has type 'array'"),
        ([ToolSpec("a", "", {"type": object})], "the schema of 'a' has type 'none: "),
    ],
)
def test_tools_that_cannot_be_shown(tools, reason):
    env = Listing()
    env.tools = tools
    with pytest.raises(AssertionError, match=f"tools: {reason}"):
        check_env(env, [{}], ["a"])


@for_each(("tasks", "actions"), [([], ["a"]), ([{}], [])])
def test_nothing_to_check_is_refused(tasks, actions):
    with pytest.raises(ValueError, match="tasks and actions must not be empty"):
        check_env(NumberGuess(), tasks, actions)
