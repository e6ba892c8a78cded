"""Rewards normalized one by one keep apart combinations that GRPO of their sum merges.

Two rewards of 0 or 1 for each rollout, G rollouts a prompt. First by enumeration: all groups that
differ by more than the order of their rollouts, and how many different sets of advantages `gdpo`
and `grpo` of `sum_components` give them; the claim is refuted if `gdpo` gives no more at any G from
2 to 8. At G = 2 the paper counts 3 against 2, and so does this. Then by sampling, at G = 8, with a
probability of its own for each reward and prompt: of the pairs of rollouts of one group whose
rewards differ, the share that gets equal advantages, `gdpo` less `grpo`; 0 or above refutes the
claim.

`gdpo` merges as well: right but long with wrong but short, where both rewards are met equally often
in the group. Removing the division by the deviation from GRPO (`dr_grpo`) keeps more groups apart
than `grpo` does, and no more pairs.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2601.05242"
SIZES = range(2, 9)
_COMBINATIONS = ((0, 0), (0, 1), (1, 0), (1, 1))
# Small, so that equal advantages are equal to the fifth digit.
_EPS = 1e-8


def of_sum(columns, where=None):
    return jr.advantages.grpo(jr.advantages.sum_components(columns), where=where, eps=_EPS)


def of_sum_unscaled(columns, where=None):
    return jr.advantages.dr_grpo(jr.advantages.sum_components(columns), where=where)


def decoupled(columns, where=None):
    return jr.advantages.gdpo(columns, where=where, eps=_EPS)


METHODS = {"gdpo": decoupled, "grpo of the sum": of_sum, "dr_grpo of the sum": of_sum_unscaled}


def all_groups():
    """All groups of all sizes in one array of rewards, padded, and which entries are rollouts."""
    rows, taken = [], []
    for size in SIZES:
        for group in itertools.combinations_with_replacement(_COMBINATIONS, size):
            rows.append((*group, *(((0, 0),) * (SIZES[-1] - size))))
            taken.append(np.arange(SIZES[-1]) < size)
    rewards = np.asarray(rows, np.float32)
    return {"right": rewards[..., 0], "short": rewards[..., 1]}, np.asarray(taken)


def distinct_groups(method) -> list[int]:
    """How many different sets of advantages a method gives to all groups of each size."""
    columns, where = all_groups()
    advantages = np.asarray(jax.jit(method)(columns, where))
    # Sets, since a group of the same rewards in another order is the same group; + 0 for minus 0.
    ordered = np.sort(advantages.round(4) + 0.0, axis=-1)
    sizes = where.sum(-1)
    return [len(np.unique(ordered[sizes == size], axis=0)) for size in SIZES]


def merged_pairs(method, columns):
    """Pairs of a group whose rewards differ and whose advantages do not; and those that differ."""
    advantages = method(columns)
    apart = jnp.abs(advantages[:, :, None] - advantages[:, None, :]) > 1e-4
    differ = jnp.zeros(apart.shape, bool)
    for column in columns.values():
        differ |= column[:, :, None] != column[:, None, :]
    return jnp.sum(differ & ~apart, axis=(1, 2)), jnp.sum(differ, axis=(1, 2))


def sample(key, prompts: int, size: int):
    """Both rewards of each rollout."""
    keys = jax.random.split(key, 4)
    columns = {}
    for number, name in enumerate(("right", "short")):
        chance = jax.random.uniform(keys[number], (prompts, 1), minval=0.1, maxval=0.9)
        drawn = jax.random.bernoulli(keys[2 + number], chance, (prompts, size))
        columns[name] = drawn.astype(jnp.float32)
    return columns


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The count of groups and the share of pairs."""
    counts = {name: distinct_groups(method) for name, method in METHODS.items()}
    gdpo, summed, unscaled = counts
    fewest = min(np.subtract(counts[gdpo], counts[summed]))
    columns = sample(jax.random.key(seed), 1_000 if quick else 20_000, SIZES[-1])
    merged, differing = {}, None
    for name, method in METHODS.items():
        merged[name], differing = jax.jit(merged_pairs, static_argnums=0)(method, columns)
    less = harness.bootstrap(
        harness.ratio_of_means, merged[gdpo] - merged[summed], differing, what="prompts"
    )
    measures = [
        harness.Measure(
            "distinct groups with gdpo less those with grpo, least over G = 2 to 8",
            harness.exact(fewest),
            "above",
            0.0,
        ),
        harness.Measure(
            "pairs of different rewards merged, gdpo less grpo, G = 8", less, "below", 0.0
        ),
    ]
    facts: dict[str, float] = {}
    for name, groups in counts.items():
        facts[f"distinct groups at G = 2, {name}"] = groups[0]
        facts[f"distinct groups at G = 8, {name}"] = groups[-1]
        facts[f"pairs merged, {name}"] = harness.ratio_of_means(merged[name], differing)
    series = [harness.Series(name, list(SIZES), groups) for name, groups in counts.items()]
    plot = harness.Plot("rollouts G", "distinct groups of advantages", series)
    return harness.Claim(measures, plot, facts)
