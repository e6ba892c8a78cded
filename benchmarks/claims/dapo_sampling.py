"""Another group in place of each without a signal: fewer updates to the same accuracy.

The policy of `_bandit`, trained with the collector of the preset `dapo` and without, each at its
best of eleven learning rates, chosen by the final accuracy on three other seeds. Measured is
the number of updates to the accuracy that the training without it has after three quarters of its
updates, over that of it; 1 or above refutes the claim, and a seed that does not get there counts
with all updates. The same in rollouts that are sampled, which count what is dropped: the paper
holds that it does not cost more. The third number is the share of groups with a signal in an
update, less that without, and the last the groups that are asked for over those up to the last that
is needed, which no collector could do without: 1 at best.
"""

import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _bandit, _simulated, _trained, harness

PAPER = "2503.14476"


def needless(seed: int) -> float:
    """Groups asked for over those up to the last of the batch, on rates that do not change."""
    task = _bandit.make_task(seed)
    collector = jr.recipes.dapo().collector
    run = _simulated.Run(
        collector, prompts=_bandit.PROMPTS, groups=_bandit.GROUPS, size=_bandit.SIZE, seed=seed
    )
    answer = _bandit.policy(np.zeros(_bandit.WIDTH), task, 0)
    batches = [run.batch(answer) for _ in range(20)]
    asked = sum(len(batch.collection.requests) for batch in batches)
    return asked / sum(batch.members[-1][0][0] + 1 for batch in batches)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """With the preset's collector and without."""
    steps, collector = _trained.STEPS, jr.recipes.dapo().collector
    ways = {
        "dapo": lambda s, rate: _bandit.train(collector, seed=s, steps=steps, rate=rate),
        "without": lambda s, rate: _bandit.train(None, seed=s, steps=steps, rate=rate),
    }
    found, rates = _trained.at_best_rates(ways, seed=seed, quick=quick)
    names = ("dapo", "without")
    spare = harness.mean([needless(1000 * seed + i) for i in range(4)], "seeds")
    measures = [
        harness.Measure(
            "updates to the same accuracy over those without",
            _trained.cost_over(found, *names, "updates"),
            "below",
            1.0,
        ),
        harness.Measure(
            "rollouts to the same accuracy over those without",
            _trained.cost_over(found, *names, "sampled"),
            "below",
            1.0,
        ),
        harness.Measure(
            "share of informative groups in an update, less without",
            _trained.less(found, *names, _trained.informative),
            "above",
            0.0,
        ),
        harness.Measure("groups asked for over those that are needed", spare, "below", 1.01),
    ]
    facts = _trained.facts(found) | _trained.reaching(found, *names) | rates
    return harness.Claim(measures, _trained.plot(found), facts)
