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
      timeout: Seconds that the server may take for a reset or a step. It is best below
        ``episodes.seconds``: a step that a run abandons keeps its session until the timeout.
      live: See :class:`Replay`. The server must allow as many sessions and one more for each step
        under way or abandoned: ``live + episodes.workers`` in a run, and twice the workers with
        ``asynchrony.max_staleness``, where an evaluation plays while rollouts are sampled.

    Raises:
      ImportError: If openenv is not installed.
      ConnectionError: If there is no server, or it has closed the session of an episode.
    """

    url: str
    action: str | Callable[[Parsed], Mapping[str, Any]] = "message"
    describe: str | Callable[[Mapping[str, Any]], str] = json.dumps
    timeout: float = 25.0
    live: int = field(default=32, kw_only=True)

    def start(self, task: Mapping[str, Any], seed: int) -> tuple["_Session", Observation]:
        """A new session, reset."""
        core: Any = packages.load("openenv", "OpenEnv", "openenv.core")
        client = core.GenericEnvClient(base_url=self.url, message_timeout_s=self.timeout).sync()
        session = _Session(client, self.url, self.action, self.describe)
        try:
            first = session.reset(seed=seed, **text.column(task, "reset", {}))
            return session, first._replace(reward=0.0)
        except BaseException:
            session.close()
            raise


@dataclass
class _Session:
    """A connection, whose socket is the session on the server."""

    client: Any
    url: str
    action: str | Callable[[Parsed], Mapping[str, Any]]
    describe: str | Callable[[Mapping[str, Any]], str]
    socket: Any = None

    def reset(self, **options: Any) -> Observation:
        """Begins the episode."""
        result = self.client.reset(**options)
        self.socket = self.client._ws
        return self.observe(result)

    def step(self, action: Parsed) -> Observation:
        """Sends a reply."""
        name = self.action
        fields = {name: action.text} if isinstance(name, str) else dict(name(action))
        lost = ConnectionError(f"OpenEnv: the session with {self.url} was lost in an episode.")
        # The client replaces a closed socket, which is a session with an environment not yet reset.
        if self.client._ws is not self.socket or self.socket.state.name != "OPEN":
            raise lost
        result = self.client.step(fields)
        if self.client._ws is not self.socket:
            raise lost
        return self.observe(result)

    def observe(self, result: Any) -> Observation:
        """What the server answered."""
        fields, show = result.observation, self.describe
        words = str(fields[show]) if isinstance(show, str) else show(fields)
        return Observation(text.verbatim(words), float(result.reward or 0.0), bool(result.done))

    def close(self) -> None:
        """Ends the session."""
        self.client.close()
