"""Writes estimators/fipo.*: the loss of qwenpilot/FIPO."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import peer, take
from torch_arrays import array, tensor, tokens

CORE = "verl/trainer/ppo/core_algos.py"
HELPERS = "verl/utils/torch_functional.py"
# The released script, and options with which all rules act on the shared inputs.
OPTIONS = {
    "script": {"clip_ratio_c": 10.0, "decay_rate": 32.0, "high_only": True, "safety_thresh": 10.0},
    "tight": {"clip_ratio_c": 1.2, "decay_rate": 2.0, "high_only": False, "safety_thresh": 1.1},
}


class Config(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


@peer("fipo", "FIPO", "qwenpilot/FIPO")
def main(root, writer):
    masked_mean, _ = take(root / HELPERS, "masked_mean", "masked_sum")

    def summed(loss_mat, loss_mask, loss_agg_mode):
        summed.tokens = loss_mat * loss_mask
        return summed.tokens.float().sum()

    (function,) = take(
        root / CORE,
        "compute_policy_loss_future_kl",
        AlgoConfig=dict,
        verl_F=SimpleNamespace(masked_mean=masked_mean),
        agg_loss=summed,
    )

    def loss(clip_ratio_c, decay_rate, high_only, safety_thresh):
        policy_loss = {
            "decay_rate": decay_rate,
            "future_kl_clip_ratio": 0.2,
            "future_kl_clip_high_only": high_only,
            "safety_thresh": safety_thresh,
        }
        config = Config(
            clip_ratio=0.2,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=clip_ratio_c,
            policy_loss=policy_loss,
        )

        def compute(case, a):
            logp = tensor(case, a["logp"]).requires_grad_()
            each = np.broadcast_to(a["advantages"][..., None], a["mask"].shape)
            value, *_ = function(
                tensor(case, a["old_logp"]),
                logp,
                tensor(case, each),
                tensor(case, a["mask"]),
                config=config,
            )
            (gradient,) = torch.autograd.grad(value, [logp])
            return {
                "loss": array(value),
                "gradient": tokens(gradient),
                "token_loss": tokens(summed.tokens),
            }

        return compute

    for name, options in OPTIONS.items():
        writer.add(name, loss(**options))
