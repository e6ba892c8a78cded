"""What passes between a policy and an environment: messages, turns, tool calls and tools."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Message = Mapping[str, Any]
"""A message of a conversation: "role" and "content", as chat templates take them."""


class ToolCall(NamedTuple):
    """A call that a turn asks for: a name and arguments, from JSON alone."""

    name: str
    arguments: Mapping[str, Any]


class Parsed(NamedTuple):
    """A turn of the policy, as a renderer parses its tokens.

    Attributes:
      text: Its text, without reasoning and tool calls.
      reasoning: What it thinks before, where the template keeps that apart.
      calls: Tool calls, in order.
      error: Why a tool call could not be read, for the policy to see; None where all could.
      complete: Whether the turn ended with its stop token, and not by a limit of length.
    """

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    complete: bool = True


class ToolSpec(NamedTuple):
    """A tool as the policy sees it.

    Attributes:
      name: By which it is called.
      description: What it does.
      parameters: A JSON schema of its arguments, of type "object".
      function: Called with the arguments; its result, as text, is the answer. None for a tool that
        the environment's ``step`` serves itself.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any] | None = None
