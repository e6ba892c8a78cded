"""Tasks of reasoning-gym as environments of one turn."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxrl_llm.data.messages import Parsed, ToolSpec
from jaxrl_llm.data.sources import from_reasoning_gym
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rewards import reasoning_gym


class Question(NamedTuple):
    """A question of a task, and whether it has been answered."""

    entry: Mapping[str, Any]
    answered: bool = False


@dataclass(frozen=True)
class ReasoningGym:
    """A question of a task, answered in one turn and scored by the task.

    The question is the row's "entry", from :func:`jaxrl_llm.data.from_reasoning_gym`, or else it is
    generated from the seed. The scorer reads the answer in a sandbox, as in
    :class:`jaxrl_llm.rewards.reasoning_gym`.

    Attributes:
      task: Name of a reasoning-gym dataset.
      options: Options of the dataset.
      trust: Run the scorer in this process, without the sandbox.

    Raises:
      ImportError: If reasoning-gym is not installed.
      ValueError: If there is no such task or option, or a question is answered twice.
      SandboxError: In `reset`, if the sandbox cannot run here and `trust` is not set.

    Example:
      >>> from jaxrl_llm import rewards
      >>> from jaxrl_llm.environments import Parsed, ReasoningGym
      >>> try:
      ...     trust = not rewards.check_sandbox()
      ... except rewards.SandboxError:  # no bubblewrap here
      ...     trust = True
      >>> env = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2}, trust=trust)
      >>> question, observation = env.reset({}, seed=1)
      >>> _, observation = env.step(question, Parsed(question.entry["answer"]))
      >>> observation.reward, observation.done
      (1.0, True)

    References:
      Reasoning Gym (arXiv:2505.24760).
    """

    task: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    trust: bool = field(default=False, kw_only=True)

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """None."""
        return ()

    @functools.cached_property
    def _reward(self) -> reasoning_gym:
        """One for all episodes, since it keeps its sandbox."""
        return reasoning_gym(self.task, trust=self.trust, **self.options)

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Question, Observation]:
        """The question."""
        entry = task.get("entry")
        if entry is None:
            row = from_reasoning_gym(self.task, size=1, seed=seed, **self.options)[0]
            entry = row.metadata["entry"]
        _ = self._reward  # refused here, where an error ends the run and not an episode
        return Question(entry), Observation([{"role": "user", "content": entry["question"]}])

    def step(self, state: Question, action: Parsed) -> tuple[Question, Observation]:
        """Its score, from 0 to 1."""
        if state.answered:
            raise ValueError("ReasoningGym.step: the question has been answered.")
        reward = self._reward(state.entry["question"], action.text, {"entry": state.entry})
        return state._replace(answered=True), Observation((), reward, done=True)
