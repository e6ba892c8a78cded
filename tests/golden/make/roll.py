"""Writes estimators/roll.*: the loss of TOPR in ROLL."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import peer, take
from torch_arrays import array, tensor, tokens

WORKER = "roll/pipeline/rlvr/actor_pg_worker.py"


@peer("roll", "ROLL", "alibaba/ROLL")
def main(root, writer):
    (function,) = take(root / WORKER, "_compute_topr_loss", DataProto=None)
    worker = SimpleNamespace(
        _get_or_cache_config=lambda name, default: default,
        _topr_sample_logged=True,
        _cached_metrics={},
    )

    def topr(case, a):
        logp = tensor(case, a["logp"]).requires_grad_()
        old, mask = tensor(case, a["old_logp"]), tensor(case, a["mask"])
        scores = tensor(case, a["advantages"][..., None])[:, 0]
        each = np.broadcast_to(a["advantages"][..., None], a["mask"].shape)
        # Its sign is that of the score, which a trainer gives beside the advantage.
        data = SimpleNamespace(batch={"scores": scores})
        ratio = (logp - old).exp()
        value = function(worker, ratio, logp, old, tensor(case, each), data) * mask
        (gradient,) = torch.autograd.grad(value.float().sum(), [logp])
        return {
            "loss": array(value.float().sum()),
            "gradient": tokens(gradient),
            "token_loss": tokens(value),
        }

    writer.add("topr", topr)
