"""Writes estimators/kernelgym.*: hkust-nlp/KernelGYM's advantages of turns."""

import numpy as np
import torch
from paper_code import array, passage, peer, take

CORE = "drkernel/verl_patch/trainer/code/ppo/core_algos.py"
COVERAGE = "drkernel/kernel/rewards/coverage_helper.py"
TURNS = 3


def turn_cases():
    """Rollouts of up to three turns; a turn that did not happen has reward 0 there."""
    rng = np.random.default_rng(14)

    def case(counts):
        where = np.arange(TURNS) < np.asarray(counts)[..., None]
        rewards = np.where(where, rng.normal(size=where.shape), 0.0)
        return {"rewards": rewards.astype(np.float32), "turn_where": where}

    return {
        "full": case(np.full((3, 4), TURNS)),
        "ragged": case([[3, 2, 3, 1], [1, 2, 3, 2], [2, 2, 3, 3]]),
        "alone": case([[3, 1, 2, 1], [1, 1, 1, 1], [2, 1, 1, 3]]),
    }


def turns(function, gamma):
    def compute(case, a):
        where = torch.from_numpy(a["turn_where"].reshape(-1))
        number = torch.arange(TURNS).repeat(12)
        result, _ = function(
            token_level_rewards=torch.from_numpy(a["rewards"].reshape(-1, 1)),
            eos_mask=torch.ones(36, 1),
            loss_mask=where,
            turn_indices=torch.where(where, number, -1),
            index=np.repeat(np.arange(3), 4 * TURNS),
            max_turns=TURNS,
            gamma=gamma,
        )
        return {"advantages": array(result).reshape(a["rewards"].shape)}

    return compute


def keep_probability(path):
    def compute(case, a):
        made = passage(
            path,
            "# Compute mask probability",
            "# Sample from Bernoulli distribution",
            rollout_is_weights=torch.from_numpy(a["coverage"]),
            correctness_2d=torch.from_numpy(a["correct"]),
            rollout_is_weights_speedup=None,
            coverage_rs_factor=0.1,
            coverage_rs_threshold=0.3,
        )
        return {"probability": array(made["mask_prob"])}

    return compute


@peer("kernelgym", "KernelGYM", "hkust-nlp/KernelGYM")
def main(root, writer):
    writer.inputs("turns", turn_cases())
    rng = np.random.default_rng(15)
    coverage = rng.uniform(0.2, 0.5, (4, 3)).astype(np.float32)
    correct = rng.uniform(size=(4, 3)) < 0.7
    writer.inputs("coverage", {"random": {"coverage": coverage, "correct": correct}})
    name = "compute_multi_turn_rloo_outcome_advantage"
    *_, function = take(root / CORE, "compute_multi_turn_returns", name)
    for gamma in (1.0, 0.9):
        writer.add(f"trloo_{gamma:g}", turns(function, gamma))
    writer.add("keep_probability", keep_probability(root / COVERAGE))
