"""Writes estimators/openrlhf_trainer.*: OpenRLHF's losses, advantages and divergences.

Run from the repository root with a Python that has torch, and the unpacked wheel of openrlhf 0.11.2
(the folder that holds the package `openrlhf`), whose dependencies are not needed:

    python tests/golden/make/openrlhf_trainer.py FOLDER

Advantages are what its experience maker makes of rewards with one response a row, with a KL
coefficient of 0 or 0.1 and k1 of the old policy and the reference.
"""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from estimator_cases import Writer
from paper_code import take
from preference_cases import pair_cases
from source_tree import load
from torch_arrays import array, tensor, tokens

VERSION = "0.11.2"
LOSS, UTILS = "openrlhf.models.loss", "openrlhf.models.utils"
MAKER = "openrlhf.trainer.ppo_utils.experience_maker"
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

    def add(name, keys, **options):
        cases = [case for case in writer.inputs("tokens") if case != "bfloat16"]
        where = f"{LOSS}.PolicyLoss"
        compute = policy(**options)
        writer.add(name, keys, where, compute, inputs="tokens", cases=cases, arguments=options)

    add("ppo", ["ppo_clip", "aggregate"])
    add("ppo_sequence_mean", ["ppo_clip", "aggregate"], token_level_loss=False)
    add("dapo", ["dapo_clip"], clip_eps_low=0.2, clip_eps_high=0.28)
    add("dual", ["ppo_dual_clip"], dual_clip=1.5)
    add("gspo", ["gspo"], policy_loss_type="gspo", clip_eps_low=0.03, clip_eps_high=0.04)
    band = {"is_correction_level": "token", "is_correction_threshold": [0.8, 1.25]}
    add("tis", ["rollout_correction"], is_correction_mode="clip", **band)
    add("icepop", ["icepop"], is_correction_mode="mask", **band)

    def value_loss(case, a):
        values = tensor(case, a["logp"]).requires_grad_()
        old, returns = tensor(case, a["old_logp"]), tensor(case, a["token_advantages"])
        loss = module.ValueLoss(clip_eps=0.2)(values, old, returns, tensor(case, a["mask"]))
        (gradient,) = torch.autograd.grad(loss, [values])
        return {"loss": array(loss), "gradient": tokens(gradient)}

    writer.add(
        "value_loss",
        ["value_loss"],
        f"{LOSS}.ValueLoss",
        value_loss,
        inputs="tokens",
        cases=["ragged", "holes", "masked_row"],
        arguments={"clip_eps": 0.2},
    )


def add_kl(writer, utils):
    def kl(kind, unbiased):
        def compute(case, a):
            logp = tensor(case, a["logp"]).requires_grad_()
            value = utils.compute_approx_kl(
                logp, tensor(case, a["ref_logp"]), kl_estimator=kind, unbiased_gradient=unbiased
            )
            value = value * tensor(case, a["mask"])
            (gradient,) = torch.autograd.grad(value.sum(), [logp])
            return {"kl": tokens(value), "gradient": tokens(gradient)}

        return compute

    for kind, unbiased in itertools.product(("k1", "k2", "k3"), (False, True)):
        writer.add(
            f"kl_{kind}" + ("_unbiased" if unbiased else ""),
            ["kl_estimators"],
            f"{UTILS}.compute_approx_kl",
            kl(kind, unbiased),
            inputs="tokens",
            arguments={"kl_estimator": kind, "unbiased_gradient": unbiased},
        )


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

    def add(name, keys, estimator, cases=("full", "binary", "length_one"), **options):
        writer.add(
            name,
            keys,
            f"{MAKER}.RemoteExperienceMaker.{METHODS[0]}",
            advantages(estimator, **options),
            inputs="rewards",
            cases=cases,
            arguments={"estimator": estimator} | options,
        )

    equal = ("full", "binary", "length_one", "holes")
    add("rloo", ["rloo"], "rloo", equal)
    add("group_norm", ["grpo"], "group_norm", equal)
    add("dr_grpo", ["dr_grpo"], "dr_grpo", equal)
    add("flash_reinforce", ["cgpo"], "flash_reinforce", equal)
    add("reinforce_baseline", ["reinforce_pp_baseline"], "reinforce_baseline", equal)
    add("reinforce", ["reinforce_pp"], "reinforce", equal, kl_coef=0.1)
    add("gae", ["gae"], "gae", kl_coef=0.1, gamma=0.97, lambd=0.9)


def add_preferences(writer, module):
    def pairs(**options):
        loss = module.DPOLoss(0.3, **options)

        def compute(case, a):
            logp = torch.from_numpy(a["logp"]).requires_grad_()
            mask = torch.from_numpy(a["mask"])
            ref = (torch.from_numpy(a["ref_logp"]) * mask).sum(-1)
            value = loss(*(logp * mask).sum(-1), *ref)[0]
            (gradient,) = torch.autograd.grad(value, [logp])
            return {"loss": array(value), "gradient": array(gradient)}

        return compute

    writer.inputs("pairs", pair_cases())
    for name, key, options in (
        ("dpo", "dpo", {}),
        ("dpo_smoothed", "dpo", {"label_smoothing": 0.1}),
        ("ipo", "ipo", {"ipo": True}),
    ):
        writer.add(
            name,
            [key],
            f"{LOSS}.DPOLoss",
            pairs(**options),
            inputs="pairs",
            arguments={"beta": 0.3} | options,
            tolerance={"float32": 1e-4},
        )


def main():
    root = Path(sys.argv[1])
    module, utils = load(root, "openrlhf", [LOSS, UTILS], absent=("deepspeed",))
    writer = Writer(
        "openrlhf_trainer",
        "OpenRLHF",
        ["torch", "numpy"],
        "openrlhf_trainer.py",
        version=VERSION,
    )
    add_losses(writer, module)
    add_kl(writer, utils)
    add_advantages(writer, root, utils)
    add_preferences(writer, module)
    writer.save()


if __name__ == "__main__":
    main()
