"""Writes estimators/hbpo.*: ZJU-REAL/HBPO's rewards and advantages."""

from types import SimpleNamespace

import numpy as np
from estimator_cases import load_inputs
from paper_code import outcome, passage, peer, take

CORE, REWARD = "verl/trainer/ppo/core_algos.py", "rllm/rewards/math_reward.py"
TOLD = np.array([512, 1024, 2048, 2560], np.float32)


def budget_cases():
    """The shared rewards with budgets that some of a group share."""
    rng = np.random.default_rng(13)
    cases = {}
    for name, a in load_inputs("rewards").items():
        if name in ("full", "binary", "all_equal", "ragged", "length_one"):
            budgets = rng.choice(TOLD, (3, 4))
            cases[name] = {n: a[n] for n in ("rewards", "where", "mask")} | {"budgets": budgets}
    return cases


def lengths():
    values = np.array([0, 1, 300, 512, 513, 1024, 2000, 2048, 2560, 3000, 4095, 4096], np.float32)
    return {
        f"budget_{int(budget)}": {"lengths": values, "budgets": np.full(12, budget)}
        for budget in TOLD
    }


def reward(path):
    """The lines for an answer that was found right, run for each length."""

    def each(length, budget):
        match = SimpleNamespace(group=lambda _: str(int(budget)))
        metadata = SimpleNamespace(metadata={})
        return passage(
            path,
            "PI_APPROX = 3.1416",
            "return RewardOutput(reward=reward, is_correct=True",
            valid_response_length=float(length),
            match=match,
            input=metadata,
        )["reward"]

    def compute(case, a):
        return {"rewards": np.array([each(*x) for x in zip(*a.values(), strict=True)])}

    return compute


@peer("hbpo", "HBPO", "ZJU-REAL/HBPO")
def main(root, writer):
    writer.inputs("budgets", budget_cases())
    writer.inputs("lengths", lengths())
    name = "compute_grpo_outcome_advantage"
    (function,) = take(root / CORE, name)

    def estimate(budgets, **more):
        return function(budget=budgets, **more)

    compute = outcome(estimate, needs=["budgets"])
    # The cosine of an angle that is off by 2e-6 times pi / 2.
    writer.add("advantage", compute)
    writer.add("reward", reward(root / REWARD))
