"""Rollouts where a mean reward is least certain make all means more certain at equal cost.

The rollouts are those of `_allocated`: four first, then two rounds by the collector of the preset
`xrpo` (without its examples, which a simulated policy cannot read), or eight of each prompt.
Measured is the squared error of the groups' mean rewards over that of eight each; 1 or above
refutes the claim. More certain means are wanted for groups that teach: the second number is the
share of informative groups less that of eight each; 0 or below refutes that.
"""

import jaxrl_llm as jr
from benchmarks.claims import _allocated, harness

PAPER = "2510.06672"


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset and eight each."""
    collectors = {"xrpo": jr.recipes.xrpo(examples=0).collector, "evenly": None}
    results = _allocated.runs(collectors, seed=seed, quick=quick)
    error = "squared error of the mean rewards over that of eight each"
    informative = "share of informative groups less that of eight each"
    measures = [
        _allocated.over(results, "xrpo", "error", error, "below"),
        _allocated.less(results, "xrpo", "informative", informative),
    ]
    return _allocated.claim(results, measures, "error")
