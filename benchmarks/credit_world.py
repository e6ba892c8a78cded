"""A multi-turn decision process so small that values, advantages and the gradient are known.

A gridworld whose moves slip, of at most K turns. A turn is an action of two binary tokens: first
the axis (north and south, or east and west), then the direction on it. The policy is a table of
logits ``theta [S, 3]``: of the first token, and of the second one after each first. It does not
know the time, though the values do. All that is exact is float64.
"""

from typing import NamedTuple

import numpy as np

from jaxrl_llm.environments import Gridworld

GRID = "S...\n.#.S\n....\nS#.G"


class World(NamedTuple):
    """S cells, 4 actions; an action is its first token plus twice its second.

    Attributes:
      transition: ``[S, 4, S]``, probabilities.
      reward: ``[S, 4, S]``, of a turn.
      ended: bool ``[S]``.
      starts: ``[N]``, equally likely, each the state that a group begins at.
      optimal: bool ``[S, 4]``, what the expert may do.
      turns: K.
    """

    transition: np.ndarray
    reward: np.ndarray
    ended: np.ndarray
    starts: np.ndarray
    optimal: np.ndarray
    turns: int


class Exact(NamedTuple):
    """What is known of a policy.

    Attributes:
      V: ``[K + 1, S]``, the value before each turn; 0 after the last and at the goal.
      Q1: ``[K, S, 2]``, after the first token. Q: ``[K, S, 4]``, after both.
      occupancy: ``[K, S]``, the probability of taking turn k in state s.
      J: The expected return.
      gradient: ``[S, 3]``, of J.
      fisher: ``[S, 3]``, the diagonal of the Fisher matrix of episodes; the rest of it is 0.
    """

    V: np.ndarray
    Q1: np.ndarray
    Q: np.ndarray
    occupancy: np.ndarray
    J: float
    gradient: np.ndarray
    fisher: np.ndarray


class Episodes(NamedTuple):
    """Sampled turns, ``[..., K]``; what did not happen holds zeros.

    ``bits [..., K, 2]`` are the tokens of the actions; ``where`` says which turns happened.
    """

    states: np.ndarray
    bits: np.ndarray
    next_states: np.ndarray
    rewards: np.ndarray
    where: np.ndarray


def gridworld(*, grid: str = GRID, turns: int = 8, cost: float = 0.0, slip: float = 0.1) -> World:
    """A gridworld where a move goes in a random direction with probability ``slip``."""
    env = Gridworld(grid=grid, cost=cost)
    tables, size = env.tables(), len(env.tables().places)
    moves = np.eye(size)[tables.next_cell]
    transition = (1.0 - slip) * moves + slip * moves.mean(1, keepdims=True)
    reward = np.broadcast_to(tables.ended - np.float64(cost), transition.shape)
    # With a cost the best path is the shortest one.
    values = Gridworld(grid=grid, cost=max(cost, 0.01)).optimal_values()
    optimal = np.isclose(values, values.max(-1, keepdims=True), atol=1e-6)
    return World(transition, reward, tables.ended, tables.starts, optimal, turns)


def chances(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities of a 1 as the first token ``[..., S]`` and as the second after each first one
    ``[..., S, 2]``, and of the actions ``[..., S, 4]``."""
    one = 1.0 / (1.0 + np.exp(-theta))
    first, second = one[..., 0], one[..., 1:]
    axis = np.stack([1.0 - first, first], axis=-1)
    return first, second, np.concatenate([axis * (1.0 - second), axis * second], axis=-1)


def returns(world: World, theta: np.ndarray) -> np.ndarray:
    """J of policies ``[..., S, 3]``."""
    _, _, policy = chances(theta)
    earned = (world.transition * world.reward).sum(-1)
    V = np.zeros(theta.shape[:-1])
    for _ in range(world.turns):
        after = np.einsum("sat,...t->...sa", world.transition, V)
        V = np.where(world.ended, 0.0, (policy * (earned + after)).sum(-1))
    return V[..., world.starts].mean(-1)


def solve(world: World, theta: np.ndarray) -> Exact:
    """Values back from the last turn, occupancies forward from the start, and the gradient

    dJ / dtheta[s, x] = sum over k of d[k, s] pi(x reached) p (1 - p) (Q after 1 - Q after 0)
    """
    first, second, policy = chances(theta)
    K, S = world.turns, len(theta)
    alive = ~world.ended
    V, Q, Q1 = np.zeros((K + 1, S)), np.zeros((K, S, 4)), np.zeros((K, S, 2))
    for k in reversed(range(K)):
        Q[k] = alive[:, None] * (world.transition * (world.reward + V[k + 1])).sum(-1)
        Q1[k] = (1.0 - second) * Q[k, :, :2] + second * Q[k, :, 2:]
        V[k] = (1.0 - first) * Q1[k, :, 0] + first * Q1[k, :, 1]
    step = np.einsum("sa,sat->st", policy, world.transition)
    d = np.zeros((K, S))
    d[0] = np.bincount(world.starts, minlength=S) / len(world.starts)
    for k in range(1, K):
        d[k] = (d[k - 1] @ step) * alive
    axis = np.stack([1.0 - first, first], axis=-1)
    spread = np.concatenate(
        [(first * (1.0 - first))[:, None], axis * second * (1.0 - second)], axis=-1
    )
    gap = np.concatenate([Q1[..., 1:] - Q1[..., :1], Q[..., 2:] - Q[..., :2]], axis=-1)
    gradient = np.einsum("ks,sx,ksx->sx", d, spread, gap)
    fisher = d.sum(0)[:, None] * spread
    return Exact(V, Q1, Q, d, float(V[0, world.starts].mean()), gradient, fisher)


def play(
    world: World,
    theta: np.ndarray,
    rng: np.random.Generator,
    states: np.ndarray,
    *,
    turns: int | None = None,
) -> Episodes:
    """Episodes from ``states [...]``, of so many turns; None for K."""
    turns = world.turns if turns is None else turns
    first, second, _ = chances(theta)
    cumulative = world.transition.cumsum(-1)
    columns = []
    for _ in range(turns):
        where = ~world.ended[states]
        draws = rng.random((3, *states.shape))
        one = draws[0] < first[states]
        two = draws[1] < np.where(one, second[states, 1], second[states, 0])
        action = one + 2 * two
        arrived = (draws[2][..., None] >= cumulative[states, action]).sum(-1)
        arrived = np.where(where, np.minimum(arrived, len(first) - 1), states)
        reward = np.where(where, world.reward[states, action, arrived], 0.0)
        columns.append((states, np.stack([one, two], -1), arrived, reward, where))
        states = arrived
    stacked = [np.stack(x, axis=len(states.shape)) for x in zip(*columns, strict=True)]
    return Episodes(stacked[0], stacked[1].astype(np.int64), *stacked[2:])


def vines(
    world: World,
    theta: np.ndarray,
    rng: np.random.Generator,
    episodes: Episodes,
    *,
    rollouts: int,
) -> np.ndarray:
    """Mean returns of rollouts that go on from before each turn, ``[..., K]``."""
    means = np.zeros(episodes.states.shape)
    for k in range(world.turns):
        here = episodes.where[..., k]
        again = np.repeat(episodes.states[here, k][:, None], rollouts, axis=-1)
        sample = play(world, theta, rng, again, turns=world.turns - k)
        means[here, k] = sample.rewards.sum(-1).mean(-1)
    return means


def fork(
    world: World, theta: np.ndarray, rng: np.random.Generator, starts: np.ndarray, group_size: int
) -> tuple[Episodes, np.ndarray]:
    """Groups ``[n, G]`` that are trees: two branches at first, each in two again at a third and at
    two thirds of the turns; and the numbers of the nodes ``[n, G, K]``.

    What has ended does not fork: its rows are copies.
    """
    borders = np.linspace(0, world.turns, 4).round().astype(int)
    states = np.broadcast_to(starts[:, None], (len(starts), group_size))
    sample, nodes = [], []
    for level, (begin, end) in enumerate(zip(borders, borders[1:], strict=False)):
        width = max(group_size >> (level + 1), 1)
        leaders = np.arange(group_size) // width * width
        stretch = play(world, theta, rng, states[:, ::width], turns=end - begin)
        stretch = Episodes(*(np.repeat(x, width, axis=1) for x in stretch))
        sample.append(stretch)
        nodes.append(np.broadcast_to((level * group_size + leaders)[:, None], stretch.states.shape))
        states = stretch.next_states[..., -1]
    joined = [np.concatenate(x, axis=2) for x in zip(*sample, strict=True)]
    return Episodes(*joined), np.concatenate(nodes, axis=2)
