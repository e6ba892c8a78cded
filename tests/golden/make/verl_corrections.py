"""Writes estimators/verl_corrections.*: verl's corrections for another sampler.

Run from the repository root with a Python that has verl, torch, tensordict, omegaconf and what they
import:

    python tests/golden/make/verl_corrections.py
"""

import numpy as np
import torch
from estimator_cases import Writer
from verl_peer import (
    CORE,
    CORRECTION,
    VERSIONS,
    array,
    config,
    core_algos,
    rollout_corr_helper,
    tensor,
    tokens,
)


def bypass(loss_type, **settings):
    def compute(case, a):
        made = config(policy_loss={"rollout_correction": settings | {"loss_type": loss_type}})
        logp = tensor(case, a["logp"]).requires_grad_()
        loss, _ = core_algos.compute_policy_loss_bypass_mode(
            old_log_prob=tensor(case, a["behavior_logp"]),
            log_prob=logp,
            advantages=tensor(case, a["token_advantages"]),
            response_mask=tensor(case, a["mask"]),
            loss_agg_mode="token-mean",
            config=made,
        )
        (gradient,) = torch.autograd.grad(loss, [logp])
        return {"loss": array(loss), "gradient": tokens(gradient)}

    return compute


def weights(level, threshold, normalize):
    def compute(case, a):
        difference = tensor(case, a["old_logp"]) - tensor(case, a["behavior_logp"])
        result, metrics = rollout_corr_helper.compute_rollout_correction_weights(
            difference,
            tensor(case, a["mask"]),
            rollout_is=level,
            rollout_is_threshold=threshold,
            rollout_is_batch_normalize=normalize,
        )
        ess = np.float32(metrics["rollout_is_eff_sample_size"])
        return {"weights": tokens(result), "ess": ess}

    return compute


def rejection(option, threshold):
    def compute(case, a):
        difference = tensor(case, a["old_logp"]) - tensor(case, a["behavior_logp"])
        mask, _ = rollout_corr_helper.compute_rollout_rejection_mask(
            difference, tensor(case, a["mask"]), option, threshold
        )
        return {"keep": tokens(mask) > 0.5}

    return compute


def rejected(case, a):
    """The shares that each of two rules rejects, and of tokens those that either does."""
    difference = tensor(case, a["old_logp"]) - tensor(case, a["behavior_logp"])
    _, found = rollout_corr_helper.compute_rollout_rejection_mask(
        difference, tensor(case, a["mask"]), "token_k1,seq_mean_k3", "0.8_1.25,0.03"
    )

    def shares(name):
        options = ("token_k1", "seq_mean_k3")
        return np.float32([found[f"rollout_rs_{option}_{name}"] for option in options])

    return {
        "tokens": shares("masked_fraction"),
        "sequences": shares("seq_masked_fraction"),
        "any_tokens": np.float32(found["rollout_rs_masked_fraction"]),
    }


def metrics(case, a):
    found = rollout_corr_helper.compute_offpolicy_metrics(
        tensor(case, a["old_logp"]), tensor(case, a["behavior_logp"]), tensor(case, a["mask"])
    )
    names = ("kl", "k3_kl", "log_ppl_diff", "ppl_ratio", "chi2_token", "chi2_seq")
    return {name: np.float32(found[name]) for name in names}


def add_corrections(writer):
    key = ["rollout_correction"]
    for level in ("token", "sequence"):
        for threshold in (1.3, "0.5_2.0"):
            for normalize in (False, True):
                kind = "icepop" if isinstance(threshold, str) else "tis"
                name = f"{kind}_{level}" + ("_normalized" if normalize else "")
                arguments = {
                    "rollout_is": level,
                    "rollout_is_threshold": threshold,
                    "rollout_is_batch_normalize": normalize,
                }
                function = CORRECTION + "compute_rollout_correction_weights"
                compute = weights(level, threshold, normalize)
                keys = ["icepop"] if kind == "icepop" else key
                writer.add(name, keys, function, compute, inputs="tokens", arguments=arguments)
    for option, threshold in (
        ("token_k1", "0.9_1.3"),
        ("token_k2", 0.02),
        ("token_k3", 0.02),
        ("seq_sum_k1", "0.7_1.2"),
        ("seq_sum_k2", 0.1),
        ("seq_sum_k3", 0.1),
        ("seq_mean_k1", "0.95_1.1"),
        ("seq_mean_k2", 0.02),
        ("seq_mean_k3", 0.02),
        ("seq_max_k2", 0.05),
        ("seq_max_k3", 0.05),
        ("token_k1,seq_mean_k3", "0.8_1.25,0.03"),
    ):
        writer.add(
            "reject_" + option.replace(",", "_and_"),
            key,
            CORRECTION + "compute_rollout_rejection_mask",
            rejection(option, threshold),
            inputs="tokens",
            arguments={"rollout_rs": option, "rollout_rs_threshold": threshold},
        )
    writer.add(
        "rejected",
        key,
        CORRECTION + "compute_rollout_rejection_mask",
        rejected,
        inputs="tokens",
        arguments={"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.8_1.25,0.03"},
        cases=["ragged", "on_policy", "holes", "masked_row", "one_sequence", "length_one"],
    )
    writer.add(
        "mismatch",
        key,
        CORRECTION + "compute_offpolicy_metrics",
        metrics,
        inputs="tokens",
        tolerance={"float32": 1e-4, "bfloat16": 1e-1},
    )
    for loss_type, level in (("reinforce", "token"), ("reinforce", "sequence"), ("ppo_clip", None)):
        settings = {"rollout_is": level, "rollout_is_threshold": 1.5}
        if loss_type == "ppo_clip":
            settings |= {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.05}
        writer.add(
            f"bypass_{loss_type}" + (f"_{level}" if level else ""),
            key,
            CORE + "compute_policy_loss_bypass_mode",
            bypass(loss_type, **settings),
            inputs="tokens",
            arguments={
                "old_log_prob": "behavior_logp",
                "advantages": "token_advantages",
                "loss_agg_mode": "token-mean",
                "loss_type": loss_type,
            }
            | settings,
        )


def main():
    writer = Writer("verl_corrections", "verl", VERSIONS, "verl_corrections.py")
    add_corrections(writer)
    writer.save()


if __name__ == "__main__":
    main()
