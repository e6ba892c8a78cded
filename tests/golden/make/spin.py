"""Writes estimators/spin.*: the loss of uclaml/SPIN."""

from types import SimpleNamespace

from paper_code import peer, take
from preference_cases import pair_cases, pair_losses

PATH = "spin/alignment/trainer.py"


@peer("spin", "SPIN", "uclaml/SPIN")
def main(root, writer):
    writer.inputs("pairs", pair_cases())
    (function,) = take(root / PATH, "spin_loss")
    trainer = SimpleNamespace(loss_type="sigmoid", beta=0.3)
    writer.add(
        "sigmoid",
        ["spin"],
        f"{PATH}: SPINTrainer.spin_loss",
        pair_losses(lambda logp, ref, a: function(trainer, *logp, *ref)[0]),
        inputs="pairs",
        tolerance={"float32": 1e-4},
        arguments={"loss_type": "sigmoid", "beta": 0.3},
        note="the real responses are the chosen ones, the generated the rejected",
    )
