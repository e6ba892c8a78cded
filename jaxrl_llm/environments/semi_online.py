"""Semi-online episodes: a policy plays along recorded expert episodes, without the environment."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.curation.turns import patch_decision
from jaxrl_llm.data.messages import Message, Parsed, ToolSpec
from jaxrl_llm.data.parsing import parse_turn
from jaxrl_llm.environments.protocol import Observation


def same_text(reply: str, expert: str) -> float:
    """1 if a reply equals the expert's up to white space and case, else 0.

    Example:
      >>> same_text(" Open  the door", "open the door"), same_text("open", "open the door")
      (1.0, 0.0)
    """
    return float(reply.lower().split() == expert.lower().split())


class PathState(NamedTuple):
    """An episode: the expert's, the turn, how often it stood in, and whether it has ended."""

    observations: tuple[str, ...]
    actions: tuple[str, ...]
    turn: int = 0
    patched: int = 0
    ended: bool = False


@dataclass(frozen=True)
class SemiOnline:
    """Episodes along those of an expert, whose turn replaces a turn that deviates.

        matches = grade(reply, action of the expert) = 1
        reward  = form * complete + (1 - form) * grade
        history : the reply, or the action of the expert where they do not match

    A row of the data has ``actions``, the expert's turns, and ``observations``, the observations
    before each of them; the text of the row comes before the first. The policy's next observation
    is the expert's, so no environment is needed. After the last turn the episode is done; at more
    than ``limit`` deviations it is cut off. ``info`` has "expert_match" and "grade".

    Attributes:
      grade: ``grade(reply, action) -> float`` in [0, 1]; 1 for the expert's action. Of both it
        receives the text without reasoning, then a line ``[name, arguments]`` in JSON for each
        tool call; of an action in another form, all of it.
      limit: How often the expert's turn replaces one of an episode, not negative; None for no
        limit.
      form: The share of the reward for a reply that is complete, in [0, 1].

    Raises:
      ValueError: If an option is out of range, a row has no turns or not as many observations, or
        a grade is outside [0, 1].

    Example:
      >>> from jaxrl_llm.environments import Parsed, SemiOnline
      >>> env = SemiOnline(limit=1)
      >>> row = {"text": "Buy tea.", "observations": ["a shop", "a shelf"],
      ...        "actions": ["go in", "take tea"]}
      >>> state, seen = env.reset(row, seed=0)
      >>> state, seen = env.step(state, Parsed("wait"))
      >>> seen.messages[0]["content"], round(seen.reward, 2), seen.instead
      ('a shelf', 0.1, 'go in')
      >>> state, seen = env.step(state, Parsed("take tea"))
      >>> seen.done, seen.reward, seen.instead, seen.info["expert_match"]
      (True, 1.0, None, 1.0)

    References:
      UI-S1 (arXiv:2509.11543), the released code: limit 2, and a grade of 0.5 for an action of the
      right type. There -1 means no limit, and the expert's turn includes its reasoning; here it is
      the text of the row.
    """

    grade: Callable[[str, str], float] = same_text
    limit: int | None = 2
    form: float = 0.1

    def __post_init__(self):
        checks.check_non_negative("SemiOnline", finite=True, limit=self.limit)
        checks.check_share("SemiOnline", form=self.form)

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """None."""
        return ()

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[PathState, Observation]:
        """The beginning of the expert's episode; nothing in it is random."""
        del seed
        sees, does = (task.get(name) or () for name in ("observations", "actions"))
        if not does or len(sees) != len(does) or isinstance(sees, str) or isinstance(does, str):
            raise ValueError(
                "SemiOnline: a row must have 'actions' and as many 'observations'; got "
                f"{len(does)} and {len(sees)}."
            )
        state = PathState(tuple(map(str, sees)), tuple(map(str, does)))
        first = "\n".join(part for part in (task.get("text"), state.observations[0]) if part)
        return state, Observation([_user(first)], state=_name(state))

    def step(self, state: PathState, action: Parsed) -> tuple[PathState, Observation]:
        """The expert's next observation, and the grade of the reply."""
        if state.ended:
            raise ValueError("SemiOnline.step: the episode has ended.")
        expert = state.actions[state.turn]
        reply = action.text if action.error else _said(action)
        wanted = parse_turn(expert)
        shown = expert if wanted.error else _said(wanted) or expert
        grade = float(self.grade(reply, shown))
        if not 0 <= grade <= 1:
            raise ValueError(f"SemiOnline: grade must be in [0, 1]; got {grade:g}.")
        matches = grade == 1
        decision = patch_decision(
            np.asarray(matches), np.asarray(state.patched, np.int32), limit=self.limit
        )
        patch, turn = bool(decision.patch), state.turn + 1
        done = turn == len(state.actions)
        stopped = bool(decision.stop) and not done
        state = state._replace(turn=turn, patched=state.patched + patch, ended=done or stopped)
        messages = [] if state.ended else [_user(state.observations[turn])]
        return state, Observation(
            messages,
            self.form * action.complete + (1 - self.form) * grade,
            done=done,
            stopped=stopped,
            instead=expert if patch and not done else None,
            state=_name(state),
            info={"expert_match": float(matches), "grade": grade},
        )


def _said(turn: Parsed) -> str:
    """What a turn says and does, without its reasoning."""
    calls = (json.dumps([call.name, call.arguments], sort_keys=True) for call in turn.calls)
    return "\n".join(filter(None, (turn.text, *calls)))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _name(state: PathState) -> str:
    return f"{state.turn}: {state.observations[state.turn - state.ended]}"
