"""Writes estimators/diffucoder.*: apple/ml-diffucoder's coupled log-probabilities."""

import random
from types import SimpleNamespace

import numpy as np
import torch
from denoisers import Model, batch_of, differentiated, rows, set_seed, trainer
from paper_code import peer, take

PATH = "src/open_r1/coupled_grpo.py"
METHODS = ("compute_loss", "forward_process", "_get_per_token_logps")
SEED = 11


def records(methods):
    """Of each case the masks and levels that the trainer draws with the seed."""
    rng = np.random.default_rng(41)
    cases = {}
    for name in ("one", "two"):
        a = rows(rng, 3, 4, 6)
        model = Model(torch.from_numpy(a["logp"]))
        inputs = batch_of(a)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        self = made(methods)
        self._get_per_token_logps(model, ids[None], 6, [SEED])
        _, weights, _ = self.forward_process(ids, torch.arange(9) < 3, 2, seed=SEED)
        cases[name] = a | {"masked": model.masked(), "t": 1 / np.float32(weights)}
    return cases


def made(methods):
    self = trainer(
        methods,
        args=SimpleNamespace(num_iterations=2, gradient_accumulation_steps=1),
        num_iterations=2,
        beta=0.01,
        epsilon_low=0.5,
        epsilon_high=0.5,
        _step=0,
    )
    self.get_logits = lambda model, batch: model(batch)
    return self


@peer("diffucoder", "ml-diffucoder", "apple/ml-diffucoder")
def main(root, writer):
    nothing = {"set_seed": set_seed, "random": random, "nanmin": torch.min, "nanmax": torch.max}
    functions = take(root / PATH, "selective_log_softmax", *METHODS, **nothing)
    methods = functions[1:]
    writer.inputs("responses", records(methods))

    def compute(case, a):
        def loss(model):
            self, inputs = made(methods), batch_of(a)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)[None]
            for name in ("old", "ref"):
                with torch.no_grad():
                    values = self._get_per_token_logps(
                        Model(torch.from_numpy(a[f"{name}_draws"])), ids, 6, [SEED]
                    )
                inputs[f"{name}_per_token_logps"] = values
            return self.compute_loss(model, inputs | {"mask_seeds": [SEED, 12]})

        return differentiated(loss, a)

    writer.add("loss", compute)
