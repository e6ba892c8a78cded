"""ScienceWorld: compared with its simulator, played directly."""

import pickle
import shutil

import pytest

from jaxrl_llm.environments import Parsed, ScienceWorld

scienceworld = pytest.importorskip("scienceworld")
pytestmark = [
    pytest.mark.skipif(shutil.which("java") is None, reason="the simulator needs Java"),
    pytest.mark.filterwarnings("ignore"),  # what the package warns of itself
    pytest.mark.slow,
]
ROW = {"task": "find-plant", "variation": 2}


def test_equals_the_simulator_played_directly():
    """Each instance is a process of Java; test_replay.py has the laws of what replays."""
    env, peer = ScienceWorld(), scienceworld.ScienceWorldEnv("")
    try:
        peer.load("find-plant", 2, "easy")
        room, info = peer.reset()
        start, seen = env.reset(ROW, 0)
        state, text = start, seen.messages[0]["content"]
        assert text.startswith("Task Description:\nYour task is to find a(n) plant.")
        assert text.endswith(room.strip().split("\n")[-1].strip())
        assert all(action in text for action in peer.get_possible_actions())
        total = 0.0
        for command in ("teleport to greenhouse", "look around", "dance"):
            words, reward, done, info = peer.step(command)
            before, said = state, Parsed(f"Let me think.\n{command}\n")
            state, seen = env.step(before, said)
            assert seen.messages[0]["content"].split() == words.split()
            assert (seen.reward, seen.done) == (reward / 100, done)
            assert seen.info["score"] == info["score"] / 100
            total += seen.reward
        assert total > 0
        # A fork sees the same, in another process; a mistake that is not forgiven costs.
        saved, other = pickle.loads(pickle.dumps((before, env)))
        assert other.step(saved, said) == (state, seen)
        _, seen = env.step(start, Parsed("focus on table"))
        assert seen.done and seen.reward < 0
        other.close()
    finally:
        env.close()
        peer.close()
        peer._gateway.java_process.stdin.close()


def test_a_row_without_a_task_is_refused():
    with pytest.raises(ValueError, match="a row needs 'task'"):
        ScienceWorld().reset({}, 0)
