"""A bandit in text: the payoff of an arm is shown once, and the policy must remember it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array
from jaxrl_llm.environments import text
from jaxrl_llm.environments.arrays import ArrayEnv

_NAMES = "abcdefghijklmnopqrstuvwxyz"


class BanditState(NamedTuple):
    """A bandit in an episode.

    Attributes:
      seed: uint32, of what the arms pay.
      best: int32, the arm that pays.
      turn: int32, turns taken.
      pulled: int32 ``[turns]``, the arms so far; -1 for none.
      paid: bool ``[turns]``, what they paid.
      ended: Whether all turns are taken.
    """

    seed: Any
    best: Any
    turn: Any
    pulled: Any
    paid: Any
    ended: Any


@dataclass(frozen=True)
class MemoryBandit(ArrayEnv[BanditState]):
    """One of several arms pays in an episode; a row's "best" names it, else the seed picks.

        reward = 1[the arm is the best] xor Bernoulli(flip)

    The policy only sees the payoff of the last arm. Without flips the optimal policy tries the arms
    in turn until one pays, and then stays: it earns the mean over j < arms of max(turns - j, 0).
    ``Observation.state`` names the history.

    Attributes:
      arms: 2 to 26, named by letters.
      turns: Turns of an episode.
      flip: The probability that a payoff is flipped.

    Raises:
      ValueError: If an option is outside its range, or a row's "best" is no arm.

    Example:
      >>> from jaxrl_llm.environments import MemoryBandit, Parsed
      >>> env = MemoryBandit(arms=2, turns=2)
      >>> state, observation = env.reset({"best": "b"}, seed=0)
      >>> for reply in ("a", "I take b"):
      ...     state, observation = env.step(state, Parsed(reply))
      ...     print(observation.messages[0]["content"], observation.reward, observation.state)
      a paid 0 0.0 a0
      b paid 1 1.0 a0 b1
    """

    arms: int = 3
    turns: int = 4
    flip: float = 0.0

    def __post_init__(self):
        if not 2 <= self.arms <= 26:
            raise ValueError(f"MemoryBandit: arms must be from 2 to 26, got {self.arms}.")
        if self.turns < 1:
            raise ValueError(f"MemoryBandit: turns must be at least 1, got {self.turns}.")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"MemoryBandit: flip must be from 0 to 1, got {self.flip}.")

    @property
    def reward_range(self) -> tuple[float, float]:
        """Between no payoff and one in each turn."""
        return 0.0, float(self.turns)

    def init(self, task: Mapping[str, Any], seed: int) -> BanditState:
        """A bandit at its first turn."""
        names = _NAMES[: self.arms]
        best = text.column(
            task, "best", names[int(np.random.default_rng(seed).integers(self.arms))]
        )
        if not isinstance(best, str) or len(best) != 1 or best not in names:
            raise ValueError(f"MemoryBandit: 'best' must be one of {names}, got {best!r}.")
        return BanditState(
            seed=np.uint32(seed % 2**32),
            best=np.int32(names.index(best)),
            turn=np.int32(0),
            pulled=np.full(self.turns, -1, np.int32),
            paid=np.zeros(self.turns, bool),
            ended=np.bool_(False),
        )

    def transition(self, state: BanditState, action: Array) -> tuple[BanditState, Array]:
        """Pulls an arm; without one nothing is paid."""
        named = (action >= 0) & (action < self.arms)
        key = jax.random.fold_in(jax.random.key(state.seed), state.turn)
        flipped = jax.random.bernoulli(key, self.flip)
        paid = named & ((action == state.best) ^ flipped)
        after = state._replace(
            turn=state.turn + 1,
            pulled=jnp.asarray(state.pulled).at[state.turn].set(jnp.where(named, action, -1)),
            paid=jnp.asarray(state.paid).at[state.turn].set(paid),
            ended=state.turn + 1 >= self.turns,
        )
        return after, paid.astype(jnp.float32)

    def observe(self, state: BanditState) -> Array:
        """The history, int32 ``[turns]``: 2 arm + paid; -1 for no arm, -2 for no turn."""
        pulled = jnp.asarray(state.pulled)
        seen = jnp.where(pulled < 0, -1, 2 * pulled + state.paid)
        return jnp.where(jnp.arange(self.turns) < state.turn, seen, -2)

    def parse(self, reply: str) -> int:
        """The arm whose letter a reply names last."""
        name = text.choice(reply, _NAMES[: self.arms])
        return -1 if name is None else _NAMES.index(name)

    def describe(self, observation: np.ndarray, start: bool) -> tuple[str, str]:
        """What the last arm paid, and the history."""
        taken = [int(code) for code in observation if code != -2]
        history = " ".join("-" if c < 0 else f"{_NAMES[c // 2]}{c % 2}" for c in taken)
        names = ", ".join(_NAMES[: self.arms])
        if start:
            return f"One of {names} pays. Choose, {self.turns} times.", history
        if taken[-1] < 0:
            return f"Answer with one of {names}", history
        return f"{_NAMES[taken[-1] // 2]} paid {taken[-1] % 2}", history
