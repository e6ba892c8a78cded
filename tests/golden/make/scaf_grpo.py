"""Writes estimators/scaf_grpo.*: dvlab-research/Scaf-GRPO's choice of the least hint."""

import numpy as np
import torch
from paper_code import passage, peer

PATH = "hint_mix_grpo/trainer/ray_trainer.py"


@peer("scaf_grpo", "Scaf-GRPO", "dvlab-research/Scaf-GRPO")
def main(root, writer):
    rewards = (np.random.default_rng(15).random((16, 8)) < 0.25).astype(np.float32)
    writer.inputs("levels", {"random": {"rewards": rewards}})

    def run(case, a):
        found = []
        for row in a["rewards"]:
            if not row.any():
                found.append(-1)
                continue
            made = passage(
                root / PATH,
                "valid_indices = [i for i, r in enumerate(uid_rewards) if r > 0]",
                "if 1 <= min_hint_level <= 4:",
                uid_rewards=torch.from_numpy(row),
                uid_hint_levels=np.arange(1, 9),
            )
            found.append(int(made["min_hint_level"]) - 1)
        return {"level": np.array(found)}

    writer.add("least", run)
