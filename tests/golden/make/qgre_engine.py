"""Writes estimators/qgre_engine.*: torad-labs/qgre-engine's reading of LLDS."""

import torch
from paper_code import array, peer, spread, take, tensor, token_inputs

PATH = "qgre/nemo_extracted/llds.py"
CASES = ("ragged", "holes", "length_one", "zero_advantage", "bfloat16")


def displacement(function):
    def compute(case, a):
        logp = tensor(case, a["logp"]).requires_grad_()
        rows = (tensor(case, a["old_logp"]), spread(case, a), tensor(case, a["mask"]))
        loss, chosen = function(logp, *rows)
        (gradient,) = torch.autograd.grad(loss, [logp])
        outputs = {"loss": array(loss), "gradient": array(gradient).reshape(3, 4, 6)}
        return outputs | {"chosen": chosen.bool().numpy().reshape(3, 4, 6)}

    return compute


@peer("qgre_engine", "qgre-engine", "torad-labs/qgre-engine")
def main(root, writer):
    (function,) = take(root / PATH, "compute_llds_loss")
    names = ("logp", "old_logp", "advantages", "mask")
    writer.inputs("answers", token_inputs(names, CASES))
    writer.add("displacement", displacement(function))
