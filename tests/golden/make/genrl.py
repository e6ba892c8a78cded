"""Writes estimators/genrl.*: the objective of gensyn-ai/genrl, which trains a swarm.

python tests/golden/make/genrl.py CHECKOUT COMMIT
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import load_inputs
from paper_code import array, loss_of, passage, spread, start, take, tensor

PATH = "src/genrl/trainer/grpo_trainer.py"
# Of both signs and all that a mask does; every reward takes part, as that trainer has no mask.
REWARDS = ("full", "binary", "length_one")
TOKENS = ("ragged", "holes", "masked_row", "one_sequence", "zero_advantage")


def advantages(root):
    def compute(case, a):
        found = passage(
            root / PATH,
            "advantages = rewards - rewards.mean(",
            "advantages = torch.flatten(",
            rewards=torch.from_numpy(a["rewards"]),
        )
        return {"advantages": array(found["advantages"])}

    return compute


def objective(compute_loss):
    def loss(case, a, logp):
        made = SimpleNamespace(
            model=SimpleNamespace(device="cpu"),
            _get_per_token_logps=lambda model, ids, mask, count: logp,
            _metrics={"train": defaultdict(list)},
            args=SimpleNamespace(num_iterations=2),
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
        )
        mask = tensor(case, a["mask"])
        inputs = {
            "prompt_ids": mask[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": mask,
            "completion_mask": mask,
            "old_per_token_logps": tensor(case, a["old_logp"]),
            "advantages": spread(case, a)[:, 0],
        }
        return compute_loss(made, None, inputs)

    return loss_of(loss)


def main():
    root, writer = start("genrl", "genrl", "gensyn-ai/genrl", license="none stated")
    rewards, tokens = load_inputs("rewards"), load_inputs("tokens")
    writer.inputs("groups", {case: {"rewards": rewards[case]["rewards"]} for case in REWARDS})
    names = ("logp", "old_logp", "advantages", "mask")
    writer.inputs("rollouts", {case: {n: tokens[case][n] for n in names} for case in TOKENS})
    (compute_loss,) = take(root / PATH, "compute_loss")
    writer.add("advantages", advantages(root))
    writer.add("loss", objective(compute_loss))
    writer.save()


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
