"""Writes estimators/gpg.*: AMAP-ML/GPG's advantages and loss."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from estimator_cases import load_inputs
from paper_code import array, passage, peer, tensor

PATH = "open-r1/src/open_r1/gpg_trainer.py"
CASES = ("full", "binary", "holes", "length_one")


def groups():
    """With log-probabilities; in one case two of three groups agree."""
    shared = load_inputs("rewards")
    return {c: {n: shared[c][n] for n in ("rewards", "mask", "old_logp")} for c in CASES}


def run(path, scale):
    def compute(case, a):
        args = SimpleNamespace(scale_rewards=scale, adjust_gd=True)
        trainer = SimpleNamespace(args=args, num_generations=4, beta=0.0, control=None)
        rewards = tensor(case, a["rewards"][..., None])[:, 0]
        names = {"self": trainer, "rewards": rewards, "n_valid_samples": 0}
        names["mean_grouped_rewards"] = rewards.view(-1, 4).mean(1)
        begin, end = "stds = rewards.view(-1", "process_slice = slice("
        names = passage(path, begin, end, **names)
        begin, end = "mean_grouped_rewards = rewards.view", "# Log the metrics"
        names = passage(path, begin, end, after="assert n_gen < max_gen", **names)
        trainer._metrics = {"train": defaultdict(lambda: [names["inverse_alpha"]])}
        logp = tensor(case, a["old_logp"]).requires_grad_()
        names |= {"per_token_logps": logp, "completion_mask": tensor(case, a["mask"])}
        begin, end = "per_token_loss = - per_token_logps", "#Log the metrics"
        loss = passage(path, begin, end, **names)["loss"]
        given = {"self": trainer, "mode": "train", "loss": loss}
        loss = passage(path, "if self.args.adjust_gd", "return loss", **given)["loss"]
        (gradient,) = torch.autograd.grad(loss, [logp])
        return {"loss": array(loss), "gradient": array(gradient).reshape(3, 4, 6)}

    return compute


@peer("gpg", "GPG", "AMAP-ML/GPG")
def main(root, writer):
    writer.inputs("groups", groups())
    for name, scale in (("loss", False), ("scaled", True)):
        # It divides by the share of groups that differ, we by 1e-5 more.
        writer.add(name, run(root / PATH, scale))
