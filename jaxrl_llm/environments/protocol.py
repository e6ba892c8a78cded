"""The protocol of a multi-turn task: ``reset`` and ``step`` over a state that is a value.

    state, observation = env.reset(task, seed)
    state, observation = env.step(state, action)      # until observation.done or .stopped

A state is a value, so it can be forked, saved and replayed; nothing else is stored between two
calls. All rollouts of a group share one seed. If the state lives in another process, such as a
game's, the value is the list of actions so far, which can be replayed from the seed.
"""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from jaxrl_llm.data.messages import Message, Parsed, ToolSpec

S = TypeVar("S")


class Observation(NamedTuple):
    """The next observation of the policy, and the reward of its last action.

    Attributes:
      messages: Messages of role "tool", "user" or, at reset, "system"; never "assistant".
      reward: Reward of the last action.
      done: Whether the task has ended.
      stopped: Whether it was cut off before its end.
      state: Name of the state for credit assignment: equal for equal states. None for the messages.
      info: Finite numbers by name, for metrics and for methods that read them for each turn.
      instead: Text that replaces the last action in the history, such as an expert's; None for the
        action itself. The action trains in any case.
    """

    messages: Sequence[Message]
    reward: float = 0.0
    done: bool = False
    stopped: bool = False
    state: str | None = None
    info: Mapping[str, float] = {}
    instead: str | None = None


class Env(Protocol[S]):
    """A multi-turn task.

    It may have another method, which says what an episode earns that a limit of the run ends::

        def truncation_reward(self, state: S, end: str, action: Parsed | None) -> float

    The reward is added to that of the last turn; without the method it is 0. ``end`` is "length",
    "context" or "turns". At "length", ``action`` is the unfinished turn, which ``step`` does not
    receive, and ``state`` is the one before it; else ``action`` is None and ``state`` is the one
    after the last step. Like ``step``, it may be async, depends only on its arguments, does not
    change them and returns a finite number. It cannot ask a subagent.

    It may state the smallest and the largest sum of rewards of an episode as ``reward_range``, by
    which a run refuses a method for other rewards before it starts.
    """

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools that the policy may call; their specifications go into the prompt."""
        ...

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[S, Observation]:
        """The first state of a task.

        Args:
          task: The row of the data set, including its ``text``.
          seed: Seed of all randomness; the same for all rollouts of a group.
        """
        ...

    def step(
        self, state: S, action: Parsed
    ) -> tuple[S, Observation] | Awaitable[tuple[S, Observation]]:
        """The state after a turn of the policy, and the next observation; it may be async."""
        ...


def truncation_reward_of(env: Any) -> Any:
    """The method ``truncation_reward`` of an environment; None if its class has none."""
    # Of its class: a wrapper may pass any name on, to an environment with other states.
    return env.truncation_reward if hasattr(type(env), "truncation_reward") else None


class BatchEnv(Env[S], Protocol):
    """An environment that also steps many episodes at once, on arrays, inside ``jax.jit``."""

    def step_batch(self, states: Any, actions: Any, active: Any) -> tuple[Any, Any, Any, Any]:
        """``(states, observations, rewards, done)`` with a leading axis of episodes."""
        ...
