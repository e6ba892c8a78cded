"""Writes estimators/gdpo.*: NVlabs/GDPO's advantages, in TRL's and in verl's form."""

from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import load_inputs
from paper_code import array, passage, peer, take, tensor

TRL = "trl-GDPO/trl-0.18.0-gdpo/trl/trainer/grpo_trainer.py"
RAY = "verl-GDPO/verl/trainer/ppo/ray_trainer.py"
CORE = "verl-GDPO/verl/trainer/ppo/core_algos.py"
FUNCTIONAL = "verl-GDPO/verl/utils/torch_functional.py"


def column_cases():
    """Rewards of three kinds; in one case a few of them are not applicable."""
    shared = load_inputs("rewards")
    columns = {name: shared[name]["columns"] for name in ("full", "binary")}
    columns["missing"] = columns["full"].copy()
    columns["missing"][[1, 2, 2], [0, 1, 2], [2, 1, 3]] = np.nan
    return {name: {"columns": x} for name, x in columns.items()}


def sequences(root, weights):
    trainer = SimpleNamespace(
        apply_gdpo=True, reward_weights=torch.tensor(weights), num_generations=4
    )

    def compute(case, a):
        names = passage(
            root / TRL,
            "## Make sure every reward contain no nan value",
            "else:",
            self=trainer,
            device="cpu",
            rewards_per_func=torch.from_numpy(a["columns"].reshape(3, 12).T.copy()),
        )
        return {"advantages": array(names["advantages"]).reshape(3, 4)}

    return compute


def tokens(root):
    (group,) = take(root / CORE, "compute_grpo_outcome_advantage")
    names = ("masked_mean", "masked_var", "masked_whiten")
    *_, whiten = take(root / FUNCTIONAL, *names)

    def compute(case, a):
        mask = tensor(case, a["mask"])
        scores = []
        for column in a["columns"][:2]:
            scores.append(torch.zeros(12, 6))
            scores[-1][:, 0] = torch.from_numpy(column.reshape(12))
        data = SimpleNamespace(
            batch={
                "token_level_scores_correctness": scores[0],
                "token_level_scores_format": scores[1],
                "responses": mask,
                "attention_mask": mask,
            },
            non_tensor_batch={"uid": np.repeat(np.arange(3), 4)},
        )
        library = SimpleNamespace(compute_grpo_outcome_advantage=group)
        given = {"data": data, "core_algos": library, "masked_whiten": whiten}
        begin, end = "token_level_scores_correctness = ", "else:"
        passage(root / RAY, begin, end, after="elif adv_estimator == 'gdpo'", **given)
        return {"advantages": array(data.batch["advantages"]).reshape(3, 4, 6)}

    return compute


@peer("gdpo", "GDPO", "NVlabs/GDPO")
def main(root, writer):
    writer.inputs("columns", column_cases())
    for name, weights in (("sequences", [1.0, 1.0, 1.0]), ("weighted", [1.0, 0.5, 2.0])):
        writer.add(name, sequences(root, weights))
    writer.add("tokens", tokens(root))
