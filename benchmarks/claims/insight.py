"""Weighing difficulty by what the next rollouts would tell forms more groups with a signal.

The prompts are those of `_drifting`: rates that rise while they are sampled. Measured is the share
of groups of eight whose rewards differ, with the collector of the preset `insight` less that of
prompts in shuffled order, over all batches and over the last third; 0 or below refutes the claim.
The third number is the same over all batches less that of the score without its factor of
information, difficulty alone, which the paper holds to be too little.

The third does not hold here, in 96 batches with three visits a prompt by chance. A likely reason,
not tested: the factor prefers prompts of which little is known, and many of those are all right or
all wrong.
"""

import jax.numpy as jnp

import jaxrl_llm as jr
from benchmarks.claims import _drifting, harness

PAPER = "2603.01907"
TARGET, SHARPNESS = 0.3, 3.0


def difficulty(rates):
    """The score of `insight` without information, by the defaults of the preset."""
    return rates * (1.0 - rates) * jnp.exp(-SHARPNESS * (rates - TARGET) ** 2)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset, difficulty alone, and chance."""
    collectors = {
        "insight": jr.recipes.insight(target=TARGET, sharpness=SHARPNESS).collector,
        "difficulty alone": jr.curation.prioritized(difficulty, choose="top", candidates=16),
        "uniform": None,
    }
    found = _drifting.runs(collectors, seed=seed, quick=quick)
    measures = [
        *_drifting.share_measures(found, "insight"),
        _drifting.share_measures(found, "insight", "difficulty alone")[0],
    ]
    return harness.Claim(measures, _drifting.plot(found), _drifting.facts(found))
