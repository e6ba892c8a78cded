"""Writes tests/golden/estimators/spin.*: the loss of uclaml/SPIN.

python tests/golden/make/spin.py CHECKOUT COMMIT
"""

from types import SimpleNamespace

from paper_code import start, take
from preference_cases import pair_cases, pair_losses

PATH = "spin/alignment/trainer.py"


def main():
    root, writer = start("spin", "SPIN", "uclaml/SPIN")
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
    writer.save()


if __name__ == "__main__":
    main()
