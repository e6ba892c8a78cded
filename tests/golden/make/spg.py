"""Writes estimators/spg.*: facebookresearch/SPG's bounds and their loss."""

from types import SimpleNamespace

import numpy as np
import torch
from denoisers import MASK_ID, Model, batch_of, differentiated, rows, set_seed, trainer
from paper_code import peer, take

PATH = "spg/spg_trainer.py"
METHODS = ("compute_loss", "forward_process", "_get_per_seq_logps")
DRAWS = 3


def made(methods, **options):
    args = SimpleNamespace(
        num_iterations=1,
        forward_type="random",
        num_t=DRAWS,
        min_t=0,
        max_t=1,
        use_mask_prompt=True,
        p_mask_prompt=0.15,
        mask_id=MASK_ID,
        cfg_scale=0.0,
        **options,
    )
    self = trainer(methods, args=args, beta=0.0, _step=0)
    self.get_logits = lambda model, batch, *_: model(batch)
    return self


def loss_of(methods, a, **options):
    def loss(model):
        inputs = batch_of(a) | {"mask_seeds": [9]}
        inputs["reward_mask"] = inputs["advantages"] > 0
        return made(methods, **options).compute_loss(model, inputs)

    return loss


@peer("spg", "SPG", "facebookresearch/SPG")
def main(root, writer):
    methods = take(root / PATH, *METHODS, set_seed=set_seed)
    rng = np.random.default_rng(43)
    cases = {}
    for name in ("one", "two"):
        a = rows(rng, DRAWS, 4, 6)
        model = Model(torch.from_numpy(a["logp"]))
        loss_of(methods, a, logp_estimation="elbo")(model)
        cases[name] = a | {"masked": model.masked() & a["valid"]}
    writer.inputs("responses", cases)
    for name, options in (
        ("mix", {"logp_estimation": "mix", "eubo_beta": 1.5, "mix_weight": 0.5}),
        ("upper", {"logp_estimation": "eubo", "eubo_beta": 2.0}),
        ("lower", {"logp_estimation": "elbo"}),
    ):
        writer.add(
            name, lambda case, a, options=options: differentiated(loss_of(methods, a, **options), a)
        )
