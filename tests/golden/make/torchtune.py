"""Writes estimators/torchtune.*: the losses of pairs of pytorch/torchtune.

python tests/golden/make/torchtune.py CHECKOUT COMMIT

On our pairs, and on those of its own test of these losses.
"""

from types import SimpleNamespace

import numpy as np
from paper_code import peer, take
from preference_cases import pair_cases, pair_losses

PATH = "torchtune/rlhf/loss/dpo.py"


def test_cases():
    """The pairs of tests/torchtune/rlhf/loss/test_dpo_loss.py, each response one token."""
    logp = np.float32([[-0.5, -10.0, -1.0], [-0.1, -30.0, -21.0]])
    ref_logp = np.float32([[-0.5, -10.1, -0.1], [-0.1, -20.1, -0.1]])
    chosen = np.zeros(3, bool)
    arrays = {"logp": logp, "ref_logp": ref_logp, "mask": np.ones(logp.shape, bool)}
    return {"test": {k: x[..., None] for k, x in arrays.items()} | {"policy_chosen": chosen}}


def loss(function):
    def losses(logp, ref, a):
        sides = [SimpleNamespace(chosen_logps=x[0], rejected_logps=x[1]) for x in (logp, ref)]
        return function.forward(*sides)[0]

    return pair_losses(losses)


@peer("torchtune", "torchtune", "pytorch/torchtune")
def main(root, writer):
    writer.inputs("pairs", pair_cases())
    writer.inputs("test", test_cases())
    _, dpo, rso = take(root / PATH, "PreferenceLoss", "DPOLoss", "RSOLoss")
    for made in (dpo, rso):
        writer.each(made.__name__, lambda made=made, **options: loss(made(**options)))
