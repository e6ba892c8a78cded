"""Writes estimators/trl_minillm.*: MiniLLM's advantages, which TRL has no more.

Run from the repository root with a Python that has trl 1.13.0, transformers and torch:

    python tests/golden/make/trl_minillm.py
"""

from types import SimpleNamespace

import torch
from estimator_cases import Writer
from trl.experimental.minillm import MiniLLMTrainer
from trl_peer import VERSIONS, array, tensor

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-1}


def advantages(gamma):
    trainer = SimpleNamespace(gamma=gamma, length_normalization=True)

    def run(case, a):
        teacher = torch.log_softmax(tensor(case, a["teacher_logits"], flat=False), -1)
        targets = torch.from_numpy(a["targets"]).long()
        value = MiniLLMTrainer._compute_advantage(
            trainer,
            tensor(case, a["old_logp"], flat=False),
            teacher.gather(-1, targets[..., None])[..., 0],
        )
        return {"advantages": array(value)}

    return run


def main():
    writer = Writer("trl_minillm", "trl", VERSIONS, "trl_minillm.py")
    for gamma in (0.0, 0.9, 1.0):
        writer.add(
            f"minillm_{gamma}",
            ["minillm"],
            "trl.experimental.minillm.MiniLLMTrainer._compute_advantage",
            advantages(gamma),
            inputs="vocabulary",
            tolerance=TOLERANCE,
            arguments={"gamma": gamma, "length_normalization": True},
        )
    writer.save()


if __name__ == "__main__":
    main()
