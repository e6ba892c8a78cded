"""Writes estimators/simpo.*: the loss of princeton-nlp/SimPO."""

from types import SimpleNamespace

from paper_code import peer, take
from preference_cases import pair_cases, pair_losses

PATH = "scripts/simpo_trainer.py"


def loss(function, smoothing):
    trainer = SimpleNamespace(
        loss_type="sigmoid",
        beta=2.0,
        gamma_beta_ratio=0.5,
        label_smoothing=smoothing,
        accelerator=SimpleNamespace(device="cpu"),
    )

    def losses(logp, ref, a):
        # Its trainer averages the log-probabilities before.
        return function(trainer, *(logp / a["mask"].sum(-1)))[0]

    return pair_losses(losses)


@peer("simpo", "SimPO", "princeton-nlp/SimPO")
def main(root, writer):
    writer.inputs("pairs", pair_cases())
    (function,) = take(root / PATH, "simpo_loss")
    for name, smoothing in (("simpo", 0.0), ("smoothed", 0.1)):
        writer.add(name, loss(function, smoothing))
