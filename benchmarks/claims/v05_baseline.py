"""A prior fused with the mean of four rollouts has a lower squared error than either.

Prompts with success rates from 0.05 to 0.95, and priors that miss them by a normal error of a
deviation from 0 to 0.4. `shrinkage_baseline` of four rewards, the mean alone and the prior alone
are compared by their squared error from the true rate, in expectation over the rewards, exactly.
The number is the error of the fused baseline over that of the other, averaged over the deviations;
1 or above refutes the claim. Then it is compared with the better of the two where they are about
equally good, which is where a fusion has most to win, and with a good prior, of deviation 0.1.

The last does not hold, and no baseline could beat a prior that is right: what four rewards say
against it is mostly chance, and now and then they say it loudly enough to be believed. The
equations of the fusion are our reading of an abstract.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2603.10848"
SIZES = (2, 4, 8, 16)
DEVIATIONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
GOOD = 0.1


@functools.partial(jax.jit, static_argnames=("prompts", "size"))
def errors(key, *, prompts: int, size: int) -> dict[str, jax.Array]:
    """Expected squared error of each baseline, ``[prompts, deviations]``."""
    first, second = jax.random.split(key)
    rate = jax.random.uniform(first, (prompts, 1), minval=0.05, maxval=0.95)
    miss = jax.random.normal(second, (prompts, 1)) * jnp.asarray(DEVIATIONS)
    prior = jnp.clip(rate + miss, 0.001, 0.999)
    # All outcomes: how many of the rewards are 1, and how likely that is.
    counts = jnp.arange(size + 1)
    rewards = (jnp.arange(size) < counts[:, None]).astype(jnp.float32)
    ways = jnp.exp(jr.advantages.log_comb(jnp.float32(size), counts.astype(jnp.float32)))
    chance = ways * rate[..., None] ** counts * (1 - rate[..., None]) ** (size - counts)
    shape = (*prior.shape, *rewards.shape)
    priors = jnp.broadcast_to(prior[..., None], shape[:-1])
    fused, _ = jr.advantages.shrinkage_baseline(jnp.broadcast_to(rewards, shape), prior=priors)
    of = {"fused": fused, "mean": jnp.broadcast_to(rewards.mean(-1), fused.shape), "prior": priors}
    return {
        name: jnp.sum(chance * (value - rate[..., None]) ** 2, axis=-1)
        for name, value in of.items()
    }


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Four rollouts for the measures, other sizes beside them."""
    prompts = 500 if quick else 10_000
    found = {}
    for size in SIZES:
        of = errors(jax.random.key(seed), prompts=prompts, size=size)
        found[size] = {name: np.asarray(value) for name, value in of.items()}
    fused, mean, prior = (found[4][name] for name in ("fused", "mean", "prior"))
    measures = [
        harness.Measure(
            f"squared error over that of the {name}, average of prior deviations, 4 rollouts",
            harness.ratio(fused, other, what="prompts"),
            "below",
            1.0,
        )
        for name, other in (("mean", mean), ("prior", prior))
    ]
    middle = int(np.argmin(np.abs(np.log((prior.mean(0) + 1e-9) / mean.mean(0)))))
    better = mean if mean[:, middle].mean() < prior[:, middle].mean() else prior
    measures.append(
        harness.Measure(
            "squared error over that of the better one, where they are closest, 4 rollouts",
            harness.ratio(fused[:, middle], better[:, middle], what="prompts"),
            "below",
            1.0,
        )
    )
    good = DEVIATIONS.index(GOOD)
    measures.append(
        harness.Measure(
            f"squared error over that of the prior, at deviation {GOOD:g}, 4 rollouts",
            harness.ratio(fused[:, good], prior[:, good], what="prompts"),
            "below",
            1.0,
        )
    )
    facts = {"deviation of the prior where mean and prior are closest": DEVIATIONS[middle]}
    for size, by_name in found.items():
        of = {name: value.mean(0) for name, value in by_name.items()}
        best = np.minimum(of["mean"], of["prior"])
        lower = [d for d, wins in zip(DEVIATIONS, of["fused"] < best, strict=True) if wins]
        facts[f"least deviation at which it is lower than both, {size} rollouts"] = min(lower)
        facts[f"greatest deviation at which it is lower than both, {size} rollouts"] = max(lower)
        least = np.max(of["fused"] / np.maximum(of["mean"], of["prior"]))
        facts[f"times the error of the worse one, at worst, {size} rollouts"] = least
    series = [harness.Series(name, DEVIATIONS, value.mean(0)) for name, value in found[4].items()]
    plot = harness.Plot("deviation of the prior's error", "squared error of the baseline", series)
    return harness.Claim(measures, plot, facts)
