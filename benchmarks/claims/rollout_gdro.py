"""A bandit that sends rollouts to the bins that fail raises the signal of hard prompts at one cost.

The rollouts are those of `_allocated`, for 40 batches: by the collector of the preset
`rollout_gdro`, which starts without any success rate, or eight of each prompt. Of prompts with a
success rate below 0.25, the share of groups that are informative is measured, less that of eight
each; 0 or below refutes the claim. The second number is the sum of |advantage| (`dr_grpo`) a
rollout, of all prompts, over that of eight each; 1 or below refutes that the whole batch gains.
"""

import jaxrl_llm as jr
from benchmarks.claims import _allocated, harness

PAPER = "2601.19280"
STEPS = 40


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset and eight each."""
    collectors = {"rollout_gdro": jr.recipes.rollout_gdro().collector, "evenly": None}
    results = _allocated.runs(collectors, seed=seed, quick=quick, steps=STEPS)
    hard = "share of informative groups of hard prompts, less that of eight each"
    signal = "|advantage| a rollout over that of eight each"
    measures = [
        _allocated.less(results, "rollout_gdro", "hard", hard),
        _allocated.over(results, "rollout_gdro", "signal", signal),
    ]
    return _allocated.claim(results, measures, "hard")
