"""Choosing rollouts over the whole batch gives more advantage variance than by group or at random.

Batches of 32 prompts by 8 rollouts, right or wrong, with success rates of a U-shaped law, so that
many groups are all right or all wrong, and advantages of `grpo`. A quarter of the rollouts is kept:
by `d3s_selection` over the batch, by the same within each group, or at random. The number is the
variance of the kept advantages over that of another choice; 1 or below refutes the claim. That the
choice is the best there is, is checked against all subsets of ten advantages with many ties.

Of all subsets it is the greatest by construction; what is measured is by how much. What it is for
is a better step, so the gain of expected success to first order is measured as well, on one logit a
prompt, for an average over the kept rollouts and one learning rate. Most of that gain is a longer
step: by direction alone, the cosine listed beside, the choice lies well above the other two, and a
little below a step with all rollouts, which trains four times as many.
"""

import itertools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2509.22115"
PROMPTS, GROUP = 32, 8
SHARE = 0.25
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
NAMES: dict[Literal["batch", "group", "random", "all"], str] = {
    "batch": "batch",
    "group": "by group",
    "random": "random",
    "all": "all rollouts",
}
# For the enumeration: rollouts, and how many of them are kept.
SMALL = 10


def choose(key, advantages, share, scope):
    """Which rollouts are kept, ``[prompts, rollouts]``."""
    mask = jnp.ones((*advantages.shape, 1), bool)
    if scope == "all":
        return mask[..., 0]
    if scope == "random":
        rank = jax.random.permutation(key, advantages.size)
        return (rank < jnp.round(share * advantages.size)).reshape(advantages.shape)
    keep = jr.curation.d3s_selection(
        advantages,
        mask,
        old_entropy=jnp.ones(mask.shape),
        progress=share,
        scope=scope,
        rollouts=(0.0, 1.0),
        tokens=(1.0, 1.0),
    )
    return keep[..., 0]


@jax.jit
def batches(keys, share):
    """Variance, gain and gain per length of the step, ``[batches]`` for each scope."""

    def batch(key):
        first, second, third = jax.random.split(key, 3)
        # The arcsine law, which is Beta(1/2, 1/2).
        rate = jnp.sin(0.5 * jnp.pi * jax.random.uniform(first, (PROMPTS, 1))) ** 2
        rewards = jax.random.bernoulli(second, rate, (PROMPTS, GROUP)).astype(jnp.float32)
        advantages = jr.advantages.grpo(rewards)
        true = (rate * (1.0 - rate))[:, 0]
        found = {}
        for scope in NAMES:
            kept = choose(third, advantages, share, scope)
            step = jnp.sum(advantages * (rewards - rate), axis=-1, where=kept) / kept.sum()
            gain = jnp.sum(step * true)
            length = jnp.linalg.norm(step) * jnp.linalg.norm(true)
            found[scope] = (
                jnp.var(advantages, where=kept),
                gain,
                gain / jnp.where(length > 0, length, 1.0),
            )
        return found

    return jax.lax.map(batch, keys, batch_size=256)


def shortfall(key, draws: int) -> np.ndarray:
    """How far the choice's variance is below the best of all subsets, share of the best."""
    graded, smooth = jax.random.split(key)
    rewards = jax.random.randint(graded, (draws, 2, SMALL // 2), 0, 3).astype(jnp.float32)
    ties = jr.advantages.grpo(rewards).reshape(draws, SMALL)
    x = jnp.concatenate([ties, jax.random.normal(smooth, (draws, SMALL))])
    sizes = jnp.arange(2, SMALL)
    kept = jax.jit(jax.vmap(jr.curation.max_variance_subset, in_axes=(None, 0)))(x, sizes)
    x, worst = np.asarray(x, np.float64), []
    for size, choice in zip(range(2, SMALL), np.asarray(kept), strict=True):
        subsets = np.array(list(itertools.combinations(range(SMALL), size)))
        best = x[:, subsets].var(axis=-1).max(axis=-1)
        worst.append((best - x.var(axis=-1, where=choice)) / np.where(best > 0, best, 1.0))
    return np.max(worst, axis=0)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The enumeration, then the batches."""
    first, second = jax.random.split(jax.random.key(seed))
    number = 256 if quick else 4096
    worst = shortfall(first, 20 if quick else 500)
    keys = jax.random.split(second, number)
    curves = [jax.tree.map(np.asarray, batches(keys, share)) for share in SHARES]
    found = curves[SHARES.index(SHARE)]
    variance, gain, cosine = ({name: found[name][i] for name in NAMES} for i in range(3))

    def over(x, other):
        return harness.ratio(x["batch"], x[other], what="batches")

    what = "variance of kept advantages, chosen over the batch, times that"
    gained = "gain of one step, chosen over the batch, times that"
    measures = [
        harness.Measure(f"{what} chosen at random", over(variance, "random"), "above", 1.0),
        harness.Measure(f"{what} chosen by group", over(variance, "group"), "above", 1.0),
        harness.Measure(
            "largest shortfall from the best of all subsets, share of the best",
            harness.exact(worst.max(), f"exact, by enumeration; {worst.size} draws"),
            "below",
            1e-5,
        ),
        harness.Measure(f"{gained} chosen at random", over(gain, "random"), "above", 1.0),
        harness.Measure(f"{gained} chosen by group", over(gain, "group"), "above", 1.0),
    ]
    facts, series = {}, []
    for scope, name in NAMES.items():
        facts[f"variance of the kept advantages, {name}"] = variance[scope].mean()
        facts[f"cosine of the step and the true gradient, {name}"] = cosine[scope].mean()
        centers = [harness.mean(curve[scope][0], "batches") for curve in curves]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(name, SHARES, value, low, high))
    label = "variance of the kept advantages"
    return harness.Claim(measures, harness.Plot("share of rollouts kept", label, series), facts)
