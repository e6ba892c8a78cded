"""Writes estimators/drpo.*: Optimization-AI/DRPO's loss."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import loss_of, peer, take, tensor, token_inputs

CORE, FUNCTIONAL = "verl/verl/trainer/ppo/core_algos.py", "verl/verl/utils/torch_functional.py"
CASES = ("ragged", "on_policy", "holes", "length_one", "bfloat16")
RIGHT = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]], np.float32)


def loss(function, **options):
    def compute(case, a, logp):
        return function(
            old_log_prob=tensor(case, a["old_logp"]),
            log_prob=logp,
            eos_mask=tensor(case, a["mask"]),
            uid=torch.arange(3).repeat_interleave(4),
            seq_level_rewards=torch.from_numpy(a["rewards"].reshape(-1)),
            **options,
        )[0]

    return loss_of(compute)


@peer("drpo", "DRPO", "Optimization-AI/DRPO")
def main(root, writer):
    (masked_mean,) = take(root / FUNCTIONAL, "masked_mean")
    name = "compute_policy_loss_drpo"
    (function,) = take(root / CORE, name, verl_F=SimpleNamespace(masked_mean=masked_mean))
    names = ("logp", "old_logp", "mask")
    writer.inputs("answers", token_inputs(names, CASES, rewards=RIGHT))
    default = {"delta": 1e-4, "beta": 0.0, "tau": 10.0, "Lambda": 0.1, "kl_type": "kl"}
    for label, changed in (
        ("objective", {}),
        ("sharp", {"tau": 0.5, "Lambda": 0.5}),
        ("kl", {"beta": 10.0}),
        ("low_var_kl", {"beta": 10.0, "kl_type": "low_var_kl"}),
    ):
        options = default | changed
        writer.add(label, loss(function, **options))
