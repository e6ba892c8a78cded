"""Writes estimators/dcpo_dynamic.*: lime-RL/DCPO's bounds, loss and advantages.

python tests/golden/make/dcpo_dynamic.py CHECKOUT COMMIT
"""

from enum import Enum
from types import SimpleNamespace

import numpy as np
import torch
from paper_code import array, loss_of, spread, start, take, tensor, token_inputs

CORE, FUNCTIONAL = "verl/trainer/ppo/core_algos.py", "verl/utils/torch_functional.py"
NAMES = "verl/trainer/ppo/core_name_space.py"
CASES = ("ragged", "on_policy", "holes", "length_one", "log_ratio_30", "zero_advantage", "bfloat16")


class Settings(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


def bounds(function, **options):
    def compute(case, a):
        # As ours has it, a probability of 1 where masked.
        low, high = function(tensor(case, np.where(a["mask"], a["old_logp"], 0.0)), **options)
        return {"low": array(low).reshape(3, 4, 6), "high": array(high).reshape(3, 4, 6)}

    return compute


def loss(function, mode, **options):
    def compute(case, a, logp):
        return function(
            old_log_prob=tensor(case, a["old_logp"]),
            log_prob=logp,
            advantages=spread(case, a),
            response_mask=tensor(case, a["mask"]),
            loss_agg_mode=mode,
            config=Settings(clip_ratio=0.2, clip_type="dynamic", **options),
        )[0]

    return loss_of(compute)


def visit_cases():
    """Three visits to each of three prompts."""
    rng = np.random.default_rng(19)
    binary = rng.integers(0, 2, (3, 3, 4)).astype(np.float32)
    binary[0, 1], binary[1, 2], binary[:, 0] = 1.0, 0.0, [1.0, 0.0, 1.0, 1.0]
    return {
        "binary": {"rewards": binary},
        "real": {"rewards": rng.normal(size=(3, 3, 4)).astype(np.float32)},
    }


def visits(function):
    """One visit after the other, the moments handed on as the trainer does."""

    def compute(case, a):
        index = np.repeat(np.arange(3), 4)
        mean, std = np.zeros(3), np.zeros(3)
        found = []
        for times, rewards in enumerate(a["rewards"]):
            made = function(
                token_level_rewards=torch.from_numpy(rewards.reshape(-1, 1).copy()),
                response_mask=torch.ones(12, 1),
                index=index,
                old_times=np.full(12, times),
                old_mean=mean[index],
                old_std=std[index],
            )
            mean = np.array([float(made["uid2mean"][i]) for i in range(3)])
            std = np.array([float(made["uid2std"][i]) for i in range(3)])
            found.append(array(made["advantages"]).reshape(3, 4))
        return {"advantages": np.stack(found), "mean": mean, "std": std}

    return compute


def main():
    root, writer = start("dcpo_dynamic", "DCPO (dynamic clipping)", "lime-RL/DCPO")
    _, mean = take(root / FUNCTIONAL, "masked_sum", "masked_mean")
    (modes,) = take(root / NAMES, "LossCalculator", Enum=Enum)
    given = {"verl_F": SimpleNamespace(masked_mean=mean), "LossCalculator": modes}
    given["AlgoConfig"] = type(None)
    given["print"] = lambda *_: None
    names = ("get_clip_low_high", "agg_loss", "compute_policy_loss_dcpo", "get_mean_std")
    estimate = "compute_dcpo_outcome_advantage"
    band, _, policy, _, advantages = take(root / CORE, *names, estimate, **given)
    arrays = ("logp", "old_logp", "advantages", "mask")
    writer.inputs("answers", token_inputs(arrays, CASES))
    writer.add("bounds", bounds(band, low_clip=0.16, high_clip=0.2, clip_ratio_c=10.0))
    for mode in ("only-token-mean", "seq-mean-token-mean"):
        for low, high in ((0.16, 0.2), (0.01, 0.02)):
            options = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 10.0}
            writer.add(f"{mode}_{low}", loss(policy, mode, **options))
    writer.inputs("visits", visit_cases())
    writer.add("visits", visits(advantages))
    writer.save()


if __name__ == "__main__":
    main()
