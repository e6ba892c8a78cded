"""Writes estimators/pf_ppo.*: swtheing/PF-PPO-RLHF's weights of rollouts."""

from types import SimpleNamespace

import numpy as np
from paper_code import peer, take

PATH = "openrlhf/trainer/ppo_utils/replay_buffer.py"


def groups():
    rng = np.random.default_rng(5)
    return {
        "scores": {"rewards": rng.normal(size=(4, 6)).astype(np.float32)},
        "ties": {"rewards": rng.integers(0, 3, (4, 6)).astype(np.float32)},
        "equal": {"rewards": np.ones((4, 6), np.float32)},
    }


@peer("pf_ppo", "PF-PPO", "swtheing/PF-PPO-RLHF")
def main(root, writer):
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

        writer.add(rule, compute)
