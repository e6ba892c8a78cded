"""Half of each batch from stored groups: fewer rollouts to the same accuracy.

The policy of `_bandit`, trained with the collector and the loss of the preset `rollout_replay` and
on fresh groups alone, each at its best of eleven learning rates, chosen by the final accuracy on
three other seeds. Measured is the number of rollouts to the accuracy that fresh groups have
after three quarters of their updates, over theirs; 1 or above refutes the claim. Then the accuracy
after as many updates less that of fresh groups: more than a fiftieth below it refutes that replay
costs no accuracy.

No saving is seen here: with stored groups the best rate is an eighth of that of fresh ones, and at
their best rates both ways spend about as many rollouts.
"""

import jaxrl_llm as jr
from benchmarks.claims import _bandit, _trained, harness

PAPER = "2506.05316"


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset and fresh groups."""
    steps, collector = _trained.STEPS, jr.recipes.rollout_replay().collector
    loss = _bandit.decoupled
    ways = {
        "rollout_replay": lambda s, rate: _bandit.train(
            collector, seed=s, steps=steps, rate=rate, loss=loss
        ),
        "fresh": lambda s, rate: _bandit.train(None, seed=s, steps=steps, rate=rate),
    }
    found, rates = _trained.at_best_rates(ways, seed=seed, quick=quick)
    names = ("rollout_replay", "fresh")
    measures = [
        harness.Measure(
            "rollouts to the same accuracy over those of fresh groups",
            _trained.cost_over(found, *names, "sampled"),
            "below",
            1.0,
        ),
        harness.Measure(
            f"accuracy after {steps} updates less that of fresh groups",
            _trained.less(found, *names, _trained.last),
            "above",
            -0.02,
        ),
    ]
    return harness.Claim(measures, _trained.plot(found), _trained.facts(found) | rates)
