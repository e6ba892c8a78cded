"""Writes estimators/mobile_agent.*: X-PLUG/MobileAgent's UI-S1."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import array, peer, take

PATH = "UI-S1/uis1/core_uis1.py"
SHAPE = (2, 4, 4)


def cases():
    rng = np.random.default_rng(31)

    def case(counts, share):
        turn_where = np.arange(SHAPE[-1]) < np.asarray(counts)[..., None]
        rewards = np.where(turn_where, rng.uniform(size=SHAPE), 0.0)
        return {
            "rewards": rewards.astype(np.float32),
            "turn_where": turn_where,
            "matches": rng.random(SHAPE) < share,
        }

    some = [[4, 2, 3, 4], [1, 4, 2, 3]]
    return {
        "some": case(some, 0.7),
        "all": case(some, 1.0),
        "none": case(np.full(SHAPE[:2], 4), 0.0),
        "alone": case([[0, 3, 0, 0], [0, 0, 1, 0]], 0.7),
    }


@peer("mobile_agent", "MobileAgent", "X-PLUG/MobileAgent")
def main(root, writer):
    writer.inputs("turns", cases())
    returns, advantage, *_ = take(
        root / PATH,
        "compute_step_discounted_returns",
        "compute_uis1_outcome_advantage",
        "episode_norm_reward",
        "step_norm_reward",
    )

    def rows(a):
        p, g, k = np.argwhere(a["turn_where"]).T
        arrays = {
            "rewards": a["rewards"][p, g, k],
            "traj_uid": p * SHAPE[1] + g,
            "extract_match": a["matches"][p, g, k],
        }
        batch = SimpleNamespace(non_tensor_batch=arrays, batch={"input_ids": torch.zeros(1)})
        return p, g, k, returns(batch, 0.5)

    def back(a, values):
        out = np.zeros(SHAPE, np.float32)
        out[a["turn_where"]] = array(values).reshape(-1)
        return out

    def advantages(options):
        def run(_, a):
            p, g, k, to_come = rows(a)
            values, _ = advantage(
                torch.from_numpy(a["rewards"][p, g, k])[:, None],
                to_come,
                torch.ones(len(p), 1),
                p,
                p * SHAPE[1] + g,
                k,
                **options,
            )
            return {"returns": back(a, to_come), "advantages": back(a, values)}

        return run

    for name, options in {
        "mean_std": {"mode": "mean_std_norm"},
        "mean": {"mode": "mean_norm", "step_advantage_w": 0.5, "episode_advantage_w": 2.0},
    }.items():
        writer.add(name, advantages(options))
