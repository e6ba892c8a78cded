"""Every rule of credit against the true gradient of a multi-turn process.

python -m benchmarks.credit --save

Many groups of episodes are sampled in a slippery gridworld whose values are known
(benchmarks/credit_world.py). Each rule turns them into advantages, these into a gradient a group,
``1/G sum over tokens of A grad log p``, and that is compared with the exact one. Two tasks:
``outcome`` pays 1 for the goal, ``turns`` also costs 0.1 a turn.

    cosine       between the mean gradient and the true one
    scale        c, the length of the mean along the true gradient, as a share of it
    bias         |mean / c - true| / |true|: what remains after a learning rate made up for c
    variance     trace of the covariance of one group's gradient / c, over that of REINFORCE
    correlation  of the advantages (a turn's mean over its tokens) with the true ones
    gain         of J by a step of ``KL`` from 4 groups, over that of the true gradient's step

Squares of means are freed of the noise of the mean. Each number has a 95% bootstrap interval over
blocks of groups.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import credit_world, harness
from benchmarks.credit_rules import RULES, Record, Rule
from benchmarks.credit_world import Episodes, Exact, World
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.advantages import turns_to_tokens

TASKS = {"outcome": 0.0, "turns": 0.1}  # the cost of a turn
KINDS = ("episodes", "trees", "stale")
CHUNK = 512  # groups that a rule sees at once, and its batch
STEP = 4  # groups of a step
KL = 0.02  # nats of an episode, of a step
RESAMPLES = 400
SIZE = {"groups": 8192, "group_size": 8, "turns": 8}


class Setting(NamedTuple):
    """A task with its policy, the older one of stale episodes, and what the critic errs by."""

    world: World
    theta: np.ndarray
    older: np.ndarray
    exact: Exact
    error: np.ndarray


class Sums(NamedTuple):
    """Of each group: its gradient ``[N, S, 3]`` and moments of advantages ``[N, 6]``."""

    gradients: np.ndarray
    moments: np.ndarray


def setting(cost: float, turns: int) -> Setting:
    """The task of this cost of a turn; its policy succeeds about as often as not."""
    world = credit_world.gridworld(turns=turns, cost=cost)
    rng = np.random.default_rng(7)
    theta = rng.normal(0.0, 0.7, (len(world.ended), 3))
    # Toward the expert's axis and directions.
    axis = world.optimal[:, 1::2].any(-1).astype(float) - world.optimal[:, ::2].any(-1)
    ways = world.optimal[:, 2:].astype(float) - world.optimal[:, :2]
    theta += 1.2 * np.concatenate([axis[:, None], ways], axis=-1)
    older = theta + rng.normal(0.0, 0.5, theta.shape)
    error = rng.normal(0.0, 0.15, (turns, len(theta), 3))
    return Setting(world, theta, older, credit_world.solve(world, theta), error)


def record(
    setting: Setting,
    kind: str,
    groups: int,
    group_size: int,
    *,
    seed: int,
    rollouts: int = 9,
) -> tuple[Record, Episodes]:
    """Sampled groups, each from one start; "episodes", "trees" or "stale"."""
    world, exact, K = setting.world, setting.exact, setting.world.turns
    rng = np.random.default_rng(seed)
    starts = rng.choice(world.starts, groups)
    nodes = None
    if kind == "trees":
        episodes, nodes = credit_world.fork(world, setting.theta, rng, starts, group_size)
    else:
        policy = setting.older if kind == "stale" else setting.theta
        begin = np.broadcast_to(starts[:, None], (groups, group_size))
        episodes = credit_world.play(world, policy, rng, begin)
    s, where, k = episodes.states, episodes.where, np.arange(K)
    one, two = episodes.bits[..., 0], episodes.bits[..., 1]
    action, following = one + 2 * two, episodes.next_states
    V, Q1, Q = exact.V[k, s], exact.Q1[k, s, one], exact.Q[k, s, action]
    error = setting.error[k, s]
    noisy = V + error[..., 0], Q1 + np.where(one == 1, error[..., 2], error[..., 1])
    earned = episodes.rewards.cumsum(-1) - episodes.rewards
    vines = np.zeros(V.shape)
    if kind == "episodes":
        vines = credit_world.vines(world, setting.theta, rng, episodes, rollouts=rollouts)

    def tokens(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.stack([first, second], axis=-1).reshape(*where.shape[:-1], 2 * K)

    if nodes is None:
        nodes = np.broadcast_to(np.arange(group_size)[:, None], where.shape)
    arrays = Record(
        rewards=episodes.rewards.sum(-1),
        turn_rewards=episodes.rewards,
        turn_where=where,
        state_ids=np.where(where, s, -1),
        next_state_ids=np.where(where & ~world.ended[following], following, -1),
        action_ids=np.where(where, action, -1),
        mask=tokens(where, where),
        turn_ids=np.where(tokens(where, where), np.repeat(k, 2), -1),
        node_ids=np.where(tokens(where, where), tokens(nodes, nodes), -1),
        values=V,
        action_values=Q,
        token_values=tokens(V, Q1),
        noisy_values=tokens(*noisy),
        prefix_values=earned + V,
        vine_values=earned + vines,
        following_values=exact.V[k + 1, following],
        token_advantages=tokens(Q1 - V, Q - Q1),
        turn_advantages=Q - V,
        matches=world.optimal[s, action],
        old_logp=tokens(*_logps(setting.theta, episodes)),
        behavior_logp=tokens(
            *_logps(setting.older if kind == "stale" else setting.theta, episodes)
        ),
    )
    return Record(*(_narrow(x) for x in arrays)), episodes


def _logps(theta: np.ndarray, episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    first, second, _ = credit_world.chances(theta)
    one, two = episodes.bits[..., 0], episodes.bits[..., 1]
    p, q = first[episodes.states], second[episodes.states, one]
    return np.log(np.where(one == 1, p, 1.0 - p)), np.log(np.where(two == 1, q, 1.0 - q))


def _narrow(x: np.ndarray) -> np.ndarray:
    return x.astype({"f": np.float32, "i": np.int32}.get(x.dtype.kind, x.dtype))


def places(theta: np.ndarray, episodes: Episodes) -> tuple[np.ndarray, np.ndarray]:
    """Of each token ``[..., 2 K]`` the logit that it was drawn by, and d log p / d logit."""
    one, two = episodes.bits[..., 0], episodes.bits[..., 1]
    first, second, _ = credit_world.chances(theta)
    logit = np.stack([3 * episodes.states, 3 * episodes.states + 1 + one], axis=-1)
    slope = np.stack([one - first[episodes.states], two - second[episodes.states, one]], axis=-1)
    shape = (*one.shape[:-1], 2 * one.shape[-1])
    where = np.repeat(episodes.where, 2, axis=-1)
    return logit.reshape(shape).astype(np.int32), np.where(where, slope.reshape(shape), 0.0)


def sums(
    setting: Setting, data: tuple[Record, Episodes], function: Callable[[Record], Any]
) -> Sums:
    """The gradient of each group by one rule, and how its advantages agree with the true ones."""
    arrays, episodes = data
    logits, slopes = places(setting.theta, episodes)
    size = setting.theta.size
    turns = arrays.turn_where.shape[-1]

    @jax.jit
    def of_chunk(r: Record, logits, slopes):
        advantages = jnp.asarray(function(r), jnp.float32)
        if advantages.ndim == 2:
            advantages = jnp.broadcast_to(advantages[..., None], r.turn_where.shape)
        if advantages.shape[-1] == turns:
            advantages = turns_to_tokens(advantages, r.mask, turn_ids=r.turn_ids)
        advantages = jnp.where(r.mask, advantages, 0.0)
        n, G, _ = advantages.shape
        rows = jnp.broadcast_to(jnp.arange(n)[:, None, None], advantages.shape)
        gradients = jnp.zeros((n, size)).at[rows, logits].add(advantages * slopes / G)
        x = advantages.reshape(n, G, turns, 2).mean(-1)
        y, here = r.turn_advantages, r.turn_where.astype(jnp.float32)
        moments = [jnp.sum(here * z, (1, 2)) for z in (jnp.ones_like(x), x, y, x * x, y * y, x * y)]
        return gradients, jnp.stack(moments, axis=-1)

    groups, chunk = len(logits), min(CHUNK, len(logits))
    chunks = []
    for i in range(0, groups, chunk):
        cut = slice(i, i + chunk)
        r = Record(*(x[cut] for x in arrays))
        chunks.append(of_chunk(r, logits[cut], jnp.asarray(slopes[cut], jnp.float32)))
    gradients, moments = (np.concatenate(x).astype(np.float64) for x in zip(*chunks, strict=True))
    return Sums(gradients.reshape(groups, *setting.theta.shape), moments)


def gains(setting: Setting, gradients: np.ndarray) -> np.ndarray:
    """What steps along ``gradients [..., S, 3]`` add to J, over what the true one's does."""
    exact = setting.exact

    def gain(direction: np.ndarray) -> np.ndarray:
        size = (exact.fisher * direction**2).sum((-1, -2), keepdims=True)
        step = np.where(size > 0, np.sqrt(2.0 * KL / np.where(size > 0, size, 1.0)), 0.0)
        moved = credit_world.returns(setting.world, setting.theta + step * direction)
        return moved - exact.J

    return gain(gradients) / gain(exact.gradient)


def measures(setting: Setting, arrays: Sums, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Each measure ``[1 + RESAMPLES]``, first of all groups, then of resampled blocks of them.

    "trace" is the variance before the division by that of REINFORCE.
    """
    true = setting.exact.gradient.reshape(-1)
    groups = len(arrays.moments)
    steps = arrays.gradients.reshape(groups // STEP, STEP, *setting.theta.shape).mean(1)
    blocks = groups // STEP
    g = arrays.gradients.reshape(blocks, STEP, -1)
    means, squares = g.mean(1), (g**2).sum(-1).mean(1)
    moments = arrays.moments.reshape(blocks, STEP, -1).sum(1)
    gain = gains(setting, steps)
    rng = np.random.default_rng(seed)
    # Rows of weights: once all, then resamples with replacement.
    drawn = rng.multinomial(blocks, np.full(blocks, 1.0 / blocks), RESAMPLES)
    weights = np.concatenate([np.ones((1, blocks)), drawn]) / blocks
    # A resampled mean has the noise of the sample and of the resampling.
    noises = np.where(np.arange(1 + RESAMPLES) == 0, 1.0, 2.0) / groups
    mean = weights @ means
    trace = weights @ squares - (mean**2).sum(-1)
    length = np.sqrt(true @ true)
    scale = mean @ true / length**2
    along = np.abs(scale) * length
    across = np.maximum((mean**2).sum(-1) - along**2 - noises * trace, 0.0)
    count, x, y, xx, yy, xy = (weights @ moments).T
    covariance = xy / count - x * y / count**2
    spread = np.maximum((xx / count - (x / count) ** 2) * (yy / count - (y / count) ** 2), 1e-12)
    return {
        "cosine": scale * length / np.sqrt(along**2 + across),
        "scale": scale,
        "bias": np.sqrt(across) / along,
        "trace": trace / scale**2,
        "correlation": covariance / np.sqrt(spread),
        "gain": weights @ gain,
    }


def score(
    setting: Setting,
    data: Mapping[str, tuple[Record, Episodes]],
    rules: Sequence[Rule],
) -> dict[str, dict[str, list[float]]]:
    """Of each rule each measure, as its value and the ends of its interval."""
    table: dict[str, dict[str, list[float]]] = {}
    reference: np.ndarray | None = None
    for rule in rules:
        arrays = measures(setting, sums(setting, data[rule.data], rule.function))
        trace = arrays.pop("trace")
        reference = trace if reference is None else reference
        arrays["variance"] = trace / reference
        table[rule.name] = {
            name: [round(float(v), 4) for v in (x[0], *np.quantile(x[1:], [0.025, 0.975]))]
            for name, x in arrays.items()
        }
    return table


def run(size: Mapping[str, int], rules: Sequence[Rule] = RULES) -> dict[str, Any]:
    """The tables of all tasks; the first rule is what variances are relative to."""
    tasks: dict[str, Any] = {}
    for name, cost in TASKS.items():
        here = setting(cost, size["turns"])
        taken = [rule for rule in rules if name == "outcome" or not rule.outcome]
        data = {
            kind: record(here, kind, size["groups"], size["group_size"], seed=seed)
            for seed, kind in enumerate(KINDS)
            if any(rule.data == kind for rule in taken)
        }
        returns = {
            "policy": here.exact.J,
            "older_policy": float(credit_world.returns(here.world, here.older)),
        }
        tasks[name] = {
            "cost": cost,
            "return": {which: round(value, 4) for which, value in returns.items()},
            "rules": score(here, data, taken),
        }
    return tasks


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="few groups, for tests")
    parser.add_argument("--rules", help="only those whose name contains this, and REINFORCE")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    size = {**SIZE, "groups": 32, "turns": 4} if options.tiny else SIZE
    if options.save and (options.tiny or options.rules):
        raise SystemExit("benchmarks.credit: --save takes all rules and groups.")
    wanted = options.rules or ""
    rules = [rule for rule in RULES if rule is RULES[0] or wanted in rule.name]
    begin = time.process_time()
    tasks = run(size, rules)
    result = {
        "name": "credit",
        "workload": {**size, "step_groups": STEP, "step_kl": KL, "resamples": RESAMPLES},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "core_seconds": round(time.process_time() - begin, 1),
        "tasks": tasks,
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
