"""Writes tests/golden/estimators/pf_ppo.*: swtheing/PF-PPO-RLHF's weights of rollouts.

python tests/golden/make/pf_ppo.py CHECKOUT COMMIT
"""

from types import SimpleNamespace

import numpy as np
from paper_code import start, take

PATH = "openrlhf/trainer/ppo_utils/replay_buffer.py"


def groups():
    rng = np.random.default_rng(5)
    return {
        "scores": {"rewards": rng.normal(size=(4, 6)).astype(np.float32)},
        "ties": {"rewards": rng.integers(0, 3, (4, 6)).astype(np.float32)},
        "equal": {"rewards": np.ones((4, 6), np.float32)},
    }


def main():
    root, writer = start("pf_ppo", "PF-PPO", "swtheing/PF-PPO-RLHF")
    writer.inputs("groups", groups())
    for rule, name in (
        ("best_worst", "select_min_max"),
        ("best_random", "select_max_random"),
        ("power", "put_weight"),
    ):
        (function,) = take(root / PATH, name)

        def compute(case, a, function=function, rule=rule):
            shape = a["rewards"].shape
            items = [
                SimpleNamespace(prompts=p, info={"reward": float(r)})
                for p, row in enumerate(a["rewards"])
                for r in row
            ]
            buffer = SimpleNamespace(items=items)
            found = function(buffer) if rule == "power" else function(buffer, items)
            return {"weights": np.array(found).reshape(shape)}

        writer.add(rule, ["pf_ppo"], f"{PATH}: {name}", compute, inputs="groups")
    writer.save()


if __name__ == "__main__":
    main()
