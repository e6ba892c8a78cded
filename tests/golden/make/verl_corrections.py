"""Writes estimators/verl_corrections.*: verl's corrections for another sampler."""

import numpy as np
import torch
from estimator_cases import written
from verl_peer import (
    VERSIONS,
    array,
    config,
    core_algos,
    rollout_corr_helper,
    tensor,
    tokens,
)


def bypass(old_log_prob, advantages, loss_agg_mode, **settings):
    def compute(case, a):
        made = config(policy_loss={"rollout_correction": settings})
        logp = tensor(case, a["logp"]).requires_grad_()
        loss, _ = core_algos.compute_policy_loss_bypass_mode(
            old_log_prob=tensor(case, a[old_log_prob]),
            log_prob=logp,
            advantages=tensor(case, a[advantages]),
            response_mask=tensor(case, a["mask"]),
            loss_agg_mode=loss_agg_mode,
            config=made,
        )
        (gradient,) = torch.autograd.grad(loss, [logp])
        return {"loss": array(loss), "gradient": tokens(gradient)}

    return compute


def weights(**options):
    def compute(case, a):
        difference = tensor(case, a["old_logp"]) - tensor(case, a["behavior_logp"])
        result, metrics = rollout_corr_helper.compute_rollout_correction_weights(
            difference, tensor(case, a["mask"]), **options
        )
        ess = np.float32(metrics["rollout_is_eff_sample_size"])
        return {"weights": tokens(result), "ess": ess}

    return compute


def rejection(rollout_rs, rollout_rs_threshold):
    def compute(case, a):
        difference = tensor(case, a["old_logp"]) - tensor(case, a["behavior_logp"])
        mask, _ = rollout_corr_helper.compute_rollout_rejection_mask(
            difference, tensor(case, a["mask"]), rollout_rs, rollout_rs_threshold
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


@written("verl_corrections", "verl", VERSIONS)
def main(writer):
    writer.add("rejected", rejected)
    writer.add("mismatch", metrics)
    writer.each("compute_rollout_correction_weights", weights)
    writer.each("compute_rollout_rejection_mask", rejection)
    writer.each("compute_policy_loss_bypass_mode", bypass)
