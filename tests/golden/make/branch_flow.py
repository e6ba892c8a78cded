"""Writes estimators/branch_flow.*: Fredreic1849/BranchGRPO's step of a flow."""

import numpy as np
import torch
from paper_code import peer, take

PATH = "fastvideo/train_branchgrpo_flux.py"
SIGMAS = np.float32([1.0, 0.8, 0.55, 0.2])


@peer("branch_flow", "BranchGRPO", "Fredreic1849/BranchGRPO")
def main(root, writer):
    (function,) = take(root / PATH, "flux_step_with_split")
    rng = np.random.default_rng(46)

    def case(index):
        made = {name: np.float32(rng.normal(size=(3, 6))) for name in ("x", "v", "x_next")}
        return made | {"sigmas": SIGMAS[index : index + 2]}

    writer.inputs("latents", {name: case(i) for i, name in enumerate(("first", "later", "last"))})

    def compute(case, a):
        x, v, following = (torch.from_numpy(a[name])[:, None] for name in ("x", "v", "x_next"))
        v.requires_grad_()
        sigmas = torch.from_numpy(a["sigmas"])
        found = function(v, x, 0.3, sigmas, 0, following, grpo=True, sde_solver=True)
        logp = next(y for y in found if torch.is_tensor(y) and y.shape == (3,))
        (gradient,) = torch.autograd.grad(logp.sum(), [v])
        return {"logp": logp.detach().numpy(), "gradient": gradient[:, 0].numpy()}

    writer.add("step", compute)
