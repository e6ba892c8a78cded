"""With one rollout a prompt, drawing by the tracked deviation asks for prompts that teach more.

The prompts are those of `_drifting`: rates that rise while they are sampled; here with one rollout
each, 256 prompts a batch of the same number of rollouts. Measured is the true p (1 - p) of the
prompts that the collector of the preset `spo_tracker` asks for, over that of prompts in shuffled
order, in all batches and in the last third; 1 or below refutes the claim. The collector must not
give prompts up: the third number is the share of prompts asked for in the last third, over that of
chance with as many draws, which is all of them; 0.5 or below refutes it.
"""

import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _drifting, _simulated, harness

PAPER = "2509.13232"
GROUPS = _drifting.GROUPS * _drifting.SIZE


def play(collector, seed: int) -> dict[str, np.ndarray]:
    """Of each batch p (1 - p), and the share of prompts asked for in the last third."""
    run = _simulated.Run(collector, prompts=_drifting.PROMPTS, groups=GROUPS, size=1, seed=seed)
    variance, asked = [], []
    for now in _drifting.rates(seed):
        prompts = run.batch(_simulated.by_rates(now)).prompts
        variance.append((now[prompts] * (1 - now[prompts])).mean())
        asked.append(prompts)
    reached = np.unique(np.concatenate(asked[_drifting.LAST :])).size / _drifting.PROMPTS
    return {"variance": np.array(variance), "reached": np.array([reached])}


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The preset and chance."""
    recipe = jr.recipes.spo_tracker(num_prompts=_drifting.PROMPTS, rho=0.875, first=0)
    seeds = [1000 * seed + i for i in range(2 if quick else 8)]
    collectors = {"spo_tracker": recipe.collector, "uniform": None}
    found = {name: [play(x, each) for each in seeds] for name, x in collectors.items()}

    def ratio(what: str, first: int = 0):
        pair = (_drifting.column(found, name, what, first) for name in collectors)
        return harness.ratio(*pair, what="seeds")

    words = "p (1 - p) of the prompts over that of chance"
    measures = [
        harness.Measure(f"{words}, all batches", ratio("variance"), "above", 1.0),
        harness.Measure(f"{words}, last third", ratio("variance", _drifting.LAST), "above", 1.0),
        harness.Measure(
            "prompts asked for in the last third, over chance", ratio("reached"), "above", 0.5
        ),
    ]
    facts = _drifting.facts(found, "variance", "p (1 - p)")
    return harness.Claim(measures, _drifting.plot(found, "variance", "p (1 - p)"), facts)
