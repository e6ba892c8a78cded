"""Writes estimators/verl_gvpo.*: the loss of GVPO in the authors' verl recipe."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import loss_of, peer, spread, take, tensor, token_inputs

CORE = "gvpo/gvpo_core_algos.py"
NAME = "compute_policy_loss_gvpo"
CASES = ("ragged", "on_policy", "holes", "length_one", "bfloat16")
REWARDS = np.array([[1, 0, 1, 0], [0.5, 0.5, 0.5, 0.5], [0, 0, 0, 1]], np.float32)


@peer("verl_gvpo", "verl-recipe", "verl-project/verl-recipe")
def main(root, writer):
    # One device has all groups, so there is nothing to gather.
    mesh = SimpleNamespace(_flatten=lambda: SimpleNamespace(get_group=lambda: None))
    distributed = SimpleNamespace(get_world_size=lambda group: 1)
    (function,) = take(
        root / CORE,
        NAME,
        torch=SimpleNamespace(unique=torch.unique, distributed=distributed),
        allgather_dict_tensors=lambda data, size, group: data,
    )
    names = ("logp", "old_logp", "mask")
    advantages = REWARDS - REWARDS.mean(-1, keepdims=True)
    writer.inputs("groups", token_inputs(names, CASES, rewards=REWARDS))
    for beta in (0.1, 1.0):

        def compute(case, a, logp, beta=beta):
            return function(
                old_log_prob=tensor(case, a["old_logp"]),
                log_prob=logp,
                advantages=spread(case, a | {"advantages": advantages}),
                response_mask=tensor(case, a["mask"]),
                beta=beta,
                uid=torch.arange(3).repeat_interleave(4),
                device_mesh=mesh,
                n=4,
            )

        writer.add(f"beta_{beta:g}", loss_of(compute))
