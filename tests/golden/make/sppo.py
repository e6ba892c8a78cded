"""Writes estimators/sppo.*: the loss of uclaml/SPPO."""

from types import SimpleNamespace

from paper_code import peer, take
from preference_cases import pair_cases, pair_losses

PATH = "sppo/trainer.py"


def loss(function, loss_type):
    trainer = SimpleNamespace(
        loss_type=loss_type,
        beta=0.3,
        label_smoothing=0.1,
        accelerator=SimpleNamespace(device="cpu"),
    )

    def losses(logp, ref, a):
        win = a["win_rates"]
        more = {"chosen_probs_win": win[0], "chosen_probs_lose": win[1]}
        if loss_type == "sppo_single":
            more = {"chosen_probs": win[0]}
        return function(trainer, *logp, *ref, **more)[0]

    return pair_losses(losses)


@peer("sppo", "SPPO", "uclaml/SPPO")
def main(root, writer):
    writer.inputs("pairs", pair_cases())
    (function,) = take(root / PATH, "sppo_loss")
    for loss_type in ("sppo", "sppo_single", "sigmoid", "ipo"):
        writer.add(loss_type, loss(function, loss_type))
