"""As many rollouts in all, by an allocator or evenly, on success rates of a U-shaped law.

Rates of Beta(0.4, 0.4), so that many groups agree. Eight batches of 32 prompts, eight rollouts
each on average.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _simulated, harness

PROMPTS, GROUPS, SIZE, STEPS = 64, 32, 8, 8
HARD = 0.25

WORDS = {
    "informative": "share of informative groups",
    "hard": f"share of informative groups, rates below {HARD}",
    "error": "squared error of a group's mean reward",
    "signal": "|advantage| a rollout",
    "rollouts": "rollouts a prompt",
}

Results = Mapping[str, Mapping[str, np.ndarray]]  # collector -> quantity -> [seeds]


def rates(seed: int) -> np.ndarray:
    return np.random.default_rng((seed, 0)).beta(0.4, 0.4, PROMPTS)


def play(collector, seed: int, steps: int) -> dict[str, float]:
    """Means over the batches of a run."""
    p = rates(seed)
    data = [{"text": "", "prior": float(x)} for x in p]
    run = _simulated.Run(
        collector, prompts=PROMPTS, groups=GROUPS, size=SIZE, seed=seed, tokens=1, data=data
    )
    rows = []
    for _ in range(steps):
        batch = run.batch(_simulated.by_rates(p))
        advantages = jr.advantages.dr_grpo(jnp.asarray(batch.rewards), where=batch.where)
        count = batch.where.sum(-1)
        mean = (batch.rewards * batch.where).sum(-1) / count
        rows.append(
            {
                "informative": batch.informative.mean(),
                "hard": batch.informative[p[batch.prompts] < HARD].mean(),
                "error": ((mean - p[batch.prompts]) ** 2).mean(),
                "signal": float(jnp.abs(advantages).sum()) / count.sum(),
                "rollouts": count.mean(),
            }
        )
    return {name: float(np.mean([row[name] for row in rows])) for name in WORDS}


def runs(collectors: Mapping, *, seed: int, quick: bool, steps: int = STEPS) -> Results:
    """`play` of each collector over the same seeds."""
    seeds = [1000 * seed + i for i in range(2 if quick else 16)]
    results = {}
    for name, collector in collectors.items():
        plays = [play(collector, each, steps) for each in seeds]
        results[name] = {what: np.array([x[what] for x in plays]) for what in WORDS}
    return results


def less(results: Results, name: str, what: str, words: str) -> harness.Measure:
    """A quantity less that of an even allocation, claimed to be above 0."""
    estimate = harness.mean(results[name][what] - results["evenly"][what], "seeds")
    return harness.Measure(words, estimate, "above", 0.0)


def over(
    results: Results, name: str, what: str, words: str, holds: Literal["above", "below"] = "above"
) -> harness.Measure:
    """A quantity over that of an even allocation, claimed to be above 1 or below."""
    pair = (results[each][what] for each in (name, "evenly"))
    estimate = harness.ratio(*pair, what="seeds")
    return harness.Measure(words, estimate, holds, 1.0)


def claim(results: Results, measures: Sequence[harness.Measure], what: str) -> harness.Claim:
    """With all means as facts and bars of one of them."""
    facts = {
        f"{words}, {name}": results[name][key].mean()
        for key, words in WORDS.items()
        for name in results
    }
    centers = [harness.mean(each[what], "seeds") for each in results.values()]
    value, low, high, _ = zip(*centers, strict=True)
    series = [harness.Series(WORDS[what], list(results), value, low, high)]
    return harness.Claim(measures, harness.Plot("", WORDS[what], series, kind="bars"), facts)
