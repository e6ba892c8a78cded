"""Writes estimators/ghpo.*: hkgc-1/GHPO's hard prompts, and how much each is shown."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import array, passage, peer

PATH = "src/ghpo/ghpo_trainer.py"
STAGES = ((25, "#### add 25 hint"), (50, "#### add 50 hint"), (75, "# add 75 hint"))
SIZE = 4
LENGTHS = np.array([0, 1, 2, 3, 5, 6, 10, 18, 22, 30, 101], np.int32)


def stages(path):
    """All three stages in a row; what a stage samples are the next of the given rewards."""
    options = {"num_of_generation": SIZE}

    def compute(case, a):
        tries = torch.from_numpy(a["rewards"]).flatten(1)[..., None]
        rewards, shown = tries[0], np.zeros(a["rewards"].shape[1], int)
        for number, (share, after) in enumerate(STAGES, 1):
            rows = [f"plain {i}" for i in range(len(rewards))]
            hints = {f"inputs_hint_{share}": [f"hint {i}" for i in range(len(rewards))]}
            made = passage(
                path,
                "accuracy_reward =",
                "updated_inputs =",
                after=after,
                rewards_per_func=rewards,
                inputs=rows,
                **hints,
                **options,
            )
            asked = [int(x.removeprefix("hint ")) for x in made["inputs_redo"] if x[0] == "h"]
            shown[sorted({i // SIZE for i in asked})] = number
            if not made["inputs_redo"]:
                continue
            made["updated_inputs"] = {"rewards_per_func": tries[number][made["true_indices"]]}
            last = STAGES[number][1] if number < 3 else "is_eos = "
            rewards = passage(
                path, "rewards_per_func = [updated_inputs", last, after=after, **made
            )["rewards_per_func"]
        return {"stage": shown, "rewards": array(rewards).reshape(a["rewards"].shape[1:])}

    return compute


def shares(path):
    """How many characters of solutions of some lengths are shown."""

    def compute(case, a):
        prompt = [{"content": ""}, {"content": ""}]
        rows = [{"solution": "", "prompt": prompt, "solution_hint": "x" * n} for n in a["length"]]
        made = passage(path, "inputs_hint_25 =", "mode =", inputs=rows, hint_prompt="")
        found = [made[f"inputs_hint_{share}"] for share, _ in STAGES]
        return {"shown": np.array([[len(r["prompt"][1]["content"]) for r in x] for x in found])}

    return compute


def group(path):
    """Advantages of groups whose accuracy and format are weighted as in the released settings."""
    weights = {"reward_weights": torch.tensor([1.0, 0.5]), "scale_rewards": True}
    trainer = SimpleNamespace(num_generations=SIZE, **weights)

    def compute(case, a):
        tensor = torch.from_numpy(np.stack([a["rewards"], a["format"]], -1))
        made = passage(
            path,
            "rewards = (rewards_per_func",
            "process_slice = slice",
            after=STAGES[-1][1],
            rewards_per_func=tensor.flatten(0, 1),
            device="cpu",
            self=trainer,
        )
        return {"advantages": array(made["advantages"]).reshape(a["rewards"].shape)}

    return compute


@peer("ghpo", "GHPO", "hkgc-1/GHPO")
def main(root, writer):
    rng = np.random.default_rng(61)
    # Of each prompt: its rollouts without a hint and with each of the three.
    rewards = (rng.random((4, 24, SIZE)) < 0.12).astype(np.float32)
    writer.inputs("tries", {"random": {"rewards": rewards}})
    writer.inputs("lengths", {"all": {"length": LENGTHS}})
    graded = (rng.random((2, 24, SIZE)) < 0.5).astype(np.float32)
    writer.inputs("graded", {"random": {"rewards": graded[0], "format": graded[1]}})
    writer.add("stages", stages(root / PATH))
    writer.add("shares", shares(root / PATH))
    writer.add("advantages", group(root / PATH))
