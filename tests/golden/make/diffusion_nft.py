"""Writes estimators/diffusion_nft.*: the loss and the decay of NVlabs/DiffusionNFT."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import passage, peer, take

PATH = "scripts/train_nft_sd3.py"
BOUND, KL_COEF = 5.0, 0.01
STEPS = np.arange(0, 1200, 50)


@peer("diffusion_nft", "DiffusionNFT", "NVlabs/DiffusionNFT", license="Apache-2.0")
def main(root, writer):
    (decay_of,) = take(root / PATH, "return_decay")
    rng = np.random.default_rng(53)
    names = ("clean", "noise", "velocity", "ref_velocity", "anchor_velocity")

    def case():
        made = {name: rng.normal(size=(6, 8)) for name in names}
        made["level"] = rng.uniform(0.1, 1.0, 6)
        made["advantages"] = np.array([0.0, 1.5, -0.7, 7.0, -6.0, 0.2])
        return {name: np.float32(x) for name, x in made.items()}

    writer.inputs("samples", {name: case() for name in ("one", "two")})
    writer.inputs("steps", {"all": {"steps": np.int32(STEPS)}})

    def loss(case, a, beta):
        x0, noise, v, old, first = (torch.from_numpy(a[name]).reshape(6, 2, 2, 2) for name in names)
        v.requires_grad_()
        t = torch.from_numpy(a["level"]).reshape(6, 1, 1, 1)
        found = passage(
            root / PATH,
            "advantages_clip = torch.clamp(",
            "kl_div_loss = torch.mean(kl_div_loss)",
            after="loss_terms = {}",
            train_sample_batch={"advantages": torch.from_numpy(a["advantages"])[:, None]},
            j_idx=0,
            config=SimpleNamespace(
                beta=beta,
                train=SimpleNamespace(adv_clip_max=BOUND, adv_mode="all", beta=KL_COEF),
            ),
            loss_terms={},
            x0=x0,
            xt=(1 - t) * x0 + t * noise,
            t_expanded=t,
            forward_prediction=v,
            old_prediction=old,
            ref_forward_prediction=first,
        )
        (gradient,) = torch.autograd.grad(found["loss"], [v])
        gradient = gradient.reshape(6, 8)
        return {"loss": found["loss"].detach().float().numpy(), "gradient": gradient.numpy()}

    for name, beta in (("loss", 1.0), ("weaker", 0.1)):
        writer.add(name, lambda case, a, beta=beta: loss(case, a, beta))
    for kind in (1, 2):
        writer.add(
            f"decay_{kind}",
            lambda case, a, kind=kind: {
                "decay": np.float32([decay_of(int(step), kind) for step in a["steps"]])
            },
        )
