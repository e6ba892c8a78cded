"""Writes estimators/real.*: Red-RL/REAL's loss."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import loss_of, peer, take, tensor, token_inputs

CORE, FUNCTIONAL = "verl/verl/trainer/ppo/core_algos.py", "verl/verl/utils/torch_functional.py"
CASES = ("ragged", "on_policy", "holes", "length_one", "log_ratio_30", "bfloat16")
RIGHT = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]], np.float32)


@peer("real", "REAL", "Red-RL/REAL")
def main(root, writer):
    (masked_mean,) = take(root / FUNCTIONAL, "masked_mean")
    name = "compute_policy_loss_real"
    (function,) = take(root / CORE, name, verl_F=SimpleNamespace(masked_mean=masked_mean))

    def loss(tau):
        def compute(case, a, logp):
            return function(
                old_log_prob=tensor(case, a["old_logp"]),
                log_prob=logp,
                advantages=None,
                eos_mask=tensor(case, a["mask"]),
                uid=torch.arange(3).repeat_interleave(4),
                seq_level_rewards=torch.from_numpy(a["rewards"].reshape(-1)),
                delta=1e-4,
                tau=tau,
            )[0]

        return loss_of(compute)

    writer.inputs("answers", token_inputs(("logp", "old_logp", "mask"), CASES, rewards=RIGHT))
    for label, tau in (("script", 0.5), ("soft", 2.0)):
        writer.add(label, loss(tau))
