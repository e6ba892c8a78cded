"""Rollouts allocated by a success rate known beforehand bring more signal at equal cost.

The rollouts are those of `_allocated`: by the collector of the preset `v0_budget`, which reads the
true rates (as a perfect value model would give them) or tracks them, or eight of each prompt.
Measured is the sum of |advantage| (`dr_grpo`) a rollout over that of eight each, with known and
with tracked rates; 1 or below refutes the claim. The third number is the share of informative
groups with known rates less that of eight each; 0 or below refutes that more prompts teach.

The third does not hold: the utility grows by the number of rollouts of a prompt as long as it is
below the cap, so that a few prompts take most of the rollouts, and others are left with two.
"""

import jaxrl_llm as jr
from benchmarks.claims import _allocated, harness

PAPER = "2602.03584"


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both priors, the exact allocation for comparison, and eight each."""
    preset = jr.recipes.v0_budget
    collectors = {
        "known rates": preset(prior="data").collector,
        "tracked rates": preset().collector,
        "known rates, exact": preset(prior="data", exact=True).collector,
        "evenly": None,
    }
    results = _allocated.runs(collectors, seed=seed, quick=quick)
    measures = [
        _allocated.over(
            results, name, "signal", f"|advantage| a rollout over that of eight each, {name}"
        )
        for name in ("known rates", "tracked rates")
    ]
    informative = "share of informative groups less that of eight each, known rates"
    measures.append(_allocated.less(results, "known rates", "informative", informative))
    return _allocated.claim(results, measures, "signal")
