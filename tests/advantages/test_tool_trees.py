"""Turns of episodes that fork: their rewards, and against their siblings."""

import numpy as np
from cheap import close, equal, put
from rows import for_each

from jaxrl_llm.advantages import (
    fork_advantages,
    grpo,
    portool,
    sibling_advantages,
    step_rewards,
    turn_nodes,
)

STEPS, THERE = np.array([[0, 2], [0, 3], [1, 4]]), np.ones((3, 2), bool)


def test_worked_numbers():
    outcome = np.array([1.0, 0.0, 0.0])
    values = step_rewards(outcome, STEPS, turn_where=THERE)
    close(values, [[0.475, 1.0], [0.475, 0.0], [0.0, 0.0]], atol=1e-6)
    forks = fork_advantages(values, STEPS, turn_where=THERE)
    close(forks, [[0.2375, 0.5], [0.2375, -0.5], [-0.2375, 0.0]], atol=1e-6)
    # An earlier success is worth more.
    short = step_rewards(outcome, STEPS, turn_where=put(THERE, np.s_[0, 1], False))
    assert short[0, 0] == 0.5 and short[0, 1] == 0.0


def test_a_table_of_nodes_has_the_same_advantages():
    parents = np.array([-1, -1, 0, 0, 1])
    values = np.array([0.475, 0.0, 1.0, 0.0, 0.0])  # of the turns 0 to 4
    for options in ({}, {"scale": "std"}):
        forks = fork_advantages(values[STEPS], STEPS, turn_where=THERE, **options)
        more = {"ddof": 1, "eps": 1e-6} if options else {}
        table = sibling_advantages(values, parents, **options, **more)
        close(forks, table[STEPS], rtol=1e-6)
        assert np.abs(forks).max() >= 0.5


def test_values_that_differ_by_rounding_are_equal():
    """A mean over other rollouts of one outcome may differ in its last digit."""
    steps, there = np.array([[0], [1]]), np.ones((2, 1), bool)
    near = np.array([[30.1], [np.nextafter(np.float32(30.1), np.float32(np.inf))]])
    for scale in (None, "std"):
        forks = fork_advantages(near, steps, turn_where=there, scale=scale)
        equal(forks, np.zeros((2, 1)))
    forks = fork_advantages(np.array([[30.1], [30.2]]), steps, turn_where=there, scale="std")
    close(np.abs(forks[:, 0]), 0.5**0.5 * np.ones(2), rtol=1e-4)


def tree(seed, G=7, K=4):
    """Rows that share their first turns, as the turns of each, -1 beyond its last."""
    rng = np.random.default_rng(seed)
    steps, number = np.full((G, K), -1), 100
    for g in range(G):
        shared = 0
        if g and rng.random() < 0.7:
            parent = rng.integers(g)
            last = (steps[parent] >= 0).sum()
            shared = rng.integers(1, last + 1) if last < K else rng.integers(1, K)
            steps[g, :shared] = steps[parent, :shared]
        for k in range(shared, max(rng.integers(1, K + 1), shared + 1)):
            steps[g, k], number = number, number + 1
    order = rng.permutation(G)
    return steps[order], rng


@for_each("seed", range(3))
def test_every_turn_equals_a_walk_over_the_tree(seed):
    steps, rng = tree(seed)
    G, K = steps.shape
    there, where = steps >= 0, np.arange(G) != 2
    outcome = rng.random(G).astype(np.float32)
    formats = rng.random((G, K)).astype(np.float32)
    for g, k in np.ndindex(G, K):  # equal for all that have a turn
        formats[g, k] = formats[np.argmax(steps[:, k] == steps[g, k]), k]
    junk = np.where(where, outcome, np.nan)
    options = {"turn_where": there, "where": where}
    values = step_rewards(
        junk, steps, turn_formats=np.where(there, formats, np.inf), gamma=0.9, **options
    )
    forks = fork_advantages(values, steps, **options)
    scaled = fork_advantages(values, steps, scale="std", **options)
    last = there.sum(1)

    def value(node, k):
        rows = [g for g in range(G) if where[g] and there[g, k] and steps[g, k] == node]
        return (
            np.mean([0.9 ** (last[g] - 1 - k) * np.float64(outcome[g]) for g in rows])
            + (formats[rows[0], k])
        )

    for g, k in np.ndindex(G, K):
        if not (there[g, k] and where[g]):
            assert values[g, k] == forks[g, k] == scaled[g, k] == 0
            continue
        family = {
            steps[h, k]
            for h in range(G)
            if where[h] and there[h, k] and (k == 0 or steps[h, k - 1] == steps[g, k - 1])
        }
        v = np.array([value(node, k) for node in sorted(family)])
        mine = value(steps[g, k], k)
        close(values[g, k], mine, atol=1e-5)
        close(forks[g, k], mine - v.mean(), atol=1e-5)
        unit = (mine - v.mean()) / (v.std(ddof=1) + 1e-6) if len(v) > 1 else 0.0
        close(scaled[g, k], unit, atol=1e-3)
    order = rng.permutation(G)
    moved = {name: x[order] for name, x in options.items()}
    again = fork_advantages(np.asarray(values)[order], steps[order], **moved)
    close(again, np.asarray(forks)[order], atol=1e-6)


def test_turns_of_tokens_and_no_forks():
    ids = np.array([[0, 0, 0, 5, 5], [0, 0, 9, 9, 9], [7, 7, 7, 7, 7]])
    turn_ids = np.array([[0, 0, -1, 1, 1]] * 3)
    mask = turn_ids >= 0
    assert turn_nodes(ids, mask, turn_ids, turns=2).tolist() == [[0, 5], [0, 9], [7, 7]]
    rewards, there = np.array([1.0, 0.5, 0.0]), np.ones((3, 2), bool)
    arrays = {"node_ids": ids, "mask": mask, "turn_ids": turn_ids, "turn_where": there}
    outcome = grpo(rewards)[:, None]
    alone = portool(rewards, **arrays, fork_weight=0.0)
    close(alone, np.repeat(outcome, 2, 1), atol=1e-6)
    both = portool(rewards, **arrays, gamma=1.0, trajectory_weight=2.0)
    # First turns are worth 0.75 and 0; the second ones of the first two fork.
    forks = np.array([[0.375, 0.25], [0.375, -0.25], [-0.375, 0.0]])
    close(both, 2 * np.asarray(outcome) + forks, atol=1e-5)
