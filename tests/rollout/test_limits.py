"""What an episode earns that a limit of the run ends, and the turns where branches begin."""

import time

import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation.collectors.protocol import Response, beginning
from jaxrl_llm.data import make_renderer
from jaxrl_llm.environments import Observation, Replay, ToolEnv, ask, calculator, tool
from jaxrl_llm.rewards import dapo_math, exact_match
from jaxrl_llm.rollout import Completion
from jaxrl_llm.rollout.episodes import EpisodeOptions, Episodes
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import LENGTH, STOP

TOKENIZER = jr.testing.ByteTokenizer()


class Walk:
    """Each step earns 1, and "end" ends it."""

    tools = ()

    def reset(self, task, seed):
        return 0, Observation([{"role": "user", "content": "go"}])

    def step(self, state, action):
        message = {"role": "user", "content": f"step {state}"}
        return state + 1, Observation([message], 1.0, done=action.text == "end")


class Costly(Walk):
    """What a limit costs is told by a function."""

    def __init__(self, cost):
        self.cost, self.calls = cost, []

    def truncation_reward(self, state, end, action):
        self.calls.append((state, end, None if action is None else (action.text, action.complete)))
        return self.cost()


class Awaited(Costly):
    async def truncation_reward(self, state, end, action):
        return Costly.truncation_reward(self, state, end, action)


@pytest.fixture
def begin():
    """``begin(env, most=, **options)``: its episodes, the task of which has started."""
    opened = []

    def begin(env, *, most=200, **options):
        episodes = Episodes(
            env, make_renderer(TOKENIZER), decode=TOKENIZER.decode, seed=(0,), max_new_tokens=most,
            options=EpisodeOptions(**options),
        )  # fmt: skip
        opened.append(episodes)
        episodes.start(0, {"text": "12 * 12?", "answer": "144"}, "'a'")
        return episodes

    yield begin
    for episodes in opened:
        episodes.close()


def play(episodes, *turns, request=0, tokens=(), cut=False):
    """What is taken of an episode with some turns, the last of which may be cut."""
    follow, tokens = episodes.follow(0), list(tokens)
    for i, text in enumerate(turns):
        last = cut and i == len(turns) - 1
        tokens += text.encode() if last else [*text.encode(), *TOKENIZER.eos_ids]
        none = np.zeros(len(tokens), np.float32)
        out = Tokens(np.int32(tokens), none, none, none, np.zeros(len(tokens), np.int32))
        done = Completion(request, out, LENGTH if last else STOP)
        following = follow(done).result(60)
        if following is None:
            return episodes.take(done)
        tokens += following.tokens
    raise AssertionError("the episode has not ended")


@tool
def book(title: str) -> str:
    """A long book."""
    return "x" * 1000


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 12"}}</tool_call>'
BOOK = '<tool_call>{"name": "book", "arguments": {"title": "a"}}</tool_call>'


@for_each(("reward", "value"), [(dapo_math, -1.0), (exact_match, 0.0)])
def test_tools_without_an_answer_earn_no_more_than_a_wrong_one(begin, reward, value):
    env = ToolEnv([calculator, book], reward)
    for end, limits, turn, cut in (
        ("turns", {"max_turns": 1}, CALL, False),
        ("length", {"most": 8}, "Answer: ", True),
        ("context", {"most": 400}, BOOK, False),
    ):
        episode = play(begin(env, **limits), turn, cut=cut).episode
        assert (episode.end, episode.reward, episode.error) == (end, value, "")
        assert not episode.failed and episode.finish == LENGTH
    assert play(begin(env), CALL, "Answer: 145").episode.reward == value


def test_the_environment_is_told_what_ended_and_where(begin):
    for make in (Costly, Awaited):
        env = make(lambda: -3.0)
        assert play(begin(env, max_turns=2), "a", "b").episode.reward == 2 - 3
        assert play(begin(env, most=4), "abc").episode.reward == 1 - 3
        cut = play(begin(env, most=45), "a", "b" * 45, cut=True).episode
        assert [(turn.reward, turn.next_state) for turn in cut.turns][1:] == [
            (-3.0, cut.turns[0].next_state)
        ]
        assert play(begin(env, max_turns=2), "a", "end").episode.reward == 2  # it ended itself
        assert env.calls == [
            (2, "turns", None), (1, "context", None), (1, "length", ("b" * 45, False))
        ]  # fmt: skip
    assert play(begin(Walk(), max_turns=2), "a", "b").episode.reward == 2


def fails():
    raise KeyError("door")


@for_each(
    ("cost", "end", "error"),
    [
        (fails, "env_error", "truncation_reward failed: KeyError: 'door'"),
        (lambda: time.sleep(9), "env_timeout", "truncation_reward failed: it took longer than 0.5"),
        (lambda: float("nan"), "env_error", "truncation_reward failed: nan, which is no finite"),
        (lambda: -1e39, "env_error", "truncation_reward failed: -1e+39, which is no finite"),
        (lambda: None, "env_error", "truncation_reward failed: None, which is no finite"),
    ],
)
@for_each("cut", [False, True])
def test_a_fault_at_a_limit_ends_its_episode_alone(begin, cost, end, error, cut):
    seconds = 0.5 if end == "env_timeout" else 60.0
    episodes = begin(Costly(cost), max_turns=2, seconds=seconds, most=45)
    failed = play(episodes, "a", "b" * 45 if cut else "b", cut=cut).episode
    assert failed.end == end and failed.error.startswith(error) and failed.failed
    neighbor = play(episodes, "end", request=1).episode
    scores = episodes.scores([failed, neighbor])
    assert scores.failed.tolist() == [True, False] and scores.rewards.tolist() == [0, 1]


class Wrapper:
    """Passes on what it has not, and has a state of its own."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, task, seed):
        state, seen = self.env.reset(task, seed)
        return {"inner": state}, seen

    def step(self, state, action):
        after, seen = self.env.step(state["inner"], action)
        return {"inner": after}, seen._replace(reward=0.0)


def test_a_method_that_a_wrapper_passes_on_is_not_the_wrappers(begin):
    env = Costly(lambda: -3.0)
    episode = play(begin(Wrapper(env), max_turns=1), "a").episode
    assert (episode.end, episode.reward, episode.error) == ("turns", 0, "")
    assert not env.calls


class Slow:
    """Takes its time to close."""

    def step(self, action):
        return Observation([{"role": "user", "content": "on"}], 1.0)

    def close(self):
        time.sleep(2)


class SlowCostly(Slow):
    def truncation_reward(self, end, action):
        return -3.0


class LaterCostly(Slow):
    async def truncation_reward(self, end, action):
        return -3.0


class Made(Replay):
    """Starts instances of a class."""

    def __init__(self, kind):
        super().__init__()
        object.__setattr__(self, "kind", kind)

    def start(self, task, seed):
        return self.kind(), Observation([{"role": "user", "content": "go"}])


@for_each(("kind", "reward"), [(Slow, 1), (SlowCostly, -2)])
def test_an_instance_that_closes_slowly_costs_no_reward(begin, kind, reward):
    episode = play(begin(Made(kind), max_turns=1, seconds=0.5), "a").episode
    assert (episode.end, episode.reward, episode.error) == ("turns", reward, "")


def test_an_instance_tells_its_reward_at_once(begin):
    episode = play(begin(Made(LaterCostly), max_turns=1), "a").episode
    error = "truncation_reward failed: TypeError: Made: truncation_reward of LaterCostly is async"
    assert episode.end == "env_error" and episode.error.startswith(error)


def test_a_reward_cannot_ask_a_subagent_at_a_limit(begin):
    def judged(prompt, completion, metadata):
        return float(ask(f"Is {completion} right?"))

    episode = play(begin(ToolEnv([calculator], judged), max_turns=1), CALL).episode
    assert episode.end == "env_error" and episode.error == (
        "truncation_reward failed: SubagentError: ask: truncation_reward cannot ask a subagent; "
        "ask in step."
    )


class Steep(Costly):
    """Its first turn earns as much as a test says, the others as little."""

    def step(self, state, action):
        state, seen = super().step(state, action)
        first = self.first if state == 1 else -3e38
        return state, seen._replace(reward=seen.reward if seen.done else first)


@for_each(
    ("first", "cost", "error"),
    [
        (-3e38, 0.0, "the sum of its rewards is -6e+38, which is no finite"),
        (-3e38, 3e37, "the sum of its rewards is -5.7e+38, which is no finite"),
        (3e38, -3e38, "truncation_reward failed: -6e+38, which is no finite"),
    ],
)
def test_rewards_whose_sum_is_too_large_end_their_episode_alone(begin, first, cost, error):
    env = Steep(lambda: cost)
    env.first = first
    episodes = begin(env, max_turns=2)
    failed = play(episodes, "a", "b").episode
    assert failed.end == "env_error" and failed.error.startswith(error)
    neighbor = play(episodes, "end", request=1).episode
    scores = episodes.scores([failed, neighbor])
    assert scores.failed.tolist() == [True, False] and scores.rewards.tolist() == [0, 1]


def branch(episodes, whole, start, *turns):
    """A second episode that goes on where a turn of the first one begins."""
    response = Response(whole.out.tokens, turn_starts=whole.starts)
    begun = beginning(response, start.length)
    places = episodes.begin(9, begun)
    return play(episodes, *turns, request=9, tokens=begun.tokens[places].tolist())


def test_a_branch_has_the_starts_of_its_turns_and_nothing_of_a_limit(begin):
    episodes = begin(Costly(lambda: -3.0), max_turns=3)
    whole = play(episodes, "a", "b", "c")
    assert [turn.reward for turn in whole.episode.turns] == [1, 1, -2]
    assert len(whole.starts) == 2
    first, second = whole.starts
    begun = branch(episodes, whole, first, "dd", "end")
    assert [turn.reward for turn in begun.episode.turns] == [1, 1, 1]
    assert [start.length for start in begun.starts] == [first.length, second.length + 1]
    assert begun.starts[0].play is first.play
    last = branch(episodes, whole, second, "end")
    assert [turn.reward for turn in last.episode.turns] == [1, 1, 1]
    assert [start.length for start in last.starts] == [first.length, second.length]


def test_what_waits_for_its_reward_when_a_batch_ends_is_cancelled(begin):
    class Closing(Costly):
        def step(self, state, action):
            episodes.close()
            return super().step(state, action)

    episodes = begin(Closing(lambda: -3.0), max_turns=1)
    tokens = np.int32([97, *TOKENIZER.eos_ids])
    none = np.zeros(len(tokens), np.float32)
    done = Completion(0, Tokens(tokens, none, none, none, np.zeros_like(tokens)), STOP)
    following = episodes.follow(0)(done)
    for _ in range(600):
        if following.done():
            break
        time.sleep(0.05)
    assert following.cancelled()
