"""kill -9 while an environment steps: the run that goes on is the one that was never killed."""

import hashlib
import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "train")]

from killing import Ended, check, environment, told  # noqa: E402

STEPS = 2  # with a checkpoint of each
GAMES = 8  # of a step: four prompts, two of each


def play(folder: Path, *, waits: bool) -> None:
    """The run itself; where it waits, in the middle of an episode after its first checkpoint."""
    import jax
    import numpy as np
    from kinds import episodes
    from tiny_run import tiny_run, without_plot

    from jaxrl_llm.environments import NumberGuess, Replay
    from jaxrl_llm.train import CheckpointConfig, train

    numbers = itertools.count(1)

    class Game:
        """A game that lives in its process: nothing but its actions brings it back."""

        def __init__(self, task, seed):
            self.state, self.first = NumberGuess().reset({}, seed)
            self.number = next(numbers)

        def step(self, action):
            self.state, seen = NumberGuess().step(self.state, action)
            # The checkpoint is written beside the loop: on a slow disk the run may end before it.
            if waits and self.state.turn == 2 and self.number > GAMES:
                while not any(saved.glob("step_????????")):
                    time.sleep(0.01)
                print("inside\n", end="", flush=True)  # at once: other games say it too
                time.sleep(600)
            return seen

        def close(self):
            pass

    class Played(Replay):
        def start(self, task, seed):
            game = Game(task, seed)
            return game, game.first

    without_plot()
    saved = folder / "checkpoints"
    config = tiny_run(
        folder,
        steps=STEPS,
        **episodes(folder) | {"environment": Played()},
        checkpoint=CheckpointConfig(every=1),
        samples_shown=16,
    )

    state = train(config, resume=True).state
    digest = hashlib.sha256(repr((int(state.step), tuple(state.data_cursor))).encode())
    for leaf in jax.tree.leaves((state.params, state.opt_state, jax.random.key_data(state.key))):
        digest.update(np.asarray(leaf).tobytes())
    print(f"ended {digest.hexdigest()}", flush=True)


def run(cache: Path, *words: str) -> list[str]:
    """What a process says of its runs; one that is inside an episode is killed there."""
    command, said = [sys.executable, __file__, *words], []
    process = subprocess.Popen(command, env=environment(cache), stdout=subprocess.PIPE, text=True)
    with process:
        for line in process.stdout:
            if line.startswith(("inside", "ended")):
                said.append(line)
            if line.startswith("inside"):  # as the other games of the batch may be by now
                process.kill()
                break
    assert process.returncode == (-9 if said[0].startswith("inside") else 0), said
    return said


@pytest.mark.slow
def test_a_run_that_is_killed_inside_an_episode_ends_as_one_that_is_not(tmp_path):
    cache, whole, killed = tmp_path / "cache", tmp_path / "whole", tmp_path / "killed"
    assert run(cache, str(killed), "--waits")[0].startswith("inside")
    assert len([row for row in told(killed, "metrics.jsonl") if "loss" in row]) < STEPS
    resumed, expected = (Ended(said, 0.0) for said in run(cache, str(killed), str(whole)))
    check(killed, resumed, whole, expected, kind="episodes")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name != "--waits":
            play(Path(name), waits="--waits" in sys.argv)
