"""Writes estimators/trl_teachers.*: TRL's losses of learning from another model.

The losses are methods of trainers, which run on an object that was never initialized.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from estimator_cases import written
from trl.experimental.gkd import GKDTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.server_distillation import ServerDistillationTrainer
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl_peer import VERSIONS, array, tensor

TOP = 3


def compute(loss):
    """``loss(logits, teacher, case, arrays)`` and the gradient of its sum in the logits."""

    def run(case, a):
        logits = tensor(case, a["logits"], flat=False).requires_grad_()
        value = loss(logits, tensor(case, a["teacher_logits"], flat=False), case, a)
        (gradient,) = torch.autograd.grad(value.sum(), [logits])
        return {"loss": array(value), "gradient": array(gradient)}

    return run


def gkd(beta):
    def loss(logits, teacher, case, a):
        value = GKDTrainer.generalized_jsd_loss(logits, teacher, beta=beta, reduction="none")
        return value.sum(-1)

    return compute(loss)


def chunked(beta):
    """The hidden states are the logits, and both output matrices the identity."""

    def loss(logits, teacher, case, a):
        size = logits.shape[-1]
        heads = torch.eye(size, dtype=logits.dtype)
        flat, other = logits.reshape(-1, size), teacher.reshape(-1, size)
        value, _ = ChunkedDivergenceFunction.apply(
            flat, heads, None, other, heads.clone(), None, beta
        )
        return value.reshape(logits.shape[:-1])

    return compute(loss)


def server(tail):
    trainer = SimpleNamespace(
        loss_add_tail=tail,
        _reduce_divergence_loss=ServerDistillationTrainer._reduce_divergence_loss,
    )

    def loss(logits, teacher, case, a):
        best = torch.log_softmax(teacher, -1).topk(TOP, -1)
        result = {"topk_logprobs": best.values, "topk_token_ids": best.indices}
        labels = torch.from_numpy(a["targets"]).long()
        log_probs = torch.log_softmax(logits, -1)
        return ServerDistillationTrainer._compute_server_forward_kl_loss(
            trainer, result, log_probs, labels
        )

    return compute(loss)


def iw_opd(gamma):
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=gamma,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )

    def loss(logits, teacher, case, a):
        targets = torch.from_numpy(a["targets"]).long()
        of_teacher = torch.log_softmax(teacher, -1).gather(-1, targets[..., None])[..., 0]
        old = tensor(case, a["old_logp"], flat=False)
        return IWOPDTrainer._compute_iw_opd_loss(
            trainer, logits, targets, targets, of_teacher, rollout_logprobs=old
        )

    return compute(loss)


@written("trl_teachers", "trl", VERSIONS)
def main(writer):

    writer.each("generalized_jsd_loss", gkd)
    writer.each("ChunkedDivergenceFunction", chunked)
    writer.add("server_tail", server(True))
    writer.add("server_renormalized", server(False))
    for gamma in (0.0, 0.5):
        writer.add(f"iw_opd_{gamma}", iw_opd(gamma))
