"""Writes estimators/rover.*: tinnerhrhe/ROVER's loss, the one for mathematics."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import array, loss_of, passage, peer, spread, take, tensor, token_inputs

CORE, ACTOR = "Math/verl/trainer/ppo/core_algos.py", "Math/verl/workers/actor/dp_actor.py"
FUNCTIONAL = "Math/verl/utils/torch_functional.py"
CASES = ("ragged", "on_policy", "length_one", "zero_advantage", "bfloat16")


def valued():
    rng = np.random.default_rng(21)
    cases = token_inputs(("logp", "old_logp", "advantages", "mask"), CASES)
    for name, a in cases.items():
        old = -2.0 - rng.gamma(2.0, 0.5, (3, 4, 6))
        near = old + (0.0 if name == "on_policy" else 0.3) * rng.normal(size=old.shape)
        a["old_mean_log_probs"], a["mean_log_probs"] = np.float32(old), np.float32(near)
    return cases


def loss(actor, function, rho, **scale):
    """The target, the values and the loss as the actor's update has them one after the other."""
    config = SimpleNamespace(config=SimpleNamespace(rover_t=rho, **scale))

    def compute(case, a, logp):
        names = {
            "self": config,
            "current_q": tensor(case, a["mean_log_probs"]),
            "old_logits": tensor(case, a["old_mean_log_probs"]),
            "response_mask": tensor(case, a["mask"]),
            "low_var_reward": spread(case, a),
            "log_prob": logp,
            "old_log_prob": tensor(case, a["old_logp"]),
        }
        names = passage(actor, "next_q = self.config", "metrics_update = {", **names)
        names = passage(actor, "logIS = self.config", "if hasattr(self.config", **names)
        names = passage(actor, "q_values = logIS", "metrics_update = {", **names)
        return function(names["q_values"], names["target"], eos_mask=names["response_mask"])

    return loss_of(compute)


def mean_log_probs(function):
    return lambda case, a: {"mean_log_probs": array(function(torch.from_numpy(a["logits"])))}


@peer("rover", "ROVER", "tinnerhrhe/ROVER")
def main(root, writer):
    writer.inputs("valued", valued())
    _, mean, logsum = take(root / FUNCTIONAL, "masked_sum", "masked_mean", "sum_log_softmax")
    (function,) = take(root / CORE, "compute_rover_loss", verl_F=SimpleNamespace(masked_mean=mean))
    for name, options in (
        ("loss", {"rho": 1.0}),
        ("scaled", {"rho": 0.5, "next_q_scale_factor": 0.7}),
        ("no_continuation", {"rho": 2.0, "next_q_scale_factor": 0.0}),
    ):
        writer.add(name, loss(root / ACTOR, function, **options))
    rng = np.random.default_rng(22)
    logits = {"logits": 3 * rng.normal(size=(6, 5)).astype(np.float32)}
    writer.inputs("logits", {"random": logits})
    writer.add("mean_log_probs", mean_log_probs(logsum))
