"""Writes estimators/mc_grpo.*: lotusroot-kim/MC-GRPO's advantages and its pivot."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import passage, peer

MATH = "src/open_r1/grpo_trainer_math.py"
GSM = "src/open_r1/grpo_trainer_gsm.py"


def groups():
    """Rewards of groups of five: a median is one of them."""
    rng = np.random.default_rng(11)
    binary = [[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]
    return {
        "full": {"rewards": rng.normal(size=(3, 5)).astype(np.float32)},
        "binary": {"rewards": np.array(binary, np.float32)},
        "few_values": {"rewards": rng.integers(0, 4, (3, 5)).astype(np.float32) / 2},
    }


def run(path, output):
    """The passage of the trainer's method between the rewards and the choice of a deviation."""

    def compute(case, a):
        made = passage(
            path,
            "# Use median if mc=True",
            'if self.scale_rewards in ["group", "none"]',
            self=SimpleNamespace(args=SimpleNamespace(mc=True)),
            mode="train",
            num_generations=4,
            actual_num_generations=5,
            rewards=torch.from_numpy(a["rewards"].reshape(-1)),
        )
        return {output: made[output].numpy().reshape(a["rewards"].shape)}

    return compute


@peer("mc_grpo", "MC-GRPO", "lotusroot-kim/MC-GRPO")
def main(root, writer):
    writer.inputs("groups", groups())
    for name, path in (("math", MATH), ("gsm", GSM)):
        compute = run(root / path, "advantages")
        writer.add(name, compute)
    writer.add("pivot", run(root / MATH, "median_mask"))
