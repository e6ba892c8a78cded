"""Writes estimators/trl_minillm.*: MiniLLM's advantages, which TRL has no more."""

from types import SimpleNamespace

import torch
from estimator_cases import written
from trl.experimental.minillm import MiniLLMTrainer
from trl_peer import VERSIONS, array, tensor


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


@written("trl_minillm", "trl", VERSIONS)
def main(writer):
    for gamma in (0.0, 0.9, 1.0):
        writer.add(f"minillm_{gamma}", advantages(gamma))
