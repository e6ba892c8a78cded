"""Writes estimators/trl_prm.*: step marks and loss of TRL 1.13's PRM trainer."""

import numpy as np
import torch
from estimator_cases import written
from transformers.loss.loss_utils import ForTokenClassification
from trl.experimental.prm import PRMTrainer
from trl_peer import VERSIONS, array

# Rows of a prompt of two words and steps with so many words, each with its label.
ROWS = {
    "a": (((2, 1), (3, 0)), ((1, 1),), ((2, 0), (1, 1), (1, 1))),
    "b": (((4, 1),), ((1, 0), (1, 0)), ((3, 1), (2, 1))),
}
LENGTH = 10


class Words:
    """A tokenizer whose tokens are words; the separator is one."""

    bos_token_id = None

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [1 for _ in text.split()]}

    def encode(self, text, add_special_tokens=False):
        return [0]


def row(steps, last_only):
    features = {
        "prompt": "a b",
        "completions": [" ".join(["w"] * words) for words, _ in steps],
        "labels": [bool(label) for _, label in steps],
    }
    made = PRMTrainer.tokenize_row(
        features,
        Words(),
        "\n",
        max_length=None,
        max_completion_length=None,
        train_on_last_step_only=last_only,
        is_eval=False,
    )["labels"]
    return np.array(made + [-100] * (LENGTH - len(made)))


def arrays(name):
    """The step of each token, -1 for the prompt; masks; labels of the steps at every token."""
    ids, labels = np.full((3, LENGTH), -1), np.zeros((3, LENGTH), np.int32)
    for r, steps in enumerate(ROWS[name]):
        place = 2
        for i, (words, label) in enumerate(steps):
            ids[r, place : place + words + 1] = i
            labels[r, place : place + words + 1] = label
            place += words + 1
    logits = np.random.default_rng(88 + ord(name)).normal(size=(3, LENGTH, 2))
    return {"step_ids": ids, "labels": labels, "logits": logits.astype(np.float32)}


def run(last_only):
    def compute(case, a):
        labels = np.stack([row(steps, last_only) for steps in ROWS[case]])
        logits = torch.from_numpy(np.array(a["logits"])).requires_grad_()
        config = type("Config", (), {"num_labels": 2})
        loss = ForTokenClassification(logits, torch.from_numpy(labels), config)
        (gradient,) = torch.autograd.grad(loss, [logits])
        return {"marks": labels != -100, "loss": array(loss), "gradient": array(gradient)}

    return compute


@written("trl_prm", "trl", VERSIONS)
def main(writer):
    writer.inputs("steps", {name: arrays(name) for name in ROWS})
    for name, last_only in (("every", False), ("last", True)):
        writer.add(name, run(last_only))
