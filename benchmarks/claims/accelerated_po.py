"""Iterates of DPO extrapolated beyond the last two reach more reward in as many iterations.

The log-linear policy of `_preferred`. In each of three iterations 256 pairs are drawn from the
policy, labeled by Bradley and Terry of the merits, and `dpo` trains on them, from that policy and
with it as the reference. Then the policy is extrapolated beyond its last two iterates
(`models.extrapolate`, alpha 0.3), or is not (alpha 0). Measured is the exact expected merit.

A small beta takes long steps as well. So the first number compares both ways at the beta of a grid
that is best for each on a third of the seeds; 0 or below on the others refutes the claim. The
second compares them at beta 3, where steps are short and the analysis of the paper holds, and the
third at the best beta of plain iterations.

At the large beta the extrapolation gains. At the best beta of plain iterations it gains nothing
that these seeds would show: a smaller beta takes the longer step without it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_llm as jr
from benchmarks.claims import _chosen, _preferred, harness

PAPER = "2410.06293"
ITERATIONS, PAIRS, ALPHA = 3, 256, 0.3
BETAS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SHORT = 3.0
STEPS, RATE = 200, 0.05


def draw(key, params, task):
    """Prompts, chosen and rejected responses of the policy."""
    of_prompt, of_pair, of_label = jax.random.split(key, 3)
    prompts = jax.random.randint(of_prompt, (PAIRS,), 0, len(task.merit))
    logp = _preferred.log_policy(params, task)[prompts]
    pair = jax.random.categorical(of_pair, logp[:, None], shape=(PAIRS, 2))
    merit = task.merit[prompts[:, None], pair]
    wins = jax.random.uniform(of_label, (PAIRS,)) < jax.nn.sigmoid(merit[:, 0] - merit[:, 1])
    chosen, rejected = jnp.where(wins, pair.T, pair.T[::-1])
    return _preferred.Pairs(prompts, chosen, rejected)


def trained(anchor, task, pairs, beta):
    """Parameters after Adam's steps on DPO from the anchor, which is the reference too."""

    def both(params):
        logp = _preferred.log_policy(params, task)
        return logp[pairs.prompts, pairs.chosen], logp[pairs.prompts, pairs.rejected]

    reference = both(anchor)

    def objective(params):
        return jnp.mean(jr.preferences.dpo(*both(params), *reference, beta=beta))

    optimizer = optax.adam(RATE)

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(objective)(params), state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (anchor, optimizer.init(anchor)), None, STEPS)
    return params


@jax.jit
def play(keys, beta, alpha):
    """Expected merit ``[seeds, ITERATIONS]`` after each iteration."""

    def one(key):
        first, second = jax.random.split(key)
        task = _preferred.make_task(first)

        def iteration(carry, key):
            previous, anchor = carry
            params = trained(anchor, task, draw(key, anchor, task), beta)
            anchor = jr.models.extrapolate(params, previous, alpha=alpha)
            return (params, anchor), _preferred.expected_merit(anchor, task)

        start = jnp.zeros(_preferred.WIDTH)
        keys = jax.random.split(second, ITERATIONS)
        return jax.lax.scan(iteration, (start, start), keys)[1]

    return jax.vmap(one)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both ways from the same seeds, at every beta."""
    seeds, betas = (6, (0.3, SHORT)) if quick else (30, BETAS)
    keys = jax.random.split(jax.random.key(seed), seeds)
    merit = {
        name: np.stack([np.asarray(play(keys, beta, alpha)) for beta in betas])
        for name, alpha in (("extrapolated", ALPHA), ("plain", 0.0))
    }
    best = {
        name: _chosen.best(f"beta, {name}", betas, x[..., -1], quick=quick)
        for name, x in merit.items()
    }
    taken = _chosen.counted(seeds)

    def less(first: int, second: int):
        ways = merit["extrapolated"][first, taken, -1], merit["plain"][second, taken, -1]
        return harness.mean(np.subtract(*ways), "seeds")

    short, plain = betas.index(SHORT), best["plain"]
    measures = [
        harness.Measure(
            f"expected merit, extrapolated less plain, {where}", less(*at), "above", 0.0
        )
        for where, at in (
            ("each at its best beta", (best["extrapolated"], plain)),
            (f"both at beta {SHORT:g}", (short, short)),
            ("both at the best beta of plain iterations", (plain, plain)),
        )
    ]
    facts = {}
    for name, x in merit.items():
        facts[f"best beta, {name}"] = betas[best[name]]
        facts[f"expected merit at its best beta, {name}"] = x[best[name], taken, -1].mean()
        facts[f"expected merit at beta {SHORT:g}, {name}"] = x[short, taken, -1].mean()
    series = []
    for name, x in merit.items():
        centers = [harness.mean(row, "seeds") for row in x[:, taken, -1]]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(name, betas, value, low, high))
    label = f"expected merit after {ITERATIONS} iterations"
    return harness.Claim(measures, harness.Plot("beta", label, series, log="x"), facts)
