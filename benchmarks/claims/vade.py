"""Prompts of most gain, by beliefs that forget, form more groups with a signal than chance.

The prompts are those of `_drifting`: rates that rise while they are sampled. Measured is the share
of groups of eight whose rewards differ, with the collector of the preset `vade` less that of
prompts in shuffled order, over all batches and over the last third; 0 or below refutes the claim.
That the forgetting is what follows the policy is the third number: the last third against the same
collector that forgets nothing.

The third does not hold here. The rates only rise, and slowly, while a prompt that is asked for
forgets four fifths of what was known of it: the belief follows the last group, of eight rollouts,
and its noise. It would pay where rates jump, which these do not.
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
