"""Half of each batch from stored groups: fewer rollouts to the same accuracy.

The policy of `_bandit`, trained with the collector and the loss of the preset `rollout_replay` and
on fresh groups alone, each at its best of eleven learning rates, chosen by the accuracy after 100
updates on three other seeds. Measured is the number of rollouts to the accuracy that fresh groups
have after three quarters of their updates, over theirs; 1 or above refutes the claim. A batch with
stored groups samples half as many, so this way goes on until it has sampled as many as the other
has in all; a seed that does not get there counts with all of them. Then the accuracy after as many
updates less that of fresh groups: more than a fiftieth below it refutes that replay costs no
accuracy.
"""

import jaxrl_llm as jr
from benchmarks.claims import _bandit, _trained, harness

PAPER = "2506.05316"


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset and fresh groups."""
    steps, collector = _trained.STEPS, jr.recipes.rollout_replay().collector
    loss, rollouts = _bandit.decoupled, steps * _bandit.GROUPS * _bandit.SIZE
    ways = {
        "rollout_replay": lambda s, rate: _bandit.train(
            collector, seed=s, steps=steps, rollouts=rollouts, rate=rate, loss=loss
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
    facts = _trained.facts(found) | _trained.reaching(found, *names) | rates
    return harness.Claim(measures, _trained.plot(found), facts)
