"""Prompts drawn by the variance of their outcome form more groups with a signal than chance.

The prompts are those of `_drifting`: rates that rise while they are sampled. Measured is the share
of groups of eight whose rewards differ, with the collector of the preset `learnability` less that
of prompts in shuffled order, over all batches and over the last third; 0 or below refutes the
claim. The third number is the true p (1 - p) of the prompts that are asked for, over that of
chance; 1 or below refutes it.
"""

import jaxrl_llm as jr
from benchmarks.claims import _drifting, harness

PAPER = "2502.12272"


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset and chance."""
    collectors = {"learnability": jr.recipes.learnability().collector, "uniform": None}
    found = _drifting.runs(collectors, seed=seed, quick=quick)
    pair = (_drifting.column(found, name, "variance") for name in collectors)
    ratio = harness.ratio(*pair, what="seeds")
    measures = [
        *_drifting.share_measures(found, "learnability"),
        harness.Measure("p (1 - p) of the prompts over that of chance", ratio, "above", 1.0),
    ]
    return harness.Claim(measures, _drifting.plot(found), _drifting.facts(found))
