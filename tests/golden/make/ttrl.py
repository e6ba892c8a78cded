"""Writes estimators/ttrl.*: PRIME-RL/TTRL's rewards of agreeing with the majority."""

from collections import Counter

import numpy as np
from paper_code import peer, take

PATH = "verl/verl/utils/reward_score/ttrl/ttt_metrics.py"


@peer("ttrl", "TTRL", "PRIME-RL/TTRL")
def main(root, writer):
    answers = np.random.default_rng(14).integers(0, 4, (12, 7))
    writer.inputs("answers", {"random": {"answer_ids": answers}})

    # Answers are extracted and verified by their numbers.
    def verify(task, answers, labels, extra_info=None):
        return [float(a == b) for a, b in zip(answers, labels, strict=True)], None

    (function,) = take(
        root / PATH,
        "test_time_train_metrics",
        auto_extract=lambda task, solutions, extra_info=None: solutions,
        auto_verify=lambda task, answers, labels, extra_info=None: (
            (verify(task, answers, labels)[0],) * 2 if len(answers) > 1 else ([True], [True])
        ),
        Counter=Counter,
        List=list,
    )

    def run(case, a):
        rewards, shares = [], []
        for row in a["answer_ids"].tolist():
            reward, metrics = function(row, [0] * len(row))
            rewards.append(reward)
            shares.append(metrics["majority_ratio"])
        return {"rewards": np.array(rewards), "share": np.array(shares)}

    writer.add("majority", run)
