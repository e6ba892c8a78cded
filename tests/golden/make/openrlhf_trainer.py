"""Writes estimators/openrlhf_trainer.*: OpenRLHF's losses, advantages and divergences.

Advantages are what its experience maker makes of rewards with one response a row, with a KL
coefficient of 0 or 0.1 and k1 of the old policy and the reference.
"""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import written
from paper_code import take
from preference_cases import pair_cases
from source_tree import load
from torch_arrays import array, tensor, tokens

VERSION = "0.11.2"
LOSS, UTILS = "openrlhf.models.loss", "openrlhf.models.utils"
METHODS = ("compute_advantages_and_returns", "get_advantages_and_returns", "get_cumulative_returns")


def add_losses(writer, module):
    def policy(**options):
        loss = module.PolicyLoss(**options)

        def compute(case, a):
            logp = tensor(case, a["logp"]).requires_grad_()
            old, rollout, mask = (tensor(case, a[n]) for n in ("old_logp", "behavior_logp", "mask"))
            values = np.broadcast_to(a["advantages"][..., None], a["mask"].shape)
            value = loss(logp, old, tensor(case, values), mask, rollout)[0]
            (gradient,) = torch.autograd.grad(value.float(), [logp])
            return {"loss": array(value), "gradient": tokens(gradient)}

        return compute

    def value_loss(case, a):
        values = tensor(case, a["logp"]).requires_grad_()
        old, returns = tensor(case, a["old_logp"]), tensor(case, a["token_advantages"])
        loss = module.ValueLoss(clip_eps=0.2)(values, old, returns, tensor(case, a["mask"]))
        (gradient,) = torch.autograd.grad(loss, [values])
        return {"loss": array(loss), "gradient": tokens(gradient)}

    writer.add("value_loss", value_loss)
    writer.each(".PolicyLoss", policy)


def add_kl(writer, utils):
    def kl(kl_estimator, unbiased_gradient):
        def compute(case, a):
            logp = tensor(case, a["logp"]).requires_grad_()
            options = {"kl_estimator": kl_estimator, "unbiased_gradient": unbiased_gradient}
            value = utils.compute_approx_kl(logp, tensor(case, a["ref_logp"]), **options)
            value = value * tensor(case, a["mask"])
            (gradient,) = torch.autograd.grad(value.sum(), [logp])
            return {"kl": tokens(value), "gradient": tokens(gradient)}

        return compute

    writer.each("compute_approx_kl", kl)


def add_advantages(writer, root, utils):
    made = take(
        root / "openrlhf" / "trainer" / "ppo_utils" / "experience_maker.py",
        *METHODS,
        itertools=itertools,
        apply_length_penalties=lambda experiences, args: None,
        compute_reward=utils.compute_reward,
    )
    methods = dict(zip(METHODS, made, strict=True))

    def advantages(estimator, kl_coef=0.0, gamma=1.0, lambd=1.0, no_std_norm=False):
        advantage = SimpleNamespace(
            estimator=estimator, gamma=gamma, lambd=lambd, no_std_norm=no_std_norm
        )
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=4),
            reward=SimpleNamespace(clip_range=None),
            algo=SimpleNamespace(advantage=advantage),
        )
        maker = SimpleNamespace(
            strategy=SimpleNamespace(args=args),
            kl_ctl=SimpleNamespace(value=kl_coef),
            advantage_estimator=estimator,
        )
        for name in METHODS[1:]:
            setattr(maker, name, methods[name].__get__(maker))

        def compute(case, a):
            mask = tensor(case, a["mask"])
            experience = SimpleNamespace(
                rewards=tensor(case, a["rewards"][..., None])[:, 0],
                index=list(range(12)),
                kl=tensor(case, a["old_logp"]) - tensor(case, a["ref_logp"]),
                action_mask=mask,
                values=tensor(case, a["values"]),
                info={},
            )
            methods[METHODS[0]](maker, [experience])
            # Masked cells hold what no loss reads.
            outputs = {"advantages": tokens(experience.advantages * mask)}
            if estimator == "gae":
                outputs["returns"] = tokens(experience.returns * mask)
            return outputs

        return compute

    writer.each("compute_advantages_and_returns", advantages)


def add_preferences(writer, module):
    def pairs(beta, **options):
        loss = module.DPOLoss(beta, **options)

        def compute(case, a):
            logp = torch.from_numpy(a["logp"]).requires_grad_()
            mask = torch.from_numpy(a["mask"])
            ref = (torch.from_numpy(a["ref_logp"]) * mask).sum(-1)
            value = loss(*(logp * mask).sum(-1), *ref)[0]
            (gradient,) = torch.autograd.grad(value, [logp])
            return {"loss": array(value), "gradient": array(gradient)}

        return compute

    writer.inputs("pairs", pair_cases())
    writer.each("DPOLoss", pairs)


@written("openrlhf_trainer", "OpenRLHF", ["torch", "numpy"], version=VERSION)
def main(writer):
    root = Path(sys.argv[1])
    module, utils = load(root, "openrlhf", [LOSS, UTILS], absent=("deepspeed",))
    add_losses(writer, module)
    add_kl(writer, utils)
    add_advantages(writer, root, utils)
    add_preferences(writer, module)
