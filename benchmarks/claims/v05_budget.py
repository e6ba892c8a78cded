"""Stopping the rollouts of a prompt once they agree with its prior saves rollouts at equal error.

Success rates of Beta(0.4, 0.4) and a prior of each, which errs by a normal deviation of 0.05 or of
0.3. The collector of the preset `v05_baseline` asks for four rollouts and then for one after
another, up to 16, while they pay. Measured is the squared error of the fused baseline
(`shrinkage_baseline`) over that of groups of a fixed size with as many rollouts on average,
interpolated between sizes; 1 or above refutes the claim.

It holds with neither. A likely reason for the bad prior, not tested: four rollouts cannot tell an
error of that size from chance, so prompts that agree with it by luck stop early with a wrong
baseline. With the good prior nearly all stop at four.
"""

import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _simulated, harness

PAPER = "2603.10848"
PROMPTS, STEPS = 256, 4
DEVIATIONS = {0.05: "a good prior", 0.3: "a bad prior"}
SIZES = (4, 5, 6, 8, 10, 12, 16)


def error(rewards, prior, where, rates) -> float:
    """Mean squared error of the fused baseline."""
    fused = jr.advantages.shrinkage_baseline(
        jnp.asarray(rewards, jnp.float32),
        prior=jnp.asarray(prior, jnp.float32),
        where=jnp.asarray(where),
        var="bound",
    )
    return float(np.mean((np.asarray(fused).reshape(len(rates), -1)[:, 0] - rates) ** 2))


def play(deviation: float, seed: int) -> tuple[float, float, np.ndarray]:
    """Error and rollouts of the sequential budget; errors of fixed sizes."""
    generator = np.random.default_rng((seed, 0))
    rates = generator.beta(0.4, 0.4, PROMPTS)
    prior = np.clip(rates + generator.normal(0.0, deviation, PROMPTS), 0.0, 1.0)
    data = [{"text": "", "prior": float(x)} for x in prior]
    collector = jr.recipes.v05_baseline().collector
    run = _simulated.Run(
        collector, prompts=PROMPTS, groups=PROMPTS, size=8, seed=seed, tokens=1, data=data
    )
    errors, counts = [], []
    for _ in range(STEPS):
        batch = run.batch(_simulated.by_rates(rates))
        p = batch.prompts
        errors.append(error(batch.rewards, prior[p], batch.where, rates[p]))
        counts.append(batch.where.sum(-1).mean())
    fixed = []
    for size in SIZES:
        draws = generator.random((4 * STEPS, PROMPTS, max(SIZES))) < rates[:, None]
        where = np.broadcast_to(np.arange(max(SIZES)) < size, draws.shape[1:])
        fixed.append(np.mean([error(x, prior, where, rates) for x in draws]))
    return float(np.mean(errors)), float(np.mean(counts)), np.array(fixed)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both priors."""
    measures, facts, series = [], {}, []
    for deviation, words in DEVIATIONS.items():
        plays = [play(deviation, 1000 * seed + i) for i in range(2 if quick else 12)]
        errors, counts, fixed = (np.array(x) for x in zip(*plays, strict=True))
        alike = [np.interp(n, SIZES, curve) for n, curve in zip(counts, fixed, strict=True)]
        ratio = harness.ratio(errors, alike, what="seeds")
        what = f"squared error over that of a fixed size with as many rollouts, {words}"
        measures.append(harness.Measure(what, ratio, "below", 1.0))
        facts[f"rollouts a prompt, {words}"] = counts.mean()
        facts[f"squared error, {words}"] = errors.mean()
        series.append(harness.Series(f"fixed size, {words}", SIZES, fixed.mean(0)))
        series.append(harness.Series(f"sequential, {words}", [counts.mean()], [errors.mean()]))
    plot = harness.Plot("rollouts a prompt", "squared error of the baseline", series)
    return harness.Claim(measures, plot, facts)
