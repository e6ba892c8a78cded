"""Comparing turns from one state as well points the gradient of a group nearer to the true one.

Random episodes of five turns: one first state, then three states a turn, two acts in each, random
transitions, and a success drawn at the end by the last state and act; logits for each state. Of
many groups of eight rollouts the policy gradient is taken with the advantages of `gigpo` (gamma
0.95, omega 1) and with those of the episode alone (`dr_grpo`), and the gradient of the success rate
is exact. The number is the mean cosine of a group's gradient and the true one, `gigpo` less
`dr_grpo`, over random episodes; 0 or below refutes the claim. The variance of a group's gradient
over the squared length of its mean, `gigpo` over `dr_grpo`, as a geometric mean, must be below 1.

Turns of one state share what came before only in that state, so the comparison could as well lose:
with two rollouts few turns share a state. The plot has the cosines by the size of the group.

On these tasks the comparison by states changes next to nothing, and slightly for the worse: of
eight rollouts about three meet the same state at a turn, which is few for a baseline.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2505.10978"
TURNS, STATES, ACTS = 5, 3, 2
GROUP, SIZES = 8, (2, 4, 8, 16)
# States of all turns in one table; at the first turn only the first one is met.
ROWS = TURNS * STATES


def make_task(key):
    """Logits ``[rows, acts]``, odds of the next state, success ``[states, acts]`` at the end."""
    of_logits, of_moves, of_success = jax.random.split(key, 3)
    logits = jax.random.normal(of_logits, (ROWS, ACTS))
    moves = jax.random.dirichlet(of_moves, jnp.full(STATES, 0.5), (ROWS, ACTS))
    return logits, moves, jax.random.uniform(of_success, (STATES, ACTS))


def success_rate(logits, moves, success):
    """The exact success rate."""
    probs = jax.nn.softmax(logits).reshape(TURNS, STATES, ACTS)
    moves = moves.reshape(TURNS, STATES, ACTS, STATES)
    value = jnp.sum(probs[-1] * success, axis=-1)
    for turn in reversed(range(TURNS - 1)):
        value = jnp.sum(probs[turn] * (moves[turn] @ value), axis=-1)
    return value[0]


def rollouts(key, logits, moves, success, shape):
    """Rows of the states, acts ``[*shape, TURNS]`` and outcomes ``shape``."""
    logits_of_moves = jnp.log(jnp.maximum(moves, 1e-30))

    def turn(state, now):
        number, key = now
        of_act, of_move = jax.random.split(key)
        row = number * STATES + state
        act = jax.random.categorical(of_act, logits[row])
        following = jax.random.categorical(of_move, logits_of_moves[row, act])
        return following, (row, act)

    of_turns, of_end = jax.random.split(key)
    keys = jax.random.split(of_turns, TURNS)
    _, (rows, acts) = jax.lax.scan(turn, jnp.zeros(shape, int), (jnp.arange(TURNS), keys))
    rows, acts = (jnp.moveaxis(x, 0, -1) for x in (rows, acts))
    odds = success[rows[..., -1] % STATES, acts[..., -1]]
    return rows, acts, jax.random.bernoulli(of_end, odds).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("group", "repeats"))
def measure(keys, *, group: int, repeats: int):
    """Of each task: mean cosine and relative variance by method."""

    def task(key):
        first, second = jax.random.split(key)
        logits, moves, success = make_task(first)
        true = jax.grad(success_rate)(logits, moves, success).ravel()
        rows, acts, outcomes = rollouts(second, logits, moves, success, (repeats, group))
        ends = jnp.where(jnp.arange(TURNS) == TURNS - 1, outcomes[..., None], 0.0)
        turns = functools.partial(jr.advantages.gigpo, outcomes, turn_rewards=ends, state_ids=rows)
        advantages = {
            "gigpo": turns(),
            "gigpo, gamma 1": turns(gamma=1.0),
            "dr_grpo": jnp.broadcast_to(jr.advantages.dr_grpo(outcomes)[..., None], rows.shape),
        }
        # The score of an act in the logits of its state.
        scores = jax.nn.one_hot(acts, ACTS) - jax.nn.softmax(logits)[rows]
        where = jax.nn.one_hot(rows, ROWS)

        def statistics(advantage):
            each = jnp.einsum("rgt,rgtd,rgta->rda", advantage, where, scores) / group
            each = each.reshape(repeats, -1)
            mean = jnp.mean(each, axis=0)
            variance = jnp.sum(jnp.var(each, axis=0, ddof=1))
            size = jnp.maximum(jnp.sum(mean**2) - variance / repeats, variance / repeats)
            # A group whose outcomes agree has no gradient, and cosine 0.
            lengths = jnp.linalg.norm(each, axis=-1) * jnp.linalg.norm(true)
            cosine = jnp.where(lengths > 1e-9, each @ true / jnp.maximum(lengths, 1e-9), 0.0)
            aim = mean @ true / jnp.linalg.norm(mean) / jnp.linalg.norm(true)
            return jnp.mean(cosine), variance / size, aim

        return {name: statistics(x) for name, x in advantages.items()}

    return jax.lax.map(task, keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Many random tasks, at several sizes of groups."""
    tasks, repeats = (24, 128) if quick else (100, 512)
    keys = jax.random.split(jax.random.key(seed), tasks)
    sizes = (GROUP,) if quick else SIZES
    curves = {
        size: {
            name: [np.asarray(x, np.float64) for x in values]
            for name, values in measure(keys, group=size, repeats=repeats * GROUP // size).items()
        }
        for size in sizes
    }
    found = curves[GROUP]
    ratio = np.log(found["gigpo"][1] / found["dr_grpo"][1])
    center, low, high, how = harness.mean(ratio, "tasks")
    center, low, high = np.exp((center, low, high)).tolist()
    measures = [
        harness.Measure(
            "cosine of a group's gradient and the true one, gigpo less dr_grpo",
            harness.mean(found["gigpo"][0] - found["dr_grpo"][0], "tasks"),
            "above",
            0.0,
        ),
        harness.Measure(
            "relative variance of a group's gradient, gigpo over dr_grpo",
            harness.Estimate(center, low, high, f"{how}, of the logarithm"),
            "below",
            1.0,
        ),
    ]
    facts = {}
    for name, (cosine, _, aim) in found.items():
        facts[f"cosine of a group's gradient and the true one, {name}"] = cosine.mean()
        facts[f"cosine of the mean gradient and the true one, {name}"] = aim.mean()
    series = []
    for name in ("gigpo", "dr_grpo"):
        centers = [harness.mean(curve[name][0], "tasks") for curve in curves.values()]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(name, sizes, value, low, high))
    label = "cosine of a group's gradient and the true one"
    return harness.Claim(
        measures, harness.Plot("rollouts in a group", label, series, log="x"), facts
    )
