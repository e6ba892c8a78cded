"""Environments: multi-turn tasks, tools and adapters."""

from jaxrl_llm.core.runtime.lazy import lazy
from jaxrl_llm.data.messages import Message, Parsed, ToolCall, ToolSpec
from jaxrl_llm.environments.arrays import ArrayEnv, stack
from jaxrl_llm.environments.asking import NoSubagentError, SubagentError, answered_by, ask
from jaxrl_llm.environments.gridworld import Gridworld
from jaxrl_llm.environments.memory_bandit import MemoryBandit
from jaxrl_llm.environments.number_guess import NumberGuess
from jaxrl_llm.environments.protocol import BatchEnv, Env, Observation
from jaxrl_llm.environments.replay import Instance, Replay, ReplayState
from jaxrl_llm.environments.semi_online import SemiOnline
from jaxrl_llm.environments.subgoals import Subgoals, TurnParts, token_roles, turn_parts
from jaxrl_llm.environments.tools import ToolEnv, calculator, call_tool, python, tool

# Adapters load on first use.
_HOMES = {
    "Gymnasium": "adapters.gymnasium",
    "OpenEnv": "adapters.openenv",
    "ReasoningGym": "adapters.reasoning_gym",
    "ScienceWorld": "adapters.scienceworld",
    "TRLEnv": "adapters.trl",
    "TextWorld": "adapters.textworld",
}

__all__ = [
    "ArrayEnv",
    "BatchEnv",
    "Env",
    "Gridworld",
    "Gymnasium",
    "Instance",
    "MemoryBandit",
    "Message",
    "NoSubagentError",
    "NumberGuess",
    "Observation",
    "OpenEnv",
    "Parsed",
    "ReasoningGym",
    "Replay",
    "ReplayState",
    "ScienceWorld",
    "SemiOnline",
    "SubagentError",
    "Subgoals",
    "TRLEnv",
    "TextWorld",
    "ToolCall",
    "ToolEnv",
    "ToolSpec",
    "TurnParts",
    "answered_by",
    "ask",
    "calculator",
    "call_tool",
    "python",
    "stack",
    "token_roles",
    "tool",
    "turn_parts",
]

__getattr__, _ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
