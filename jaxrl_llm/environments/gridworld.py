"""A gridworld in text, small enough for exact solutions."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array
from jaxrl_llm.environments import text
from jaxrl_llm.environments.arrays import ArrayEnv

ACTIONS = ("north", "east", "south", "west")
_MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))


class GridState(NamedTuple):
    """The cell of the agent, int32, and whether it has reached the goal."""

    cell: Any
    ended: Any


class GridTables(NamedTuple):
    """The gridworld as a finite Markov decision process of S cells and 4 actions.

    Attributes:
      places: int ``[S, 2]``, row and column of each cell.
      next_cell: int32 ``[S, 4]``.
      reward: float32 ``[S, 4]``.
      ended: bool ``[S]``: the goals.
      starts: int ``[N]``, the cells where episodes begin.
    """

    places: np.ndarray
    next_cell: np.ndarray
    reward: np.ndarray
    ended: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Gridworld(ArrayEnv[GridState]):
    """From S to G in four directions; a row's "start" is a cell (row, column), else by the seed.

        reward = 1[the goal is reached] - cost

    A move into a wall, and a reply that names no direction, leave the agent where it is and cost
    the same. Directions may be named by their first letter.

    Attributes:
      grid: Rows of "S" (start), "G" (goal), "#" (wall) and "." (free).
      cost: Cost per turn.

    Raises:
      ValueError: If the grid has no start or goal, rows of unequal length or another character; or
        if a row's "start" is no free cell.

    Example:
      >>> from jaxrl_llm.environments import Gridworld, Parsed
      >>> env = Gridworld()
      >>> state, observation = env.reset({}, seed=0)
      >>> print(observation.messages[0]["content"])
      Reach 2,2. Answer north, east, south or west.
      You are at 0,0. Open: east, south
      >>> state, observation = env.step(state, Parsed("East."))
      >>> round(observation.reward, 2), observation.state
      (-0.1, '0,1')
      >>> env.optimal_actions()["0,1"]
      ('east',)
    """

    grid: str = "S..\n.#.\n..G"
    cost: float = 0.1

    def __post_init__(self):
        rows = self.grid.split("\n")
        if len({len(row) for row in rows}) != 1 or set(self.grid) - set("SG#.\n"):
            raise ValueError(
                "Gridworld: grid must have rows of equal length of the characters S, G, # and .; "
                f"got {self.grid!r}."
            )
        for mark, what in (("S", "start"), ("G", "goal")):
            if mark not in self.grid:
                raise ValueError(f"Gridworld: grid has no {what}, {mark!r}; got {self.grid!r}.")

    @property
    def reward_range(self) -> tuple[float, float]:
        """A run sets the number of turns, and each turn has its cost."""
        return (-math.inf if self.cost > 0 else 0.0), 1.0 - self.cost

    def tables(self) -> GridTables:
        """The gridworld as arrays."""
        return _tables(self)

    def init(self, task: Mapping[str, Any], seed: int) -> GridState:
        """An agent at a start."""
        tables = self.tables()
        cell = int(np.random.default_rng(seed).choice(tables.starts))
        if (start := text.column(task, "start", None)) is not None:
            here = np.flatnonzero((tables.places == tuple(start)).all(-1))
            if not here.size or tables.ended[here[0]]:
                raise ValueError(f"Gridworld: the start {start!r} is no free cell.")
            cell = int(here[0])
        return GridState(np.int32(cell), np.bool_(False))

    def transition(self, state: GridState, action: Array) -> tuple[GridState, Array]:
        """Moves the agent."""
        tables = self.tables()
        named = (action >= 0) & (action < 4)
        move = state.cell, jnp.where(named, action, 0)
        cell = jnp.where(named, jnp.asarray(tables.next_cell)[move], state.cell)
        reward = jnp.where(named, jnp.asarray(tables.reward)[move], jnp.float32(-self.cost))
        return GridState(cell, jnp.asarray(tables.ended)[cell]), reward

    def observe(self, state: GridState) -> Array:
        """The cell."""
        return jnp.asarray(state.cell)

    def parse(self, reply: str) -> int:
        """The direction that a reply names last, by its name or else by a letter."""
        name = text.choice(reply, ACTIONS) or text.choice(reply, [a[0] for a in ACTIONS])
        return -1 if name is None else [a[0] for a in ACTIONS].index(name[0])

    def describe(self, observation: np.ndarray, start: bool) -> tuple[str, str]:
        """Where the agent is, and where it can go."""
        tables, cell = self.tables(), int(observation)
        name = _name(tables.places[cell])
        if tables.ended[cell]:
            return f"You are at {name}, the goal.", name
        goals = " or ".join(_name(place) for place in tables.places[tables.ended])
        free = [a for a, to in zip(ACTIONS, tables.next_cell[cell], strict=True) if to != cell]
        rules = f"Reach {goals}. Answer north, east, south or west.\n" if start else ""
        return f"{rules}You are at {name}. Open: {', '.join(free)}", name

    def optimal_values(self, gamma: float = 1.0) -> np.ndarray:
        """The value of each action under the best behavior after it, float64 ``[S, 4]``.

        Values at a goal are 0. The horizon is the number of cells, so values are finite even if no
        goal can be reached.
        """
        tables = self.tables()
        values = np.zeros(tables.reward.shape)
        for _ in tables.places:
            best = np.where(tables.ended, 0.0, values.max(-1))
            values = np.where(
                tables.ended[:, None], 0.0, tables.reward + gamma * best[tables.next_cell]
            )
        return values

    def optimal_actions(self, gamma: float = 1.0) -> dict[str, tuple[str, ...]]:
        """The best actions at each cell that is no goal, by the name of the state."""
        tables, values = self.tables(), self.optimal_values(gamma)
        best = np.isclose(values, values.max(-1, keepdims=True), atol=1e-6)
        cells = np.flatnonzero(~tables.ended)
        return {
            _name(tables.places[s]): tuple(a for a, b in zip(ACTIONS, best[s], strict=True) if b)
            for s in cells
        }


@functools.cache
def _tables(env: Gridworld) -> GridTables:
    rows = env.grid.split("\n")
    places = [(r, c) for r, row in enumerate(rows) for c, mark in enumerate(row) if mark != "#"]
    cells = {place: s for s, place in enumerate(places)}
    ended = np.array([rows[r][c] == "G" for r, c in places])
    starts = np.array([s for (r, c), s in cells.items() if rows[r][c] == "S"])
    next_cell = np.array(
        [[cells.get((r + dr, c + dc), cells[r, c]) for dr, dc in _MOVES] for r, c in places],
        np.int32,
    )
    reward = (ended[next_cell] - env.cost).astype(np.float32)
    return GridTables(np.array(places), next_cell, reward, ended, starts)


def _name(place: np.ndarray) -> str:
    return f"{place[0]},{place[1]}"
