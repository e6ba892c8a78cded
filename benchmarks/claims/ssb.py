"""Stored groups in place of those without a signal: no update without one, and faster learning.

The policy of `_bandit`, trained with the collector and the loss of the preset `ssb` and without,
each at its best of eleven learning rates, chosen by the final accuracy on three other seeds.
Measured is the share of groups with a signal in an update less that without; 0 or below refutes the
claim. Then the accuracy after as many rollouts less that without, where 0 or below refutes that the
signal of stored groups is worth something; and the same less drawing stored groups evenly.
"""

import jaxrl_llm as jr
from benchmarks.claims import _bandit, _trained, harness

PAPER = "2504.16656"


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset, even draws, and none."""
    steps, loss = _trained.STEPS, _bandit.clipped_by_sampler
    stored, evenly = jr.recipes.ssb().collector, jr.recipes.ssb(power=0.0).collector
    ways = {
        "ssb": lambda s, rate: _bandit.train(stored, seed=s, steps=steps, rate=rate, loss=loss),
        "drawn evenly": lambda s, rate: _bandit.train(
            evenly, seed=s, steps=steps, rate=rate, loss=loss
        ),
        "without": lambda s, rate: _bandit.train(None, seed=s, steps=steps, rate=rate),
    }
    found, rates = _trained.at_best_rates(ways, seed=seed, quick=quick)
    measures = [
        harness.Measure(
            "share of informative groups in an update, less without",
            _trained.less(found, "ssb", "without", _trained.informative),
            "above",
            0.0,
        ),
        *(
            harness.Measure(
                f"accuracy after {steps} updates of as many rollouts, less {other}",
                _trained.less(found, "ssb", other, _trained.last),
                "above",
                0.0,
            )
            for other in ("without", "drawn evenly")
        ),
    ]
    return harness.Claim(measures, _trained.plot(found), _trained.facts(found) | rates)
