"""Writes estimators/epo.*: WujiangXu/EPO's phase weight and its penalty."""

import numpy as np
import torch
from paper_code import peer, take

PATH = "verl/workers/actor/dp_actor.py"


@peer("epo", "EPO", "WujiangXu/EPO")
def main(root, writer):
    rng = np.random.default_rng(10)
    writer.inputs("epochs", {"hundred": {"epoch": np.arange(0, 101, 5)}})
    history = rng.uniform(0.2, 1.0, 5).astype(np.float32)
    entropy = rng.uniform(0.0, 1.5, (6, 7)).astype(np.float32)
    turns = np.broadcast_to(rng.integers(0, 5, (6, 1)), (6, 7)).copy()
    writer.inputs("turns", {"random": {"history": history, "entropy": entropy, "turn_ids": turns}})
    weight, penalty = take(
        root / PATH, "_calculate_epoch_based_entropy_weight", "generate_entropy_penalty"
    )

    def phases(case, a):
        return {"weight": np.array([weight(None, int(k), 100) for k in a["epoch"]])}

    writer.add("weight", phases)

    def band(case, a):
        found, _ = penalty(
            None,
            a["history"],
            torch.from_numpy(a["entropy"]),
            a["turn_ids"][:, 0],
            "token",
            0.8,
            1.2,
            0.1,
        )
        return {"penalty": found.numpy()}

    writer.add("penalty", band)
