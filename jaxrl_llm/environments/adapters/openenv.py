"""Environments behind an OpenEnv server."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.data.messages import Parsed
from jaxrl_llm.environments import text
from jaxrl_llm.environments.adapters import packages
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.environments.replay import Replay


@dataclass(frozen=True)
class OpenEnv(Replay):
    """An environment of an OpenEnv server, with a session for each episode.

    The server is reset with ``seed`` and the row's "reset", a mapping, if it has one. If the server
    draws random numbers without that seed, they differ when actions are replayed, which
    :class:`Replay` reports.

    Attributes:
      url: URL of the server, such as "http://localhost:8000".
      action: The name of the field of an action that holds the reply, or a function from the
        parsed reply to the fields.
      describe: The name of the field of an observation that the policy sees, or a function from
        the fields to a text; by default all of them, as JSON.
      timeout: Seconds that a step may take.
      live: See :class:`Replay`; the server must allow as many sessions and one more.

    Raises:
      ImportError: If openenv is not installed.
      ConnectionError: If there is no server.
    """

    url: str
    action: str | Callable[[Parsed], Mapping[str, Any]] = "message"
    describe: str | Callable[[Mapping[str, Any]], str] = json.dumps
    timeout: float = 60.0
    live: int = field(default=32, kw_only=True)

    def start(self, task: Mapping[str, Any], seed: int) -> tuple["_Session", Observation]:
        """A new session, reset."""
        core: Any = packages.load("openenv", "OpenEnv", "openenv.core")
        client = core.GenericEnvClient(base_url=self.url, message_timeout_s=self.timeout).sync()
        session = _Session(client, self.action, self.describe)
        try:
            first = session.observe(client.reset(seed=seed, **text.column(task, "reset", {})))
            return session, first._replace(reward=0.0)
        except BaseException:
            session.close()
            raise


@dataclass
class _Session:
    """A connection."""

    client: Any
    action: str | Callable[[Parsed], Mapping[str, Any]]
    describe: str | Callable[[Mapping[str, Any]], str]

    def step(self, action: Parsed) -> Observation:
        """Sends a reply."""
        name = self.action
        fields = {name: action.text} if isinstance(name, str) else dict(name(action))
        return self.observe(self.client.step(fields))

    def observe(self, result: Any) -> Observation:
        """What the server answered."""
        fields, show = result.observation, self.describe
        words = str(fields[show]) if isinstance(show, str) else show(fields)
        return Observation(text.verbatim(words), float(result.reward or 0.0), bool(result.done))

    def close(self) -> None:
        """Ends the session."""
        self.client.close()
