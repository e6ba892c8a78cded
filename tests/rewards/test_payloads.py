"""Replies that try to run code, on every built-in reward and environment.

None writes a file, starts a process, evaluates a text or changes what a later reply is worth.
"""

import contextlib
import importlib
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rows import for_each

from jaxrl_llm import rewards
from jaxrl_llm.data.parsing import parse_turn
from jaxrl_llm.environments import (
    Gymnasium,
    NumberGuess,
    Parsed,
    ReasoningGym,
    ScienceWorld,
    TextWorld,
    ToolCall,
    ToolEnv,
    TRLEnv,
    calculator,
    call_tool,
)
from jaxrl_llm.environments.adapters.openenv import _Session

texts = runpy.run_path(str(Path(__file__).with_name("payloads.py")))["texts"]
# Tasks whose scorers evaluate a text: one of each way, and the others.
EVALUATED = ("countdown", "polynomial_multiplication", "n_queens", "string_insertion")
ALSO_EVALUATED = (
    *("puzzle24", "simple_integration", "intermediate_integration", "binary_matrix"),
    *("spiral_matrix", "number_sorting"),
)
FORMS = ("{}", "<answer>{}</answer>", "<think>4</think> Answer: {}", "```python\n{}\n```")
BOXED = r"\boxed{{{}}}"
_STDLIB = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_OF_NUMBERS = {"sympy", "Integer", "Float", "Rational", "Add", "Mul", "Pow"}
_seen: list[str] | None = None


def _hook(event, arguments):
    """Notes what evaluates a text, starts a process or writes a file while a reply is read."""
    if _seen is None:
        return
    if event == "exec":
        home = sys._getframe(1).f_code.co_filename
        # math-verify has sympy evaluate runs of digits and operators; polynomials are sympy's own.
        own = home.startswith(_STDLIB) or "/sympy/polys/" in home
        if not own and set(arguments[0].co_names) - _OF_NUMBERS:
            _seen.append(f"exec by {home}")
    elif event in ("os.system", "os.posix_spawn", "pickle.find_class", "socket.connect"):
        _seen.append(event)
    elif event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        _seen.append(f"open {arguments[0]}")


@pytest.fixture(scope="module")
def watched():
    """A context in which the hook notes; a hook cannot be removed."""
    sys.addaudithook(_hook)

    @contextlib.contextmanager
    def watch(name):
        global _seen
        _seen = []
        try:
            yield
            assert not _seen, (name, _seen)
        finally:
            _seen = None

    return watch


@pytest.fixture
def payloads(tmp_path):
    """The replies; none has written its file afterwards, nor changed a module."""
    marker, before = tmp_path / "marker", (sum, dict(vars(np)), os.getcwd())
    yield texts(marker)
    assert not marker.exists() and before == (sum, dict(vars(np)), os.getcwd())


ROW = {"answer": "4", "choices": ["3", "4"], "tests": [{"input": "2", "output": "4"}]}
IN_PROCESS = {
    "last_integer": rewards.last_integer,
    "last_integer_vote": rewards.last_integer_vote,
    "dapo_math": rewards.dapo_math,
    "f1": rewards.f1,
    "exact_match": rewards.exact_match,
    "multiple_choice": rewards.multiple_choice,
    "think_format": rewards.think_format,
    "word_repetition": rewards.word_repetition,
    "majority_vote": rewards.majority_vote(rewards.exact_match),
    "weighted_sum": rewards.weighted_sum({"a": (rewards.dapo_math, 1.0), "b": (rewards.f1, 0.5)}),
    "verdict": lambda p, c, m: rewards.verdict(c),
    "rating": lambda p, c, m: rewards.rating(c),
    "meta_answer": lambda p, c, m: rewards.parse_meta_answer(c),
    "bleu": lambda p, c, m: rewards.bleu(c, "4"),
    "step_ends": lambda p, c, m: rewards.step_ends(c),
    "from_code_block": lambda p, c, m: rewards.from_code_block(c),
    "parse_turn": lambda p, c, m: parse_turn(c),
    "calculator": lambda p, c, m: call_tool(
        [calculator], ToolCall("calculator", {"expression": c})
    ),
    "tool by name": lambda p, c, m: call_tool([calculator], ToolCall(c, {c: c})),
}
MATHEMATICS = (rewards.math_verify, rewards.boxed_math, rewards.reasoning_accuracy)
UNENDING = ("power", "factorial")
UNENDING_MATHEMATICS = (*UNENDING, "deep", "deep json")  # for which its pool has deadlines


@for_each("name", IN_PROCESS)
def test_a_reward_in_the_process(name, payloads, watched):
    reward = IN_PROCESS[name]
    known = repr([reward("", text, ROW) for text in ("4", "5 x")])
    for which, text in payloads.items():
        for form in (*FORMS, BOXED):
            with watched((name, which)), contextlib.suppress(ValueError):
                reward("", form.format(text), ROW)
    assert repr([reward("", text, ROW) for text in ("4", "5 x")]) == known


def test_mathematics(payloads, watched):
    importlib.import_module("sympy.physics.units")  # whose import evaluates names of units
    for reward in MATHEMATICS:
        known = [reward("", f"<think></think> {x}", ROW) for x in ("$4$", r"\boxed{4}", "5")]
        for which, text in payloads.items():
            for form in () if which in UNENDING_MATHEMATICS else (*FORMS, BOXED, "</think> ${}$"):
                with watched((reward.__name__, which)):
                    assert reward("", form.format(text), {"answer": "17"}) == 0.0
        assert known == [
            reward("", f"<think></think> {x}", ROW) for x in ("$4$", r"\boxed{4}", "5")
        ]


@pytest.mark.filterwarnings("ignore::jaxrl_llm.rewards.VerifierWarning")
@pytest.mark.parametrize(
    "tasks", [EVALUATED, pytest.param(ALSO_EVALUATED, marks=pytest.mark.slow)], ids=["", "others"]
)
def test_reasoning_gym(bubblewrap, payloads, watched, tasks):
    """Its tasks whose scorers evaluate a text, as one task in one sandbox."""
    gym = pytest.importorskip("reasoning_gym")
    parts = [gym.composite.DatasetSpec(name=x, weight=1, config={}) for x in tasks]
    reward = rewards.reasoning_gym("composite", seconds=1.0, datasets=parts)
    entries = {x: gym.create_dataset(x, size=1, seed=3)[0] for x in tasks}
    for name, entry in entries.items():
        entry["metadata"]["source_dataset"] = name
    classes = gym.factory.DATASETS
    scorers = [classes[x][0].score_answer for x in tasks]

    def known():
        texts = [(x, text) for x in tasks for text in (entries[x]["answer"] or "x", "wrong")]
        return [reward("", text, {"entry": entries[x]}) for x, text in texts]

    before = known()
    (service,) = reward._idle
    for name, entry in entries.items():
        for k, (which, text) in enumerate(payloads.items()):
            # Of the replies each task has its part; those without end take their second.
            part = k % len(tasks) == tasks.index(name) and which not in UNENDING
            if part or which in ("call", "open", "fstring") or name == "countdown":
                with watched((name, which)):
                    form = ("{}", "<answer>{}</answer>")[k % 2]
                    value = reward("", form.format(text), {"entry": entry})
                    assert value <= 0.05, (name, which)
    assert known() == before and reward._idle == [service]
    assert scorers == [classes[x][0].score_answer for x in tasks]  # of this process


@for_each("reward", [rewards.code_stdio, rewards.code_asserts])
def test_programs(reward, bubblewrap, payloads, watched):
    tests = ROW["tests"] if reward is rewards.code_stdio else ["assert double(2) == 4"]
    right = "```python\ndef double(x): return 2 * x\nprint(double(2))\n```"
    row = {"tests": tests}
    for which, text in payloads.items():
        if which not in UNENDING:  # tests of the sandbox have those
            assert reward("", f"```python\n{text}\n```", row)["reward"] == 0.0, which
    assert reward("", right, row)["reward"] == 1.0


class Text(SimpleNamespace):
    """A client of OpenEnv's server that keeps what it is asked to send."""

    def step(self, fields):
        self.sent = fields
        return SimpleNamespace(observation={"text": "x"}, reward=0.0, done=False)


class Store:
    """An environment as for TRL."""

    def reset(self, **row):
        self.count = 0

    def take(self, item: str) -> str:
        """Takes.

        Args:
            item: Its name.
        """
        return item

    def get_reward(self) -> float:
        return 0.0


def _gymnasium(folder):
    pytest.importorskip("gymnasium")
    return Gymnasium("CartPole-v1", ("left", "right")), {}


def _textworld(folder):
    pytest.importorskip("textworld")
    return TextWorld("coin_collector", {"level": 1}, folder=str(folder)), {"seed": 5}


def _scienceworld(folder):
    pytest.importorskip("scienceworld")
    if shutil.which("java") is None:
        pytest.skip("the simulator needs Java")
    return ScienceWorld(), {"task": "find-plant", "variation": 2}


ENVIRONMENTS = {
    "Gymnasium": _gymnasium,
    "NumberGuess": lambda folder: (NumberGuess(9), {"secret": 4}),
    "TRLEnv": lambda folder: (TRLEnv(Store), {}),
    "ToolEnv": lambda folder: (ToolEnv([calculator], rewards.exact_match), ROW | {"text": "2+2"}),
}


@pytest.mark.filterwarnings("ignore")  # what the packages warn of themselves
@pytest.mark.parametrize(
    "make",
    [
        *ENVIRONMENTS.values(),
        # Of a game, tests of TextWorld see that no other words reach it.
        *(pytest.param(x, marks=pytest.mark.slow) for x in (_textworld, _scienceworld)),
    ],
    ids=[*ENVIRONMENTS, "TextWorld", "ScienceWorld"],
)
def test_an_environment(make, payloads, watched, tmp_path_factory):
    env, row = make(tmp_path_factory.mktemp("games"))

    def known():
        state, seen = env.reset(row, 0)
        return [(x.reward, x.done, x.messages) for x in (seen, env.step(state, Parsed("4"))[1])]

    before = known()
    state, _ = env.reset(row, 0)
    for which, text in payloads.items():
        for action in (Parsed(text), parse_turn(text)):
            with watched((make, which)):
                state, seen = env.step(state, action)
            if seen.done or seen.stopped:
                state, _ = env.reset(row, 0)
    assert known() == before


def test_openenv_sends_the_text_itself(payloads, watched):
    socket = SimpleNamespace(state=SimpleNamespace(name="OPEN"))
    client = Text(_ws=socket)
    session = _Session(client, "http://localhost", "message", "text", socket)
    for text in payloads.values():
        with watched("OpenEnv"):
            session.step(Parsed(text))
        assert client.sent == {"message": text}


@pytest.mark.filterwarnings("ignore::jaxrl_llm.rewards.VerifierWarning")
def test_the_adapter_of_reasoning_gym(bubblewrap, payloads):
    """Its reward is the one above."""
    env = ReasoningGym("spiral_matrix")
    state, _ = env.reset({}, 0)
    assert env.step(state, Parsed(state.entry["answer"]))[1].reward == 1.0
    for which in ("call", "open", "fstring"):
        assert env.step(state, Parsed(payloads[which]))[1].reward == 0.0
