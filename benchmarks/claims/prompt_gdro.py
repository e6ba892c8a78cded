"""Weights of an adversary over bins of difficulty raise the accuracy of the worst prompts.

The policy of `_bandit`, trained with the weights of `curation.prompt_gdro` on the advantages of
`grpo`, and with `grpo` alone, each at its best of eleven learning rates, chosen by the final
accuracy on three other seeds. A bin's score is its failure rate: with one update a batch the mean
loss, which the preset takes, is 0 at every step. Measured is the mean success rate, after training,
of the quarter of prompts that was the hardest before, less that with `grpo`; 0 or below refutes the
claim. The second number is the same of the worst quarter after training; the third the mean of all
prompts, less that with `grpo`: more than a fiftieth below refutes that the others do not pay for
it. At a rate of 1 for both, as this was measured first, all three were above 0, and the policy
learned half as much.
"""

import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _bandit, _trained, harness

PAPER = "2601.19280"


def hardest(curve: _bandit.Curve) -> float:
    return float(curve.after[np.argsort(curve.before)[: _bandit.PROMPTS // 4]].mean())


def worst(curve: _bandit.Curve) -> float:
    return float(np.sort(curve.after)[: _bandit.PROMPTS // 4].mean())


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """With the weights and without."""
    steps, weigh = (
        _trained.STEPS,
        jr.curation.prompt_gdro(num_prompts=_bandit.PROMPTS, signal="failure"),
    )
    ways = {
        "prompt_gdro": lambda s, rate: _bandit.train(
            None, seed=s, steps=steps, rate=rate, weigh=weigh
        ),
        "grpo": lambda s, rate: _bandit.train(None, seed=s, steps=steps, rate=rate),
    }
    found, rates = _trained.at_best_rates(ways, seed=seed, quick=quick)

    def gain(what):
        return _trained.less(found, "prompt_gdro", "grpo", what)

    measures = [
        harness.Measure(
            "success rate of the quarter hardest before, less grpo's", gain(hardest), "above", 0.0
        ),
        harness.Measure(
            "success rate of the worst quarter after, less grpo's", gain(worst), "above", 0.0
        ),
        harness.Measure(
            "accuracy of all prompts, less grpo's", gain(_trained.last), "above", -0.02
        ),
    ]
    return harness.Claim(measures, _trained.plot(found), _trained.facts(found) | rates)
