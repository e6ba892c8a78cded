"""Writes tests/golden/estimators/cgpo.*: rewards under constraints of gaetanlop/trl's CGPO trainer.

python tests/golden/make/cgpo.py CHECKOUT COMMIT    (branch cgpo_trainer)
"""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import passage, start

PATH = "trl/trainer/cgpo_trainer.py"


def main():
    root, writer = start("cgpo", "CGPO (trl fork)", "gaetanlop/trl")
    rng = np.random.default_rng(13)
    rows = {
        "rewards": rng.normal(size=(3, 4)).astype(np.float32),
        "baseline": rng.normal(size=3).astype(np.float32),
        "satisfied": rng.random((3, 4)) < 0.7,
        "log_ratio": rng.uniform(-1, 7, (3, 4)).astype(np.float32),
    }
    writer.inputs("rollouts", {"random": rows})

    def run(case, a):
        made = passage(
            root / PATH,
            "kl_div = completion_logprobs - ref_logprobs",
            "mean_regularized_rewards = regularized_rewards.mean()",
            self=SimpleNamespace(kl_threshold=5.0),
            completion_logprobs=torch.from_numpy(a["log_ratio"]),
            ref_logprobs=torch.zeros(3, 4),
            judgements=torch.from_numpy(a["satisfied"]),
            rewards=torch.from_numpy(a["rewards"]),
            baseline_rewards=torch.from_numpy(a["baseline"])[:, None],
        )
        return {"rewards": made["regularized_rewards"].numpy()}

    name = f"{PATH}: CGPOTrainer.crpg_optimization"
    writer.add("crpg", ["cgpo"], name, run, inputs="rollouts", arguments={"kl_threshold": 5.0})
    writer.save()


if __name__ == "__main__":
    main()
