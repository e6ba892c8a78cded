"""Writes estimators/meow_tea.*: pearls-lab/meow-tea-taro's rewards of turns."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import passage, peer

PATH = "meow_tea_train/agentic_utils/reward_manager/agentic_verified.py"
P, G, K, T = 2, 3, 4, 10


def cases():
    rng = np.random.default_rng(41)

    def case(positive):
        # Turns with up to four tokens, an observation token between; the last lie beyond T.
        turn_ids = np.full((P, G, T), -1)
        ends = np.zeros((P, G, K), int)
        for p, g in np.ndindex(P, G):
            at = 0
            for k, length in enumerate(rng.integers(1, 4, K)):
                if at + length <= T:
                    turn_ids[p, g, at : at + length] = k
                ends[p, g, k] = at + length - 1
                at += length + 1
        won = rng.random((P, G)) < 0.5
        rewards = np.where(rng.random((P, G, K)) < positive, rng.integers(1, 3, (P, G, K)), 0)
        return {
            "turn_ids": turn_ids,
            "mask": turn_ids >= 0,
            "ends": ends,
            "turn_rewards": rewards.astype(np.float32),
            "rewards": won.astype(np.float32),
            "won": won[..., None] & (np.arange(K) == K - 1),
            "turn_where": np.ones((P, G, K), bool),
            "max_total": rng.integers(0, 6, (P, G)).astype(np.float32),
        }

    return {"some": case(0.5), "none": case(0.0), "all": case(1.0)}


@peer("meow_tea", "meow-tea-taro", "pearls-lab/meow-tea-taro")
def main(root, writer):
    writer.inputs("turns", cases())

    def placed(method):
        def run(_, a):
            out = torch.zeros(P * G, T)
            for i, (p, g) in enumerate(np.ndindex(P, G)):
                item = {
                    "extra_info": {"reward_method": method},
                    "max_total_rewards": float(a["max_total"][p, g]),
                }
                passage(
                    root / PATH,
                    "if len(sep_token_positions) > 0",
                    "data_source = data_item",
                    i=i,
                    sep_token_positions=a["ends"][p, g],
                    data_item=SimpleNamespace(non_tensor_batch=item),
                    final_score=float(a["rewards"][p, g]),
                    interm_scores=a["turn_rewards"][p, g].tolist(),
                    response_length=T,
                    reward_tensor=out,
                )
            return {"rewards": out.numpy().reshape(P, G, T)}

        return run

    for method in ("dense", "sparse"):
        writer.add(method, placed(method))
