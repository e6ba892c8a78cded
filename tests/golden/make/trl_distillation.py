"""Writes estimators/trl_distillation.*: the losses of TRL's self-distillation."""

import torch
from estimator_cases import written
from trl.experimental.sdpo import loss_utils
from trl_peer import VERSIONS, array, tensor


def distillation(function, clip=None, **options):
    def compute(case, a):
        logits = tensor(case, a["logits"], flat=False).requires_grad_()
        teacher = tensor(case, a["teacher_logits"], flat=False)
        more = {}
        if function is loss_utils.compute_sampled_token_self_distillation_loss:
            more["completion_ids"] = torch.from_numpy(a["targets"]).long()
        value = function(logits, teacher, **more, **options)
        if clip is not None:
            chosen = torch.log_softmax(logits, -1).gather(
                -1, torch.from_numpy(a["targets"]).long()[..., None]
            )[..., 0]
            old = tensor(case, a["old_logp"], flat=False)
            value = loss_utils.apply_importance_sampling_clipping(value, chosen, old, clip)
        (gradient,) = torch.autograd.grad(value.sum(), [logits])
        return {"loss": array(value), "gradient": array(gradient)}

    return compute


def add_distillation(writer):
    full = loss_utils.compute_full_logit_self_distillation_loss
    for alpha in (0.0, 0.5, 0.3, 1.0):
        arguments = {"distillation_alpha": alpha}
        compute = distillation(full, **arguments)
        writer.add(f"sdpo_full_{alpha}", compute)
    some = loss_utils.compute_topk_self_distillation_loss
    for tail in (True, False):
        arguments = {
            "distillation_topk": 3,
            "distillation_alpha": 0.5,
            "distillation_add_tail": tail,
        }
        writer.add(
            "sdpo_top_tail" if tail else "sdpo_top_renormalized", distillation(some, **arguments)
        )
    sampled = loss_utils.compute_sampled_token_self_distillation_loss
    for clip in (None, 2.0):
        arguments = {"distillation_alpha": 1.0}
        writer.add(
            "sdpo_sampled" if clip is None else "sdpo_sampled_clipped",
            distillation(sampled, clip=clip, **arguments),
        )


@written("trl_distillation", "trl", VERSIONS)
def main(writer):
    add_distillation(writer)
