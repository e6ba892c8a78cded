"""Writes estimators/trl_removed.*: losses of preferences that TRL has no more.

The losses are methods of trainers, which run on an object that was never initialized.
"""

from types import SimpleNamespace

import torch
from estimator_cases import written
from preference_cases import pair_cases, response_cases
from torch_arrays import array
from trl.experimental.bco import BCOTrainer
from trl.experimental.bco.bco_trainer import RunningMoments
from trl.experimental.nash_md import NashMDTrainer
from trl.experimental.xpo import XPOTrainer
from trl_peer import ACCELERATOR, VERSIONS


def bco(case, a):
    """Two batches, so that the running mean has a past: the references of the first are half."""
    made = object.__new__(BCOTrainer)
    accelerator = SimpleNamespace(**vars(ACCELERATOR), use_distributed=False)
    vars(made).update(beta=0.3, embedding_func=None, accelerator=accelerator)
    made.running = RunningMoments(accelerator)
    good, mask = torch.from_numpy(a["desirable"]), torch.from_numpy(a["mask"])
    logp = torch.from_numpy(a["logp"]).requires_grad_()
    for part in (0.5, 1.0):
        sums, ref = (logp * mask).sum(1), part * (torch.from_numpy(a["ref_logp"]) * mask).sum(1)
        losses, _, _, delta = made.bco_loss(
            sums[good], sums[~good], ref[good], ref[~good], None, None
        )
    loss = losses.nanmean()
    (gradient,) = torch.autograd.grad(loss, [logp])
    return {"loss": array(loss), "gradient": array(gradient), "center": array(delta)}


def nash_md(case, a):
    made = object.__new__(NashMDTrainer)
    made._beta = 0.3
    mask = torch.from_numpy(a["mask"])
    logp = torch.from_numpy(a["logp"]).requires_grad_()
    ref = torch.from_numpy(a["ref_logp"]) * mask
    loss, _, _ = made._compute_losses(logp * mask, ref, torch.from_numpy(a["win_rate"]))
    (gradient,) = torch.autograd.grad(loss, [logp])
    return {"loss": array(loss), "gradient": array(gradient)}


def xpo(loss_type):
    def compute(case, a):
        made = object.__new__(XPOTrainer)
        made._beta, made._alpha = 0.3, 0.01
        made.args = SimpleNamespace(loss_type=loss_type)
        ours = torch.from_numpy(a["policy_chosen"])
        mask = torch.from_numpy(a["mask"])
        logp = torch.from_numpy(a["logp"]).requires_grad_()
        ref = torch.from_numpy(a["ref_logp"]) * mask

        def samples(x):
            """Of the policy, then of the reference."""
            which = ours[:, None]
            return torch.where(which, x[0], x[1]), torch.where(which, x[1], x[0])

        (mine, other), (ref_mine, ref_other) = samples(logp * mask), samples(ref)
        loss, _, _ = made._compute_losses(mine, other, ref_other, ref_mine, ours)
        (gradient,) = torch.autograd.grad(loss, [logp])
        return {"loss": array(loss), "gradient": array(gradient)}

    return compute


@written("trl_removed", "trl", VERSIONS)
def main(writer):
    writer.inputs("pairs", pair_cases())
    writer.inputs("responses", response_cases())
    writer.add("bco", bco)
    writer.add("nash_md", nash_md)
    for loss_type in ("sigmoid", "ipo"):
        writer.add(f"xpo_{loss_type}", xpo(loss_type))
