"""Environments of Gymnasium, in text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.data.messages import Parsed
from jaxrl_llm.environments import text
from jaxrl_llm.environments.adapters import packages
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.environments.replay import Replay


def rounded(observation: Any) -> str:
    """A text as it is, and numbers with two decimals."""
    if isinstance(observation, str):
        return observation
    return np.array2string(np.asarray(observation), precision=2, separator=", ")


@dataclass(frozen=True)
class Gymnasium(Replay):
    """An environment of Gymnasium whose actions are discrete or texts.

    A discrete action is the last one that the reply names; a reply that names none costs a turn in
    which the environment does not change. A row's "seed" takes precedence over the group's.

    Attributes:
      name: Name of a registered environment.
      actions: Names of the discrete actions, in order; by default their numbers.
      describe: The text of an observation.
      instructions: Text before the first observation.
      options: Options of ``gymnasium.make``.
      live: See :class:`Replay`.

    Raises:
      ImportError: If gymnasium is not installed.
      ValueError: If the actions are neither discrete nor texts, or their names differ in number.

    References:
      Gymnasium (arXiv:2407.17032).
    """

    name: str
    actions: tuple[str, ...] = ()
    describe: Callable[[Any], str] = rounded
    instructions: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def start(self, task: Mapping[str, Any], seed: int) -> tuple["_Running", Observation]:
        """The environment, reset with the seed."""
        gymnasium: Any = packages.load("gymnasium", "Gymnasium")
        env = gymnasium.make(self.name, **self.options)
        space, discrete = env.action_space, gymnasium.spaces.Discrete
        count = int(space.n) if isinstance(space, discrete) else 0
        readable = count or isinstance(space, gymnasium.spaces.Text)
        if not readable or len(self.actions) not in (0, count):
            env.close()
            raise ValueError(
                f"Gymnasium: {self.name!r} has the actions {space}, which take "
                f"{f'{count} names' if readable else 'neither numbers nor texts'}; actions has "
                f"{len(self.actions)}."
            )
        first = int(space.start) if count else 0
        names = self.actions or tuple(str(first + i) for i in range(count))
        observation, _ = env.reset(seed=int(text.column(task, "seed", seed)))
        words = self.describe(observation)
        messages = text.verbatim(f"{self.instructions}\n{words}" if self.instructions else words)
        return _Running(env, names, first, self.describe, words), Observation(messages, state=words)


@dataclass
class _Running:
    """An environment in an episode; without names its actions are texts."""

    env: Any
    names: tuple[str, ...]
    first: int
    describe: Callable[[Any], str]
    words: str

    def step(self, action: Parsed) -> Observation:
        """Takes the action that a reply names."""
        taken: Any = action.text
        if self.names:
            name = text.choice(action.text, self.names)
            if name is None:
                asked = text.user(f"Answer with one of: {', '.join(self.names)}")
                return Observation(asked, state=self.words)
            taken = self.first + self.names.index(name)
        observation, reward, done, stopped, _ = self.env.step(taken)
        self.words = self.describe(observation)
        return Observation(
            text.verbatim(self.words),
            float(reward),
            bool(done),
            bool(stopped and not done),
            self.words,
        )

    def close(self) -> None:
        """Closes it."""
        self.env.close()
