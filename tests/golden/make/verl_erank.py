"""Writes estimators/verl_erank.*: hf618/VERL's effective ranks and their differences."""

import numpy as np
import torch
from paper_code import peer, take

PATH = "verl/trainer/metrics_utils.py"
NAMES = (
    "compute_single_entropy",
    "compute_single_effective_rank",
    "compute_single_curvature",
    "calculate_diffs_for_single_sample_original",
)


def hidden():
    rng = np.random.default_rng(7)
    states = rng.normal(size=(4, 24, 6)).astype(np.float32)
    states[1] = np.cumsum(states[1], 0)
    lengths = np.array([24, 20, 9, 1])
    mask = np.arange(24) < lengths[:, None]
    return {"random": {"hidden": states, "mask": mask}}


@peer("verl_erank", "VERL", "hf618/VERL")
def main(root, writer):
    writer.inputs("hidden", hidden())
    functions = take(root / PATH, *NAMES)
    rank, differences = functions[1], functions[3]
    differences.__globals__.update(zip(NAMES, functions, strict=True))

    def growth(stride, most):
        def compute(case, a):
            rows = []
            for x, m in zip(a["hidden"], a["mask"], strict=True):
                x = torch.from_numpy(x[m])
                found = differences(x, most, stride, ["Effective Rank"], 0, 0, "full")
                series = [found[f"Effective Rank {name}"] for name in ("diff", "diff 2")]
                rows.append(
                    [rank(x, 0, 0, method="full")[0], *(np.mean(s) if s else 0.0 for s in series)]
                )
            return {"growth": np.array(rows)}

        return compute

    for stride, most in ((4, 512), (3, 16)):
        writer.add(f"growth_{stride}_{most}", growth(stride, most))
