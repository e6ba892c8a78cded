"""Writes estimators/mnpo.*: the loss of smiles724/MNPO."""

from types import SimpleNamespace

from paper_code import peer, take
from preference_cases import pair_cases, pair_losses

PATH = "mnpo_scripts/mnpo_trainer.py"


def loss(function, weights, count):
    trainer = SimpleNamespace(
        ratio=1 / 3,
        eta=0.25,
        beta=10.0,
        max_history_t=2,
        weights=weights,
        accelerator=SimpleNamespace(device="cpu"),
    )

    def losses(logp, ref, a):
        history = [tuple(a["history_logp"][..., j]) for j in range(count)]
        return function(trainer, *logp, *ref, history)[0]

    return pair_losses(losses)


@peer("mnpo", "MNPO", "smiles724/MNPO")
def main(root, writer):
    writer.inputs("pairs", pair_cases())
    (function,) = take(root / PATH, "mnpo_loss")
    for name, weights, count in (
        ("inpo", [1.0, 0.0], 1),
        ("mnpo", [1.0, 3.0], 2),
        ("first_iteration", [1.0, 0.0], 0),
    ):
        writer.add(name, loss(function, weights, count))
