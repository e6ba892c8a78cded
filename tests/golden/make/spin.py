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
    writer.add("sigmoid", pair_losses(lambda logp, ref, a: function(trainer, *logp, *ref)[0]))
