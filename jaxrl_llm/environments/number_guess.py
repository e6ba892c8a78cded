"""A tiny game in text: find a number from the hints "low" and "high"."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.messages import Parsed, ToolSpec
from jaxrl_llm.environments import text
from jaxrl_llm.environments.protocol import Observation


class GuessState(NamedTuple):
    """A game: the number, turns taken, what the hints leave, and whether it has ended."""

    secret: int
    turn: int
    low: int
    high: int
    ended: bool = False


@dataclass(frozen=True)
class NumberGuess:
    """Guess a number from 1 to ``high``; a row's "secret" names it, else the seed draws it.

    A reply's last number is the guess.

        reward = 1                                               the number; the game ends
                 (1 - |guess - secret| / (high - 1)) / 4, or 0   another number
                 0                                               no number

    The hint is "low" or "high". The last turn ends the game. ``info`` has "right", and "number", 1
    if the reply contains one. ``Observation.state`` names the interval that the hints leave.

    Attributes:
      high: The largest number. Three turns suffice for 7.
      turns: Turns of a game.

    Raises:
      ValueError: If ``high`` is below 2, ``turns`` below 1, or a row's "secret" is no such number.

    Example:
      >>> from jaxrl_llm.environments import NumberGuess, Parsed
      >>> env = NumberGuess()
      >>> state, observation = env.reset({"secret": 3}, seed=0)
      >>> print(observation.messages[0]["content"])
      number from 1 to 7?
      >>> for reply in ("4", "is it 3?"):
      ...     state, observation = env.step(state, Parsed(reply))
      ...     print(observation.messages[0]["content"], round(observation.reward, 3),
      ...           observation.done, observation.state)
      high 0.208 False 1-3
      right 1.0 True 3-3
    """

    high: int = 7
    turns: int = 3

    def __post_init__(self):
        if self.high < 2 or self.turns < 1:
            raise ValueError(
                f"NumberGuess: high must be at least 2 and turns at least 1; got {self.high} and "
                f"{self.turns}."
            )

    @property
    def reward_range(self) -> tuple[float, float]:
        """Wrong guesses next to the number, then the number."""
        return 0.0, 1.0 + (self.turns - 1) * (1 - 1 / (self.high - 1)) / 4

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """None."""
        return ()

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[GuessState, Observation]:
        """A new game."""
        secret = task.get("secret")
        if secret is None:
            secret = int(np.random.default_rng(seed).integers(1, self.high + 1))
        if not 1 <= secret <= self.high:
            raise ValueError(f"NumberGuess: 'secret' must be from 1 to {self.high}, got {secret}.")
        state = GuessState(int(secret), 0, 1, self.high)
        return state, Observation(text.user(f"number from 1 to {self.high}?"), state=_left(state))

    def step(self, state: GuessState, action: Parsed) -> tuple[GuessState, Observation]:
        """The hint to a guess."""
        if state.ended:
            raise ValueError("NumberGuess.step: the game has ended.")
        guess, secret = text.last_number(action.text), state.secret
        low, high, hint, reward = state.low, state.high, "a number?", 0.0
        if guess is not None:
            reward = max(1 - abs(guess - secret) / (self.high - 1), 0.0) / 4
            if guess < secret:
                low, hint = max(low, guess + 1), "low"
            elif guess > secret:
                high, hint = min(high, guess - 1), "high"
            else:
                low, high, hint, reward = secret, secret, "right", 1.0
        right = guess == secret
        state = GuessState(secret, state.turn + 1, low, high, right or state.turn + 1 == self.turns)
        info = {"right": float(right), "number": float(guess is not None)}
        return state, Observation(
            text.user(hint), reward, state.ended, state=_left(state), info=info
        )


def _left(state: GuessState) -> str:
    return f"{state.low}-{state.high}"
