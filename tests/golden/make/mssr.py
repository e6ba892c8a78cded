"""Writes estimators/mssr.*: ruiiu/MSSR's tracker and its entropy shaping."""

import numpy as np
import torch
from paper_code import array, peer, take, tensor, token_inputs

CORE = "verl/trainer/core_algos.py"
KL_TARGET, WINDOW = 0.01, 10


def visits():
    """Eight rollouts of each prompt to begin with, and three batches in which each is seen once."""
    rng = np.random.default_rng(31)
    return {
        "random": {
            "outcomes": rng.integers(0, 2, (12, 8)).astype(np.float32),
            "rewards": rng.integers(0, 2, (3, 12)).astype(np.float32),
        }
    }


def tracked(tracker):
    def compute(case, a):
        made = tracker(target_kl=KL_TARGET, use_per_sample_rho=False)
        ids = list(range(12))
        made.initialize_from_samples(ids, list(a["outcomes"]))
        values = [array(made.get_values(ids))]
        for rewards in a["rewards"]:
            made.update(ids, torch.from_numpy(rewards))
            values.append(array(made.get_values(ids)))
        return {"values": np.stack(values)}

    return compute


def forgetting(tracker):
    def compute(case, a):
        made = tracker(target_kl=KL_TARGET)
        made.recent_kl_values = [float(x) for x in a["kl_window"]]
        return {"rho": np.array(made._get_adaptive_rho())}

    return compute


def shaping(entropy_of, shape, **options):
    def compute(case, a):
        mask, advantages = tensor(case, a["mask"]), tensor(case, a["token_advantages"])
        entropy = entropy_of(tensor(case, a["old_logp"]), mask)
        added = shape(advantages, entropy, mask, **options)
        return {"advantages": array((advantages + added) * mask).reshape(3, 4, 6)}

    return compute


@peer("mssr", "MSSR", "ruiiu/MSSR")
def main(root, writer):
    names = ("compute_token_entropy", "compute_entropy_advantage_shaping")
    tracker, *shaped = take(root / CORE, "MVSRValueTracker", *names)
    writer.inputs("visits", visits())
    writer.add("tracker", tracked(tracker))
    windows = {
        name: {"kl_window": np.full(WINDOW, size, np.float32) * np.linspace(0.5, 1.5, WINDOW)}
        for name, size in (("still", 1e-4), ("below", 0.005), ("near", 0.0099), ("above", 0.02))
    }
    for a in windows.values():
        a["kl_window"] = a["kl_window"].astype(np.float32)
    writer.inputs("windows", windows)
    writer.add("forgetting", forgetting(tracker))
    chosen = ("ragged", "holes", "length_one", "zero_advantage", "bfloat16")
    tokens = token_inputs(("old_logp", "token_advantages", "mask"), chosen)
    writer.inputs("shaped", tokens)
    for label, options in (("shaping", {}), ("tight", {"alpha": 2.0, "kappa": 0.5})):
        writer.add(label, shaping(*shaped, **options))
