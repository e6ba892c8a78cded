"""One success with the least hint that helps gives a signal to prompts that had none.

The prompts are those of `_hinted`, with four hints, of which each adds two more to the logit of the
success rate. One rollout sees each; the preset's 50 batches of warm-up are left out. Measured is
the share of informative groups with the collector of the preset `scaf_grpo` less that without
hints; 0 or below refutes the claim. Then its cost, in rollouts for each informative group, over
that of asking for other prompts in place of failed ones (`refill`), where 1 or above refutes that
hints spare rollouts; and the share of prompts that had a signal at any time less that by `refill`.

What is measured are groups with a signal, and not whether what they teach holds without hints.
"""

import jaxrl_llm as jr
from benchmarks.claims import _hinted, harness

PAPER = "2510.19807"
TIERS = [_hinted.CLUE] * 4


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset, no hints, and other prompts."""
    collector = jr.recipes.scaf_grpo(warmup=0).collector
    return _hinted.measure(
        "scaf_grpo", collector, seed=seed, quick=quick, clue=2.0, solution=0.0, hints=[TIERS]
    )
