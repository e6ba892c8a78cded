"""Writes estimators/siirl.*: sii-research/siiRL's rewards of progress (SRPO).

It needs scikit-learn and scipy."""

import sys
import types

import numpy as np
import torch
from paper_code import peer, take
from scipy import special
from scipy.spatial.distance import cdist
from sklearn.cluster import DBSCAN
from sklearn.preprocessing import StandardScaler

PATH = "siirl/utils/reward_score/embodied.py"
TASKS, SIZE = 4, 10


def batches():
    rng = np.random.default_rng(17)

    def case(spread, rate):
        places = rng.integers(0, 2, (TASKS, SIZE, 1)) * 6.0
        e = places + rng.normal(0, spread, (TASKS, SIZE, 3))
        e[rng.random((TASKS, SIZE)) < 0.1] = 0.0
        success = rng.random((TASKS, SIZE)) < rate
        return {"rewards": success.astype(np.float32), "embeddings": e.astype(np.float32)}

    return {
        "tight": case(0.1, 0.6),
        "loose": case(1.5, 0.5),
        "rare": case(0.5, 0.12),
        "easy": case(0.3, 0.9),
    }


@peer("siirl", "siiRL", "sii-research/siiRL")
def main(root, writer):
    quiet = types.SimpleNamespace(**dict.fromkeys(["info", "error", "warning", "debug"], print))
    quiet = types.SimpleNamespace(**{n: (lambda *_: None) for n in vars(quiet)})
    sys.modules["loguru"] = types.SimpleNamespace(logger=quiet)
    rewards_of, *_ = take(
        root / PATH,
        "compute_embodied_reward",
        "_tensor_to_str_list",
        "_extract_task_name",
        re=__import__("re"),
        special=special,
        cdist=cdist,
        DBSCAN=DBSCAN,
        StandardScaler=StandardScaler,
    )

    def rewards(case, a):
        n = TASKS * SIZE
        names = [f"libero_goal_task_{i // SIZE}_trial_{i % SIZE}".ljust(40, "\0") for i in range(n)]
        batch = {
            "responses": torch.zeros(n, 1),
            "complete": torch.from_numpy(a["rewards"].reshape(-1) > 0.5),
            "finish_step": torch.zeros(n),
            "vjepa_embedding": torch.from_numpy(a["embeddings"].reshape(n, -1)),
            "task_file_name": torch.tensor([list(name.encode()) for name in names]).byte(),
        }
        out = [row["score"] for row in rewards_of(batch)]
        return {"rewards": np.array(out).reshape(TASKS, SIZE)}

    writer.inputs("siirl_batches", batches())
    writer.add("progress", rewards)
