"""ScienceWorld: compared with its simulator, played directly."""

import shutil

import pytest

from jaxrl_llm.environments import Parsed, ScienceWorld
from jaxrl_llm.testing import check_env

scienceworld = pytest.importorskip("scienceworld")
pytestmark = [
    pytest.mark.skipif(shutil.which("java") is None, reason="the simulator needs Java"),
    pytest.mark.filterwarnings("ignore"),  # what the package warns of itself
    pytest.mark.slow,
]
ROW = {"task": "find-plant", "variation": 2}


def test_equals_the_simulator_played_directly():
    env, peer = ScienceWorld(), scienceworld.ScienceWorldEnv("")
    try:
        peer.load("find-plant", 2, "easy")
        room, info = peer.reset()
        state, seen = env.reset(ROW, 0)
        text = seen.messages[0]["content"]
        assert text.startswith("Task Description:\nYour task is to find a(n) plant.")
        assert text.endswith(room.strip().split("\n")[-1].strip())
        assert all(action in text for action in peer.get_possible_actions())
        total = 0.0
        for command in ("teleport to greenhouse", "look around", "dance"):
            words, reward, done, info = peer.step(command)
            state, seen = env.step(state, Parsed(f"Let me think.\n{command}\n"))
            assert seen.messages[0]["content"].split() == words.split()
            assert (seen.reward, seen.done) == (reward / 100, done)
            assert seen.info["score"] == info["score"] / 100
            total += seen.reward
        assert total > 0
    finally:
        env.close()
        peer.close()
        peer._gateway.java_process.stdin.close()


def test_obeys_the_laws_and_ends_below_zero_after_a_mistake_that_is_not_forgiven():
    env = ScienceWorld()
    # Each instance is a process of Java; test_replay.py has the laws of what replays.
    check_env(env, [ROW], ["teleport to greenhouse"], seeds=[0], turns=1)
    state, _ = env.reset(ROW, 0)
    state, seen = env.step(state, Parsed("focus on table"))
    assert seen.done and seen.reward < 0
    env.close()


def test_a_row_without_a_task_is_refused():
    with pytest.raises(ValueError, match="a row needs 'task'"):
        ScienceWorld().reset({}, 0)
