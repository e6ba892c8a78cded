"""Writes estimators/trl_losses.*: TRL's loss types on the shared inputs.

Run from the repository root with a Python that has trl, transformers and torch:

    python tests/golden/make/trl_losses.py

A loss is stored with its gradient in the log-probabilities and with its token losses as weighted by
the aggregation: the latter are the gradient in `importance_sampling_ratio` at ones, TRL's own
factor on every token loss.
"""

import numpy as np
import torch
from estimator_cases import Writer
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl_peer import LOSS, VERSIONS, array, tensor, tokens, trainer


def policy_loss(kind, by, weighted, entropy, token_loss, **options):
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
                "advantages": tensor(case, a[by]),
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


def add_losses(writer):
    def add(name, keys, loss_type, *, kind=GRPOTrainer, by="advantages", weighted=False, **options):
        more = {k: options.pop(k) for k in ("cases", "note", "tolerance") if k in options}
        token_loss = options.pop("token_loss", not weighted)
        function = (
            LOSS if kind is GRPOTrainer else "trl.experimental.gmpo.GMPOTrainer._compute_loss"
        )
        writer.add(
            name,
            keys,
            function,
            policy_loss(kind, by, weighted, "entropy", token_loss, loss_type=loss_type, **options),
            inputs="tokens",
            arguments={"loss_type": loss_type, "advantages": by, "weighted": weighted} | options,
            **more,
        )

    higher = {"epsilon_high": 0.28}
    by_token = "token_advantages"
    add("grpo", ["ppo_clip", "aggregate"], "grpo")
    add("grpo_token", ["ppo_clip", "aggregate"], "grpo", by=by_token)
    add("bnpo", ["ppo_clip", "aggregate"], "bnpo")
    add("dr_grpo", ["ppo_clip", "aggregate"], "dr_grpo", max_completion_length=10)
    add("dapo", ["dapo_clip"], "dapo", **higher)
    add("delta", ["ppo_dual_clip"], "bnpo", delta=1.5)
    sequence = {"importance_sampling_level": "sequence"}
    narrow = {"epsilon_low": 0.03, "epsilon_high": 0.04}
    add("gspo", ["gspo"], "grpo", **sequence, **narrow)
    add("gspo_delta", ["gspo"], "grpo", delta=1.1, **sequence, **narrow)
    add("sapo_sequence", ["sapo"], "sapo", **sequence)
    add("luspo", ["luspo"], "luspo", **sequence, **narrow)
    add("sapo", ["sapo"], "sapo")
    add("cispo", ["cispo"], "cispo", epsilon_high=1.2)
    add("cispo_token", ["cispo"], "cispo", by=by_token, epsilon_high=5.0)
    add("vespo", ["vespo"], "vespo", token_loss=False)
    add("weighted", ["rollout_correction", "ppo_clip"], "bnpo", weighted=True)
    add("kl", ["kl_estimators"], "bnpo", beta=0.3)
    add("kl_corrected", ["kl_estimators"], "bnpo", beta=0.3, use_bias_correction_kl=True)
    add("off_policy_mask", ["rollout_correction"], "bnpo", off_policy_mask_threshold=0.1)
    add("top_entropy", ["d3s"], "bnpo", top_entropy_quantile=0.4)
    ratios = {"top_entropy_quantile": 0.4, "cases": ["ragged", "holes", "masked_row"]} | sequence
    add("gspo_top_entropy", ["gspo"], "grpo", **ratios, **narrow)
    add("sapo_sequence_top_entropy", ["sapo"], "sapo", **ratios)
    add("luspo_top_entropy", ["luspo"], "luspo", **ratios, **narrow)
    bonus = {"_entropy_bonus_enabled": True, "entropy_coef": 0.1}
    add("entropy_bonus", ["entropy_bonus"], "bnpo", **bonus)
    wide = {"epsilon_low": 0.4, "epsilon_high": 0.4}
    add("gmpo", ["gmpo"], "gmpo", kind=GMPOTrainer, token_loss=False, **wide)
    add(
        "gmpo_narrow",
        ["gmpo"],
        "gmpo",
        kind=GMPOTrainer,
        token_loss=False,
        epsilon_low=0.1,
        epsilon_high=0.2,
    )


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


def main():
    writer = Writer("trl_losses", "trl", VERSIONS, "trl_losses.py")
    add_losses(writer)
    writer.add(
        "entropy_controller",
        ["entropy_bonus"],
        LOSS,
        entropy_controller,
        inputs="tokens",
        cases=["ragged", "holes"],
        arguments={"entropy_coef": 0.01, "entropy_target": 0.8, "entropy_coef_max": 0.02},
    )
    writer.save()


if __name__ == "__main__":
    main()
