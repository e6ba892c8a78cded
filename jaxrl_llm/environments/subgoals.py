"""Turns that name a subgoal before an action: their parsing, and an environment for them.

<switch>KEEP or SWITCH</switch><subgoal>what to reach next</subgoal><action>what to do</action>
"""

import bisect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.advantages.hierarchy import ACTION, SUBGOAL, SWITCH
from jaxrl_llm.core import checks
from jaxrl_llm.data.messages import Parsed, ToolSpec
from jaxrl_llm.environments.protocol import Env, Observation, truncation_reward_of

_TAGS = {SWITCH: "switch", SUBGOAL: "subgoal", ACTION: "action"}
_PATTERNS = {role: re.compile(f"<{tag}>(.*?)</{tag}>", re.DOTALL) for role, tag in _TAGS.items()}
_FORM = (
    "Write three blocks and nothing else:\n"
    "<switch>KEEP</switch> to go on with the subgoal, or <switch>SWITCH</switch> for a new one\n"
    "<subgoal>what to reach within a few turns; the same text while you keep it</subgoal>\n"
    "<action>what you do now</action>"
)


class TurnParts(NamedTuple):
    """The parts of a turn's text.

    Attributes:
      switch: Whether it begins another subgoal.
      subgoal: Its subgoal; None if there is none.
      action: Its action; None if there is none.
      spans: The character spans of its blocks, including tags: 3 the switch, 2 the subgoal, 1 the
        action.
    """

    switch: bool
    subgoal: str | None
    action: str | None
    spans: Mapping[int, tuple[int, int]]


def turn_parts(text: str, *, reasoning: str = "") -> TurnParts:
    """The switch, the subgoal and the action of a turn.

    Of several blocks with one tag the first counts. A switch that is absent, empty or "KEEP" in any
    case keeps the subgoal; any other text begins another one.

    Args:
      text: Of the turn.
      reasoning: Its reasoning (``Parsed.reasoning``), in which nothing is read.

    Returns:
      :class:`TurnParts`.

    Example:
      >>> from jaxrl_llm.environments import turn_parts
      >>> parts = turn_parts("<switch>SWITCH</switch><subgoal>find tea</subgoal>go north")
      >>> parts.switch, parts.subgoal, parts.action, parts.spans
      (True, 'find tea', None, {3: (0, 23), 2: (23, 50)})

    References:
      HiPER (arXiv:2602.16165), the released code.
    """
    place = text.find(reasoning)  # a renderer may have changed it
    first = place + len(reasoning) if place >= 0 else 0
    blocks = {role: pattern.search(text, first) for role, pattern in _PATTERNS.items()}
    inside = {role: block and block[1].strip() for role, block in blocks.items()}
    spans = {role: block.span() for role, block in blocks.items() if block}
    switch = (inside[SWITCH] or "KEEP").upper() != "KEEP"
    return TurnParts(switch, inside[SUBGOAL], inside[ACTION], spans)


def token_roles(
    tokens: Sequence[int], *, decode: Callable[[list[int]], str], reasoning: str = ""
) -> np.ndarray:
    """The part of each token of a turn: 1 the action, 2 the subgoal, 3 the switch, 0 none.

    A token that spans two parts counts as action before subgoal, and as subgoal before switch.
    Without an action block, every token outside of the other blocks counts as action.

    Args:
      tokens: Tokens of a turn.
      decode: Text of token ids; called about log2(t) times per end of a part.
      reasoning: See :func:`turn_parts`.

    Returns:
      int32 ``[t]``.

    Example:
      >>> from jaxrl_llm.environments import token_roles
      >>> tokens = list(b"<subgoal>tea</subgoal> <action>go</action>")
      >>> roles = token_roles(tokens, decode=lambda x: bytes(x).decode())
      >>> [int((roles == role).sum()) for role in range(4)]
      [1, 19, 22, 0]

    References:
      HiPER (arXiv:2602.16165), the released code, in which a token across two parts is of both, and
      without an action block all tokens are of the action besides.
    """
    parts = turn_parts(decode(list(tokens)), reasoning=reasoning)
    places = range(len(tokens) + 1)
    roles = np.full(len(tokens), ACTION if parts.action is None else 0, np.int32)

    def length(count: int) -> int:
        return len(decode(list(tokens[:count])))

    for role, (first, last) in parts.spans.items():
        begin = bisect.bisect_right(places, first, key=length) - 1
        roles[begin : bisect.bisect_left(places, last, key=length)] = role
    return roles


class SubgoalState(NamedTuple):
    """The state of the inner environment, and the subgoal."""

    inner: Any
    subgoal: str = "None"


@dataclass(frozen=True)
class Subgoals:
    """An environment whose turns name a subgoal, and act by an ``<action>`` block.

    The first message asks for the three blocks; each later message shows the current subgoal. The
    inner environment gets only the action's text, or the full turn if it has no action. A turn that
    lacks one of the blocks, or whose switch is neither "KEEP" nor "SWITCH", is invalid.

    Attributes:
      env: The inner environment.
      penalty: Cost of an invalid turn, not negative.
      form: The first message's instructions on the blocks.

    Raises:
      ValueError: If ``penalty`` is negative.

    Example:
      >>> from jaxrl_llm.environments import NumberGuess, Parsed, Subgoals
      >>> env = Subgoals(NumberGuess())
      >>> state, seen = env.reset({"secret": 3}, seed=0)
      >>> turn = "<switch>SWITCH</switch><subgoal>halve</subgoal><action>4</action>"
      >>> state, seen = env.step(state, Parsed(turn))
      >>> print(seen.messages[-1]["content"])
      high
      Current subgoal: halve
      >>> seen.info["valid"], round(seen.reward, 3)
      (1.0, 0.208)

    References:
      HiPER (arXiv:2602.16165), the released code, with other words.
    """

    env: Env
    penalty: float = 0.1
    form: str = _FORM

    def __post_init__(self):
        checks.check_non_negative("Subgoals", finite=True, penalty=self.penalty)

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """Those of the inner environment."""
        return self.env.tools

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[SubgoalState, Observation]:
        """The beginning, with what the turns are to be made of."""
        inner, seen = self.env.reset(task, seed)
        state = SubgoalState(inner)
        return state, _shown(seen, state, self.form)

    def step(
        self, state: SubgoalState, action: Parsed
    ) -> tuple[SubgoalState, Observation] | Awaitable[tuple[SubgoalState, Observation]]:
        """The inner environment's answer to the action; async where that is."""
        parts = turn_parts(action.text)
        said = _PATTERNS[SWITCH].search(action.text)
        valid = said is not None and said[1].strip().upper() in ("KEEP", "SWITCH")
        valid = valid and len(parts.spans) == len(_TAGS)

        def answered(inner: Any, seen: Observation) -> tuple[SubgoalState, Observation]:
            after = SubgoalState(inner, parts.subgoal or state.subgoal)
            seen = seen._replace(
                reward=seen.reward - self.penalty * (not valid),
                info={**seen.info, "valid": float(valid), "switch": float(parts.switch)},
            )
            return after, _shown(seen, after)

        answer = self.env.step(state.inner, _inner(action))
        if not isinstance(answer, Awaitable):
            return answered(*answer)

        async def later() -> tuple[SubgoalState, Observation]:
            return answered(*await answer)

        return later()

    def truncation_reward(
        self, state: SubgoalState, end: str, action: Parsed | None
    ) -> float | Awaitable[float]:
        """That of the inner environment; 0 if it has none."""
        method = truncation_reward_of(self.env)
        if method is None:
            return 0.0
        return method(state.inner, end, None if action is None else _inner(action))


def _inner(action: Parsed) -> Parsed:
    """A turn as the inner environment gets it."""
    text = turn_parts(action.text).action
    return action if text is None else action._replace(text=text)


def _shown(seen: Observation, state: SubgoalState, *more: str) -> Observation:
    """An observation that shows the subgoal behind its last message, if it has any."""
    if not seen.messages:
        return seen
    *messages, last = seen.messages
    lines = (last["content"], f"Current subgoal: {state.subgoal}", *more)
    return seen._replace(messages=[*messages, {**last, "content": "\n".join(lines)}])
