"""Environment classes written for TRL's ``environment_factory``."""

import asyncio
import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.data.messages import Message, Parsed, ToolCall, ToolSpec
from jaxrl_llm.environments.asking import SubagentError
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.environments.replay import Replay
from jaxrl_llm.environments.tools import tool
from jaxrl_llm.rewards.sandbox import SandboxError


@dataclass(frozen=True)
class TRLEnv(Replay):
    """A class with ``reset``, tool methods and ``get_reward``, as for TRL's trainers.

    ``reset`` is called with the columns of the row that it names, or all of them if it accepts
    any, and with ``prompt``, the row's text as messages; the text that it returns is appended to
    the row's. The public methods are the tools; results of async methods keep the order of the
    calls, while TRL puts them last. The answer to a call whose name has characters other than
    letters, digits and ``_-.`` is named "unknown". The first turn without a call ends the episode,
    and ``get_reward`` scores it. An episode that a limit of the run ends is scored by
    ``get_reward`` too. TRL has no seed: a ``reset`` with a parameter ``seed`` gets it, and
    :class:`Replay` reports a class that draws random numbers otherwise when an episode is forked or
    resumed.

    Attributes:
      factory: The class, or a function that makes an instance.
      call_turns: Maximum number of turns with calls: TRL's ``max_tool_calling_iterations``. The
        next turn is the last and is rewarded, with calls or without. None for only the limits of
        the run.
      live: See :class:`Replay`.

    Raises:
      ValueError: If the class lacks ``reset`` or ``get_reward``.
      SandboxError: If a method needs a sandbox that cannot run here.
      SubagentError: If a method asks a subagent and there is none, or it fails.

    References:
      TRL, https://github.com/huggingface/trl, ``GRPOTrainer(environment_factory=)``.
    """

    factory: Callable[[], Any]
    call_turns: int | None = None

    def start(self, task: Mapping[str, Any], seed: int) -> tuple["_Class", Observation]:
        """A fresh instance, reset with the row."""
        instance = self.factory()
        for name in ("reset", "get_reward"):
            if not callable(getattr(instance, name, None)):
                raise ValueError(f"TRLEnv: {type(instance).__name__} has no method {name!r}.")
        prompt = [{"role": "user", "content": task.get("text", "")}]
        columns, named = {"seed": seed, "prompt": prompt, **task}, inspect.signature(instance.reset)
        if not any(p.kind is p.VAR_KEYWORD for p in named.parameters.values()):
            columns = {name: columns[name] for name in named.parameters if name in columns}
        words = _result(instance.reset(**columns)) or ""
        message = {"role": "user", "content": task.get("text", "") + words}
        return _Class(instance, self.call_turns), Observation([message])

    @functools.cached_property
    def tools(self) -> Sequence[ToolSpec]:
        """The public methods, from their types and docstrings."""
        instance = self.factory()
        specs = tuple(tool(method)._replace(function=None) for method in _methods(instance))
        with contextlib.suppress(Exception):  # it was never reset, and may have nothing to close
            _close(instance)
        return specs


@dataclass
class _Class:
    """An instance in an episode."""

    instance: Any
    call_turns: int | None
    taken: int = 0

    def step(self, action: Parsed) -> Observation:
        """Makes the calls of a turn, in order, or scores the episode."""
        asks = bool(action.calls) or action.error is not None
        if not asks or self.taken == self.call_turns:
            return Observation((), self._reward(), done=not asks, stopped=asks)
        self.taken += 1
        messages = [_message(call.name, self._call(call)) for call in action.calls]
        if action.error is not None:
            messages.append(_message("unknown", {"error": action.error}))
        return Observation(messages)

    def truncation_reward(self, end: str, action: Parsed | None) -> float:
        """The score of an episode, whichever limit of the run ended it."""
        del end, action
        return self._reward()

    def _reward(self) -> float:
        return float(_result(self.instance.get_reward()))

    def _call(self, call: ToolCall) -> Any:
        known = {method.__name__: method for method in _methods(self.instance)}
        try:
            if call.name not in known:
                raise ValueError(f"Tool {call.name} not found.")
            return known[call.name](**call.arguments)
        except (SandboxError, SubagentError):
            raise
        except Exception as error:  # what TRL shows, too
            return {"error": str(error)}

    def close(self) -> None:
        """Closes the instance where it can be closed."""
        _close(self.instance)


def _close(instance: Any) -> None:
    getattr(instance, "close", lambda: None)()


def _methods(instance: Any) -> list[Callable]:
    def synchronous(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(**arguments):
            return _result(method(**arguments))

        return call

    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction)]
    hidden = ("reset", "get_reward", "close")
    return [
        synchronous(getattr(instance, name))
        for name in names
        if name not in hidden and not name.startswith("_")
    ]


def _message(name: str, result: Any) -> Message:
    text = str(result).encode("utf-8", "replace").decode()  # half of a surrogate pair is no text
    # The policy's text: in a name, templates cannot write that, or what spells a special token.
    name = name if re.fullmatch(r"[\w.-]+", name) else "unknown"
    return {"role": "tool", "name": name, "content": text}


def _result(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value
