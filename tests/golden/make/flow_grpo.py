"""Writes estimators/flow_grpo.*: yifan123/flow_grpo's step with a log-probability."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import peer, take

PATH = "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py"
SIGMAS = np.float32([1.0, 0.9, 0.7, 0.4, 0.1, 0.0])
STEPS = [0, 1, 3, 4]


@peer("flow_grpo", "flow_grpo", "yifan123/flow_grpo")
def main(root, writer):
    (function,) = take(root / PATH, "sde_step_with_logprob")
    rng = np.random.default_rng(45)

    def case():
        made = {name: rng.normal(size=(4, 8)) for name in ("x", "v", "x_next")}
        levels = {"sigma": SIGMAS[STEPS], "sigma_next": SIGMAS[np.array(STEPS) + 1]}
        return {name: np.float32(x) for name, x in (made | levels).items()}

    writer.inputs("latents", {name: case() for name in ("one", "two")})

    def compute(case, a, noise):
        scheduler = SimpleNamespace(sigmas=torch.from_numpy(SIGMAS), index_for_timestep=int)
        x, v, following = (
            torch.from_numpy(a[name]).reshape(4, 2, 2, 2) for name in ("x", "v", "x_next")
        )
        v.requires_grad_()
        _, logp, mean, std = function(
            scheduler, v, STEPS, x, noise_level=noise, prev_sample=following
        )
        (gradient,) = torch.autograd.grad(logp.sum(), [v])
        outputs = {"logp": logp, "mean": mean.reshape(4, 8), "std": std.reshape(4)}
        outputs["gradient"] = gradient.reshape(4, 8)
        return {name: y.detach().numpy() for name, y in outputs.items()}

    for name, noise in (("step", 0.7), ("more_noise", 1.0)):
        writer.add(name, lambda case, a, noise=noise: compute(case, a, noise))
