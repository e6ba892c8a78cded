"""Writes estimators/espo.*: ML-GSAI/ESPO's lower bounds and their loss."""

from types import SimpleNamespace

import numpy as np
import torch
from denoisers import Model, batch_of, differentiated, rows, set_seed, trainer
from paper_code import peer, take

PATH = "espo/espo_trainer.py"
METHODS = ("compute_loss", "_get_elbo", "_get_elbo_mc")
SEEDS = torch.tensor([[[5, 6], [7, 8]]])


def made(methods):
    self = trainer(
        methods,
        args=SimpleNamespace(num_iterations=2, gradient_accumulation_steps=1),
        num_iterations=2,
        num_mc=2,
        beta=0.3,
        epsilon_low=0.05,
        epsilon_high=0.05,
        _step=1,
    )
    self.get_logits = lambda model, batch: model(batch)
    return self


def bounds(methods, model, a):
    inputs = batch_of(a)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)[None]
    return made(methods)._get_elbo_mc(model, ids, a["valid"].shape[1], SEEDS[0, :1], num_mc=2)


@peer("espo", "ESPO", "ML-GSAI/ESPO")
def main(root, writer):
    names = {"set_seed": set_seed, "nanmin": torch.min, "nanmax": torch.max}
    _, _, *methods = take(root / PATH, "forward_process", "compute_approx_kl", *METHODS, **names)
    rng = np.random.default_rng(42)
    cases = {}
    for name in ("one", "two"):
        a = rows(rng, 4, 4, 6, full=True)
        model = Model(torch.from_numpy(a["logp"]))
        bounds(methods, model, a)
        cases[name] = a | {"masked": model.masked()}
    writer.inputs("responses", cases)

    def bound(case, a):
        return {"elbo": bounds(methods, Model(torch.from_numpy(a["logp"])), a)[:, 0].numpy()}

    def compute(case, a):
        def loss(model):
            inputs = batch_of(a)
            for name in ("old", "ref"):
                values = bounds(methods, Model(torch.from_numpy(a[f"{name}_draws"])), a)
                inputs[f"{name}_per_token_logps"] = values
            return made(methods).compute_loss(model, inputs | {"mask_seeds": SEEDS})

        return differentiated(loss, a)

    more = {"inputs": "responses", "arguments": {"num_mc": 2}}
    writer.add("elbo", bound)
    more["arguments"] = {"num_mc": 2, "epsilon": 0.05, "beta": 0.3}
    writer.add("loss", compute)
