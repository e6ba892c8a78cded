"""Beliefs alone predict success rates well enough to find prompts of medium difficulty.

The prompts are those of `_drifting`: rates that rise while they are sampled. Measured is the share
of groups of eight whose rewards differ, with the collector of the preset `mopps` less that of
prompts in shuffled order, over all batches and over the last third; 0 or below refutes the claim.
The third number is the correlation of the means of the beliefs with the true rates at the end, of
the prompts that were asked for at all; 0.5 or below refutes that the beliefs predict.
"""

import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _drifting, harness

PAPER = "2507.04632"


def correlation(play, rates) -> float:
    """Of beliefs and true rates, where there is any evidence."""
    alpha, beta = np.asarray(play["state"].alpha), np.asarray(play["state"].beta)
    seen = alpha + beta > 2.5
    return float(np.corrcoef((alpha / (alpha + beta))[seen], rates[seen])[0, 1])


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset and chance."""
    collectors = {"mopps": jr.recipes.mopps().collector, "uniform": None}
    found = _drifting.runs(collectors, seed=seed, quick=quick)
    last = [_drifting.rates(1000 * seed + i)[-1] for i in range(len(found["mopps"]))]
    fit = [correlation(play, p) for play, p in zip(found["mopps"], last, strict=True)]
    measures = [
        *_drifting.share_measures(found, "mopps"),
        harness.Measure(
            "correlation of beliefs with true rates", harness.mean(fit, "seeds"), "above", 0.5
        ),
    ]
    return harness.Claim(measures, _drifting.plot(found), _drifting.facts(found))
