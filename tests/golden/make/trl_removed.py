"""Writes estimators/trl_removed.*: losses of preferences that TRL has no more.

Run from the repository root with a Python that has trl 1.13.0, transformers and torch:

    python tests/golden/make/trl_removed.py

The losses are methods of trainers, which run on an object that was never initialized.
"""

from types import SimpleNamespace

import torch
from estimator_cases import Writer
from preference_cases import pair_cases, response_cases
from torch_arrays import array
from trl.experimental.bco import BCOTrainer
from trl.experimental.bco.bco_trainer import RunningMoments
from trl.experimental.nash_md import NashMDTrainer
from trl.experimental.xpo import XPOTrainer
from trl_peer import ACCELERATOR, VERSIONS

TOLERANCE = {"float32": 1e-4}


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


def main():
    writer = Writer("trl_removed", "trl", VERSIONS, "trl_removed.py")
    writer.inputs("pairs", pair_cases())
    writer.inputs("responses", response_cases())
    writer.add(
        "bco",
        ["bco"],
        "trl.experimental.bco.BCOTrainer.bco_loss",
        bco,
        inputs="responses",
        tolerance=TOLERANCE,
        arguments={"beta": 0.3},
    )
    writer.add(
        "nash_md",
        ["nash_md"],
        "trl.experimental.nash_md.NashMDTrainer._compute_losses",
        nash_md,
        inputs="responses",
        tolerance=TOLERANCE,
        arguments={"beta": 0.3},
    )
    for loss_type in ("sigmoid", "ipo"):
        writer.add(
            f"xpo_{loss_type}",
            ["xpo"],
            "trl.experimental.xpo.XPOTrainer._compute_losses",
            xpo(loss_type),
            inputs="pairs",
            tolerance=TOLERANCE,
            arguments={"beta": 0.3, "alpha": 0.01, "loss_type": loss_type},
        )
    writer.save()


if __name__ == "__main__":
    main()
