"""Writes tests/golden/estimators/swift_losses.*: ms-swift's losses and advantages of papers.

    python tests/golden/make/swift_losses.py PACKAGE

PACKAGE is the folder of the unpacked wheel, which is not imported.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from estimator_cases import Writer
from paper_code import array, take
from torch_arrays import tensor, tokens

VERSION = "4.6.0"
UTILS = "swift/trainers/utils.py"
ADVANTAGE = "swift/rl_core/advantage.py"


def main():
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

    writer = Writer(
        "swift_losses", "ms-swift", ["torch", "numpy"], "swift_losses.py", version=VERSION
    )
    writer.add(
        "dft",
        ["dft"],
        f"{UTILS}: per_token_loss_func",
        dft,
        inputs="vocabulary",
        arguments={"enable_dft_loss": True},
        tolerance={"float32": 1e-4, "bfloat16": 5e-2},
    )
    for name, options in (
        ("rlsd", {"lam": 0.5, "clip_range": 0.2}),
        ("rlsd_negative", {"lam": 1.0, "clip_range": 0.4, "negative_only": True}),
    ):
        writer.add(
            name,
            ["rlsd"],
            f"{ADVANTAGE}: apply_rlsd_reweight",
            rlsd(**options),
            inputs="tokens",
            arguments=options,
            note="the teacher's log-probabilities are logp",
        )
    writer.save()


if __name__ == "__main__":
    main()
