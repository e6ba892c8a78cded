"""Writes tests/golden/estimators/swift_losses.*: ms-swift's loss of dynamic fine-tuning.

    python tests/golden/make/swift_losses.py PACKAGE

PACKAGE is the folder of the unpacked wheel, which is not imported.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from estimator_cases import Writer
from paper_code import array, take
from torch_arrays import tensor

VERSION = "4.6.0"
UTILS = "swift/trainers/utils.py"


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
    writer.save()


if __name__ == "__main__":
    main()
