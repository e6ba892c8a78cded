"""Writes estimators/trl_losses.*: TRL's loss types on the shared inputs.

A loss is stored with its gradient in the log-probabilities and with its token losses as weighted by
the aggregation: the latter are the gradient in `importance_sampling_ratio` at ones, TRL's own
factor on every token loss.
"""

import functools

import numpy as np
import torch
from estimator_cases import written
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl_peer import VERSIONS, array, tensor, tokens, trainer


def policy_loss(kind, advantages, weighted, **options):
    # What these losses give a token is not its own.
    token_loss = not weighted and options["loss_type"] not in ("vespo", "gmpo")

    def compute(case, a):
        made = trainer(kind, **options)
        logp = tensor(case, a["logp"]).requires_grad_()
        entropies = tensor(case, a["entropy"])
        made._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp, entropies, None)
        mask = tensor(case, a["mask"])
        weight = tensor(case, a["weight"])
        weight = (weight if weighted else torch.ones_like(weight)).requires_grad_()
        made.use_vllm = weighted or token_loss
        loss = made._compute_loss(
            made.model,
            {
                "prompt_ids": torch.zeros(12, 1, dtype=torch.long),
                "prompt_mask": torch.ones(12, 1, dtype=torch.long),
                "completion_ids": torch.zeros(12, 6, dtype=torch.long),
                "completion_mask": mask,
                "advantages": tensor(case, a[advantages]),
                "old_per_token_logps": tensor(case, a["old_logp"]),
                "ref_per_token_logps": tensor(case, a["ref_logp"]),
                "sampling_per_token_logps": tensor(case, a["behavior_logp"]),
                "importance_sampling_ratio": weight if made.use_vllm else None,
                "num_items_in_batch": mask.sum(),
            },
        )
        if not token_loss:
            (gradient,) = torch.autograd.grad(loss, [logp])
            return {"loss": array(loss), "gradient": tokens(gradient)}
        gradient, each = torch.autograd.grad(loss, [logp, weight])
        outputs = {"loss": array(loss), "gradient": tokens(gradient)}
        return outputs if weighted else outputs | {"token_loss": tokens(each)}

    return compute


def entropy_controller(case, a):
    """The coefficient that is applied and kept, over twelve steps of one sequence each."""
    made = trainer(
        _entropy_bonus_enabled=True,
        use_adaptive_entropy=True,
        entropy_coef=0.01,
        entropy_target=0.8,
        entropy_coef_max=0.02,
        loss_type="bnpo",
    )
    kept, applied = [], []
    for row in range(12):
        logp = tensor(case, a["old_logp"])[row : row + 1]
        # Any positive numbers will do, and the sizes of advantages are given for every sequence.
        entropies = torch.full((1, 6), abs(a["advantages"].reshape(-1)[row]))
        made._get_per_token_logps_and_entropies = lambda *_, x=(logp, entropies), **__: (*x, None)
        mask = torch.ones_like(logp)
        loss = made._compute_loss(
            made.model,
            {
                "prompt_ids": torch.zeros(1, 1, dtype=torch.long),
                "prompt_mask": torch.ones(1, 1, dtype=torch.long),
                "completion_ids": torch.zeros(1, 6, dtype=torch.long),
                "completion_mask": mask,
                "advantages": torch.zeros(1),
                "num_items_in_batch": mask.sum(),
            },
        )
        applied.append(float(-loss / entropies.mean()))
        kept.append(made.entropy_coef)
    return {"coef": np.array(kept), "applied": np.array(applied)}


@written("trl_losses", "trl", VERSIONS)
def main(writer):
    writer.add("entropy_controller", entropy_controller)
    writer.each(".GRPOTrainer._compute_loss", functools.partial(policy_loss, GRPOTrainer))
    writer.each(".GMPOTrainer._compute_loss", functools.partial(policy_loss, GMPOTrainer))
