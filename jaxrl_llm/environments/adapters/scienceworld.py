"""Science experiments of ScienceWorld, whose simulator runs on Java."""

import contextlib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.data.messages import Parsed
from jaxrl_llm.environments import text
from jaxrl_llm.environments.adapters import packages
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.environments.replay import Replay


@dataclass(frozen=True)
class ScienceWorld(Replay):
    """Tasks of ScienceWorld: a row has "task", such as "find-plant", and may have "variation".

    Without a variation, the seed of the group selects one. The reward is the score gained, divided
    by 100; a fatal mistake ends the task with a score below 0. The simulator has no limit on turns;
    the episode has.

    Attributes:
      simplifications: Names with commas, or "easy" for all; see the package.
      live: See :class:`Replay`; each is a Java process of some 200 MB that starts in seconds.

    Raises:
      ImportError: If scienceworld is not installed.
      ValueError: If a row has no "task".

    References:
      ScienceWorld (arXiv:2203.07540).
    """

    simplifications: str = "easy"
    live: int = field(default=8, kw_only=True)

    def start(self, task: Mapping[str, Any], seed: int) -> tuple["_Lab", Observation]:
        """The experiment of a row."""
        if "task" not in task:
            raise ValueError("ScienceWorld: a row needs 'task', the name of a task.")
        science: Any = packages.load("scienceworld", "ScienceWorld")
        lab = _Lab(science.ScienceWorldEnv("", envStepLimit=10**9))
        try:
            return lab, lab.begin(
                task["task"], text.column(task, "variation", seed), self.simplifications
            )
        except BaseException:
            lab.close()
            raise


class _Lab:
    """A running simulator."""

    def __init__(self, env: Any):
        self.env = env

    def begin(self, name: str, variation: int, simplifications: str) -> Observation:
        """Loads a task; variations beyond the last begin again at the first."""
        variation %= self.env.get_max_variations(name)
        self.env.load(name, variation, simplifications)
        room, _ = self.env.reset()
        actions = ", ".join(sorted(self.env.get_possible_actions()))
        return Observation(text.user(f"{self.env.taskdescription()}\nActions: {actions}\n{room}"))

    def step(self, action: Parsed) -> Observation:
        """Takes the last line of a reply as an action."""
        command = (action.text.strip().splitlines() or ["wait1"])[-1].strip()
        sent = command.encode("utf-8", "replace").decode()  # Java takes no lone surrogates
        words, reward, done, info = self.env.step(sent)
        facts = f"{info['look']}\n{info['inv']}"
        score = {"score": info["score"] / 100}
        return Observation(text.user(words), reward / 100, done, state=facts, info=score)

    def close(self) -> None:
        """Ends the Java process, which the package leaves to itself."""
        process = self.env._gateway.java_process
        self.env.close()
        with contextlib.suppress(OSError):  # it may have gone already
            process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
