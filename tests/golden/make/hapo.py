"""Writes estimators/hapo.*: starriver030515/HAPO's signal, bounds and advantages."""

from math import ceil, floor
from types import SimpleNamespace

import numpy as np
import torch
from paper_code import loss_of, peer, take, tensor, token_inputs

PATH = "verl/trainer/ppo/core_algos.py"
CASES = ("ragged", "on_policy", "holes", "length_one")


@peer("hapo", "HAPO", "starriver030515/HAPO")
def main(root, writer):
    rng = np.random.default_rng(6)
    entropy = rng.exponential(0.4, (3, 4, 1)).astype(np.float32)
    shared = token_inputs(("logp", "old_logp", "mask", "advantages"), CASES)
    for case in shared.values():
        case["entropy"] = (entropy * rng.uniform(0.1, 2, case["mask"].shape)).astype(np.float32)
        case["rewards"] = rng.integers(0, 2, case["mask"].shape[:-1]).astype(np.float32)
        # The released signal of certain tokens has the other sign than ours: the bounds and the
        # advantage are compared on a signal of both signs.
        case["signal"] = rng.uniform(-1, 1, case["mask"].shape).astype(np.float32)
    writer.inputs("entropies", shared)
    quantile, signal = take(
        root / PATH, "torch_quantile", "compute_entropy_h", floor=floor, ceil=ceil
    )
    signal.__globals__["torch_quantile"] = quantile

    def magnitude(case, a):
        found, _ = signal(
            tensor(case, a["entropy"]), response_mask=tensor(case, a["mask"]), entropy_pivot=0.8
        )
        mask = tensor(case, a["mask"]).bool()
        return {"magnitude": torch.where(mask, found.abs(), 0.0).numpy().reshape(a["mask"].shape)}

    writer.add("signal", magnitude)

    def masked_mean(x, mask):
        return (x * mask).sum() / mask.sum()

    def aggregate(loss_mat, loss_mask, loss_agg_mode):
        return masked_mean(loss_mat, loss_mask)

    clip, shape = take(root / PATH, "ada_clip", "ada_advantage")
    (loss,) = take(
        root / PATH,
        "compute_policy_loss",
        ada_clip=clip,
        ada_advantage=shape,
        agg_loss=aggregate,
        verl_F=SimpleNamespace(masked_mean=masked_mean, masked_sum=lambda x, m: (x * m).sum()),
        compute_entropy_h=lambda entropy, **_: (entropy, None),
    )
    for dual in (3.0, 10.0):

        def objective(case, a, logp, dual=dual):
            advantages = np.broadcast_to(a["advantages"][..., None], a["mask"].shape)
            return loss(
                old_log_prob=tensor(case, a["old_logp"]),
                log_prob=logp,
                advantages=tensor(case, advantages),
                response_mask=tensor(case, a["mask"]),
                cliprange=0.2,
                cliprange_low=0.2,
                cliprange_high=0.28,
                clip_ratio_c=dual,
                adaptive_clip=True,
                adaptive_advantage=True,
                entropy=tensor(case, a["signal"]),
            )[0]

        writer.add(f"loss_{dual:g}", loss_of(objective))
    (plain,) = take(root / PATH, "compute_grpo_outcome_advantage")
    (outcome,) = take(
        root / PATH, "compute_hapo_outcome_advantage", compute_grpo_outcome_advantage=plain
    )

    def advantages(case, a):
        mask = tensor(case, a["mask"])
        rewards = tensor(case, a["rewards"][..., None])
        token_rewards = torch.cat([rewards, rewards.new_zeros(len(mask), mask.shape[1] - 1)], 1)
        index = np.repeat(np.arange(3), 4)
        found = outcome(token_rewards, mask, index, entropys=tensor(case, a["entropy"]))[0]
        # One value a rollout, read at its first token.
        first = mask.argmax(1, keepdim=True)
        value = torch.where(mask.sum(1) > 0, found.gather(1, first)[:, 0], 0.0)
        return {"advantages": value.numpy().reshape(3, 4)}

    writer.add("advantages", advantages)
