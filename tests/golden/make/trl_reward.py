"""Writes estimators/trl_reward.*: the loss of TRL's reward trainer."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import written
from trl import RewardTrainer
from trl_peer import ACCELERATOR, VERSIONS, array


def loss_of(centering, with_margin):
    def compute(case, a):
        rewards = torch.from_numpy(np.concatenate([a["chosen"], a["rejected"]])).requires_grad_()
        model = SimpleNamespace(training=True)
        trainer = SimpleNamespace(
            model=model,
            args=SimpleNamespace(center_rewards_coefficient=centering),
            accelerator=ACCELERATOR,
            _total_train_tokens=0,
            _tp_size=1,
            _metrics={"train": defaultdict(list)},
        )
        inputs = {"attention_mask": torch.ones(2)}
        if with_margin:
            inputs["margin"] = torch.from_numpy(a["margin"])

        def forward(**kwargs):
            return SimpleNamespace(logits=rewards[:, None])

        loss = RewardTrainer.compute_loss(trainer, forward, inputs)
        (gradient,) = torch.autograd.grad(loss, [rewards])
        first, second = np.split(gradient.numpy(), 2)
        accuracy = trainer._metrics["train"]["accuracy"][0]
        return {
            "loss": array(loss),
            "chosen_gradient": first,
            "rejected_gradient": second,
            "accuracy": np.float32(accuracy),
        }

    return compute


@written("trl_reward", "trl", VERSIONS)
def main(writer):
    rng = np.random.default_rng(87)
    draw = lambda: rng.normal(size=7).astype(np.float32)  # noqa: E731
    rows = {"chosen": draw(), "rejected": draw(), "margin": np.abs(draw())}
    writer.inputs("pairs", {"random": rows})
    for name, centering, margin in (
        ("plain", None, False),
        ("margin", None, True),
        ("centered", 0.01, False),
    ):
        writer.add(name, loss_of(centering, margin))
