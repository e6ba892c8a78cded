"""Writes estimators/seeupo.*: AgentEvolver's branch seeupo."""

import types

import numpy as np
import torch
from paper_code import peer, take

PATH = "beyondagent/module/trainer/ba_ray_trainer.py"


def groups():
    rng = np.random.default_rng(13)
    return {
        "worked": {"rewards": np.float32([[1, 0], [1, 1]])},
        "binary": {"rewards": rng.integers(0, 2, (4, 5)).astype(np.float32)},
        "outlier": {"rewards": np.float32(np.eye(16)[:2] * 30)},
        "equal": {"rewards": np.ones((3, 3), np.float32)},
        "alone": {"rewards": rng.random((5, 1)).astype(np.float32)},
    }


def turns():
    rng = np.random.default_rng(14)
    cases = {}
    for name in ("near", "far"):
        old = -rng.gamma(2.0, 0.5, (6, 5)) - 0.02
        new = old + rng.normal(size=(6, 5)) * (0.1 if name == "near" else 3.0)
        cases[name] = {
            "factor": rng.uniform(0.8, 1.2, 6).astype(np.float32),
            "logp": new.astype(np.float32),
            "old_logp": old.astype(np.float32),
            "mask": np.arange(5) < np.array([[5], [3], [0], [1], [2], [4]]),
        }
    return cases


@peer("seeupo", "AgentEvolver", "modelscope/AgentEvolver")
def main(root, writer):
    advantage, factor, order = take(
        root / PATH,
        "compute_grpo_outcome_advantage_local",
        "update_ratios",
        "get_agent_update_order",
    )

    def advantages(case, a):
        size = a["rewards"].shape
        rewards = torch.from_numpy(a["rewards"].reshape(-1, 1).copy())
        index = np.repeat(np.arange(size[0]), size[1])
        out, _ = advantage(
            rewards,
            torch.ones_like(rewards),
            index,
            norm_adv_by_std_in_grpo=False,
            special_norm=True,
        )
        return {"advantages": out.numpy().reshape(size)}

    for name, case in groups().items():
        # Groups of several sizes, so that each has a set.
        writer.inputs(f"seeupo_{name}", {name: case})
        writer.add(name, advantages)

    config = types.SimpleNamespace(
        adv_clip_ratio=0.2, adv_clip_ratio_low=None, adv_clip_ratio_high=None
    )

    def updated(case, a):
        x = {name: torch.from_numpy(np.asarray(v)) for name, v in a.items()}
        out = factor(x["factor"], x["old_logp"], x["logp"], x["mask"], config)
        return {"factor": out.numpy()}

    writer.inputs("seeupo_turns", turns())
    writer.add("factor", updated)
    if order(4, "reverse") != [3, 2, 1, 0]:
        raise AssertionError("the order is not backward")
