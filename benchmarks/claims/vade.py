"""Prompts of most gain, by beliefs that forget, form more groups with a signal than chance.

The prompts are those of `_drifting`: rates that rise while they are sampled. Measured is the share
of groups of eight whose rewards differ, with the collector of the preset `vade` less that of
prompts in shuffled order, over all batches and over the last third; 0 or below refutes the claim.
That the forgetting is what follows the policy is the third number: the last third against the same
collector that forgets nothing.

The third does not hold here, where rates only rise, and slowly. A likely reason, not tested: a
prompt that is asked for forgets four fifths of what was known of it, so that its belief follows the
noise of the last eight rollouts.
"""

import jaxrl_llm as jr
from benchmarks.claims import _drifting, harness

PAPER = "2511.18902"


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset, the same without forgetting, and chance."""
    collectors = {
        "vade": jr.recipes.vade().collector,
        "vade that forgets nothing": jr.recipes.vade(retain=1.0, retain_rest=1.0).collector,
        "uniform": None,
    }
    found = _drifting.runs(collectors, seed=seed, quick=quick)
    measures = [
        *_drifting.share_measures(found, "vade"),
        _drifting.share_measures(found, "vade", "vade that forgets nothing")[1],
    ]
    return harness.Claim(measures, _drifting.plot(found), _drifting.facts(found))
