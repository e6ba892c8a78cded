"""Ever more of a solution where no rollout is right gives a signal to prompts that had none.

The prompts are those of `_hinted`; all of the solution would add ten to the logit of the success
rate. Measured is the share of informative groups with the collector of the preset `ghpo` less that
without hints; 0 or below refutes the claim. Then its cost, in rollouts for each informative group,
over that of asking for other prompts in place of failed ones (`refill`), where 1 or above refutes
that hints spare rollouts; and the share of prompts that had a signal at any time less that by
`refill`.

What is measured are groups with a signal, and not whether what they teach holds without hints.
"""

import jaxrl_llm as jr
from benchmarks.claims import _hinted, harness

PAPER = "2507.10628"


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset, no hints, and other prompts."""
    collector = jr.recipes.ghpo().collector
    return _hinted.measure("ghpo", collector, seed=seed, quick=quick, clue=0.0, solution=10.0)
