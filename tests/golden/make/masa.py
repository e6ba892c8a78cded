"""Writes estimators/masa.*: akatigre/MASA-RL's reward of predictions."""

import random

import numpy as np
from paper_code import peer, take

PATH = "verl/utils/reward_score/meta_cog.py"
WORDS = ("alpha", "beta", "gamma", "delta")


def predictions():
    rng = np.random.default_rng(12)
    cases = {}
    for name in ("first", "second", "third"):
        has = rng.random((8, 4)) < 0.5
        rewards = (
            rng.integers(0, 2, 8).astype(np.float32) if name != "third" else np.zeros(8, np.float32)
        )
        cases[name] = {
            "rewards": rewards,
            "lengths": rng.integers(50, 300, 8),
            "has": has,
            "length": rng.integers(40, 320, 5),
            "eighths": rng.integers(0, 9, 5),
            "chosen": rng.random((5, 4)) < 0.6,
        }
    return cases


@peer("masa", "MASA", "akatigre/MASA-RL")
def main(root, writer):
    writer.inputs("predictions", predictions())
    single, score = take(root / PATH, "singularize", "compute_score", random=random)
    score.__globals__["singularize"] = single

    def compute(case, a):
        responses = [" ".join(w for w, h in zip(WORDS, row, strict=True) if h) for row in a["has"]]
        truth = {
            "problem": "none of them",
            "response": responses,
            "score": [int(r) for r in a["rewards"]],
            "length": a["lengths"].tolist(),
        }
        found = []
        for length, eighths, chosen in zip(a["length"], a["eighths"], a["chosen"], strict=True):
            notions = [w for w, c in zip(WORDS, chosen, strict=True) if c]
            guess = {
                "math_notion": notions,
                "solution_length": int(length),
                "pass_rate": int(eighths),
            }
            found.append(score(guess, truth)["score"])
        return {"rewards": np.array(found)}

    writer.add("rewards", compute)
