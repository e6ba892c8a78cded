"""Writes estimators/sdpo.*: lasgroup/SDPO's loss of self-distillation."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import array, peer, take, tensor, token_inputs

CORE, FUNCTIONAL = "verl/trainer/ppo/core_algos.py", "verl/utils/torch_functional.py"
CASES = ("ragged", "holes", "length_one", "log_ratio_30")


def taught():
    """Log-probabilities of the four likeliest of six tokens; two rollouts have no teacher."""
    rng = np.random.default_rng(23)
    has_teacher = np.ones((3, 4), bool)
    has_teacher[[0, 2], [1, 3]] = False
    cases = token_inputs(("logp", "old_logp", "ref_logp", "mask"), CASES)
    for a in cases.values():
        student = 1.5 * rng.normal(size=(3, 4, 6, 6))
        teacher = student + rng.normal(size=student.shape)
        top = np.argsort(-student, axis=-1)[..., :4]
        for name, x in (("student_logp", student), ("teacher_logp", teacher)):
            log_probs = x - np.log(np.exp(x).sum(-1, keepdims=True))
            a[name] = np.take_along_axis(log_probs, top, axis=-1).astype(np.float32)
        a["has_teacher"] = has_teacher
    return cases


def loss(function, **options):
    full = options["full_logit_distillation"]
    config = SimpleNamespace(distillation_topk=4, **options)

    def compute(case, a):
        watched = tensor(case, a["student_logp" if full else "logp"]).requires_grad_()
        logp = tensor(case, a["logp"])
        value, _ = function(
            student_log_probs=logp if full else watched,
            teacher_log_probs=tensor(case, a["ref_logp"]),
            response_mask=tensor(case, a["mask"]),
            self_distillation_config=config,
            old_log_probs=tensor(case, a["old_logp"]),
            student_topk_log_probs=watched if full else None,
            teacher_topk_log_probs=tensor(case, a["teacher_logp"]),
            self_distillation_mask=torch.from_numpy(a["has_teacher"].reshape(-1)),
        )
        (gradient,) = torch.autograd.grad(value, [watched])
        shape = a["student_logp" if full else "logp"].shape
        return {"loss": array(value), "gradient": array(gradient).reshape(shape)}

    return compute


@peer("sdpo", "SDPO", "lasgroup/SDPO")
def main(root, writer):
    summed, mean = take(root / FUNCTIONAL, "masked_sum", "masked_mean")
    library = SimpleNamespace(masked_mean=mean, masked_sum=summed)
    name = "compute_self_distillation_loss"
    _, function = take(root / CORE, "agg_loss", name, verl_F=library)
    writer.inputs("taught", taught())
    tail = {"full_logit_distillation": True, "distillation_add_tail": True, "is_clip": None}
    sampled = {"full_logit_distillation": False, "alpha": 1.0}
    for label, options in (
        ("to_student", tail | {"alpha": 0.0}),
        ("to_teacher", tail | {"alpha": 1.0}),
        ("mixture", tail | {"alpha": 0.5, "is_clip": 2.0}),
        ("uneven_mixture", tail | {"alpha": 0.2}),
        ("renormalized", tail | {"alpha": 0.5, "distillation_add_tail": False}),
        ("sampled", sampled | {"is_clip": None}),
        ("sampled_weighted", sampled | {"is_clip": 2.0}),
    ):
        # The tail is what is left of 1.
        writer.add(label, loss(function, **options))
