"""Writes estimators/luffy.*: ElliottYan/LUFFY's loss and advantages."""

from types import SimpleNamespace

import torch
from guided_cases import guided_cases, steered_tokens
from paper_code import loss_of, peer, spread, take, tensor

CORE = "luffy/verl/verl/mix_src/mix_core_alg.py"
FUNCTIONAL = "luffy/verl/verl/utils/torch_functional.py"


def loss(function, **options):
    def compute(case, a, logp):
        return function(
            old_log_prob=tensor(case, a["old_logp"]),
            log_prob=logp,
            advantages=spread(case, a),
            eos_mask=tensor(case, a["mask"]),
            prefix_mask=torch.from_numpy(steered_tokens(a)),
            off_cliprange=None,
            **options,
        )["pg_loss"]

    return loss_of(compute)


@peer("luffy", "LUFFY", "ElliottYan/LUFFY")
def main(root, writer):
    (mean,) = take(root / FUNCTIONAL, "masked_mean")
    given = {"verl_F": SimpleNamespace(masked_mean=mean), "print": lambda *_: None}
    name = "compute_token_on_off_policy_loss"
    (function,) = take(root / CORE, name, **given)
    writer.inputs("guided", guided_cases())
    clip = {"cliprange": 0.2, "clip_upper_bound": 1.0}
    for label, options in (
        ("script", {"loss_remove_clip": True, "loss_remove_token_mean": True}),
        ("clipped", {"loss_remove_clip": False, "loss_remove_token_mean": False}),
    ):
        options = clip | {"off_policy_reshape": "p_div_p_0.1"} | options
        writer.add(label, loss(function, **options))
    wider = clip | {"off_policy_reshape": "p_div_p_0.5"}
    writer.add("wider", loss(function, **wider))
