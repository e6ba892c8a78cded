"""Writes estimators/sol_rl.*: the rule of NVlabs/Sana that picks from many candidates."""

import numpy as np
import torch
from paper_code import peer, take

PATH = "train_scripts/train_utils.py"


@peer("sol_rl", "Sana", "NVlabs/Sana", license="Apache-2.0")
def main(root, writer):
    rewards = np.random.default_rng(29).normal(size=(4, 16)).astype(np.float32)
    writer.inputs("candidates", {"random": {"rewards": rewards}})
    (function,) = take(root / PATH, "select_indices_by_mode")

    def run(count):
        def compute(case, a):
            keep = np.zeros(a["rewards"].shape, bool)
            for row, each in zip(keep, a["rewards"], strict=True):
                row[function(torch.from_numpy(each), count, "best_worst").numpy()] = True
            return {"keep": keep}

        return compute

    for count in (4, 5):
        writer.add(f"best_worst_{count}", run(count))
