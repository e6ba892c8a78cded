"""Writes estimators/trinity.*: CHORD's loss in Trinity-RFT.

    python tests/golden/make/trinity.py PACKAGE

PACKAGE is the folder of the unpacked wheel, which is not imported.
"""

import sys
from pathlib import Path

import torch
from estimator_cases import written
from guided_cases import guided_cases
from paper_code import loss_of, spread, take, tensor

VERSION = "0.6.0"
FOLDER = "trinity/algorithm"
CHORD = f"{FOLDER}/policy_loss_fn/chord_policy_loss.py"


class Base:
    """The base class of its losses, without its table of names."""

    def __init__(self, backend):
        self.backend = backend


@written("trinity", "Trinity-RFT", ["torch", "numpy"], version=VERSION)
def main(writer):
    root = Path(sys.argv[1])
    losses = root / FOLDER / "policy_loss_fn"
    names = ("aggregate_loss", "masked_mean", "masked_sum")
    total, mean, _ = take(root / FOLDER / "utils.py", *names)
    given = {"PolicyLossFn": Base, "aggregate_loss": total, "masked_mean": mean}
    (ppo,) = take(losses / "ppo_policy_loss.py", "PPOPolicyLossFn", **given)
    (sft,) = take(losses / "sft_loss.py", "SFTLossFn", **given)
    names = ("MIXCHORDPolicyLossFn", "SFTPhiLossFn", "phi_function", "mu_schedule_function")
    given |= {"PPOPolicyLossFn": ppo, "SFTLossFn": sft}
    chord = take(root / CHORD, *names, **given)[0]

    def loss(step, **options):
        def compute(case, a, logp):
            steered = torch.from_numpy(a["steered"].reshape(-1))
            sizes = {
                "ppo_mini_batch_size": len(steered),
                "train_batch_size_usual": int((~steered).sum()),
                "train_batch_size_expert": int(steered.sum()),
            }
            function = chord(use_dynamic_bsz=True, clip_range=0.2, **options, **sizes)
            value, _ = function(
                logp,
                tensor(case, a["old_logp"]),
                tensor(case, a["mask"]),
                spread(case, a),
                steered,
                torch.full((len(steered),), step),
            )
            return value

        return loss_of(compute)

    writer.inputs("guided", guided_cases())
    schedule = {"mu_warmup_steps": 4, "mu_decay_steps": 10, "mu_peak": 0.9, "mu_valley": 0.05}
    for label, step, options in (
        ("phi", 0, {}),
        ("mu", 0, {"enable_phi_function": False, "mu_peak": 0.9, "mu_decay_steps": 200}),
        ("warmup", 3, {"enable_phi_function": False} | schedule),
        ("decay", 7, schedule),
        ("valley", 20, schedule),
    ):
        writer.add(label, loss(step, **options))
