"""Types exchanged by a policy and an environment: messages, turns, tool calls and tools."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Message = Mapping[str, Any]
"""A message of a conversation: "role" and "content", as chat templates take them."""


class ToolCall(NamedTuple):
    """A tool call in a turn: a name and arguments, parsed from JSON."""

    name: str
    arguments: Mapping[str, Any]


class Parsed(NamedTuple):
    """A turn of the policy, as a renderer parses its tokens.

    Attributes:
      text: Its text, without reasoning and tool calls.
      reasoning: Its reasoning, if the template separates it.
      calls: Tool calls, in order.
      error: Why a tool call could not be parsed, as a message to the policy; None if all could.
      complete: Whether the turn ended with its stop token, not by a length limit.
      reasoned: Whether a reasoning part has ended, which may be empty.
    """

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    complete: bool = True
    reasoned: bool = False


class ToolSpec(NamedTuple):
    """A tool as the policy sees it.

    Attributes:
      name: Its name in calls.
      description: Description of the tool.
      parameters: A JSON schema of its arguments, of type "object".
      function: Called with the arguments; its result, as text, is the reply. None for a tool that
        the environment's ``step`` handles itself.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any] | None = None
