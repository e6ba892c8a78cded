"""Writes estimators/swift_losses.*: ms-swift's losses and advantages of papers.

    python tests/golden/make/swift_losses.py PACKAGE

PACKAGE is the folder of the unpacked wheel, which is not imported.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import written
from paper_code import array, passage, take
from torch_arrays import tensor, tokens

VERSION = "4.6.0"
UTILS = "swift/trainers/utils.py"
ADVANTAGE = "swift/rl_core/advantage.py"
TRAINER = "swift/rlhf_trainers/grpo_trainer.py"


def per_token(loss):
    """Value and gradient of `loss(logp, old_logp, advantages, mask)`, all by token."""

    def compute(case, a):
        logp = tensor(case, a["logp"]).requires_grad_()
        each = np.broadcast_to(a["advantages"][..., None], a["mask"].shape)
        mask = tensor(case, a["mask"]).bool()
        value = loss(logp, tensor(case, a["old_logp"]), tensor(case, each), mask)
        (gradient,) = torch.autograd.grad(value, [logp])
        return {"loss": array(value), "gradient": tokens(gradient)}

    return compute


def fipo(path):
    """The sum over tokens."""
    (influence,) = take(path, "_compute_fipo_influence", Tuple=None, Dict=None)
    trainer = SimpleNamespace(
        args=SimpleNamespace(delta=10.0),
        fipo_gamma=2 ** (-1 / 32.0),
        fipo_clip_range=0.2,
        fipo_clip_high_only=True,
        fipo_safety_threshold=4.0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        loss_type="fipo",
    )

    def loss(logp, old_logp, advantages, mask):
        log_ratio = logp - old_logp
        coef_1 = torch.exp(log_ratio)
        weight, _ = influence(trainer, log_ratio, coef_1, advantages, mask)
        found = passage(
            path,
            "coef_2 = torch.clamp",
            "if entropy_mask is not None",
            self=trainer,
            coef_1=coef_1,
            advantages=advantages,
            fipo_weight=weight,
        )
        return (found["per_token_loss"] * mask).sum()

    return loss


def real(path):
    trainer = SimpleNamespace(num_generations=4, real_tau=0.5)

    def loss(logp, old_logp, advantages, mask):
        return passage(
            path,
            "global_scores = (log_ratio",
            "if self.beta != 0.0",
            self=trainer,
            log_ratio=logp - old_logp,
            completion_mask=mask,
            advantages=advantages,
        )["loss"]

    return loss


@written("swift_losses", "ms-swift", ["torch", "numpy"], version=VERSION)
def main(writer):
    (function,) = take(Path(sys.argv[1]) / UTILS, "per_token_loss_func", Optional=None)

    def dft(case, a):
        logits = tensor(case, a["logits"], flat=False).requires_grad_()
        # It predicts each token from the one before.
        labels = torch.roll(torch.from_numpy(a["targets"]).long().reshape(-1), 1)
        outputs = SimpleNamespace(logits=logits.reshape(-1, logits.shape[-1]))
        loss = function(outputs, labels, enable_dft_loss=True).mean()
        (gradient,) = torch.autograd.grad(loss, [logits])
        return {"loss": array(loss), "gradient": array(gradient)}

    (reweight,) = take(Path(sys.argv[1]) / ADVANTAGE, "apply_rlsd_reweight")

    def rlsd(**options):
        def compute(case, a):
            found = reweight(
                tensor(case, a["advantages"][..., None])[:, 0],
                tensor(case, a["mask"]),
                tensor(case, a["logp"]),
                tensor(case, a["old_logp"]),
                **options,
            )
            return {"advantages": tokens(found)}

        return compute

    writer.add("dft", dft)
    writer.each("apply_rlsd_reweight", rlsd)
    path = Path(sys.argv[1]) / TRAINER
    writer.add("fipo", per_token(fipo(path)))
    writer.add("real", per_token(real(path)))
