"""Writes estimators/rl_swarm.*: which groups of others gensyn-ai/rl-swarm trains on.

python tests/golden/make/rl_swarm.py CHECKOUT COMMIT
"""

import random
from types import SimpleNamespace

import numpy as np
from paper_code import start, take

PATH = "rgym_exp/src/data.py"
DRAWS, GROUPS, ROLLOUTS, MOST = 4000, 10, 4, 4


def swarms():
    """Groups of two local and eight foreign places, of which some have too few rollouts."""
    local = np.arange(GROUPS) < 2
    many, few = ~local & (np.arange(GROUPS) != 5), np.isin(np.arange(GROUPS), [3, 7])
    return {
        "many": {"eligible": many, "local": local},
        "few": {"eligible": few, "local": local},
    }


def main():
    facts = {"license": "MIT", "release": "v0.5.8"}
    root, writer = start("rl_swarm", "rl-swarm", "gensyn-ai/rl-swarm", **facts)
    writer.inputs("swarms", swarms())
    (function,) = take(root / PATH, "transplant_trees", random=random)

    def run(case, a):
        random.seed(11)
        trainer = SimpleNamespace(num_generations=ROLLOUTS)
        state = SimpleNamespace(trees={"local": {}})
        groups = {"local": {}, "first": {}, "second": {}}
        for place, (eligible, local) in enumerate(zip(a["eligible"], a["local"], strict=True)):
            agent = "local" if local else ("first", "second")[place % 2]
            actions = ["text"] * (ROLLOUTS if eligible or local else ROLLOUTS - 1)
            groups[agent][place] = [SimpleNamespace(actions=actions)]
        taken = np.zeros((DRAWS, GROUPS))
        for row in taken:
            row[[place for _, place in function(trainer, state, groups, MOST)]] = 1
        count = np.unique(taken.sum(1))
        return {"count": count, "frequency": taken.mean(0)}

    writer.add("foreign", run)
    writer.save()


if __name__ == "__main__":
    main()
