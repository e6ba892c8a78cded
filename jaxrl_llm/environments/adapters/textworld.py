"""Text adventures of TextWorld, made by its generators."""

import atexit
import functools
import importlib
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.data.messages import Parsed
from jaxrl_llm.environments import text
from jaxrl_llm.environments.adapters import packages
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.environments.replay import Replay

_INFOS = ("description", "facts", "feedback", "max_score", "objective", "score", "won")
_STATUS = re.compile(r"^>\s*-=.*=-\s*\d+/\d+\s*$", re.MULTILINE)  # the interpreter's last line
_MAKING = threading.Lock()  # the generators are not made for threads


@dataclass(frozen=True)
class TextWorld(Replay):
    """Games of one generator; a row's "seed", or else the seed of the group, determines the game.

    The policy sees the goal, the result of the last command, and the currently possible commands;
    it replies with one of them. Any other reply costs a turn and never reaches the game, so words
    such as "undo" or "restore" have no effect. The reward is the score gained, divided by the
    game's maximum.
    ``Observation.state`` names the facts of the world, ``info["won"]`` is 1 at a victory.

    Attributes:
      challenge: "coin_collector", "treasure_hunter", "simple" or "cooking".
      settings: Settings of the generator: {"level": 1 to 300} (coin collector), {"level": 1 to 30}
        (treasure hunter), {"rewards": "dense", "balanced" or "sparse", "goal": "detailed", "brief"
        or "none", "test": False} (simple).
      instructions: Text before the goal.
      brief: Whether only the first line of a text is shown, such as the name of the room; the goal
        and the commands are always shown.
      folder: Where games are stored, each made once; None for a temporary folder.
      live: See :class:`Replay`.

    Raises:
      ImportError: If textworld is not installed.
      ValueError: If there is no such generator.

    References:
      TextWorld (arXiv:1806.11532).
    """

    challenge: str = "coin_collector"
    settings: Mapping[str, Any] = field(default_factory=lambda: {"level": 3}, hash=False)
    instructions: str = "Answer with one of the commands."
    brief: bool = False
    folder: str | None = None

    def start(self, task: Mapping[str, Any], seed: int) -> tuple["_Game", Observation]:
        """The game of a row."""
        tw: Any = packages.load("textworld", "TextWorld")
        path = self._game_file(int(text.column(task, "seed", seed)))
        infos = tw.EnvInfos(admissible_commands=True, **dict.fromkeys(_INFOS, True))
        game = _Game(tw.start(str(path), infos), self.brief)
        goal = f"{self.instructions}\n{game.now.objective}\n"
        return game, game.observe(game.now.description, goal=goal)

    def walkthrough(self, task: Mapping[str, Any], seed: int = 0) -> list[str]:
        """The commands that win the game of a row, to learn from and for tests."""
        tw: Any = packages.load("textworld", "TextWorld")
        path = self._game_file(int(text.column(task, "seed", seed)))
        env = tw.start(str(path), tw.EnvInfos(policy_commands=True))
        try:
            return list(env.reset().policy_commands)
        finally:
            env.close()

    def _game_file(self, seed: int) -> Path:
        suffix = "".join(f"-{name}_{value}" for name, value in sorted(self.settings.items()))
        path = Path(self.folder or _scratch(), f"{self.challenge}{suffix}-{seed}.z8")
        with _MAKING:
            if path.exists():
                return path
            tw: Any = packages.load("textworld", "TextWorld")
            known = importlib.import_module("textworld.challenges").CHALLENGES
            if f"tw-{self.challenge}" not in known:
                names = ", ".join(name.removeprefix("tw-") for name in known)
                raise ValueError(
                    f"TextWorld: there is no challenge {self.challenge!r}; there are {names}."
                )
            # Another process may write the same.
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                options = tw.GameOptions()
                options.seeds, options.path = seed, str(Path(folder, path.name))
                game = known[f"tw-{self.challenge}"][1](dict(self.settings), options)
                tw.generator.compile_game(game, options)
                for end in (".json", ".z8"):  # last the one whose presence is tested
                    Path(folder, path.name).with_suffix(end).replace(path.with_suffix(end))
        return path


class _Game:
    """A running game."""

    def __init__(self, env: Any, brief: bool):
        self.env, self.brief, self.now = env, brief, env.reset()
        self.highest = max(self.now.max_score or 1, 1)

    def step(self, action: Parsed) -> Observation:
        """Takes the command that the policy names, if there is one."""
        command = text.choice(action.text, self.now.admissible_commands)
        if command is None:
            return self.observe("That is none of the commands.")
        score = self.now.score or 0
        self.now, _, done = self.env.step(command)
        reward = ((self.now.score or 0) - score) / self.highest
        return self.observe(self.now.feedback, reward, done)

    def observe(
        self, words: str, reward: float = 0.0, done: bool = False, goal: str = ""
    ) -> Observation:
        """A text, and the commands where the game goes on."""
        words = _STATUS.sub("", words)
        words = goal + (words.strip().partition("\n")[0] if self.brief else words)
        commands = "" if done else f"\nCommands: {', '.join(self.now.admissible_commands)}"
        facts = "; ".join(sorted(map(str, self.now.facts)))
        info = {"won": float(bool(self.now.won))}
        return Observation(text.user(words + commands), reward, done, state=facts, info=info)

    def close(self) -> None:
        """Ends the interpreter."""
        self.env.close()


@functools.cache
def _scratch() -> str:
    folder = tempfile.mkdtemp(prefix="textworld-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
